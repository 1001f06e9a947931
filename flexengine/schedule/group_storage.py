"""How a parameter group's elements are stored: planes of weights, gradients and optimizer states, and parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flexengine.models.spec import GroupSpec
from flexengine.plan import Numerics
from flexengine.schedule.layer_program import align
from flexengine.schedule.parts import Part, parts_of
from flexengine.schedule.slots import PlaneKind

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Plane:
    """One stored array of a group's segment, `start` bytes from the beginning of the plane kind's slot."""

    kind: PlaneKind
    start: int
    dtype: str


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of a group with the same planes: its matrices, or its vectors (norms and biases)."""

    name: str
    first_element: int
    numel: int
    planes: tuple[Plane, ...]


@dataclass(frozen=True)
class GroupStorage:
    """How one group's elements are stored: matrices first, then vectors, per plane kind.

    offsets: parameter -> first element. plane_bytes: bytes of every plane kind's slot. parts: what crosses the link
    together, into slots of `part_bytes`.
    """

    offsets: Mapping[str, int]
    numel: int
    segments: tuple[Segment, ...]
    plane_bytes: Mapping[str, int]
    parts: tuple[Part, ...]

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
        return self.part_numel * self.element_bytes(kind) if self.plane_bytes[kind] else 0

    def element_bytes(self, kind: str) -> int:
        """Bytes of an element of the weights or the gradient."""
        return self.plane_bytes[kind] // self.numel


PLANE_KINDS: tuple[PlaneKind, ...] = ("weights", "remainder", "exp_avg", "exp_avg_sq", "grad")


_KNOWN: dict[tuple, GroupStorage] = {}  # groups of equal shape share one value, so nobody may write to it


def group_storage(group: GroupSpec, numerics: Numerics) -> GroupStorage:
    """How a group is stored under these numerics.

    Vectors always keep float32 states and, beside bf16 weights, the exact remainder. A frozen group has weights alone.
    """
    params = tuple((p.name, p.shape, p.kind) for p in group.params)
    key = (params, group.frozen, group.divisions, group.cut, group.num_parts, numerics)
    if key not in _KNOWN:
        _KNOWN[key] = _group_storage(group, numerics)
    return _KNOWN[key]


def _group_storage(group: GroupSpec, numerics: Numerics) -> GroupStorage:
    offsets, numel = {}, 0
    for kind in ("matrix", "vector"):
        for param in group.params:
            if param.kind == kind:
                offsets[param.name] = numel
                numel += param.numel
    matrices = sum(p.numel for p in group.params if p.kind == "matrix")
    wide_state = "float64" if numerics.compute == "float64" else "float32"
    segments: list[Segment] = []
    ends: dict[str, int] = dict.fromkeys(PLANE_KINDS, 0)
    for name, first, count in (("matrix", 0, matrices), ("vector", matrices, numel - matrices)):
        state = numerics.state if name == "matrix" and wide_state != "float64" else wide_state
        dtypes = {"weights": numerics.compute, "exp_avg": state, "exp_avg_sq": state, "grad": numerics.grad}
        if is_split(name, numerics):
            dtypes["remainder"] = "int16"
        if group.frozen:
            dtypes = {"weights": numerics.compute}
        planes = []
        for kind in PLANE_KINDS:
            if kind in dtypes:
                if kind not in ("weights", "grad"):  # those two stay flat, so that a whole group is one array
                    ends[kind] = align(ends[kind])
                planes.append(Plane(kind, ends[kind], dtypes[kind]))
                ends[kind] += count * element_bytes(dtypes[kind])
        if count:
            segments.append(Segment(name, first, count, tuple(planes)))
    parts = parts_of(group, offsets)
    return GroupStorage(MappingProxyType(offsets), numel, tuple(segments), MappingProxyType(ends), parts)


def is_split(segment: str, numerics: Numerics) -> bool:
    """Whether a trained segment keeps float32 masters in two halves: bf16 weights and the remainder."""
    return numerics.compute == "bfloat16" and (segment == "vector" or numerics.master == "split")


def element_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return 2 if dtype == "int16" else DTYPE_BYTES[dtype]
