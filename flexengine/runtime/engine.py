"""The engine: a model under a plan, trained with train_step, or fwd_bwd and step.

It owns the arenas and wires what runs over them. It knows nothing of architectures (a ModelSpec is data) and nothing of
how the plan came about.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from flexengine.checkpoint.provenance import beneath
from flexengine.hardware.memory_usage import GpuMemoryMeter
from flexengine.models.base_dtype import check_base_dtype
from flexengine.models.delta_dtype import check_delta_dtype
from flexengine.models.keep_dtype import check_keep_dtype
from flexengine.models.matmul_dtype import check_matmul_dtype
from flexengine.models.registry import ModelSource
from flexengine.native.drive import DriveError
from flexengine.ops.custom_loss import LossFunction
from flexengine.optim import Optimizer
from flexengine.optim.loss_scale import LossScale
from flexengine.plan import Plan, Request
from flexengine.runtime.arena import Arenas
from flexengine.runtime.batch import BatchWriter, constant_tables
from flexengine.runtime.checkpoint_calls import CLOSED, CheckpointCalls
from flexengine.runtime.engine_parts import EngineSettings
from flexengine.runtime.execution.executor import Executor
from flexengine.runtime.execution.handlers import CommandHandlers
from flexengine.runtime.execution.measurement import StepMeasurement
from flexengine.runtime.execution.program_runner import ProgramRunner
from flexengine.runtime.execution.programs import Programs
from flexengine.runtime.execution.replay import Replay
from flexengine.runtime.forward_calls import ForwardCalls
from flexengine.runtime.layer_runner import LayerRunner
from flexengine.runtime.one_caller import one_caller, training_call
from flexengine.runtime.outputs import FwdBwdOutput, StepOutput
from flexengine.runtime.ranks.context import open_context
from flexengine.runtime.ranks.drive import open_drive
from flexengine.runtime.ranks.stage_planes import StagePlanes
from flexengine.runtime.reading_calls import ReadingCalls
from flexengine.runtime.rounds import RoundRunner
from flexengine.runtime.step_runner import StepRunner
from flexengine.runtime.step_state import StepState
from flexengine.runtime.update import UpdateRunner, UpdateSettings, update_settings
from flexengine.runtime.weights.adapters import Begin, start_adapters
from flexengine.runtime.weights.linked_base import linked_regions, moved_regions
from flexengine.runtime.weights.loading import fill_weights
from flexengine.runtime.weights.weight_store import WeightStore, empty_buffers
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.transports import layout_of
from flexengine.schedule.relocation import relocation


class Engine(CheckpointCalls, ReadingCalls, ForwardCalls):
    """Trains one model under one plan. `flexengine.from_pretrained` makes it.

    fwd_bwd adds the gradients of a batch, several calls accumulate; step updates the weights with the gradients of the
    mean loss over all target tokens since the last step. train_step is both. One call runs at a time: a second one from
    another thread raises RuntimeError.

    `made_from` is what manifests of exports and checkpoints say of their making beside the plan: the model beneath, and
    what a caller adds, as JSON values.

    A call that is interrupted (Ctrl-C) drops the gradients since the last step, so that all of that step's batches may
    be given again; `has_gradients` and `step_count` tell what there is. Where weights were being updated, later calls
    raise ValueError instead.
    """

    def __init__(
        self,
        source: ModelSource,
        plan: Plan,
        device: torch.device,
        optimizer: Optimizer,
        settings: EngineSettings | None = None,
    ) -> None:
        check_matmul_dtype(source.spec, plan.request.numerics.matmul)
        check_keep_dtype(source.spec, plan.request.numerics.keep)
        check_delta_dtype(source.spec, plan.request.numerics.delta)
        check_base_dtype(source.spec, plan.request.numerics.base)
        self.source, self.model, self.plan, self.device = source, source.spec, plan, device
        self.optimizer, self.settings = optimizer, settings or EngineSettings()
        self.made_from = beneath(source.weights_folder, source.spec.name, self.settings.adapter)
        self._description, self.seed = self.settings.description, self.settings.seed
        group = self.settings.group
        layout = layout_of(self.model, plan, 0 if group is None else group.ranks.local_rank)
        gpu_bytes = layout.gpu_bytes + self.settings.cache_bytes
        self.meter = _start_meter(device, gpu_bytes)
        self.context = open_context(group, layout, device)
        self.arenas = Arenas(device, gpu_bytes, layout.host_bytes)
        if layout.drive_bytes:
            opened = partial(open_drive, group, self.settings.offload_dir, layout.drive_bytes)
            self.arenas.add_drive(opened, linked_regions(layout, source.weights_folder, self.settings.offload_dir))
        self.executor = Executor(device, self.arenas, self.settings.order)
        self.state = StepState(LossScale() if plan.request.numerics.scales_loss else None)
        self.measurement = StepMeasurement(self.executor, self.model)
        self.context.join(self.arenas, gpu_bytes)
        self.state.on_failure = partial(self.context.give_up, self.state)
        self.buffers = empty_buffers(layout, device)
        self._use(layout)
        self._load()

    def _use(self, layout: Layout) -> None:
        """Lay everything that runs over the arenas by `layout`."""
        self.layout = layout
        context = self.context
        self.weights = WeightStore(layout, self.arenas, context.share)
        self.planes = StagePlanes(layout, self.arenas, self.executor, context.barrier, context.share.rank)
        context.use(layout, self.arenas, self.planes.write_back)
        self.layers = LayerRunner(layout, self.arenas, self.buffers)
        self.updates = UpdateRunner(layout, self.arenas, self.settings.lr_factors, self.settings.decay_factors)
        self.replay = Replay(self.layers) if layout.plan.replays and self.device.type == "cuda" else None
        self.handlers = CommandHandlers(
            layout, self.arenas, self.layers, self.updates, context.collectives, self.replay
        )
        self.runner = ProgramRunner(self.executor, self.handlers, self.measurement, context)
        constants = constant_tables(layout, self.device)
        batches = BatchWriter(layout, self.arenas, constants, self.settings.attention, self.settings.attention_choices)
        self.programs = Programs(layout, self.executor)
        seed, deterministic = self.settings.seed, self.settings.deterministic
        self.rounds = RoundRunner(
            self.programs, batches, self.layers, self.runner, self.state, seed, context, self.replay
        )
        self.steps = StepRunner(
            self.runner, self.rounds, self.updates, self.state, deterministic, context, self._swap_planes, self.planes
        )

    def _swap_planes(self) -> None:
        """Read and write stored planes where a speculative update has put them from here on."""
        self.layout = self.weights.layout = self.programs.swap()

    def _load(self) -> None:
        with self.context.together(), self.arenas.page_locking():
            fill_weights(self.weights, self.buffers, self.source.weights_folder, self.settings.seed)
        with self.context.together():  # adapters begin with what all ranks have loaded of the base
            start_adapters(self.weights, Begin(self.source.weights_folder, self.seed), self.settings.adapter)
            self.executor.synchronize()
        if self.context.over_nodes is not None:
            self.context.over_nodes.keep_masters()
        self.planes.fetch()
        self.arenas.reserve_workspace(self.layout.workspace_bytes)
        if self.plan.request.nodes > 1:
            self.context.agree(self.weights.sampled_digest(), "checkpoint")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- a step ------------------------------------------------------------------------------------------------------

    @training_call
    def fwd_bwd(self, batch: object = None, *, loss: LossFunction | None = None, **columns: object) -> FwdBwdOutput:
        """Forward and backward of a batch; its gradients are added to those since the last step.

        batch: ragged token lists, where every token is a target of the one before it; or a mapping of columns, as
        tokenizers and collators make them. The columns may be keywords instead: input_ids, and optionally labels
        (unshifted, -100 = no loss), attention_mask (0 = padding, on either side) and position_ids (0 begins a sequence
        of a row that holds several); each a list of rows, a [B, S] tensor or array, or a column of a data set.
        weights: one more column, which may stand beside any batch: the factor on the loss of each token, negative ones
        too. What is trained is then sum(weights * losses) / sum(|weights|), both sums over the tokens with a loss of
        all calls since the last step; tokens without a weight have weight 1. `step(divisor=...)` divides otherwise.
        loss: takes the place of the cross-entropy: a function of a `LogitsBlock` that returns the sum of the losses of
        its tokens, differentiated by autograd (docs/losses.md).
        Raises ValueError for tokens outside the vocabulary, sequences over max_seq_len, more tokens than
        max_global_batch_tokens, no target token, or a plan that stores no gradients.
        """
        sequences = self._read(batch, columns, loss)
        self.steps.start()
        self.state.scale_gradients(sequences.loss_weight)
        return self.steps.forward_backward(sequences)

    @training_call
    def step(self, lr: float | None = None, *, divisor: float | None = None) -> StepOutput:
        """Update with the gradients of the mean loss over all target tokens since the last step, clipped by their norm.

        lr overrides the optimizer's for this step. divisor: what the sum of the losses is divided by, instead of the
        target tokens or the sum of the sizes of their weights. A gradient norm that is not finite skips the update and
        leaves every weight and state as it was, and under float16 halves the loss scale; without clipping (and in other
        dtypes), only those of the layers whose own gradient is not finite, and the step counts (for AdamW's bias
        correction).
        Raises ValueError when there are no gradients, lr is negative, or divisor is not above 0.
        """
        self.state.require_gradients("step() without gradients: call fwd_bwd(batch) first")
        self._agree(lr, divisor)
        return self.steps.update(self._update_settings(lr, self.state.loss_weight, divisor))

    @training_call
    def train_step(
        self,
        batch: object = None,
        *,
        lr: float | None = None,
        divisor: float | None = None,
        loss: LossFunction | None = None,
        **columns: object,
    ) -> tuple[FwdBwdOutput, StepOutput]:
        """fwd_bwd and step in one call, with the same results; arguments and errors are theirs.

        It may be faster: without clipping the CPU, and the GPU where a plan says so, update inside the backward pass of
        the last round, as soon as a layer's gradient is there. With clipping a plan may have the CPU do that for some
        layers as if nothing were clipped; where the norm then says otherwise, these are updated again. A plan that
        stores no gradients runs the batch twice then, first for the norm: `loss` is called twice, too.
        """
        sequences = self._read(batch, columns, loss)
        self._agree(lr, divisor)
        self.state.scale_gradients(sequences.loss_weight)
        settings = self._update_settings(lr, self.state.loss_weight + sequences.loss_weight, divisor)
        self.steps.start()
        return self.steps.train_step(sequences, settings)

    def _agree(self, lr: float | None, divisor: float | None) -> None:
        """Raise ValueError unless all ranks make a step with the same arguments."""
        self.context.agree((lr, divisor), "lr or divisor")

    def _update_settings(self, lr: float | None, loss_weight: float, divisor: float | None) -> UpdateSettings:
        """What the next step's update depends on. Raises ValueError when lr is negative or divisor is not above 0."""
        if divisor is not None and not 0 < divisor < math.inf:
            raise ValueError(f"divisor must be a finite number above 0, got {divisor}")
        step, seed = self.step_count + 1, self.settings.seed
        weight = (loss_weight if divisor is None else divisor) * self.state.grad_factor
        most = self.settings.max_grad_norm
        if most is None and self.plan.request.numerics.scales_loss:
            most = math.inf  # clips nothing, but no update counts before all gradients are known to be finite
        return update_settings(self.optimizer, lr, most, weight, step, seed)

    # -- changing the plan ---------------------------------------------------------------------------------------------

    @one_caller
    def adopt(self, plan: Plan, description: str = "") -> None:
        """Go on under another plan of the same model and request; weights and optimizer states move to where it wants.

        Between steps only. Nothing is allocated: the plan must fit the arenas of the one before, and planes move
        within them. With the same chunk and round sizes every later loss is bit-identical to what it would have been.
        Of several ranks, all call it with the same plan, which may divide optimizer states otherwise over their GPUs.
        Raises ValueError when there are gradients, the request differs, or the plan does not fit; then nothing changed.
        """
        self.state.require_usable()
        self.context.agree(plan.to_json(), "plan")
        if self.state.has_gradients:
            raise ValueError("adopt() between fwd_bwd and step: the gradients would be lost; call step() first")
        _check_same_run(self.plan.request, plan.request)
        with self.context.together():
            layout = layout_of(self.model, plan, self.weights.share.rank)
            moves = relocation(self.layout, layout, self.arenas.capacity, self.context.cuts)
            self.context.check_takes(layout)
            regions, moves = moved_regions(self.arenas.regions, moves)
        with self.context.together():
            self._finish_save()
            self.executor.synchronize()
        self.context.end_nodes()
        self.planes.write_back()
        with self.context.together():
            self.arenas.relink(regions)
        self.state.unusable = "a change of plan was interrupted, so its weights are half moved"
        self._forget_programs()
        with self.executor.on_compute_stream():
            for move in moves:
                with self.context.together():  # a later move may take the place that this one leaves
                    self.arenas.relocate(move.copies(self.weights.share.rank))
            self.context.start_again(layout)
            self._use(layout)
            self.planes.fetch()
            self.arenas.reserve_workspace(layout.workspace_bytes)
        self.plan, self._description = plan, description or self._description
        self.state.unusable = ""

    def _forget_programs(self) -> None:
        self.programs.forget()
        self.runner.last_program = None
        self.layers.chunks = []
        if self.replay is not None:
            self.replay.close()

    # -- the end -------------------------------------------------------------------------------------------------------

    @one_caller
    def close(self) -> None:
        """Stop measuring and release both arenas; the engine is not usable afterwards. A second call does nothing.

        Raises: DriveError where a drive failed and no call has told of it yet.
        """
        self.state.unusable = CLOSED  # first: an engine that an interrupt left half closed must not go on
        try:
            self._finish_save()
            self.executor.synchronize()
            self.context.end_nodes(alone=True)
        except DriveError as error:
            if not error.again:  # else whoever called before knows
                raise
        finally:
            self.meter.stop()
            self._forget_programs()
            self.arenas.close()
            self.context.close()
            release_device(self.device)


def release_device(device: torch.device) -> None:
    """Give back what torch's allocator keeps of a GPU, and the limit that the engine's budget set it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        # "cuda" without a number is the current device, but torch takes only numbered ones here
        numbered = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_per_process_memory_fraction(1.0, numbered)


def _start_meter(device: torch.device, arena_bytes: int) -> GpuMemoryMeter:
    if device.type == "cpu":
        return GpuMemoryMeter(device, read_bytes=lambda: arena_bytes)
    return GpuMemoryMeter(device).start()


def _check_same_run(before: Request, after: Request) -> None:
    """Raise ValueError unless plans for both requests compute the same numbers from the same batches."""
    if (before.numerics, before.max_seq_len, before.max_global_batch_tokens) != (
        after.numerics, after.max_seq_len, after.max_global_batch_tokens,
    ):  # fmt: skip
        raise ValueError("adopt() takes a plan of the same numerics, max_seq_len and max_global_batch_tokens")
