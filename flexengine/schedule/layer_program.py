"""One layer's work on one chunk, as a straight line of op calls whose operands have fixed places.

From the ops' declarations and a save set follows everything: which outputs forward writes where, what backward
recomputes just before it is needed, where every temporary lives (by liveness), and what it all costs. A step
therefore allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal, NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Op, TensorSpec, Work

ALIGNMENT = 256
"""Every tensor starts at a multiple of this many bytes, so that kernels see the same alignment in any plan."""

Area = Literal["input", "output", "save_gpu", "save_host", "scratch", "grad"]
Half = Literal["forward", "input", "weight", "window"]


class Place(NamedTuple):
    """Where a tensor of the layer lies: bytes from the start of an area. `spec` has its shape."""

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
        """Cost of the call."""
        cost = {
            "forward": self.op.forward_work,
            "input": self.op.backward_input_work,
            "weight": self.op.backward_weight_work,
            "window": self.op.fill_window_work,
        }[self.half]
        return cost(tokens, seq_len, compute_bytes)


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """Forward, backward and (for sliced sequences) window steps of a layer under one save set.

    Bytes are for a full chunk. `saved_gpu` and `saved_host` list the kept tensors with their places.
    """

    forward: tuple[OpStep, ...]
    backward: tuple[OpStep, ...]
    window: tuple[OpStep, ...]
    forward_scratch_bytes: int
    backward_scratch_bytes: int
    window_scratch_bytes: int
    save_gpu_bytes: int
    save_host_bytes: int
    saved_gpu: tuple[Place, ...]
    saved_host: tuple[Place, ...]
    workspace_bytes: int
    window_workspace_bytes: int

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of forward."""
        return _total(self.forward, tokens, seq_len, compute_bytes)

    def backward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of backward, recompute included."""
        return _total(self.backward, tokens, seq_len, compute_bytes)

    def accumulation_work(self, compute_bytes: int) -> Work:
        """What backward costs on top for chunks after a round's first."""
        work = Work()
        for step in self.backward:
            if step.half == "weight":
                work = work.plus(step.op.accumulation_work(compute_bytes))
        return work

    def recompute_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of what backward recomputes."""
        return _total(tuple(s for s in self.backward if s.recompute), tokens, seq_len, compute_bytes)

    def window_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of refilling the window from one chunk."""
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


def savable_ops(ops: tuple[Op, ...]) -> tuple[str, ...]:
    """Names of ops with an output that some backward reads: the only ones worth keeping."""
    needed = {t for op in ops for t in (*op.needs_input, *op.needs_weight)}
    return tuple(op.name for op in ops if any(o.name in needed for o in op.outputs))


def save_sets(ops: tuple[Op, ...]) -> list[tuple[str, ...]]:
    """Every subset of the savable ops, the empty one first."""
    names = savable_ops(ops)
    return [subset for count in range(len(names) + 1) for subset in combinations(names, count)]


@lru_cache(maxsize=4096)
def _compile(
    ops: tuple[Op, ...],
    has_input: bool,
    output: str | None,
    keep_gpu: tuple[str, ...],
    keep_host: tuple[str, ...],
    chunk_tokens: int,
    compute_bytes: int,
) -> LayerProgram:
    return _Compiler(ops, has_input, output, keep_gpu, keep_host, chunk_tokens, compute_bytes).build()


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
    unknown = (set(keep_gpu) | set(keep_host)) - {op.name for op in layer.ops}
    if unknown:
        raise ValueError(f"layer {layer.name} has no op {sorted(unknown)}; its ops: {[op.name for op in layer.ops]}")
    return _compile(layer.ops, layer.input is not None, layer.output, keep_gpu, keep_host, chunk_tokens, compute_bytes)


class _Temporary:
    """A scratch buffer under construction: its spec, the first and last step that touch it, later its place."""

    def __init__(self, spec: TensorSpec, step: int) -> None:
        self.spec, self.first, self.last = spec, step, step
        self.place = Place("scratch", -1, spec)


class _DraftStep(NamedTuple):
    op: Op
    half: Half
    tensors: dict[str, Place | _Temporary]
    grads: dict[str, Place | _Temporary]
    accumulate: frozenset[str]
    recompute: bool


class _Compiler:
    def __init__(
        self,
        ops: tuple[Op, ...],
        has_input: bool,
        output: str | None,
        keep_gpu: tuple[str, ...],
        keep_host: tuple[str, ...],
        chunk_tokens: int,
        compute_bytes: int,
    ) -> None:
        self.ops, self.has_input, self.output = ops, has_input, output
        self.keep_gpu, self.keep_host = keep_gpu, keep_host
        self.tokens, self.compute_bytes = chunk_tokens, compute_bytes
        self.specs = {spec.name: spec for op in ops for spec in op.outputs}
        self.producer = {spec.name: op for op in ops for spec in op.outputs}
        self.renamed = {op.in_place[0]: op.in_place[1] for op in ops if op.in_place}
        lost = [o.name for op in ops if op.name in savable_ops(ops) for o in op.outputs if o.name in self.renamed]
        assert not lost, f"{lost} would be kept for backward, but an op in place writes over them"
        if has_input:
            self.specs["x"] = TensorSpec("x", _input_shape(ops, self.specs))

    def build(self) -> LayerProgram:
        saved_gpu, gpu_bytes = self._lay_out("save_gpu", self.keep_gpu)
        saved_host, host_bytes = self._lay_out("save_host", self.keep_host)
        self.saved = {p.spec.name: p for p in (*saved_gpu, *saved_host)}
        forward, forward_bytes = self._place(self._forward_steps())
        backward, backward_bytes = self._place(self._backward_steps())
        window, window_bytes = self._place(self._window_steps())
        return LayerProgram(
            forward=forward,
            backward=backward,
            window=window,
            forward_scratch_bytes=forward_bytes,
            backward_scratch_bytes=backward_bytes,
            window_scratch_bytes=window_bytes,
            save_gpu_bytes=gpu_bytes,
            save_host_bytes=host_bytes,
            saved_gpu=saved_gpu,
            saved_host=saved_host,
            workspace_bytes=max(op.workspace_bytes(self.tokens, self.compute_bytes) for op in self.ops),
            window_workspace_bytes=max(op.window_workspace_bytes(self.tokens, self.compute_bytes) for op in self.ops),
        )

    def _lay_out(self, area: Area, keep: tuple[str, ...]) -> tuple[tuple[Place, ...], int]:
        """Places of the kept outputs, one after the other, in op order."""
        places, offset = [], 0
        for op in self.ops:
            if op.name in keep:
                for spec in op.outputs:
                    places.append(Place(area, offset, spec))
                    offset += align(spec.num_bytes(self.tokens, self.compute_bytes))
        return tuple(places), offset

    def _home(self, name: str) -> Place | None:
        """The fixed place of a tensor outside scratch, if it has one."""
        name = self.renamed.get(name, name)
        if name == "x" and self.has_input:
            return Place("input", 0, self.specs["x"])
        if name == self.output:
            return Place("output", 0, self.specs[name])
        return self.saved.get(name)

    def _forward_steps(self) -> list[_DraftStep]:
        self.live: dict[str, Place | _Temporary] = {}
        steps: list[_DraftStep] = []
        for op in self.ops:
            self._add_forward(op, steps, recompute=False)
        return steps

    def _add_forward(self, op: Op, steps: list[_DraftStep], recompute: bool) -> None:
        names = [*op.inputs, *(o.name for o in op.outputs)]
        tensors = {name: self._locate(name, len(steps)) for name in names}
        tensors.update({s.name: _Temporary(s, len(steps)) for s in op.scratch("forward")})
        steps.append(_DraftStep(op, "forward", tensors, {}, frozenset(), recompute))

    def _locate(self, name: str, step: int) -> Place | _Temporary:
        """The tensor's place, making a temporary at its first use and stretching its life at every later one."""
        home = self._home(name)
        if home is not None:
            return home
        key = self.renamed.get(name, name)
        place = self.live.get(key)
        if place is None:
            place = self.live[key] = _Temporary(self.specs[key], step)
        if isinstance(place, _Temporary):
            place.last = step
        return place

    def _ensure(self, name: str, steps: list[_DraftStep]) -> None:
        """Recompute a tensor, and first what it is made of, unless it is at hand."""
        if name in self.available:
            return
        op = self.producer[name]
        for source in op.inputs:
            self._ensure(source, steps)
        self._add_forward(op, steps, recompute=True)
        self.available.update(o.name for o in op.outputs)

    def _backward_steps(self) -> list[_DraftStep]:
        self.live, self.available = {}, {"x", *self.saved}
        self.grads: dict[str, Place | _Temporary] = {}
        if self.output is not None:
            self.grads[self.output] = Place("grad", 0, self.specs[self.output])
        steps: list[_DraftStep] = []
        for op in reversed(self.ops):
            for name in (*op.needs_input, *op.needs_weight):
                self._ensure(name, steps)
            if op.has_input_half:
                self._add_input_half(op, steps)
            if op.has_weight_half:
                self._add_weight_half(op, steps)
        return steps

    def _grad_operands(self, names: tuple[str, ...], step: int) -> dict[str, Place | _Temporary]:
        found = {name: self.grads[name] for name in names if name in self.grads}
        for place in found.values():
            if isinstance(place, _Temporary):
                place.last = step
        return found

    def _operands(
        self, names: tuple[str, ...], op: Op, half: Half, step: int, left: dict[str, Place | _Temporary] | None = None
    ) -> dict[str, Place | _Temporary]:
        """Places of tensors and of the call's buffers; a buffer among `left` is the one that lies there."""
        tensors: dict[str, Place | _Temporary] = {name: self._locate(name, step) for name in names}
        for spec in op.scratch(half):
            place = (left or {}).get(spec.name) or _Temporary(spec, step)
            if isinstance(place, _Temporary):
                place.last = step
            tensors[spec.name] = place
        return tensors

    def _add_input_half(self, op: Op, steps: list[_DraftStep]) -> None:
        step, aliases = len(steps), dict(op.grad_alias)
        tensors = self._operands(op.needs_input, op, "input", step)
        accumulate = set()
        for name in op.grad_inputs:
            if name in aliases:
                assert name not in self.grads, f"{op.name}: the gradient of {name} already holds a value"
                self.grads[name] = self.grads[aliases[name]]
            elif name in self.grads:
                accumulate.add(name)
            else:
                self.grads[name] = self._new_grad(op, name, tensors, step)
        names = (*(o.name for o in op.outputs), *op.grad_inputs)
        grads = self._grad_operands(names, step)
        steps.append(_DraftStep(op, "input", tensors, grads, frozenset(accumulate), False))

    def _new_grad(self, op: Op, name: str, tensors: dict[str, Place | _Temporary], step: int) -> Place | _Temporary:
        """A place for a gradient's first value: in place over the output's, over a dying tensor, or fresh."""
        if op.in_place and op.in_place[0] == name:
            return self.grads[op.in_place[1]]
        if name == "x" and self.has_input:
            assert self.output is None, "a layer whose input gradient is not the residual's needs its own slot"
            return Place("grad", 0, self.specs["x"])
        if name in op.grad_over:
            return tensors[name]
        return _Temporary(self.specs[name], step)

    def _add_weight_half(self, op: Op, steps: list[_DraftStep]) -> None:
        step = len(steps)
        left = steps[-1].tensors if op.has_input_half else None
        tensors = self._operands(op.needs_weight, op, "weight", step, left)
        grads = self._grad_operands(tuple(o.name for o in op.outputs), step)
        steps.append(_DraftStep(op, "weight", tensors, grads, frozenset(), False))

    def _window_steps(self) -> list[_DraftStep]:
        """Bring back what the window is filled from: what the ops read that carry something."""
        self.live, self.available = {}, {"x", *self.saved}
        steps: list[_DraftStep] = []
        for op in self.ops:
            if op.carried:
                for name in op.inputs:
                    self._ensure(name, steps)
                tensors = {name: self._locate(name, len(steps)) for name in op.inputs}
                steps.append(_DraftStep(op, "window", tensors, {}, frozenset(), True))
        return steps

    def _place(self, drafts: list[_DraftStep]) -> tuple[tuple[OpStep, ...], int]:
        """Give every temporary an offset, largest first, so that no two live at once overlap."""
        found: dict[int, _Temporary] = {}
        for draft in drafts:
            for place in (*draft.tensors.values(), *draft.grads.values()):
                if isinstance(place, _Temporary):
                    found[id(place)] = place
        sized = [(temp.spec.num_bytes(self.tokens, self.compute_bytes), temp) for temp in found.values()]
        placed: list[tuple[int, int, _Temporary]] = []
        for num_bytes, temp in sorted(sized, key=lambda entry: entry[0], reverse=True):
            size, first, last = align(num_bytes), temp.first, temp.last
            offset = _lowest_gap(size, [(a, b) for a, b, t in placed if t.first <= last and first <= t.last])
            temp.place = Place("scratch", offset, temp.spec)
            placed.append((offset, offset + size, temp))
        steps = tuple(
            OpStep(d.op, d.half, _resolve(d.tensors), _resolve(d.grads), d.accumulate, d.recompute) for d in drafts
        )
        return steps, max((end for _, end, _ in placed), default=0)


def _input_shape(ops: tuple[Op, ...], specs: dict[str, TensorSpec]) -> tuple[int, ...]:
    """The shape of the layer input x: that of the sum it is the residual of, else of the norm that reads it."""
    sums = [output for op in ops for residual, output in op.grad_alias if residual == "x"]
    readers = [spec.name for op in ops if "x" in op.inputs for spec in op.outputs]
    return specs[(sums or readers)[0]].shape


def _lowest_gap(size: int, taken: list[tuple[int, int]]) -> int:
    """The lowest offset where `size` bytes fit between the taken intervals."""
    offset = 0
    for start, end in sorted(taken):
        if offset + size <= start:
            break
        offset = max(offset, end)
    return offset


def _resolve(places: dict[str, Place | _Temporary]) -> tuple[tuple[str, Place], ...]:
    return tuple([(name, p.place if isinstance(p, _Temporary) else p) for name, p in places.items()])
