"""Runs the two halves of a step, gradients and update, and evaluations, so that an interrupt leaves no half of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from flexengine.ops.determinism import deterministic_kernels
from flexengine.ops.experts.balance import ExpertBalance
from flexengine.optim.clipping import unclipped_scale
from flexengine.runtime.batch_input import Sequences
from flexengine.runtime.execution.program_runner import ProgramRunner
from flexengine.runtime.not_finite import first_bad_gradient
from flexengine.runtime.outputs import FwdBwdOutput, StepOutput, without_loss
from flexengine.runtime.ranks.context import RankContext
from flexengine.runtime.ranks.stage_planes import StagePlanes
from flexengine.runtime.rounds import RoundRunner
from flexengine.runtime.step_state import HALF_UPDATED, StepState, interruptible
from flexengine.runtime.update import UpdateRunner, UpdateSettings
from flexengine.schedule.commands import HOST_STREAMS, Program
from flexengine.schedule.following import cpu_commands
from flexengine.schedule.lowering.kinds import RoundUpdates, UpdateKind, UpdateWay

Result = TypeVar("Result")


class StepRunner:
    """Runs steps and evaluations under one layout. deterministic: only kernels that torch knows to be deterministic.

    swap_planes: called when second planes, which the CPU updated speculatively, become the first ones. planes: those
    that ranks keep on their GPUs.
    """

    def __init__(
        self, runner: ProgramRunner, rounds: RoundRunner, updates: UpdateRunner, state: StepState, deterministic: bool,
        context: RankContext, swap_planes: Callable[[], None], planes: StagePlanes,
    ) -> None:  # fmt: skip
        self._runner, self._rounds, self._updates, self._state = runner, rounds, updates, state
        self._executor, self._layout, self._deterministic = runner.executor, updates.layout, deterministic
        self._context, self._swap_planes, self._planes = context, swap_planes, planes
        self._was_unclipped = True  # the last step; there was none yet

    def start(self) -> None:
        """Begin a step's clocks, unless an earlier call of the step did."""
        if self._state.start_step():
            self._runner.measurement.start_step()

    def train_step(self, batch: Sequences, settings: UpdateSettings) -> tuple[FwdBwdOutput, StepOutput]:
        """Gradients of a batch and the update, parts of which begin inside the last round where the plan says so."""
        plan, clips = self._layout.plan, settings.max_grad_norm is not None
        updates: RoundUpdates = "none"
        if clips and plan.request.norm_first:
            return self._norm_first(batch, settings)
        if self._speculates(settings) and self._rounds.on_all_nodes(batch):
            updates = "speculative"
        # a clipped gradient is scaled by the norm of all, so no update may count before backward has ended
        elif plan.updates_without_norm and not clips:
            updates = "in_round"
        return self.forward_backward(batch, settings, updates, ends_step=True), self.update(settings, updates)

    def _norm_first(self, batch: Sequences, settings: UpdateSettings) -> tuple[FwdBwdOutput, StepOutput]:
        """Run the round for the norm of its gradients, then, where that is finite, once more to update from them.

        Until the second run begins nothing that is stored from step to step has changed.
        """
        out = self.forward_backward(batch, settings, "norm")
        if math.isfinite(float(self._updates.grad_norm())):
            self._state.forget_gradients()
            again = self.forward_backward(batch, settings, "clipped")
            out = out._replace(hardware_flops=out.hardware_flops + again.hardware_flops)
        return out, self.update(settings, "clipped")

    def forward_backward(
        self, batch: Sequences, settings: UpdateSettings | None = None, updates: RoundUpdates = "none",
        ends_step: bool = False,
    ) -> FwdBwdOutput:  # fmt: skip
        """Add a batch's gradients to those since the last step. Waits for its loss.

        updates: those inside the last round, with these settings. ends_step: the update comes next.
        """
        if updates == "none":
            self._state.require_stored(self._layout.plan.stores_gradients)
        with interruptible(self._state, self._executor, train=True):
            balance = self._balance_of(batch)
            with deterministic_kernels(self._deterministic):
                loss_sum = self._rounds.train(batch, balance, settings, updates, ends_step)
            self._planes.changed(gradients=True)
            if balance is not None:
                loss_sum += balance.loss()
            loss_weight = batch.loss_weight
            self._state.loss_weight += loss_weight
            out = without_loss(batch, self._layout)  # while the rounds run
            loss = float(loss_sum) / loss_weight  # waits for them
        return out._replace(loss=loss)

    def evaluate(
        self, batch: Sequences, read: Callable[[Tensor], Result], token_losses: list[Tensor] | None = None,
        everywhere: bool = False,
    ) -> Result:  # fmt: skip
        """Run forward of a batch; returns what `read` makes of its summed loss before anything else runs.

        token_losses, everywhere: as of `RoundRunner.evaluate`.
        """
        with interruptible(self._state, self._executor, train=False):
            self._planes.write_back("weights")  # every rank runs forward with all weights
            with deterministic_kernels(self._deterministic):
                loss_sum = self._rounds.evaluate(batch, token_losses, everywhere)
            return read(loss_sum)

    def between_steps(self, call: Callable[[], Result]) -> Result:
        """Run a call that uses memory between steps: nothing of a step runs before, meanwhile and after."""
        self._executor.synchronize()
        self._context.end_nodes()
        with interruptible(self._state, self._executor, train=False), deterministic_kernels(self._deterministic):
            self._planes.write_back("weights")  # every rank runs forward with all weights
            result = call()
        self._executor.synchronize()
        return result

    def _speculates(self, settings: UpdateSettings) -> bool:
        """Whether the CPU shall update inside the last round as if nothing were clipped.

        Not after a step that was clipped, as the next one may be, too. That changes no bits, only the time.
        """
        able = self._layout.plan.speculates and self._was_unclipped and settings.max_grad_norm is not None
        return able and bool(torch.isfinite(unclipped_scale(settings.loss_weight, self._updates.wide)))

    def _settle(self, settings: UpdateSettings) -> UpdateWay:
        """Keep or drop what the last round updated speculatively; returns which.

        Waits for the norm, with which the last round's program ends, but of several nodes, who have just added it up.
        """
        if self._layout.plan.request.nodes > 1:
            self._runner.run(self._rounds.programs.of_norm(), settings, measured=False)
        program = self._runner.last_program
        assert program is not None, "a round has just run"
        self._executor.wait_for(program, len(program.commands) - 1)
        if self._updates.is_unclipped(settings):
            self._swap_planes()
            return "committed"
        self._executor.drop_cpu_work()
        return "rolled_back"

    def update(self, settings: UpdateSettings, updates: RoundUpdates = "none") -> StepOutput:
        """Run the optimizer step and forget the gradients. updates: those of the last round."""
        self._state.before_update()
        self._state.unusable = HALF_UPDATED
        with interruptible(self._state, self._executor, train=True):
            squares = self._context.add_nodes(self._state.num_rounds, settings.loss_weight)
            if squares is not None:
                self._updates.norm_squares().copy_(squares)
            way: UpdateWay = "after_norm" if updates == "none" else "in_round"
            if updates == "speculative":
                way = self._settle(settings)
            kind = UpdateKind(way, self._context.share, self._context.is_last)
            program = self._rounds.programs.of_update(kind)
            self._runner.run(program, settings)
            self._context.count_update()
            self._planes.changed(gradients=False)
            grad_norm = self._grad_norm(program, kind.norm_known)
            if self._layout.plan.speculates and settings.max_grad_norm is not None:
                self._was_unclipped = way == "committed" or self._updates.is_unclipped(settings)
            skipped = not math.isfinite(grad_norm)
            bad = self._bad_groups() if skipped else set[int]()
            self._state.bad_layer = first_bad_gradient(self._layout.model, bad)
            if self._context.errors is not None:
                self._context.errors.end_step(grad_norm, settings.max_grad_norm, bad)
        self._runner.measurement.active = False
        seconds, scale = self._state.finish_step(
            counts=not skipped or settings.max_grad_norm is None, finite=not skipped
        )
        return StepOutput(grad_norm, skipped, seconds, scale)

    def _bad_groups(self) -> set[int]:
        """The groups whose gradients are not finite. Waits for the device."""
        self._executor.synchronize_device()
        finite = torch.isfinite(self._updates.group_squares()).tolist()
        groups = self._layout.model.groups
        return {i for i, group in enumerate(groups) if not group.frozen and not finite[i]}

    def _balance_of(self, batch: Sequences) -> ExpertBalance | None:
        """What routers report to, where the model balances its experts."""
        balancing, device = self._layout.model.balancing, self._executor.device
        if balancing is None:
            return None
        balance = ExpertBalance.of_batch(balancing, batch.num_tokens, batch.loss_weight, device)
        balance.grad_factor = self._state.grad_factor
        return balance

    def _grad_norm(self, program: Program, norm_known: bool) -> float:
        """The gradient norm of the last update. Waits for the device, not for updates on the CPU.

        Where the host is told the norm, it waits only for that: the device may go on with its own updates.
        norm_known: it was told before the update.
        """
        by_cpu = cpu_commands(program)
        if by_cpu:
            for index in by_cpu[0].waits:
                if program.commands[index].stream not in HOST_STREAMS:
                    self._executor.wait_for(program, index)
        elif not norm_known:
            self._executor.synchronize_device()
            return float(self._updates.grad_norm())
        return float(self._updates.host_grad_norm())
