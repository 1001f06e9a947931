"""Composes ops into transformer blocks, and names the checkpoint's tensors for their parameters.

A family only chooses options of `BlockShape`; what a block keeps, costs and streams follows from its ops.
"""

from __future__ import annotations

from functools import lru_cache

from flexengine.models.block_parts import closing, norm_params, opening_norm, parts, stacked, weight_names
from flexengine.models.block_shape import BlockNames, BlockShape, ExpertShape, PlainActivation
from flexengine.models.spec import ParamSpec, WeightSource
from flexengine.models.stacked_experts import product_options, stacked_params
from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.attention.head_gate import HeadGate
from flexengine.ops.base import Op
from flexengine.ops.columns import Columns
from flexengine.ops.experts.experts import GroupedLinear, WeightedGLU
from flexengine.ops.experts.router import Router
from flexengine.ops.experts.rows import Combine, Dispatch
from flexengine.ops.experts.shared_gate import SharedGate
from flexengine.ops.gelu import Gelu
from flexengine.ops.glu import GLU
from flexengine.ops.layer_scale import LayerScale
from flexengine.ops.linear import Linear
from flexengine.ops.qk_norm import QKNorm
from flexengine.ops.query_scale import QueryScale
from flexengine.ops.rmsnorm import NormStyle
from flexengine.ops.rope import RoPE
from flexengine.ops.scaled_sum import ScaledSum
from flexengine.ops.squared_relu import SquaredReLU
from flexengine.ops.xielu import XIELU

PART_ELEMENTS = 1 << 28
"""Most weights in a part of a block's experts: 512 MiB in bf16.

Larger parts take more memory at a time; smaller ones take more calls of the experts' kernels.
"""
MOST_AS_DENSE = 4
"""Times PART_ELEMENTS that a part may have where a dense block has as many weights: it then takes no more memory."""

PLAIN: dict[PlainActivation, type[Gelu | SquaredReLU | XIELU]] = {
    "gelu_tanh": Gelu,
    "relu2": SquaredReLU,
    "xielu": XIELU,
}


def expert_divisions(s: BlockShape, dense_elements: int) -> int:
    """Find the fewest equal parts that a block's experts divide into, of at most PART_ELEMENTS each, or of what the
    largest dense block of the model has."""
    if s.experts is None:
        return 1
    count, elements = s.experts.count, 3 * s.hidden_size * s.experts.width
    most = max(PART_ELEMENTS, min(dense_elements, MOST_AS_DENSE * PART_ELEMENTS))
    divisors = (n for n in range(1, count + 1) if count % n == 0)
    return next(n for n in divisors if count // n * elements <= most or n == count)


def block_ops(s: BlockShape, dense_elements: int = 0) -> tuple[Op, ...]:
    """List the ops of a block: x -> norm, qkv, rope, attention, + x -> norm, gate-up, act(gate) * up, down, + -> y.

    Norms stand where the shape has them. Ops that may run in parts end the block.
    """
    return _block_ops(s, expert_divisions(s, dense_elements))


# A model of 126 equal blocks builds its ops once. `divisions` is part of the key because tests change PART_ELEMENTS.
@lru_cache(maxsize=256)
def _block_ops(s: BlockShape, divisions: int) -> tuple[Op, ...]:
    mixer = _attention_ops(s) if s.mixer is None else s.mixer.ops(s)
    if s.only == "mixer":
        return tuple(mixer)
    if s.only == "ffn":
        return tuple(_mlp_ops(s))
    if s.ffn is not None:
        ffn = s.ffn.ops(s)
    else:
        ffn = _mlp_ops(s) if s.experts is None else _expert_ops(s, s.experts, divisions)
    scale = [LayerScale("layer_scale", s.end, "y", s.hidden_size, "layer_scale")] if s.scaled else []
    return (*mixer, *ffn, *scale)


def _attention_ops(s: BlockShape) -> list[Op]:
    """List the ops of causal attention, from x to x1."""
    d, n, g, h = s.hidden_size, s.num_attention_heads, s.num_key_value_heads, s.head_dim
    ops, rows = opening_norm(s, "attn_norm", "x", "h1")
    # Names of the tensors from the projection to attention, which always reads the last one, "qkv".
    kinds = ["normed"] if s.qk_norm else []
    kinds += ["rotated"] if s.rope else []
    kinds = (kinds[::-1] if s.norm_after_rope else kinds) + (["scaled"] if s.query_scale else [])
    stages = ["qkv_raw", *(f"qkv_{kind}" for kind in kinds)]
    stages[-1] = "qkv"
    width = sum(s.projected_rows)
    ops.append(Linear("qkv_proj", rows, stages[0], d, width, *weight_names("qkv_proj", s.qkv_bias)))
    ops += [_between(s, kind, *places) for kind, *places in zip(kinds, stages, stages[1:], strict=False)]
    ops.append(CausalAttention("attention", "qkv", "o", n, g, h, s.attention))
    result = "o"
    if s.gated:
        assert s.qk_norm == "head", "gates lie head by head, and pass where queries are normalised"
        # The projection gives a gate beside each query head, so the gates are still in its output, stages[0].
        result = "gated_o"
        ops.append(HeadGate("head_gate", "o", stages[0], result, Columns(h, n, 2 * h, h)))
    return [*ops, *closing(s, ("o_proj", result, s.query_width, s.o_bias), "attn_post_norm", "x", s.middle)]


def _between(s: BlockShape, kind: str, x: str, y: str) -> Op:
    """Give the op of one kind between the projection to queries, keys and values and attention."""
    heads = (s.num_attention_heads, s.num_key_value_heads, s.head_dim)
    if kind == "scaled":
        assert s.query_scale is not None
        return QueryScale("query_scale", x, y, s.query_width, s.query_width + 2 * s.key_width, *s.query_scale)
    if kind == "rotated":
        assert s.rope is not None
        rope = RoPE("rope", x, y, *heads, s.rope_scaling, s.rope, s.interleaved)
        return rope.changed(after_norm=bool(s.qk_norm) and not s.norm_after_rope)
    assert s.qk_norm is not None
    assert isinstance(s.norm, NormStyle), "no family has LayerNorm of queries and keys"
    return QKNorm("qk_norm", x, y, *heads, s.qk_norm, ("q_norm.weight", "k_norm.weight"), s.norm, s.gated, s.values)


def _opening_mlp(s: BlockShape) -> tuple[list[Op], str]:
    """Give the norm before the FFN, unless it reads what attention reads, and the tensor that the FFN reads."""
    return ([], "h1") if s.parallel else opening_norm(s, "mlp_norm", s.middle, "h2")


def _mlp_ops(s: BlockShape) -> list[Op]:
    """List the ops of a dense FFN, from x1 to y."""
    f, unit = s.intermediate_size, "swiglu" if s.activation == "silu" else "geglu"
    ops, rows = _opening_mlp(s)
    if s.plain is not None:
        ops.append(Linear("up_proj", rows, "up", s.hidden_size, f, *weight_names("up_proj", s.mlp_bias)))
        ops.append(PLAIN[s.plain](s.plain, "up", "a", f))
        return [*ops, *closing(s, ("down_proj", "a", f, s.mlp_bias), "mlp_post_norm", s.middle, s.end)]
    ops.append(Linear("gate_up_proj", rows, "gate_up", s.hidden_size, 2 * f, *weight_names("gate_up_proj", s.mlp_bias)))
    ops.append(GLU(unit, "gate_up", "a", f, s.activation))
    return [*ops, *closing(s, ("down_proj", "a", f, s.mlp_bias), "mlp_post_norm", s.middle, s.end)]


def _expert_ops(s: BlockShape, e: ExpertShape, divisions: int) -> list[Op]:
    """List the ops of an FFN with experts, from x1 to y: first the shared expert, if any, then those of each token."""
    assert s.norms == "pre", "no family has norms after its experts"
    assert not s.parallel, "no family has experts beside its attention"
    ops, rows = opening_norm(s, "mlp_norm", "x1", "h2")
    bias = "router.bias" if e.stacked else None
    style = e.router._replace(scale=e.router.scale * s.residual_scale)  # its weights scale what experts add
    sizes = (s.hidden_size, e.count, e.per_token)
    router = Router("router", rows, *sizes, "router.weight", e.normalised, bias, style)
    # The shared expert adds its result to the residual first; the combining op then adds the others to that sum.
    residual, shared = ("x1", []) if not e.shared_width else ("x2", _shared_ops(s, e, rows))
    return [*ops, *shared, router, *routed_ops(s, e, rows, router, router.row_weight, (residual, s.end), divisions)]


def routed_ops(
    s: BlockShape, e: ExpertShape, rows: str, router: Router, weight: str, ends: tuple[str | None, str],
    divisions: int = 1,
) -> list[Op]:  # fmt: skip
    """List the ops of the experts that a router has chosen for each token.

    weight: of every row, sorted by expert. ends: the residual that the sum of a token's rows is added to, or None, and
    the name of the result.
    """
    d, f = s.hidden_size, e.width
    gate_up, down = product_options(e.stacked, e.transposed, weight)
    # Every op on rows reads the router's bounds on the device, so that the host never waits for the routing.
    own = {"bounds": router.bounds, "divisions": divisions}
    weights = [f"experts_{name}.weight" for name in ("gate_up", "down")]
    return [
        Dispatch("dispatch", rows, router.place, "rows", d, e.per_token, **own),
        GroupedLinear(
            "experts_gate_up", "rows", y="gate_up", in_features=d, out_features=2 * f, num_experts=e.count,
            per_token=e.per_token, weight=weights[0], **own, **gate_up,
        ),
        # The router's weight multiplies before the last product: its gradient then needs no result of that product,
        # which therefore is never kept nor recomputed.
        WeightedGLU("experts_glu", "gate_up", weight, "a", f, e.per_token, s.activation, **own),
        GroupedLinear(
            "experts_down", "a", y="results", in_features=f, out_features=d, num_experts=e.count,
            per_token=e.per_token, weight=weights[1], **own, **down,
        ),
        Combine("combine", "results", router.place, ends[1], d, e.per_token, ends[0], **own),
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
    if not gated and s.residual_scale != 1.0:
        product = Linear("shared_down", "shared_a", "shared", width, d, *down)
        return [*unit, product, ScaledSum("shared_sum", "shared", "x2", d, s.residual_scale, "x1")]
    if not gated:
        return [*unit, Linear("shared_down", "shared_a", "x2", width, d, *down, residual="x1")]
    return [
        *unit,
        Linear("shared_down", "shared_a", "shared", width, d, *down),
        SharedGate("shared_gate", "shared", x, "x2", d, "shared_gate.weight", "x1"),
    ]


def _sinks(s: BlockShape, source: str) -> ParamSpec:
    heads = (s.num_attention_heads,)
    return ParamSpec("sinks", heads, (WeightSource(source, heads),), kind="vector")


def block_params(s: BlockShape, prefix: str, names: BlockNames) -> tuple[ParamSpec, ...]:
    """List the parameters of a block in the order of its ops, from tensors under `prefix` (such as model.layers.3)."""

    def norm(name: str, source: str, width: int = s.hidden_size) -> list[ParamSpec]:
        return norm_params(name, f"{prefix}.{source}", width, s.norm)

    def linear(name: str, sources: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> list[ParamSpec]:
        return stacked(name, parts([f"{prefix}.{source}" for source in sources], rows), columns, bias)

    def attention() -> list[ParamSpec]:
        qk_norms = [*norm("q_norm", names.q_norm, qk_widths[0]), *norm("k_norm", names.k_norm, qk_widths[1])]
        return [
            *linear("qkv_proj", names.qkv[: len(s.projected_rows)], s.projected_rows, d, s.qkv_bias),
            *(qk_norms if s.qk_norm else []),
            *([_sinks(s, f"{prefix}.{names.sinks}")] if s.attention.sinks else []),
            *linear("o_proj", (names.o,), (d,), s.query_width, s.o_bias),
        ]

    def mlp() -> list[ParamSpec]:
        up = ("gate_up_proj", names.gate_up, (f, f)) if s.plain is None else ("up_proj", names.gate_up[-1:], (f,))
        return [
            *linear(*up, d, s.mlp_bias),
            *([_xielu_number(name, prefix, names) for name in ("alpha_p", "alpha_n")] if s.plain == "xielu" else []),
            *linear("down_proj", (names.down,), (d,), f, s.mlp_bias),
        ]

    d, f, qk_widths = s.hidden_size, s.intermediate_size, (s.head_dim, s.head_dim)
    if s.qk_norm == "row":  # one norm over all heads of a token, so a weight for each of their columns
        qk_widths = (s.query_width, s.key_width)
    pre, post = s.norms != "post", s.norms != "pre"
    if s.ffn is not None:
        ffn = [*mlp(), *s.ffn.params(s, prefix, names)]
    else:
        ffn = mlp() if s.experts is None else expert_params(s, s.experts, prefix, names)
    branches = {
        "mixer": (
            *(norm("attn_norm", names.attn_norm) if pre else []),
            *(attention() if s.mixer is None else s.mixer.params(s, prefix, names)),
            *(norm("attn_post_norm", names.attn_post_norm) if post else []),
        ),
        "ffn": (
            *(norm("mlp_norm", names.mlp_norm) if pre and not s.parallel else []),
            *ffn,
            *(norm("mlp_post_norm", names.mlp_post_norm) if post else []),
        ),
    }
    return branches[s.only] if s.only else (*branches["mixer"], *branches["ffn"])


def _xielu_number(name: str, prefix: str, names: BlockNames) -> ParamSpec:
    source = WeightSource(f"{prefix}.{names.activation}.{name}", (1,))
    return ParamSpec(f"xielu.{name}", (1,), (source,), "vector", "zeros")


def block_buffers(s: BlockShape, prefix: str, names: BlockNames) -> tuple[tuple[str, WeightSource], ...]:
    """List the tensors that the ops of one block read and that nothing trains."""
    found = [("layer_scale", WeightSource(f"{prefix}.{names.scale}", (1,), filled=1.0))] if s.scaled else []
    if s.experts is not None and s.experts.router.biased:
        shape = (*names.router_bias_shape, s.experts.count)
        found.append(("router.choice_bias", WeightSource(f"{prefix}.{names.router_bias}", shape)))
    return tuple(found)


def expert_params(s: BlockShape, e: ExpertShape, prefix: str, names: BlockNames) -> list[ParamSpec]:
    """List the router and the weights of all experts, expert by expert."""
    if e.stacked:
        sources = (f"{prefix}.{names.router}", f"{prefix}.{names.experts}")
        return stacked_params(s.hidden_size, e.count, e.width, *sources, names.expert_decode)

    def source(expert: int, name: str, rows: int, columns: int) -> WeightSource:
        return WeightSource(f"{prefix}.{names.experts}.{expert}.{name}.weight", (rows, columns))

    # Some checkpoints (Qwen3.5) hold all experts of a layer in one tensor; `ModelSpec.named_as` chooses.
    # Granite's hold no others.
    def fused(name: str, rows: int, columns: int) -> WeightSource:
        return WeightSource(f"{prefix}.{names.experts}.{name}", (e.count, rows, columns))

    experts, d, f = range(e.count), s.hidden_size, e.width
    shapes = ((d, 2 * f), (f, d)) if e.transposed else ((2 * f, d), (d, f))
    both = tuple(fused(name, *shape) for name, shape in zip(names.experts_fused, shapes, strict=True))
    single = bool(names.expert_down) and not e.transposed
    gate_up = tuple(source(i, name, f, d) for i in experts for name in names.expert_gate_up) if single else both[:1]
    down = tuple(source(i, names.expert_down, d, f) for i in experts) if single else both[1:]
    router = WeightSource(f"{prefix}.{names.router}.weight", (e.count, d))
    return [
        ParamSpec("router.weight", (e.count, d), (router,)),
        ParamSpec("experts_gate_up.weight", both[0].shape, gate_up, fused=both[0]),
        ParamSpec("experts_down.weight", both[1].shape, down, fused=both[1]),
        *(_shared_params(s, e, f"{prefix}.{names.shared}", names) if e.shared_width else []),
    ]


def _shared_params(s: BlockShape, e: ExpertShape, prefix: str, names: BlockNames) -> list[ParamSpec]:
    d, width = s.hidden_size, e.shared_width
    gate = WeightSource(f"{prefix}_gate.weight", (1, d))
    gate_up = parts([f"{prefix}.{name}" for name in names.shared_gate_up], (width, width))
    return [
        *stacked("shared_gate_up", gate_up, d, s.mlp_bias),
        *stacked("shared_down", [(f"{prefix}.{names.shared_down}", d)], width, s.mlp_bias),
        *([ParamSpec("shared_gate.weight", (1, d), (gate,))] if e.shared_gated else []),
    ]
