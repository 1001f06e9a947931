"""Calls of an engine that save and load a training state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flexengine.checkpoint.provenance import made_by
from flexengine.checkpoint.reader import CheckpointReader
from flexengine.checkpoint.state_files import STATE_FILE, STATE_INDEX_FILE, read_description
from flexengine.checkpoint.state_writer import StateSave
from flexengine.optim.loss_scale import LossScale
from flexengine.runtime.engine_parts import EngineParts
from flexengine.runtime.one_caller import one_caller
from flexengine.runtime.ranks.dealt_states import gather_states
from flexengine.runtime.ranks.saved_errors import are_taken, describe_errors, error_requests, gather_errors
from flexengine.runtime.step_state import nobody_reads
from flexengine.runtime.weights.training_state import (
    check_same_tensors,
    check_same_training,
    dealt_tensors,
    describe_adapters,
    describe_state,
    load_tensors,
    state_tensors,
    training_of,
)

CLOSED = "it was closed"
HALF_LOADED = "a checkpoint was loaded half-way"


class CheckpointCalls(EngineParts):
    """The part of an engine that saves and loads its training state."""

    _save: StateSave | None = None

    @one_caller
    def save_checkpoint(self, folder: str | Path, run_state: Mapping[str, Any] | None = None) -> None:
        """Write weights, exact masters and optimizer states, from which `load_checkpoint` goes on bit by bit.

        The folder appears when all of it is on the disk; an error leaves what was there before. run_state: what the
        caller wants back from `load_checkpoint`, as JSON values. Of several ranks, all call it and rank 0 writes.
        Raises ValueError between fwd_bwd and step, after an interrupted step, and where the disk is too small; OSError.
        """
        save = self._start_save(folder, run_state, None)
        with self.context.together():
            if save is not None:
                save.wait()

    @one_caller
    def start_checkpoint(
        self,
        folder: str | Path,
        run_state: Mapping[str, Any] | None = None,
        after: Callable[[], None] | None = None,
    ) -> StateSave | None:
        """Start what `save_checkpoint` does, and return while it is written; None where another rank writes it.

        The next update waits for what is still read of weights and states, less what fits in the host memory that the
        plan left free of its budget. after: called on another thread when the folder is whole. Errors of the disk are
        raised by `wait()` of what is returned.
        """
        return self._start_save(folder, run_state, after)

    @one_caller
    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Take weights, masters and optimizer states from a checkpoint; returns its run_state.

        The plan, budgets and machine may be others than those that saved it; with the same chunk and round sizes every
        later loss is bit-identical to what it would have been. Gradients are dropped.
        Raises ValueError for one of another model, optimizer, dtype, seed or choice of what is trained, before anything
        changes; CheckpointError for one that is damaged, after which the engine is unusable until another is loaded.
        """
        if self.state.unusable == CLOSED:
            self.state.require_usable()
        with self.context.together():
            found = read_description(folder)
            check_same_training(found["engine"], folder, self._training())
            self._finish_save()
            self.executor.synchronize()
        self.context.end_nodes()
        with CheckpointReader.open(folder, STATE_INDEX_FILE) as reader:
            taken = are_taken(found["engine"], self.plan.request)
            with self.context.together():
                self._check_tensors(reader)
                errors = error_requests(self.weights.layout, self.context, reader) if taken else []
            self.state.unusable = HALF_LOADED
            with self.context.together(), self.executor.on_compute_stream():
                load_tensors(self.weights, reader, errors)
        if self.context.errors is not None:
            saved = found["engine"]["exchange"] if taken else {"weight": 0.0, "usual": 0.0}
            self.context.errors.begin(saved["weight"], saved["usual"])
        self.executor.synchronize()
        if self.plan.request.nodes > 1:
            self.context.agree(self.weights.sampled_digest(), "checkpoint")
        self.planes.fetch()
        self.state.start_accumulation()
        if self.state.loss_scale is not None:
            self.state.loss_scale = LossScale(**found["engine"]["loss_scale"])
        self.state.step_count, self.state.unusable = found["engine"]["step_count"], ""
        return found["run"]

    def _check_tensors(self, reader: CheckpointReader) -> None:
        try:
            check_same_tensors(self.weights, reader)
        except ValueError:
            with reader.verifying():  # damage is told as damage: an older checkpoint may be whole
                pass
            raise

    def _start_save(
        self, folder: str | Path, run_state: Mapping[str, Any] | None, after: Callable[[], None] | None
    ) -> StateSave | None:
        self.state.require_usable()
        if self.state.has_gradients:
            raise ValueError("a checkpoint between fwd_bwd and step would lose the gradients; call step() first")
        self._finish_save()
        self.executor.synchronize()
        self.context.end_nodes()
        gathered = gather_states(self.weights, self.context, dealt_tensors(self.weights), Path(folder))
        errors = gather_errors(self.weights.layout, self.context, Path(folder))
        with self.context.while_nobody_writes():
            if self.context.writes_files:
                text = self._describe(run_state)
                made = made_by("checkpoint", self.weights.layout.plan.to_json(), self.state.step_count, self.made_from)
                tensors = [*state_tensors(self.weights, gathered), *errors]
                self._save = StateSave(folder, tensors, {STATE_FILE: text}, after, made)
        self.state.before_update = self._release_save
        return self._save

    def _release_save(self) -> None:
        """Before an update: wait for what a save still reads, less what fits in free memory; other ranks wait, too."""
        if self._save is not None:
            self._save.release(max(0, self.plan.request.max_host_bytes - self.plan.predicted.host_bytes))
        self.context.barrier()
        self.state.before_update = nobody_reads

    def _finish_save(self) -> None:
        """Block until no save reads the stored planes any more, however it ends."""
        if self._save is not None:
            self._save.release(0)
            self._save = None

    def _describe(self, run_state: Mapping[str, Any] | None = None) -> str:
        kept = describe_errors(self.context.errors, self.plan.request)
        return describe_state(self.plan, {**self._training(), **kept}, self.state, run_state)

    def _training(self) -> dict[str, Any]:
        """What a checkpoint of this engine must have been saved with."""
        training = training_of(self.optimizer, self.plan.request.numerics, self.seed)
        return {**training, **describe_adapters(self.source.spec)}
