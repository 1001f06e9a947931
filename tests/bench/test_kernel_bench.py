"""bench/kernels.py without a GPU: byte formulas, kernel checks in Triton's interpreter, block times, tables."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import spec_of, tiny_config
from family_configs import CASES as CONFIGS
from family_configs import FAMILY_CASES
from thorough import cases

from bench import kernels
from bench.block_ops import HALVES, KINDS, block_times, microseconds_per_token
from bench.kernel_case import Random, check_error, sizes_of
from bench.kernel_cases import kernel_cases
from flexengine.hardware.measure.timing import cpu_timer
from flexengine.models.matmul_dtype import with_fp8_linears
from flexengine.models.registry import open_model

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
SPEC = open_model("preset:tiny-llama3-50m", needs_weights=False).spec
SIZES = sizes_of(SPEC, 11)._replace(vocab_size=1003, parameters=5003, partial_sums=3)
CASES = {case.name: case for case in kernel_cases(SIZES)}
IN_PLACE = [name for name, case in CASES.items() if case.in_place]

pytestmark = pytest.mark.usefixtures("few_partials")


@pytest.mark.parametrize("name", CASES)
def test_formulas_count_the_tensors(name: str):
    case = CASES[name]
    tensors = case.make(Random(CPU, 0))
    touched = [tensors[each] for each in (*case.reads, *case.writes)]
    assert case.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in touched)


DECODED_ELSEWHERE = {f"decode-{base}" for base in ("fp8", "nf4_float32", "int8", "mxfp4")}
"""Tests of the kernel itself hold every format; each takes seconds here."""


@pytest.mark.parametrize("name", cases(CASES, sorted({*CASES} - DECODED_ELSEWHERE)[::3]))
def test_kernels_agree_with_the_plain_path(name: str):
    assert check_error(CASES[name], DEVICE, seed=3) <= kernels.MOST_ERROR


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_that_does_nothing_is_noticed(name: str):
    row = figures(check_error(CASES[name]._replace(run=lambda tensors: None), CPU, seed=3))
    assert row.wrong


@pytest.mark.parametrize("name", cases(IN_PLACE, IN_PLACE[::2]))
def test_in_place_cases_start_from_the_same_values_each_time(name: str):
    case, seen = CASES[name], []
    made: dict = {}

    def make(random: Random) -> dict:
        made.update(case.make(random))
        return made

    def timer(run, prepare) -> float:
        for _ in range(2):
            prepare()
            seen.append({each: made[each].clone() for each in case.reads})
            run()
        return 1.0

    kernels.measure_case(case._replace(make=make), DEVICE, timer)
    assert all(torch.equal(seen[0][each], seen[1][each]) for each in case.reads)


def test_rows_are_timed_checked_and_shared_out():
    names = ["swiglu-forward", "rmsnorm-forward"]
    (norm, swiglu) = kernels.kernel_rows(SIZES, names, DEVICE, lambda run, prepare: 2e-6, memory_bytes_per_s=1e11)
    assert [norm.name, swiglu.name] == ["rmsnorm-forward", "swiglu-forward"]
    assert swiglu.num_bytes == 3 * 2 * 11 * 1344
    assert swiglu.bytes_per_s == pytest.approx(swiglu.num_bytes / 2e-6)
    assert swiglu.share == pytest.approx(swiglu.bytes_per_s / 1e11)
    assert not norm.wrong


def figures(error: float = 0.0, share: float = 0.9) -> kernels.Row:
    return kernels.Row("some-kernel", 1e-3, 4_000_000, "2*2TD", share, error, "")


def test_the_table_marks_the_slow_and_the_wrong():
    lines = kernels.kernel_table([figures(), figures(share=0.5), figures(error=math.nan)]).splitlines()
    assert lines[1].split() == ["some-kernel", "1.000", "4.0", "4", "90%", "0.0e+00", "2*2TD"]
    assert [("under 80%" in line, "WRONG" in line) for line in lines[1:]] == [
        (False, False), (True, False), (False, True),
    ]  # fmt: skip


def test_every_half_of_a_block_is_timed_and_lands_in_one_kind():
    times = block_times(SPEC, 32, 16, CPU, torch.bfloat16, cpu_timer, 1e-4)
    ops = SPEC.blocks[0].ops
    assert [time.op for time in times if time.half == HALVES[0]] == [op.name for op in ops]
    assert {time.op for time in times if time.half == HALVES[2]} == {op.name for op in ops if op.params}
    kinds = {time.op: time.kind for time in times}
    assert kinds["attention"] == "attention"
    assert kinds["down_proj"] == "matmuls"
    assert kinds["swiglu"] == kinds["rope"] == kinds["attn_norm"] == "the rest"
    products = [p for p in SPEC.groups[1].params if p.kind == "matrix"]
    assert sum(t.flops for t in times if t.kind == "matmuls") == 6 * 32 * sum(p.numel for p in products)
    for name, totals in microseconds_per_token(times, 32).items():
        seconds = sum(time.seconds for time in times if (time.half == HALVES[0]) == (name == "forward"))
        assert totals["all"] == pytest.approx(1e6 * seconds / 32)
        assert totals["all"] == pytest.approx(sum(totals[kind] for kind in KINDS))
    table = kernels.block_table(times, 32).splitlines()
    assert len(table) == 1 + len(times) + 1 + 1 + 2


def test_ops_that_run_as_one_are_timed_as_one():
    spec = with_fp8_linears(spec_of(tiny_config(intermediate_size=128, hidden_size=32, head_dim=8)), "fp8-blockwise")
    times = block_times(spec, 32, 16, CPU, torch.bfloat16, cpu_timer, 1e-5)
    assert {t.half for t in times if t.op == "down_proj"} == set(HALVES)
    assert {t.half for t in times if t.op == "swiglu"} == {HALVES[1]}


def test_blocks_that_differ_are_timed_one_by_one():
    spec = open_model("preset:qwen3.5-9b", needs_weights=False).spec
    small = spec_of(CONFIGS[FAMILY_CASES["qwen3_5_text"]])
    assert sizes_of(spec, 11).heads == 16  # of the first block with attention
    for block, op in ((0, "delta_rule"), (len(small.blocks) - 1, "attention")):
        times = block_times(small, 32, 16, CPU, torch.bfloat16, cpu_timer, 1e-5, block)
        names = [each.name for each in small.blocks[block].ops if each.name != "rope"]  # one with the norm of heads
        assert [t.op for t in times if t.half == HALVES[0]] == names
        assert op in {t.op for t in times}
    with pytest.raises(SystemExit, match="--block is 12; preset:tiny-llama3-50m has 12 blocks, counted from 0"):
        kernels.measure(kernels.parse(["--model", "preset:tiny-llama3-50m", "--block", "12"]), CPU, None)


def test_a_run_prints_and_returns_what_was_asked_for(capsys: pytest.CaptureFixture[str]):
    wanted = [
        "--model",
        "preset:tiny-llama3-50m",
        "--tokens",
        "32",
        "--seq-len",
        "16",
        "--only",
        "rope-forward",
        "block",
    ]
    clock = kernels.Clock(lambda run, prepare: 1e-3, lambda work, least_s: 2e-3, 1e9)
    results, rows = kernels.measure(kernels.parse(wanted), DEVICE, clock)
    assert [row["name"] for row in json.loads(json.dumps(results))["kernels"]] == ["rope-forward"]
    assert [row.name for row in rows] == ["rope-forward"]
    assert results["block_us_per_token"]["forward"]["all"] == pytest.approx(9 * 1e6 * 2e-3 / 32)  # a block has 9 ops
    printed = capsys.readouterr().out
    assert "copy within device memory: 1 GB/s" in printed
    assert "us per token" in printed


def test_a_block_without_a_gated_unit_is_timed():
    """GPT-2 has no sizes for the cases of kernels."""
    wanted = ["--model", "preset:gpt2", "--tokens", "16", "--seq-len", "16", "--only", "block"]
    clock = kernels.Clock(lambda run, prepare: 1e-3, lambda work, least_s: 2e-3, 1e9)
    results, rows = kernels.measure(kernels.parse(wanted), CPU, clock)
    assert rows == results["kernels"] == []
    ops = {op.name for op in open_model("preset:gpt2", needs_weights=False).spec.blocks[0].ops}
    assert {time["op"] for time in results["block"]} == ops


def test_timed_calls_are_prepared_and_the_cache_is_read_over(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("gate"), raising=False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=2 * kernels.FLUSH_BYTES)
    )
    monkeypatch.setattr(kernels, "FLUSH_BYTES", 1000)
    monkeypatch.setattr(kernels, "CACHES_PER_FLUSH", 1e-5)
    seconds = kernels.cold_timer(CPU)(lambda: order.append("run"), lambda: order.append("prepare"))
    assert seconds == 3e-3
    warm_up = ["prepare", "run"] * kernels.WARM_UP_CALLS
    assert order == [*warm_up, "gate", *["prepare", "event", "run", "event"] * kernels.TIMED_CALLS]
    assert kernels.TIMED_CALLS >= 20


def test_sequences_must_fill_the_tokens():
    with pytest.raises(ValueError, match="33 tokens are no whole number of sequences of 16"):
        block_times(SPEC, 33, 16, CPU, torch.bfloat16, cpu_timer, 1e-4)


def test_names_are_checked():
    assert kernels.chosen(None, ["a", "b"]) == ["a", "b"]
    assert kernels.chosen(["b"], ["a", "b"]) == ["b"]
    with pytest.raises(SystemExit, match="--only names c; there are: a, b"):
        kernels.chosen(["c"], ["a", "b"])
    with pytest.raises(SystemExit):
        kernels.parse(["--tokens", "100", "--seq-len", "64"])


@pytest.mark.thorough
def test_without_a_gpu_there_is_one_message():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench.kernels"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "bench.kernels measures an NVIDIA GPU" in result.stderr


@pytest.mark.gpu
def test_measures_on_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = sizes_of(SPEC, 4096)
    rows = kernels.kernel_rows(sizes, list(CASES), device, kernels.cold_timer(device), kernels.copy_rate(device))
    assert [row.name for row in rows] == list(CASES)
    assert not [row.name for row in rows if row.wrong]
    assert all(row.share > 0 for row in rows)
