"""Ops composed into layers. A family names its options; what a layer keeps, costs and streams follows from the ops."""

from __future__ import annotations

from dataclasses import dataclass

from flexengine.models.fields import Fields
from flexengine.models.spec import GroupSpec, LayerSpec, ModelSpec, ParamSpec, WeightSource
from flexengine.ops.attention import CausalAttention
from flexengine.ops.base import Op
from flexengine.ops.cross_entropy import LMHeadLoss
from flexengine.ops.embedding import Embedding
from flexengine.ops.linear import Linear
from flexengine.ops.rmsnorm import RMSNorm
from flexengine.ops.rope import RoPE
from flexengine.ops.swiglu import SwiGLU


@dataclass(frozen=True)
class DecoderShape:
    """Sizes and switches of a pre-norm decoder, named as in Hugging Face configs."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_scaling_factor: float = 1.0

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused query, key and value weight."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim


def decoder_ops(s: DecoderShape) -> tuple[Op, ...]:
    """x -> norm -> qkv -> rope -> attention -> + x -> norm -> gate-up -> SwiGLU -> down -> + -> y."""
    n, g, h, d, f = s.num_attention_heads, s.num_key_value_heads, s.head_dim, s.hidden_size, s.intermediate_size
    attn_bias, mlp_bias = s.attention_bias, s.mlp_bias

    def bias(name: str, present: bool) -> str | None:
        return f"{name}.bias" if present else None

    return (
        RMSNorm("attn_norm", "x", "h1", d, "attn_norm.weight", s.rms_norm_eps),
        Linear("qkv_proj", "h1", "qkv_raw", d, s.qkv_rows, "qkv_proj.weight", bias("qkv_proj", attn_bias)),
        RoPE("rope", "qkv_raw", "qkv", n, g, h, s.rope_scaling_factor),
        CausalAttention("attention", "qkv", "o", n, g, h),
        Linear("o_proj", "o", "x1", n * h, d, "o_proj.weight", bias("o_proj", attn_bias), residual="x"),
        RMSNorm("mlp_norm", "x1", "h2", d, "mlp_norm.weight", s.rms_norm_eps),
        Linear("gate_up_proj", "h2", "gate_up", d, 2 * f, "gate_up_proj.weight", bias("gate_up_proj", mlp_bias)),
        SwiGLU("swiglu", "gate_up", "a", f),
        Linear("down_proj", "a", "y", f, d, "down_proj.weight", bias("down_proj", mlp_bias), residual="x1"),
    )


def _stacked(name: str, parts: list[tuple[str, int]], columns: int, bias: bool) -> list[ParamSpec]:
    """A fused linear: its weight, and its bias when there is one, from Hugging Face modules stacked by rows."""
    rows = sum(r for _, r in parts)
    weights = tuple(WeightSource(f"{part}.weight", (r, columns)) for part, r in parts)
    params = [ParamSpec(f"{name}.weight", (rows, columns), weights)]
    if bias:
        biases = tuple(WeightSource(f"{part}.bias", (r,)) for part, r in parts)
        params.append(ParamSpec(f"{name}.bias", (rows,), biases, kind="vector", init="zeros"))
    return params


def norm_param(name: str, source: str, width: int) -> ParamSpec:
    """A norm weight."""
    return ParamSpec(name, (width,), (WeightSource(source, (width,)),), kind="vector", init="ones")


def decoder_params(s: DecoderShape, prefix: str) -> tuple[ParamSpec, ...]:
    """Parameters of one block under Hugging Face names with `prefix` (such as model.layers.3)."""
    attn, mlp, q, kv = (
        f"{prefix}.self_attn",
        f"{prefix}.mlp",
        s.num_attention_heads * s.head_dim,
        s.num_key_value_heads * s.head_dim,
    )
    qkv = [(f"{attn}.q_proj", q), (f"{attn}.k_proj", kv), (f"{attn}.v_proj", kv)]
    gate_up = [(f"{mlp}.gate_proj", s.intermediate_size), (f"{mlp}.up_proj", s.intermediate_size)]
    return (
        norm_param("attn_norm.weight", f"{prefix}.input_layernorm.weight", s.hidden_size),
        *_stacked("qkv_proj", qkv, s.hidden_size, s.attention_bias),
        *_stacked("o_proj", [(f"{attn}.o_proj", s.hidden_size)], q, s.attention_bias),
        norm_param("mlp_norm.weight", f"{prefix}.post_attention_layernorm.weight", s.hidden_size),
        *_stacked("gate_up_proj", gate_up, s.hidden_size, s.mlp_bias),
        *_stacked("down_proj", [(f"{mlp}.down_proj", s.hidden_size)], s.intermediate_size, s.mlp_bias),
    )


def _layer_params(group_index: int, group: GroupSpec) -> tuple[tuple[str, int, str], ...]:
    return tuple((p.name, group_index, p.name) for p in group.params)


def decoder_groups(s: DecoderShape) -> tuple[GroupSpec, ...]:
    """Parameter groups: embed, one per block, head (the final norm alone when the embedding is tied)."""
    vocab = (s.vocab_size, s.hidden_size)
    embed = ParamSpec("embed.weight", vocab, (WeightSource("model.embed_tokens.weight", vocab),))
    lm_head = ParamSpec("lm_head.weight", vocab, (WeightSource("lm_head.weight", vocab),))
    final_norm = norm_param("final_norm.weight", "model.norm.weight", s.hidden_size)
    blocks = [
        GroupSpec(f"block.{i}", "block", decoder_params(s, f"model.layers.{i}")) for i in range(s.num_hidden_layers)
    ]
    head = (final_norm,) if s.tie_word_embeddings else (final_norm, lm_head)
    return (GroupSpec("embed", "embed", (embed,)), *blocks, GroupSpec("head", "head", head))


def decoder_layers(s: DecoderShape, groups: tuple[GroupSpec, ...]) -> tuple[LayerSpec, ...]:
    """Embedding, blocks (which share one tuple of ops) and head, over the given groups."""
    d, v, last = s.hidden_size, s.vocab_size, len(groups) - 1
    embed = LayerSpec(
        "embedding",
        "embedding",
        (Embedding("embed", "y", v, d, "embed.weight"),),
        (("embed.weight", 0, "embed.weight"),),
        None,
        "y",
    )
    ops = decoder_ops(s)
    blocks = [LayerSpec(f"block.{i - 1}", "block", ops, _layer_params(i, groups[i]), "x", "y") for i in range(1, last)]
    group, name = (0, "embed.weight") if s.tie_word_embeddings else (last, "lm_head.weight")
    head = LayerSpec(
        "head",
        "head",
        (
            RMSNorm("final_norm", "x", "h", d, "final_norm.weight", s.rms_norm_eps),
            LMHeadLoss("lm_head", "h", d, v, "lm_head.weight"),
        ),
        (("final_norm.weight", last, "final_norm.weight"), ("lm_head.weight", group, name)),
        "x",
        None,
    )
    return (embed, *blocks, head)


def decoder_model(name: str, family: str, config: dict, shape: DecoderShape, inv_freq: tuple[float, ...]) -> ModelSpec:
    """Assemble a decoder of the given shape. Raises ValueError for what else it reads from the config."""
    fields, groups = Fields(name, config), decoder_groups(shape)
    return ModelSpec(
        name=name,
        family=family,
        hf_config=config,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=fields.whole("max_position_embeddings", 2048),
        initializer_range=fields.number("initializer_range", 0.02, high=100.0),
        tie_word_embeddings=shape.tie_word_embeddings,
        inv_freq=inv_freq,
        groups=groups,
        layers=decoder_layers(shape, groups),
    )
