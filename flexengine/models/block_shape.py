"""Says what a block is: its sizes and options, and the names of its tensors in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from flexengine.models.spec import ParamSpec
from flexengine.ops.attention.style import CAUSAL, AttentionStyle
from flexengine.ops.base import Op
from flexengine.ops.experts.router import SOFTMAX, RouterStyle
from flexengine.ops.glu import Activation
from flexengine.ops.layernorm import LayerNormStyle
from flexengine.ops.qk_norm import NormSpan, Values
from flexengine.ops.rmsnorm import NormStyle

AnyNorm = NormStyle | LayerNormStyle
"""How rows are normalised: by RMSNorm, or by LayerNorm."""

PlainActivation = Literal["gelu_tanh", "relu2", "xielu"]
"""Activations of an FFN without a gate."""

Norms = Literal["pre", "post", "both"]
"""Where a block has norms: before attention and FFN, after them (within the residual branch), or both."""


class ExpertShape(NamedTuple):
    """The FFN of a block with experts.

    count: experts of the block. per_token: experts of each token. width: FFN width of one expert. normalised: the
    weights of a token's experts are scaled to add up to 1. shared_width: width of one more expert that all tokens
    share, 0 for none. stacked: the experts have biases and lie in one tensor (models/stacked_experts.py). transposed:
    they lie in one tensor, input by output.
    """

    count: int
    per_token: int
    width: int
    normalised: bool
    shared_width: int = 0
    shared_gated: bool = True
    router: RouterStyle = SOFTMAX
    stacked: bool = False
    transposed: bool = False


class Mixer(Protocol):
    """What replaces attention over queries, keys and values of the input in a block, from x to `block.middle`, or its
    FFN, from x1.

    Equal mixers must have equal hashes, since blocks of equal shape share their ops.
    """

    def ops(self, block: BlockShape) -> list[Op]:
        """List the ops to `block.middle` (of an FFN to `block.end`), with the norms and the sum with the residual."""
        ...

    def params(self, block: BlockShape, prefix: str, names: BlockNames) -> list[ParamSpec]:
        """List the parameters of these ops, without norms that all blocks have, from tensors under `prefix`."""
        ...


@dataclass(frozen=True)
class BlockShape:
    """Sizes and options of one block. Blocks of equal shape share their ops.

    qk_norm: queries and keys are normalised by head or by row. rope: name of the model's table of rotary frequencies,
    None for no rotation. gated: each query head has a gate for its output (only together with qk_norm).
    interleaved: how rotated pairs lie. norm_after_rope: the order of the two. query_scale: beta and original length of
    ops/query_scale.py. plain: the FFN has no gate, and this activation. parallel: the FFN reads what attention reads.
    residual_scale: factor on the result of each branch. values: as of ops/qk_norm.py. ffn: what replaces the FFN.
    scaled: the checkpoint has a factor on the whole result, which nothing trains. only: of two branches the one that
    there is; None for both.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    norm: AnyNorm
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
    interleaved: bool = False
    norm_after_rope: bool = False
    query_scale: tuple[float, int] | None = None
    plain: PlainActivation | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    values: Values = "plain"
    ffn: Mixer | None = None
    scaled: bool = False
    only: Literal["mixer", "ffn"] | None = None

    @property
    def middle(self) -> str:
        """Name of the tensor between the branches, which is an end of the block where it has one branch."""
        return {"mixer": self.end, "ffn": "x", None: "x1"}[self.only]

    @property
    def end(self) -> str:
        """Name of the tensor that the FFN writes."""
        return "unscaled" if self.scaled else "y"

    @property
    def query_width(self) -> int:
        """Number of columns of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Number of columns of all key heads, which is also that of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def projected_rows(self) -> tuple[int, ...]:
        """Rows of the projections to queries, keys and values, of which the last may be no projection of its own."""
        return (self.query_rows, self.key_width) + (() if self.values == "keys" else (self.key_width,))

    @property
    def query_rows(self) -> int:
        """Number of rows of the projection to queries, including the rows of their gates."""
        return self.query_width * (2 if self.gated else 1)


@dataclass(frozen=True)
class BlockNames:
    """Names of a block's modules in the checkpoint; a fused projection has one name, others one per part.

    expert_decode: decoder of stacked experts, for checkpoints that hold them quantised. expert_gate_up, expert_down:
    empty where one tensor alone holds all experts of a layer. router_bias_shape: of it before the experts.
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
    activation: str = "mlp.act_fn"
    mlp_post_norm: str = "post_feedforward_layernorm"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    router_bias_shape: tuple[int, ...] = ()
    scale: str = "layer_scalar"
    experts: str = "mlp.experts"
    experts_fused: tuple[str, str] = ("gate_up_proj", "down_proj")
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    expert_decode: str | None = None
    shared: str = "mlp.shared_expert"
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
