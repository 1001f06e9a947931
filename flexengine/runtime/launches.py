"""Has the Triton kernels of a plan's steps compiled while its weights are loaded.

Another process runs each kind of command of a step once over arenas without memory (`kernels/ahead.py`). What such a
run gets wrong costs time alone: a kernel that it does not find is compiled when it is first launched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from flexengine.hardware.cache import profile_path, read_remembered, write_remembered
from flexengine.models.spec import ModelSpec
from flexengine.ops.base import DropoutDraws
from flexengine.ops.compiling import begin_compiling, without_memory
from flexengine.optim import Optimizer
from flexengine.plan import Plan
from flexengine.runtime.arena import Arenas
from flexengine.runtime.batch import BatchWriter, constant_tables
from flexengine.runtime.batch_input import Sequences
from flexengine.runtime.engine_parts import EngineSettings
from flexengine.runtime.execution.handlers import LAYER_KINDS, CommandHandlers
from flexengine.runtime.layer_runner import LayerRunner
from flexengine.runtime.update import UpdateRunner, update_settings
from flexengine.runtime.weights.weight_store import empty_buffers
from flexengine.schedule.commands import Command, Program, Stream
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.kinds import WHOLE_UPDATE, RoundKind, UpdateKind
from flexengine.schedule.packing import PackedChunk, pack, packed_shape
from flexengine.schedule.ranks.transports import layout_of, transport_of

if TYPE_CHECKING:
    from flexengine.kernels.ahead import Compilation


class UnallocatedArenas(Arenas):
    """Arenas whose tensors have no memory: made, and used, while launches are recorded."""

    def _allocate_host(self, num_bytes: int, page_locked: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class CompiledAhead:
    """Compiles what a call launches, until `wait` or the end of a block, unless an earlier start has done that.

    name: of the file that remembers it, for people. The others are as of `begin_compiling`.
    """

    def __init__(
        self, name: str, device: torch.device, work: Callable[..., object], *arguments: object, room_bytes: int
    ) -> None:
        self._path: Path | None = None
        self._compilation: Compilation | None = None
        if device.type == "cuda":
            from flexengine.kernels.ahead import state_of_compiler  # noqa: PLC0415 (Triton is imported when first used)

            key = *state_of_compiler(), torch.cuda.get_device_name(device), arguments
            self._path = profile_path(name, key, "kernels")
            if read_remembered(self._path, str) is None:
                self._compilation = begin_compiling(device, work, *arguments, room_bytes=room_bytes)

    def __enter__(self) -> Self:
        return self

    def wait(self) -> None:
        """Wait until all is compiled, and remember that."""
        if self._compilation is not None and self._compilation.wait():
            write_remembered(self._path, "compiled")

    def __exit__(self, *_: object) -> None:
        if self._compilation is not None:
            self._compilation.close()


def launch_step(model: ModelSpec, plan: Plan, optimizer: Optimizer, settings: EngineSettings) -> None:
    """Launch every kind of command of a step once, on tensors without memory."""
    layout, device = layout_of(model, plan), torch.device("cpu")
    with without_memory(), torch.no_grad():
        arenas = UnallocatedArenas(device, layout.gpu_bytes, layout.host_bytes)
        layers = LayerRunner(layout, arenas, empty_buffers(layout, device))
        updates = UpdateRunner(layout, arenas, settings.lr_factors, settings.decay_factors)
        handlers = CommandHandlers(layout, arenas, layers, updates)
        batch, rounds = _full_batch(plan)
        constants = constant_tables(layout, device)
        writer = BatchWriter(layout, arenas, constants, settings.attention, settings.attention_choices)
        layers.chunks = writer.write(batch, rounds[0])
        for number, chunk in enumerate(layers.chunks):
            chunk.dropout = DropoutDraws(settings.seed, 0, number * plan.chunk_tokens)
        known = update_settings(optimizer, None, settings.max_grad_norm, float(batch.num_tokens), 1, settings.seed)
        for program, command in _kinds(layout, rounds, settings.max_grad_norm is not None):
            try:
                handlers.run(program, known, command)
            except Exception as error:
                print(f"{command.label}: {error!r}", file=sys.stderr)


def _full_batch(plan: Plan) -> tuple[Sequences, list[list[PackedChunk]]]:
    """A batch of the longest sequences, with as many tokens as a step may have, and its rounds."""
    longest, tokens = plan.request.max_seq_len, plan.request.max_global_batch_tokens
    lengths = [min(longest, tokens - start) for start in range(0, tokens, longest)]
    rows = [torch.zeros(length, dtype=torch.int64) for length in lengths]
    return Sequences(rows, rows), pack(lengths, plan.chunk_tokens, plan.chunks_per_round, plan.round_multiple)


def _kinds(layout: Layout, rounds: list[list[PackedChunk]], clips: bool) -> Iterator[tuple[Program, Command]]:
    """One command of each kind of the programs of a step, beside copies and what the CPU does."""
    transport, plan = transport_of(layout.plan), layout.plan
    in_round = plan.updates_without_norm and not clips
    shape = transport.shape([packed_shape(rounds[0], plan.chunk_tokens)])
    kinds = [RoundKind(True, first, "in_round" if in_round else "none") for first in (True, False)[: len(rounds)]]
    programs = [transport.lower_round(layout, shape, kind) for kind in kinds]
    programs.append(transport.lower_update(layout, UpdateKind("in_round") if in_round else WHOLE_UPDATE))
    seen = set()
    for program in programs:
        for command in program.commands:
            key = _kind_of(command)
            if command.stream == Stream.COMPUTE and not command.copies and key not in seen:
                seen.add(key)
                yield program, command


def _kind_of(command: Command) -> tuple[object, ...]:
    """What alike commands share: the same launches but for where their operands lie."""
    if command.kind in LAYER_KINDS:
        call = command.args
        parts = call.program.stages(command.kind)[call.stage].parts  # the first begins sums, and the last ends them
        return command.kind, id(call.program), call.stage, call.first, call.part == parts[0], call.part == parts[-1]
    if command.kind == "update":
        return command.kind, command.args.segment, command.args.count, tuple(command.args.planes)
    if command.kind == "finish_gradient":
        return command.kind, command.args.has_previous, tuple(run.numel for run in command.args.runs)
    return command.kind, re.sub(r"\d+", "", command.label)
