"""How a parameter group's elements are stored: planes of weights, gradients and optimizer states, and parts of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from flexengine.models.spec import BLOCK_CLASSES, GroupSpec, ParamSpec
from flexengine.optim.rule import Rule
from flexengine.optim.rules import IN_BLOCKS, rule_of
from flexengine.plan import Numerics
from flexengine.schedule.layer_program import align
from flexengine.schedule.parts import Part, Run, parts_of
from flexengine.schedule.slots import PlaneKind
from flexengine.schedule.stored_pieces import RunBytes, StoredPieces, stored_pieces, stored_shapes

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Plane:
    """One stored array of a group's segment, `start` bytes from the beginning of the plane kind's slot.

    block: consecutive elements of the segment that share an entry of the array; 1 for all but scales.
    """

    kind: PlaneKind
    start: int
    dtype: str
    block: int = 1

    def num_bytes(self, elements: int) -> int:
        """Bytes of so many elements from a multiple of `block` on."""
        return -(-elements // self.block) * element_bytes(self.dtype)


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of a group with the same planes: its matrices, or its vectors (norms and biases).

    rule: what updates them; None where they are frozen. decays: whether weight decay applies. matrices: the shapes of
    the matrices that follow each other, for a rule of whole matrices.
    """

    name: str
    first_element: int
    numel: int
    planes: tuple[Plane, ...]
    rule: Rule | None = None
    decays: bool = False
    matrices: tuple[tuple[int, int], ...] = ()

    def tiles(self, most: int) -> list[tuple[int, int]]:
        """Cut the segment into pieces (start, elements) that are updated at once, of at most `most` elements.

        A rule's blocks and matrices stay whole, so that a piece may have more where `most` is less than one of them.
        """
        if self.matrices:
            return self._whole_matrices(most)
        size = self.tile_elements(most)
        return [(start, min(size, self.numel - start)) for start in range(0, self.numel, size)]

    def _whole_matrices(self, most: int) -> list[tuple[int, int]]:
        found, start, count = [], 0, 0
        for rows, columns in self.matrices:
            if count and count + rows * columns > most:
                found.append((start, count))
                start, count = start + count, 0
            count += rows * columns
        return [*found, (start, count)]

    def matrices_in(self, start: int, count: int) -> tuple[tuple[int, int], ...]:
        """The shapes of the matrices of a piece."""
        found, end = [], 0
        for rows, columns in self.matrices:
            if start <= end < start + count:
                found.append((rows, columns))
            end += rows * columns
        return tuple(found)

    def tile_elements(self, most: int) -> int:
        """Elements of the largest piece of `tiles`, if the segment is large."""
        if self.matrices:
            return max(count for _, count in self.tiles(most))
        block = 1 if self.rule is None else self.rule.block
        return max(block, most // block * block)


@dataclass(frozen=True)
class GroupStorage:
    """How one group's elements are stored: matrices first, then vectors, per plane kind.

    offsets: parameter -> first element. plane_bytes: bytes of every plane kind's slot, with weights and grad in any
    case. parts: what crosses the link together, into slots of `part_bytes`. stored: where the weights lie that are
    stored in fewer bytes than the compute dtype takes; None where all are stored as they are. Only the segments of
    those have a plane of weights.
    """

    offsets: Mapping[str, int]
    numel: int
    segments: tuple[Segment, ...]
    plane_bytes: Mapping[str, int]
    parts: tuple[Part, ...]
    stored: StoredPieces | None = None

    @property
    def state_kinds(self) -> tuple[PlaneKind, ...]:
        """The planes that only the update reads and writes: the lower halves of masters, and the rules' states."""
        return tuple(kind for kind in self.plane_bytes if kind not in ("weights", "grad"))

    @property
    def decoded(self) -> StoredPieces | None:
        """What lies where in fewer bytes, of weights that layers read decoded; None where they read what is stored."""
        return self.stored if self.stored is not None and self.stored.decoded else None

    @property
    def rule_states(self) -> tuple[PlaneKind, ...]:
        """The planes of the optimizer rules' states."""
        return tuple(kind for kind in self.state_kinds if kind != "remainder")

    def segment_of(self, param: str) -> Segment:
        """The segment that a parameter lies in."""
        return max((s for s in self.segments if s.first_element <= self.offsets[param]), key=lambda s: s.first_element)

    @property
    def update_flops(self) -> float:
        """FLOPs of the matrix products of an update."""
        return sum(matrix_flops(segment.rule, segment.matrices) for segment in self.segments)

    @property
    def on_gpu_only(self) -> bool:
        """Whether the CPU cannot update the group, as some of its matrices are multiplied."""
        return any(segment.matrices for segment in self.segments)

    def update_scratch_bytes(self, numerics: Numerics) -> int:
        """Bytes of temporaries that the update of a matrix takes at the most, in the dtype that rules get weights in.

        Beside float16 that is float32, as small gradients would be 0 in float16.
        """
        compute_bytes = DTYPE_BYTES["float32" if numerics.master == "beside" else numerics.compute]
        rules = [(s.rule.scratch_bytes, s.matrices) for s in self.segments if s.rule is not None]
        return max((size(*shape, compute_bytes) for size, shapes in rules if size for shape in shapes), default=0)

    @property
    def part_numel(self) -> int:
        """Elements of the largest part."""
        return max(part.numel for part in self.parts)

    @property
    def num_runs(self) -> int:
        """Number of runs of elements in all parts."""
        return sum(len(part.runs) for part in self.parts)

    def part_bytes(self, kind: str) -> int:
        """Bytes of a slot for any part of a plane, weights or grad."""
        if self.stored is not None and kind == "weights":
            return max(map(self.stored.part_bytes, self.parts))
        return self.part_numel * self.element_bytes(kind) if self.plane_bytes[kind] else 0

    def element_bytes(self, kind: str) -> int:
        """Bytes of an element of the weights or the gradient, which are stored as they are."""
        assert self.stored is None or kind != "weights", "weights in fewer bytes have no bytes of one element"
        return self.plane_bytes[kind] // self.numel

    def run_bytes(self, kind: str, run: Run) -> RunBytes:
        """Where a run of the weights or the gradient lies in its plane and in a slot with its part."""
        if self.stored is not None and kind == "weights":
            return self.stored.runs[run.number]
        width = self.element_bytes(kind)
        return RunBytes(run.first * width, run.start * width, run.numel * width)


_KNOWN: dict[tuple, GroupStorage] = {}  # groups of equal shape share one value, so nobody may write to it


def group_storage(group: GroupSpec, numerics: Numerics) -> GroupStorage:
    """How a group is stored under these numerics.

    Vectors always keep float32 states and, beside bf16 weights, the exact remainder. Beside trained float16 weights the
    remainder is their float32 in whole. A frozen group has weights alone.
    """
    params = tuple((p.name, p.shape, p.kind, p.storage, p.multiplied_as_stored, _matrices(p)) for p in group.params)
    if numerics.optimizer == "muon" or numerics.state == IN_BLOCKS:
        params = (params, group.slot_class, group.adapter, tuple(p.matrices for p in group.params))
    key = (params, group.frozen, group.divisions, group.cut, group.num_parts, numerics)
    if key not in _KNOWN:
        _KNOWN[key] = _group_storage(group, numerics)
    return _KNOWN[key]


def _group_storage(group: GroupSpec, numerics: Numerics) -> GroupStorage:
    offsets, counts, numel = {}, {"hidden": 0, "matrix": 0, "vector": 0}, 0
    shapes: list[tuple[int, int]] = []
    for kind in counts:
        for param in group.params:
            if _kind_of(param, group, numerics) == kind:
                offsets[param.name] = numel
                numel += param.numel
                counts[kind] += param.numel
                shapes += _plain_matrices(param) if kind == "hidden" else []
    declared = {kind: _planes(kind, group, numerics) for kind, count in counts.items() if count}
    ends = dict.fromkeys(_kinds_in_order(declared.values()), 0)
    segments: list[Segment] = []
    first = 0
    for name, planes in declared.items():
        rule = None if group.frozen else _rule(name, group, numerics)
        placed = []
        for plane in planes:
            if plane.kind not in ("weights", "grad"):  # those two stay flat, so that a whole group is one array
                ends[plane.kind] = align(ends[plane.kind])
            placed.append(replace(plane, start=ends[plane.kind]))
            ends[plane.kind] += plane.num_bytes(counts[name])
        matrices = tuple(shapes) if name == "hidden" else ()
        segments.append(Segment(name, first, counts[name], tuple(placed), rule, name != "vector", matrices))
        first += counts[name]
    parts = parts_of(group, offsets)
    stored = stored_pieces(group, offsets, parts, element_bytes(numerics.compute))
    if stored is not None:
        segments, ends = [replace(segment, planes=()) for segment in segments], {**ends, "weights": stored.num_bytes}
    return GroupStorage(MappingProxyType(offsets), numel, tuple(segments), MappingProxyType(ends), parts, stored)


def _kind_of(param: ParamSpec, group: GroupSpec, numerics: Numerics) -> str:
    """The segment that a parameter belongs to: its kind, or `hidden` for the matrices of blocks that Muon updates.

    Muon leaves rows that stand alone, such as the taps of a convolution, to AdamW.
    """
    hidden = numerics.optimizer == "muon" and group.slot_class == "block" and not group.frozen
    if param.kind == "matrix" and hidden and all(min(shape) > 1 for shape in _plain_matrices(param)):
        return "hidden"
    return param.kind


def _plain_matrices(param: ParamSpec) -> list[tuple[int, int]]:
    """The shape of each matrix of a parameter, one after the other; stacks are taken apart."""
    found: list[tuple[int, int]] = []
    for *stack, rows, columns in param.matrices:
        found += [(rows, columns)] * math.prod(stack)
    assert sum(rows * columns for rows, columns in found) == param.numel
    return found


def matrix_flops(rule: Rule | None, matrices: Iterable[tuple[int, int]]) -> float:
    """FLOPs that a rule takes for these matrices; 0 for rules of elements."""
    if rule is None or rule.matrix_flops is None:
        return 0.0
    return sum(rule.matrix_flops(rows, columns) for rows, columns in matrices)


def _matrices(param: ParamSpec) -> tuple[tuple[int, ...], ...]:
    """The shapes of what a parameter in fewer bytes is stored in, matrix by matrix."""
    return () if param.storage == "compute" else stored_shapes(param)


def _rule(segment: str, group: GroupSpec, numerics: Numerics) -> Rule:
    kind = "edge" if segment == "matrix" and group.slot_class not in BLOCK_CLASSES else segment
    return rule_of(numerics.optimizer, kind, numerics.state, numerics.compute)


def _planes(segment: str, group: GroupSpec, numerics: Numerics) -> list[Plane]:
    """What is stored of a segment's elements, in the order of the slots; all starts are 0."""
    planes = [Plane("weights", 0, numerics.compute)]
    if group.frozen:
        return planes
    if is_split(segment, numerics):
        planes.append(Plane("remainder", 0, "int16"))
    elif numerics.master == "beside":
        planes.append(Plane("remainder", 0, "float32"))
    rule = _rule(segment, group, numerics)
    planes += [Plane(state.kind, 0, state.dtype, state.block) for state in rule.states]
    return [*planes, Plane("grad", 0, numerics.grad)]


def _kinds_in_order(segments: Iterable[Iterable[Plane]]) -> list[PlaneKind]:
    """The plane kinds of all segments: weights, remainder, states, gradient."""
    found = dict.fromkeys(plane.kind for planes in segments for plane in planes)
    states = [kind for kind in found if kind not in ("weights", "remainder", "grad")]
    return ["weights", *(["remainder"] if "remainder" in found else []), *states, "grad"]


def tile_offsets(groups: Iterable[GroupStorage], most: int, gpu_updates: str = "auto") -> dict[str, int]:
    """Byte offset of every plane kind within a slot for any tile of at most `most` elements, and its `end`.

    gpu_updates: as of the request. Slots beside those of a round are no larger than segments need, and have no place
    for gradients where all are updated from where a round leaves them.
    """
    groups = list(groups)
    segments = [segment for group in groups for segment in group.segments]
    needed = dict.fromkeys(_kinds_in_order(segment.planes for segment in segments), 0)
    for segment in segments:
        for plane in segment.planes:
            elements = segment.tile_elements(most)
            elements = elements if gpu_updates == "auto" else min(segment.numel, elements)
            needed[plane.kind] = max(needed[plane.kind], plane.num_bytes(elements))
    if gpu_updates == "unstored" and all(len(group.parts) == 1 for group in groups):
        needed.pop("grad")
    offsets, end = {}, 0
    for kind, num_bytes in needed.items():
        offsets[kind] = end
        end += align(num_bytes)
    return {**offsets, "end": end}


def is_split(segment: str, numerics: Numerics) -> bool:
    """Whether a trained segment keeps float32 masters in two halves: bf16 weights and the remainder."""
    return numerics.compute == "bfloat16" and (segment == "vector" or numerics.master == "split")


_ELEMENT_BYTES = {**DTYPE_BYTES, "int16": 2, "uint8": 1}


def element_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return _ELEMENT_BYTES[dtype]
