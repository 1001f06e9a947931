"""One layer's work on one chunk, as a straight line of op calls whose operands have fixed places, and what it costs.

A layer has one stage, or, where it ends with ops in parts, several: the ops before them, then these ops once for every
part. All chunks of a round pass through a stage before the next begins, so that weights cross the link part by part.
What a stage leaves to a later one of the same chunk lies in the area `carry`; which rows belong to which expert lies in
`bounds`, which later stages only read. Backward begins with a stage that recomputes what the parts read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from flexengine.ops.base import Op, TensorSpec, Work

ALIGNMENT = 256
"""Every tensor starts at a multiple of this many bytes, so that kernels see the same alignment in any plan."""

Area = Literal["input", "output", "save_gpu", "save_host", "scratch", "carry", "bounds", "grad"]
Half = Literal["forward", "input", "weight", "window"]


class Place(NamedTuple):
    """Where a tensor of the layer lies: `offset` bytes from the start of an area. `spec` has its shape."""

    area: Area
    offset: int
    spec: TensorSpec


@dataclass(frozen=True, eq=False)
class OpStep:
    """One op call: tensors and gradients by name with their places; `accumulate` as in OpEnv."""

    op: Op
    half: Half
    tensors: tuple[tuple[str, Place], ...]
    grads: tuple[tuple[str, Place], ...] = ()
    accumulate: frozenset[str] = frozenset()
    recompute: bool = False

    def work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of the call; for an op in parts, of its calls for all parts together."""
        cost = {
            "forward": self.op.forward_work,
            "input": self.op.backward_input_work,
            "weight": self.op.backward_weight_work,
            "window": self.op.fill_window_work,
        }[self.half]
        work = cost(tokens, seq_len, compute_bytes)
        if self.half == "input":
            again = (
                place.spec.num_bytes(tokens, compute_bytes) for name, place in self.tensors if name in self.op.remakable
            )
            work = work._replace(memory_bytes=work.memory_bytes + sum(again))
        return work if self.op.num_parts == 1 else work._replace(kernels=work.kernels * self.op.num_parts)

    @property
    def issue_calls(self) -> int:
        """What the host does to issue the call: one for it, and one per tensor or per launch."""
        kernels = self.work(1, 1, 2).kernels
        return 1 + kernels if self.op.few_operands else max(1 + len(self.tensors) + len(self.grads), kernels)


@dataclass(frozen=True, eq=False)
class Stage:
    """Steps that follow each other with the same weights; the stage runs once for each of `parts` of the group."""

    steps: tuple[OpStep, ...]
    parts: tuple[int, ...] = (0,)

    @cached_property
    def areas(self) -> frozenset[Area]:
        """The areas that the steps' operands lie in."""
        places = (place for step in self.steps for _, place in (*step.tensors, *step.grads))
        return frozenset(place.area for place in places)

    @cached_property
    def issue_calls(self) -> int:
        """What the host does to issue the steps, in bindings of a view or launches."""
        return sum(step.issue_calls for step in self.steps)

    @property
    def recomputes(self) -> bool:
        """Whether all steps recompute what later stages read."""
        return all(step.recompute for step in self.steps)

    def work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of one of the stage's runs, with one part."""
        return _total(self.steps, tokens, seq_len, compute_bytes).shared(len(self.parts))

    def recompute_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of what one of the stage's runs recomputes."""
        again = tuple(step for step in self.steps if step.recompute)
        return _total(again, tokens, seq_len, compute_bytes).shared(len(self.parts))

    def accumulation_work(self, compute_bytes: int) -> Work:
        """Extra cost of one of the stage's runs for chunks after a round's first, which add to accumulators."""
        work = Work()
        for step in self.steps:
            if step.half == "weight":
                work = work.plus(step.op.accumulation_work(compute_bytes))
        return work.shared(len(self.parts))


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """Forward, backward and (for sliced sequences) window steps of a layer under one save set.

    Bytes are for a full chunk. `saved_gpu` and `saved_host` list the kept tensors with their places. A layer without
    parts has one stage each way. is_block: whether a layer comes before it and one after it.
    """

    forward_stages: tuple[Stage, ...]
    backward_stages: tuple[Stage, ...]
    window_stages: tuple[Stage, ...]
    forward_scratch_bytes: int
    backward_scratch_bytes: int
    window_scratch_bytes: int
    carry_bytes: int
    bounds_bytes: int
    save_gpu_bytes: int
    save_host_bytes: int
    saved_gpu: tuple[Place, ...]
    saved_host: tuple[Place, ...]
    workspace_bytes: int
    window_workspace_bytes: int
    plain_workspace_bytes: int
    plain_window_workspace_bytes: int
    is_block: bool

    def stages(self, kind: str) -> tuple[Stage, ...]:
        """The stages that a kind of command runs: forward, forward_again, evaluate, recompute, backward or
        fill_window."""
        if kind == "fill_window":
            return self.window_stages
        return self.backward_stages if kind in ("recompute", "backward") else self.forward_stages

    @cached_property
    def forward(self) -> tuple[OpStep, ...]:
        """The steps of all forward stages."""
        return tuple(step for stage in self.forward_stages for step in stage.steps)

    @cached_property
    def backward(self) -> tuple[OpStep, ...]:
        """The steps of all backward stages."""
        return tuple(step for stage in self.backward_stages for step in stage.steps)

    @cached_property
    def window(self) -> tuple[OpStep, ...]:
        """The steps of all stages that fill the window."""
        return tuple(step for stage in self.window_stages for step in stage.steps)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of forward."""
        return _total(self.forward, tokens, seq_len, compute_bytes)

    def backward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of backward, recompute included."""
        return _total(self.backward, tokens, seq_len, compute_bytes)

    def accumulation_work(self, compute_bytes: int) -> Work:
        """Extra cost of backward for chunks after a round's first, which add to accumulators."""
        work = Work()
        for stage in self.backward_stages:
            for _ in stage.parts:
                work = work.plus(stage.accumulation_work(compute_bytes))
        return work

    def recompute_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of what backward recomputes."""
        return _total(tuple(s for s in self.backward if s.recompute), tokens, seq_len, compute_bytes)

    def window_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of filling the window from one chunk."""
        return _total(self.window, tokens, seq_len, compute_bytes)


@lru_cache(maxsize=1 << 14)
def _total(steps: tuple[OpStep, ...], tokens: int, seq_len: int, compute_bytes: int) -> Work:
    total = Work()
    for step in steps:
        total = total.plus(step.work(tokens, seq_len, compute_bytes))
    return total


def align(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
