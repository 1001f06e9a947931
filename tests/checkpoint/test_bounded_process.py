"""A process with bounds: what it answers, and how calls end that break a bound, raise, or end the process."""

import json
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from flexengine.checkpoint import bounded_process
from flexengine.checkpoint.bounded_process import BoundedProcess, report_alive
from flexengine.native.proc_files import read_text

MIB = 2**20


def spin(seconds):
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def spin_and_report(pieces, seconds, more_s):
    for _ in range(pieces):
        report_alive("somewhere", more_s)
        spin(seconds)
    return "done"


def raising(error):
    def call():
        raise error

    return call


CALLS = {
    "double": lambda x: 2 * x,
    "spin": spin,
    "spin_and_report": spin_and_report,
    "take": lambda num_bytes: len(bytearray(num_bytes)),
    "die": lambda number: os.kill(os.getpid(), number),
    "leave": lambda: os._exit(3),
    "digits": lambda: 10 ** (10**8) % 7,
    "warn": lambda: logging.getLogger("flexengine.somewhere").warning("%d odd rows", 3),
    "print": lambda: print("to nobody"),
    "sleep": time.sleep,
    "pid": os.getpid,
    "descriptors": lambda: sorted(int(name) for name in os.listdir("/proc/self/fd")),
    "value_error": raising(ValueError("row 3: a bad value")),
    "os_error": raising(FileNotFoundError(2, "No such file or directory", "weights.json")),
    "no_module": raising(ModuleNotFoundError("No module named 'zstd'", name="zstd")),
    "bug": raising(KeyError("who")),
    "long_words": raising(ValueError("row 3: " + "x" * 10**7 + " is bad")),
}


@pytest.fixture
def process():
    with BoundedProcess("folder/tokenizer.json", lambda: CALLS, most_bytes=256 * MIB) as opened:
        yield opened


def is_gone(pid):
    return not os.path.exists(f"/proc/{pid}")


def test_calls_are_answered_in_their_order(process):
    assert [process.call("double", x) for x in (1, "ab", [3])] == [2, "abab", [3, 3]]
    assert process.call("double", "naïve\n🧮") == 2 * "naïve\n🧮"


def test_long_values_pass(process):
    assert process.call("double", "x" * MIB) == "x" * (2 * MIB)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("value_error", ValueError, "row 3: a bad value"),
        ("os_error", FileNotFoundError, "weights.json"),
        ("no_module", ModuleNotFoundError, "zstd"),
        ("bug", RuntimeError, "KeyError: 'who'"),
        ("long_words", ValueError, r"^row 3: x{1993} \.\.\. x{1993} is bad$"),
    ],
)
def test_what_a_call_raises_is_raised_here_and_the_process_goes_on(process, name, kind, text):
    with pytest.raises(kind, match=text) as found:
        process.call(name)
    if kind is FileNotFoundError:
        assert (found.value.errno, found.value.filename) == (2, "weights.json")
    if kind is ModuleNotFoundError:
        assert found.value.name == "zstd"
    assert process.call("double", 2) == 4


def test_memory_is_bounded(process):
    assert process.call("take", 16 * MIB) == 16 * MIB
    with pytest.raises(ValueError, match=r"takes more than 0.2 GiB"):
        process.call("take", 2048 * MIB)


@pytest.mark.parametrize("name", ["spin", "digits"])
def test_cpu_time_is_bounded_also_where_no_python_runs(process, name, monkeypatch):
    monkeypatch.setattr(bounded_process, "ALLOWED_CPU_S", 0.2)
    pid = process.call("pid")
    with pytest.raises(ValueError, match=r"folder/tokenizer.json: it did not end within 0.2 CPU seconds; fetch"):
        process.call(name, *([60] if name == "spin" else []))
    assert is_gone(pid)
    with pytest.raises(ValueError, match="did not end within"):  # so it stays
        process.call("double", 1)


def test_a_sign_of_life_allows_more(monkeypatch):
    monkeypatch.setattr(bounded_process, "ALLOWED_CPU_S", 0.5)
    with BoundedProcess("x", lambda: CALLS) as process:
        assert process.call("spin_and_report", 2, 0.7, 1.0) == "done"
        with pytest.raises(ValueError, match=r"^somewhere: it did not end within 0.7 CPU seconds"):
            process.call("spin_and_report", 1, 30, 0.2)


def test_a_process_that_computes_nothing_is_not_waited_for_for_ever(process, monkeypatch):
    monkeypatch.setattr(process, "_silent_s", 0.3)
    with pytest.raises(ValueError, match="nothing was heard of it"):
        process.call("sleep", 60)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("die", [int(signal.SIGKILL)], "SIGKILL"),
        ("die", [int(signal.SIGABRT)], "SIGABRT"),
        ("leave", [], "reads it; fetch"),
    ],
)
def test_a_process_that_ends_is_a_message(process, name, arguments, text):
    with pytest.raises(ValueError, match=f"folder/tokenizer.json: it ended the process.*{text}"):
        process.call(name, *arguments)


def test_an_interrupt_ends_the_process_soon(process):
    pid = process.call("pid")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        process.call("sleep", 60)
    assert is_gone(pid)


def test_what_a_terminal_says_to_its_group_is_for_the_parent(process):
    assert os.getpgid(process.call("pid")) != os.getpgrp()


def test_the_process_holds_no_file_of_its_parent(process, tmp_path):
    with (tmp_path / "held").open("w"), BoundedProcess("x", lambda: CALLS) as other:
        assert len(other.call("descriptors")) == 6  # three standard ones, two pipes, the folder that is listed


def test_logging_arrives_and_prints_do_not(process, caplog, capfd):
    process.call("warn")
    process.call("print")
    assert [(record.name, record.message) for record in caplog.records] == [("flexengine.somewhere", "3 odd rows")]
    assert capfd.readouterr() == ("", "")


def test_what_opening_raises_is_raised():
    with pytest.raises(ValueError, match="row 3"):
        BoundedProcess("x", CALLS["value_error"])


def test_a_parent_that_is_killed_leaves_nothing():
    receiver, sender = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.write(sender, json.dumps(BoundedProcess("x", lambda: CALLS).call("pid")).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    pid, end_s = int(os.read(receiver, 100)), time.monotonic() + 30
    os.close(receiver)
    os.close(sender)
    while not is_gone(pid) and "State:\tZ" not in read_text(Path(f"/proc/{pid}/status")):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_reports_have_no_effect_elsewhere():
    report_alive()
