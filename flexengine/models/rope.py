"""Rotary frequencies of a Hugging Face config: default, linear, llama3 and yarn scaling.

Sources: linear: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation";
yarn: Peng et al. 2023, "YaRN"; llama3: the Llama 3.1 model card's wavelength bands.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

SUPPORTED = ("default", "linear", "llama3", "yarn")


class RopeParameters(NamedTuple):
    """inv_freq: R/2 frequencies in radians per position; scaling multiplies cos and sin (yarn's attention factor)."""

    inv_freq: tuple[float, ...]
    scaling: float


def _parameters(config: dict) -> tuple[str, float, dict]:
    """(kind, theta, options) from `rope_scaling` + `rope_theta`, or from the newer `rope_parameters`."""
    options = dict(config.get("rope_parameters") or {})
    options.update(config.get("rope_scaling") or {})
    kind = options.get("rope_type", options.get("type")) or "default"
    theta = float(options.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind not in SUPPORTED:
        raise ValueError(
            f"rope type {kind!r} in the model's config is not supported; supported: {', '.join(SUPPORTED)}"
        )
    return kind, theta, options


def rope_parameters(config: dict, head_dim: int) -> RopeParameters:
    """Frequencies for heads of width `head_dim`. Raises ValueError for an unknown scaling."""
    kind, theta, options = _parameters(config)
    rotary_dim = int(head_dim * float(options.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))))
    # float32 like the reference implementation, whose rounding is part of the trained model
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv_freq = (1.0 / (theta**exponents)).tolist()
    if kind == "linear":
        return RopeParameters(tuple(f / float(options["factor"]) for f in inv_freq), 1.0)
    if kind == "llama3":
        return RopeParameters(tuple(_llama3(f, options) for f in inv_freq), 1.0)
    if kind == "yarn":
        return _yarn(inv_freq, theta, rotary_dim, options, config)
    return RopeParameters(tuple(inv_freq), 1.0)


def _llama3(freq: float, options: dict) -> float:
    """Keep short wavelengths, divide long ones by `factor`, blend linearly in between."""
    factor, original = float(options["factor"]), float(options["original_max_position_embeddings"])
    low, high = float(options["low_freq_factor"]), float(options["high_freq_factor"])
    wavelength = 2 * math.pi / freq
    if wavelength < original / high:
        return freq
    if wavelength > original / low:
        return freq / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * freq / factor + smooth * freq


def _yarn(inv_freq: list[float], theta: float, rotary_dim: int, options: dict, config: dict) -> RopeParameters:
    """NTK-by-parts: interpolate dimensions that turn seldom over the original length, keep those that turn often."""
    original = options.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = float(options.get("factor") or config["max_position_embeddings"] / original)
    beta_fast, beta_slow = float(options.get("beta_fast") or 32.0), float(options.get("beta_slow") or 1.0)

    def dimension(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    blended = []
    for i, freq in enumerate(inv_freq):
        keep = 1 - min(1.0, max(0.0, (i - low) / (high - low)))
        blended.append(freq / factor * (1 - keep) + freq * keep)
    return RopeParameters(tuple(blended), _yarn_attention_factor(factor, options))


def _yarn_attention_factor(factor: float, options: dict) -> float:
    """0.1 ln(factor) + 1, or the ratio of the two mscale variants, or what the config states."""
    if options.get("attention_factor") is not None:
        return float(options["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if options.get("mscale") and options.get("mscale_all_dim"):
        return mscale(float(options["mscale"])) / mscale(float(options["mscale_all_dim"]))
    return mscale(1.0)
