"""What a row of `variant_rows.py` may say of a decoder, and what reads from configs that which rows leave open.

A reader of kinds takes the number of layers and gives the kind of attention of each, one of rotations the kinds and
gives whether each layer rotates. Both raise ValueError as `sizes.layer_types`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from flexengine.models.block_shape import AnyNorm, BlockNames, Mixer, Norms
from flexengine.models.decoder import DecoderNames
from flexengine.models.fields import Fields
from flexengine.models.rope import THETA
from flexengine.models.routed import Routed
from flexengine.models.sizes import FULL, SLIDING, Sizes, layer_types, read_window
from flexengine.models.spec import ModelSpec
from flexengine.ops.qk_norm import NormSpan
from flexengine.ops.rmsnorm import NormStyle
from flexengine.wording import shown

T = TypeVar("T")
Adjusted = Callable[[Fields], dict]
Kinds = Callable[[Fields, int], list[str]]
Rotated = Callable[[Fields, list[str]], list[bool]]
Number = Callable[[Fields], float]
RMS = NormStyle(0.0)
"""The norm of most rows; `Variant.eps` says what it adds."""
Switch = bool | str
"""A switch, or the field of the config that is one."""


def all_full(fields: Fields, count: int) -> list[str]:
    """Read the kinds of layers of a type that has no windows."""
    return layer_types(fields, count, [FULL] * count, (FULL,))


def all_windows(fields: Fields, count: int) -> list[str]:
    """Read the kinds of layers where all have a window, if the config has one."""
    return layer_types(fields, count, [SLIDING if read_window(fields) else FULL] * count)


def all_windows_named(fields: Fields, count: int) -> list[str]:
    """Windows where layer_types names them alone."""
    return layer_types(fields, count, [FULL] * count)


def always(value: T) -> Callable[[Fields], T]:
    """Read nothing: give a value for all configs."""
    return lambda fields: value


def one_kind(kind: str) -> Kinds:
    """Give all layers one kind, whatever a config says of its layers."""
    return lambda fields, count: [kind] * count


def last_full_of(number: int, field: str = "") -> Kinds:
    """Read the kinds of layers where the last of every so many has no window. field: what else may state how many."""

    def kinds(fields: Fields, count: int) -> list[str]:
        step = fields.whole(field, number) if field else number
        default = [SLIDING if (i + 1) % step else FULL for i in range(count)]
        return layer_types(fields, count, default, older=field or None)

    return kinds


def full_every(number: int, first: int) -> Kinds:
    """Read the kinds of layers where every so many, from the layer `first` on, one has no window."""

    def kinds(fields: Fields, count: int) -> list[str]:
        step = fields.whole("sliding_window_pattern", number) if fields.values.get("layer_types") is None else number
        window = bool(read_window(fields))
        return layer_types(fields, count, [SLIDING if window and (i - first) % step else FULL for i in range(count)])

    return kinds


def upper_windows(fields: Fields, count: int) -> list[str]:
    """Read the kinds of layers where those from `max_window_layers` on have a window."""
    full = min(count, fields.whole("max_window_layers", count, least=0)) if read_window(fields) else count
    return layer_types(fields, count, [FULL] * full + [SLIDING] * (count - full))


def smollm_kinds(fields: Fields, count: int) -> list[str]:
    """Read the kinds of layers where those without rotation have a window, if windows are switched on."""
    windows = fields.switch("use_sliding_window", False) and bool(read_window(fields))
    default = [FULL if rotates or not windows else SLIDING for rotates in smollm_rotated(fields, [FULL] * count)]
    return layer_types(fields, count, default, (FULL, SLIDING) if windows else (FULL,))


def smollm_rotated(fields: Fields, kinds: list[str]) -> list[bool]:
    """A list of ones for layers that rotate, or every so many layers one that does not."""
    stated, step = fields.values.get("no_rope_layers"), fields.whole("no_rope_layer_interval", 4)
    if stated is None:
        return [(i + 1) % step != 0 for i in range(len(kinds))]
    if not isinstance(stated, list) or len(stated) != len(kinds) or any(x not in (0, 1) for x in stated):
        raise ValueError(
            f"{fields.model}: no_rope_layers={shown(stated)} in config.json; expected a list of "
            f"num_hidden_layers={len(kinds)} entries, each 0 or 1. Fetch the published config.json again"
        )
    return [bool(x) for x in stated]


def indexed(fields: Fields, count: int) -> list[str]:
    """Read the kinds of layers where an indexer chooses keys: all of them, in sequences that are short enough."""
    layer_types(fields, count, [], ("indexed_attention", "deepseek_sparse_attention"))  # the second is an older name
    return [FULL] * count


def everywhere(fields: Fields, kinds: list[str]) -> list[bool]:
    """Rotate in all layers."""
    return [True] * len(kinds)


def in_windows(fields: Fields, kinds: list[str]) -> list[bool]:
    """Rotate in layers with a window."""
    return [kind == SLIDING for kind in kinds]


def in_windows_if_any(fields: Fields, kinds: list[str]) -> list[bool]:
    """Rotate in layers with a window, or in all where the config has no window."""
    return [kind == SLIDING or not read_window(fields) for kind in kinds]


def side_by_side(fields: Fields) -> bool:
    """Rotate pairs side by side, unless the config says otherwise."""
    return fields.switch("rope_interleave", True)


def times(name: str, default: float = 1.0) -> Number:
    """Read a factor."""
    return lambda fields: fields.number(name, default, low=1e-6, high=1e6)


def over(name: str, default: float = 1.0) -> Number:
    """Read a divisor as a factor."""
    return lambda fields: 1.0 / fields.number(name, default, low=1e-6, high=1e6)


def root_of_width(fields: Fields) -> float:
    """Scale by sqrt(hidden_size)."""
    return math.sqrt(fields.whole("hidden_size"))


def depth_scale(fields: Fields) -> float:
    """Scale branches by scale_depth / sqrt(layers)."""
    depth = fields.number("scale_depth", None, low=1e-6, high=1e6)
    return 1.0 if depth is None else depth / math.sqrt(fields.whole("num_hidden_layers"))


def base_scale(fields: Fields) -> float:
    """Scale logits by dim_model_base / hidden_size."""
    base = fields.number("dim_model_base", None, low=1.0, high=2.0**20)
    return 1.0 if base is None else base / fields.whole("hidden_size")


def from_query_scalar(fields: Fields) -> float:
    """Scale scores by what the config has in the place of head_dim."""
    return fields.number("query_pre_attn_scalar", 256.0, low=1e-3) ** -0.5


def own_scale(fields: Fields) -> float | None:
    """Read the factor of scores; None for the usual one."""
    return fields.number("attention_multiplier", None, low=1e-6, high=1e6)


def llama4_scaling(fields: Fields) -> tuple[float, int] | None:
    """Read how queries are scaled by position: beta and the original length; None if they are not."""
    rope = Fields(fields.model, fields.nested("rope_parameters") or fields.nested("rope_scaling"), "the rope options")
    beta = rope.number("llama_4_scaling_beta", 0.0, high=1e3)
    original = rope.number("original_max_position_embeddings", 0.0, high=2.0**31)
    if not beta:
        return None
    if original < 1:
        raise ValueError(
            f"{fields.model}: the rope options of config.json have llama_4_scaling_beta={beta:g} and no "
            "original_max_position_embeddings, which it needs. Fetch the published one again"
        )
    return beta, int(original)


def both_if(name: str) -> Callable[[Fields], Norms]:
    """Put norms after both branches too where a switch says so."""
    return lambda fields: "both" if fields.switch(name, False) else "pre"


def any_config(config: dict) -> bool:
    """Cover all configs of a type."""
    return True


def as_it_is(fields: Fields) -> dict:
    """Leave a config as it is."""
    return dict(fields.values)


def tanh_gelu(fields: Fields) -> dict:
    """Early configs of Gemma say gelu for its tanh form, as transformers takes it."""
    config = dict(fields.values)
    return {**config, "hidden_act": "gelu_pytorch_tanh"} if config.get("hidden_act") in ("gelu", None) else config


def with_rotary_dim(fields: Fields) -> dict:
    """Columns that are rotated, as a share of a head."""
    config = dict(fields.values)
    columns, width = config.get("rotary_dim"), config.get("head_dim")
    if isinstance(columns, int) and isinstance(width, int) and 0 < columns <= width:
        return {"partial_rotary_factor": columns / width, **config}
    return config


def latent_heads(fields: Fields) -> dict:
    """Tell the width of heads of latent attention, which have keys of their own each."""
    config = dict(fields.values)
    nope, rope = (config.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if not isinstance(nope, int) or not isinstance(rope, int):
        return config
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    equal = hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else None
    return {**config, "head_dim": nope + rope, "v_head_dim": config.get("v_head_dim") or equal}


def with_rope(**options: Any) -> Adjusted:
    """Give rope options to a config that states none."""

    def adjusted(fields: Fields) -> dict:
        none = fields.values.get("rope_parameters") is None and not fields.values.get("rope_scaling")
        return {**fields.values, "rope_parameters": options} if none else dict(fields.values)

    return adjusted


def ntk_alpha(fields: Fields) -> dict:
    """Dynamic scaling with a fixed alpha is another base for all lengths."""
    config = dict(fields.values)
    options, width = config.get("rope_parameters") or config.get("rope_scaling"), config.get("head_dim")
    alpha = options.get("alpha") if isinstance(options, dict) else None
    theta = config.get("rope_theta") or THETA
    theta = options.get("rope_theta", theta) if isinstance(options, dict) else theta
    if not isinstance(alpha, int | float) or not isinstance(theta, int | float) or not isinstance(width, int):
        return config
    if alpha <= 0 or width <= 2:
        return config
    rope = {"rope_type": "default", "rope_theta": theta * alpha ** (width / (width - 2))}
    return {**config, "rope_scaling": None, "rope_theta": None, "rope_parameters": rope}


PRE: Callable[[Fields], Norms] = always("pre")
ONE, UNSCALED = always(1.0), always(None)


@dataclass(frozen=True)
class Variant:
    """What a type of decoder has beside Llama's, as values or as what reads them from its config.

    checkpoints, options, configs_compared, quantised, covers: as in registry.py:Family. defaults: of fields that a
    config leaves out. renamed: a config's own names of fields -> usual ones. adjusted: what else is told otherwise.
    refused: fields that ask for features which no op has. eps: the field that states it, and its default. share: of a
    head that is rotated. typed_ropes: frequencies for each kind of layers; window_theta_field states the base of those
    with a window. score_cap, logit_cap: whether configs bound scores and logits. latent: whether latent attention
    rotates pairs side by side; None for attention of the usual kind. longest: the field with the longest sequence that
    trains, and beyond it what longer ones would need.
    mixer: what has the place of attention in layers of linear attention. single: whether a layer has one branch, which
    is its FFN where its kind is "mlp".
    layer_thetas: the field with a base for every layer, 0 for one that does not rotate.
    """

    checkpoints: str
    options: str
    configs_compared: int = 1
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    adjusted: Adjusted = as_it_is
    refused: Mapping[str, str] = field(default_factory=dict)
    names: BlockNames = field(default_factory=BlockNames)
    norm: AnyNorm = RMS
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6)
    norms: Callable[[Fields], Norms] = PRE
    tied: bool = False
    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: NormSpan | None = None
    has_qk_norm: Switch = True
    norm_after_rope: bool = False
    interleaved: bool = False
    theta: float = 10000.0
    window_theta: float = 10000.0
    window_theta_field: str = "rope_theta"
    share: float = 1.0
    partial: bool = False
    typed_ropes: bool = False
    kinds: Kinds = all_full
    rotated: Rotated = everywhere
    activation: str = "silu"
    activation_field: str = "hidden_act"
    plain: bool = False
    parallel: Switch = False
    sinks: bool = False
    score_cap: bool = False
    logit_cap: bool = False
    embedding_scale: Number = ONE
    residual_scale: Number = ONE
    logit_scale: Number = ONE
    score_scale: Callable[[Fields], float | None] = UNSCALED
    query_scale: Callable[[Fields], tuple[float, int] | None] = UNSCALED
    experts: Callable[[Fields, Sizes], Routed | None] | None = None
    mixer: Callable[[Fields], Mixer] | None = None
    single: bool = False
    balanced: bool = False
    latent: Callable[[Fields], bool] | None = None
    longest: str = ""
    beyond: str = ""
    layer_thetas: str = ""
    parts: DecoderNames = field(default_factory=DecoderNames)
    notice: str = ""
    quantised: tuple[str, ...] = ()
    covers: Callable[[dict], bool] = any_config

    def told(self, spec: ModelSpec, fields: Fields) -> ModelSpec:
        """A model with what the row says of it, and of the longest sequence that it is described for."""
        if self.longest:
            stated = min(fields.whole(self.longest), spec.longest_sequence or 2**31)
            spec = replace(spec, longest_sequence=stated, beyond_longest=self.beyond)
        return replace(spec, notice=self.notice) if self.notice else spec
