"""The lower bound of a step, the speed of light: no exact synchronous step of the sizes considered is faster.

A linear relaxation of the planner's problem, solved for every chunk and round size. docs/speed_of_light.md lists its
variables and rows, and why its least step is below that of every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import islice

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.in_parts import in_parts, may_be_in_parts
from flexengine.models.spec import ModelSpec
from flexengine.plan import Request
from flexengine.planner.bound.relaxation import Bound, Relaxation, least_compute_s
from flexengine.planner.bound.unavoidable import SizeWork, Unavoidable
from flexengine.planner.sizes import chunk_sizes

Size = tuple[int, int]
"""Tokens of a chunk, and chunks of a round."""


def speed_of_light(model: ModelSpec, request: Request, profile: HardwareProfile) -> Bound | None:
    """Bound a step over all chunk and round sizes of a request, with experts whole or in parts.

    On one rank clipping does not count: a speculative update may begin inside backward, too. Without it the GPU's may.
    A request whose round runs twice for the norm is bounded by itself, as nothing else fits it.
    Returns None when not even the relaxation fits the budgets. Raises: PlanError when pinned sizes contradict.
    """
    models = [model, in_parts(model)] if may_be_in_parts(model) else [model]
    bounded = replace(request, clipping=request.norm_first or (request.clipping and request.shares_node))
    ways = (request.gpu_updates,)
    if request.may_update_in_round and not request.updates_in_round:
        ways = ("auto", "in_round", "unstored") if request.whole_steps else ("auto", "in_round")
    requests = [replace(bounded, gpu_updates=way) for way in ways]
    bounds = (size_bounds(one, each, profile) for one in models for each in requests)
    found = [bound for bounds_of_one in bounds for _, bound in islice(bounds_of_one.ascending(), 1)]
    return min(found, key=lambda bound: bound.seconds, default=None)


def speed_of_light_s(model: ModelSpec, request: Request, profile: HardwareProfile) -> float:
    """Seconds of the bound; 0 where not even the relaxation fits."""
    bound = speed_of_light(model, request, profile)
    return 0.0 if bound is None else bound.seconds


@lru_cache(maxsize=16)  # a request is bounded in up to six ways
def size_bounds(model: ModelSpec, request: Request, profile: HardwareProfile) -> SizeBounds:
    """The bounds of a step at every size of a request. Raises: PlanError when pinned sizes contradict."""
    return SizeBounds(model, request, profile)


class SizeBounds:
    """Bounds of a step by size, each solved when it is needed first.

    Sizes with the same chunks and number of rounds have the same rows, so the first of them is solved.
    """

    def __init__(self, model: ModelSpec, request: Request, profile: HardwareProfile) -> None:
        self._step = Unavoidable(model, request, profile)
        self.sizes: list[Size] = sorted(chunk_sizes(request))
        self._first: dict[Size, SizeWork] = {}  # by tokens of a chunk and number of rounds
        self._key: dict[Size, Size] = {}
        self._known: dict[Size, Bound | None] = {}
        for size in self.sizes:
            work = SizeWork(self._step, *size)
            self._key[size] = key = (size[0], work.rounds)
            self._first.setdefault(key, work)

    def at(self, size: Size) -> Bound | None:
        """The bound at one of the sizes; None where the relaxation does not fit."""
        key = self._key[size]
        if key not in self._known:
            self._known[key] = Relaxation(self._step, self._first[key]).bound()
        return self._known[key]

    def is_solved(self, size: Size) -> bool:
        """Whether the bound at a size is known."""
        return self._key[size] in self._known

    def least_s(self, size: Size) -> float:
        """Seconds below the bound at a size, without solving it."""
        return least_compute_s(self._step, self._first[self._key[size]])

    def ascending(self, sizes: Iterable[Size] | None = None) -> Iterator[tuple[Size, Bound]]:
        """Sizes that may fit with their bounds, the lowest bound first; of equal ones the smaller chunks and rounds.

        What a size computes in any case takes no solver. A bound is solved only once no bound is known to be lower
        than that, so whoever stops early leaves most of them unsolved.
        """
        of = self.sizes if sizes is None else list(sizes)
        waiting = [(self.least_s(size), False, size) for size in of]
        heapify(waiting)
        while waiting:
            _, solved, size = heappop(waiting)
            bound = self.at(size)
            if bound is not None and solved:
                yield size, bound
            elif bound is not None:
                heappush(waiting, (bound.seconds, True, size))
