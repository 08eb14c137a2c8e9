"""How rotary positions are stretched beyond the context that a model was trained with. No torch here.

Each kind is read from config.json once, checked, with transformers' defaults filled in; engine/rope.py computes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from core.errors import BadModel

DEFAULT_THETA: Final = 10000.0

KNOWN_FIELDS: Final = {
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "finetuned",
}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor`. Source: Position Interpolation, arXiv:2306.15595."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between blended. Source: Llama 3, arXiv:2407.21783.

    low_frequency_factor, high_frequency_factor: how many turns in `original_context_tokens` a frequency makes at most
        to be low, and at least to be high.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies blended by a ramp over the dimensions, and longer cosines and sines. Source: YaRN, arXiv:2309.00071.

    beta_fast, beta_slow: turns in `original_context_tokens` at which the ramp begins and ends.
    attention_factor: by which cosines and sines are multiplied.
    truncate: the ramp begins and ends at whole dimensions.
    """

    factor: float
    original_context_tokens: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def parse_rope(fields: Mapping[str, Any], max_context_tokens: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from a config.json: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`.

    Raises: BadModel: a kind or field that we do not compute, or a value missing or out of range; by its name.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = _RopeFields(name, fields.get(name) or {}, max_context_tokens)
    given = fields.get("rope_theta")
    theta = rope.positive("rope_theta", default=DEFAULT_THETA if given is None else given)
    match rope.kind:
        case "default":
            return theta, None
        case "linear":
            return theta, LinearScaling(rope.positive("factor"))
        case "llama3":
            return theta, _llama3(rope)
        case "yarn":
            return theta, _yarn(rope)
        case other:
            raise BadModel(
                f"config.json: {name}.rope_type: only default, linear, llama3 and yarn are supported, got {other!r}"
            )


class _RopeFields:
    """The object `name` of config.json, checked field by field."""

    def __init__(self, name: str, fields: Any, max_context_tokens: int) -> None:
        """Raises: BadModel: no object, or a field that may ask for what we do not compute, such as other scalings for
        other layers."""
        if not isinstance(fields, dict):
            raise BadModel(f"config.json: {name}: must be an object, got {fields!r}")
        self.name = name
        self._fields = fields
        self._max_context_tokens = max_context_tokens
        if unknown := sorted(fields.keys() - KNOWN_FIELDS):
            raise BadModel(f"config.json: {name}.{unknown[0]}: not supported")
        if fields.get("partial_rotary_factor") not in (None, 1):
            raise BadModel(f"config.json: {name}.partial_rotary_factor: only 1.0 is supported")

    @property
    def kind(self) -> Any:
        """`rope_type`, or `type` in older files."""
        return self._fields.get("rope_type", self._fields.get("type", "default"))

    @property
    def original_context_tokens(self) -> int:
        return int(self.positive("original_max_position_embeddings", default=self._max_context_tokens))

    def get(self, field: str) -> Any:
        """The value, or None."""
        return self._fields.get(field)

    def positive(self, field: str, default: float | None = None) -> float:
        """A number above 0. Raises: BadModel: it is something else, or missing without a default."""
        value = self._fields.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= sys.float_info.max:
            raise BadModel(f"config.json: {self.name}.{field}: need a number above 0, got {value!r}")
        return float(value)


def _llama3(rope: _RopeFields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.positive("factor"),
        low_frequency_factor=rope.positive("low_freq_factor"),
        high_frequency_factor=rope.positive("high_freq_factor"),
        original_context_tokens=rope.original_context_tokens,
    )
    if scaling.low_frequency_factor >= scaling.high_frequency_factor:
        raise BadModel(f"config.json: {rope.name}.low_freq_factor: must be below high_freq_factor")
    return scaling


def _yarn(rope: _RopeFields) -> YarnScaling:
    return YarnScaling(
        factor=rope.positive("factor"),
        original_context_tokens=rope.original_context_tokens,
        beta_fast=rope.positive("beta_fast", default=32.0),
        beta_slow=rope.positive("beta_slow", default=1.0),
        attention_factor=rope.positive("attention_factor", default=_yarn_attention_factor(rope)),
        truncate=rope.get("truncate") is not False,
    )


def _yarn_attention_factor(rope: _RopeFields) -> float:
    """0.1 ln(factor) + 1, or DeepSeek's quotient of two such terms where both of its weights are given."""
    factor = rope.positive("factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _magnitude(factor, rope.positive("mscale")) / _magnitude(factor, rope.positive("mscale_all_dim"))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
