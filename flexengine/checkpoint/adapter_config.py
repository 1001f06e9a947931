"""adapter_config.json as PEFT writes it: which adapters a folder holds. Imports no torch, so that planning may read it.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint; the fields are those of `peft.LoraConfig`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from flexengine.lora import LoRA
from flexengine.wording import parse_json, shown

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_UNSUPPORTED = (
    "use_dora", "modules_to_save", "target_parameters", "rank_pattern", "alpha_pattern", "layer_replication",
    "layers_to_transform", "trainable_token_indices", "lora_bias", "use_qalora", "megatron_config", "corda_config",
    "eva_config", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
"""Fields that change what an adapter computes, in ways that are not built here; PEFT leaves them empty by default."""


def read_lora(folder: Path | str) -> LoRA:
    """Read which adapters a folder holds.

    Raises: ValueError where there is no adapter_config.json, or one that asks for what is not built here.
    """
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        raise ValueError(f"{folder}: there is no {ADAPTER_CONFIG}; give the folder of an adapter as PEFT writes it")
    config = parse_json(path.read_bytes(), path)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        config = config if isinstance(config, dict) else {}
        raise ValueError(f"{path}: peft_type is {shown(config.get('peft_type'))}; only LORA can be trained here")
    wrong = [name for name in _UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        wrong.append("bias")
    if wrong:
        raise ValueError(f"{path}: {wrong[0]}={shown(config[wrong[0]])} is not supported; merge this adapter first")
    targets = config.get("target_modules") or ()
    try:
        return LoRA(
            targets if isinstance(targets, str) else sorted(targets),
            config["r"],
            config.get("lora_alpha", 8),
            bool(config.get("use_rslora", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def adapter_config(lora: LoRA, modules: Collection[str], base: str, transposed: bool) -> dict[str, Any]:
    """The fields of adapter_config.json. modules: names of the adapted modules; base: of the model beneath.

    transposed: the modules hold their weights [in, out], as GPT-2's do.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "target_modules": sorted(modules),
        "modules_to_save": None,
    }
