"""DeepSeek-V2 (type `deepseek_v2`) and DeepSeek-V3 (`deepseek_v3`): latent attention, and routed experts beside shared
ones in all layers but the first few.

Source: DeepSeek-AI 2024, "DeepSeek-V2" and "DeepSeek-V3 Technical Report"; config fields as in Hugging Face.
"""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.block_shape import BlockNames, BlockShape, ExpertShape
from flexengine.models.decoder import DecoderShape, decoder_model
from flexengine.models.fields import Fields
from flexengine.models.latent_block import LatentAttention
from flexengine.models.rope import rope_table, score_scale
from flexengine.models.routed import check_groups
from flexengine.models.sizes import read_activation, read_rms_norm_eps
from flexengine.models.spec import ModelSpec
from flexengine.ops.attention.latent_heads import HeadSizes
from flexengine.ops.attention.style import AttentionStyle
from flexengine.ops.experts.router import RouterStyle
from flexengine.ops.rmsnorm import NormStyle
from flexengine.wording import shown

NAMES = BlockNames(shared="mlp.shared_experts")
CHOICES = {"deepseek_v2": ("greedy", "group_limited_greedy"), "deepseek_v3": ("noaux_tc",)}
"""Values of `topk_method` that each type may have; the first is the default."""
SCORES = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid"}


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of one of these types. Raises ValueError as the others do."""
    fields, family = Fields(name, config), config["model_type"]
    read_activation(fields, family)
    _refuse_others(fields, family)
    heads = read_heads(fields)
    table = rope_table(config, heads.rope_dim, name, family)
    norm = NormStyle(read_rms_norm_eps(fields))
    # V2 always rotates interleaved pairs; V3 says so in its config.
    mixer = LatentAttention(
        heads,
        query_rank=fields.whole("q_lora_rank", 0),
        key_rank=fields.whole("kv_lora_rank"),
        bias=fields.switch("attention_bias", False),
        interleaved=family == "deepseek_v2" or fields.switch("rope_interleave", True),
    )
    # Every head has keys of its own: all are made from one latent. The width of a head is that of its queries and keys.
    dense = BlockShape(
        fields.whole("hidden_size"),
        fields.whole("intermediate_size"),
        heads.num_heads,
        heads.num_heads,
        heads.head_dim,
        norm,
        mlp_bias=family == "deepseek_v2" and fields.switch("mlp_bias", False),
        rope_scaling=table.scaling,
        attention=AttentionStyle(scale=heads.head_dim**-0.5 * score_scale(config, name)),
        mixer=mixer,
    )
    # The first layers have a plain FFN, all others experts.
    sparse, first = replace(dense, experts=_read_experts(fields, family)), fields.whole("first_k_dense_replace", 0, 0)
    shape = DecoderShape(
        vocab_size=fields.whole("vocab_size"),
        tie_word_embeddings=fields.switch("tie_word_embeddings", False),
        blocks=tuple(dense if i < first else sparse for i in range(fields.whole("num_hidden_layers"))),
        tables=(table,),
        final_norm=norm,
        names=NAMES,
    )
    spec = decoder_model(name, family, config, shape)
    if not fields.whole("num_nextn_predict_layers", 0, 0):
        return spec
    following = f"model.layers.{len(shape.blocks)} and on, which predict further tokens,"
    notice = f"{following} are not trained: where the checkpoint has them, they are exported as they are"
    return replace(spec, notice=notice)


def read_heads(fields: Fields) -> HeadSizes:
    """Read the widths of heads. Raises ValueError for widths that do not go together."""
    count = fields.whole("num_attention_heads")
    nope, rope = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    heads = HeadSizes(count, nope, rope, fields.whole("v_head_dim"))
    if rope % 2:
        raise ValueError(
            f"{fields.model}: qk_rope_head_dim={rope} in config.json is odd; rotary embeddings need an even width. "
            "Fetch the published one again"
        )
    if heads.value_dim > heads.head_dim:
        raise ValueError(
            f"{fields.model}: v_head_dim={heads.value_dim} in config.json is more than the {heads.head_dim} of "
            "qk_nope_head_dim and qk_rope_head_dim together; values wider than keys are not supported"
        )
    if fields.whole("num_key_value_heads", count) != count:
        raise ValueError(
            f"{fields.model}: num_key_value_heads={fields.values['num_key_value_heads']} in config.json; latent "
            f"attention has as many as num_attention_heads={count}. Fetch the published one again"
        )
    return heads


def _read_experts(fields: Fields, family: str) -> ExpertShape:
    """Read the experts. Raises ValueError for groups and counts that do not go together."""
    third = family == "deepseek_v3"
    spelled = "num_local_experts" if third else "num_experts"
    count = fields.whole(spelled, 256 if third else 64, other="n_routed_experts")
    per_token, method = fields.whole("num_experts_per_tok"), fields.text("topk_method", CHOICES[family][0])
    # A token first chooses groups of experts, then experts in these; without groups all experts are one group.
    grouped = third or method == "group_limited_greedy"
    groups, taken = (fields.whole("n_group"), fields.whole("topk_group")) if grouped else (1, 1)
    best = 2 if third else 1  # experts whose scores make that of their group
    check_groups(fields, count, groups, taken, per_token, best)
    router = RouterStyle(
        "sigmoid" if third else "softmax",
        groups,
        taken,
        best,
        scale=fields.number("routed_scaling_factor", 1.0, high=1e6),
        biased=third,
        exact=True,
    )
    width = fields.whole("moe_intermediate_size")
    normalised = third and fields.switch("norm_topk_prob", True)
    shared = width * fields.whole("n_shared_experts")
    return ExpertShape(count, per_token, width, normalised, shared, shared_gated=False, router=router)


def _refuse_others(fields: Fields, family: str) -> None:
    """Raise ValueError for features that configs of these types can ask for and no op has."""
    method, scores = fields.text("topk_method", CHOICES[family][0]), fields.text("scoring_func", SCORES[family])
    asked = {
        "output_router_logits=true, a loss that balances experts": fields.switch("output_router_logits", False),
        f"topk_method={shown(method)}": method not in CHOICES[family],
        f"scoring_func={shown(scores)}": scores != SCORES[family],
        "moe_layer_freq, layers without experts in between": fields.whole("moe_layer_freq", 1) > 1,
        "norm_topk_prob=true, on which the published code and transformers differ": (
            family == "deepseek_v2" and fields.switch("norm_topk_prob", False)
        ),
    }
    found = [feature for feature, present in asked.items() if present]
    if found:
        raise ValueError(f"{fields.model}: config.json asks for {'; '.join(found)}: not supported in a {family} model")
