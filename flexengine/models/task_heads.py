"""Describes a model with a head that labels tokens or sequences, in place of the one that predicts the next token.

`architectures` in config.json says which head a checkpoint has; a job may ask for another, which then begins with
random weights. Names are those of transformers, so that its classes load what is exported.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace
from typing import Any, get_args

from flexengine.models.spec import ModelSpec, ParamSpec, WeightSource
from flexengine.ops.label_head import LabelHead
from flexengine.options.lora import LoRA
from flexengine.options.task import Problem, Task, TaskHead
from flexengine.wording import shown

CLASS_ENDS: dict[str, Task] = {"ForSequenceClassification": "sequence", "ForTokenClassification": "token"}
"""End of the name of a class of transformers -> its task."""
WITH_TOKENS = frozenset({
    "arcee", "deepseek_v3", "exaone4", "gemma", "gemma2", "glm", "glm4", "gpt-sw3", "gpt2", "gpt_oss", "helium",
    "llama", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
"""Families whose tokens a class of transformers labels."""
WITH_SEQUENCES = WITH_TOKENS | {
    "deepseek_v2", "gemma3_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "minicpm3", "olmo", "olmo2", "olmo3",
    "qwen3_5_text", "gemma3", "qwen3_5",
}  # fmt: skip
"""Families whose sequences a class of transformers scores; with images those of Gemma 3 and Qwen3.5."""
MOST_LABELS = 4096
HEADS_OF_PEFT = ("score", "classifier")
"""What PEFT calls the heads that it trains beside adapters."""


def read_head(name: str, config: dict[str, Any]) -> TaskHead | None:
    """Read which head a config describes; None for one that predicts tokens, or for another task.

    Raises: ValueError for labels that cannot be, and for families whose text transformers has no such class for.
    """
    task = _task_of(config)
    if task is None:
        return None
    family = config.get("model_type")
    if family not in (WITH_SEQUENCES if task == "sequence" else WITH_TOKENS):
        raise ValueError(
            f"{name}: a model of type {shown(family)} that scores {_what(task)}: transformers has no class for it that"
            " is trained here. Give a model of another type, or one that predicts tokens (...ForCausalLM)"
        )
    count = _num_labels(name, config)
    problem = config.get("problem_type") or ("regression" if count == 1 else "single_label_classification")
    if problem not in get_args(Problem):
        raise ValueError(
            f"{name}: problem_type={shown(problem)} in config.json; allowed: {', '.join(get_args(Problem))}"
        )
    if (problem == "single_label_classification" or task == "token") and count == 1:
        raise ValueError(
            f"{name}: one label in config.json for {_what(task)} with problem_type={problem}; classes are two or more"
        )
    if task == "token" and problem != "single_label_classification":
        raise ValueError(f"{name}: problem_type={problem} in config.json, but tokens have one of several classes each")
    return TaskHead(task, count, problem, _pad_token(name, config))


def _task_of(config: dict[str, Any]) -> Task | None:
    stated = config.get("architectures")
    names = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
    return next((task for end, task in CLASS_ENDS.items() for name in names if name.endswith(end)), None)


def _what(task: Task) -> str:
    return "sequences" if task == "sequence" else "tokens"


def _num_labels(name: str, config: dict[str, Any]) -> int:
    """The number of labels as transformers reads it: of their names, else the one stated, else two."""
    names, stated = config.get("id2label"), config.get("num_labels", 2)
    count = len(names) if isinstance(names, dict) else stated
    if type(count) is not int or not 1 <= count <= MOST_LABELS:
        raise ValueError(f"{name}: {shown(count)} labels in config.json; allowed: 1 to {MOST_LABELS}")
    return count


def _pad_token(name: str, config: dict[str, Any]) -> int | None:
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else config).get("pad_token_id")
    if found is not None and type(found) is not int:
        raise ValueError(f"{name}: pad_token_id={shown(found)} in config.json; expected the id of a token")
    return found


def config_for(
    name: str, config: dict[str, Any], task: Task, labels: tuple[str, ...], problem: Problem | None
) -> dict[str, Any]:
    """The config of the same model with another head. labels: names of its outputs, in their order.

    Raises: ValueError for a config that does not name its class, whose name the other one follows from.
    """
    stated = config.get("architectures")
    first = stated[0] if isinstance(stated, list) and stated and isinstance(stated[0], str) else ""
    stem = re.sub(r"(For[A-Z]\w*|Model|LMHeadModel)$", "", first)
    if not stem:
        raise ValueError(
            f"{name}: config.json names no class (architectures={shown(stated)}), so that of its {_what(task)} cannot"
            " be told; add architectures, as of the checkpoint that it came from"
        )
    end = next(end for end, other in CLASS_ENDS.items() if other == task)
    names = {str(i): label for i, label in enumerate(labels)}
    kept = {key: value for key, value in config.items() if key not in ("problem_type", "num_labels")}
    own = {"architectures": [stem + end], "id2label": names, "label2id": {label: int(i) for i, label in names.items()}}
    return {**kept, **own, **({} if problem is None else {"problem_type": problem})}


def with_task_head(spec: ModelSpec, head: TaskHead) -> ModelSpec:
    """Replace the head of a model. Call it before everything else that replaces ops or groups.

    What scales or caps logits goes with the old head, as does a loss that balances experts: transformers has neither
    beside such heads. A tied embedding is then read by the embedding alone.
    """
    d, own = spec.hidden_size, "score"
    biased = head.task == "token" and spec.hf_config.get("token_classification_bias", True) is not False
    if head.task == "token" and spec.family in ("gpt2", "gpt-sw3"):
        own = "classifier"
    shape = (head.num_labels, d)
    params = [ParamSpec("score.weight", shape, (WeightSource(f"{own}.weight", shape),))]
    if biased:
        bias = WeightSource(f"{own}.bias", shape[:1])
        params.append(ParamSpec("score.bias", shape[:1], (bias,), "vector", "zeros"))
    *others, old = spec.layers
    norm = old.ops[0]
    op = LabelHead("score", norm.outputs[0].name, d, head.num_labels, "score.weight", "score.bias" if biased else None)
    last = len(spec.groups) - 1
    group = spec.groups[last]
    kept = tuple(param for param in group.params if param.name in norm.params)
    group = replace(group, params=(*kept, *params))
    layer = replace(old, ops=(norm, op), params=tuple((param.name, last, param.name) for param in group.params))
    return replace(
        spec,
        task=head,
        head_source=f"{own}.weight",
        tie_word_embeddings=False,
        balancing=None,
        groups=(*spec.groups[:-1], group),
        layers=(*others, layer),
    )


def with_new_head(spec: ModelSpec, names: Container[str]) -> ModelSpec:
    """Mark the head of a model as new where a checkpoint of tensors of these names has none."""
    if spec.task is None or spec.head_source in names:
        return spec
    own = {spec.head_source, spec.head_source.removesuffix("weight") + "bias"}
    groups = (
        replace(group, params=tuple(replace(p, new=p.sources[0].name in own) for p in group.params))
        for group in spec.groups
    )
    return replace(spec, groups=tuple(groups))


def new_head_notice(spec: ModelSpec) -> str:
    """Tell that the head begins with random weights; empty where it was loaded."""
    new = [source.name for group in spec.groups for param in group.params if param.new for source in param.sources]
    if not new or spec.task is None:
        return ""
    return (
        f"{' and '.join(new)} {'is' if len(new) == 1 else 'are'} not in the checkpoint: a new head with"
        f" {spec.task.num_labels} output{'s' if spec.task.num_labels > 1 else ''} for {_what(spec.task.task)} begins"
        f" with random weights (initializer_range {spec.initializer_range:g})"
    )


def with_head_saved(lora: LoRA, spec: ModelSpec) -> LoRA:
    """Have a head for labels trained in full beside adapters, as PEFT does."""
    if spec.task is None:
        return lora
    others = [name for name in lora.modules_to_save if name not in HEADS_OF_PEFT]
    return replace(lora, modules_to_save=(*others, spec.head_source.removesuffix(".weight")))
