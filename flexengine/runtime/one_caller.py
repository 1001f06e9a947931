"""One call of an engine at a time, which counts wholly or not at all: its slots and gradients are those of one step.

An interrupt may strike at any line here, also where a call is done and only the return is left.
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

    Raises (when called): RuntimeError at once.
    """
    return _alone(method, trains=False)


def training_call(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """As `one_caller`, for a method that changes gradients: one that is interrupted drops those since the last step.

    Who sees an interrupt raised may give the step's batches again, and none counts twice. An error about arguments,
    before anything began, drops nothing.
    """
    return _alone(method, trains=True)


def _alone(method: Callable[Concatenate[Self, P], R], trains: bool) -> Callable[Concatenate[Self, P], R]:
    @functools.wraps(method)
    def called(self: Self, *args: P.args, **keywords: P.kwargs) -> R:
        state, this = self.state, object()
        try:
            # one operation: no interrupt comes between its halves
            if state.running.setdefault("call", this) is not this:
                raise RuntimeError(
                    f"{method.__name__}() while another call of this engine runs, in another thread or in a signal"
                    " handler; make calls one after the other"
                )
            state.drop_interrupted()
            result = method(self, *args, **keywords)
            if trains:
                state.under_way = False
            state.running.clear()
            return result
        except BaseException as error:
            if trains and not isinstance(error, Exception):
                state.under_way = True
            if state.running.get("call") is this:
                state.running.clear()
            raise

    return called
