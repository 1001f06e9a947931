"""from_pretrained: from what a person asks for to a running engine. Measures, plans, and only then loads."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from flexengine.hardware.presets import preset
from flexengine.hardware.probe import probe
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.registry import ModelSource, open_model
from flexengine.optim.adamw import AdamW
from flexengine.plan import Numerics, Plan, Request
from flexengine.planner.report import describe, round_timeline
from flexengine.planner.search import make_plan
from flexengine.runtime.engine import Engine
from flexengine.runtime.weight_store import check_checkpoint

logger = logging.getLogger(__name__)
GIB = 2**30
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
        """One simulated round as Chrome trace JSON; open it in Perfetto."""
        return round_timeline(self.plan, self.source.spec, self.profile)


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
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
    hardware: HardwareProfile | str | Path | None = None,
    chunk_tokens: int | None = None,
    round_tokens: int | None = None,
    recompute: Literal["auto", "none", "full"] = "auto",
    deterministic: bool = False,
) -> Engine:
    """An engine for a Hugging Face model folder, or for `preset:NAME` with random initial weights.

    optimizer: AdamW(...) (default AdamW()); max_grad_norm: clip the global norm, None = never; seed: initial weights
    and stochastic rounding; deterministic: only kernels proven deterministic (on CUDA; the CPU always is). The other
    keywords are those of `prepare`.
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
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be positive, or None for no clipping, got {max_grad_norm}")
    if prepared.device.type == "cuda":
        _cap_allocator(prepared)
    return Engine(
        prepared.source,
        prepared.plan,
        prepared.device,
        optimizer or AdamW(),
        max_grad_norm=max_grad_norm,
        seed=seed,
        deterministic=deterministic,
        matmul_flops_per_s=prepared.profile.peak_matmul_flops_per_s,
        description=prepared.describe(),
    )


def plan_for(path_or_preset: str | Path, **request: Any) -> Plan:
    """The plan alone, with the keywords of `prepare`; loads no weights."""
    return prepare(path_or_preset, **request).plan


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
    float32 or bfloat16.
    hardware: a HardwareProfile, a preset's name or a profile's JSON file; None measures this machine.
    """
    source = open_model(path_or_preset)
    if source.weights_folder is not None:
        check_checkpoint(source.spec, source.weights_folder)
    if max_seq_len > source.spec.max_position_embeddings:
        logger.warning(
            "max_seq_len=%d is longer than the %d positions that %s was made for",
            max_seq_len,
            source.spec.max_position_embeddings,
            source.spec.name,
        )
    numerics = _numerics(dtype, master_dtype, grad_dtype, optimizer_state_dtype)
    target = _device(device)
    profile = _profile(hardware, target, getattr(torch, dtype))
    free_host = profile.host_available_bytes + profile.host_base_bytes
    free_gpu = profile.gpu_free_bytes + profile.gpu_context_bytes if target.type == "cuda" else free_host // 2
    gpu_bytes = _budget("gpu", max_gpu_mem_gib, max_gpu_mem_bytes, free_gpu)
    if target.type == "cpu":
        free_host = max(1, free_host - gpu_bytes)
    request = Request(
        max_seq_len=max_seq_len,
        max_global_batch_tokens=max_global_batch_tokens,
        max_gpu_bytes=gpu_bytes,
        max_host_bytes=_budget("host", max_host_mem_gib, max_host_mem_bytes, free_host),
        chunk_tokens=chunk_tokens,
        round_tokens=round_tokens,
        recompute=recompute,
        numerics=numerics,
    )
    return Prepared(source, make_plan(source.spec, request, profile), profile, target)


def _numerics(dtype: str, master_dtype: str, grad_dtype: str | None, state_dtype: str) -> Numerics:
    grad = grad_dtype or dtype
    for name, value, allowed in (
        ("dtype", dtype, COMPUTE_DTYPES),
        ("master_dtype", master_dtype, MASTER_DTYPES),
        ("grad_dtype", grad, (*COMPUTE_DTYPES,)),
        ("optimizer_state_dtype", state_dtype, ("float32", "bfloat16")),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not supported; choose {', '.join(allowed)}")
    if grad == "float64" and dtype != "float64":
        raise ValueError(f"grad_dtype=float64 needs dtype=float64, got dtype={dtype}")
    if dtype != "bfloat16":
        if master_dtype == "bfloat16":
            raise ValueError(f"master_dtype=bfloat16 needs dtype=bfloat16, got dtype={dtype}")
        state = "float64" if dtype == "float64" else state_dtype
        return Numerics(compute=dtype, master="full", grad=grad, state=state)
    master = "split" if master_dtype == "float32" else "stochastic"
    return Numerics(compute=dtype, master=master, grad=grad, state=state_dtype)


def _device(name: str) -> torch.device:
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
        raise ValueError(f"device={name!r}: this machine has {count} usable NVIDIA GPUs; try device='cpu'")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _profile(
    hardware: HardwareProfile | str | Path | None, device: torch.device, dtype: torch.dtype
) -> HardwareProfile:
    if isinstance(hardware, HardwareProfile):
        return hardware
    if hardware is None:
        return probe(device, dtype)
    path = Path(hardware)
    if path.suffix == ".json":
        if not path.is_file():
            raise ValueError(f"hardware={str(hardware)!r}: no such profile file")
        return HardwareProfile.from_json(path.read_text())
    return preset(str(hardware))


def _budget(name: str, gib: float | None, num_bytes: int | None, free_bytes: int) -> int:
    if gib is not None and num_bytes is not None:
        raise ValueError(f"give max_{name}_mem_gib or max_{name}_mem_bytes, not both")
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
