"""Rotary positions: the angle of each pair of dimensions at each position, float32, as transformers computes it.

Source: RoPE, arXiv:2104.09864; the scalings: see engine/rope_scaling.py, checked against transformers'
modeling_rope_utils.py (tests/engine/test_rope.py).
"""

from __future__ import annotations

import math

import torch

from engine.model_config import ModelConfig
from engine.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling


def rotary_tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's angles, each [max_context_tokens, head_dim / 2], float32.

    They are already multiplied by the scaling's attention factor: whoever rotates with them needs to know no scaling.
    """
    positions = torch.arange(config.max_context_tokens).float().unsqueeze(-1)
    angles = positions * inverse_frequencies(config)
    factor = attention_factor(config)
    return angles.cos() * factor, angles.sin() * factor


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians by which each pair of dimensions turns from one position to the next, [head_dim / 2], float32."""
    plain = plain_frequencies(config.rope_theta, config.head_dim)
    match config.rope_scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return llama3_frequencies(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(config, scaling)


def plain_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """Frequencies without scaling, [head_dim / 2], float32."""
    return 1.0 / _periods(theta, head_dim)


def llama3_frequencies(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Scaled frequencies of plain ones, [head_dim / 2], float32."""
    wavelengths = 2 * math.pi / plain
    longest_kept = scaling.original_context_tokens / scaling.high_frequency_factor
    shortest_scaled = scaling.original_context_tokens / scaling.low_frequency_factor
    turns = scaling.original_context_tokens / wavelengths
    kept = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    blended = (1 - kept) * plain / scaling.factor + kept * plain
    scaled = torch.where(wavelengths > shortest_scaled, plain / scaling.factor, blended)
    return torch.where(wavelengths < longest_kept, plain, scaled)


def attention_factor(config: ModelConfig) -> float:
    """By which cosines and sines are multiplied."""
    return config.rope_scaling.attention_factor if isinstance(config.rope_scaling, YarnScaling) else 1.0


def _periods(theta: float, head_dim: int) -> torch.Tensor:
    return theta ** (torch.arange(0, head_dim, 2).float() / head_dim)


def _yarn(config: ModelConfig, scaling: YarnScaling) -> torch.Tensor:
    """Scaled frequencies: a ramp over the pairs from kept to divided by the factor."""
    periods = _periods(config.rope_theta, config.head_dim)
    low, high = _yarn_ramp(config, scaling)
    ramp = ((torch.arange(config.head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_ramp(config: ModelConfig, scaling: YarnScaling) -> tuple[float, float]:
    """Dimensions at which the ramp begins and ends."""

    def dimension(turns: float) -> float:
        """The (fractional) pair that makes so many turns within the original context."""
        context = scaling.original_context_tokens / (turns * 2 * math.pi)
        return config.head_dim * math.log(context) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    return low, high + 0.001 if low == high else high
