"""The engine: a model under a plan, trained with train_step, or fwd_bwd and step.

It owns the arenas and carries programs out. It knows nothing of architectures (a
ModelSpec is data) and nothing of how the plan came about.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.checkpoint.reader import CheckpointReader
from flexengine.hardware.memory_usage import GpuMemoryMeter, MemoryPeaks, memory_peaks
from flexengine.models.matmul_dtype import check_matmul_dtype
from flexengine.models.registry import ModelSource
from flexengine.ops.balance import ExpertBalance
from flexengine.ops.base import KernelName
from flexengine.optim.adamw import AdamW
from flexengine.plan import Plan
from flexengine.runtime.arena import Arenas
from flexengine.runtime.batch import BatchWriter, Sequences, read_batch
from flexengine.runtime.executor import CommandOrder, Executor
from flexengine.runtime.export import export_checkpoint
from flexengine.runtime.fetch_experts import fetch_experts
from flexengine.runtime.gradients import finish_gradient
from flexengine.runtime.layer_runner import LayerRunner
from flexengine.runtime.programs import Programs, RoundKind
from flexengine.runtime.update import UpdateRunner, UpdateSettings
from flexengine.runtime.weight_store import WeightStore, load_buffers
from flexengine.schedule.command_totals import CommandClass, CommandTotal, add_totals
from flexengine.schedule.commands import Command, FinishGradient, Program
from flexengine.schedule.following import cpu_commands
from flexengine.schedule.layout import PARTIAL_SQUARES, Layout
from flexengine.schedule.packing import PackedChunk, pack, round_shape
from flexengine.schedule.relocation import relocation
from flexengine.schedule.timeline import TimedRun

LAYER_KINDS = ("forward", "evaluate", "recompute", "backward", "fill_window")
HALF_UPDATED = "an optimizer step was interrupted, so its weights are half updated"


class FwdBwdOutput(NamedTuple):
    """Of one fwd_bwd call: the mean loss over its target tokens, its sizes, its FLOPs without and with recompute."""

    loss: float
    num_tokens: int
    num_target_tokens: int
    model_flops: float
    hardware_flops: float


class StepOutput(NamedTuple):
    """Of one optimizer step: the global gradient norm before clipping, whether any update was skipped because it was
    not finite, and the seconds since the first fwd_bwd of the step began. What the CPU updates may go on after it."""

    grad_norm: float
    skipped: bool
    seconds: float


class EvaluateOutput(NamedTuple):
    """Of one evaluate call: the mean loss over its target tokens, and its sizes."""

    loss: float
    num_tokens: int
    num_target_tokens: int


class Engine:
    """Trains one model under one plan. Made by `flexengine.from_pretrained`.

    fwd_bwd adds the gradients of a batch, several calls accumulate; step updates the weights with the gradients of the
    mean loss over all target tokens since the last step. train_step is both.
    """

    def __init__(
        self,
        source: ModelSource,
        plan: Plan,
        device: torch.device,
        optimizer: AdamW,
        max_grad_norm: float | None = 1.0,
        seed: int = 0,
        deterministic: bool = False,
        attention: KernelName = "flash",
        matmul_flops_per_s: float = 0.0,
        description: str = "",
        order: CommandOrder | None = None,
    ) -> None:
        check_matmul_dtype(source.spec, plan.request.numerics.matmul)
        self.source, self.model, self.plan, self.device = source, source.spec, plan, device
        self.optimizer, self.max_grad_norm, self.seed, self.deterministic = (
            optimizer,
            max_grad_norm,
            seed,
            deterministic,
        )
        self.attention: KernelName = attention
        self.matmul_flops_per_s, self._description = matmul_flops_per_s, description
        layout = Layout(self.model, plan)
        self.meter = self._start_meter(layout.gpu_bytes)
        self.arenas = Arenas(device, layout.gpu_bytes, layout.host_bytes)
        self.executor = Executor(device, self.arenas, order)
        self._last_program: Program | None = None
        self._unusable = ""
        self._measuring = self._keeping_runs = False
        self.command_totals: dict[CommandClass, CommandTotal] = {}
        self._timed_runs: list[TimedRun] = []
        self.step_count = 0
        self.buffers = {
            name: torch.zeros(source.shape, dtype=self._wide(layout), device=device)
            for name, source in self.model.buffers.items()
        }
        self._use(layout)
        self._start_accumulation()
        self._load()

    # -- setting up --------------------------------------------------------------------------------------------------

    def _start_meter(self, arena_bytes: int) -> GpuMemoryMeter:
        if self.device.type == "cpu":
            return GpuMemoryMeter(self.device, read_bytes=lambda: arena_bytes)
        return GpuMemoryMeter(self.device).start()

    def _use(self, layout: Layout) -> None:
        """Lay everything that runs over the arenas by `layout`."""
        self.layout = layout
        self.programs = Programs(layout, self.executor)
        self.weights = WeightStore(layout, self.arenas)
        self.layers = LayerRunner(layout, self.arenas, self.buffers)
        self.updates = UpdateRunner(layout, self.arenas)
        self.batches = BatchWriter(layout, self.arenas, self._constants(), self.attention)

    @staticmethod
    def _wide(layout: Layout) -> torch.dtype:
        return torch.float64 if layout.acc_bytes == 8 else torch.float32

    def _constants(self) -> dict[str, Tensor]:
        wide = self._wide(self.layout)
        longest = self.plan.request.max_seq_len
        return {
            **{
                table.name: torch.tensor(table.values_for(longest), dtype=wide, device=self.device)
                for table in self.model.tables
            },
            "attention_rng": torch.zeros(2, dtype=torch.int64, device=self.device),
        }

    def _load(self) -> None:
        if self.source.weights_folder is None:
            self.weights.initialize(self.seed)
        else:
            with CheckpointReader.open(self.source.weights_folder) as reader:
                self.weights.load(reader)
                load_buffers(reader, self.buffers)
        self.executor.synchronize()

    def _start_accumulation(self) -> None:
        self._num_target_tokens = 0
        self._has_gradients = False
        self._step_started = 0.0

    # -- a step ------------------------------------------------------------------------------------------------------

    def fwd_bwd(
        self, batch: object = None, *, input_ids: object = None, labels: object = None, attention_mask: object = None
    ) -> FwdBwdOutput:
        """Forward and backward of a batch; its gradients are added to those since the last step.

        batch: ragged token lists, where every token is a target of the one before it; or input_ids and labels (lists or
        [B, S] tensors; labels unshifted, -100 = no loss) with an optional right-padding attention_mask.
        Raises ValueError for tokens outside the vocabulary, sequences over max_seq_len, more tokens than
        max_global_batch_tokens, or no target token.
        """
        sequences = self._read(batch, input_ids, labels, attention_mask)
        self._start_step()
        return self._forward_backward(sequences)

    def step(self, lr: float | None = None) -> StepOutput:
        """AdamW with the gradients of the mean loss over all target tokens since the last step, clipped by global norm.

        lr overrides the optimizer's for this step. A gradient norm that is not finite skips the update and leaves
        every weight and state as it was; without clipping, only those of the layers whose own gradient is not finite,
        and the step counts (for AdamW's bias correction).
        Raises ValueError when there are no gradients or lr is negative.
        """
        self._require_open()
        if not self._has_gradients:
            raise ValueError("step() without gradients: call fwd_bwd(batch) first")
        return self._update(self._settings(lr, self._num_target_tokens))

    def train_step(
        self,
        batch: object = None,
        *,
        input_ids: object = None,
        labels: object = None,
        attention_mask: object = None,
        lr: float | None = None,
    ) -> tuple[FwdBwdOutput, StepOutput]:
        """fwd_bwd and step in one call, with the same results; arguments and errors are theirs.

        Without clipping it is faster where the CPU updates: it does so inside the backward pass of the last round, as
        soon as a layer's gradient has reached the host.
        """
        sequences = self._read(batch, input_ids, labels, attention_mask)
        settings = self._settings(lr, self._num_target_tokens + sequences.num_target_tokens)
        self._start_step()
        if settings.max_grad_norm is not None or not self.plan.updates_on_cpu:
            return self._forward_backward(sequences), self._update(settings)
        out = self._forward_backward(sequences, settings)
        return out, self._update(settings, cpu_has_updated=True)

    def _start_step(self) -> None:
        """Begin a step's clocks, unless an earlier call did."""
        if not self._has_gradients:
            self._step_started = time.perf_counter()
            if self._measuring:
                self._timed_runs = []
                self.executor.start_clock()

    def _settings(self, lr: float | None, num_target_tokens: int) -> UpdateSettings:
        """What the next step's update depends on. Raises ValueError when lr is negative."""
        lr = self.optimizer.lr if lr is None else lr
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"lr must be a finite number >= 0, got {lr}")
        return UpdateSettings(self.optimizer, lr, self.max_grad_norm, num_target_tokens, self.step_count + 1, self.seed)

    def _forward_backward(self, sequences: Sequences, updates: UpdateSettings | None = None) -> FwdBwdOutput:
        """updates: of the CPU's updates inside the last round; None = no update comes before the next one."""
        with self._interruptible(train=True):
            balance = self._balance_of(sequences)
            loss_sum = self._run_rounds(sequences, train=True, updates=updates, balance=balance)
            if balance is not None:
                loss_sum += balance.loss()
            self._num_target_tokens += sequences.num_target_tokens
            loss = float(loss_sum) / sequences.num_target_tokens  # waits for the rounds
        model_flops = self.model.model_flops(sequences.lengths)
        extra = self._recompute_flops(sequences)
        return FwdBwdOutput(loss, sequences.num_tokens, sequences.num_target_tokens, model_flops, model_flops + extra)

    def _update(self, settings: UpdateSettings, cpu_has_updated: bool = False) -> StepOutput:
        program = self.programs.of_update(cpu_has_updated)
        self._unusable = HALF_UPDATED
        with self._interruptible(train=True):
            self._run(program, timed=self._measuring, settings=settings)
            grad_norm = self._grad_norm(program)
        self._unusable = ""
        self._measuring = False
        skipped = not math.isfinite(grad_norm)
        self.step_count += 0 if skipped and settings.max_grad_norm is not None else 1
        seconds = time.perf_counter() - self._step_started
        self._start_accumulation()
        return StepOutput(grad_norm, skipped, seconds)

    def _grad_norm(self, program: Program) -> float:
        """Of the update that was issued last. What the CPU updates goes on; what the GPU updates has ended, but where
        the host is told the norm before."""
        by_cpu = cpu_commands(program)
        if by_cpu:
            for index in by_cpu[0].waits:
                self.executor.wait_for(program, index)
            return float(self.updates.host_grad_norm())
        self.executor.synchronize_device()
        return float(self.updates.grad_norm())

    def evaluate(
        self, batch: object = None, *, input_ids: object = None, labels: object = None, attention_mask: object = None
    ) -> EvaluateOutput:
        """Mean loss of a batch, forward only, in the same buffers; gradients and weights stay as they are."""
        sequences = self._read(batch, input_ids, labels, attention_mask)
        with self._interruptible(train=False):
            loss = float(self._run_rounds(sequences, train=False)) / sequences.num_target_tokens
        return EvaluateOutput(loss, sequences.num_tokens, sequences.num_target_tokens)

    def next_token_logits(self, tokens: list[int]) -> Tensor:
        """Logits [V] of the token after `tokens`, float32 on the CPU; runs the whole prefix, for samples only."""
        self._require_open()
        sequences = read_batch([tokens], None, None, self.model.vocab_size, self.plan.request.max_seq_len)
        with self._interruptible(train=False):
            self._run_rounds(sequences, train=False)
            assert self._last_program is not None
            call = next(c.args for c in reversed(self._last_program.commands) if c.kind == "evaluate")
            head = call.program.forward[-1]
            chunk = self.layers.chunks[call.chunk]
            hidden = self.layers.bind(call, head.tensors, chunk.tokens)[head.op.inputs[0]]
            weight = self.layers.params_of(call)[head.op.params[0]]
            return head.op.logits(hidden[-1:], weight)[0].float().cpu()

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _read(self, batch: object, input_ids: object, labels: object, attention_mask: object) -> Sequences:
        self._require_open()
        if (batch is None) == (input_ids is None):
            raise ValueError("give a batch of token lists, or input_ids=..., and not both")
        if batch is not None and labels is not None:
            raise ValueError("labels go with input_ids=...; a plain batch makes every token a target")
        request = self.plan.request
        sequences = read_batch(
            batch if input_ids is None else input_ids,
            labels,
            attention_mask,
            self.model.vocab_size,
            request.max_seq_len,
        )
        if sequences.num_tokens > request.max_global_batch_tokens:
            raise ValueError(
                f"the batch has {sequences.num_tokens} tokens, more than max_global_batch_tokens="
                f"{request.max_global_batch_tokens}; give it in several fwd_bwd calls before step()"
            )
        if sequences.num_target_tokens == 0:
            raise ValueError(
                f"the batch has no target token in {sequences.num_tokens} tokens: every label is -100, or every"
                " sequence has a single token; give a sequence of two tokens or more with a label other than -100"
            )
        return sequences

    def _require_open(self) -> None:
        if self._unusable:
            raise ValueError(f"this engine cannot go on: {self._unusable}; make a new one with from_pretrained")

    def _balance_of(self, batch: Sequences) -> ExpertBalance | None:
        """What routers report to, where the model balances its experts."""
        if self.model.balancing is None:
            return None
        return ExpertBalance.of_batch(self.model.balancing, batch.num_tokens, batch.num_target_tokens, self.device)

    @contextmanager
    def _interruptible(self, train: bool) -> Iterator[None]:
        """On the stream that computes. What an error or an interrupt leaves: nothing that still runs and, of training,
        no gradients since the last step, those of whole calls before included: some layers would hold this batch and
        others not."""
        try:
            with self.executor.on_compute_stream():
                yield
        except BaseException:
            if train:
                self._start_accumulation()
            self.executor.synchronize()
            raise

    def _run_rounds(
        self,
        batch: Sequences,
        train: bool,
        updates: UpdateSettings | None = None,
        balance: ExpertBalance | None = None,
    ) -> Tensor:
        """Issue all rounds of a batch; returns the summed loss [] in float64 on the device. updates: of the CPU's in
        the last round."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        rounds = pack(batch.lengths, self.plan.chunk_tokens, self.plan.chunks_per_round)
        with self._numerics_mode():
            if balance is not None and len(rounds) > 1:
                self._collect(batch, rounds, balance)
            for number, chunks in enumerate(rounds, start=1):
                updating = updates is not None and number == len(rounds)
                program = self._program(chunks, train, updating)
                self._write(batch, chunks, balance)
                if updating:
                    self._unusable = HALF_UPDATED
                self._run(program, timed=self._measuring and train, settings=updates if updating else None)
                self._has_gradients = self._has_gradients or train
                for chunk in self.layers.chunks:
                    total += chunk.losses.double().sum()
        return total

    def _collect(self, batch: Sequences, rounds: list[list[PackedChunk]], balance: ExpertBalance) -> None:
        """Forward of all rounds, as what experts were given in all of them must be known before any backward."""
        for chunks in rounds:
            program = self._program(chunks, train=False, updates=False)
            self._write(batch, chunks, balance)
            self._run(program, timed=False)
        balance.collecting = False

    def _write(self, batch: Sequences, chunks: list[PackedChunk], balance: ExpertBalance | None) -> None:
        """Put a round's tokens where its program reads them."""
        if self._last_program is not None:
            self.executor.wait_for(self._last_program, 0)  # the batch before has left the host slot
        self.layers.chunks = self.batches.write(batch, chunks)
        for chunk in self.layers.chunks:
            chunk.balance = balance

    def _program(self, chunks: list[PackedChunk], train: bool, updates: bool) -> Program:
        shape = round_shape(chunks, self.plan.chunk_tokens)
        kind = RoundKind(train, first=train and not self._has_gradients, updates=updates)
        return self.programs.of_round(shape, kind)

    def _run(self, program: Program, timed: bool, settings: UpdateSettings | None = None) -> None:
        """settings: of its updates; None where it has none."""
        self._last_program = program
        self.executor.run(program, partial(self._handle, program, settings), timed)
        if timed:
            times_s = self.executor.timings()
            add_totals(self.command_totals, program, times_s, self.model)
            if self._keeping_runs:
                self._timed_runs.append(TimedRun(program, self.executor.began_s(), times_s))

    def _handle(self, program: Program, settings: UpdateSettings | None, command: Command) -> None:
        if command.kind in LAYER_KINDS:
            self.layers.run(command.kind, command.args)
        elif command.kind == "finish_gradient":
            self._finish_gradient(command.args)
        elif command.kind == "fetch_experts":
            fetch_experts(command.args, program.slots, self.arenas)
        else:
            self._handle_update(program, settings, command)

    def _handle_update(self, program: Program, settings: UpdateSettings | None, command: Command) -> None:
        assert settings is not None, f"{command.label} has no settings"
        if command.kind == "clip":
            self.updates.clip(settings)
        elif command.kind == "scale":
            self.updates.scale_group(command.args.group, settings)
        elif command.kind == "update":
            self.updates.update(command, program.slots, settings)
        else:
            raise AssertionError(f"no handler for a command of kind {command.kind!r}")

    def _finish_gradient(self, args: FinishGradient) -> None:
        slots, stored_dtype = self.layout.slots, getattr(torch, self.plan.request.numerics.grad)
        partials = self.arenas.view(slots[self.layout.slot("partial_squares")], 0, (PARTIAL_SQUARES,), torch.float32)
        wide, squares = self.layers.wide, self.updates.norm_squares()
        for run in args.runs:
            start, stored_start = run.start * wide.itemsize, run.stored_start * stored_dtype.itemsize
            finish_gradient(
                self.arenas.view(slots[args.accumulator], start, (run.numel,), wide),
                self.arenas.view(slots[run.slot], stored_start, (run.numel,), stored_dtype),
                args.has_previous,
                partials,
                squares[run.number],
            )

    @contextmanager
    def _numerics_mode(self) -> Iterator[None]:
        """With `deterministic`, only kernels that torch knows to be deterministic, for the time of a call."""
        if not self.deterministic:
            yield
            return
        before = torch.are_deterministic_algorithms_enabled()
        fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]

    # -- measuring and changing the plan -----------------------------------------------------------------------------

    def measure_next_step(self, keep_runs: bool = False) -> None:
        """Time every command of the next step; afterwards `command_totals` has their seconds by class.

        keep_runs: also keep when each command of each program ran, for `take_timed_runs`. After a fwd_bwd of the step,
        only what comes is measured.

        A measured step is slower: programs are bound anew with time stamps, and the host waits for the end of each. Its
        results are the same. What is evaluated in between is not counted.
        """
        self._measuring, self._keeping_runs, self.command_totals, self._timed_runs = True, keep_runs, {}, []
        if self._has_gradients:
            self.executor.start_clock()

    def take_timed_runs(self) -> list[TimedRun]:
        """The programs of the last step measured with keep_runs, in order, in seconds since its measured part began;
        the engine then forgets them. Empty when there are none."""
        runs, self._timed_runs = self._timed_runs, []
        return runs

    def adopt(self, plan: Plan, description: str = "") -> None:
        """Go on under another plan of the same model and request; weights and optimizer states move to where it wants.

        Between steps only. Nothing is allocated: the plan must fit the arenas of the one before, and planes move
        within them. With the same chunk and round sizes every later loss is bit-identical to what it would have been.
        Raises ValueError when there are gradients, the request differs, or the plan does not fit; then nothing changed.
        """
        self._require_open()
        if self._has_gradients:
            raise ValueError("adopt() between fwd_bwd and step: the gradients would be lost; call step() first")
        before, after = self.plan.request, plan.request
        if (before.numerics, before.max_seq_len, before.max_global_batch_tokens) != (
            after.numerics, after.max_seq_len, after.max_global_batch_tokens,
        ):  # fmt: skip
            raise ValueError("adopt() takes a plan of the same numerics, max_seq_len and max_global_batch_tokens")
        layout = Layout(self.model, plan)
        moves = relocation(self.layout, layout, self.arenas.capacity)
        self.executor.synchronize()
        self._unusable = "a change of plan was interrupted, so its weights are half moved"
        self._forget_programs()
        with self.executor.on_compute_stream():
            self.arenas.relocate(moves)
            self._use(layout)
        self.plan, self._description = plan, description or self._description
        self._unusable = ""

    def _forget_programs(self) -> None:
        self.programs.forget()
        self._last_program = None
        self.layers.chunks = []

    # -- looking in --------------------------------------------------------------------------------------------------

    def _recompute_flops(self, batch: Sequences) -> float:
        mean = max(1, sum(n * n for n in batch.lengths) // batch.num_tokens)
        width = self.layout.compute_bytes
        return sum(
            program.recompute_work(batch.num_tokens, mean, width).flops
            for layer, program in zip(self.model.layers, self.layout.programs, strict=True)
            if layer.kind == "block"
        )

    def describe(self) -> str:
        """The plan in words."""
        return self._description

    def memory_peaks(self) -> MemoryPeaks:
        """Most GPU and host memory the process has had in use, bytes; on the CPU the GPU figure is the device arena."""
        return memory_peaks(self.meter)

    def state_dict(self) -> dict[str, Tensor]:
        """Master weights by Hugging Face name, on the CPU, exact in float32 (float64 for float64 compute). What is
        frozen has none: of it this is what is computed with, which a wider checkpoint is rounded to. Raises ValueError
        after an interrupted step."""
        self._require_open()
        self.executor.synchronize()
        return {name: self.weights.read(name) for name in self.weights.runs}

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the mean loss over all target tokens since the last step, by Hugging Face name, on the CPU; none
        of what is frozen.

        Raises ValueError when there are none.
        """
        self._require_open()
        if not self._has_gradients:
            raise ValueError("there are no gradients: call fwd_bwd(batch) first")
        self.executor.synchronize()
        scale = 1.0 / self._num_target_tokens
        trained = (name for name, run in self.weights.runs.items() if not run.frozen)
        return {name: self.weights.read_gradient(name, scale) for name in trained}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face folder that transformers loads unchanged: the source's tensor names, dtypes and shards,
        its config and tokenizer; what is frozen bit for bit. A preset is saved in the compute dtype, a quantised
        checkpoint in 16 bits, in shards of the usual size. An error leaves the folder as it was. Raises ValueError
        after an interrupted step."""
        self._require_open()
        self.executor.synchronize()
        export_checkpoint(folder, self.source, self.weights, self.buffers)

    def close(self) -> None:
        """Stop measuring and release both arenas; the engine is not usable afterwards."""
        try:
            self.executor.synchronize()
        finally:
            self._unusable = "it was closed"
            self.meter.stop()
            self._forget_programs()
            self.arenas.close()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
