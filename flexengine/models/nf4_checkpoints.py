"""Checkpoints whose linear layers are stored in NF4, as bitsandbytes writes them: which ones are read."""

from __future__ import annotations

from collections.abc import Container

from flexengine.models.fields import Fields
from flexengine.wording import shown

METHOD = "bitsandbytes"
NOTICE = "weights are read from NF4, and exported in bfloat16 without a quantization_config"


def is_in_nf4(name: str, names: Container[str]) -> bool:
    """Tell whether a checkpoint with tensors of these names holds the tensor `name` in NF4."""
    return f"{name}.quant_state.bitsandbytes__nf4" in names


def check_nf4(name: str, config: dict) -> None:
    """Raise ValueError for a quantization_config of bitsandbytes that asks for anything but NF4 with double
    quantisation."""
    options = Fields(name, config).nested("quantization_config")
    wanted = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    for key, value in wanted.items():
        if options.get(key) != value:
            raise ValueError(
                f"{name}: quantization_config in config.json has {key}={shown(options.get(key))}; of {METHOD}, NF4 with"
                " double quantisation is read (load_in_4bit, bnb_4bit_quant_type nf4, bnb_4bit_use_double_quant). Give"
                " the checkpoint in 16 bits that it was made from"
            )
