"""One of several ranks that take the steps of a run together: rank 0 prints, writes and tells of errors.

The other ranks do the same, write no files and show nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from flexengine.options.train_config import TrainConfig
from flexengine.output import INTERRUPTED
from flexengine.parallel.control import teller_of
from flexengine.parallel.signals import RankLost
from flexengine.parallel.team import Team, is_first, leave
from flexengine.wording import WRONG_USAGE

T = TypeVar("T")

FAILED = 1
_HEAD_START_S = 0.5  # of the rank that tells: a launcher ends all ranks when the first of them has ended


@contextmanager
def as_rank(team: Team, config: TrainConfig) -> Iterator[TrainConfig]:
    """Take part in a run; gives the options of this rank. A lost rank ends all, and one rank tells of what all raise.

    Order: leaves the team in the end.
    """
    assert team.watch is not None, "a team that was joined is watched"
    with ExitStack() as stack:
        stack.callback(leave)
        quiet = ExitStack()
        if not is_first(team):
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(redirect_stdout(nowhere))
            quiet.enter_context(redirect_stderr(nowhere))
            own = {"output_dir": os.devnull, "trace": bool(config.trace), "plan_json": None}
            config = replace(config, **own, logging="warning", report_to=())
            logging.getLogger().setLevel(logging.ERROR)
        try:
            with team.watch, _ended_by_another_rank(team), quiet:  # what ends the run is told outside of it
                yield config
        except RankLost as lost:
            if team.watch.loss is None or team.watch.loss.told_here:
                print(f"flexengine: {lost}", file=sys.stderr)
            else:
                time.sleep(_HEAD_START_S)
            raise SystemExit(FAILED) from None
        except Exception as error:
            if teller_of(error) not in (None, team.ranks.rank):
                time.sleep(_HEAD_START_S)
                raise SystemExit(WRONG_USAGE) from None
            raise


@contextmanager
def _ended_by_another_rank(team: Team) -> Iterator[None]:
    """Turn a Ctrl-C into an exit without words on all ranks but the first: a launcher interrupts all of them."""
    try:
        yield
    except KeyboardInterrupt:
        if is_first(team):
            raise
        raise SystemExit(INTERRUPTED) from None


def first_rank_first(team: Team | None, body: Callable[[], T]) -> T:
    """Do on every rank what fills caches: rank 0 does it first, then the first rank of each other node.

    Raises: on all ranks, what one raises.
    """
    if team is None:
        return body()
    done, own = list[T](), 0 if is_first(team) else 1 if team.ranks.local_rank == 0 else 2
    for turn in range(3):
        with team.control.all_or_none():
            if turn == own:
                done.append(body())
    return done[0]
