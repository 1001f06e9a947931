"""The ranks that this process trains with: joined once, when it is first asked for, and left when the process ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from flexengine.parallel.control import Control
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.watch import Watch

T = TypeVar("T")


class Team(NamedTuple):
    """The ranks that train together, their calls to each other, and who notices when one is lost."""

    ranks: Ranks
    control: Control
    watch: Watch | None = None

    def close(self) -> None:
        """Leave: this process makes no more calls. Order: after everything that the ranks share."""
        if self.watch is not None:
            self.watch.close()
        self.control.close(together=self.watch is None or self.watch.loss is None)


def is_first(team: Team | None) -> bool:
    """Whether this process is alone, or the one of several ranks that prints and writes."""
    return team is None or team.ranks.rank == 0


class _Joined:
    team: Team | None = None


def join() -> Team | None:
    """The team that the environment names, joined on the first call; None for a process that is alone.

    All ranks make the first call together. Raises: ValueError where the environment contradicts itself.
    """
    ranks = Ranks.of_environment()
    if ranks.size == 1:
        return None
    if _Joined.team is None or _Joined.team.ranks != ranks:
        control = Control.open(ranks)
        control.agree_on({"LOCAL_WORLD_SIZE": ranks.local_size}, "number of processes on each node")
        _Joined.team = Team(ranks, control, Watch.open(ranks, control))
    return _Joined.team


def leave() -> None:
    """Leave the team that `join` gave, if any; a later call of `join` joins anew."""
    if _Joined.team is not None:
        _Joined.team.close()
        _Joined.team = None


def told_by_first(team: Team | None, body: Callable[[], T], *records: type) -> T:
    """Do something on rank 0 alone; returns on all ranks, or raises, what it found.

    records: the classes of named tuples and dataclasses in it.
    """
    if team is None:
        return body()
    found: list[T] = []
    with team.control.all_or_none():
        if is_first(team):
            found.append(body())
    return team.control.broadcast(found, *records)[0]
