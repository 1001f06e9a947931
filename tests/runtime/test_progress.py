"""A thread waits for the host to issue a command, and is woken for no other."""

import threading
import time

from flexengine.runtime.execution.progress import IssueProgress

PATIENCE_S = 60.0


def waiting_thread(progress: IssueProgress, index: int, over=lambda: False):
    """A thread that waits for a command: how often it has looked, what it was told, and itself, once it has looked."""
    looked, found, first = [], [], threading.Event()

    def look() -> bool:
        looked.append(True)
        first.set()
        return over()

    thread = threading.Thread(target=lambda: found.append(progress.reaches(index, look)))
    thread.start()
    assert first.wait(PATIENCE_S)
    return looked, found, thread


def test_commands_before_it_wake_nobody():
    progress = IssueProgress()
    looked, found, thread = waiting_thread(progress, 5)
    for index in range(5):
        progress.issued(index)
        time.sleep(0.02)  # for a thread that was woken to look
    assert len(looked) == 1
    progress.issued(5)
    thread.join(PATIENCE_S)
    assert found == [True]


def test_what_has_been_issued_needs_no_wait():
    progress = IssueProgress()
    progress.issued(7)
    assert progress.reaches(7, lambda: False)
    assert progress.reaches(-1, lambda: False)


def test_something_else_ends_the_wait():
    progress, over = IssueProgress(), threading.Event()
    _, found, thread = waiting_thread(progress, 5, over.is_set)
    progress.issued(4)
    over.set()
    progress.wake()
    thread.join(PATIENCE_S)
    assert found == [False]


def test_no_command_is_missed():
    """However the host and the thread come together."""
    progress, count, reached = IssueProgress(), 3000, []
    thread = threading.Thread(target=lambda: reached.extend(progress.reaches(i, lambda: False) for i in range(count)))
    thread.start()
    for index in range(count):
        progress.issued(index)
    thread.join(PATIENCE_S)
    assert reached == [True] * count
