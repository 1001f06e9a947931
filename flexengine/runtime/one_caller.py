"""One call of an engine at a time, each of which counts wholly or not at all: slots and gradients are those of one step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from flexengine.runtime.step_state import StepState

P = ParamSpec("P")
R = TypeVar("R")


class HasState(Protocol):
    """Whose calls exclude each other."""

    state: StepState


Self = TypeVar("Self", bound=HasState)


def one_caller(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """Have a method refuse to begin while another call of the same engine runs, in whichever thread.

    Raises (when called): RuntimeError at once. Two calls that begin in the same instant run one after the other.
    """

    @functools.wraps(method)
    def called(self: Self, *args: P.args, **keywords: P.kwargs) -> R:
        if self.state.busy.locked():
            raise RuntimeError(
                f"{method.__name__}() while another call of this engine runs, in another thread or in a signal"
                " handler; make calls one after the other"
            )
        with self.state.busy:  # `with` lets no interrupt between taking the lock and the block that gives it back
            self.state.drop_interrupted()
            return method(self, *args, **keywords)

    return called


def training_call(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """As `one_caller`, for a method that changes gradients: one that is interrupted drops those since the last step.

    That holds wherever the interrupt strikes, also when all is done and only the return is left: who sees it raised
    may repeat the batch, and no gradient counts twice. An error about arguments, before anything began, drops nothing.
    """

    @one_caller
    @functools.wraps(method)
    def whole(self: Self, *args: P.args, **keywords: P.kwargs) -> R:
        result = method(self, *args, **keywords)
        self.state.under_way = False
        return result

    @functools.wraps(method)
    def called(self: Self, *args: P.args, **keywords: P.kwargs) -> R:
        try:
            return whole(self, *args, **keywords)
        except BaseException as error:
            if not isinstance(error, Exception):
                self.state.under_way = True
            raise

    return called
