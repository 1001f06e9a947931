"""Computes the rotary frequencies of a Hugging Face config: default, linear, dynamic, llama3, yarn, longrope and
proportional, which turns the first pairs of a whole head alone.

A config may tell its options twice: in `rope_parameters` as written today, and in `rope_scaling`, `rope_theta` and
others as written before. Readers take different ones of them, so what differs is refused.

Sources: linear: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation";
yarn: Peng et al. 2023, "YaRN"; llama3: the Llama 3.1 model card's wavelength bands; longrope: Ding et al. 2024,
"LongRoPE".
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from flexengine.models.fields import Fields
from flexengine.models.spec import Table
from flexengine.wording import did_you_mean, shown

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
OLD_NAMES = {"su": "longrope"}
ORIGINAL = "original_max_position_embeddings"
"""Field with the sequence length before the context was extended."""
OUTSIDE = {name: name for name in ("rope_theta", "partial_rotary_factor", ORIGINAL)}
"""Options that a config may state outside of its rope options instead: their names inside -> outside."""
THETA = 10000.0
"""Base of the rotations in a config that states none, unless its family has another."""
THETA_RANGE = (1.001, 1e30)  # published: 1e4 to 1e8; float32 powers of more overflow, of 1 all are equal
FACTOR_RANGE = (1e-3, 1e6)  # published: 1 to 64


class RopeParameters(NamedTuple):
    """Rotary frequencies of a config.

    inv_freq: R/2 frequencies in radians per position. scaling multiplies cos and sin (yarn's attention factor).
    long_inv_freq: longrope's frequencies for runs of more than `long_from` tokens. longest: the longest sequence that
    has these frequencies; None if all have them. extended: how they are scaled for more positions than the model was
    first trained with, in words, and reach: up to which; "" and 0 where they are not, or nothing says so.
    """

    inv_freq: tuple[float, ...]
    scaling: float
    long_inv_freq: tuple[float, ...] = ()
    long_from: int = 0
    longest: int | None = None
    extended: str = ""
    reach: int = 0


class _Options(NamedTuple):
    """What a config tells of its rotations: their kind, base, the share of a head that is rotated, other options."""

    kind: str
    theta: float
    share: float
    options: Fields


def _options(
    config: dict, model: str, theta: float = THETA, share: float = 1.0, theta_field: str = "rope_theta"
) -> _Options:
    """Read the rope options of a config, which are `theta` and `share` where it states none.

    theta_field: the field outside of the options that states the base. Raises: ValueError for what is told twice in
    different ways, or out of range.
    """
    fields, outside = Fields(model, config), {**OUTSIDE, "rope_theta": theta_field}
    values = _one_of(fields, outside)
    if typed := [name for name, value in values.items() if isinstance(value, dict)]:
        raise ValueError(
            f"{model}: config.json has rope options for {', '.join(map(shown, typed))}, but this model has one set for"
            " all layers. Give the options in rope_parameters directly"
        )
    for inner, outer in outside.items():
        stated, other = values.get(inner), config.get(outer)
        if stated is not None and other is not None and stated != other:
            raise ValueError(
                f"{model}: config.json has {inner}={shown(stated)} in its rope options and {outer}={shown(other)}"
                " outside of them, of which readers take different ones. Remove the wrong one"
            )
        values[inner] = other if stated is None else stated
    options = Fields(model, values, "the rope options of config.json")
    return _Options(
        _kind_of(values, model),
        options.number("rope_theta", theta, *THETA_RANGE),
        options.number("partial_rotary_factor", share, high=1.0),
        options,
    )


def _one_of(fields: Fields, outside: dict[str, str]) -> dict:
    """Give the options of `rope_parameters` or of the older `rope_scaling`. Raises ValueError if they differ.

    outside: option -> the field outside of the options that may state it instead.
    """
    newer, older = fields.nested("rope_parameters"), fields.nested("rope_scaling")
    if not newer or not older:
        return newer or older

    def whole(options: dict) -> dict:
        found = {inner: fields.values.get(outer) for inner, outer in outside.items()}
        found |= {name: value for name, value in options.items() if name != "type" and value is not None}
        return found | {"rope_type": _kind_of(options, fields.model)}

    a, b = whole(newer), whole(older)
    if differing := [name for name in {**a, **b} if a.get(name) != b.get(name)]:
        names = [(name, shown(name)[1:-1]) for name in differing[:3]]  # abridged, without quotes
        other = ", ".join(f"{told}={shown(a.get(name))} and {shown(b.get(name))}" for name, told in names)
        raise ValueError(
            f"{fields.model}: config.json has rope_parameters and rope_scaling, which differ ({other}), and readers"
            " take different ones. Give all options in rope_parameters, and set rope_scaling to null"
        )
    return newer


def _kind_of(options: dict, model: str) -> str:
    """Read the rope type, which older configs call "type". Raises ValueError for two that differ, and unknown ones."""
    stated = [options[name] for name in ("rope_type", "type") if options.get(name) is not None] or ["default"]
    kinds = [OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in stated]
    if len(kinds) > 1 and kinds[0] != kinds[1]:  # what json reads as NaN is not even itself
        raise ValueError(
            f"{model}: config.json has rope_type={shown(stated[0])} and type={shown(stated[1])} in its rope options, of"
            " which readers take different ones. Remove the wrong one"
        )
    if kinds[0] not in SUPPORTED:
        raise ValueError(
            f"{model}: rope type {shown(kinds[0])} in config.json is not supported"
            f"{did_you_mean(str(kinds[0]), SUPPORTED)}; supported: {', '.join(SUPPORTED)}"
        )
    return kinds[0]


def rope_parameters(
    config: dict,
    head_dim: int,
    model: str = "model",
    theta: float = THETA,
    share: float = 1.0,
    theta_field: str = "rope_theta",
) -> RopeParameters:
    """Compute the frequencies for heads of width `head_dim`; `model` is for messages.

    theta, share: base and rotated share of a head in a config that states none. theta_field: the name of the base
    outside of the rope options. Raises ValueError for an unknown scaling, for options that are told twice and differ,
    and for one that is absent, of a wrong type or out of range.
    """
    kind, theta, share, options = _options(config, model, theta, share, theta_field)
    fields = Fields(model, config)
    rotary_dim = int(head_dim * share)
    # float32 like the reference implementation, whose rounding is part of the trained model
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv_freq = (1.0 / (theta**exponents)).tolist()
    if kind in ("linear", "proportional"):
        whole_head, unstated = kind == "proportional", {"default": 1.0} if kind == "proportional" else {}
        inv_freq = _proportional(theta, share, head_dim) if whole_head else inv_freq
        factor = options.number("factor", low=FACTOR_RANGE[0], high=FACTOR_RANGE[1], **unstated)
        told = f"{kind} by {factor:g}" if factor != 1.0 else ""
        return RopeParameters(tuple(f / factor for f in inv_freq), 1.0, extended=told)
    if kind == "dynamic":
        # The base grows with a sequence beyond this length, and is what it is for all others.
        options.number("factor", low=FACTOR_RANGE[0], high=FACTOR_RANGE[1])
        return RopeParameters(tuple(inv_freq), 1.0, longest=fields.whole("max_position_embeddings"))
    if kind == "llama3":
        told = f"llama3 by {options.number('factor'):g} from {_original(options, fields):g} positions"
        return RopeParameters(_llama3(inv_freq, options, fields), 1.0, extended=told)
    if kind == "yarn":
        return _yarn(inv_freq, theta, rotary_dim, options, fields)
    if kind == "longrope":
        return _longrope(inv_freq, options, fields)
    return RopeParameters(tuple(inv_freq), 1.0)


def rope_table(
    config: dict,
    head_dim: int,
    model: str,
    family: str = "",
    name: str = "inv_freq",
    partial: bool = False,
    **unstated: Any,
) -> Table:
    """Compute the rotary frequencies of a config as a table called `name`.

    unstated: as `rope_parameters` takes them. Raises ValueError as `rope_parameters`, and if the config of a family
    that rotates whole heads (partial=False) asks for less.
    """
    rope = rope_parameters(config, head_dim, model, **unstated)
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
    unless stated there, is `theta_field` (by default `theta`). Raises: ValueError as `rope_parameters`, and for options
    that are of no kind.
    """
    fields = Fields(model, config)
    nested = fields.nested("rope_parameters")
    fields.number(theta_field, theta, *THETA_RANGE)  # names the field if its value is wrong
    typed = any(isinstance(options, dict) for options in nested.values())
    if nested and not typed:
        raise ValueError(
            f"{model}: rope_parameters in config.json has {', '.join(map(shown, nested))} for no kind of layers. Put"
            " them into full_attention and sliding_attention there, which this model has"
        )
    bare = {**config, "rope_parameters": Fields(model, nested, "the rope options of config.json").nested(kind)}
    bare |= {ORIGINAL: None} if typed else {}  # transformers reads it for options of all layers alone
    bare |= {"rope_scaling": None} if kind != "full_attention" else {}
    return rope_table(bare, head_dim, model, name=f"inv_freq.{kind}", theta=theta, theta_field=theta_field)


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
    told = f"longrope by {factor:g} from {original:g} positions"
    return RopeParameters(tuple(short), scaling, tuple(long), int(original), extended=told)


def _proportional(theta: float, share: float, head_dim: int) -> list[float]:
    """Turn the first pairs of a head as if all of it were rotated, and the others not at all."""
    turned = int(share * head_dim // 2)
    exponents = torch.arange(0, 2 * turned, 2, dtype=torch.int64).float() / head_dim
    return [*(1.0 / (theta**exponents)).tolist(), *[0.0] * (head_dim // 2 - turned)]


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
    told, reach = f"yarn by {factor:g} from {original:g} positions", int(factor * original)
    return RopeParameters(tuple(blended), _yarn_attention_factor(factor, options), extended=told, reach=reach)


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
    kind, _, _, options = _options(config, model)
    all_dim = options.number("mscale_all_dim", 0.0, high=1e6)
    if kind == "default" or not all_dim:
        return 1.0
    return _mscale(options.number("factor", low=FACTOR_RANGE[0], high=FACTOR_RANGE[1]), all_dim) ** 2
