"""Computes the rotary frequencies of a Hugging Face config: default, linear, llama3, yarn and longrope scaling.

Sources: linear: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation";
yarn: Peng et al. 2023, "YaRN"; llama3: the Llama 3.1 model card's wavelength bands; longrope: Ding et al. 2024,
"LongRoPE".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flexengine.models.fields import Fields
from flexengine.models.spec import Table
from flexengine.wording import did_you_mean, shown

SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope")
OLD_NAMES = {"su": "longrope"}
ORIGINAL = "original_max_position_embeddings"
"""Field with the sequence length before the context was extended; outside of the rope options it overrides theirs."""
THETA_RANGE = (1.001, 1e30)  # published: 1e4 to 1e8; float32 powers of more overflow, of 1 all are equal
FACTOR_RANGE = (1e-3, 1e6)  # published: 1 to 64


class RopeParameters(NamedTuple):
    """Rotary frequencies of a config.

    inv_freq: R/2 frequencies in radians per position. scaling multiplies cos and sin (yarn's attention factor).
    long_inv_freq: longrope's frequencies for runs of more than `long_from` tokens.
    """

    inv_freq: tuple[float, ...]
    scaling: float
    long_inv_freq: tuple[float, ...] = ()
    long_from: int = 0


def _parameters(config: dict, model: str) -> tuple[str, float, Fields]:
    """Read (kind, theta, options) from `rope_scaling` + `rope_theta`, or from the newer `rope_parameters`."""
    fields = Fields(model, config)
    values = fields.nested("rope_parameters") | fields.nested("rope_scaling")
    # Some configs state the original length in both places; transformers takes the outer one.
    if config.get(ORIGINAL) is not None:
        values[ORIGINAL] = config[ORIGINAL]
    options = Fields(model, values, "the rope options of config.json")
    # Older configs say "type".
    kind = values.get("rope_type", values.get("type")) or "default"
    kind = OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    theta = options.number("rope_theta", None, *THETA_RANGE) or fields.number("rope_theta", 10000.0, *THETA_RANGE)
    if kind not in SUPPORTED:
        raise ValueError(
            f"{model}: rope type {shown(kind)} in config.json is not supported{did_you_mean(str(kind), SUPPORTED)}; "
            f"supported: {', '.join(SUPPORTED)}"
        )
    return kind, theta, options


def rope_parameters(config: dict, head_dim: int, model: str = "model") -> RopeParameters:
    """Compute the frequencies for heads of width `head_dim`; `model` is for messages.

    Raises ValueError for an unknown scaling, and for an option that is absent, of a wrong type or out of range.
    """
    kind, theta, options = _parameters(config, model)
    fields = Fields(model, config)
    share = fields.number("partial_rotary_factor", 1.0, high=1.0)
    rotary_dim = int(head_dim * options.number("partial_rotary_factor", share, high=1.0))
    # float32 like the reference implementation, whose rounding is part of the trained model
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv_freq = (1.0 / (theta**exponents)).tolist()
    if kind == "linear":
        factor = options.number("factor", low=FACTOR_RANGE[0], high=FACTOR_RANGE[1])
        return RopeParameters(tuple(f / factor for f in inv_freq), 1.0)
    if kind == "llama3":
        return RopeParameters(_llama3(inv_freq, options, fields), 1.0)
    if kind == "yarn":
        return _yarn(inv_freq, theta, rotary_dim, options, fields)
    if kind == "longrope":
        return _longrope(inv_freq, options, fields)
    return RopeParameters(tuple(inv_freq), 1.0)


def rope_table(
    config: dict, head_dim: int, model: str, family: str = "", name: str = "inv_freq", partial: bool = False
) -> Table:
    """Compute the rotary frequencies of a config as a table called `name`.

    Raises ValueError as `rope_parameters`, and if the config of a family that rotates whole heads (partial=False) asks
    for less.
    """
    rope = rope_parameters(config, head_dim, model)
    rotated = 2 * len(rope.inv_freq)
    if rotated != head_dim and not partial:
        raise ValueError(
            f"{model}: partial_rotary_factor in config.json rotates {rotated} of head_dim={head_dim}; "
            f"a {family} model rotates all of it. Fetch the published config.json again"
        )
    return Table(name, *rope)


def typed_rope_table(config: dict, head_dim: int, model: str, kind: str, theta_field: str, theta: float) -> Table:
    """Compute the frequencies of one kind of layers, for configs that have several kinds.

    Such a config has an object for each kind in `rope_parameters`, or `rope_scaling` for full attention. The base,
    unless stated there, is `theta_field` (by default `theta`). Raises: ValueError as `rope_parameters`.
    """
    fields = Fields(model, config)
    nested = fields.nested("rope_parameters")
    base = fields.number(theta_field, theta, *THETA_RANGE)
    bare = {**config, "rope_theta": base, "rope_parameters": None, "rope_scaling": None}
    if any(isinstance(options, dict) for options in nested.values()):
        own = Fields(model, nested, "the rope options of config.json").nested(kind)
        bare |= {"rope_parameters": own, ORIGINAL: None}
    elif kind == "full_attention":
        bare["rope_scaling"] = config.get("rope_scaling")
    return rope_table(bare, head_dim, model, name=f"inv_freq.{kind}")


def _original(options: Fields, config: Fields) -> float:
    """Read the sequence length that the frequencies were trained with; by default the longest of the config."""
    original = options.number(ORIGINAL, config.whole("max_position_embeddings", None), low=1.0)
    if original is None:
        raise ValueError(
            f"{options.model}: {options.place} have no {ORIGINAL}, and config.json no max_position_embeddings; fetch "
            "the published one again"
        )
    return original


def _longrope(inv_freq: list[float], options: Fields, config: Fields) -> RopeParameters:
    """Divide every frequency by a factor of its own; cos and sin grow with the ratio of the lengths.

    There are two sets of factors: for runs up to the original length and for longer ones.
    """
    longest, original = config.whole("max_position_embeddings", None), _original(options, config)
    factor = options.number("factor", (longest or original) / original, *FACTOR_RANGE)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    scaling = options.number("attention_factor", grown, *FACTOR_RANGE)
    # float32, and the reciprocal first: the reference rounds in this order
    wide = torch.tensor(inv_freq, dtype=torch.float32).reciprocal()
    short, long = (
        (1.0 / (torch.tensor(options.numbers(f"{name}_factor", len(inv_freq), *FACTOR_RANGE)) * wide)).tolist()
        for name in ("short", "long")
    )
    return RopeParameters(tuple(short), scaling, tuple(long), int(original))


def _llama3(inv_freq: list[float], options: Fields, config: Fields) -> tuple[float, ...]:
    """Keep short wavelengths, divide long ones by `factor`, blend linearly in between."""
    factor = options.number("factor", low=FACTOR_RANGE[0], high=FACTOR_RANGE[1])
    original = _original(options, config)
    low, high = (options.number(f"{name}_freq_factor", low=1e-3, high=1e6) for name in ("low", "high"))
    if low >= high:
        raise ValueError(
            f"{options.model}: low_freq_factor={low:g} must be below high_freq_factor={high:g} in {options.place}; "
            "fetch the published one again"
        )

    # In radians per position a frequency turns once in `wavelength` tokens.
    def scaled(freq: float) -> float:
        wavelength = 2 * math.pi / freq
        if wavelength < original / high:
            return freq
        if wavelength > original / low:
            return freq / factor
        smooth = (original / wavelength - low) / (high - low)
        return (1 - smooth) * freq / factor + smooth * freq

    return tuple(scaled(freq) for freq in inv_freq)


def _yarn(inv_freq: list[float], theta: float, rotary_dim: int, options: Fields, config: Fields) -> RopeParameters:
    """NTK-by-parts: interpolate dimensions that turn seldom over the original length, keep those that turn often."""
    longest, original = config.whole("max_position_embeddings", None), _original(options, config)
    factor = options.number("factor", (longest or original) / original, *FACTOR_RANGE)
    beta_fast, beta_slow = (
        options.number(name, default, 1e-3, 1e6) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )

    def dimension(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    # Dimensions up to `low` keep their frequency, those from `high` on are interpolated, those between are blended.
    low, high = dimension(beta_fast), dimension(beta_slow)
    if options.switch("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # no division by zero below; the reference adds the same
    blended = []
    for i, freq in enumerate(inv_freq):
        keep = 1 - min(1.0, max(0.0, (i - low) / (high - low)))
        blended.append(freq / factor * (1 - keep) + freq * keep)
    return RopeParameters(tuple(blended), _yarn_attention_factor(factor, options))


def _yarn_attention_factor(factor: float, options: Fields) -> float:
    """Read the attention factor, or compute it: the ratio of the two mscale variants, else 0.1 ln(factor) + 1."""
    stated = options.number("attention_factor", None, *FACTOR_RANGE)
    if stated is not None:
        return stated

    one, all_dim = (options.number(name, 0.0, high=1e6) for name in ("mscale", "mscale_all_dim"))
    return _mscale(factor, one) / _mscale(factor, all_dim) if one and all_dim else _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    """Tell how much sharper attention gets over a context that is `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def score_scale(config: dict, model: str) -> float:
    """Compute the factor of attention scores in DeepSeek's models: mscale twice, for queries and keys.

    It is 1 unless `mscale_all_dim` is set.

    Raises ValueError as `rope_parameters`.
    """
    kind, _, options = _parameters(config, model)
    all_dim = options.number("mscale_all_dim", 0.0, high=1e6)
    if kind == "default" or not all_dim:
        return 1.0
    return _mscale(options.number("factor", low=FACTOR_RANGE[0], high=FACTOR_RANGE[1]), all_dim) ** 2
