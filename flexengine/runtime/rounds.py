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
from flexengine.runtime.execution.programs import Programs, RoundKind
from flexengine.runtime.execution.replay import Replay
from flexengine.runtime.gradients import warn_of_rounding
from flexengine.runtime.layer_runner import LayerRunner
from flexengine.runtime.ranks.turns import Turns
from flexengine.runtime.step_state import HALF_UPDATED, StepState
from flexengine.runtime.update import UpdateSettings
from flexengine.schedule.commands import LayerCall, Program
from flexengine.schedule.lowering import ChunkShape, RoundShape
from flexengine.schedule.packing import PackedChunk, joined, pack, packed_shape


class RoundRunner:
    """Runs rounds under one layout.

    seed: what dropout draws from. turns: this one's of several ranks; None = alone. replay: what runs blocks' commands
    from graphs; None = nothing does.
    """

    def __init__(
        self, programs: Programs, batches: BatchWriter, layers: LayerRunner, runner: ProgramRunner, state: StepState,
        seed: int, turns: Turns | None = None, replay: Replay | None = None,
    ) -> None:  # fmt: skip
        self.programs, self._batches, self._layers = programs, batches, layers
        self._runner, self._state = runner, state
        self._seed, self._turns, self._replay = seed, turns, replay
        self._plan, self._device = layers.layout.plan, layers.arenas.device
        self._may_warn = self._plan.request.numerics.grad == "bfloat16"

    def train(
        self, batch: Sequences, balance: ExpertBalance | None = None, updates: UpdateSettings | None = None
    ) -> Tensor:
        """Issue forward and backward of a batch; returns the summed loss [] in float64 on the device.

        Of several ranks, each runs its own rounds and waits for the losses of the others.
        balance: what routers report to, where the model balances its experts. updates: settings of the CPU's updates
        inside the last round, which are speculative with clipping; None when no round updates.
        """
        rounds, first = self._pack(batch), self._state.num_rounds
        if self._replay is not None:
            self._replay.begin_batch([[[piece.length for piece in c.ranges] for c in chunks] for chunks in rounds])
        if balance is not None and (len(rounds) > 1 or self._turns is not None):
            self._count_tokens_of_experts(batch, rounds, balance)
        if self._plan.split:
            losses = self._train_in_waves(batch, rounds, balance, updates)
        elif self._plan.stages:
            losses = self._train_in_stages(batch, rounds, updates)
        else:
            losses = self._train_in_turn(batch, rounds, balance, updates)
        if self._may_warn and self._state.num_rounds > MOST_ROUNDED:
            self._may_warn = False
            warn_of_rounding(self._state.num_rounds, self._plan.request.numerics.grad)
        return self._sum(losses, first, len(rounds))

    def _train_in_turn(
        self,
        batch: Sequences,
        rounds: list[list[PackedChunk]],
        balance: ExpertBalance | None,
        updates: UpdateSettings | None,
    ) -> list[Tensor]:
        """Run those rounds that are this rank's turn; returns their losses."""
        losses = list[Tensor]()
        for number, chunks in enumerate(rounds, start=1):
            if self._turns is None or self._turns.begin_round(self._state.num_rounds):
                updates_here = updates is not None and number == len(rounds)
                clips = updates is not None and updates.max_grad_norm is not None
                kind = RoundKind(
                    True, self._is_first, updates=updates_here and not clips, speculates=updates_here and clips
                )
                self._train_round(batch, chunks, balance, kind, updates)
                losses.append(self._losses())
            self._state.num_rounds += 1
            self._state.has_gradients = True
        return losses

    def _train_in_waves(
        self,
        batch: Sequences,
        rounds: list[list[PackedChunk]],
        balance: ExpertBalance | None,
        updates: UpdateSettings | None,
    ) -> list[Tensor]:
        """Run as many rounds at a time as the node has ranks, one on each; returns the losses of this rank's.

        Where fewer are left, ranks without one run the first of them, and nobody adds what they send.
        """
        assert self._turns is not None, "one rank has no waves"
        rank, first, losses = self._turns.share.rank, self._state.num_rounds, list[Tensor]()
        waves = self._turns.waves(first, len(rounds))
        for place, wave in enumerate(waves, start=1):
            takes = rank < len(wave)
            number = wave[rank if takes else 0]
            self._turns.begin_wave()
            self._state.num_rounds = first + wave[0]
            bold = updates is not None and place == len(waves)
            kind = RoundKind(train=True, first=self._is_first, updates=False, together=len(wave), speculates=bold)
            self._state.num_rounds = first + number
            self._state.has_gradients = True
            self._train_round(batch, rounds[number], balance if takes else None, kind, updates)
            if takes:
                losses.append(self._losses())
        self._state.num_rounds, self._state.has_gradients = first + len(rounds), True
        return losses

    def _train_in_stages(
        self, batch: Sequences, rounds: list[list[PackedChunk]], updates: UpdateSettings | None
    ) -> list[Tensor]:
        """Run this rank's part of as many rounds at a time as there are ranks; returns the losses of those whose head
        is its own."""
        assert self._turns is not None, "one rank has no stages"
        rank, first, losses = self._turns.share.rank, self._state.num_rounds, list[Tensor]()
        waves = self._turns.waves(first, len(rounds))
        for place, wave in enumerate(waves, start=1):
            shapes = [packed_shape(rounds[number], self._plan.chunk_tokens) for number in wave]
            self._turns.begin_wave()
            last_before = 0 if self._is_first else self._turns.last
            settings = updates if place == len(waves) else None
            kind = RoundKind(
                train=True,
                first=self._is_first,
                updates=False,
                last_before=last_before,
                speculates=settings is not None,
            )
            program = self.programs.of_round(RoundShape.of_wave(shapes), kind)
            self._write(batch, joined([rounds[number] for number in wave]), None)
            self._state.has_gradients = True
            if settings is not None:
                self._state.before_update()
            self._runner.run(program, settings)
            self._turns.end_wave(len(wave))
            self._state.num_rounds += len(wave)
            if rank < len(wave):
                start = sum(len(rounds[number]) for number in wave[:rank])
                losses.append(self._losses(slice(start, start + len(rounds[wave[rank]]))))
        return losses

    @property
    def _is_first(self) -> bool:
        """Whether the round that comes is the first of its node in the step: nothing is stored yet to add to."""
        return self._state.num_rounds < (1 if self._turns is None else self._turns.ranks.nodes)

    def _train_round(
        self,
        batch: Sequences,
        chunks: list[PackedChunk],
        balance: ExpertBalance | None,
        kind: RoundKind,
        updates: UpdateSettings | None,
    ) -> None:
        """Run the round that the state counts next."""
        program, settings = self._program(chunks, kind), updates if kind.updates or kind.speculates else None
        self._write(batch, chunks, balance)
        self._number_rows()
        if settings is not None:
            self._state.before_update()
        if kind.updates:
            self._state.unusable = HALF_UPDATED  # until the step's own program has ended
        self._runner.run(program, settings)

    def evaluate(self, batch: Sequences, token_losses: list[Tensor] | None = None, everywhere: bool = False) -> Tensor:
        """Issue forward of a batch; returns the summed loss [] in float64 on the device.

        token_losses: one tensor [tokens] per sequence, on the CPU, that takes the loss after each token. Filling them
        waits for every round. everywhere: each of several ranks runs all rounds, as it does for token_losses.
        """
        rounds, losses = self._pack(batch), list[Tensor]()
        turns = None if everywhere or token_losses is not None else self._turns
        for number, chunks in enumerate(rounds):
            if turns is not None and not turns.takes(number):
                continue
            self._forward(batch, chunks, None)
            losses.append(self._losses())
            if token_losses is not None:
                self._copy_losses(chunks, token_losses)
        return self._sum(losses, 0, len(rounds)) if turns is not None else _added(losses, self._device)

    def forward_program(self) -> Program:
        """The program of a forward pass of one chunk."""
        shape = RoundShape((ChunkShape(self._plan.chunk_tokens, self._plan.chunk_tokens),))
        return self.programs.of_round(shape, RoundKind(train=False, first=False, updates=False))

    def forward_chunk(self, batch: Sequences, chunk: PackedChunk) -> None:
        """Issue forward of one chunk of whole sequences or pieces of them; nothing is kept."""
        self._write(batch, [chunk], None)
        self._runner.run(self.forward_program(), measured=False)

    def next_token_logits(self) -> Tensor:
        """Logits [V] of the token after the last one that `evaluate` ran, float32 on the CPU."""
        program = self._runner.last_program
        assert program is not None
        call: LayerCall = next(c.args for c in reversed(program.commands) if c.kind == "evaluate")
        head = call.program.forward[-1]
        chunk = self._layers.chunks[call.chunk]
        hidden = self._layers.bind(call, head.tensors, chunk.tokens)[head.op.inputs[0]]
        weight = self._layers.params_of(call)[head.op.params[0]]
        return head.op.logits(hidden[-1:], weight)[0].float().cpu()  # type: ignore[attr-defined]

    def _pack(self, batch: Sequences) -> list[list[PackedChunk]]:
        plan = self._plan
        return pack(batch.lengths, plan.chunk_tokens, plan.chunks_per_round, plan.round_multiple)

    def _program(self, chunks: list[PackedChunk], kind: RoundKind) -> Program:
        return self.programs.of_round(packed_shape(chunks, self._plan.chunk_tokens), kind)

    def _count_tokens_of_experts(
        self, batch: Sequences, rounds: list[list[PackedChunk]], balance: ExpertBalance
    ) -> None:
        """Run all rounds forward once: the balancing loss of any round depends on what experts get in all of them."""
        for chunks in rounds:
            self._forward(batch, chunks, balance)
        balance.collecting = False

    def _forward(self, batch: Sequences, chunks: list[PackedChunk], balance: ExpertBalance | None) -> None:
        program = self._program(chunks, RoundKind(train=False, first=False, updates=False))
        self._write(batch, chunks, balance)
        self._runner.run(program, measured=False)

    def _write(self, batch: Sequences, chunks: list[PackedChunk], balance: ExpertBalance | None) -> None:
        """Put a round's tokens where its program reads them."""
        self._runner.wait_for_batch()
        self._layers.chunks = self._batches.write(batch, chunks)
        for chunk in self._layers.chunks:
            chunk.balance = balance

    def _number_rows(self) -> None:
        """Number the rows of a round of training within the step, which decides what dropout draws."""
        first_row = self._state.num_rounds * self._plan.round_tokens
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
        return torch.stack([chunk.losses.double().sum() for chunk in self._layers.chunks[chunks]])

    def _sum(self, losses: list[Tensor], first: int, num_rounds: int) -> Tensor:
        """The summed loss of rounds of all ranks. first: the number of the first within the step."""
        if self._turns is None:
            return _added(losses, self._device)
        total = self._turns.sum_in_order(losses, first, num_rounds)
        return torch.tensor(total, dtype=torch.float64, device=self._device)


def _added(losses: list[Tensor], device: torch.device) -> Tensor:
    """The sum of the losses of rounds [chunks], chunk by chunk: the order decides the bits of the sum."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for row in losses:
        for loss in row:
            total += loss
    return total
