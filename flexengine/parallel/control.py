"""Small values among ranks: plans, digests, losses and errors, as JSON over connections of their own.

No GPU memory is taken, and the caller's process groups are left alone. Every rank makes the same calls in the same
order; one that makes another is told so.
"""

from __future__ import annotations

import itertools
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed

from flexengine.parallel.hub import Hub, address_of_node, open_hub
from flexengine.parallel.parent import STORE_VARIABLE
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.values import decode, encode

TIMEOUT_S = 1800.0  # of one call: rank 0 may plan, load or save meanwhile; who dies is noticed much earlier
_HEADER = struct.Struct("<q16s")  # number and name of the call
_SPIN_S = 200e-6
_NAP_S = 100e-6
_LEAVE_S = 5.0
_NEWS_S = 1.0  # until what has closed a connection is known
_NEWS_OF_NODES_S = 7.0
_LAST_WORDS_S = 0.5  # until what a rank sent before it was lost has come

_WITHOUT_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
"""Read by torch where a group of NCCL is made: no thread looks after its calls then."""

_NCCL_OF_ONE_NODE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0"}
"""Read by NCCL when a group makes its first call: it listens on loopback alone, and has no port for being asked."""

_openings = itertools.count()


class RankError(RuntimeError):
    """What went wrong on one rank, as all ranks are told."""


class Control:
    """Calls that all ranks make together. One thread of a rank uses it. Raises: RankError when a rank does not come."""

    def __init__(self, ranks: Ranks, timeout_s: float = TIMEOUT_S) -> None:
        self.ranks = ranks
        self.check_lost: Callable[[], object] | None = None
        """Called while waiting; raises when a rank is lost."""
        self._meeting: _Meeting | None = None
        self._broken = False
        self._timeout_s = timeout_s
        self._calls = 0
        self._names = itertools.count()

    @staticmethod
    def open(ranks: Ranks, timeout_s: float = TIMEOUT_S) -> Control:
        """Join the other ranks. One rank needs none, and no torch.distributed."""
        control = Control(ranks, timeout_s)
        if ranks.size > 1:
            control._join()
        return control

    def close(self, together: bool = True) -> None:
        """Leave the others, all together unless a rank was lost, as the caller may know; later calls raise."""
        if self._meeting is not None:
            self._timeout_s = _LEAVE_S
            with suppress(RankError):  # they wait no longer than that
                if together and not self._broken:
                    self._exchange("leave", None)
            self._meeting.hub.close()
        self._meeting = None
        self.check_lost = None

    def broadcast(self, value: Any = None, *records: type) -> Any:
        """Rank 0's value, on every rank; those of the others are not looked at. For records see `gather`."""
        return self._exchange("broadcast", value if self.ranks.rank == 0 else None, records)[0]

    def gather(self, value: Any, *records: type) -> list[Any]:
        """The values of all ranks, in their order, on every rank: those that `values.encode` takes.

        records: the classes of named tuples and dataclasses in them.
        """
        return self._exchange("gather", value, records)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._exchange("barrier", None)

    def agree(self, digest: bytes, what: str) -> None:
        """Raise ValueError on all ranks when `digest` differs between them; `what` names what it is of."""
        digests = self._exchange("agree", digest)
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            named = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(map(str, others))} have"
            raise _shared(ValueError(f"{named} another {what} than rank 0; give every rank the same {what}"), teller=0)

    def agree_on(self, values: Mapping[str, object], what: str) -> None:
        """Raise ValueError on all ranks where a value differs, naming it and both values; `what`: what they all are."""
        given = self._exchange("agree_on", {name: repr(value) for name, value in values.items()})
        for rank, others in enumerate(given):
            for name in (name for name in given[0] if others.get(name) != given[0][name]):
                raise _shared(
                    ValueError(
                        f"rank {rank} has {name}={others.get(name)}, rank 0 has {given[0][name]}; give every rank the"
                        f" same {what}"
                    ),
                    teller=0,
                )

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Raise on all ranks what the body raises on one: the error of the first rank that has one.

        The body makes no calls of Control. An interrupt is this rank's own and goes through at once.
        """
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        gathered = self._exchange("all_or_none", None if error is None else _described(error))
        failed = next((rank for rank, words in enumerate(gathered) if words is not None), None)
        if failed == self.ranks.rank and error is not None:
            raise error
        if failed is not None:
            names, words = gathered[failed]
            raise _shared(_kind_named(*names)(f"rank {failed}: {words}"), teller=failed) from error

    def _exchange(self, kind: str, value: Any, records: tuple[type, ...] = ()) -> list[Any]:
        if self.ranks.size == 1:
            return [value]
        if self._meeting is None:
            raise RankError(f"{kind} after the connection to the other ranks was closed")
        if self.check_lost is not None:
            self.check_lost()
        self._calls += 1
        self._broken = True  # until all have come
        hub = self._meeting.hub
        with self.telling_of_lost_ranks():
            hub.send(_HEADER.pack(self._calls, kind.encode()) + encode(value))
            self._await(hub.arrived, most_s=0.01)
            rows = hub.take()
        self._check_same_call(kind, rows)
        self._broken = False
        return [decode(row[_HEADER.size :], records) for row in rows]

    def _check_same_call(self, kind: str, rows: list[bytes]) -> None:
        for rank, row in enumerate(rows):
            call, name = _HEADER.unpack_from(row)
            other = name.rstrip(b"\0").decode()
            if (call, other) != (self._calls, kind):
                raise RankError(
                    f"rank {self.ranks.rank} is at its call {self._calls} ({kind}), rank {rank} at its call"
                    f" {call} ({other}); every rank must make the same calls of an engine in the same order"
                )

    def _join(self) -> None:
        store, rank, size = _store(timedelta(seconds=self._timeout_s))
        if (rank, size) != (self.ranks.rank, self.ranks.size):
            raise ValueError(f"rank {self.ranks.rank} of {self.ranks.size} meets the others as rank {rank} of {size}")
        with self.telling_of_lost_ranks():
            self._meeting = _Meeting(open_hub(rank, size, store, self.ranks.nodes > 1, self._await), store)

    def link(self, name: str, rank: int, size: int) -> Any:
        """A gloo group of some ranks of several nodes, for larger data: this one is `rank` of `size`. See `wait`.

        The ranks of each group give it the same name. All ranks make the call together. It listens where the other
        nodes reach this one, or at the interface that GLOO_SOCKET_IFNAME names.
        """
        from torch.distributed import distributed_c10d  # noqa: PLC0415, not in every build

        gloo: Any = distributed_c10d.ProcessGroupGloo
        assert self._meeting is not None, "one rank asks nobody"
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        with self.telling_of_lost_ranks():
            address = address_of_node(self.ranks.node, self._meeting.store, self._await)
            place = {"interface": named} if named else {"hostname": address}
            options._devices = [gloo.create_device(**place)]
            return gloo(self._store_of_link(name), rank, size, options)

    def nccl_link(self, name: str, rank: int, size: int) -> Any:
        """The same between GPUs, each rank's being torch's current device. On one node it listens on loopback alone.

        Without threads of torch that look after calls: on an error they would end the process, and wait for a minute
        before. Calls have to be made with `asyncOp` off, as work of the current stream; there is nothing to wait for.
        """
        from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415, not in every build

        for variable, value in _NCCL_OF_ONE_NODE.items() if self.ranks.nodes == 1 else ():
            os.environ.setdefault(variable, value)
        with self.telling_of_lost_ranks(), _environment(_WITHOUT_WATCHDOG):
            options = ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self._timeout_s)
            return ProcessGroupNCCL(self._store_of_link(name), rank, size, options)

    def _store_of_link(self, name: str) -> Any:
        """A store that no earlier link has left its addresses in."""
        from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415

        assert self._meeting is not None, "one rank asks nobody"
        return PrefixStore(self.unique(name), self._meeting.store)

    def unique(self, name: str) -> str:
        """A name that nothing else in the store has, the same on all ranks, which make this call together."""
        return f"{name}/{next(self._names)}"

    def leave_link(self, name: str, rank: int, size: int) -> None:
        """Wait a little until all ranks of a link are here, unless one is lost. name: a unique one."""
        if self._meeting is None:
            return
        store, end_s = self._meeting.store, time.monotonic() + _LEAVE_S
        with suppress(RuntimeError):  # a rank is lost, or the store is gone with its owner, who has seen all leave
            store.set(f"left {name}/{rank}", "")
            while not store.check([f"left {name}/{other}" for other in range(size)]) and time.monotonic() < end_s:
                if self.check_lost is not None:
                    self.check_lost()
                time.sleep(_NAP_S)

    def wait(self, work: Any) -> None:
        """Wait for a call of a linked group. Raises: RankError when a rank is lost or does not come."""

        def is_done(seconds: float) -> bool:
            time.sleep(seconds)
            return work.is_completed()

        with self.telling_of_lost_ranks():
            self._await(is_done)
            work.wait()

    def store_for_another_thread(self) -> Any:
        """The store that the ranks met at, over a connection of its own."""
        assert self._meeting is not None, "one rank asks nobody"
        return self._meeting.store.clone()

    @contextmanager
    def telling_of_lost_ranks(self) -> Iterator[None]:
        """Turn an error of a connection into a RankError, which says which rank is lost where a watch knows."""
        try:
            yield
        except RankError:
            raise
        except (RuntimeError, EOFError, OSError) as error:
            self._await_news()
            raise RankError(f"a rank has ended or cannot be reached: {error or type(error).__name__}") from error

    def _await_news(self) -> None:
        """Let a watch tell which rank is lost, since a connection does not."""
        end_s = time.monotonic() + (_NEWS_S if self.ranks.nodes == 1 else _NEWS_OF_NODES_S)
        while self.check_lost is not None and time.monotonic() < end_s:
            self.check_lost()
            time.sleep(0.01)

    def _await(self, done: Callable[[float], bool], most_s: float = 0.0) -> None:
        """Wait until `done`, which waits for at most the seconds that it is given, and notice lost ranks meanwhile.

        most_s: that it may be given from the beginning, as it returns at once when there is something.
        """
        start_s, waited_s = time.monotonic(), 0.0
        while not done(most_s if waited_s < _SPIN_S else max(most_s, min(_NAP_S * (1 + waited_s), 0.01))):
            waited_s = time.monotonic() - start_s
            if waited_s > self._timeout_s:
                raise RankError(f"a rank did not come within {self._timeout_s:.0f} s")
            if waited_s > _SPIN_S:
                self._check_lost_beside(done)

    def _check_lost_beside(self, done: Callable[[float], bool]) -> None:
        """Raise where a rank is lost, unless the wait ends all the same: what that rank sent last may say why."""
        if self.check_lost is None:
            return
        try:
            self.check_lost()
        except RankError:
            end_s = time.monotonic() + _LAST_WORDS_S
            while not done(_NAP_S):
                if time.monotonic() > end_s:
                    raise


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have variables of the environment within the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# What other ranks raise: as what can be corrected on one rank can be on all.
_KINDS: tuple[type[Exception], ...] = (ValueError, MemoryError, OSError, FloatingPointError, RankError)


def teller_of(error: BaseException) -> int | None:
    """The rank that should tell a person of an error that all ranks raise; None for an error of this rank alone."""
    return getattr(error, "flexengine_teller", None)


def _shared(error: Exception, teller: int) -> Exception:
    error.__dict__["flexengine_teller"] = teller
    return error


def _described(error: Exception) -> tuple[tuple[str, str], str]:
    """The nearest kind of an error, as `_kind_named` finds it, and its words, which begin with the type of others.

    Kinds of this package that are made of words alone are kept, so that all ranks catch what one of them does.
    """
    found = next((kind for kind in _KINDS if isinstance(error, kind)), None)
    if found is None:
        return (RankError.__name__, RankError.__name__), f"{type(error).__name__}: {error}"
    own = next(kind for kind in type(error).__mro__ if kind is found or _is_of_words(kind, found))
    return (found.__name__, own.__name__), str(error)


def _kind_named(base: str, own: str) -> type[Exception]:
    """The kind of error of that name, or the one of _KINDS that it is of where this rank has not loaded it."""
    found = next(kind for kind in _KINDS if kind.__name__ == base)
    kinds: list[type[Exception]] = [found]
    for kind in kinds:
        if kind.__name__ == own and (kind is found or _is_of_words(kind, found)):
            return kind
        kinds += kind.__subclasses__()
    return found


def _is_of_words(kind: type[BaseException], base: type[Exception]) -> bool:
    return kind.__module__.startswith("flexengine.") and kind.__init__ is base.__init__


class _Meeting(NamedTuple):
    """Where ranks have met."""

    hub: Hub
    store: Any


def _store(timeout: timedelta) -> tuple[Any, int, int]:
    """A store of all ranks that nothing else uses, with this one's number in it and theirs."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # noqa: PLC0415, not in every build
    from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415

    if distributed.is_initialized():
        store, rank, size = _get_default_store(), distributed.get_rank(), distributed.get_world_size()
    elif STORE_VARIABLE in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        file = os.environ[STORE_VARIABLE]
        store = distributed.FileStore(file, -1)  # pyright: ignore[reportPrivateImportUsage] (-1: not theirs to remove)
        store.set_timeout(timeout)
    else:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    # torchrun's store outlives ranks that it starts again: what those before them left there must not be met
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"flexengine/control/{attempt}/{next(_openings)}", store), rank, size
