"""Compiles a layer's ops and a save set to its program.

The ops' declarations and the save set decide everything: which outputs forward writes where, what backward recomputes
just before it is needed, where every temporary lies (by liveness), and what it all costs. So a step allocates nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Op, TensorSpec
from flexengine.ops.coded_rows import CodedRows
from flexengine.schedule.layer_program import Area, Half, LayerProgram, OpStep, Place, Stage, align
from flexengine.schedule.save_sets import (
    halves_of,
    in_pairs,
    keepable_ops,
    makers,
    read_by_parts,
    remade,
    savable_ops,
    without_unread,
)


@lru_cache(maxsize=4096)
def _compile(
    ops: tuple[Op, ...], x: TensorSpec | None, output: str | None, keep_gpu: tuple[str, ...],
    keep_host: tuple[str, ...], chunk_tokens: int, compute_bytes: int,
) -> LayerProgram:  # fmt: skip
    return _Compiler(ops, x, output, keep_gpu, keep_host, chunk_tokens, compute_bytes).build()


def compile_layer(
    layer: LayerSpec,
    keep_gpu: tuple[str, ...],
    keep_host: tuple[str, ...],
    chunk_tokens: int,
    compute_bytes: int,
) -> LayerProgram:
    """The layer's program when the outputs of the ops `keep_gpu` and `keep_host` are kept; cached by the layer's ops.

    Raises ValueError for an op the layer does not have.
    """
    unknown = (set(keep_gpu) | set(keep_host)) - set(keepable_ops(layer.ops))
    if unknown:
        raise ValueError(f"layer {layer.name} has no op {sorted(unknown)} to keep; its ops: {keepable_ops(layer.ops)}")
    return _compile(layer.ops, layer.input_spec, layer.output, keep_gpu, keep_host, chunk_tokens, compute_bytes)


def _renamed(ops: tuple[Op, ...]) -> dict[str, str]:
    """Names of tensors that ops in place write over, one perhaps over what another one wrote, with the last names."""
    renamed: dict[str, str] = {}
    for op in reversed(ops):
        if op.in_place:
            renamed[op.in_place[0]] = renamed.get(op.in_place[1], op.in_place[1])
    return renamed


class _Temporary:
    """A tensor without a fixed place: its spec, the first and last step that touch it, and in the end its place.

    It lies in scratch, or in the area `carry` where several stages touch it, or one stage that runs for several parts.
    """

    def __init__(self, spec: TensorSpec, step: int, stage: int, carried: bool = False) -> None:
        self.spec, self.first, self.last = spec, step, step
        self.stage, self.carried = stage, carried
        self.place = Place("scratch", -1, spec)

    def use(self, step: int, stage: int) -> None:
        """Keep it alive until this step of a stage, at least."""
        self.last = step
        self.carried |= stage != self.stage


_Places = dict[str, Place | _Temporary]


class _DraftStep(NamedTuple):
    op: Op
    half: Half
    tensors: _Places
    grads: _Places
    accumulate: frozenset[str]
    recompute: bool


class _Placed(NamedTuple):
    stages: tuple[Stage, ...]
    scratch_bytes: int
    carry_bytes: int
    bounds_bytes: int


class _Compiler:
    def __init__(
        self, ops: tuple[Op, ...], x: TensorSpec | None, output: str | None, keep_gpu: tuple[str, ...],
        keep_host: tuple[str, ...], chunk_tokens: int, compute_bytes: int,
    ) -> None:  # fmt: skip
        self.ops, self.input, self.output = ops, "" if x is None else x.name, output
        self.keep_gpu, self.keep_host = keep_gpu, keep_host
        self.tokens, self.compute_bytes = chunk_tokens, compute_bytes
        self.specs = {spec.name: spec for op in ops for spec in op.outputs}
        self.producer = {spec.name: op for op in ops for spec in op.outputs}
        self.renamed = _renamed(ops)
        savable = savable_ops(ops)
        lost = [o.name for op in ops if op.name in savable for o in op.outputs if o.name in self.renamed]
        assert not lost, f"{lost} would be kept for backward, but an op in place writes over them"
        if x is not None:
            self.specs[x.name] = x
        coded = [op for op in ops if isinstance(op, CodedRows)]
        self.grad_specs = {**self.specs, **{op.codes.name: op.rows for op in coded}}
        self.entering = {self.input, *(op.rows.name for op in coded if op.codes.name == self.input)}
        self.in_parts = tuple(op for op in ops if op.num_parts > 1)
        self.before = ops[: len(ops) - len(self.in_parts)]
        assert all(op.num_parts == 1 for op in self.before), "ops in parts end a layer"
        self.num_parts = max(op.num_parts for op in ops)
        self.bounds = {name for op in self.in_parts for name in op.part_inputs}

    def build(self) -> LayerProgram:
        sizes = (self.tokens, self.compute_bytes)
        saved_gpu, gpu_bytes = _lay_out(self.ops, "save_gpu", self.keep_gpu, *sizes)
        saved_host, host_bytes = _lay_out(self.ops, "save_host", self.keep_host, *sizes)
        self.saved = {p.spec.name: p for p in (*saved_gpu, *saved_host)}
        forward, backward, window = (
            self._place(draft()) for draft in (self._forward_steps, self._backward_steps, self._window_steps)
        )
        return LayerProgram(
            forward_stages=forward.stages, backward_stages=backward.stages, window_stages=window.stages,
            forward_scratch_bytes=forward.scratch_bytes, backward_scratch_bytes=backward.scratch_bytes,
            window_scratch_bytes=window.scratch_bytes, carry_bytes=max(forward.carry_bytes, backward.carry_bytes),
            bounds_bytes=max(forward.bounds_bytes, backward.bounds_bytes),
            save_gpu_bytes=gpu_bytes, save_host_bytes=host_bytes, saved_gpu=saved_gpu, saved_host=saved_host,
            workspace_bytes=max(op.workspace_bytes(*sizes) for op in self.ops),
            window_workspace_bytes=max(op.window_workspace_bytes(*sizes) for op in self.ops),
            plain_workspace_bytes=max(op.plain_workspace_bytes(*sizes) for op in self.ops),
            plain_window_workspace_bytes=max(op.plain_window_workspace_bytes(*sizes) for op in self.ops),
            is_block=bool(self.input) and self.output is not None,
        )  # fmt: skip

    def _home(self, name: str) -> Place | None:
        """The fixed place of a tensor outside scratch, if it has one."""
        name = self.renamed.get(name, name)
        if name == self.input:
            return Place("input", 0, self.specs[name])
        if name == self.output:
            return Place("output", 0, self.specs[name])
        return self.saved.get(name)

    def _begin(self) -> None:
        """Begin a list of steps: only what the layer was given and what it kept is at hand."""
        self.stage, self.ends = 0, list[tuple[int, tuple[int, ...]]]()
        self.live: _Places = {}
        self.available = {self.input, *self.saved}
        self.waiting: list[tuple[Op, _Places | None]] = []

    def _end_stage(self, steps: list[_DraftStep], parts: tuple[int, ...] = (0,)) -> None:
        """Make a stage of the steps since the last end, unless there are none."""
        if len(steps) > (self.ends[-1][0] if self.ends else 0):
            self.ends.append((len(steps), parts))
            self.stage += 1

    def _forward_steps(self) -> list[_DraftStep]:
        self._begin()
        steps: list[_DraftStep] = []
        for op in self._forward_ops():
            self._add_forward(op, steps, recompute=False)
        self._end_stage(steps)
        for op in in_pairs(self.in_parts):
            self._add_forward(op, steps, recompute=False)
        self._end_stage(steps, tuple(range(1, self.num_parts + 1)))
        return steps

    def _forward_ops(self) -> list[Op]:
        """Ops before those in parts that forward runs, two as one where they can be: all but those that backward alone
        needs and does not find kept."""
        kept = {*self.keep_gpu, *self.keep_host}
        ops = in_pairs(op for op in self.before if not op.for_backward or op.name in kept)
        return without_unread(ops, self.in_parts, [name for name in self.specs if self._home(name) is None])

    def _add_forward(self, op: Op, steps: list[_DraftStep], recompute: bool) -> None:
        names = [*op.inputs, *(o.name for o in op.outputs)]
        tensors = {name: self._locate(name, len(steps)) for name in names}
        tensors.update({s.name: _Temporary(s, len(steps), self.stage) for s in op.scratch("forward")})
        tensors.update({s.name: _Temporary(s, len(steps), self.stage, True) for s in op.part_sums("forward")})
        steps.append(_DraftStep(op, "forward", tensors, {}, frozenset(), recompute))

    def _locate(self, name: str, step: int) -> Place | _Temporary:
        """The tensor's place. Without a fixed one it is a temporary, which lives from its first use to its last."""
        home = self._home(name)
        if home is not None:
            return home
        key = self.renamed.get(name, name)
        place = self.live.get(key)
        if place is None:
            place = self.live[key] = _Temporary(self.specs[key], step, self.stage)
        if isinstance(place, _Temporary):
            place.use(step, self.stage)
        return place

    def _ensure(self, name: str, steps: list[_DraftStep]) -> None:
        """Append what recomputes a tensor, and first what it is computed from, unless it is at hand."""
        for op in in_pairs(makers(name, self.producer, self.available), again=True):
            self._add_forward(op, steps, recompute=True)

    def _backward_steps(self) -> list[_DraftStep]:
        self._begin()
        self.grads: _Places = {}
        if self.output is not None:
            self.grads[self.output] = Place("grad", 0, self.grad_specs[self.output])
        steps: list[_DraftStep] = []
        if self.in_parts and any(op.has_input_half or op.has_weight_half for op in self.in_parts):
            carried = self._recompute_for_parts(steps)
            self._end_stage(steps)
            self._add_backward(self.in_parts, steps)
            self._end_stage(steps, tuple(range(self.num_parts, 0, -1)))
            self._forget_all_but(carried)
        self._add_backward(self.before, steps)
        self._end_stage(steps)
        return steps

    def _recompute_for_parts(self, steps: list[_DraftStep]) -> set[str]:
        """Append what recomputes the tensors that ops in parts read.

        Returns the names that the next stage has at hand: all outputs of the ops that ran, as their places are.
        """
        read = read_by_parts(self.ops)
        for name in sorted(read):
            self._ensure(name, steps)
        makers = {self.producer[name] for name in read if name in self.producer}
        carried = {spec.name for op in makers for spec in op.outputs}
        self._forget_all_but(carried)
        return carried

    def _forget_all_but(self, carried: set[str]) -> None:
        """Forget what a stage recomputed: the next one has only what is carried."""
        self.live = {name: place for name, place in self.live.items() if name in carried}
        self.available = {self.input, *self.saved, *carried}

    def _add_backward(self, ops: tuple[Op, ...], steps: list[_DraftStep]) -> None:
        """Append both halves of every op, last to first, each after what recomputes the tensors that it needs. A weight
        half waits for an input half that writes again what it reads."""
        for halves in halves_of(ops):
            for op in halves.ops:
                for name in (*op.needs_input, *(name for name in op.needs_weight if not self._waits(name))):
                    self._ensure(name, steps)
            if halves.input is not None:
                self._add_input_half(halves.input, steps)
            left = steps[-1].tensors if halves.input is not None else None
            self.waiting += [(op, left) for op in halves.weight]
            self.waiting = [pair for pair in self.waiting if not self._add_weight_half(*pair, steps)]

    def _waits(self, name: str) -> bool:
        """Whether a tensor, or one that it is made of, will be written again by an input half."""
        missing = name not in self.available
        return missing and (name in remade(self.ops) or any(map(self._waits, self.producer[name].inputs)))

    def _grad_operands(self, names: tuple[str, ...], step: int) -> _Places:
        found = {name: self.grads[name] for name in names if name in self.grads}
        for place in found.values():
            if isinstance(place, _Temporary):
                place.use(step, self.stage)
        return found

    def _operands(self, names: tuple[str, ...], op: Op, half: Half, step: int, left: _Places | None = None) -> _Places:
        """Places of tensors and of the call's buffers; a buffer in `left` is used again where it lies."""
        tensors: _Places = {name: self._locate(name, step) for name in names}
        for spec in op.scratch(half):
            place = (left or {}).get(spec.name) or _Temporary(spec, step, self.stage)
            if isinstance(place, _Temporary):
                place.use(step, self.stage)
            tensors[spec.name] = place
        return tensors

    def _add_input_half(self, op: Op, steps: list[_DraftStep]) -> None:
        step, aliases = len(steps), dict(op.grad_alias)
        tensors = self._operands(op.needs_input, op, "input", step)
        tensors.update({s.name: _Temporary(s, step, self.stage, True) for s in op.part_sums("input")})
        accumulate = set()
        for name in op.grad_inputs:
            if name in aliases:
                assert name not in self.grads, f"{op.name}: the gradient of {name} already holds a value"
                place = self.grads[aliases[name]]
                self.grads[name] = place._replace(spec=self.grad_specs[name]) if isinstance(place, Place) else place
            elif name in self.grads:
                accumulate.add(name)
            else:
                self.grads[name] = self._new_grad(op, name, tensors, step)
        names = (*(o.name for o in op.outputs), *op.grad_inputs, *op.grad_reads)
        grads = self._grad_operands(names, step)
        again = {name: grads[name] for name in op.remakable if self.waiting and self._waits(name)}
        tensors.update(again)
        self.live.update(again)
        self.available.update(again)
        steps.append(_DraftStep(op, "input", tensors, grads, frozenset(accumulate), False))

    def _new_grad(self, op: Op, name: str, tensors: _Places, step: int) -> Place | _Temporary:
        """A place for a gradient's first value: in place over the output's, over a dying tensor, or fresh."""
        if op.in_place and op.in_place[0] == name:
            return self.grads[op.in_place[1]]
        if name in self.entering:
            assert self.output is None, "a layer whose input gradient is not the residual's needs its own slot"
            return Place("grad", 0, self.grad_specs[name])
        if name in op.grad_over:
            return tensors[name]
        return _Temporary(self.specs[name], step, self.stage)

    def _add_weight_half(self, op: Op, left: _Places | None, steps: list[_DraftStep]) -> bool:
        """Append it unless it waits; returns whether it did."""
        if any(map(self._waits, op.needs_weight)):
            return False
        for name in op.needs_weight:
            self._ensure(name, steps)
        step = len(steps)
        tensors = self._operands(op.needs_weight, op, "weight", step, left)
        grads = self._grad_operands((*(o.name for o in op.outputs), *op.grad_reads), step)
        steps.append(_DraftStep(op, "weight", tensors, grads, frozenset(), False))
        return True

    def _window_steps(self) -> list[_DraftStep]:
        """Recompute the inputs of ops that carry something along a sequence, which the window is filled from."""
        self._begin()
        steps: list[_DraftStep] = []
        for op in self.ops:
            if op.carried:
                for name in op.inputs:
                    self._ensure(name, steps)
                tensors = {name: self._locate(name, len(steps)) for name in op.inputs}
                steps.append(_DraftStep(op, "window", tensors, {}, frozenset(), True))
        self._end_stage(steps)
        return steps

    def _place(self, drafts: list[_DraftStep]) -> _Placed:
        """Place the temporaries of all steps, and cut the steps into stages."""
        sizes = _place_temporaries(drafts, self.bounds, self.tokens, self.compute_bytes)
        steps = [
            OpStep(d.op, d.half, _resolve(d.tensors), _resolve(d.grads), d.accumulate, d.recompute) for d in drafts
        ]
        starts = [0, *(end for end, _ in self.ends)]
        stages = tuple(
            Stage(tuple(steps[start:end]), parts) for start, (end, parts) in zip(starts, self.ends, strict=False)
        )
        return _Placed(stages, *sizes)


def _lay_out(
    ops: tuple[Op, ...], area: Area, keep: tuple[str, ...], tokens: int, compute_bytes: int
) -> tuple[tuple[Place, ...], int]:
    """Places of the kept outputs and of what is kept beside them, one after the other, in op order; and their bytes."""
    places, offset = list[Place](), 0
    for spec in (spec for op in ops if op.name in keep for spec in op.kept_outputs):
        places.append(Place(area, offset, spec))
        offset += align(spec.num_bytes(tokens, compute_bytes))
    return tuple(places), offset


def _place_temporaries(
    drafts: list[_DraftStep], bounds: set[str], tokens: int, compute_bytes: int
) -> tuple[int, int, int]:
    """Give every temporary a place, so that no two overlap that are alive at once.

    Scratch is filled largest first. What stages carry lies side by side: it is alive while other chunks pass through a
    stage. bounds: names of those that lie in the area `bounds`. Returns the bytes of scratch, carry and bounds.
    """
    operands = (place for draft in drafts for place in (*draft.tensors.values(), *draft.grads.values()))
    found = {id(place): place for place in operands if isinstance(place, _Temporary)}
    sized = [(temp.spec.num_bytes(tokens, compute_bytes), temp) for temp in found.values()]
    placed: list[tuple[int, int, _Temporary]] = []
    carried: dict[Area, int] = {"carry": 0, "bounds": 0}
    for num_bytes, temp in sorted(sized, key=lambda entry: entry[0], reverse=True):
        size, first, last = align(num_bytes), temp.first, temp.last
        if temp.carried:
            area: Area = "bounds" if temp.spec.name in bounds else "carry"
            temp.place = Place(area, carried[area], temp.spec)
            carried[area] += size
            continue
        offset = _lowest_gap(size, [(a, b) for a, b, t in placed if t.first <= last and first <= t.last])
        temp.place = Place("scratch", offset, temp.spec)
        placed.append((offset, offset + size, temp))
    return max((end for _, end, _ in placed), default=0), carried["carry"], carried["bounds"]


def _lowest_gap(size: int, taken: list[tuple[int, int]]) -> int:
    """The lowest offset where `size` bytes fit between the taken intervals."""
    offset = 0
    for start, end in sorted(taken):
        if offset + size <= start:
            break
        offset = max(offset, end)
    return offset


def _resolve(places: _Places) -> tuple[tuple[str, Place], ...]:
    return tuple([(name, p.place if isinstance(p, _Temporary) else p) for name, p in places.items()])
