"""Times one call of each kind of opaque block on this machine, and remembers it: nothing else tells what they take."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.hardware.cache import profile_path, read_remembered, write_remembered
from flexengine.hardware.measure.timing import timed_calls
from flexengine.hardware.memory_usage import gpu_used_bytes, hold_cublas_workspace, release_unused_heap, resident_bytes
from flexengine.hardware.probe import machine, release_cached_memory
from flexengine.hardware.profile import HardwareProfile
from flexengine.ops.base import ChunkContext, OpEnv
from flexengine.ops.determinism import deterministic_kernels
from flexengine.ops.opaque import OpaqueBlock
from flexengine.ops.opaque_cost import TimedCall
from flexengine.wording import parse_json

VERSION = 2  # part of the cache key: raise it when what is timed changes its meaning
WARM_S, TIMED_S = {"cuda": 1.2, "cpu": 0.02}, {"cuda": 0.6, "cpu": 0.05}
"""Before anything is timed, and of each half: a card gets to the clock that it sustains, as in the probe."""
MOST_TOKENS = 8192
"""Calls of longer sequences take as much more as their counts say."""

logger = logging.getLogger(__name__)


class OpaqueCall(NamedTuple):
    """An opaque block as one layer has it. shapes: of parameters; buffers: of what nothing trains, in float32."""

    op: OpaqueBlock
    layer: int
    shapes: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]

    def operand_bytes(self, tokens: int, compute_bytes: int) -> int:
        """Bytes of weights, gradients, activations and what a call takes."""
        weights = sum(math.prod(shape) for shape in self.shapes.values())
        width = sum(math.prod(spec.shape) for spec in self.op.outputs)
        rows = 5 * tokens * width * compute_bytes
        return weights * (compute_bytes + max(4, compute_bytes)) + rows + self.op.workspace_bytes(tokens, compute_bytes)


class TimedCalls(NamedTuple):
    """What was timed, call by call; None where nothing fitted. gpu_bytes, host_bytes: of kernels that were loaded."""

    calls: tuple[TimedCall | None, ...]
    gpu_bytes: int = 0
    host_bytes: int = 0

    def to_json(self) -> str:
        """JSON text; `from_json` is the inverse."""
        return json.dumps(self._asdict())

    @staticmethod
    def from_json(text: str) -> TimedCalls:
        """What is in `text`. Raises: ValueError if it is no JSON, or holds anything else."""
        found = parse_json(text, "timed calls")
        try:
            calls = tuple(None if call is None else TimedCall(*call) for call in found["calls"])
            return TimedCalls(calls, int(found["gpu_bytes"]), int(found["host_bytes"]))
        except (KeyError, TypeError):
            raise ValueError("timed calls: expected calls, gpu_bytes and host_bytes") from None

    def with_kernels(self, profile: HardwareProfile) -> HardwareProfile:
        """The profile of a process that has loaded these kernels, too."""
        return profile.changed(
            gpu_context_bytes=profile.memory.gpu_context_bytes + self.gpu_bytes,
            gpu_free_bytes=max(0, profile.memory.gpu_free_bytes - self.gpu_bytes),
            host_base_bytes=max(resident_bytes(), profile.memory.host_base_bytes + self.host_bytes),
        )


class CallRun(NamedTuple):
    """What calls are timed on: sequences of so many tokens on an idle machine, within a GPU budget if there is one.

    deterministic: only by deterministic kernels, which may take longer and more memory.
    """

    device: torch.device
    dtype: torch.dtype
    tokens: int
    profile: HardwareProfile
    max_gpu_mem_gib: float | None = None
    deterministic: bool = False

    def shape(self, call: OpaqueCall) -> tuple[int, int]:
        """Tokens of a call's sequences and their number: as many as share one, or fewer and shorter ones until they
        fit; no tokens where none do."""
        memory, count = self.profile.memory, min(self.tokens, MOST_TOKENS, call.op.rows_per_call or MOST_TOKENS)
        free = memory.gpu_free_bytes
        if self.max_gpu_mem_gib is not None:
            free = min(free, int(self.max_gpu_mem_gib * 2**30) - memory.gpu_context_bytes)
        together = call.op.together if count == call.op.longest else 1
        while count and call.operand_bytes(count * together, self.dtype.itemsize) > free:
            count, together = (count, together // 2) if together > 1 else (count // 2, 1)
        return count, together


def timed_opaque_calls(calls: Sequence[OpaqueCall], run: CallRun) -> TimedCalls:
    """Time each call, or remember what it took.

    Order: after the probe, before the arenas take their memory.
    """
    shapes = [run.shape(call) for call in calls]
    key = VERSION, *machine(run.device), str(run.dtype), run.deterministic, tuple(shapes), tuple(map(_key_of, calls))
    path = profile_path(f"opaque {calls[0].op.title}", key, "opaque")
    found = read_remembered(path, TimedCalls.from_json)
    if found is None or len(found.calls) != len(calls):
        logger.info("timing opaque blocks on %s once (a few seconds)", run.device)
        forked = [run.device] if run.device.type == "cuda" else []
        with torch.random.fork_rng(devices=forked), deterministic_kernels(run.deterministic):
            found = _timed_all(calls, shapes, run.device, run.dtype)
        write_remembered(path, found.to_json())
    return found


def _key_of(call: OpaqueCall) -> tuple[object, ...]:
    """All that decides what a call takes, beside the machine and its length."""
    op = call.op
    backward = op.has_input_half, op.has_weight_half, op.params
    return op.title, op.name, call.layer, op.adapters, backward, op.rows_per_call, *call.shapes.items()


def _timed_all(
    calls: Sequence[OpaqueCall], shapes: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> TimedCalls:
    if device.type == "cuda":
        hold_cublas_workspace(device, dtype)
    before = _held(device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        pairs = zip(calls, shapes, strict=True)
        found = tuple(_timed(call, shape, device, dtype) if shape[0] else None for call, shape in pairs)
    grown = [max(0, now - then) for now, then in zip(_held(device), before, strict=True)]
    return TimedCalls(found, *grown)


def _held(device: torch.device) -> tuple[int, int]:
    """Bytes of GPU and host that this process holds for kernels and libraries."""
    release_unused_heap()
    if device.type != "cuda":
        return 0, resident_bytes()
    release_cached_memory()
    return gpu_used_bytes(device) - torch.cuda.memory_reserved(device), resident_bytes()


def _timed(call: OpaqueCall, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> TimedCall:
    env, op, (tokens, sequences) = _operands(call, shape, device, dtype), call.op, shape
    forward, backward = partial(op.forward, env), partial(op.backward_input, env) if op.has_input_half else None
    peak_bytes = _peak_bytes(device, (forward, backward or forward))
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < WARM_S[device.type]:
        _seconds(device, backward or forward, 1)
    forward_s = _mean_s(device, forward)
    return TimedCall(tokens, forward_s, _mean_s(device, backward) if backward else 0.0, peak_bytes, sequences)


def _operands(call: OpaqueCall, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> OpEnv:
    """Random operands of sequences of so many tokens, and so many of them."""

    def random(shape: tuple[int, ...], scale: float, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=kind) * scale

    op, wide, lengths = call.op, torch.promote_types(dtype, torch.float32), (shape[0],) * shape[1]
    tokens = sum(lengths)
    width = {op.y: math.prod(op.outputs[0].shape), op.x: op.width}
    weights = {name: random(shape, 0.02) for name, shape in call.shapes.items()}
    weights |= {name: random(shape, 0.02, torch.float32) for name, shape in call.buffers.items()}
    rows = {name: random((tokens, columns), 1.0) for name, columns in width.items()}
    grads = {name: random((tokens, columns), 1e-3) for name, columns in width.items()}
    trained = op.params if op.has_weight_half else ()
    totals = {name: torch.zeros(weights[name].shape, device=device, dtype=wide) for name in trained}
    ids = torch.zeros(tokens, dtype=torch.int64)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    chunk = ChunkContext(tokens, ids, ids, ids, ends, lengths, torch.zeros(tokens), {})
    return OpEnv(rows, weights, grads, totals, chunk, first=False, layer=call.layer)


def _peak_bytes(device: torch.device, halves: Sequence[Callable[[], None]]) -> int:
    """Most bytes that the allocator takes from the device for first calls; 0 where nothing counts them."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    for half in halves:
        half()
    return torch.cuda.max_memory_reserved(device) - before


def _mean_s(device: torch.device, work: Callable[[], None]) -> float:
    """Seconds per call of calls that follow each other, what issuing them takes among it."""
    once_s = _seconds(device, work, 1)
    return _seconds(device, work, max(1, math.ceil(TIMED_S[device.type] / once_s)))


def _seconds(device: torch.device, work: Callable[[], None], calls: int) -> float:
    if device.type == "cuda":
        return timed_calls(work, calls)
    start_s = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start_s) / calls
