"""adapter_config.json as PEFT writes it: which adapters a folder holds. Imports no torch, so that planning may read it.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint; the fields are those of `peft.LoraConfig`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from flexengine.checkpoint.layout import ADAPTER_CONFIG, TOKENIZERS
from flexengine.checkpoint.manifest import check_acted_on
from flexengine.options.lora import ALL_LINEAR, PISSA, LoRA, Targets
from flexengine.options.task import Task
from flexengine.wording import parse_json, shown

ADAPTER_WEIGHTS = "adapter_model.safetensors"
MERGE_FIRST = "merge this adapter into its model with PEFT (merge_and_unload), and start from the merged model"
GATE_UP = "experts.gate_up_proj"
"""The parameter in which transformers stacks two modules of all experts, whose adapters PEFT stacks, too."""

_READ = (
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "init_lora_weights", "modules_to_save", "target_modules",
    "target_parameters", "exclude_modules", "rank_pattern", "alpha_pattern", "bias",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping",
    "lora_dropout", "fan_in_fan_out", "ensure_weight_tying", "layers_pattern", "megatron_core", "qalora_group_size",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
)  # fmt: skip
"""Fields of PEFT 0.21 that say where an adapter comes from or how it started, or that mean something beside others
alone. Any other field that is set may change what an adapter computes, also one that later versions bring."""


def read_lora(folder: Path | str) -> LoRA:
    """Read which adapters a folder holds.

    Raises: ValueError where there is no adapter_config.json, one that asks for what is not built here, or one that is
    not what the manifest of the folder says.
    """
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        raise ValueError(f"{folder}: there is no {ADAPTER_CONFIG}; give the folder of an adapter as PEFT writes it")
    check_acted_on(Path(folder))
    return lora_of(parse_json(path.read_bytes(), path), str(path))


def lora_of(config: Any, where: str) -> LoRA:
    """Read adapters from the fields of PEFT's LoraConfig. where: what has them, for messages. Raises: ValueError."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        config = config if isinstance(config, dict) else {}
        raise ValueError(f"{where}: peft_type is {shown(config.get('peft_type'))}; only LORA can be trained here")
    wrong = [name for name, value in config.items() if value and name not in (*_READ, *_WITHOUT_EFFECT)]
    wrong += [name for name in ("rank_pattern", "alpha_pattern") if config.get(name) and not _stacks_two(config)]
    if config.get("bias", "none") != "none":
        wrong.append("bias")
    if wrong:
        raise ValueError(f"{where}: {wrong[0]}={shown(config[wrong[0]])} is not supported; {MERGE_FIRST}")
    try:
        return LoRA(
            [*_targets(config), *(config.get("target_parameters") or ())],
            _number(config, "r", int),
            _number({"lora_alpha": 8, **config}, "lora_alpha", int, float),
            bool(config.get("use_rslora", False)),
            use_dora=bool(config.get("use_dora", False)),
            init=_init(config.get("init_lora_weights", True)),
            modules_to_save=config.get("modules_to_save") or (),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


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


def tokenizer_of(folder: Path | str) -> Path | None:
    """The folder of an adapter where it holds a tokenizer, with the chat template that it was trained with; else None.

    Raises: ValueError for a chat template without a tokenizer.
    """
    folder = Path(folder)
    if any((folder / name).is_file() for name in TOKENIZERS):
        return folder
    options = folder / "tokenizer_config.json"
    config = parse_json(options.read_bytes(), options) if options.is_file() else {}
    if (folder / "chat_template.jinja").is_file() or (isinstance(config, dict) and config.get("chat_template")):
        raise ValueError(
            f"{folder} holds a chat template, but no tokenizer ({' or '.join(TOKENIZERS)}): copy its model's there,"
            " or remove chat_template to train with the model's"
        )
    return None


def named_tokenizer(folder: Path) -> Path:
    """The folder that a person names for a tokenizer. Raises: ValueError where it holds none."""
    if folder.is_dir() and tokenizer_of(folder) is not None:
        return folder
    problem = f"no {' or '.join(TOKENIZERS)} in it" if folder.is_dir() else "no such folder"
    raise ValueError(f"tokenizer {folder}: {problem}; give a folder with a tokenizer's files")


def _stacks_two(config: dict[str, Any]) -> bool:
    """Whether both patterns say no more than that adapters of experts' gate and up are stacked, as files of ours do."""
    patterns = {"rank_pattern": config.get("r"), "alpha_pattern": config.get("lora_alpha")}
    return all(config.get(name) == {GATE_UP: 2 * own} for name, own in patterns.items() if isinstance(own, int | float))


def _number(config: dict[str, Any], name: str, *kinds: type) -> Any:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{name} is {shown(value)}, expected a {'whole ' if float not in kinds else ''}number")
    return value


def _targets(config: dict[str, Any]) -> list[str]:
    """The adapted modules by names, or by one expression that leaves those of exclude_modules out.

    Raises: ValueError where there are none.
    """
    found: str | list[str] | None = config.get("target_modules")
    excluded = config.get("exclude_modules")
    if not found and not config.get("target_parameters"):
        raise ValueError(f"target_modules is {shown(found)}; write the names of the adapted modules there")
    targets = [found] if isinstance(found, str) else sorted(found or ())
    if not excluded or not found:
        return targets
    if found == ALL_LINEAR:
        raise ValueError(f"exclude_modules beside target_modules={found} is not built here; write the names of modules")
    return [rf"(?!(?:{_expression(excluded)})\Z)(?:{_expression(found)})"]


def _expression(named: str | Collection[str]) -> str:
    """What matches whole names of modules: PEFT takes a text for an expression, and a list for ends of names."""
    return named if isinstance(named, str) else rf"(?:.*\.)?(?:{'|'.join(re.escape(name) for name in sorted(named))})"


def _init(named: object) -> str:
    """How the base beneath an adapter was changed before it was trained; where an adapter started else is past.

    Raises: ValueError for a change that is not built here.
    """
    if isinstance(named, str) and named.startswith(PISSA):
        return named
    if isinstance(named, bool) or named in ("gaussian", "orthogonal", "eva"):
        return "default"
    raise ValueError(f"init_lora_weights={shown(named)} changes the weights beneath; {MERGE_FIRST}")


_TEXT = "language_model"
"""The module that holds the text of a model with images, whose other modules have names in common with it."""


TASK_TYPES = {None: "CAUSAL_LM", "sequence": "SEQ_CLS", "token": "TOKEN_CLS"}
"""What a model's head is for -> PEFT's name of it."""


def adapter_config(lora: LoRA, targets: Targets, base: str, transposed: bool, task: Task | None) -> dict[str, Any]:
    """The fields of adapter_config.json. base: the name of the model beneath. task: what its head labels.

    transposed: the modules hold their weights [in, out], as GPT-2's do. Of adapters that began with a part of the base,
    files hold what was taken out of it as well, so that they have twice the rank and the same scale.
    """
    rank, alpha = lora.rank, lora.alpha
    # PEFT stacks what experts' gate and up have, with twice the rank and alpha: a root of the rank would change.
    rooted = lora.use_rslora and not targets.of_experts
    if lora.changes_base or rooted != lora.use_rslora:
        rank = 2 * rank if lora.changes_base else rank
        alpha = lora.scale * (math.sqrt(rank) if rooted else rank)
    of_text = bool(targets.adapted) and all(_TEXT in name for name in targets.adapted)
    return {
        "peft_type": "LORA",
        "task_type": TASK_TYPES[task],
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: 2 * rank for name in targets.doubled},
        "alpha_pattern": {name: 2 * alpha for name in targets.doubled},
        "lora_dropout": 0.0 if targets.parameters else lora.dropout,  # PEFT refuses it beside adapters of parameters
        "use_rslora": rooted,
        "use_dora": lora.use_dora,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "target_modules": sorted(targets.modules),
        "target_parameters": sorted(targets.parameters) or None,
        "exclude_modules": rf"(?!.*\b{_TEXT}\b).*" if of_text else None,
        "modules_to_save": sorted(targets.saved) or None,
    }
