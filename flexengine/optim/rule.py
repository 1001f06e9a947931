"""What an optimizer rule declares: which states it stores, in which pieces it updates, and how.

Layout, lowering, weight store, planner and reports read these declarations, so that a rule is one file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from flexengine.native.update import HostUpdate, RuleName


class StatePlane(NamedTuple):
    """One stored state: an entry of `dtype` for every `block` consecutive elements. All of its bytes begin as 0."""

    kind: str
    dtype: str
    block: int = 1


class Update(NamedTuple):
    """One update of consecutive elements of a group: their stored arrays by name, and the numbers of the step.

    planes: `weights`, `grad`, `remainder` where masters are split, and the rule's states, all flat. grad_scale [1]
    multiplies the gradient; where it is not finite nothing changes. settings: the optimizer's. lr and weight_decay: of
    these elements. step counts from 1. seed and element_offset (position of the first element in the run's numbering of
    parameters) choose random bits. matrices: for a rule of matrices the shapes of those that the elements are;
    scratch: bytes of the device for their temporaries.
    """

    planes: Mapping[str, Tensor]
    grad_scale: Tensor
    settings: Any
    lr: float
    weight_decay: float
    step: int
    seed: int
    element_offset: int
    matrices: tuple[tuple[int, int], ...] = ()
    scratch: Tensor | None = None


class NativeCall(NamedTuple):
    """Arguments of the native update of a rule."""

    rule: RuleName
    update: HostUpdate


@dataclass(frozen=True)
class Rule:
    """How the elements of a segment are updated.

    name: as reports tell it. states: what is stored beside weights and gradient. update: runs in place, on the side
    where the tensors are; its bits do not depend on how a segment is cut into pieces. matrix_flops: FLOPs for a matrix
    of (rows, columns), which is updated as a whole, and on the GPU alone; None for rules of elements. scratch_bytes: of
    the temporaries of such a matrix, from (rows, columns, bytes of an element in compute). native: arguments of the
    native update on the CPU, which may also write elsewhere than it reads; None for rules that only update in place.
    """

    name: str
    states: tuple[StatePlane, ...]
    update: Callable[[Update], None]
    matrix_flops: Callable[[int, int], float] | None = None
    scratch_bytes: Callable[[int, int, int], int] | None = None
    native: Callable[[Update], NativeCall] | None = None

    @property
    def block(self) -> int:
        """Elements that must be updated together: pieces of a segment begin at multiples of this."""
        return max((state.block for state in self.states), default=1)
