"""Types with Mamba-2 in most of their layers, whose decoder differs from Llama's in values beside, each as a row.

Sources: the model cards of the checkpoints that the rows name; config fields as in Hugging Face.
"""

from __future__ import annotations

from flexengine.models.block_shape import BlockNames
from flexengine.models.decoder import DecoderNames
from flexengine.models.fields import Fields
from flexengine.models.granite_rows import GRANITE_MOE
from flexengine.models.mamba_block import read_mamba
from flexengine.models.routed import Routed, granite_experts
from flexengine.models.sizes import FULL, LINEAR, Sizes, layer_types
from flexengine.models.variant import Variant
from flexengine.wording import shown

OLD_KINDS = {"mamba": LINEAR, "attention": FULL}


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


def hybrid_experts(fields: Fields, sizes: Sizes) -> Routed | None:
    """Read Granite's experts, of which dense checkpoints have none."""
    return granite_experts(fields, sizes) if fields.whole("num_local_experts", least=0) else None


def shared_alone(config: dict) -> dict:
    """Older names of kinds; without experts the shared one is the FFN."""
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
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 262144},
        kinds=attention_at, mixer=read_mamba, share=0.5, eps=("rms_norm_eps", 1e-5),
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
            "defaults": {**GRANITE_MOE["defaults"], "shared_intermediate_size": 1024},
            "names": BlockNames(
                **{**vars(GRANITE_MOE["names"]), "gate_up": ("shared_mlp.input_linear",),
                   "down": "shared_mlp.output_linear"}
            ),
        },
    ),
}  # fmt: skip
"""Model type -> what it has beside Llama's decoder."""
