"""Builds decoders that differ from Llama's in values alone: each is a row of `variant_rows.py`."""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.block_shape import BlockShape
from flexengine.models.decoder import DecoderShape, decoder_model
from flexengine.models.deepseek import read_heads
from flexengine.models.fields import Fields
from flexengine.models.latent_block import LatentAttention
from flexengine.models.moe import check_counts, read_balance
from flexengine.models.rope import THETA_RANGE, rope_table, score_scale, typed_rope_table
from flexengine.models.sizes import FULL, LINEAR, MLP, SLIDING, Sizes, read_activation, read_sizes, read_window
from flexengine.models.spec import ModelSpec, Table
from flexengine.models.variant import Switch, Variant
from flexengine.models.variant_rows import VARIANTS
from flexengine.ops.attention.style import AttentionStyle


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of a type that has a row. Raises ValueError as the others do."""
    family = config["model_type"]
    row = VARIANTS[family]
    config = _with_usual_names(name, config, row)
    fields = Fields(name, config)
    _refuse_others(fields, row)
    sizes, norm = read_sizes(fields), row.norm._replace(eps=fields.number(*row.eps, high=1.0))
    kinds = row.kinds(fields, sizes.num_hidden_layers)
    rotated = row.rotated(fields, kinds)
    mixer = None if row.mixer is None else row.mixer(fields)
    latent = None if row.latent is None else _latent(fields, row.latent(fields))
    tables = _tables(fields, config, latent.heads.rope_dim if latent else sizes.head_dim, row)
    by_layer = [tables[kind] if rotates else None for kind, rotates in zip(kinds, rotated, strict=True)]
    if row.layer_thetas and fields.values.get(row.layer_thetas) is not None:
        by_layer = _tables_by_layer(fields, len(kinds), sizes.head_dim, row.layer_thetas)
    experts = None if row.experts is None else row.experts(fields, sizes)
    if experts is not None:
        check_counts(name, experts.shape)

    def block(index: int) -> BlockShape:
        shape = _block(fields, sizes, row, kinds[index])
        table = by_layer[index]
        rope = {} if table is None else {"rope_scaling": table.scaling}
        shape = replace(shape, norm=norm, rope=None if table is None else table.name, **rope)
        if latent:
            scale = sizes.head_dim**-0.5 * score_scale(config, name)
            shape = replace(shape, mixer=latent, attention=AttentionStyle(scale))
        if kinds[index] == LINEAR:
            shape = replace(shape, mixer=mixer)
        if row.single:
            shape = replace(shape, only="ffn" if kinds[index] == MLP else "mixer")
        return shape if experts is None or index in experts.dense else replace(shape, experts=experts.shape)

    # those for each kind in the order of kinds, whichever comes first in the model
    made = (*tables.values(), *by_layer) if row.typed_ropes else (*by_layer, *tables.values())
    shape = DecoderShape(
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=fields.switch("tie_word_embeddings", row.tied),
        blocks=tuple(block(i) for i in range(sizes.num_hidden_layers)),
        tables=tuple(dict.fromkeys(table for table in made if table is not None)),
        final_norm=norm,
        embedding_scale=row.embedding_scale(fields),
        logit_scale=row.logit_scale(fields),
        logit_soft_cap=fields.number("final_logit_softcapping", 0.0) if row.logit_cap else 0.0,
        balance_coefficient=read_balance(fields) if row.balanced else 0.0,
        names=row.names,
        parts=row.parts,
    )
    return row.told(decoder_model(name, family, config, shape), fields)


def _with_usual_names(name: str, config: dict, row: Variant) -> dict:
    """Give the fields their usual names, and add those that a config of this type leaves out."""
    fields, renamed = Fields(name, config), dict(config)
    for own, usual in row.renamed.items():
        if own in config:
            if config.get(usual) is not None:
                fields.check_told_once(own, usual, config[own] == config[usual])
            renamed[usual] = config[own]
    return row.adjusted(Fields(name, {**row.defaults, **renamed}))


def _refuse_others(fields: Fields, row: Variant) -> None:
    """Raise ValueError for features that configs of a type can ask for and no op has."""
    found = [f"{field} ({feature})" for field, feature in row.refused.items() if fields.values.get(field)]
    if found:
        raise ValueError(f"{fields.model}: config.json asks for {'; '.join(found)}: not supported in this model type")


def _latent(fields: Fields, interleaved: bool) -> LatentAttention:
    ranks = fields.whole("q_lora_rank", 0), fields.whole("kv_lora_rank")
    return LatentAttention(read_heads(fields), *ranks, fields.switch("attention_bias", False), interleaved)


def _tables(fields: Fields, config: dict, head_dim: int, row: Variant) -> dict[str, Table]:
    """Give the frequencies of each kind of layers."""
    name = fields.model
    if row.typed_ropes:
        thetas = {FULL: ("rope_theta", row.theta), SLIDING: (row.window_theta_field, row.window_theta)}
        return {kind: typed_rope_table(config, head_dim, name, kind, *theta) for kind, theta in thetas.items()}
    options = {"theta": row.theta, "share": row.share, "partial": row.share < 1.0 or row.partial}
    return dict.fromkeys(
        (FULL, SLIDING, LINEAR, MLP), rope_table(config, head_dim, name, config["model_type"], **options)
    )


def _tables_by_layer(fields: Fields, count: int, head_dim: int, place: str) -> list[Table | None]:
    """Give the frequencies of each layer of a config that states a base for each; None for a layer without rotation."""
    thetas = fields.numbers(place, count, 0.0, THETA_RANGE[1])
    options = fields.nested("rope_parameters") or fields.nested("rope_scaling")

    def table(theta: float) -> Table:
        rope = {**options, "rope_theta": theta}
        config = {**fields.values, "rope_theta": None, "rope_scaling": None, "rope_parameters": rope}
        return rope_table(config, head_dim, fields.model, name=f"inv_freq.{theta:g}")

    made = {theta: table(theta) for theta in set(thetas) if theta}
    return [made.get(theta) for theta in thetas]


def _block(fields: Fields, sizes: Sizes, row: Variant, kind: str) -> BlockShape:
    def switched(value: Switch) -> bool:
        return fields.switch(value, False) if isinstance(value, str) else value

    activation = read_activation(fields, fields.values["model_type"], row.activation_field, row.activation)
    style = AttentionStyle(
        row.score_scale(fields),
        read_window(fields) if kind == SLIDING else 0,
        fields.number("attn_logit_softcapping", 0.0) if row.score_cap else 0.0,
        row.sinks,
    )
    return sizes.block(
        row.norm,
        norms=row.norms(fields),
        qkv_bias=switched(row.qkv_bias),
        o_bias=switched(row.o_bias),
        mlp_bias=switched(row.mlp_bias),
        qk_norm=row.qk_norm if switched(row.has_qk_norm) else None,
        norm_after_rope=row.norm_after_rope,
        interleaved=row.interleaved,
        query_scale=row.query_scale(fields),
        attention=style,
        parallel=switched(row.parallel),
        residual_scale=row.residual_scale(fields),
        **({"plain": activation} if row.plain else {"activation": activation}),
    )
