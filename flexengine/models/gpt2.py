"""GPT-2 (type `gpt2`): LayerNorm with bias, learned positions, GELU, and weights stored input by output.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; config fields as in Hugging Face.
Published checkpoints name their tensors without the leading `transformer.`.
"""

from __future__ import annotations

from flexengine.models.decoder import LayerContent, assemble
from flexengine.models.fields import Fields
from flexengine.models.sizes import read_activation
from flexengine.models.spec import ModelSpec, ParamSpec, WeightSource
from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.attention.style import AttentionStyle
from flexengine.ops.cross_entropy import LMHeadLoss
from flexengine.ops.embedding import Embedding
from flexengine.ops.gelu import Gelu
from flexengine.ops.layernorm import LayerNorm
from flexengine.ops.linear import Linear
from flexengine.ops.positions import LearnedPositions

PREFIX = "transformer."


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of type `gpt2`. Raises ValueError as the others do."""
    fields = Fields(name, config)
    read_activation(fields, "gpt2", "activation_function", "gelu_new")
    for unsupported in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if fields.switch(unsupported, False):
            raise ValueError(f"{name}: {unsupported}=true in config.json; a gpt2 model with it is not supported")
    # GPT-2's configs have names of their own, which transformers also reads by the usual ones.
    heads, d = (
        fields.whole("n_head", 12, other="num_attention_heads"), fields.whole("n_embd", 768, other="hidden_size")
    )  # fmt: skip
    v, layers = fields.whole("vocab_size", 50257), fields.whole("n_layer", 12, other="num_hidden_layers")
    if d % heads:
        raise ValueError(
            f"{name}: n_embd={d} is not a multiple of n_head={heads}; one of them is wrong in config.json: fetch the "
            "published one again"
        )
    # A config without n_inner, or with null, means four times the width.
    f, eps = fields.whole("n_inner", None) or 4 * d, fields.number("layer_norm_epsilon", 1e-5, high=1.0)
    positions = fields.whole("n_positions", 1024, other="max_position_embeddings")
    tied, scaled = fields.switch("tie_word_embeddings", True), fields.switch("scale_attn_weights", True)
    # None is the usual scale of 1 / sqrt(head_dim).
    ops = _block_ops(d, f, heads, eps, AttentionStyle(None if scaled else 1.0))
    embedding = (Embedding("embed", "tokens", v, d, "embed.weight"),
                 LearnedPositions("positions", "tokens", "y", positions, d, "positions.weight"))  # fmt: skip
    tables = (_param("embed.weight", "wte.weight", v, d), _param("positions.weight", "wpe.weight", positions, d))
    head = (LayerNorm("final_norm", "x", "h", d, "final_norm.weight", "final_norm.bias", eps),
            LMHeadLoss("lm_head", "h", d, v, "lm_head.weight"))  # fmt: skip
    lm_head = ParamSpec("lm_head.weight", (v, d), (WeightSource("lm_head.weight", (v, d)),))
    return assemble(
        name,
        "gpt2",
        config,
        embedding=LayerContent(embedding, tables),
        blocks=[LayerContent(ops, _block_params(f"h.{i}", d, f)) for i in range(layers)],
        head=LayerContent(head, (*_norm("final_norm", "ln_f", d), *(() if tied else (lm_head,)))),
        hidden_size=d,
        vocab_size=v,
        head_dim=d // heads,
        max_position_embeddings=positions,
        longest_sequence=positions,
        initializer_range=fields.number("initializer_range", 0.02, high=100.0),
        tie_word_embeddings=tied,
        prefix=PREFIX,
    )


def _block_ops(d: int, f: int, heads: int, eps: float, style: AttentionStyle):
    def linear(name: str, x: str, y: str, columns: int, rows: int, residual: str | None = None) -> Linear:
        return Linear(name, x, y, columns, rows, f"{name}.weight", f"{name}.bias", residual, transposed=True)

    def norm(name: str, x: str, y: str) -> LayerNorm:
        return LayerNorm(name, x, y, d, f"{name}.weight", f"{name}.bias", eps)

    return (
        norm("attn_norm", "x", "h1"),
        linear("qkv_proj", "h1", "qkv", d, 3 * d),
        CausalAttention("attention", "qkv", "o", heads, heads, d // heads, style),
        linear("o_proj", "o", "x1", d, d, residual="x"),
        norm("mlp_norm", "x1", "h2"),
        linear("up_proj", "h2", "up", d, f),
        Gelu("gelu", "up", "a", f),
        linear("down_proj", "a", "y", f, d, residual="x1"),
    )


def _block_params(prefix: str, d: int, f: int) -> tuple[ParamSpec, ...]:
    def linear(name: str, source: str, columns: int, rows: int) -> tuple[ParamSpec, ParamSpec]:
        return _param(f"{name}.weight", f"{prefix}.{source}.weight", columns, rows), _vector(
            f"{name}.bias", f"{prefix}.{source}.bias", rows, "zeros"
        )

    return (
        *_norm("attn_norm", f"{prefix}.ln_1", d),
        *linear("qkv_proj", "attn.c_attn", d, 3 * d),
        *linear("o_proj", "attn.c_proj", d, d),
        *_norm("mlp_norm", f"{prefix}.ln_2", d),
        *linear("up_proj", "mlp.c_fc", d, f),
        *linear("down_proj", "mlp.c_proj", f, d),
    )


def _norm(name: str, source: str, width: int) -> tuple[ParamSpec, ParamSpec]:
    return (
        _vector(f"{name}.weight", f"{source}.weight", width, "ones"),
        _vector(f"{name}.bias", f"{source}.bias", width, "zeros"),
    )


def _param(name: str, source: str, rows: int, columns: int) -> ParamSpec:
    return ParamSpec(name, (rows, columns), (WeightSource(PREFIX + source, (rows, columns)),))


def _vector(name: str, source: str, width: int, init) -> ParamSpec:
    return ParamSpec(name, (width,), (WeightSource(PREFIX + source, (width,)),), kind="vector", init=init)
