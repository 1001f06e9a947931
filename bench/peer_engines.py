"""Trains one model with another engine in this process: what `bench/peers.py` starts and compares.

flexengine: ours, as `bench/step.py` measures it. hf-liger: transformers with Liger kernels, bf16 weights and AdamW
states, all on the GPU. peft-liger: the same with LoRA adapters on a frozen model, in bf16 or in bitsandbytes' NF4.
fsdp2: `fully_shard` per block, float32 weights and states in shards on the GPUs, bf16 products. fsdp2-offload: the same
with `CPUOffloadPolicy`, shards on the host. deepspeed-zero3: ZeRO-3 with parameters and optimizer on the host and
DeepSpeedCPUAdam. The others are in `bench/peer_packages.py`. Weights are random, attention is torch's.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.environment import require_native_code
from bench.plan_accuracy import write_config
from flexengine.hardware.memory_usage import GpuMemoryMeter

GIB = 2**30
OURS = "flexengine"
RESIDENT, OFFLOADED = ("hf-liger", "peft-liger", "unsloth", "torchtune"), ("fsdp2-offload", "deepspeed-zero3")
OF_RANKS = ("fsdp2", *OFFLOADED)
"""Engines of several GPUs, which time one micro-batch a run."""
STREAMED = ("trainstream", "roundpipe", "block-streamer", "soup")
"""Engines of one GPU that fetch weights from the host, and time one micro-batch a run."""
WITHOUT_LIGER = (OURS, "unsloth", "torchtune", "soup")
"""Engines with kernels of their own."""
PACKAGE_OF = {
    "hf-liger": ("liger_kernel",), "peft-liger": ("peft", "liger_kernel"), "unsloth": ("unsloth",),
    "torchtune": ("torchtune", "torchao"), "deepspeed-zero3": ("deepspeed",), "trainstream": ("trainstream", "peft"),
    "roundpipe": ("roundpipe", "peft"), "block-streamer": ("block_streamer", "peft"),
    "soup": ("soup_cli", "peft", "bitsandbytes"),
}  # fmt: skip
"""What has to be installed for an engine."""
FULL, LORA, QLORA = ("full", "bfloat16"), ("lora", "bfloat16"), ("lora", "nf4")
WORKS = {
    OURS: (FULL, LORA, QLORA), "hf-liger": (FULL,), "peft-liger": (LORA, QLORA), "unsloth": (LORA, QLORA),
    "torchtune": (LORA, QLORA), "fsdp2": (FULL,), "fsdp2-offload": (FULL,), "deepspeed-zero3": (FULL, LORA),
    "trainstream": (FULL, LORA, QLORA), "roundpipe": (FULL, LORA), "block-streamer": (FULL, LORA),
    "soup": (LORA, QLORA),
}  # fmt: skip
"""What the engines are asked to train: mode and dtype of frozen weights."""
ATTENTION = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
}
"""Kernels of torch's attention in the order in which they are tried."""
LORA_RANK, LORA_ALPHA = 16, 32
DRAWN_ELEMENTS = (1 << 24) - 5
"""Random values that are drawn once for all matrices on the host: no multiple of a row, so that rows differ."""
FILES = "PEERS_FILES"
"""Names the folder of files that the runs of a call share."""
NO_LIGER = "none"
EXPERTS = ("num_experts", "num_local_experts")
"""Fields of transformers' configs for the number of experts, of which every type with experts has at least one."""


class Setting(NamedTuple):
    """One run of an engine. tokens: per step and GPU. micro_batches: sequences at once, of which the first that fit
    are timed.

    liger: "all" kernels, "no-loss" (logits are made, and torch's loss is taken), "loss" (its fused linear loss alone),
    or "none". adapter_dtype: of LoRA adapters; float32 ones are multiplied under autocast, as peft's users do. mode:
    "full" or "lora". base_dtype: of frozen weights, "bfloat16" or "nf4". state_dtype: of masters, gradients and states
    on the host of engines that offload them; float32 is what they keep by default. host_gib: limit of host memory.
    compiled: by torch.compile, where an engine has that option (torchtune).
    """

    engine: str
    preset: str
    layers: int | None
    seq_len: int
    tokens: int
    micro_batches: tuple[int, ...]
    tries: int
    recompute: bool
    liger: str
    attention: str
    adapter_dtype: str
    cap_gib: float | None
    device: str
    ranks: int
    warmup: int
    steps: int
    lr: float
    mode: str = "full"
    base_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    host_gib: float | None = None
    compiled: bool = False

    @property
    def one_micro_batch(self) -> bool:
        """Whether a run times one micro-batch: engines that cannot go on after memory ran out."""
        return self.engine in (*OF_RANKS, *STREAMED)


class Trainer(NamedTuple):
    """An engine that is ready: how it gets gradients of some sequences, and how it updates.

    backward: adds the gradients of the mean loss of sequences, times a share, and returns that loss. whole_batch: it
    takes a step's sequences at once, and splits them itself.
    """

    backward: Callable[[Tensor, float], Tensor]
    update: Callable[[], None]
    drop_gradients: Callable[[], None]
    whole_batch: bool = False


def rank() -> int:
    """The number of this process among those of its run."""
    return int(os.environ.get("RANK", "0"))


def measure(setting: Setting) -> dict:
    """Build the engine and time the largest micro-batches that fit. Raises: what the engine raises."""
    refuse_missing(setting)
    if setting.engine == OURS:
        return measure_ours(setting)
    device = torch.device(setting.device, rank()) if setting.device == "cuda" else torch.device("cpu")
    meter = GpuMemoryMeter(device)  # before CUDA begins
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if setting.cap_gib is not None:
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, setting.cap_gib * GIB / total_bytes), device)
    began_s = time.perf_counter()
    trainer, vocab_size = build(setting, device)
    build_s = time.perf_counter() - began_s
    generator = torch.Generator().manual_seed(rank())
    shape = (setting.tokens // setting.seq_len, setting.seq_len)
    batch = torch.randint(0, vocab_size, shape, generator=generator).to(device)
    with sdpa_kernel(ATTENTION[setting.attention], set_priority=True):
        rows = timed_micro_batches(setting, trainer, batch, meter)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if not rows:
        raise MemoryError(f"no micro-batch of {setting.micro_batches} sequences fits")
    best = max(rows, key=lambda row: row["tokens_per_s"])
    return {**best, "tried": rows, "build_s": build_s}


def timed_micro_batches(setting: Setting, trainer: Trainer, batch: Tensor, meter: GpuMemoryMeter) -> list[dict]:
    """A row for each of the first micro-batches that fit; engines of one micro-batch a run must fit it."""
    if setting.one_micro_batch:
        return [timed(setting, trainer, batch, setting.micro_batches[0], meter)]
    rows = list[dict]()
    trainer.backward(batch[: min(setting.micro_batches)], 1.0)
    trainer.update()  # makes the optimizer's states, so that later attempts see them
    for micro in setting.micro_batches:
        row = None
        try:
            row = timed(setting, trainer, batch, micro, meter)
        except torch.OutOfMemoryError:
            print(f"{setting.engine}: micro-batches of {micro} sequences do not fit", flush=True)
        if row is None:  # outside of the handler, which holds the frames and with them the activations
            trainer.drop_gradients()
            free_cache()
            continue
        rows.append(row)
        if len(rows) == setting.tries:
            break
    return rows


def timed(setting: Setting, trainer: Trainer, batch: Tensor, micro: int, meter: GpuMemoryMeter) -> dict:
    """Steps on the same batch again and again: warm-up, then those that count."""
    free_cache()
    meter.start()
    losses, seconds = [], []
    for _ in range(setting.warmup + setting.steps):
        wait(batch.device)
        begin = time.perf_counter()
        losses.append(train_step(trainer, batch, micro))
        wait(batch.device)
        seconds.append(time.perf_counter() - begin)
        if rank() == 0:
            print(f"{setting.engine}, {micro} sequences: loss {losses[-1]:.4f}, {seconds[-1]:.2f} s", flush=True)
    peak_bytes = meter.stop()
    step_s = statistics.median(seconds[setting.warmup :])
    return {
        "micro_batch": micro,
        "tokens_per_s": setting.tokens * setting.ranks / step_s,
        "step_s": step_s,
        "steps_s": seconds[setting.warmup :],
        "losses": losses,
        "loss_finite": all(map(math.isfinite, losses)),
        "gpu_peak_gib": None if peak_bytes is None else peak_bytes / GIB,
    }


def train_step(trainer: Trainer, batch: Tensor, micro: int) -> float:
    """One update over the batch, so many sequences at a time; returns the mean loss."""
    total = torch.zeros((), device=batch.device)
    for part in batch.split(len(batch) if trainer.whole_batch else micro):
        share = len(part) / len(batch)
        total += trainer.backward(part, share).float() * share
    trainer.update()
    return total.item()


def wait(device: torch.device) -> None:
    """Wait for the device, and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def free_cache() -> None:
    """Give what torch's allocator keeps back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def refuse_missing(setting: Setting) -> None:
    """Say in one line which packages an engine lacks, or that it has no such work. Raises: SystemExit."""
    missing = [name for name in PACKAGE_OF.get(setting.engine, ()) if find_spec(name) is None]
    if setting.liger == NO_LIGER:
        missing = [name for name in missing if name != "liger_kernel"]
    if missing:
        raise SystemExit(f"{setting.engine}: not installed here: {', '.join(missing)}")
    works = WORKS.get(setting.engine, ())
    if (setting.mode, setting.base_dtype) not in works:
        can = " and ".join(f"{mode} with {base}" for mode, base in works)
        raise SystemExit(f"{setting.engine}: trains {can}, not {setting.mode} with {setting.base_dtype} weights")


def measure_ours(setting: Setting) -> dict:
    """Plan, train and time by `bench.step` in this process, without clipping; the row has its names, too."""
    from bench.step import parse, run_cap  # noqa: PLC0415 (other engines run without the package's runtime)

    require_native_code("bench.peers")
    with tempfile.TemporaryDirectory() as folder:
        model = f"preset:{setting.preset}"
        if setting.layers is not None:
            write_config(setting.preset, setting.layers, Path(folder))
            model = folder
        flags = [
            f"--model={model}", f"--mode={setting.mode}", f"--seq-len={setting.seq_len}", f"--lr={setting.lr}",
            f"--tokens-per-step={setting.tokens}", f"--warmup={setting.warmup}", f"--steps={setting.steps}",
            f"--device={setting.device}", "--init=random", "--max-grad-norm=0", "--no-streams",
        ]  # fmt: skip
        if setting.mode == "lora":
            base = {"bfloat16": "bf16"}.get(setting.base_dtype, setting.base_dtype)
            flags += [f"--base-dtype={base}", f"--lora-rank={LORA_RANK}", f"--lora-alpha={LORA_ALPHA}"]
        if setting.host_gib is not None:
            flags.append(f"--host-gib={setting.host_gib}")
        row = run_cap(parse(flags), setting.cap_gib, setting.tokens)
    return {**row, "model": setting.preset, "micro_batch": row["chunk_tokens"] / setting.seq_len, "tried": []}


# ---- engines ---------------------------------------------------------------------------------------------------------


def build(setting: Setting, device: torch.device) -> tuple[Trainer, int]:
    """The engine of a setting, and the size of the vocabulary."""
    if setting.engine == "unsloth":
        import_module("unsloth")  # it changes transformers, which must not be imported before
    config = config_of(setting)
    if setting.liger != NO_LIGER:
        apply_liger(config, setting)
    builders = {"fsdp2": fsdp2_trainer, "fsdp2-offload": fsdp2_trainer, "deepspeed-zero3": deepspeed_trainer}
    if setting.engine in ("unsloth", "torchtune", *STREAMED):
        builders = import_module("bench.peer_packages").BUILDERS
    return builders.get(setting.engine, resident_trainer)(setting, config, device), config.vocab_size


def config_of(setting: Setting) -> Any:
    """The transformers config of a setting's preset."""
    from transformers import AutoConfig  # noqa: PLC0415 (an import that takes seconds)

    with tempfile.TemporaryDirectory() as folder:
        write_config(setting.preset, setting.layers, Path(folder), {"use_cache": False})
        config = AutoConfig.from_pretrained(folder)
    config.pad_token_id = None
    return config


def apply_liger(config: Any, setting: Setting) -> None:
    """Have transformers build models of this type with Liger's kernels."""
    options: dict[str, bool] = {}
    if setting.liger == "no-loss":
        options = {"fused_linear_cross_entropy": False, "cross_entropy": True}
    if setting.liger == "loss":
        options = {"rms_norm": False, "rope": False, "swiglu": False}
    if setting.mode == "lora" and any(hasattr(config, name) for name in EXPERTS):
        # Liger's experts tune for minutes and compute gradients of frozen weights; those of transformers do neither.
        options["swiglu"] = False
    import_module("liger_kernel.transformers.monkey_patch")._apply_liger_kernel(config.model_type, **options)


def make_model(config: Any, dtype: torch.dtype, recompute: bool, reentrant: bool = False) -> Any:
    """A model of transformers with random weights, on torch's default device."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 (an import that takes seconds)

    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def import_model(config: Any) -> None:
    """Import a model's code and what it needs of torch, which must see tensors as they are outside of zero.Init."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 (an import that takes seconds)

    import_module("torch._dynamo")
    AutoModelForCausalLM._model_mapping[type(config)]


def resident_trainer(setting: Setting, config: Any, device: torch.device) -> Trainer:
    """Weights, gradients and states on the GPU; adapters alone are trained by peft-liger."""
    if setting.base_dtype == "nf4":  # a bf16 model may not fit where its 4-bit one does
        model = model_without_values(config, setting.recompute)
        quantize_blocks(model, config, device)
        materialize(model, config, device)
    else:
        with device:
            model = make_model(config, torch.bfloat16, setting.recompute)
    if setting.mode == "lora":
        with device:
            model = with_adapters(model, setting)
    return torch_trainer(model, setting.lr, autocast_of(setting, device))


def model_without_values(config: Any, recompute: bool) -> Any:
    """A bf16 model of transformers that takes no memory."""
    with torch.device("meta"):
        return make_model(config, torch.bfloat16, recompute)


def materialize(model: Any, config: Any, place: torch.device, pinned: bool = False) -> None:
    """Draw what a model without values still lacks, in `place`. pinned: in host memory that is page-locked."""
    for module in list(model.modules()):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                made = torch.empty_like(parameter, device=place, pin_memory=pinned)
                fill(made, config.initializer_range if made.dim() > 1 else 0.0)
                module.register_parameter(name, torch.nn.Parameter(made, requires_grad=parameter.requires_grad))
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(place)  # its buffers had no values


def quantize_blocks(model: Any, config: Any, device: torch.device) -> None:
    """Draw every linear layer of the blocks, one after the other, as bitsandbytes' NF4 with quantized scales."""
    bnb = import_module("bitsandbytes")
    for name, linear in list(model.model.layers.named_modules()):
        if not isinstance(linear, torch.nn.Linear):
            continue
        made = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
            compress_statistics=True, device="meta",
        )  # fmt: skip
        made.bias = linear.bias
        drawn = torch.empty_like(linear.weight, device=device).normal_(0.0, config.initializer_range)
        options = {"quant_type": "nf4", "compress_statistics": True, "module": made}
        made.weight = bnb.nn.Params4bit(drawn.detach(), requires_grad=False, **options).to(device)
        model.model.layers.set_submodule(name, made)
    model.is_loaded_in_4bit = True  # what PEFT asks for
    model.requires_grad_(requires_grad=False)


def autocast_of(setting: Setting, device: torch.device) -> Callable[[], AbstractContextManager]:
    """What multiplies float32 adapters in bf16; nothing for other settings."""
    if setting.mode == "lora" and setting.adapter_dtype == "float32":
        return lambda: torch.autocast(device.type, torch.bfloat16)
    return nullcontext


def with_adapters(model: Any, setting: Setting) -> Any:
    """The model with LoRA adapters on every linear layer but the head, as ours has by default.

    Layers are named: PEFT takes "all-linear" for the router and all experts, too, where these are in stacked tensors.
    """
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 (an import that takes seconds)

    blocks = model.model.layers.named_modules()
    targets = sorted({name.rpartition(".")[2] for name, module in blocks if isinstance(module, torch.nn.Linear)})
    lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=setting.adapter_dtype == "float32")
    dtypes = {str(p.dtype) for p in model.parameters() if p.requires_grad}
    assert dtypes == {f"torch.{setting.adapter_dtype}"}, dtypes
    return model.train()


def torch_trainer(
    model: Any,
    lr: float,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    loss: Callable[[Tensor], Tensor] | None = None,
) -> Trainer:
    """A model that torch's fused AdamW updates. loss: of sequences; None: the one that transformers' models return."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, fused=True)
    loss_of = loss or (lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss)

    def backward(ids: Tensor, share: float) -> Tensor:
        with autocast():
            value = loss_of(ids)
        (value * share).backward()
        return value.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Trainer(backward, update, lambda: optimizer.zero_grad(set_to_none=True))


def fsdp2_trainer(setting: Setting, config: Any, device: torch.device) -> Trainer:
    """Weights and states of a rank's shard on its GPU or on the host; a block at a time in bf16 on the GPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with torch.device("meta"):
        model = make_model(config, getattr(torch, setting.state_dtype), setting.recompute)
    offloads = setting.engine in OFFLOADED
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    }
    if offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for block in model.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu" if offloads else device)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers were on meta
    for parameter in model.parameters():
        fill(parameter.to_local(), config.initializer_range if parameter.dim() > 1 else 0.0)
    return torch_trainer(model, setting.lr)


@torch.no_grad()
def fill(values: Tensor, std: float) -> None:
    """Draw a matrix where it is and in its dtype; a norm (std 0) becomes ones.

    On the host all cores copy a block of drawn values on and on. Drawing there takes one core, and so does a copy of
    what a GPU draws, which waits for new pages: 2 s for every GiB in a virtual machine that gives free memory back.
    """
    if not std:
        values.fill_(1.0)
    elif values.is_cuda:
        values.normal_(0.0, std)
    else:
        _drawn(std, values.dtype).copy_to(values.view(-1))


class _Drawn:
    """A block of random values, and the place in it where the next matrix begins."""

    def __init__(self, std: float, dtype: torch.dtype) -> None:
        self._block, self._next = torch.empty(DRAWN_ELEMENTS, dtype=dtype).normal_(0.0, std), 0

    def copy_to(self, values: Tensor) -> None:
        """Write as many values as there is room for."""
        while values.numel():
            piece = self._block[self._next :][: values.numel()]
            values[: piece.numel()].copy_(piece)
            self._next = (self._next + piece.numel()) % DRAWN_ELEMENTS
            values = values[piece.numel() :]


_drawn = cache(_Drawn)


def deepspeed_config(setting: Setting) -> dict[str, Any]:
    """ZeRO-3 with everything on the host that it can put there; what is not named has DeepSpeed's default."""
    micro, offload = setting.micro_batches[0], {"device": "cpu", "pin_memory": setting.device == "cuda"}
    small = setting.state_dtype == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": setting.tokens // setting.seq_len // micro,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": small, "bf16_optimizer_states": small},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": setting.lr, "torch_adam": False, "adam_w_mode": True}},
        "steps_per_print": 1 << 30,
    }


def deepspeed_trainer(setting: Setting, config: Any, device: torch.device) -> Trainer:
    """DeepSpeed's engine. It divides losses by the number of micro-batches, and updates after the last of them."""
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
    options = deepspeed_config(setting)
    import_model(config)
    with deepspeed.zero.Init(config_dict_or_path=options, dtype=torch.bfloat16):
        model = make_model(config, torch.bfloat16, setting.recompute, reentrant=True)
    for parameter in model.parameters():  # its own values are gone before transformers draws them
        fill(parameter.ds_tensor, config.initializer_range if len(parameter.ds_shape) > 1 else 0.0)
    if setting.mode == "lora":
        model = with_adapters(model, setting)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=options)

    def backward(ids: Tensor, _share: float) -> Tensor:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainer(backward, lambda: None, lambda: None)
