"""Ends all ranks soon after one of them has: killed, stopped, or by an error of its own.

A thread looks after the processes of the other ranks, and that of a node's first rank after the other nodes. When one
is lost, every rank learns why: waits for signals and calls of Control raise RankLost. A process whose main thread
reaches neither is ended. One rank of each node tells.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple

from flexengine.parallel.control import Control, teller_of
from flexengine.parallel.node_memory import NodeMemory
from flexengine.parallel.node_news import NodeNews
from flexengine.parallel.parent import ENDS, LEFT, LOST, PARENT_ENDED, Parent, follow_parent, tell
from flexengine.parallel.processes import Process, pid_namespace
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import RankLost, Signals

BEAT_S = 0.2
STOPPED_BEATS = 15  # 3 s; counted while this process runs, so that a job stopped and continued as a whole goes on
GRACE_S = 2.5  # from the news to the end of a process that goes on regardless
_CLOSED = 0  # semaphore: this rank makes no more calls
_NUM_CELLS = 1
_NOBODY = -1  # of the ranks: `launch` tells who has ended or is stopped


class Loss(NamedTuple):
    """Why the run is over. told_here: this rank is the one of its node that should say so."""

    message: str
    told_here: bool


class Watch:
    """Looks after the ranks of a node until `close`; see `open`. As a context manager it aborts on an error."""

    def __init__(
        self,
        ranks: Ranks,
        control: Control,
        memory: NodeMemory,
        siblings: dict[int, Process],
        news: NodeNews | None = None,
    ) -> None:
        self.ranks = ranks
        self.loss: Loss | None = None
        self._pid = os.getpid()
        self._hook = sys.excepthook
        self._control = control
        self._siblings, self._news = siblings, news  # siblings by row
        self._own = Signals.over(memory.tensor, ranks.local_size, _NUM_CELLS, ranks.local_rank)
        self._followed: list[Signals] = []
        self._following = threading.Lock()  # nothing is written to signals while their memory goes
        self._stopped_beats = dict.fromkeys(siblings, 0)
        self._parent = follow_parent()
        self._ends_s = float("inf")
        self._closing = threading.Event()
        self._held = ExitStack()
        self._held.callback(memory.close)
        for sibling in siblings.values():
            self._held.callback(sibling.close)
        self._thread = threading.Thread(target=self._look, name="flexengine watch", daemon=True)

    @staticmethod
    def open(ranks: Ranks, control: Control) -> Watch:
        """Begin to look after the other ranks; all ranks make this call together. One rank watches nobody.

        `control` raises RankLost from now on. A process that ends without `close` is taken to have ended in error if
        an exception ended it.
        """
        memory = NodeMemory.open(ranks, control, Signals.num_bytes(ranks.local_size, _NUM_CELLS))
        gathered = control.gather((os.getpid(), pid_namespace()))
        with control.all_or_none():
            siblings = _siblings(ranks, gathered)
        watch = Watch(ranks, control, memory, siblings, NodeNews(control) if ranks.nodes > 1 else None)
        control.check_lost = watch.check
        if ranks.size > 1:
            if watch._parent is not None:
                watch._parent.watched = True
                _handle_interrupts(watch._parent)
            watch._thread.start()
            sys.excepthook = watch._tell_once
            atexit.register(watch._at_exit)
        return watch

    def follow(self, signals: Signals) -> None:
        """End the waits for these signals, too, when a rank is lost."""
        with self._following:
            self._followed.append(signals)
        if self.loss is not None:
            signals.abort(self.loss.message)

    def unfollow(self, signals: Signals) -> None:
        """Leave these signals alone from now on; their memory may go."""
        with self._following:
            self._followed = [followed for followed in self._followed if followed is not signals]

    def abort(self, message: str) -> None:
        """End the run of all ranks; the caller tells why, unless another rank has ended it already."""
        if self.loss is None and self._own.aborted:
            self._hear()
        if self.loss is None:
            self._lose(message, self.ranks.rank, has_words=True)

    def check(self) -> None:
        """Raise RankLost when a rank is lost, also when only another rank has seen it yet."""
        if self.loss is None and self._own.aborted:
            self._hear()
        if self.loss is not None:
            raise RankLost(self.loss.message)

    def close(self) -> None:
        """End in good order: this rank makes no more calls, and the others may go on. A second call does nothing."""
        if self._closing.is_set() or os.getpid() != self._pid:
            return
        if self.loss is None:
            self._own.signal(_CLOSED, 1)
            tell(LEFT)
        if self._parent is not None:
            self._parent.watched = False
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._news is not None and self.ranks.local_rank == 0 and self.loss is None:
            self._news.close()
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._tell_once and self.loss is None:
            sys.excepthook = self._hook
        self._control.check_lost = None
        self._held.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._end_with(error)
        self.close()

    def _end_with(self, error: BaseException | None) -> None:
        """Abort for an error; another rank tells of an exit, which has no words."""
        if self.loss is None and self._own.aborted:
            self._hear()
        if error is None or isinstance(error, RankLost) or self.loss is not None:
            return
        message = f"rank {self.ranks.rank} ended with {_words(error)}"
        if not isinstance(error, SystemExit):
            self.abort(message)
        elif error.code:
            self._lose(message, self._first_alive(but=self.ranks.local_rank))

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._closing.wait(BEAT_S):
            if self.loss is None:
                self._look_once()
                self._look_at_nodes()
            else:
                self._repeat(self.loss.message)
                if time.monotonic() > self._ends_s:
                    self._end(self.loss)

    def _look_once(self) -> None:
        if self._own.aborted:
            self._hear()
            return
        if self._parent is not None and self._parent.ended:
            self._lose(PARENT_ENDED, self._first_alive())
            return
        for row, sibling in self._siblings.items():
            if self._own.value(_CLOSED, row):
                self._see_close(row)
            elif sibling.ended:
                self._see_end(row, sibling)
            elif sibling.stopped and not self._launched:
                self._see_stop(row, sibling)
            else:
                self._stopped_beats[row] = 0

    def _look_at_nodes(self) -> None:
        """Let the first rank of the node see whether the other nodes go on."""
        message = self._news.look() if self._news is not None and self.ranks.local_rank == 0 else None
        if message is not None and self.loss is None:
            self._lose(message, self._first_alive())

    def _see_close(self, row: int) -> None:
        if not self._own.aborted:  # which raises that semaphore, too
            for signals in tuple(self._followed):
                signals.gone[row] = f"rank {self.ranks.of_node[row]} has ended while this rank still waits for it"

    def _see_end(self, row: int, sibling: Process) -> None:
        if self._own.aborted:
            self._hear()
        elif self._own.value(_CLOSED, row) == 0 and self.loss is None:
            message = (
                f"rank {self.ranks.of_node[row]} (process {sibling.pid}) has ended without a word; it may have been"
                " killed, as the system does when memory is exhausted"
            )
            self._lose(message, _NOBODY if self._launched else self._first_alive(but=row))

    @property
    def _launched(self) -> bool:
        """Whether `launch` looks after the ranks, too, and tells who was lost."""
        return self._parent is not None and self._parent.is_launcher and not self._parent.ended

    def _see_stop(self, row: int, sibling: Process) -> None:
        self._stopped_beats[row] += 1
        if self._stopped_beats[row] < STOPPED_BEATS or self.loss is not None:
            return
        rank = self.ranks.of_node[row]
        message = f"rank {rank} (process {sibling.pid}) is stopped by a signal, and the others cannot go on"
        self._lose(message, self._first_alive(but=row))  # another rank may have killed it: it ends, and seems to run
        sibling.kill()  # it would not hear of SIGTERM

    def _hear(self) -> None:
        """Learn from another rank why the run is over, and who tells."""
        if self.loss is None:
            teller, _, message = _message(self._own).partition(" ")
            self._lose(message, int(teller))

    def _lose(self, message: str, teller: int, has_words: bool = False) -> None:
        """Note the loss and pass it on. teller: the rank that says so. has_words: it does so by an error of its own."""
        self._ends_s = time.monotonic() + GRACE_S
        self._own.abort(f"{teller} {message}")
        self.loss = Loss(message, teller == self.ranks.rank and not has_words)
        self._repeat(message)
        if self._news is not None:
            self._news.tell(message)

    def _repeat(self, message: str) -> None:
        """Raise all semaphores: a stream of a GPU may have lowered one since."""
        with self._following:
            for signals in self._followed:
                signals.abort(message)

    def _first_alive(self, but: int | None = None) -> int:
        """The first rank of the node that runs, in another row than `but` if there is one."""
        alive = [row for row, sibling in self._siblings.items() if not (sibling.ended or sibling.stopped)]
        rows = sorted([*alive, self.ranks.local_rank], key=lambda row: (row == but, row))
        return self.ranks.of_node[rows[0]]

    def _end(self, loss: Loss) -> None:
        if loss.told_here:
            os.write(2, f"flexengine: {loss.message}\n".encode())  # the main thread may hold the lock of sys.stderr
        tell(ENDS)
        os._exit(LOST)

    def _tell_once(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """As sys.excepthook: one rank tells what all raise, of a lost one in a line."""
        if not isinstance(error, RankLost):
            if teller_of(error) in (None, self.ranks.rank):
                self._hook(kind, error, trace)
        elif self.loss is None or self.loss.told_here:
            print(f"flexengine: {error}", file=sys.stderr)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self.__exit__(None, error, None)


def _handle_interrupts(parent: Parent) -> None:
    """From now on a Ctrl-C is an exception, which ends all ranks in order, also where `launch` started this one."""
    if parent.is_launcher and signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _siblings(ranks: Ranks, gathered: list[tuple[int, int]]) -> dict[int, Process]:
    """The processes of the other ranks of a node, by row."""
    namespaces = {gathered[rank][1] for rank in ranks.of_node}
    if len(namespaces) > 1:
        raise ValueError("the ranks of a node cannot see each other's processes; start them in one container")
    others = (row for row in range(ranks.local_size) if row != ranks.local_rank)
    return {row: Process(gathered[ranks.of_node[row]][0]) for row in others}


def _message(signals: Signals) -> str:
    try:
        signals.check()
    except RankLost as lost:
        return str(lost)
    return "a rank was lost"


def _words(error: BaseException) -> str:
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0].removesuffix(": ")
