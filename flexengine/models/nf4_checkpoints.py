"""Checkpoints whose linear layers are stored in NF4, as bitsandbytes writes them: which ones are read."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from flexengine.models.fields import Fields
from flexengine.wording import shown

METHOD = "bitsandbytes"
NOTICE = "weights are read from NF4, and exported in bfloat16 without a quantization_config"


def nf4_decoder(name: str, names: Container[str]) -> str | None:
    """Name what decodes the tensor `name` of a checkpoint with tensors of these names; None if it is not in NF4."""
    if f"{name}.quant_state.bitsandbytes__nf4" not in names:
        return None
    return "nf4" if f"{name}.nested_absmax" in names else "nf4_float32"


def has_plain_magnitudes(config: dict) -> bool:
    """Tell whether a config says that its checkpoint is in NF4 without double quantisation."""
    options: Any = config.get("quantization_config")
    if not isinstance(options, dict) or options.get("quant_method") != METHOD:
        return False
    return options.get("bnb_4bit_use_double_quant", False) is False


def check_nf4(name: str, config: dict) -> None:
    """Raise ValueError for a quantization_config of bitsandbytes that asks for anything but NF4."""
    options = Fields(name, config).nested("quantization_config")
    wanted = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    for key, value in wanted.items():
        if options.get(key) != value:
            raise ValueError(
                f"{name}: quantization_config in config.json has {key}={shown(options.get(key))}; of {METHOD}, NF4 is"
                " read (load_in_4bit, bnb_4bit_quant_type nf4). Give the checkpoint in 16 bits that it was made from"
            )
