"""Who asks, by the key they send, and how patient they are; and what an operator's policy leaves of their request."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from core.errors import BadRequest, Unauthenticated
from core.request import GenerateRequest
from router.admission.policy import ANONYMOUS, AdmissionPolicy

AUTHORIZATION: Final = "authorization"  # an HTTP header, and a key of gRPC metadata
SLO_TTFT: Final = "x-slo-ttft-ms"
TRACEPARENT: Final = "traceparent"
MAX_SLO_TTFT_MS: Final = 86_400_000.0
_DECIMAL: Final = re.compile(r"[0-9]{1,16}(\.[0-9]{1,16})?")  # float() also reads 1_0, nan, and digits of all scripts


@dataclass(frozen=True, slots=True)
class Caller:
    """tenant: whose key was sent. max_ttft_s: rather refused than served with a later first token."""

    tenant: str = ANONYMOUS
    max_ttft_s: float | None = None


class Keys:
    """The API keys of a policy. Without any, nobody needs one, and what is sent is not looked at."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._anonymous = policy.anonymous is not None
        self._tenants = {digest: name for name, tenant in policy.tenants.items() for digest in tenant.keys_sha256}

    def caller(self, authorization: str | None, slo_ttft_ms: str | None) -> Caller:
        """Raises: Unauthenticated; BadRequest: naming the header."""
        return Caller(self._tenant(authorization), _seconds(slo_ttft_ms))

    def _tenant(self, authorization: str | None) -> str:
        """A key is looked up by its digest: how long that takes tells nothing of the keys that we know."""
        if not self._tenants or (authorization is None and self._anonymous):
            return ANONYMOUS
        if authorization is None:
            raise Unauthenticated("an API key is needed: Authorization: Bearer KEY")
        scheme, _, key = authorization.partition(" ")
        # HTTP's headers may be any bytes, which aiohttp spells with surrogates.
        tenant = self._tenants.get(hashlib.sha256(key.strip().encode(errors="surrogateescape")).hexdigest())
        if scheme.lower() != "bearer" or tenant is None:
            raise Unauthenticated("this API key is not known here")
        return tenant


def only(name: str, values: Sequence[str]) -> str | None:
    """The value of a header, None: it is not there. Of two a proxy may have looked at the other one.

    Raises: BadRequest: naming it.
    """
    if len(values) > 1:
        raise BadRequest(name, f"is sent {len(values)} times")
    return values[0] if values else None


def degraded(request: GenerateRequest, policy: AdmissionPolicy) -> GenerateRequest:
    """What of `request` is served: perhaps a shorter output, perhaps as batch work."""
    tenant, degrade = policy.tenant(request.tenant), policy.degrade
    most = min((cap for cap in (tenant.max_output_tokens, degrade.max_output_tokens) if cap), default=None)
    if most is not None and request.stop.max_tokens > most:
        stop = replace(request.stop, max_tokens=most, min_tokens=min(most, request.stop.min_tokens))
        request = replace(request, stop=stop)
    if tenant.batch or degrade.everything_batch:
        request = replace(request, priority=max(1, request.priority))
    return request


def _seconds(slo_ttft_ms: str | None) -> float | None:
    if slo_ttft_ms is None:
        return None
    value_ms = float(slo_ttft_ms) if _DECIMAL.fullmatch(slo_ttft_ms.strip()) else math.nan
    if not 0 < value_ms <= MAX_SLO_TTFT_MS:
        raise BadRequest(SLO_TTFT, f"must be milliseconds in (0, {MAX_SLO_TTFT_MS:g}], got {slo_ttft_ms[:32]!r}")
    return value_ms / 1000
