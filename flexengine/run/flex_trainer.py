"""`FlexTrainer`: a run with the arguments of transformers' Trainer and TRL's SFTTrainer, in three statements.

Names are those of `options/other_names.py`, as everywhere. What has no counterpart and would change the result is
refused; what only says how others compute is passed over with a word.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexengine.checkpoint.adapter_config import lora_of
from flexengine.options.adapters import LORA_OPTIONS
from flexengine.options.lora import LoRA
from flexengine.options.other_names import OTHERWISE, SAME
from flexengine.options.train_config import TrainConfig
from flexengine.run.callbacks import Callback
from flexengine.run.from_python import TrainResult, train

BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Sequences of a step in transformers are the product of both."""
LENGTHS = ("max_length", "max_seq_length", "max_seq_len")
TRL_LENGTH = 1024
"""Longest sequence where neither arguments nor options say one, as SFTConfig has it."""
CHANGES_NOTHING = (
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "deepspeed", "fsdp", "fsdp_config", "logging_steps"),
    *("logging_strategy", "logging_first_step", "save_strategy", "eval_strategy", "load_best_model_at_end"),
    *("per_device_eval_batch_size", "attn_implementation", "torch_compile", "use_liger_kernel", "run_name"),
    *("dataloader_num_workers", "dataset_num_proc", "remove_unused_columns", "disable_tqdm"),
    *("dataset_text_field", "do_eval", "logging_dir", "dataloader_pin_memory", "tf32", "greater_is_better"),
    *("metric_for_best_model", "use_cpu", "eval_accumulation_steps", "save_safetensors", "model_init_kwargs"),
)
"""Arguments of others that say how they compute and report: here the planner and the run decide that."""
FILLED_IN = (
    *("accelerator_config", "activation_checkpointing", "gradient_checkpointing", "disable_tqdm"),
    *("dataloader_pin_memory", "dataset_kwargs"),
)
"""Fields that their classes fill in themselves."""
ALWAYS = (*BATCH, "max_length", "learning_rate")
"""Fields that count with their defaults, too, as these differ from those here."""
NOT_TAKEN = {
    "data_collator": "sequences are packed here; give records or token ids, whose labels say what is trained",
    "compute_loss_func": "from_pretrained gives an engine whose fwd_bwd takes loss=",
    "compute_metrics": "on_eval of a Callback is told the validation loss",
    "preprocess_logits_for_metrics": "full logits never exist here",
    "optimizers": "give optim, learning_rate and lr_scheduler_type",
    "model_init": "give model",
}
"""Arguments that are objects of others' training loops -> what to use."""


class FlexTrainer:
    """A training run with the arguments of transformers' Trainer and TRL's SFTTrainer.

    model: a folder, an id on the hub or preset:NAME. args: a TrainConfig's options by our names or others', as a
    mapping, or an SFTConfig or TrainingArguments, of which what differs from its defaults counts. A batch size per
    device and steps of accumulation make a step of so many sequences of the longest length, in tokens. train_dataset,
    eval_dataset: as `flexengine.train` takes them; formatting_func makes a text of a row. processing_class: the
    tokenizer, which is the model's own. peft_config: a LoraConfig or LoRA. callbacks: of flexengine. options: more
    options. The model is saved to final/ of the run folder.
    Raises: ValueError or TypeError for what has no counterpart, with what to use.
    """

    def __init__(
        self,
        model: str | Path,
        args: Any = None,
        train_dataset: Iterable[Any] | str | None = None,
        eval_dataset: Iterable[Any] | str | None = None,
        processing_class: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[Any], str] | None = None,
        callbacks: Sequence[Callback] = (),
        **options: Any,
    ) -> None:
        """Read the arguments; nothing is loaded."""
        refused = [name for name in NOT_TAKEN if options.pop(name, None) not in (None, (None, None))]
        if refused:
            raise ValueError(f"{refused[0]} is not taken: {NOT_TAKEN[refused[0]]}")
        _check_model(model, processing_class)
        wrong = next((one for one in callbacks if not isinstance(one, Callback)), None)
        if wrong is not None:
            raise ValueError(
                f"callbacks: {type(wrong).__name__} is none of flexengine; derive from flexengine.Callback"
            )
        given = {**_given(args), **options}
        self.passed_over = sorted(name for name in given if name in CHANGES_NOTHING)
        given = _with_tokens({name: value for name, value in given.items() if name not in CHANGES_NOTHING})
        self.options = {"model": str(model), "save": True, **given, **_adapters(peft_config)}
        self.callbacks = tuple(callbacks)
        self._data = [
            rows if rows is None or formatting_func is None else ({"text": formatting_func(row)} for row in rows)
            for rows in (train_dataset, eval_dataset)
        ]
        self.result: TrainResult | None = None

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainResult:
        """Run the training; resume_from_checkpoint: True for the newest of the run folder, or a folder."""
        for name in self.passed_over:
            print(f"{name} is passed over: {OTHERWISE.get(name, 'the planner and the run decide that here')}")
        resume = {"resume": "auto" if resume_from_checkpoint is True else resume_from_checkpoint}
        resume = resume if resume_from_checkpoint else {}
        rows, held_out = self._data
        self.result = result = train(None, rows, held_out, self.callbacks, **self.options, **resume)
        return result

    def save_model(self, output_dir: str | Path) -> None:
        """Copy the trained model to a new folder. Raises: ValueError where there is none yet."""
        if self.result is None or self.result.model is None:
            raise ValueError("there is no trained model yet; call train() first")
        shutil.copytree(self.result.model, output_dir)


def _check_model(model: Any, processing_class: Any) -> None:
    """Raise ValueError for a model that is loaded already, and for a tokenizer that is not the model's."""
    if not isinstance(model, str | Path):
        name = getattr(getattr(model, "config", None), "_name_or_path", "")
        raise ValueError(
            f"model is a {type(model).__name__}; give its folder or id{f', {name!r}' if name else ''}: weights are read"
            " after the plan is made"
        )
    name = getattr(processing_class, "name_or_path", None)
    if processing_class is not None and name not in ("", str(model)):
        raise ValueError(
            f"processing_class is that of {name!r}, but the tokenizer of {str(model)!r} is used; leave it out"
        )


def _given(args: Any) -> dict[str, Any]:
    """What a person has set in an object of arguments: of one of theirs, what differs from its defaults."""
    if args is None or isinstance(args, Mapping):
        return dict(args or {})
    if isinstance(args, TrainConfig):
        raise ValueError("args is a TrainConfig; call flexengine.train(config, dataset) instead")
    if not dataclasses.is_dataclass(args) or isinstance(args, type):
        raise ValueError(
            f"args is a {type(args).__name__}; give a mapping of options, an SFTConfig or TrainingArguments"
        )
    given = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        is_set = value not in (None, "", []) and value != field.default and field.name not in FILLED_IN
        if field.init and (is_set or (field.name in ALWAYS and value is not None)):
            given[field.name] = value
    return given


def _with_tokens(given: dict[str, Any]) -> dict[str, Any]:
    """Count the sequences of a step in tokens, where a batch size says how many there are."""
    counts = [given.pop(name, None) for name in BATCH]
    if counts == [None, None]:
        return given
    length = next((given[name] for name in LENGTHS if name in given), TRL_LENGTH)
    own = SAME["total_batch_size"]
    if own in given:
        raise ValueError(f"{own} and {' and '.join(BATCH)} both say how large a step is; give one of them")
    sequences = (counts[0] or 8) * (counts[1] or 1)  # 8 is the default of both libraries
    return {"max_seq_len": length, **given, own: sequences * length}


def _adapters(config: Any) -> dict[str, Any]:
    """Options of adapters, of PEFT's LoraConfig or a LoRA."""
    if config is None:
        return {}
    lora = config if isinstance(config, LoRA) else _of_peft(config)
    return {"mode": "lora", **{option: getattr(lora, field) for option, field in LORA_OPTIONS.items()}}


def _of_peft(config: Any) -> LoRA:
    """Adapters as PEFT's LoraConfig describes them. Raises: ValueError for what is not built here."""
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    lora = lora_of(fields, "peft_config")
    start = fields.get("init_lora_weights", True)
    if start not in (True, "orthogonal") and not lora.changes_base:
        raise ValueError(f"peft_config: init_lora_weights={start!r} is not built here; give True, orthogonal or pissa")
    lora = dataclasses.replace(lora, dropout=fields.get("lora_dropout") or 0.0)
    return dataclasses.replace(lora, init="orthogonal") if start == "orthogonal" else lora
