"""Names and values that people bring from other systems: what each is here, or why there is none and what to use.

One table for flags, YAML and Python. It has those of transformers, TRL, PEFT, bitsandbytes, accelerate, DeepSpeed,
axolotl, LLaMA-Factory, llm.c, FlexTrain and InfiniTrain, as their documentation spells them. A name is translated only
where its meaning is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from flexengine.wording import shown, with_dashes

SAME = {
    "model_name_or_path": "model",
    "pretrained_model_name_or_path": "model",
    "base_model": "model",
    "model_name": "model",
    "model_path": "model",
    "adapter_name_or_path": "adapter",
    "tokenizer_name": "tokenizer",
    "tokenizer_name_or_path": "tokenizer",
    "tokenizer_path": "tokenizer",
    "dataset_name": "dataset",
    "train_file": "dataset",
    "data": "dataset",
    "data_path": "dataset",
    "train_data": "dataset",
    "dataset_path": "dataset",
    "input_bin": "dataset",
    "eval_dataset": "val_dataset",
    "validation_file": "val_dataset",
    "input_val_bin": "val_dataset",
    "val_data": "val_dataset",
    "val_size": "val_fraction",
    "val_set_size": "val_fraction",
    "max_samples": "max_records",
    "max_train_samples": "max_records",
    "max_seq_length": "max_seq_len",
    "max_length": "max_seq_len",
    "sequence_len": "max_seq_len",
    "sequence_length": "max_seq_len",
    "seq_len": "max_seq_len",
    "seq_length": "max_seq_len",
    "context_length": "max_seq_len",
    "cutoff_len": "max_seq_len",
    "total_batch_size": "max_global_batch_tokens",
    "max_steps": "steps",
    "max_iters": "steps",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_schedule",
    "lr_scheduler": "lr_schedule",
    "warmup_steps": "lr_warmup_steps",
    "num_warmup_steps": "lr_warmup_steps",
    "warmup_iters": "lr_warmup_steps",
    "warmup_ratio": "lr_warmup_pct",
    "adam_epsilon": "adam_eps",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "gradient_clipping": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "opt_state_dtype": "optimizer_state_dtype",
    "compute_dtype": "dtype",
    "torch_dtype": "dtype",
    "eval_interval": "eval_steps",
    "eval_every": "eval_steps",
    "overwrite_output_dir": "overwrite",
    "save_every": "save_steps",
    "save_interval": "save_steps",
    "r": "lora_rank",
    "target_modules": "lora_targets",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
    "lora_target": "lora_targets",
    "lora_modules_to_save": "modules_to_save",
    "init_lora_weights": "lora_init",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "pref_beta": "beta",
    "dpo_beta": "beta",
    "num_gpus": "gpus",
    "teacher_model_name_or_path": "teacher",
}
"""Options by the names that others have for them."""
BATCH = (
    "a step here is counted in tokens, and how many are computed at once follows from the memory budgets; give"
    " --max-global-batch-tokens (sequences per step times --max-seq-len)"
)
PLANNED = "memory is planned here; give --max-gpu-mem-gib and --max-host-mem-gib"
RECOMPUTED = "the planner decides what is recomputed; --recompute full or none pins it"
RANKS = (
    "--gpus starts a process for each GPU of this machine, and torchrun those of several; how they share weights is"
    " planned, or pinned by --transport"
)
QLORA = {"mode": "lora", "base_dtype": "nf4"}
ADAMW = {"optimizer": "adamw"}
ADAMW_INT8 = {"optimizer": "adamw", "optimizer_state_dtype": "int8"}
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw", "paged_adamw_32bit"), ADAMW),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), ADAMW_INT8),
    **{name: {"optimizer": "lion"} for name in ("lion_32bit", "paged_lion_32bit")},
    "hybrid_muon_adamw": {"optimizer": "muon"},
}
MODES = {"full": {"mode": "full"}, "lora": {"mode": "lora"}, "qlora": QLORA}
HALF: Mapping[str, Any] = {"dtype": "float16"}
BY_VALUE: dict[str, Mapping[str, Mapping[str, Any] | str]] = {
    "use_muon": {"true": {"optimizer": "muon"}, "false": {}},
    "strategy": MODES,
    "finetuning_type": MODES,
    "use_peft": {"true": {"mode": "lora"}, "false": {}},
    "use_lora": {"true": {"mode": "lora"}, "false": {}},
    "qlora": {"true": QLORA, "false": {}},
    "load_in_4bit": {"true": {"base_dtype": "nf4"}, "false": {}},
    "load_in_8bit": {"true": {"base_dtype": "int8"}, "false": {}},
    "quantization_bit": {"4": {"base_dtype": "nf4"}, "8": {"base_dtype": "int8"}},
    **{name: {"true": {"device": "cpu"}, "false": {}} for name in ("use_cpu", "no_cuda")},
    "bnb_4bit_quant_type": {"nf4": {"base_dtype": "nf4"}, "fp4": "give --base-dtype nf4, mxfp4 or fp8"},
    "bf16": {"true": {"dtype": "bfloat16"}, "auto": {"dtype": "bfloat16"}, "false": {}},
    "fp16": {"true": HALF, "false": {}},
    "mixed_precision": {
        **{"bf16": {"dtype": "bfloat16"}, "no": {"dtype": "float32"}, "fp16": HALF},
        "fp8": {"dtype": "bfloat16", "matmul_dtype": "fp8"},
    },
    "optim": {"adamw": ADAMW, **OPTIMIZERS, **{name: {"optimizer": name} for name in ("sgd", "lion", "muon")}},
    "packing": {"true": {}, "false": "sequences are always packed, and never attend to each other"},
    "sample_packing": {"true": {}, "false": "sequences are always packed, and never attend to each other"},
    "train_on_inputs": {"true": {"train_on": "all"}, "false": {"train_on": "assistant"}},
    "assistant_only_loss": {"true": {"train_on": "assistant"}, "false": "give --train-on all, last or assistant"},
    "lora_target_linear": {"true": {"lora_targets": ["all-linear"]}, "false": {}},
    "resume_from_checkpoint": {"true": {"resume": "auto"}, "false": {}},
    "report_to": {"none": {}, "all": "name the trackers: --report-to wandb, tensorboard or trackio"},
    "stage": {**{name: {"objective": name} for name in ("sft", "dpo", "kto")}, "pt": {"objective": "sft"}},
    "pref_loss": {"sigmoid": {"objective": "dpo"}, **{name: {"objective": name} for name in ("ipo", "orpo", "simpo")}},
    "numerics": {"smallest": {"optimizer_state_dtype": "int8", "master_dtype": "bfloat16", "max_grad_norm": None}},
    "do_train": {"true": {}, "false": "train always trains; leave it out"},
    # Own options, for values that mean more than one of them.
    "mode": {"qlora": QLORA},
    "adapter": {"lora": {"mode": "lora"}, "qlora": QLORA},
    "optimizer": OPTIMIZERS,
}
"""Names whose value says what they mean: the options of each, or what to use. Others keep values that are not here."""
OWN = ("mode", "adapter", "optimizer", "report_to", "resume_from_checkpoint")
"""Names in BY_VALUE that take other values as well."""
OTHER_VALUES = {"resume_from_checkpoint": "resume"}
"""Of these, the options that other values are given to where they have another name."""
OTHERWISE = {
    **dict.fromkeys(
        (
            *("per_device_train_batch_size", "train_batch_size", "batch_size", "gradient_accumulation_steps"),
            *("micro_batch_size", "train_micro_batch_size_per_gpu", "max_tokens_per_batch", "global_batch_size"),
        ),
        BATCH,
    ),
    **dict.fromkeys(
        (
            *("gradient_checkpointing", "activation_checkpointing", "force_save_level", "activation_offloading"),
            *("activation_checkpoint", "recompute_granularity"),
        ),
        RECOMPUTED,
    ),
    **dict.fromkeys(
        (
            *("deepspeed", "fsdp", "fsdp_config", "zero_stage", "zero_optimization", "offload_optimizer"),
            *("offload_param", "cpu_offload"),
        ),
        PLANNED,
    ),
    **dict.fromkeys(("max_gpu_mem_bytes", "max_host_mem_bytes"), "give --max-gpu-mem-gib and --max-host-mem-gib"),
    **dict.fromkeys(
        ("leeway_gpu_mem_gib", "leeway_host_mem_gib"),
        "a budget that is not given leaves room by itself; give --max-gpu-mem-gib or --max-host-mem-gib for another",
    ),
    **dict.fromkeys(
        (
            *("tensor_parallel", "tensor_parallel_size", "pipeline_parallel", "pipeline_parallel_size"),
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel_size"),
            *("sequence_parallel", "context_parallel_size", "expert_parallel_size", "nodes", "nnodes", "num_nodes"),
            *("node_rank", "nproc_per_node", "nthread_per_process", "num_processes"),
        ),
        RANKS,
    ),
    "gradient_compression": "give --exchange-dtype for what several nodes send, --grad-dtype for what is stored",
    "device_id": "give --device cuda:N",
    "revision": "give --model ORG/NAME@REVISION",
    "model_revision": "give --model ORG/NAME@REVISION",
    "dataset_config": "give --dataset PLACE:CONFIG:SPLIT",
    "dataset_config_name": "give --dataset PLACE:CONFIG:SPLIT",
    "dataset_split": "give --dataset PLACE:SPLIT",
    "datasets": "give --dataset PLACE[:SPLIT][=WEIGHT], one or several",
    "dataset_text_field": "records with text are read as texts; --columns text=NAME names another column",
    "field_messages": "give --columns messages=NAME",
    "field_instruction": "give --columns instruction=NAME output=NAME",
    "min_chunk_size": "the planner decides; --chunk-tokens pins it",
    "max_chunk_size": "the planner decides; --chunk-tokens pins it",
    "synthetic_seq_len": "random sequences have --max-seq-len tokens",
    "apply_chat_template": "conversations always go through the model's chat template; records with text do not",
    "moe_backend": "experts have one implementation",
    **dict.fromkeys(
        ("attn_implementation", "flash_attention", "flash_attn"),
        "attention is always fused, by the kernels that the probe found fastest",
    ),
    "torch_compile": "kernels are written for each op; --cuda-graphs always replays blocks",
    "use_liger_kernel": "kernels are fused, and the head never makes full logits",
    "logging_steps": "every step is logged; --logging warning prints none",
    "save_strategy": "give --save-steps for checkpoints, --save for the model at the end",
    "eval_strategy": "give --eval-steps with --val-dataset or --val-fraction",
    "evaluation_strategy": "give --eval-steps with --val-dataset or --val-fraction",
    "load_best_model_at_end": "with validation data --save keeps the best model in best/ beside the last in final/",
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id"),
        "flexengine export uploads a run with a model card",
    ),
    "completion_only_loss": "of prompt and completion the completion alone is trained; --train-on says it of others",
    "hw_cost": "in Python a profile is given as hardware=, and a budget as --max-gpu-mem-gib",
    "per_device_eval_batch_size": "validation data are computed in batches of --max-global-batch-tokens",
    "dataloader_num_workers": "records are tokenized once, on all cores",
    "dataset_num_proc": "records are tokenized once, on all cores",
    "preprocessing_num_workers": "records are tokenized once, on all cores",
    **dict.fromkeys(
        ("group_by_length", "pad_to_sequence_len"), "sequences are packed into chunks of --max-global-batch-tokens"
    ),
    **dict.fromkeys(
        ("template", "chat_template"),
        "the chat template is that of the model's folder; --tokenizer names a folder with another",
    ),
    "plot_loss": "flexengine report RUN_FOLDER draws losses; of every step --report-to tells trackers",
    "min_lr": "give --lr-final-pct, a share of --lr",
    "remove_unused_columns": "columns that are not read are counted and told",
    "logging_first_step": "every step is logged",
    "run_name": "trackers name a run after its folder, --output-dir",
    "disable_tqdm": "--logging warning shows neither bar nor steps",
    "lmbda": "distillation learns from the answers of the data set alone, which is lmbda 0",
    "neftune_noise_alpha": "noise on embeddings is not offered",
}
"""What to do instead, for names that have no counterpart."""
DTYPES = {"bf16": "bfloat16", **dict.fromkeys(("fp32", "f32", "float"), "float32")}
DTYPES |= dict.fromkeys(("fp64", "f64", "double"), "float64") | dict.fromkeys(("fp16", "f16", "half"), "float16")
SPELLINGS: dict[str, Mapping[str, str]] = {
    **dict.fromkeys(("dtype", "master_dtype", "grad_dtype", "optimizer_state_dtype"), DTYPES),
    "base_dtype": {"bfloat16": "bf16", "4bit": "nf4", "float8_e4m3fn": "fp8"},
    "matmul_dtype": {
        **dict.fromkeys(("float8", "float8_e4m3fn", "tensorwise"), "fp8"),
        **dict.fromkeys(("blockwise", "fp8-block"), "fp8-blockwise"),
        "nvfp4": "nvfp4-gw-hp",
        **dict.fromkeys(("rowwise_with_gw_hp", "rowwise", "fp8-row", "fp8-rowwise"), "fp8-rowwise-gw-hp"),
    },
    "lr_schedule": {"warmup_stable_decay": "wsd"},
    "data_source": {"json-sft": "json_sft"},
}
"""Other spellings of the values of options."""
COMMANDS = {
    "estimate-memory": "plan --model M --gpu CARD tells memory and speed before anything is fetched",
    "estimate": "plan --model M --gpu CARD tells memory and speed before anything is fetched",
    "validate": "doctor tells what this machine lacks, train --dry-run checks options and plans",
    "finetune": "train --model M --dataset D, with --mode lora for adapters",
    "sft": "train --model M --dataset D, with --mode lora for adapters",
    **{name: f"train --model M --dataset D --objective {name}" for name in ("dpo", "kto", "orpo")},
    "inference": "generate --model M --prompt TEXT",
    "api": "serve MODEL answers OpenAI's requests",
    "eval": "evaluate MODEL --tasks TASK runs benchmarks of lm-eval",
    "merge-lora": "export --run RUN --format merged",
    "preprocess": "data preview --model M --dataset D",
}
"""Commands of others, and what to call instead."""


def spelled(option: str, value: Any) -> Any:
    """Spell a value of an option as it is here: bf16 and torch.bfloat16 become bfloat16."""
    name = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    found = SPELLINGS.get(option, {})
    return found.get(name.lower(), name) if isinstance(name, str) and option in SPELLINGS else value


def meant_by_others(name: str, value: Any, flag: Callable[[str], str] = str) -> dict[str, Any]:
    """Give the options that a name with its value means; itself for one that is in no table.

    flag: spells a name for messages. Raises: ValueError with what to use where there is no counterpart.
    """
    if name in OTHERWISE:
        raise ValueError(f"{flag(name)} is not an option: {OTHERWISE[name]}")
    meanings = BY_VALUE.get(name)
    if meanings is None:
        return {SAME.get(name, name): value}
    found = meanings.get(str(value).lower()) if isinstance(value, (str, int)) else None
    if found is None and name in OWN:
        return {OTHER_VALUES.get(name, name): value}
    if isinstance(found, Mapping):
        return dict(found)
    reason = found or f"its values are {', '.join(meanings)}"
    raise ValueError(f"{flag(name)} {shown(value)} is not an option: {reason}")


def translated(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Give the options of a file by their names here.

    Raises: ValueError as `meant_by_others`, or where two names give an option two values; `where` names the file.
    """
    result: dict[str, Any] = {}
    for key, value in given.items():
        for name, own in meant_by_others(key, value, _flag).items():
            meant = 0 if own is None and value is not None else own  # as files write it
            if name in result and spelled(name, result[name]) != spelled(name, meant):
                raise ValueError(f"{where} gives {name} twice, once by another name; keep one of them")
            result[name] = meant
    return result


def translated_keywords(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Give the keywords of a call by their names here, as far as the function knows these.

    Raises: ValueError as `meant_by_others`, in the words of Python, or where two names give an option two values.
    """
    result: dict[str, Any] = {}
    for key, value in given.items():
        meant = {key: value} if key in known and key not in OWN else meant_by_others(key, value)
        meant = meant if all(name in known for name in meant) else {key: value}
        twice = next((name for name in meant if name in result and result[name] != meant[name]), None)
        if twice is not None:
            raise ValueError(f"{twice} is given twice, once by another name; keep one of them")
        result |= meant
    return result


def translated_flags(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Rewrite a command line by the names of options here: --learning-rate=1e-4 as --lr=1e-4, --use-muon as
    --optimizer muon. What is no flag, or one of the `known` options, stays. Raises: ValueError as `meant_by_others`.
    """
    result: list[str] = []
    rest = list(arguments)
    while rest:
        flag, equals, value = with_dashes(rest.pop(0)).partition("=")
        name = flag[2:].replace("-", "_")
        if not (flag.startswith("--") and name) or (name in known and name not in OWN):
            result.append(flag + equals + value)
        elif name not in BY_VALUE:
            result.append(_flag(*meant_by_others(name, None, _flag)) + equals + value)
        else:
            if not equals and rest and (rest[0].lower() in BY_VALUE[name] or name in OWN):
                equals, value = "=", rest.pop(0)
            meant = meant_by_others(name, value if equals else True, _flag)
            result += [text for option, setting in meant.items() for text in _as_flag(option, setting)]
    return result


def _as_flag(option: str, value: Any) -> list[str]:
    return [_flag(option), *(value if isinstance(value, list) else [str(0 if value is None else value)])]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
