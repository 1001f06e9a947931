"""Types with Mamba-2 in most of their layers, whose decoder differs from Llama's in values beside, each as a row.

Sources: the model cards of the checkpoints that the rows name; config fields as in Hugging Face.
"""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.block_shape import BlockNames
from flexengine.models.decoder import DecoderNames
from flexengine.models.fields import Fields
from flexengine.models.granite_rows import GRANITE_MOE
from flexengine.models.mamba_block import read_mamba
from flexengine.models.routed import Routed, granite_experts
from flexengine.models.sizes import FULL, LINEAR, MLP, Sizes, layer_types
from flexengine.models.variant import Variant
from flexengine.ops.rmsnorm import NormStyle
from flexengine.wording import shown

OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": "moe"}


def attention_at(fields: Fields, count: int) -> list[str]:
    """Read the kinds of layers where a list numbers those with attention."""
    stated = fields.values.get("attn_layer_indices")
    found = [] if stated is None else stated
    if not isinstance(found, list) or any(type(i) is not int or not 0 <= i < count for i in found):
        raise ValueError(
            f"{fields.model}: attn_layer_indices={shown(stated)} in config.json; expected a list of numbers of layers, "
            f"from 0 to {count - 1}. Fetch the published config.json again"
        )
    return [FULL if i in found else LINEAR for i in range(count)]


def hybrid_kinds(fields: Fields, count: int) -> list[str]:
    """Read the kinds of layers, of which none need have attention."""
    return layer_types(fields, count, [LINEAR] * count, (LINEAR, FULL))


def single_kinds(fields: Fields, count: int) -> list[str]:
    """Read the kinds of layers of one branch each."""
    return layer_types(fields, count, [LINEAR] * count, (LINEAR, FULL, MLP))


def without_experts(config: dict) -> bool:
    """Tell whether no layer has experts, which have no gates here: they run as opaque blocks."""
    return "moe" not in nemotron_layers(Fields("", config)).get("layer_types", [])


def nemotron_layers(fields: Fields) -> dict:
    """Older configs name kinds by letters, or by other words; all name as many as there are layers. `use_bias` is that
    of projections, beside a mamba_proj_bias that nothing reads, and heads are their own whatever a config says."""
    bias = fields.values.get("use_bias", False)
    config = {**fields.values, "mamba_proj_bias": bias, "tie_word_embeddings": False}
    kinds, pattern = config.get("layers_block_type") or config.get("layer_types"), config.get("hybrid_override_pattern")
    if kinds is None:
        kinds = list(pattern) if isinstance(pattern, str) else [LINEAR, "moe", FULL, MLP]
    if not isinstance(kinds, list):
        return config
    names = {**OLD_KINDS, **PATTERN}
    kinds = [names.get(kind, kind) for kind in kinds if isinstance(kind, str)]
    limits = [config.get("time_step_min", 0.001), 1e30]
    return {**config, "layer_types": kinds, "num_hidden_layers": len(kinds), "time_step_limit": limits}


def never(fields: Fields, kinds: list[str]) -> list[bool]:
    """Rotate nothing."""
    return [False] * len(kinds)


def hybrid_experts(fields: Fields, sizes: Sizes) -> Routed | None:
    """Read Granite's experts, of which dense checkpoints have none."""
    return granite_experts(fields, sizes) if fields.whole("num_local_experts", least=0) else None


def shared_alone(fields: Fields) -> dict:
    """Older names of kinds; without experts the shared one is the FFN."""
    config = dict(fields.values)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        config = {**config, "layer_types": [OLD_KINDS.get(kind, kind) for kind in kinds if isinstance(kind, str)]}
    dense = config.get("num_local_experts") == 0
    return {**config, "intermediate_size": config.get("shared_intermediate_size")} if dense else config


def rotated_if_rope(fields: Fields, kinds: list[str]) -> list[bool]:
    """Rotate only where the config names rotations."""
    return [fields.text("position_embedding_type", None) == "rope"] * len(kinds)


MAMBAS: dict[str, Variant] = {
    "bamba": Variant(
        "Bamba 9B", "Mamba-2 in most layers; in the others half of each head rotated", configs_compared=2,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 262144, "mamba_expand": 2, "rms_norm_eps": 1e-5},
        kinds=attention_at, mixer=read_mamba, share=0.5,
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias",
        refused={"z_loss_coefficient": "a loss on the size of logits"},
        names=BlockNames(
            mlp_norm="pre_ff_layernorm", gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
        ),
        parts=DecoderNames(norm="final_layernorm"),
    ),
    "granitemoehybrid": Variant(
        "Granite 4.0", "as granitemoeshared; Mamba-2 in most layers", configs_compared=3,
        **{
            **GRANITE_MOE, "experts": hybrid_experts, "adjusted": shared_alone, "kinds": hybrid_kinds,
            "rotated": rotated_if_rope, "mixer": read_mamba,
            "defaults": {**GRANITE_MOE["defaults"], "shared_intermediate_size": 1024, "mamba_expand": 2},
            "names": BlockNames(
                **{**vars(GRANITE_MOE["names"]), "gate_up": ("shared_mlp.input_linear",),
                   "down": "shared_mlp.output_linear"}
            ),
        },
    ),
    "nemotron_h": Variant(
        "Nemotron-H 8B, Nemotron Nano 9B v2 and others without experts",
        "layers of one branch each: Mamba-2, attention without rotation, or squared ReLU without a gate",
        configs_compared=2,
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "mamba_n_groups": 8,
            "mamba_d_state": 128, "mamba_n_heads": 128, "mamba_d_head": 64, "rms_norm_eps": 1e-5,
        },
        renamed={
            "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "ssm_state_size": "mamba_d_state",
            "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        adjusted=nemotron_layers, kinds=single_kinds, rotated=never, single=True, covers=without_experts,
        mixer=lambda fields: replace(read_mamba(fields), module="mixer"), norm=NormStyle(0.0, wide=True),
        plain=True, activation="relu2", activation_field="mlp_hidden_act",
        mlp_bias="mlp_bias",
        names=BlockNames(
            attn_norm="norm", mlp_norm="norm", qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            o="mixer.o_proj", gate_up=("mixer.up_proj",), down="mixer.down_proj",
        ),
        parts=DecoderNames("backbone", "embeddings", norm="norm_f"),
    ),
}  # fmt: skip
"""Model type -> what it has beside Llama's decoder."""
