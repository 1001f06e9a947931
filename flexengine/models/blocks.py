"""Composes ops into transformer blocks, and names the checkpoint's tensors for their parameters.

A family only chooses options of `BlockShape`; what a block keeps, costs and streams follows from its ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

from flexengine.models.spec import ParamSpec, WeightSource
from flexengine.models.stacked_experts import stacked_options, stacked_params
from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.attention.head_gate import HeadGate
from flexengine.ops.attention.style import CAUSAL, AttentionStyle
from flexengine.ops.base import Op
from flexengine.ops.columns import Columns
from flexengine.ops.experts.experts import GroupedLinear, WeightedGLU
from flexengine.ops.experts.router import SOFTMAX, Router, RouterStyle
from flexengine.ops.experts.rows import Combine, Dispatch
from flexengine.ops.experts.shared_gate import SharedGate
from flexengine.ops.glu import GLU, Activation
from flexengine.ops.linear import Linear
from flexengine.ops.qk_norm import NormSpan, QKNorm
from flexengine.ops.rmsnorm import NormStyle, RMSNorm
from flexengine.ops.rope import RoPE

Norms = Literal["pre", "post", "both"]
"""Where a block has norms: before attention and FFN, after them (within the residual branch), or both."""


class ExpertShape(NamedTuple):
    """The FFN of a block with experts.

    count: experts of the block. per_token: experts of each token. width: FFN width of one expert. normalised: the
    weights of a token's experts are scaled to add up to 1. shared_width: width of one more expert that all tokens
    share, 0 for none. stacked: the experts have biases and lie in one tensor (models/stacked_experts.py).
    """

    count: int
    per_token: int
    width: int
    normalised: bool
    shared_width: int = 0
    shared_gated: bool = True
    router: RouterStyle = SOFTMAX
    stacked: bool = False


class Mixer(Protocol):
    """What replaces attention over queries, keys and values of the input in a block, from x to x1.

    Equal mixers must have equal hashes, since blocks of equal shape share their ops.
    """

    def ops(self, block: BlockShape) -> list[Op]:
        """List the ops from x to x1, including the norms and the sum with the residual."""
        ...

    def params(self, block: BlockShape, prefix: str, names: BlockNames) -> list[ParamSpec]:
        """List the parameters of these ops, without those of norms, from tensors under `prefix`."""
        ...


@dataclass(frozen=True)
class BlockShape:
    """Sizes and options of one block. Blocks of equal shape share their ops.

    qk_norm: queries and keys are normalised by head or by row. rope: name of the model's table of rotary frequencies,
    None for no rotation. gated: each query head has a gate for its output (only together with qk_norm).
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    norm: NormStyle
    norms: Norms = "pre"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: NormSpan | None = None
    rope: str | None = "inv_freq"
    rope_scaling: float = 1.0
    attention: AttentionStyle = CAUSAL
    activation: Activation = "silu"
    experts: ExpertShape | None = None
    mixer: Mixer | None = None
    gated: bool = False

    @property
    def query_width(self) -> int:
        """Number of columns of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Number of columns of all key heads, which is also that of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def query_rows(self) -> int:
        """Number of rows of the projection to queries, including the rows of their gates."""
        return self.query_width * (2 if self.gated else 1)


@dataclass(frozen=True)
class BlockNames:
    """Names of a block's modules in the checkpoint; a fused projection has one name, others one per part.

    expert_decode: decoder of stacked experts, for checkpoints that hold them quantised.
    """

    attn_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    o: str = "self_attn.o_proj"
    attn_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = "post_feedforward_layernorm"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    expert_gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    expert_decode: str | None = None
    shared: str = "mlp.shared_expert"


PART_ELEMENTS = 1 << 28
"""Most weights in a part of a block's experts: 512 MiB in bf16.

Larger parts take more memory at a time; smaller ones take more calls of the experts' kernels.
"""


def expert_divisions(s: BlockShape) -> int:
    """Find the fewest equal parts, of at most PART_ELEMENTS each, that a block's experts divide into."""
    if s.experts is None:
        return 1
    count, elements = s.experts.count, 3 * s.hidden_size * s.experts.width
    divisors = (n for n in range(1, count + 1) if count % n == 0)
    return next(n for n in divisors if count // n * elements <= PART_ELEMENTS or n == count)


def block_ops(s: BlockShape) -> tuple[Op, ...]:
    """List the ops of a block: x -> norm, qkv, rope, attention, + x -> norm, gate-up, act(gate) * up, down, + -> y.

    Norms stand where the shape has them. Ops that may run in parts end the block.
    """
    return _block_ops(s, expert_divisions(s))


# A model of 126 equal blocks builds its ops once. `divisions` is part of the key because tests change PART_ELEMENTS.
@lru_cache(maxsize=256)
def _block_ops(s: BlockShape, divisions: int) -> tuple[Op, ...]:
    mixer = _attention_ops(s) if s.mixer is None else s.mixer.ops(s)
    return (*mixer, *(_mlp_ops(s) if s.experts is None else _expert_ops(s, s.experts, divisions)))


def _attention_ops(s: BlockShape) -> list[Op]:
    """List the ops of causal attention, from x to x1."""
    d, n, g, h = s.hidden_size, s.num_attention_heads, s.num_key_value_heads, s.head_dim
    ops, rows = opening_norm(s, "attn_norm", "x", "h1")
    # Names of the tensors from the projection to attention, which always reads the last one, "qkv".
    stages = ["qkv_raw"] if s.qk_norm or s.rope else []
    stages += ["qkv_normed"] if s.qk_norm and s.rope else []
    stages.append("qkv")
    ops.append(
        Linear("qkv_proj", rows, stages[0], d, s.query_rows + 2 * s.key_width, *weight_names("qkv_proj", s.qkv_bias))
    )
    if s.qk_norm:
        weights = ("q_norm.weight", "k_norm.weight")
        ops.append(QKNorm("qk_norm", stages[0], stages[1], n, g, h, s.qk_norm, weights, s.norm, s.gated))
    if s.rope:
        ops.append(RoPE("rope", stages[-2], stages[-1], n, g, h, s.rope_scaling, s.rope))
    ops.append(CausalAttention("attention", "qkv", "o", n, g, h, s.attention))
    result = "o"
    if s.gated:
        assert s.qk_norm == "head", "gates lie head by head, and pass where queries are normalised"
        # The projection gives a gate beside each query head, so the gates are still in its output, stages[0].
        result = "gated_o"
        ops.append(HeadGate("head_gate", "o", stages[0], result, Columns(h, n, 2 * h, h)))
    return [*ops, *closing(s, ("o_proj", result, s.query_width, s.o_bias), "attn_post_norm", "x", "x1")]


def _mlp_ops(s: BlockShape) -> list[Op]:
    """List the ops of a dense FFN, from x1 to y."""
    f, unit = s.intermediate_size, "swiglu" if s.activation == "silu" else "geglu"
    ops, rows = opening_norm(s, "mlp_norm", "x1", "h2")
    ops.append(Linear("gate_up_proj", rows, "gate_up", s.hidden_size, 2 * f, *weight_names("gate_up_proj", s.mlp_bias)))
    ops.append(GLU(unit, "gate_up", "a", f, s.activation))
    return [*ops, *closing(s, ("down_proj", "a", f, s.mlp_bias), "mlp_post_norm", "x1", "y")]


def _expert_ops(s: BlockShape, e: ExpertShape, divisions: int) -> list[Op]:
    """List the ops of an FFN with experts, from x1 to y: first the shared expert, if any, then those of each token."""
    assert s.norms == "pre", "no family has norms after its experts"
    d, f, sizes = s.hidden_size, e.width, (e.count, e.per_token)
    ops, rows = opening_norm(s, "mlp_norm", "x1", "h2")
    bias = "router.bias" if e.stacked else None
    router = Router("router", rows, d, *sizes, "router.weight", e.normalised, bias, e.router)
    gate_up, down = stacked_options(router.weight) if e.stacked else ({}, {})
    # The shared expert adds its result to the residual first; the combining op then adds the others to that sum.
    residual, shared = ("x1", []) if not e.shared_width else ("x2", _shared_ops(s, e, rows))
    # Every op on rows reads the router's bounds on the device, so that the host never waits for the routing.
    own = {"bounds": router.bounds, "divisions": divisions}
    weights = [f"experts_{name}.weight" for name in ("gate_up", "down")]
    return [
        *ops,
        *shared,
        router,
        Dispatch("dispatch", rows, router.place, "rows", d, e.per_token, **own),
        GroupedLinear(
            "experts_gate_up", "rows", y="gate_up", in_features=d, out_features=2 * f, num_experts=e.count,
            per_token=e.per_token, weight=weights[0], **own, **gate_up,
        ),
        # The router's weight multiplies before the last product: its gradient then needs no result of that product,
        # which therefore is never kept nor recomputed.
        WeightedGLU("experts_glu", "gate_up", router.weight, "a", f, e.per_token, s.activation, **own),
        GroupedLinear(
            "experts_down", "a", y="results", in_features=f, out_features=d, num_experts=e.count,
            per_token=e.per_token, weight=weights[1], **own, **down,
        ),
        Combine("combine", "results", router.place, "y", d, e.per_token, residual, **own),
    ]  # fmt: skip


def _shared_ops(s: BlockShape, e: ExpertShape, x: str) -> list[Op]:
    """List the ops of the expert that all tokens share, from x1 to x2."""
    d, width, gated = s.hidden_size, e.shared_width, e.shared_gated
    gate_up, down = weight_names("shared_gate_up", s.mlp_bias), weight_names("shared_down", s.mlp_bias)
    unit = [
        Linear("shared_gate_up", x, "shared_gate_up", d, 2 * width, *gate_up),
        GLU("shared_glu", "shared_gate_up", "shared_a", width, s.activation),
    ]
    # Without a gate the product adds the residual itself; with one the gate has to multiply before the sum.
    if not gated:
        return [*unit, Linear("shared_down", "shared_a", "x2", width, d, *down, residual="x1")]
    return [
        *unit,
        Linear("shared_down", "shared_a", "shared", width, d, *down),
        SharedGate("shared_gate", "shared", x, "x2", d, "shared_gate.weight", "x1"),
    ]


def weight_names(name: str, bias: bool) -> tuple[str, str | None]:
    """Name the weight of a linear layer, and its bias if it has one."""
    return f"{name}.weight", f"{name}.bias" if bias else None


def opening_norm(s: BlockShape, name: str, x: str, y: str) -> tuple[list[Op], str]:
    """Give the norm before a branch, if the block has one, and the name of the tensor that the branch reads."""
    if s.norms == "post":
        return [], x
    return [RMSNorm(name, x, y, s.hidden_size, f"{name}.weight", s.norm)], y


def closing(s: BlockShape, linear: tuple[str, str, int, bool], norm: str, residual: str, y: str) -> list[Op]:
    """Give the projection that ends a branch, the norm after it if the block has one, and the sum with the residual.

    linear: name, input, input width and bias of the projection.
    """
    name, x, width, bias = linear
    # The last op of the branch adds the residual: a product takes the sum in its accumulator and rounds it once.
    if s.norms == "pre":
        return [Linear(name, x, y, width, s.hidden_size, *weight_names(name, bias), residual=residual)]
    return [
        Linear(name, x, f"{name}_out", width, s.hidden_size, *weight_names(name, bias)),
        RMSNorm(norm, f"{name}_out", y, s.hidden_size, f"{norm}.weight", s.norm, residual=residual),
    ]


def norm_param(name: str, source: str, width: int, style: NormStyle) -> ParamSpec:
    """Describe the weight of a norm. It multiplies by 1 at first, so with an offset of 1 it is stored as 0."""
    init = "zeros" if style.offset else "ones"
    return ParamSpec(name, (width,), (WeightSource(source, (width,)),), kind="vector", init=init)


def _sinks(s: BlockShape, source: str) -> ParamSpec:
    heads = (s.num_attention_heads,)
    return ParamSpec("sinks", heads, (WeightSource(source, heads),), kind="vector")


def block_params(s: BlockShape, prefix: str, names: BlockNames) -> tuple[ParamSpec, ...]:
    """List the parameters of a block in the order of its ops, from tensors under `prefix` (such as model.layers.3)."""

    def norm(name: str, source: str, width: int = s.hidden_size) -> ParamSpec:
        return norm_param(f"{name}.weight", f"{prefix}.{source}.weight", width, s.norm)

    def linear(name: str, sources: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> list[ParamSpec]:
        return stacked(name, _parts([f"{prefix}.{source}" for source in sources], rows), columns, bias)

    def attention() -> list[ParamSpec]:
        qk_norms = [norm("q_norm", names.q_norm, qk_widths[0]), norm("k_norm", names.k_norm, qk_widths[1])]
        return [
            *linear("qkv_proj", names.qkv, (s.query_rows, s.key_width, s.key_width), d, s.qkv_bias),
            *(qk_norms if s.qk_norm else []),
            *([_sinks(s, f"{prefix}.{names.sinks}")] if s.attention.sinks else []),
            *linear("o_proj", (names.o,), (d,), s.query_width, s.o_bias),
        ]

    def mlp() -> list[ParamSpec]:
        return [
            *linear("gate_up_proj", names.gate_up, (f, f), d, s.mlp_bias),
            *linear("down_proj", (names.down,), (d,), f, s.mlp_bias),
        ]

    d, f, qk_widths = s.hidden_size, s.intermediate_size, (s.head_dim, s.head_dim)
    if s.qk_norm == "row":  # one norm over all heads of a token, so a weight for each of their columns
        qk_widths = (s.query_width, s.key_width)
    pre, post = s.norms != "post", s.norms != "pre"
    return (
        *([norm("attn_norm", names.attn_norm)] if pre else []),
        *(attention() if s.mixer is None else s.mixer.params(s, prefix, names)),
        *([norm("attn_post_norm", names.attn_post_norm)] if post else []),
        *([norm("mlp_norm", names.mlp_norm)] if pre else []),
        *(mlp() if s.experts is None else _expert_params(s, s.experts, prefix, names)),
        *([norm("mlp_post_norm", names.mlp_post_norm)] if post else []),
    )


def block_buffers(s: BlockShape, prefix: str, names: BlockNames) -> tuple[tuple[str, WeightSource], ...]:
    """List the tensors that the ops of one block read and that nothing trains."""
    if s.experts is None or not s.experts.router.biased:
        return ()
    return (("router.choice_bias", WeightSource(f"{prefix}.{names.router_bias}", (s.experts.count,))),)


def _expert_params(s: BlockShape, e: ExpertShape, prefix: str, names: BlockNames) -> list[ParamSpec]:
    """List the router and the weights of all experts, expert by expert."""
    if e.stacked:
        sources = (f"{prefix}.{names.router}", f"{prefix}.{names.experts}")
        return stacked_params(s.hidden_size, e.count, e.width, *sources, names.expert_decode)

    def source(expert: int, name: str, rows: int, columns: int) -> WeightSource:
        return WeightSource(f"{prefix}.{names.experts}.{expert}.{name}.weight", (rows, columns))

    # Some checkpoints (Qwen3.5) hold all experts of a layer in one tensor; `ModelSpec.named_as` chooses.
    def fused(name: str, rows: int, columns: int) -> WeightSource:
        return WeightSource(f"{prefix}.{names.experts}.{name}", (e.count, rows, columns))

    experts, d, f = range(e.count), s.hidden_size, e.width
    gate_up = tuple(source(i, name, f, d) for i in experts for name in names.expert_gate_up)
    down = tuple(source(i, names.expert_down, d, f) for i in experts)
    router = WeightSource(f"{prefix}.{names.router}.weight", (e.count, d))
    return [
        ParamSpec("router.weight", (e.count, d), (router,)),
        ParamSpec("experts_gate_up.weight", (e.count, 2 * f, d), gate_up, fused=fused("gate_up_proj", 2 * f, d)),
        ParamSpec("experts_down.weight", (e.count, d, f), down, fused=fused("down_proj", d, f)),
        *(_shared_params(s, e, f"{prefix}.{names.shared}") if e.shared_width else []),
    ]


def _shared_params(s: BlockShape, e: ExpertShape, prefix: str) -> list[ParamSpec]:
    d, width = s.hidden_size, e.shared_width
    gate = WeightSource(f"{prefix}_gate.weight", (1, d))
    return [
        *stacked("shared_gate_up", [(f"{prefix}.gate_proj", width), (f"{prefix}.up_proj", width)], d, s.mlp_bias),
        *stacked("shared_down", [(f"{prefix}.down_proj", d)], width, s.mlp_bias),
        *([ParamSpec("shared_gate.weight", (1, d), (gate,))] if e.shared_gated else []),
    ]


def _parts(sources: list[str], rows: tuple[int, ...]) -> list[tuple[str, int]]:
    """Pair modules with their rows; a single module is fused in the checkpoint and has all rows."""
    return [(sources[0], sum(rows))] if len(sources) == 1 else list(zip(sources, rows, strict=True))


def stacked(name: str, parts: list[tuple[str, int]], columns: int, bias: bool) -> list[ParamSpec]:
    """Describe a linear layer, its weight and its bias if it has one, from modules that are stacked by rows."""
    # One product for modules that read the same rows (queries, keys and values; gate and up) is faster than several.
    rows = sum(r for _, r in parts)
    weights = tuple(WeightSource(f"{part}.weight", (r, columns)) for part, r in parts)
    params = [ParamSpec(f"{name}.weight", (rows, columns), weights)]
    if bias:
        biases = tuple(WeightSource(f"{part}.bias", (r,)) for part, r in parts)
        params.append(ParamSpec(f"{name}.bias", (rows,), biases, kind="vector", init="zeros"))
    return params
