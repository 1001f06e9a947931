"""adapter_config.json as PEFT writes it: which adapters a folder holds. Imports no torch, so that planning may read it.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint; the fields are those of `peft.LoraConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from flexengine.checkpoint.layout import ADAPTER_CONFIG
from flexengine.checkpoint.manifest import check_acted_on
from flexengine.lora import PISSA, LoRA
from flexengine.wording import parse_json, shown

ADAPTER_WEIGHTS = "adapter_model.safetensors"

_UNSUPPORTED = (
    "rank_pattern", "alpha_pattern", "layer_replication",
    "layers_to_transform", "trainable_token_indices", "lora_bias", "use_qalora", "megatron_config", "corda_config",
    "eva_config", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
"""Fields that change what an adapter computes, in ways that are not built here; PEFT leaves them empty by default."""


def read_lora(folder: Path | str) -> LoRA:
    """Read which adapters a folder holds.

    Raises: ValueError where there is no adapter_config.json, one that asks for what is not built here, or one that is
    not what the manifest of the folder says.
    """
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        raise ValueError(f"{folder}: there is no {ADAPTER_CONFIG}; give the folder of an adapter as PEFT writes it")
    check_acted_on(Path(folder))
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
            [*([targets] if isinstance(targets, str) else sorted(targets)), *(config.get("target_parameters") or ())],
            config["r"],
            config.get("lora_alpha", 8),
            bool(config.get("use_rslora", False)),
            use_dora=bool(config.get("use_dora", False)),
            init=_init(config.get("init_lora_weights", True)),
            modules_to_save=config.get("modules_to_save") or (),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def embedding_rows(folder: Path | str, embedding: str) -> int:
    """Count the rows of the embedding that stands beside the adapters of a folder; 0 where none does.

    embedding: the name of the model's own. PEFT saves it where tokens were added, or where it is trained as well.
    """
    path = Path(folder) / ADAPTER_WEIGHTS
    if not path.is_file():
        return 0
    try:
        with safe_open(path, framework="np") as file:
            ends = ".".join(embedding.split(".")[-2:])
            found = next((name for name in file.keys() if name.endswith(f".{ends}")), None)  # noqa: SIM118 - no mapping
            return 0 if found is None else file.get_slice(found).get_shape()[0]
    except (SafetensorError, OSError):  # told when the adapter is read
        return 0


def _init(named: object) -> str:
    """How the base beneath an adapter was changed before it was trained; where an adapter started else is past.

    Raises: ValueError for a change that is not built here.
    """
    if isinstance(named, str) and named.startswith(PISSA):
        return named
    if isinstance(named, bool) or named in ("gaussian", "orthogonal", "eva"):
        return "default"
    raise ValueError(f"init_lora_weights={shown(named)} changes the weights beneath; merge this adapter first")


_TEXT = "language_model"
"""The module that holds the text of a model with images, whose other modules have names in common with it."""


class Targets(NamedTuple):
    """Names of adapted modules, of adapted tensors that hold all experts, and of modules that are trained in full.

    adapted: the whole names of adapted modules.
    """

    modules: Collection[str]
    parameters: Collection[str]
    saved: Collection[str]
    adapted: Collection[str]


def adapter_config(lora: LoRA, targets: Targets, base: str, transposed: bool) -> dict[str, Any]:
    """The fields of adapter_config.json. base: the name of the model beneath.


    transposed: the modules hold their weights [in, out], as GPT-2's do. Of adapters that began with a part of the base,
    files hold what was taken out of it as well, so that they have twice the rank and the same scale.
    """
    rank = 2 * lora.rank if lora.changes_base else lora.rank
    alpha = lora.scale * (math.sqrt(rank) if lora.use_rslora else rank) if lora.changes_base else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "target_modules": sorted(targets.modules),
        "target_parameters": sorted(targets.parameters) or None,
        "exclude_modules": rf"(?!.*\b{_TEXT}\b).*" if any(_TEXT in name for name in targets.adapted) else None,
        "modules_to_save": sorted(targets.saved) or None,
    }
