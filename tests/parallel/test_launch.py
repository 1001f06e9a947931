"""What `launch` makes of ranks that end, fail, are killed or stopped, at their first line or their last."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from flexengine.run import launch

RANK = """
from flexengine.parallel.parent import LEFT, follow_parent, tell
follow_parent()
import os, signal, subprocess, sys, time
end = sys.exit
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])

def ready():
    Path(folder, f"part{rank}").write_text(str(os.getpid()))
    Path(folder, f"part{rank}").rename(folder / f"ready{rank}")

def wait():
    ready()
    time.sleep(60)

def meet():
    ready()
    while not all(Path(folder, f"ready{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """The same with fewer beats, and with less time for ranks to end by themselves."""
    for name, value in {"BEAT_S": 0.02, "STOPPED_BEATS": 5, "END_S": 0.3, "ONE_REQUEST_S": 0.1}.items():
        monkeypatch.setattr(launch, name, value)


def launched(body: str, folder: Path, count: int = 2) -> int:
    return launch.launch(count, ["-S", "-c", RANK + body, str(folder)])


def pids(folder: Path, count: int) -> list[int]:
    """The processes of ranks, once all are ready."""
    end_s = time.monotonic() + 30
    while not all((folder / f"ready{rank}").exists() for rank in range(count)):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return [int((folder / f"ready{rank}").read_text()) for rank in range(count)]


def in_background(folder: Path, count: int, do) -> threading.Thread:
    thread = threading.Thread(target=lambda: do(pids(folder, count)))
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("end(0)", 0),
        ("end(7 if rank else 1)", 7),  # rank 0 ended because another one was lost
        ("end(3 - rank)", 2),
        ("end(1)", 1),
        ("tell(LEFT)\ntime.sleep(1 - rank)\nend(75)", 75),  # which takes longer than END_S
    ],
    ids=["all is well", "one fails", "all fail", "lost", "left in order"],
)
def test_the_status_of_a_run_is_that_of_who_chose_one(body, status, tmp_path, capfd):
    if "3 - rank" in body:
        body = "time.sleep(0.5 * (1 - rank))\n" + body
    assert launched(f"meet()\n{body}", tmp_path) == status
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL, as the system does when memory is exhausted"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("os._exit(5)", "has ended with status 5 and no word of why"),
        ("os._exit(0)", "has ended with status 0 and no word of why"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "was stopped by a signal, and the others cannot go on"),
    ],
    ids=["killed", "crashed", "exited", "exited well", "stopped"],
)
@pytest.mark.parametrize("others", ["wait()", "end(0)"], ids=["at the start", "at the end"])
def test_a_rank_that_is_lost_is_named_and_nothing_stays(fault, words, others, tmp_path, capfd):
    before, start_s = set(os.listdir("/proc/self/fd")), time.monotonic()
    assert launched(f"{fault} if rank == 1 else {others}", tmp_path, 3) == launch.FAILED
    assert time.monotonic() - start_s < 30  # the others would wait for 60 s
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("flexengine: rank 1 (process ")
    assert line.endswith(words)
    assert set(os.listdir("/proc/self/fd")) == before
    assert psutil.Process().children(recursive=True) == []


@pytest.mark.parametrize(
    ("number", "arrives"), [(signal.SIGTERM, 15), (signal.SIGHUP, 15), (signal.SIGUSR1, 10), (signal.SIGINT, 2)]
)
def test_a_signal_reaches_all_ranks_which_choose_the_status(number, arrives, tmp_path, capfd):
    body = "for number in (2, 10, 15): signal.signal(number, lambda got, _: end(got + 60))\nwait()"
    thread = in_background(tmp_path, 2, lambda _: os.kill(os.getpid(), number))
    assert launched(body, tmp_path) == arrives + 60
    thread.join()
    assert capfd.readouterr().err == ""


def test_a_ctrl_c_while_ranks_start_is_told_once(tmp_path, capfd):
    thread = in_background(tmp_path, 3, lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert launched("wait()", tmp_path, 3) == 130
    thread.join()
    assert capfd.readouterr().err == "flexengine: SIGINT has ended the run\n"
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_signal_that_ends_other_ranks_than_the_first_is_told(tmp_path, capfd):
    """Rank 0 sees that another one was lost, and leaves it to the launcher to say why."""
    thread = in_background(tmp_path, 2, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert launched("rank or signal.signal(15, lambda *_: end(1))\nwait()", tmp_path) == 143
    thread.join()
    assert capfd.readouterr().err == "flexengine: SIGTERM has ended the run\n"


def test_a_third_signal_kills(tmp_path, capfd):
    def insist(_: list[int]) -> None:
        for _turn in range(launch.IMPATIENT):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    thread = in_background(tmp_path, 2, insist)
    assert launched("signal.signal(15, signal.SIG_IGN)\nwait()", tmp_path) == 143
    thread.join()
    assert capfd.readouterr().err == "flexengine: SIGTERM has ended the run\n"


def test_signals_that_come_together_are_one_request(tmp_path, monkeypatch):
    """As a terminal that goes away and its shell send them; a second one may end a run at once.

    Both reach ranks as SIGTERM: which is handled first is open where they arrive together, or one is ignored.
    """
    monkeypatch.setattr(launch, "ONE_REQUEST_S", 20.0)
    body = "got = []\nfor n in (1, 15): signal.signal(n, lambda n, _: got.append(n))\n"
    thread = in_background(tmp_path, 2, lambda _: [os.kill(os.getpid(), number) for number in (1, 15, 1, 15)])
    assert launched(body + "ready()\nwhile not got: time.sleep(0.01)\ntime.sleep(0.5)\nend(sum(got))", tmp_path) == 15
    thread.join()


def test_a_signal_that_the_launcher_ignores_is_not_passed_on(tmp_path, monkeypatch):
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        thread = in_background(tmp_path, 2, lambda _: os.kill(os.getpid(), signal.SIGHUP))
        assert launched("ready()\ntime.sleep(0.5)\nend(0)", tmp_path) == 0
        thread.join()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    body = "child = subprocess.Popen(['sleep', '60'])\nPath(folder, 'child').write_text(str(child.pid))\nend(0)"
    assert launched(body, tmp_path, 1) == 0
    child = int((tmp_path / "child").read_text())
    end_s = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_ranks_end_with_a_launcher_that_is_killed(stopped, tmp_path):
    script = (
        f"from flexengine.run.launch import launch; launch(2, ['-S', '-c', {RANK + 'wait()'!r}, {str(tmp_path)!r}])"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    processes = [psutil.Process(pid) for pid in pids(tmp_path, 2)]
    if stopped:
        processes[1].suspend()
    launcher.kill()
    _, said = launcher.communicate(timeout=30)
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert said == "flexengine: the process that started this rank has ended\n"
    assert launcher.returncode == -signal.SIGKILL
