"""Every program of csrc/tests under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer.

A sanitizer is skipped only where the compiler lacks it or its run-time cannot start in this environment.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
PROGRAMS = sorted(path for path in (CSRC / "tests").glob("*.cpp") if "int main(" in path.read_text())
# Not optimised: compiling takes longer than running. -g1 puts lines into reports.
FLAGS = ["-std=c++17", "-O1", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-pthread"]
SANITIZERS = {
    # Checks of addresses are calls: those that are written out take the compiler twice as long.
    "address,undefined": [
        "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
        "--param", "asan-instrumentation-with-call-threshold=0",
    ],
    "thread": ["-fsanitize=thread"],
}  # fmt: skip
FLAWS = {
    "address,undefined": [
        ("char* p = new char[8]; delete[] p; return p[count];", "heap-use-after-free"),
        ("int most = 0x7fffffff; return most + count;", "signed integer overflow"),
    ],
    "thread": [("int x = 0; std::thread t([&] { x = 1; }); x = count; t.join(); return 0;", "data race")],
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:halt_on_error=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
}
# ThreadSanitizer needs fixed places in the address space, which newer kernels randomise away; the detection of leaks
# needs ptrace, which some containers forbid.
STARTS = [[], ["setarch", "-R"], ["env", "ASAN_OPTIONS=detect_leaks=0:halt_on_error=1"]]
TIMEOUT_S = 300  # of one program or compilation, on a slow and busy core


class Build(NamedTuple):
    """A sanitizer, how programs are compiled with it and started, and a folder for them."""

    name: str
    compile: list[str]
    start: list[str]
    folder: Path


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **OPTIONS}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def starter(compile_command: list[str], folder: Path) -> list[str]:
    """How a program of this sanitizer can be started; skips where an empty one cannot be."""
    source, program = folder / "empty.cpp", str(folder / "empty")
    source.write_text("int main() { return 0; }\n")
    built = run([*compile_command, str(source), "-o", program])
    if built.returncode != 0:
        pytest.skip(f"the compiler lacks it: {built.stderr.strip()[:200]}")
    for start in STARTS:
        if (not start or shutil.which(start[0])) and run([*start, program]).returncode == 0:
            return start
    pytest.skip("its run-time does not start in this environment")


@pytest.fixture(params=SANITIZERS, ids=lambda name: name.replace(",", "-"))
def build(request, compiler, tmp_path) -> Build:
    compile_command = [compiler, *FLAGS, *SANITIZERS[request.param]]
    return Build(request.param, compile_command, starter(compile_command, tmp_path), tmp_path)


@pytest.mark.long
@pytest.mark.thorough  # `make sanitize` has it, too
def test_no_report(build):
    """All programs in one test, so that the library is compiled once, whoever runs other tests meanwhile."""

    def compiled(source: Path) -> str:
        target = str(build.folder / f"{source.stem}.o")
        result = run([*build.compile, "-c", str(source), "-o", target])
        assert result.returncode == 0, result.stderr
        return target

    def report(source: Path) -> str:
        program = str(build.folder / source.stem)
        # -rdynamic: transfer_test is its own CUDA driver, whose functions are looked up by name
        linked = run([*build.compile, "-rdynamic", str(source), *objects, "-ldl", "-o", program])
        result = linked if linked.returncode != 0 else run([*build.start, program])
        return "" if result.returncode == 0 else f"{source.stem}: {result.stdout}{result.stderr}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sorted(CSRC.glob("*.cpp"))))
        reports = list(pool.map(report, PROGRAMS))
    assert reports == [""] * len(PROGRAMS), "\n".join(reports)


def test_there_are_programs():
    expected = {"adamw_test", "host_arena_test", "parallel_test", "reader_test", "signals_test", "transfer_test"}
    assert expected <= {path.stem for path in PROGRAMS}


def test_flaws_are_reported(build):
    """The reports reach these tests: programs with a flaw fail under the sanitizer that is made for it."""
    source, program = build.folder / "flaw.cpp", str(build.folder / "flaw")
    for flaw, report in FLAWS[build.name]:
        source.write_text(f"#include <thread>\nint main(int count, char**) {{ {flaw} }}\n")
        assert run([*build.compile, str(source), "-o", program]).returncode == 0
        result = run([*build.start, program])
        assert result.returncode != 0
        assert report in result.stderr
