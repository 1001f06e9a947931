"""Names that people bring from transformers: what each is called here, or why it has no counterpart."""

from __future__ import annotations

from flexengine.options.option import flag_of
from flexengine.wording import with_dashes

SAME = {
    "model_name_or_path": "model",
    "dataset_name": "dataset",
    "train_file": "dataset",
    "max_seq_length": "max_seq_len",
    "max_length": "max_seq_len",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_schedule",
    "warmup_steps": "lr_warmup_steps",
    "warmup_ratio": "lr_warmup_pct",
    "adam_epsilon": "adam_eps",
    "overwrite_output_dir": "overwrite",
    "r": "lora_rank",
    "target_modules": "lora_targets",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
    "lora_modules_to_save": "modules_to_save",
    "init_lora_weights": "lora_init",
}
"""Options by the names that transformers, TRL and PEFT have for them."""
BATCH = (
    "a step here is counted in tokens, and how many are computed at once follows from the memory budgets; give"
    " --max-global-batch-tokens (sequences per step times --max-seq-len)"
)
OTHERWISE = {
    "per_device_train_batch_size": BATCH,
    "train_batch_size": BATCH,
    "batch_size": BATCH,
    "gradient_accumulation_steps": BATCH,
    "gradient_checkpointing": "the planner decides what is recomputed; --recompute full or none pins it",
    "bf16": "bfloat16 is the default; --dtype float32 computes wider",
    "fp16": "float16 is not offered, as it needs loss scaling; --dtype bfloat16 is the default",
    "optim": "give --optimizer adamw, muon, lion or sgd, and --optimizer-state-dtype int8 for states in 8 bits",
    "packing": "sequences are always packed, and never attend to each other",
    "deepspeed": "memory is planned here; give --max-gpu-mem-gib and --max-host-mem-gib",
    "fsdp": "memory is planned here; give --max-gpu-mem-gib and --max-host-mem-gib",
}
"""What to do instead, for names that have no counterpart."""


def renamed(name: str) -> str:
    """Return the option that a name of transformers stands for; other names as they are.

    Raises: ValueError with an explanation for a name that has no counterpart.
    """
    if name in OTHERWISE:
        raise ValueError(f"{flag_of(name)} is not an option: {OTHERWISE[name]}")
    return SAME.get(name, name)


def renamed_flag(argument: str) -> str:
    """Rewrite --learning-rate=1e-4 as --lr=1e-4; arguments that are no such flags stay. Raises as `renamed`."""
    flag, equals, value = with_dashes(argument).partition("=")
    if not flag.startswith("--"):
        return argument
    return flag_of(renamed(flag[2:].replace("-", "_"))) + equals + value
