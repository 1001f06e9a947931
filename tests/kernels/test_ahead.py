"""Kernels that are compiled before they are launched: what is noted, and that launches then find it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from flexengine.kernels import ahead, compiler
from flexengine.ops import fp8_blocks
from flexengine.ops.compiling import without_memory
from flexengine.ops.fp8_scaling import FORWARD_DTYPE, Operand
from flexengine.ops.products import write_product

CARD = ahead.Card((9, 0), 132, 227 * 1024)
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.long
@pytest.mark.thorough
def test_kernels_of_a_step_are_noted_and_a_launch_finds_what_was_compiled(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(TESTS / "compiled_ahead.py")]
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=TESTS.parent, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert set(found["step"]) >= {
        "rmsnorm._forward_kernel",
        "rmsnorm._backward_kernel",
        "rope._rope_kernel",
        "attention._forward_kernel",
        "attention_backward._query_kernel",
        "glu._backward_kernel",
        "cross_entropy._cross_entropy_kernel",
        "grad_accumulate._grad_accumulate_kernel",
        "adamw._adamw_kernel",
    }
    assert (found["ended"], found["failed"], found["hits"]) == (True, [False], [True])
    assert not found["is_cuda"], "tensors are as they were"


def test_a_kernel_that_is_not_there_counts_as_failed():
    assert ahead._failed(ahead.Launch("flexengine.kernels.rmsnorm", "_no_kernel", "{}"))


def test_processes_compile_so_many_at_a_time_and_failures_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def compiled(launch: ahead.Launch) -> bool:
        (tmp_path / launch.name).touch()
        return launch.name == "2"

    monkeypatch.setattr(ahead, "_failed", compiled)
    forks = ahead.Forks(2)
    for number in range(5):
        forks.begin(ahead.Launch("", str(number), ""))
    forks.wait()
    assert forks.failed == 1
    assert {path.name for path in tmp_path.iterdir()} == set("01234")


@pytest.mark.parametrize(("cores", "room_bytes"), [(3, None), (16, 3 * compiler.PROCESS_BYTES - 1)])
def test_a_machine_without_cores_or_memory_to_spare_compiles_as_ever(monkeypatch, cores: int, room_bytes: int | None):
    monkeypatch.setattr(compiler.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(compiler.subprocess, "Popen", lambda *_, **__: pytest.fail("it starts a process"))
    with ahead.Compilation(CARD, print, room_bytes=room_bytes) as compilation:
        assert not compilation.wait()


def test_a_compiler_is_asked_again_and_ended_when_it_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The process is a stand-in, as the real one imports for seconds: one of "fail" counts as failed, no more do."""
    lines = "for line in iter(input, ''):\n    while 'hang' in line: pass\n    print(line.count('fail'), flush=True)"
    (tmp_path / "stand_in.py").write_text(lines)
    monkeypatch.setattr(compiler, "PROGRAM", "stand_in")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ready = compiler.Compiler()
    for asked in ([], ["fail"]):
        with ahead.Compilation(CARD, print, *asked, processes=1, compiler=ready) as compilation:
            assert compilation.wait()
        assert ready.pid is not None, "it serves later calls"
    monkeypatch.setattr(ahead, "LONGEST_S", 0.1)
    with ahead.Compilation(CARD, print, "hang", processes=1, compiler=ready) as compilation:
        assert not compilation.wait()
    assert (ready.pid, ready.wait(0.0)) == (None, None), "it is ended"


@pytest.mark.thorough
def test_the_process_that_compiles_answers_calls_one_after_the_other():
    ready = compiler.Compiler()
    for _ in range(2):
        with ahead.Compilation(CARD, ahead.state_of_compiler, processes=1, compiler=ready) as compilation:
            assert compilation.wait(), "a call that launches nothing ends well"
    ready.close()
    assert (ready.pid, ready.wait(0.0)) == (None, None)


def test_a_compiler_that_may_not_compile_is_closed():
    closed = list[bool]()
    ready = SimpleNamespace(close=lambda: closed.append(True))
    with ahead.Compilation(CARD, print, room_bytes=0, compiler=cast("compiler.Compiler", ready)):
        assert closed == [True]


def test_products_of_tensors_without_memory_leave_given_results():
    """Up to torch 2.11 those that sum in a wider type fail otherwise, and those of FP8 blocks on any."""
    with without_memory():
        x, out = torch.empty(2, 2, dtype=torch.bfloat16), torch.empty(2, 2)
        write_product(out, x, x, added=True)
        blocks = Operand(torch.empty(128, 128, dtype=FORWARD_DTYPE), torch.empty(1, 1), "squares")
        fp8_blocks.cublas_product(blocks, blocks, torch.empty(128, 128), None)
    left = torch.full((2, 2), 7.0)
    torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=left)
    assert torch.equal(left, torch.full((2, 2), 2.0)), "products are as they were"
