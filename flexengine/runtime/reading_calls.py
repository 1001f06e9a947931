"""The calls of an engine that look in: what it knows of its steps, its memory, weights and gradients, and exports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from flexengine.checkpoint.provenance import made_by
from flexengine.hardware.memory_usage import MemoryPeaks, memory_peaks
from flexengine.runtime.engine_parts import EngineParts
from flexengine.runtime.one_caller import one_caller
from flexengine.runtime.weights.adapters import magnitudes
from flexengine.runtime.weights.export import export_adapter, export_checkpoint
from flexengine.schedule.command_totals import CommandClass, CommandTotal
from flexengine.schedule.timeline import PROCESS, Event, TimedRun, run_events


class ReadingCalls(EngineParts):
    """The part of an engine that reads what it holds; nothing that is trained changes."""

    _description: str

    @property
    def max_grad_norm(self) -> float | None:
        """Global norm that gradients are clipped to; None = no clipping."""
        return self.settings.max_grad_norm

    @property
    def matmul_flops_per_s(self) -> float:
        """Measured rate of large matrix products, 0 where none was measured."""
        return self.settings.matmul_flops_per_s

    @property
    def step_count(self) -> int:
        """Optimizer steps taken, skipped ones left out where gradients are clipped."""
        return self.state.step_count

    @property
    def has_gradients(self) -> bool:
        """Whether fwd_bwd calls since the last step have left gradients; an interrupted call leaves none."""
        return self.state.has_gradients and not self.state.under_way

    def measure_next_step(self, keep_runs: bool = False) -> None:
        """Time every command of the next step; afterwards `command_totals` has their seconds by class.

        keep_runs: also keep when each command of each program ran, for `take_timed_runs`. After a fwd_bwd of the step,
        only what comes is measured.

        A measured step is slower: programs are bound again with time stamps, and the host waits for the end of each.
        Its results are the same. What is evaluated in between is not counted.
        """
        self.measurement.request(keep_runs, under_way=self.has_gradients)

    @property
    def command_totals(self) -> dict[CommandClass, CommandTotal]:
        """Seconds of the last measured step's commands, by class."""
        return self.measurement.totals

    def take_timed_runs(self) -> list[TimedRun]:
        """The programs of the last step measured with keep_runs, in order; the engine then forgets them.

        Their times are seconds since the measured part of the step began. Empty when there are none.
        """
        return self.measurement.take_runs()

    def take_timed_runs_of_ranks(self) -> tuple[list[TimedRun], list[list[Event]]]:
        """As `take_timed_runs`, with what the ranks after the first one ran, as events of a trace; all ranks call it.

        Times are seconds since the first of them began the measured part.
        """
        began_s, context = self.measurement.began_at_s, self.context
        later_s = began_s - min(context.gather(began_s))
        runs = [run._replace(start_s=run.start_s + later_s) for run in self.take_timed_runs()]
        rank = context.rank
        return runs, context.gather([*run_events(f"rank {rank}", runs, PROCESS + rank)] if rank else [])[1:]

    def describe(self) -> str:
        """The plan in words."""
        return self._description

    def memory_peaks(self) -> MemoryPeaks:
        """Most GPU and host memory the process has had in use, bytes; on the CPU the GPU figure is the device arena."""
        return memory_peaks(self.meter)

    @one_caller
    def state_dict(self) -> dict[str, Tensor]:
        """Master weights by Hugging Face name, on the CPU, exact in float32 (float64 for float64 compute).

        A frozen parameter has no master: its value here is the one that is computed with, rounded from a wider
        checkpoint. Raises ValueError after an interrupted step.
        """
        self.state.require_usable()
        self._show_masters("state_dict()")
        with self.context.while_nobody_writes():
            return {name: self.weights.read(name) for name in self.weights.runs} | magnitudes(self.weights)

    @one_caller
    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the mean loss over all target tokens since the last step, by Hugging Face name, on the CPU.

        Frozen parameters have none. Where nodes exchange them in FP8, they are what the step rounds, as stored.
        Raises ValueError when there are no gradients.
        """
        self.state.require_gradients("there are no gradients: call fwd_bwd(batch) first")
        self.executor.synchronize()
        self.planes.write_back("grad")
        scale = 1.0 / (self.state.loss_weight * self.state.grad_factor)
        return self.context.gradients(self.weights, self.state.num_rounds, scale)

    @one_caller
    def save_pretrained(
        self, folder: str | Path, beside: Mapping[str, str] | None = None, merged: bool | None = None
    ) -> None:
        """Write a Hugging Face folder that transformers loads unchanged, or of a model with adapters these alone.

        It has the source's tensor names, dtypes and shards, its config and tokenizer; frozen tensors bit for bit. A
        preset is saved in the compute dtype, a quantised checkpoint in 16 bits, in shards of the usual size. An error
        leaves the folder as it was. A manifest lists the files with their SHA-256, the plan, and `made_from`.
        beside: further texts that appear with the model, by file name. merged: for a model with adapters, whether to
        write the whole model with them added to its weights, computed in float32 and rounded once; None and False write
        the adapters, as PEFT does. Of several ranks, all call it and rank 0 writes.
        Raises ValueError after an interrupted step, NotFiniteError (a ValueError) for a trained weight with NaN or
        infinity.
        """
        self.state.require_usable()
        if merged is not None and self.model.lora is None:
            raise ValueError(f"merged={merged}, but {self.model.name} has no adapters; leave it out")
        self._show_masters("save_pretrained()")
        with self.context.while_nobody_writes():
            if not self.context.writes_files:
                return
            made = made_by("export", self.weights.layout.plan.to_json(), self.state.step_count, self.made_from)
            if self.model.lora is None or merged:
                export_checkpoint(folder, self.source, self.weights, self.buffers, beside or {}, made)
            else:
                export_adapter(folder, self.source, self.weights, self.seed, beside or {}, made)
