"""from_pretrained: from what a person asks for to a running engine. Measures, plans, and only then loads."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from flexengine.hardware.memory_usage import note_baseline, release_unused_heap
from flexengine.hardware.presets import preset
from flexengine.hardware.probe import check_multiplies_fp8, probe
from flexengine.hardware.profile import BlockShape, HardwareProfile, read_profile
from flexengine.metrics import format_bytes
from flexengine.models.freezing import with_frozen
from flexengine.models.matmul_dtype import MatmulDtype, with_matmul_dtype
from flexengine.models.registry import ModelSource, open_model
from flexengine.models.spec import ModelSpec
from flexengine.optim.adamw import AdamW
from flexengine.plan import Numerics, Plan, PlanError, PlanReason, Request
from flexengine.planner.search import make_plan
from flexengine.reports.picture import Picture
from flexengine.reports.plan_data import step_timeline
from flexengine.reports.plan_text import describe
from flexengine.runtime.engine import Engine, EngineSettings
from flexengine.runtime.weight_store import check_checkpoint

logger = logging.getLogger(__name__)
GIB = 2**30
LARGEST_SEED = 2**32 - 1
COMPUTE_DTYPES = ("bfloat16", "float32", "float64")
MASTER_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Prepared:
    """A planned run before anything is loaded."""

    source: ModelSource
    plan: Plan
    profile: HardwareProfile
    device: torch.device

    def describe(self) -> str:
        """The plan in words."""
        return describe(self.plan, self.source.spec)

    def timeline(self) -> str:
        """The simulated step as Chrome trace JSON; open it in Perfetto."""
        return step_timeline(Picture(self.plan, self.source.spec, self.profile))


def from_pretrained(
    path_or_preset: str | Path,
    optimizer: AdamW | None = None,
    *,
    max_seq_len: int = 2048,
    max_global_batch_tokens: int = 131072,
    max_gpu_mem_gib: float | None = None,
    max_host_mem_gib: float | None = None,
    max_gpu_mem_bytes: int | None = None,
    max_host_mem_bytes: int | None = None,
    device: str = "auto",
    dtype: str = "bfloat16",
    master_dtype: str = "float32",
    grad_dtype: str | None = None,
    optimizer_state_dtype: str = "float32",
    matmul_dtype: MatmulDtype = "compute",
    freeze: Sequence[str] = (),
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
    hardware: HardwareProfile | str | Path | None = None,
    chunk_tokens: int | None = None,
    round_tokens: int | None = None,
    recompute: Literal["auto", "none", "full"] = "auto",
    deterministic: bool = False,
) -> Engine:
    """An engine for a Hugging Face model folder, or for `preset:NAME` with random initial weights.

    optimizer: AdamW(...) (default AdamW()); max_grad_norm: clip the global norm, None = never, so that `train_step`
    updates layers inside the backward pass, each for itself; seed: initial weights and stochastic rounding;
    deterministic: only kernels proven deterministic (on CUDA; the CPU always is). The other keywords are those of
    `prepare`.
    Nothing is loaded before a plan is found. Raises PlanError when none fits, ValueError for bad input.
    """
    prepared = prepare(
        path_or_preset,
        max_seq_len=max_seq_len,
        max_global_batch_tokens=max_global_batch_tokens,
        max_gpu_mem_gib=max_gpu_mem_gib,
        max_host_mem_gib=max_host_mem_gib,
        max_gpu_mem_bytes=max_gpu_mem_bytes,
        max_host_mem_bytes=max_host_mem_bytes,
        device=device,
        dtype=dtype,
        master_dtype=master_dtype,
        grad_dtype=grad_dtype,
        optimizer_state_dtype=optimizer_state_dtype,
        matmul_dtype=matmul_dtype,
        freeze=freeze,
        max_grad_norm=max_grad_norm,
        hardware=hardware,
        chunk_tokens=chunk_tokens,
        round_tokens=round_tokens,
        recompute=recompute,
    )
    return build(prepared, optimizer, max_grad_norm=max_grad_norm, seed=seed, deterministic=deterministic)


def build(
    prepared: Prepared,
    optimizer: AdamW | None = None,
    *,
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
    deterministic: bool = False,
) -> Engine:
    """Load the weights of a planned run and return its engine; keywords as in `from_pretrained`."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it only
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed must be from 0 to {LARGEST_SEED}, got {seed}")
    _check_max_grad_norm(max_grad_norm)
    if prepared.plan.request.clipping != (max_grad_norm is not None):
        planned = "with" if prepared.plan.request.clipping else "without"
        raise ValueError(
            f"max_grad_norm={max_grad_norm}, but the plan was made {planned} clipping; give prepare the same"
            " max_grad_norm"
        )
    if prepared.device.type == "cuda":
        _cap_allocator(prepared)
    settings = EngineSettings(
        max_grad_norm=max_grad_norm,
        seed=seed,
        deterministic=deterministic,
        attention=prepared.profile.attention_kernels,
        matmul_flops_per_s=prepared.profile.peak_matmul_flops_per_s,
        description=prepared.describe(),
    )
    return Engine(prepared.source, prepared.plan, prepared.device, optimizer or AdamW(), settings)


def prepare(
    path_or_preset: str | Path,
    *,
    max_seq_len: int = 2048,
    max_global_batch_tokens: int = 131072,
    max_gpu_mem_gib: float | None = None,
    max_host_mem_gib: float | None = None,
    max_gpu_mem_bytes: int | None = None,
    max_host_mem_bytes: int | None = None,
    device: str = "auto",
    dtype: str = "bfloat16",
    master_dtype: str = "float32",
    grad_dtype: str | None = None,
    optimizer_state_dtype: str = "float32",
    matmul_dtype: MatmulDtype = "compute",
    freeze: Sequence[str] = (),
    max_grad_norm: float | None = 1.0,
    hardware: HardwareProfile | str | Path | None = None,
    chunk_tokens: int | None = None,
    round_tokens: int | None = None,
    recompute: Literal["auto", "none", "full"] = "auto",
) -> Prepared:
    """Read the model's description, measure the machine, plan.

    Budgets bound the whole process: GPU memory as NVML shows it, and the resident set; None takes what is free. On the
    CPU the GPU budget bounds the device arena, which is ordinary memory there, and the host budget everything else.
    device: auto, cpu, cuda or cuda:N. dtype: compute type, bfloat16, float32 or float64. master_dtype: float32 (kept
    exactly in 4 bytes beside bf16 compute) or bfloat16 (stochastic rounding). grad_dtype: storage of gradients
    between rounds, by default bfloat16 for bf16 compute and the compute type otherwise. optimizer_state_dtype:
    float32 or bfloat16. matmul_dtype: what the linear layers of the blocks multiply, compute (dtype) or fp8.
    freeze: parameters that are not trained: embed, head, blocks (all of them), block.3, or ranges as block.0-15.
    max_grad_norm: as for `build`; with None nothing is clipped, and updates may begin before the last gradient.
    hardware: a HardwareProfile, a preset's name or a profile's JSON file; None measures this machine.
    """
    source = open_model(path_or_preset)
    source = source._replace(spec=described(source.spec, matmul_dtype, freeze))
    check_sequence_length(source.spec, max_seq_len)
    if source.spec.notice:
        logger.warning("%s: %s", source.spec.name, source.spec.notice)
    if source.weights_folder is not None:
        source = source._replace(spec=check_checkpoint(source.spec, source.weights_folder))
    # refused before the machine is measured
    _numerics(dtype, master_dtype, grad_dtype, optimizer_state_dtype, matmul_dtype)
    _check_max_grad_norm(max_grad_norm)
    target = choose_device(device)
    if matmul_dtype == "fp8":
        check_multiplies_fp8(target)
    profile = _profile(hardware, target, getattr(torch, dtype), block_shape(source.spec))
    request = make_request(
        profile,
        target.type,
        max_seq_len=max_seq_len,
        max_global_batch_tokens=max_global_batch_tokens,
        max_gpu_mem_gib=max_gpu_mem_gib,
        max_host_mem_gib=max_host_mem_gib,
        max_gpu_mem_bytes=max_gpu_mem_bytes,
        max_host_mem_bytes=max_host_mem_bytes,
        dtype=dtype,
        master_dtype=master_dtype,
        grad_dtype=grad_dtype,
        optimizer_state_dtype=optimizer_state_dtype,
        matmul_dtype=matmul_dtype,
        max_grad_norm=max_grad_norm,
        chunk_tokens=chunk_tokens,
        round_tokens=round_tokens,
        recompute=recompute,
    )
    plan = make_plan(source.spec, request, profile)
    release_unused_heap()  # the profile's process, to which arenas are added, holds nothing of planning
    if hardware is None:
        check_is_free(plan, profile, target.type)
    return Prepared(source, plan, profile, target)


def described(spec: ModelSpec, matmul_dtype: str = "compute", freeze: Sequence[str] = ()) -> ModelSpec:
    """A model as a run trains it. Raises: ValueError as `with_matmul_dtype` and `with_frozen`."""
    return with_frozen(with_matmul_dtype(spec, matmul_dtype), freeze)


def check_is_free(plan: Plan, profile: HardwareProfile, device_type: str) -> None:
    """Raise PlanError when a plan within its budgets takes more than the machine that it is for has left now."""
    gpu_bytes, host_bytes = plan.predicted.gpu_bytes, plan.predicted.host_bytes
    free_gpu = profile.gpu_free_bytes + profile.gpu_context_bytes
    free_host = profile.host_available_bytes + profile.host_base_bytes
    if device_type == "cpu":  # both arenas are host memory
        gpu_bytes, host_bytes = 0, gpu_bytes + host_bytes
    for needed, free, total, name, flag, reason in (
        (gpu_bytes, free_gpu, profile.gpu_total_bytes, "GPU", "gpu", PlanReason.INSUFFICIENT_DEVICE_MEMORY),
        (host_bytes, free_host, profile.host_total_bytes, "host", "host", PlanReason.INSUFFICIENT_HOST_MEMORY),
    ):
        if needed > free:
            raise PlanError(
                reason,
                f"the plan takes {format_bytes(needed)} of {name} memory, but {format_bytes(free)} of"
                f" {format_bytes(total)} are left on this machine or in its container\n"
                f"  end what else uses it, raise the container's limit, or give --max-{flag}-mem-gib {free / GIB:.2f}",
                needed,
                free,
            )


def check_sequence_length(spec: ModelSpec, max_seq_len: int) -> None:
    """Warn when sequences may be longer than the model was made for. Raises ValueError where it cannot take them."""
    longest = spec.longest_sequence
    if longest is not None and max_seq_len > longest:
        raise ValueError(
            f"max_seq_len={max_seq_len}, but {spec.name} has learned positions for {longest} tokens and none for later "
            f"ones; give --max-seq-len {longest} or less"
        )
    if max_seq_len > spec.max_position_embeddings:
        logger.warning(
            "max_seq_len=%d is longer than the %d positions that %s was made for",
            max_seq_len,
            spec.max_position_embeddings,
            spec.name,
        )


def make_request(
    profile: HardwareProfile,
    device_type: str,
    *,
    max_seq_len: int = 2048,
    max_global_batch_tokens: int = 131072,
    max_gpu_mem_gib: float | None = None,
    max_host_mem_gib: float | None = None,
    max_gpu_mem_bytes: int | None = None,
    max_host_mem_bytes: int | None = None,
    dtype: str = "bfloat16",
    master_dtype: str = "float32",
    grad_dtype: str | None = None,
    optimizer_state_dtype: str = "float32",
    matmul_dtype: MatmulDtype = "compute",
    max_grad_norm: float | None = 1.0,
    chunk_tokens: int | None = None,
    round_tokens: int | None = None,
    recompute: Literal["auto", "none", "full"] = "auto",
) -> Request:
    """What is asked of the planner: keywords as in `prepare`, with budgets of what is free where none is given.

    device_type: cuda or cpu, on which the GPU budget is taken out of the host's. Raises ValueError for bad values.
    """
    _check_max_grad_norm(max_grad_norm)
    if matmul_dtype == "fp8" and not profile.fp8_matmul_flops_per_s:
        raise ValueError(
            f"matmul_dtype=fp8: {profile.name} multiplies no FP8 operands; that takes compute capability 8.9 or more"
            " (L40S, RTX 4090, H100 and newer); leave it out"
        )
    free_host = profile.host_available_bytes + profile.host_base_bytes
    free_gpu = profile.gpu_free_bytes + profile.gpu_context_bytes if device_type == "cuda" else free_host // 2
    gpu_bytes = _budget("gpu", max_gpu_mem_gib, max_gpu_mem_bytes, free_gpu)
    if device_type == "cpu":
        free_host = max(1, free_host - gpu_bytes)
    return Request(
        max_seq_len=max_seq_len,
        max_global_batch_tokens=max_global_batch_tokens,
        max_gpu_bytes=gpu_bytes,
        max_host_bytes=_budget("host", max_host_mem_gib, max_host_mem_bytes, free_host),
        chunk_tokens=chunk_tokens,
        round_tokens=round_tokens,
        recompute=recompute,
        numerics=_numerics(dtype, master_dtype, grad_dtype, optimizer_state_dtype, matmul_dtype),
        clipping=max_grad_norm is not None,
    )


def _check_max_grad_norm(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be positive, or None for no clipping, got {max_grad_norm}")


def _numerics(
    dtype: str, master_dtype: str, grad_dtype: str | None, state_dtype: str, matmul_dtype: MatmulDtype
) -> Numerics:
    grad = grad_dtype or dtype
    for name, value, allowed in (
        ("dtype", dtype, COMPUTE_DTYPES),
        ("master_dtype", master_dtype, MASTER_DTYPES),
        ("grad_dtype", grad, (*COMPUTE_DTYPES,)),
        ("optimizer_state_dtype", state_dtype, ("float32", "bfloat16")),
        ("matmul_dtype", matmul_dtype, get_args(MatmulDtype)),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not supported; choose {', '.join(allowed)}")
    if grad == "float64" and dtype != "float64":
        raise ValueError(f"grad_dtype=float64 needs dtype=float64, got dtype={dtype}")
    if matmul_dtype == "fp8" and dtype != "bfloat16":
        raise ValueError(f"matmul_dtype=fp8 needs dtype=bfloat16, got dtype={dtype}")
    if dtype != "bfloat16":
        if master_dtype == "bfloat16":
            raise ValueError(f"master_dtype=bfloat16 needs dtype=bfloat16, got dtype={dtype}")
        state = "float64" if dtype == "float64" else state_dtype
        return Numerics(compute=dtype, master="full", grad=grad, state=state)
    master = "split" if master_dtype == "float32" else "stochastic"
    return Numerics(compute=dtype, master=master, grad=grad, state=state_dtype, matmul=matmul_dtype)


def choose_device(name: str) -> torch.device:
    """The device that `name` means: auto, cpu, cuda or cuda:N; makes it the current one. Raises: ValueError."""
    if name != "cpu":
        note_baseline()  # before the first question to torch.cuda makes a context
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is not known; choose auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported; choose auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        why = "; this torch was built without CUDA" if torch.version.cuda is None else ""  # type: ignore[attr-defined]
        raise ValueError(f"device={name!r}: this machine has {count} usable NVIDIA GPUs{why}; try device='cpu'")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def block_shape(spec: ModelSpec) -> BlockShape:
    """Sizes of a model's blocks: the widest input of a block's matrices is that of the MLP's last."""
    groups = [spec.groups[index] for layer in spec.blocks for index in layer.groups]
    widths = [param.shape[-1] for group in groups for param in group.params if param.kind == "matrix"]
    return BlockShape(spec.hidden_size, max([spec.hidden_size, *widths]), spec.head_dim)


def _profile(
    hardware: HardwareProfile | str | Path | None, device: torch.device, dtype: torch.dtype, shape: BlockShape
) -> HardwareProfile:
    if isinstance(hardware, HardwareProfile):
        return hardware
    if hardware is None:
        return probe(device, dtype, shape)
    path = Path(hardware)
    return read_profile(path) if path.suffix == ".json" else preset(str(hardware))


def _budget(name: str, gib: float | None, num_bytes: int | None, free_bytes: int) -> int:
    if gib is not None and num_bytes is not None:
        raise ValueError(f"give max_{name}_mem_gib or max_{name}_mem_bytes, not both")
    if num_bytes is None and gib is None and free_bytes <= 0:
        raise ValueError(f"no {name} memory is free on this machine; end what else uses it, or give max_{name}_mem_gib")
    if gib is not None and not abs(gib) < 2**53:
        raise ValueError(f"max_{name}_mem_gib must be a finite number of GiB, got {gib}")
    if num_bytes is None:
        num_bytes = free_bytes if gib is None else int(gib * GIB)
    if num_bytes <= 0:
        raise ValueError(f"the {name} memory budget must be positive, got {num_bytes} bytes")
    return int(num_bytes)


def _cap_allocator(prepared: Prepared) -> None:
    """Hold torch's device allocator to what the budget leaves beside the CUDA context."""
    total = torch.cuda.get_device_properties(prepared.device).total_memory
    allowed = prepared.plan.request.max_gpu_bytes - prepared.profile.gpu_context_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, allowed / total)), prepared.device)
