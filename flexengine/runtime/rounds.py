"""Runs the rounds of a batch: packs it, writes each round's tokens where its program reads them, sums the losses."""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import DropoutDraws
from flexengine.ops.experts.balance import ExpertBalance
from flexengine.plan import MOST_ROUNDED
from flexengine.runtime.batch import BatchWriter
from flexengine.runtime.batch_input import Sequences
from flexengine.runtime.execution.program_runner import ProgramRunner
from flexengine.runtime.execution.programs import Programs
from flexengine.runtime.execution.replay import Replay
from flexengine.runtime.gradients import warn_of_rounding
from flexengine.runtime.layer_runner import LayerRunner
from flexengine.runtime.ranks.context import RankContext
from flexengine.runtime.ranks.losses import added
from flexengine.runtime.step_state import HALF_UPDATED, StepState
from flexengine.runtime.update import UpdateSettings
from flexengine.schedule.commands import LayerCall, Program
from flexengine.schedule.lowering import ChunkShape, RoundShape
from flexengine.schedule.lowering.kinds import EVALUATION, RoundKind, RoundUpdates
from flexengine.schedule.packing import PackedChunk, joined, pack, packed_shape
from flexengine.schedule.ranks.transports import Turn, transport_of


class RoundRunner:
    """Runs rounds under one layout.

    seed: what dropout draws from. replay: what runs blocks' commands from graphs; None = nothing does.
    """

    def __init__(
        self, programs: Programs, batches: BatchWriter, layers: LayerRunner, runner: ProgramRunner, state: StepState,
        seed: int, context: RankContext, replay: Replay | None = None,
    ) -> None:  # fmt: skip
        self.programs, self._batches, self._layers = programs, batches, layers
        self._runner, self._state = runner, state
        self._seed, self._context, self._replay = seed, context, replay
        self._plan, self._device = layers.layout.plan, layers.arenas.device
        self._may_warn = self._plan.request.numerics.grad == "bfloat16"

    def begin_rows(self, batch: Sequences) -> None:
        """Take what a tower gives rows of prompts for."""
        self._batches.begin_rows(batch)

    def train(
        self, batch: Sequences, balance: ExpertBalance | None = None, settings: UpdateSettings | None = None,
        updates: RoundUpdates = "none", ends_step: bool = False,
    ) -> Tensor:  # fmt: skip
        """Issue forward and backward of a batch; returns the summed loss [] in float64 on the device.

        Of several ranks, each runs its own turns and waits for the losses of the others.
        balance: what routers report to, where the model balances its experts. updates: those inside the last round,
        with these settings. ends_step: the update comes next, so that nodes may add up what the last round stores.
        """
        rounds, first = self._pack(batch), self._state.num_rounds
        if len(rounds) > 1:
            self._state.require_stored(self._plan.stores_gradients)
        if self._replay is not None:
            self._replay.begin_batch([[[piece.length for piece in c.ranges] for c in chunks] for chunks in rounds])
        self._batches.begin_rows(batch, rounds)
        if balance is not None and (len(rounds) > 1 or self._plan.shares_node):
            self._count_tokens_of_experts(batch, rounds, balance)
        losses = list[Tensor]()
        for turn in self._context.turns(first, len(rounds)):
            if ends_step and settings is not None and turn.ends_batch:
                self._context.begin_nodes(first + len(rounds), settings.loss_weight)
            if turn.rounds:
                self._take_turn(batch, rounds, turn, first, balance, settings, updates if turn.ends_batch else "none")
                if turn.own is not None:
                    losses.append(self._losses(self._told_of(rounds, turn)))
        if ends_step and settings is not None:  # also of nodes that have no turn in this batch
            self._context.begin_nodes(first + len(rounds), settings.loss_weight)
        self._state.num_rounds, self._state.has_gradients = first + len(rounds), True
        if self._may_warn and self._state.num_rounds > MOST_ROUNDED:
            self._may_warn = False
            warn_of_rounding(self._state.num_rounds, self._plan.request.numerics.grad)
        return self._context.sum_losses(losses, first, len(rounds), self._device, trained=True)

    def on_all_nodes(self, batch: Sequences) -> bool:
        """Whether each of several nodes has a round of a batch."""
        nodes = self._plan.request.nodes
        return nodes == 1 or len(self._pack(batch)) >= nodes

    def _told_of(self, rounds: list[list[PackedChunk]], turn: Turn) -> slice:
        """Which chunks of a turn are those whose losses this rank tells."""
        assert turn.own is not None, "another rank tells them"
        start = sum(len(rounds[number]) for number in turn.rounds[: turn.own])
        shape = packed_shape(rounds[turn.rounds[turn.own]], self._plan.chunk_tokens)
        told = transport_of(self._plan).told(self._layers.layout, shape, turn.wave)
        return slice(start + told.start, start + told.stop)

    def _take_turn(
        self, batch: Sequences, rounds: list[list[PackedChunk]], turn: Turn, first: int,
        balance: ExpertBalance | None, settings: UpdateSettings | None, updates: RoundUpdates,
    ) -> None:  # fmt: skip
        """Run this rank's part of a turn. first: the number of the batch's first round within its step."""
        # nothing is stored yet to add to in the first round of each node
        stores_first = first + turn.together[0] < self._plan.request.nodes
        kind = RoundKind(True, stores_first, updates, turn.wave)
        chunks = [rounds[number] for number in turn.rounds]
        program = self.programs.of_rounds([packed_shape(c, self._plan.chunk_tokens) for c in chunks], kind)
        self._write(batch, joined(chunks), balance if turn.own is not None else None)
        self._number_rows(first + turn.rounds[0])
        self._state.has_gradients = True
        if updates not in ("none", "norm"):
            self._state.before_update()
        if updates in ("in_round", "clipped"):
            self._state.unusable = HALF_UPDATED  # until the step's own program has ended
        self._runner.run(program, settings, rows=self._rows())

    def evaluate(self, batch: Sequences, token_losses: list[Tensor] | None = None, everywhere: bool = False) -> Tensor:
        """Issue forward of a batch; returns the summed loss [] in float64 on the device.

        token_losses: one tensor [tokens] of zeros per sequence, on the CPU, that takes the loss after each token.
        Filling them waits for every round. everywhere: each of several ranks runs all rounds.
        """
        rounds, losses = self._pack(batch), list[Tensor]()
        self._batches.begin_rows(batch, rounds)
        for number, chunks in enumerate(rounds):
            if not everywhere and not self._context.evaluates(number):
                continue
            self._forward(batch, chunks, None)
            losses.append(self._losses())
            if token_losses is not None:
                self._copy_losses(chunks, token_losses)
        if everywhere:
            return added(losses, self._device)
        if token_losses is not None:
            self._context.join_rows(token_losses)
        return self._context.sum_losses(losses, 0, len(rounds), self._device)

    def forward_program(self) -> Program:
        """The program of a forward pass of one chunk."""
        shape = RoundShape((ChunkShape(self._plan.chunk_tokens, self._plan.chunk_tokens),))
        return self.programs.of_rounds([shape], EVALUATION)

    def forward_chunk(self, batch: Sequences, chunk: PackedChunk) -> None:
        """Issue forward of one chunk of whole sequences or pieces of them; nothing is kept."""
        self._write(batch, [chunk], None)
        self._runner.run(self.forward_program(), measured=False, rows=self._rows())

    def next_token_logits(self) -> Tensor:
        """Logits [V] of the token after the last one that `evaluate` ran, float32 on the CPU."""
        program = self._runner.last_program
        assert program is not None
        call: LayerCall = next(c.args for c in reversed(program.commands) if c.kind == "evaluate")
        head = call.program.forward[-1]
        chunk = self._layers.chunks[call.chunk]
        hidden = self._layers.bind(call, head.tensors, chunk.tokens)[head.op.inputs[0]]
        logits = head.op.logits_of(hidden[-1:], self._layers.params_of(call))  # type: ignore[attr-defined]
        return logits[0].float().cpu()

    def _pack(self, batch: Sequences) -> list[list[PackedChunk]]:
        plan = self._plan
        return pack(batch.lengths, plan.chunk_tokens, plan.chunks_per_round, plan.round_multiple)

    def _count_tokens_of_experts(
        self, batch: Sequences, rounds: list[list[PackedChunk]], balance: ExpertBalance
    ) -> None:
        """Run all rounds forward once: the balancing loss of any round depends on what experts get in all of them."""
        for chunks in rounds:
            self._forward(batch, chunks, balance)
        balance.collecting = False

    def _forward(self, batch: Sequences, chunks: list[PackedChunk], balance: ExpertBalance | None) -> None:
        program = self.programs.of_rounds([packed_shape(chunks, self._plan.chunk_tokens)], EVALUATION)
        self._write(batch, chunks, balance)
        self._runner.run(program, measured=False, rows=self._rows())

    def _write(self, batch: Sequences, chunks: list[PackedChunk], balance: ExpertBalance | None) -> None:
        """Put a round's tokens where its program reads them."""
        self._runner.wait_for_batch()
        self._layers.chunks = self._batches.write(batch, chunks)
        for chunk in self._layers.chunks:
            chunk.balance, chunk.grad_factor = balance, self._state.grad_factor

    def _rows(self) -> list[int]:
        """Tokens of the chunks that were written last."""
        return [chunk.tokens for chunk in self._layers.chunks]

    def _number_rows(self, round_number: int) -> None:
        """Number the rows of a round of training within the step, which decides what dropout draws."""
        first_row = round_number * self._plan.round_tokens
        for number, chunk in enumerate(self._layers.chunks):
            row = first_row + number * self._plan.chunk_tokens
            chunk.dropout = DropoutDraws(self._seed, self._state.step_count, row)

    def _copy_losses(self, chunks: list[PackedChunk], token_losses: list[Tensor]) -> None:
        """Copy the losses of the round that was issued last to the sequences that its chunks are made of."""
        for packed, chunk in zip(chunks, self._layers.chunks, strict=True):
            parts = chunk.losses.cpu().split([piece.length for piece in packed.ranges])
            for piece, losses in zip(packed.ranges, parts, strict=True):
                token_losses[piece.sequence][piece.start : piece.start + piece.length] = losses

    def _losses(self, chunks: slice = slice(None)) -> Tensor:
        """The loss of every chunk, or of some, of what was issued last, float64 [chunks] on the device."""
        sums = [chunk.losses.double().sum() for chunk in self._layers.chunks[chunks]]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64, device=self._device)
