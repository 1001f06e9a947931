"""Runs a function in several processes that are ranks of one node or of several, and brings back what each gave."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from flexengine.parallel.parent import STORE_VARIABLE

TIMEOUT_S = 120.0  # on a slow and busy core


_stores: list[int] = []
"""Descriptors of the files without names that ranks meet in."""


class Outcome(NamedTuple):
    """What became of a rank: the value, or the words of its error."""

    value: Any
    error: str | None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment_of(rank: int, size: int, port: int, nodes: int = 1) -> dict[str, str]:
    local = size // nodes
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    numbers["MASTER_PORT"] = port
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def start_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, nodes: int = 1, anew: bool = False
) -> tuple[list[Any], list[Any]]:
    """Start `function(rank, *arguments)` on every rank; gives processes and the ends of pipes with an Outcome each.

    Processes are forked, unless `anew`, as those must be that use a GPU: loading torch takes seconds. The environment
    of each is as `launch` has it, or as torchrun where there are several nodes. nodes: that the ranks take themselves
    to be on.
    """
    context, port, processes, pipes = multiprocessing.get_context("spawn" if anew else "fork"), free_port(), [], []
    _stores.append(os.memfd_create("ranks"))
    store = {STORE_VARIABLE: f"/proc/{os.getpid()}/fd/{_stores[-1]}"} if nodes == 1 else {}
    for rank in range(size):
        (ours, theirs), environment = context.Pipe(), environment_of(rank, size, port, nodes) | store
        processes.append(context.Process(target=_run, args=(function, environment, theirs, arguments)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    return processes, pipes


def run_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, nodes: int = 1, anew: bool = False
) -> list[Outcome]:
    """What `function(rank, *arguments)` gave on each rank; a process that ended without a word has error "ended"."""
    processes, pipes = start_ranks(function, size, *arguments, nodes=nodes, anew=anew)
    return outcomes_of(processes, pipes)


def outcomes_of(processes: list[Any], pipes: list[Any]) -> list[Outcome]:
    try:
        return [_received(pipe) for pipe in pipes]
    finally:
        for pipe in pipes:
            with suppress(OSError):  # of a process that has ended
                pipe.send("go")
        for process in processes:
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        while _stores:
            os.close(_stores.pop())


def values_of(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def _received(pipe: Any) -> Outcome:
    if not pipe.poll(TIMEOUT_S):
        return Outcome(None, "hangs")
    try:
        return pipe.recv()
    except EOFError:
        return Outcome(None, "ended")


def _run(function: Callable[..., Any], environment: dict[str, str], pipe: Any, arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    try:
        pipe.send(Outcome(function(int(environment["RANK"]), *arguments), None))
    except Exception as error:
        traceback.print_exc()
        pipe.send(Outcome(None, f"{type(error).__name__}: {error}"))
    pipe.poll(TIMEOUT_S)  # until all are done: who ends takes with it what the others have yet to read
    os._exit(0)  # the parent's handlers at exit are not this process's
