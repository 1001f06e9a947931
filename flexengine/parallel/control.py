"""Small values among ranks: plans, digests, losses and errors, over a gloo group of its own.

No GPU memory is taken, and the caller's process groups are left alone. Every rank makes the same calls in the same
order; one that makes another is told so.
"""

from __future__ import annotations

import itertools
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed

from flexengine.parallel.ranks import Ranks

TIMEOUT_S = 1800.0  # of one call: rank 0 may plan, load or save meanwhile; who dies is noticed much earlier
_FRAME_BYTES = 4096  # what fits crosses in one call
_HEADER = struct.Struct("<qq16s")  # number of the call, bytes of the value, name of the call
_SPIN_S = 200e-6
_NAP_S = 100e-6
_LEAVE_S = 5.0
_NEWS_S = 1.0  # until what has closed a connection is known
_NEWS_OF_NODES_S = 7.0
_LAST_WORDS_S = 0.5  # until what a rank sent before it was lost has come

_WITHOUT_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
"""Read by torch where a group of NCCL is made: no thread looks after its calls then."""

_openings = itertools.count()


class RankError(RuntimeError):
    """What went wrong on one rank, as all ranks are told."""


class _Frame(NamedTuple):
    call: int
    kind: str
    num_bytes: int
    inline: bytes


class Control:
    """Calls that all ranks make together. One thread of a rank uses it. Raises: RankError when a rank does not come."""

    def __init__(self, ranks: Ranks, group: _Group | None, timeout_s: float = TIMEOUT_S) -> None:
        self.ranks = ranks
        self.check_lost: Callable[[], object] | None = None
        """Called while waiting; raises when a rank is lost."""
        self._group: _Group | None = group
        self._broken = False
        self._timeout_s = timeout_s
        self._calls = 0
        self._names = itertools.count()

    @staticmethod
    def open(ranks: Ranks, timeout_s: float = TIMEOUT_S) -> Control:
        """Join the other ranks. One rank needs none, and no torch.distributed."""
        return Control(ranks, None if ranks.size == 1 else _join(ranks, timeout_s), timeout_s)

    def close(self) -> None:
        """Leave the group with the others, unless a rank was lost; later calls raise."""
        if self._group is not None and not self._broken:
            self._group.leave("left", self.ranks.rank, self.ranks.size)
        self._group = None
        self.check_lost = None

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank; those of the others are not looked at."""
        return self._exchange("broadcast", value if self.ranks.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on every rank."""
        return self._exchange("gather", value)

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
        told = self._exchange("agree_on", {name: repr(value) for name, value in values.items()})
        for rank, others in enumerate(told):
            for name in (name for name in told[0] if others.get(name) != told[0][name]):
                raise _shared(
                    ValueError(
                        f"rank {rank} has {name}={others.get(name)}, rank 0 has {told[0][name]}; give every rank the"
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
        told = self._exchange("all_or_none", None if error is None else _told(error))
        failed = next((rank for rank, words in enumerate(told) if words is not None), None)
        if failed == self.ranks.rank and error is not None:
            raise error
        if failed is not None:
            kind, words = told[failed]
            raise _shared(kind(f"rank {failed}: {words}"), teller=failed) from error

    def _exchange(self, kind: str, value: Any) -> list[Any]:
        if self.ranks.size == 1:
            return [value]
        if self._group is None:
            raise RankError(f"{kind} after the control group was closed")
        if self.check_lost is not None:
            self.check_lost()
        self._calls += 1
        self._broken = True  # until all have come
        values = self._exchange_data(kind, pickle.dumps(value))
        self._broken = False
        return values

    def _exchange_data(self, kind: str, data: bytes) -> list[Any]:
        frames = [self._unpack(row) for row in self._all_gather(self._packed(kind, data), _FRAME_BYTES)]
        self._check_same_call(kind, frames)
        longest = max(frame.num_bytes for frame in frames)
        if longest <= _FRAME_BYTES - _HEADER.size:
            return [pickle.loads(frame.inline) for frame in frames]
        rows = self._all_gather(data, longest)
        return [pickle.loads(row[: frame.num_bytes]) for row, frame in zip(rows, frames, strict=True)]

    def _packed(self, kind: str, data: bytes) -> bytes:
        return _HEADER.pack(self._calls, len(data), kind.encode()) + data[: _FRAME_BYTES - _HEADER.size]

    @staticmethod
    def _unpack(row: bytes) -> _Frame:
        call, num_bytes, kind = _HEADER.unpack_from(row)
        return _Frame(call, kind.rstrip(b"\0").decode(), num_bytes, row[_HEADER.size :])

    def _check_same_call(self, kind: str, frames: list[_Frame]) -> None:
        for rank, frame in enumerate(frames):
            if (frame.call, frame.kind) != (self._calls, kind):
                raise RankError(
                    f"rank {self.ranks.rank} is at its call {self._calls} ({kind}), rank {rank} at its call"
                    f" {frame.call} ({frame.kind}); every rank must make the same calls of an engine in the same order"
                )

    def _all_gather(self, data: bytes, num_bytes: int) -> list[bytes]:
        assert self._group is not None, "one rank asks nobody"
        own = torch.zeros(num_bytes, dtype=torch.uint8)
        own[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        rows = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(self.ranks.size)]
        with self.telling_of_lost_ranks():
            self._wait(self._group.gloo.allgather([rows], [own]))
        return [_bytes(row) for row in rows]

    def link(self, name: str, rank: int, size: int) -> Any:
        """A gloo group of some of the ranks for larger data: this one is `rank` of `size`. See `wait`.

        The ranks of each group give it the same name. All ranks make the call together.
        """
        from torch.distributed.distributed_c10d import ProcessGroupGloo  # noqa: PLC0415

        with self.telling_of_lost_ranks():
            return ProcessGroupGloo(self._store_of_link(name), rank, size, timedelta(seconds=self._timeout_s))

    def nccl_link(self, name: str, rank: int, size: int) -> Any:
        """The same between GPUs, each rank's being torch's current device.

        Without threads of torch that look after calls: on an error they would end the process, and wait for a minute
        before. Calls have to be made with `asyncOp` off, as work of the current stream; there is nothing to wait for.
        """
        from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415, not in every build

        with self.telling_of_lost_ranks(), _environment(_WITHOUT_WATCHDOG):
            options = ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self._timeout_s)
            return ProcessGroupNCCL(self._store_of_link(name), rank, size, options)

    def _store_of_link(self, name: str) -> Any:
        """A store that no earlier link has left its addresses in."""
        from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415

        assert self._group is not None, "one rank asks nobody"
        return PrefixStore(self.unique(name), self._group.store)

    def unique(self, name: str) -> str:
        """A name that nothing else in the store has, the same on all ranks, which make this call together."""
        return f"{name}/{next(self._names)}"

    def leave_link(self, name: str, rank: int, size: int) -> None:
        """Wait a little until all ranks of a link are here, unless one is lost. name: a unique one."""
        if self._group is not None:
            self._group.leave(f"left {name}/", rank, size, self.check_lost)

    def wait(self, work: Any) -> None:
        """Wait for a call of a linked group. Raises: RankError when a rank is lost or does not come."""
        with self.telling_of_lost_ranks():
            self._wait(work)

    def store_for_another_thread(self) -> Any:
        """The store that the ranks met at, over a connection of its own."""
        assert self._group is not None, "one rank asks nobody"
        return self._group.store.clone()

    @contextmanager
    def telling_of_lost_ranks(self) -> Iterator[None]:
        """Turn an error of gloo into a RankError, which says which rank is lost where a watch knows."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            self._await_news()
            raise RankError(f"a rank has ended or cannot be reached: {error}") from error

    def _await_news(self) -> None:
        """Let a watch tell which rank is lost, since gloo only knows of a connection."""
        end_s = time.monotonic() + (_NEWS_S if self.ranks.nodes == 1 else _NEWS_OF_NODES_S)
        while self.check_lost is not None and time.monotonic() < end_s:
            self.check_lost()
            time.sleep(0.01)

    def _wait(self, work: Any) -> None:
        """Wait for `work` and notice lost ranks meanwhile; gloo's own wait would not."""
        start_s = time.monotonic()
        while not work.is_completed():
            waited_s = time.monotonic() - start_s
            if waited_s > self._timeout_s:
                raise RankError(f"a rank did not come within {self._timeout_s:.0f} s")
            if waited_s > _SPIN_S:
                self._check_lost_beside(work)
                time.sleep(min(_NAP_S * (1 + waited_s), 0.01))
        work.wait()

    def _check_lost_beside(self, work: Any) -> None:
        """Raise where a rank is lost, unless `work` ends all the same: what that rank sent last may say why."""
        if self.check_lost is None:
            return
        try:
            self.check_lost()
        except RankError:
            end_s = time.monotonic() + _LAST_WORDS_S
            while not work.is_completed():
                if time.monotonic() > end_s:
                    raise
                time.sleep(_NAP_S)


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


def _bytes(row: Tensor) -> bytes:
    return row.numpy().tobytes()


# What other ranks raise: as what can be corrected on one rank can be on all.
_KINDS: tuple[type[Exception], ...] = (ValueError, MemoryError, OSError, FloatingPointError, RankError)


def teller_of(error: BaseException) -> int | None:
    """The rank that should tell a person of an error that all ranks raise; None for an error of this rank alone."""
    return getattr(error, "flexengine_teller", None)


def _shared(error: Exception, teller: int) -> Exception:
    error.__dict__["flexengine_teller"] = teller
    return error


def _told(error: Exception) -> tuple[type[Exception], str]:
    """The nearest kind and the words of an error; an unforeseen one has its type in its words.

    Kinds of this package that are made of words alone are kept, so that all ranks catch what one of them does.
    """
    found = next((kind for kind in _KINDS if isinstance(error, kind)), None)
    if found is None:
        return RankError, f"{type(error).__name__}: {error}"
    own = next(kind for kind in type(error).__mro__ if kind is found or _is_of_words(kind, found))
    return own, str(error)


def _is_of_words(kind: type[BaseException], base: type[Exception]) -> bool:
    return kind.__module__.startswith("flexengine.") and kind.__init__ is base.__init__


class _Group(NamedTuple):
    """A gloo group, and the store that its members met at."""

    gloo: Any
    store: Any

    def leave(self, word: str, rank: int, size: int, check_lost: Callable[[], object] | None = None) -> None:
        """Wait a little until all leave: one that ends earlier may take data with it that another has yet to read.

        word: under which each rank says so. check_lost: raises when nobody needs to be waited for any more.
        """
        end_s = time.monotonic() + _LEAVE_S
        try:
            self.store.set(f"{word}{rank}", "")
            while not self.store.check([f"{word}{other}" for other in range(size)]) and time.monotonic() < end_s:
                if check_lost is not None:
                    check_lost()
                time.sleep(_NAP_S)
        except RuntimeError:  # a rank is lost, or the store is gone with its owner, who has seen all leave
            return


def _join(ranks: Ranks, timeout_s: float) -> _Group:
    """A gloo group of all ranks beside whatever groups there are, in the store that they meet at."""
    from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo  # noqa: PLC0415, not in every build

    timeout = timedelta(seconds=timeout_s)
    store, rank, size = _store(timeout)
    if (rank, size) != (ranks.rank, ranks.size):
        raise ValueError(f"rank {ranks.rank} of {ranks.size} meets the others as rank {rank} of {size}")
    # torchrun's store outlives ranks that it starts again: what those before them left there must not be met
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"flexengine/control/{attempt}/{next(_openings)}", store)
    return _Group(ProcessGroupGloo(store, rank, size, timeout), store)


def _store(timeout: timedelta) -> tuple[Any, int, int]:
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415
    from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415

    if distributed.is_initialized():
        return _get_default_store(), distributed.get_rank(), distributed.get_world_size()
    return next(iter(rendezvous("env://", timeout=timeout)))
