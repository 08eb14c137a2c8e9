"""What an operator says of tenants, queue and load: the section `admission` of the policy file."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from router.strict import Strict

ANONYMOUS: Final = ""  # the tenant of who sends no key
BURST_S: Final = 60.0  # what a tenant may use at once, in seconds of its rate, where nothing is said

TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
KeyDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
# Bounded, as is the rate below, so that what is computed of them overflows nowhere, Redis included.
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Tokens = Count


class Band(StrEnum):
    """Strict order: batch work gets what interactive work leaves, and a share once it has waited long."""

    INTERACTIVE = "interactive"  # priority 0 and below
    BATCH = "batch"  # priority above 0


class TenantPolicy(Strict):
    """One tenant; what is None is not limited.

    keys_sha256: SHA-256 of each of its API keys, in hex. weight: of its share, against the others in its band.
    max_concurrent: most outputs open at a time, of which each choice of a request is one. tokens_per_s: of prompts and
    outputs, in the long run; burst_tokens: how many at once, a minute's where it is not given. batch: all of its
    requests are batch work. max_output_tokens: longest output of a choice; a longer one ends there, with finish reason
    "length".
    """

    keys_sha256: list[KeyDigest] = Field(default_factory=list)
    weight: Annotated[float, Field(ge=0.01, le=1000)] = 1.0
    max_concurrent: Count | None = None
    tokens_per_s: Annotated[float, Field(ge=0.001, le=1e9)] | None = None
    burst_tokens: Tokens | None = None
    batch: bool = False
    max_output_tokens: Tokens | None = None

    @property
    def bucket_tokens(self) -> float:
        """What its token bucket holds; 0 without a rate."""
        return float(self.burst_tokens or (self.tokens_per_s or 0.0) * BURST_S)

    @model_validator(mode="after")
    def _burst_needs_a_rate(self) -> TenantPolicy:
        if self.burst_tokens is not None and self.tokens_per_s is None:
            raise PydanticCustomError("burst_without_rate", "burst_tokens bounds nothing without tokens_per_s")
        return self


class BandPolicy(Strict):
    """max_wait_s: longest wait in the router's queue. max_ttft_s: whose first token is predicted later is refused at
    once; None: nobody is, unless the request itself says how long it may take."""

    max_wait_s: Seconds = 30.0
    max_ttft_s: Seconds | None = None


class QueuePolicy(Strict):
    """max_waiting: most requests that wait in this router. batch_ageing_s: batch work that has waited so long gets its
    share although interactive work waits. tokens_ahead: prompt tokens that may be out, for each worker, before the
    rest waits here; None: as the router was started."""

    max_waiting: Count = 1024
    interactive: BandPolicy = BandPolicy()
    batch: BandPolicy = BandPolicy(max_wait_s=300.0)
    batch_ageing_s: Seconds = 30.0
    tokens_ahead: Tokens | None = None

    def band(self, band: Band) -> BandPolicy:
        return self.interactive if band is Band.INTERACTIVE else self.batch


class DegradePolicy(Strict):
    """Steps for an overload, for all tenants. max_output_tokens: as in TenantPolicy. everything_batch: all requests are
    batch work: none goes before another, and each may wait as long as batch work may. smaller_model: by a name that
    clients ask for, the name of what answers instead; both are served here."""

    max_output_tokens: Tokens | None = None
    everything_batch: bool = False
    smaller_model: dict[str, str] = Field(default_factory=dict)


class AdmissionPolicy(Strict):
    """`anonymous`: who sends no key; None: as unlimited as anyone while no tenant has keys, refused once one has."""

    tenants: dict[TenantName, TenantPolicy] = Field(default_factory=dict)
    anonymous: TenantPolicy | None = None
    queue: QueuePolicy = QueuePolicy()
    degrade: DegradePolicy = DegradePolicy()

    def tenant(self, name: str) -> TenantPolicy:
        """Also of a tenant that a reload took away while it still has requests."""
        found = self.anonymous if name == ANONYMOUS else self.tenants.get(name)
        return found or _UNLIMITED

    @model_validator(mode="after")
    def _keys_are_of_one_tenant(self) -> AdmissionPolicy:
        owners: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for digest in tenant.keys_sha256:
                if owners.setdefault(digest, name) != name:
                    raise PydanticCustomError("shared_key", f"tenants.{name}: has a key of tenant {owners[digest]}")
        if self.anonymous is not None and self.anonymous.keys_sha256:
            raise PydanticCustomError("anonymous_keys", "anonymous: is who sends no key, so it has none")
        return self


_UNLIMITED: Final = TenantPolicy()
