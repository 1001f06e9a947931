"""Carries out the commands that are no copies: one handler per kind of command."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flexengine.parallel.collectives import Collectives
from flexengine.runtime.arena import Arenas
from flexengine.runtime.decode_weights import decode_weights
from flexengine.runtime.execution.replay import Replay
from flexengine.runtime.fetch_experts import fetch_experts
from flexengine.runtime.gradients import Squares, finish_gradient
from flexengine.runtime.layer_runner import LayerRunner
from flexengine.runtime.ranks.split_handlers import CommandHandler, SplitHandlers
from flexengine.runtime.update import UpdateRunner, UpdateSettings
from flexengine.schedule.commands import Command, FinishGradient, Program
from flexengine.schedule.fixed_slots import PARTIAL_SQUARES
from flexengine.schedule.layout import Layout

LAYER_KINDS = ("forward", "forward_again", "evaluate", "recompute", "backward", "fill_window")


class CommandHandlers:
    """The handlers of one layout, by kind of command; the executor issues copies itself.

    collectives: in which this rank takes part under a split plan. replay: runs commands from CUDA graphs.
    """

    def __init__(
        self, layout: Layout, arenas: Arenas, layers: LayerRunner, updates: UpdateRunner,
        collectives: Collectives | None = None, replay: Replay | None = None,
    ) -> None:  # fmt: skip
        split = None if collectives is None else SplitHandlers(layout, arenas, updates, collectives)
        self._layout, self._arenas, self._layers, self._updates = layout, arenas, layers, updates
        self._replay = replay
        self.by_kind: dict[str, CommandHandler] = {
            **dict.fromkeys(LAYER_KINDS, self._run_layer),
            "finish_gradient": self._finish_gradient,
            "fetch_experts": self._fetch_experts,
            "decode": self._decode,
            "clip": self._clip,
            "scale": self._scale,
            "update": self._update,
        } | ({} if split is None else split.by_kind)

    def run(self, program: Program, settings: UpdateSettings | None, command: Command) -> None:
        """Launch a command on the current stream."""
        assert command.kind in self.by_kind, f"no handler for a command of kind {command.kind!r}"
        self.by_kind[command.kind](command, program, settings)

    def of_program(self, program: Program, settings: UpdateSettings | None) -> Callable[[Command], None]:
        """`run` for the commands of one program."""
        return partial(self.run, program, settings)

    # -- forward and backward ----------------------------------------------------------------------------------------

    def _run_layer(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        (self._replay or self._layers).run(command.kind, command.args)

    def _fetch_experts(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        fetch_experts(command.args, program.slots, self._arenas)

    def _decode(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        decode_weights(command.args, program.slots, self._arenas, self._layers.compute)

    def _finish_gradient(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        args: FinishGradient = command.args
        if self._replay is None or self._layers.wide == torch.float64:  # which launches kernels for every part of it
            self._round(args)
        else:
            self._replay.run_other(args, command.label, command.work.kernels, partial(self._round, args))

    def _round(self, args: FinishGradient) -> None:
        slots, stored_dtype = self._layout.slots, getattr(torch, self._layout.plan.request.numerics.grad)
        partials = self._arenas.view(self._layout.place("partial_squares"), 0, (PARTIAL_SQUARES,), torch.float32)
        wide, squares = self._layers.wide, self._updates.norm_squares()
        for run in args.runs:
            start, stored_start = run.start * wide.itemsize, run.stored_start * stored_dtype.itemsize
            finish_gradient(
                self._arenas.view(slots[args.accumulator], start, (run.numel,), wide),
                self._arenas.view(slots[run.slot], stored_start, (run.numel,), stored_dtype),
                args.has_previous,
                Squares(partials, squares[run.number], run.before, run.whole),
                args.squares,
            )

    # -- updates -----------------------------------------------------------------------------------------------------

    def _clip(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        self._updates.clip(_required(settings, command))

    def _scale(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        self._updates.scale_group(command.args.group, _required(settings, command))

    def _update(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        self._updates.update(command, program.slots, _required(settings, command))


def _required(settings: UpdateSettings | None, command: Command) -> UpdateSettings:
    assert settings is not None, f"{command.label} has no settings"
    return settings
