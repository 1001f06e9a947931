"""Rotary frequencies of a Hugging Face config: default, linear, llama3 and yarn scaling.

Sources: linear: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation";
yarn: Peng et al. 2023, "YaRN"; llama3: the Llama 3.1 model card's wavelength bands.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flexengine.models.fields import Fields
from flexengine.wording import did_you_mean, shown

SUPPORTED = ("default", "linear", "llama3", "yarn")
THETA_RANGE = (1.001, 1e30)  # published: 1e4 to 1e8; float32 powers of more overflow, of 1 all are equal
FACTOR_RANGE = (1e-3, 1e6)  # published: 1 to 64


class RopeParameters(NamedTuple):
    """inv_freq: R/2 frequencies in radians per position; scaling multiplies cos and sin (yarn's attention factor)."""

    inv_freq: tuple[float, ...]
    scaling: float


def _parameters(config: dict, model: str) -> tuple[str, float, Fields]:
    """(kind, theta, options) from `rope_scaling` + `rope_theta`, or from the newer `rope_parameters`."""
    fields = Fields(model, config)
    values = fields.nested("rope_parameters") | fields.nested("rope_scaling")
    options = Fields(model, values, "the rope options of config.json")
    kind = values.get("rope_type", values.get("type")) or "default"
    theta = options.number("rope_theta", None, *THETA_RANGE) or fields.number("rope_theta", 10000.0, *THETA_RANGE)
    if kind not in SUPPORTED:
        raise ValueError(
            f"{model}: rope type {shown(kind)} in config.json is not supported{did_you_mean(str(kind), SUPPORTED)}; "
            f"supported: {', '.join(SUPPORTED)}"
        )
    return kind, theta, options


def rope_parameters(config: dict, head_dim: int, model: str = "model") -> RopeParameters:
    """Frequencies for heads of width `head_dim`; `model` is for messages.

    Raises ValueError for an unknown scaling, and for an option that is absent, of a wrong type or out of range.
    """
    kind, theta, options = _parameters(config, model)
    share = Fields(model, config).number("partial_rotary_factor", 1.0, high=1.0)
    rotary_dim = int(head_dim * options.number("partial_rotary_factor", share, high=1.0))
    # float32 like the reference implementation, whose rounding is part of the trained model
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv_freq = (1.0 / (theta**exponents)).tolist()
    if kind == "linear":
        factor = options.number("factor", low=FACTOR_RANGE[0], high=FACTOR_RANGE[1])
        return RopeParameters(tuple(f / factor for f in inv_freq), 1.0)
    if kind == "llama3":
        return RopeParameters(_llama3(inv_freq, options), 1.0)
    if kind == "yarn":
        return _yarn(inv_freq, theta, rotary_dim, options, config)
    return RopeParameters(tuple(inv_freq), 1.0)


def _llama3(inv_freq: list[float], options: Fields) -> tuple[float, ...]:
    """Keep short wavelengths, divide long ones by `factor`, blend linearly in between."""
    factor = options.number("factor", low=FACTOR_RANGE[0], high=FACTOR_RANGE[1])
    original = options.number("original_max_position_embeddings", low=1.0)
    low, high = (options.number(f"{name}_freq_factor", low=1e-3, high=1e6) for name in ("low", "high"))
    if low >= high:
        raise ValueError(
            f"{options.model}: low_freq_factor={low:g} must be below high_freq_factor={high:g} in {options.place}; "
            "fetch the published one again"
        )

    def scaled(freq: float) -> float:
        wavelength = 2 * math.pi / freq
        if wavelength < original / high:
            return freq
        if wavelength > original / low:
            return freq / factor
        smooth = (original / wavelength - low) / (high - low)
        return (1 - smooth) * freq / factor + smooth * freq

    return tuple(scaled(freq) for freq in inv_freq)


def _yarn(inv_freq: list[float], theta: float, rotary_dim: int, options: Fields, config: dict) -> RopeParameters:
    """NTK-by-parts: interpolate dimensions that turn seldom over the original length, keep those that turn often."""
    longest = Fields(options.model, config).whole("max_position_embeddings", None)
    original = options.number("original_max_position_embeddings", longest, low=1.0)
    if original is None:
        raise ValueError(
            f"{options.model}: yarn needs max_position_embeddings in config.json; fetch the published one again"
        )
    factor = options.number("factor", (longest or original) / original, *FACTOR_RANGE)
    beta_fast, beta_slow = (
        options.number(name, default, 1e-3, 1e6) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )

    def dimension(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if options.switch("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    blended = []
    for i, freq in enumerate(inv_freq):
        keep = 1 - min(1.0, max(0.0, (i - low) / (high - low)))
        blended.append(freq / factor * (1 - keep) + freq * keep)
    return RopeParameters(tuple(blended), _yarn_attention_factor(factor, options))


def _yarn_attention_factor(factor: float, options: Fields) -> float:
    """0.1 ln(factor) + 1, or the ratio of the two mscale variants, or what the config states."""
    stated = options.number("attention_factor", None, *FACTOR_RANGE)
    if stated is not None:
        return stated

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_dim = (options.number(name, 0.0, high=1e6) for name in ("mscale", "mscale_all_dim"))
    return mscale(one) / mscale(all_dim) if one and all_dim else mscale(1.0)
