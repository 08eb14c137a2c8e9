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
    periods = config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    match config.rope_scaling:
        case None:
            return 1.0 / periods
        case LinearScaling(factor):
            return 1.0 / periods / factor
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / periods, scaling)
        case YarnScaling() as scaling:
            return _yarn(periods, config, scaling)


def attention_factor(config: ModelConfig) -> float:
    """By which cosines and sines are multiplied."""
    return config.rope_scaling.attention_factor if isinstance(config.rope_scaling, YarnScaling) else 1.0


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Scaled frequencies of plain ones."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_context_tokens / scaling.high_frequency_factor
    shortest_scaled = scaling.original_context_tokens / scaling.low_frequency_factor
    turns = scaling.original_context_tokens / wavelengths
    kept = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    blended = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    scaled = torch.where(wavelengths > shortest_scaled, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, scaled)


def _yarn(periods: torch.Tensor, config: ModelConfig, scaling: YarnScaling) -> torch.Tensor:
    """Scaled frequencies of plain periods: a ramp from kept to divided by the factor."""
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
