"""Phi-3, Phi-3.5 and Phi-4 (type `phi3`): Llama's block with projections that are fused in the checkpoint, rotations of
a part of each head, a window where the config has one, and frequencies for long and for short runs (LongRoPE).

Source: Abdin et al. 2024, "Phi-3 Technical Report" and "Phi-4 Technical Report"; config fields as in Hugging Face.
"""

from __future__ import annotations

from flexengine.models.block_shape import BlockNames
from flexengine.models.decoder import DecoderShape, decoder_model
from flexengine.models.fields import Fields
from flexengine.models.rope import rope_table
from flexengine.models.sizes import read_activation, read_rms_norm_eps, read_sizes, read_window
from flexengine.models.spec import ModelSpec
from flexengine.ops.attention.style import AttentionStyle
from flexengine.ops.rmsnorm import NormStyle
from flexengine.wording import shown

ROPE_TYPES = {None: None, "default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Rope types by the names in the family's configs; early ones say "su" or "yarn" for longrope."""
NAMES = BlockNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of type `phi3`. Raises ValueError as the others do."""
    fields, config = Fields(name, config), _with_longrope(name, config)
    read_activation(fields, "phi3")
    sizes, norm = read_sizes(fields), NormStyle(read_rms_norm_eps(fields, 1e-5))
    table = rope_table(config, sizes.head_dim, name, "phi3", partial=True)
    block = sizes.block(norm, rope_scaling=table.scaling, attention=AttentionStyle(window=read_window(fields)))
    shape = DecoderShape(
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=fields.switch("tie_word_embeddings", False),
        blocks=(block,) * sizes.num_hidden_layers,
        tables=(table,),
        final_norm=norm,
        names=NAMES,
    )
    return decoder_model(name, "phi3", config, shape)


def _with_longrope(name: str, config: dict) -> dict:
    """Name the config's rope type as today's configs do. Raises ValueError for types that the family does not have."""
    renamed, fields = dict(config), Fields(name, config)
    for place in ("rope_parameters", "rope_scaling"):
        options = fields.nested(place)
        for spelling in ("rope_type", "type"):
            kind = options.get(spelling)
            if not isinstance(kind, str | None) or kind not in ROPE_TYPES:
                raise ValueError(
                    f"{name}: rope type {shown(kind)} in config.json; a phi3 model has none, default or longrope, "
                    "others are not supported"
                )
            options |= {spelling: ROPE_TYPES[kind]} if kind else {}
        renamed[place] = options
    return renamed
