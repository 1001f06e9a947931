"""The native AdamW has the bits of the plain-torch reference: any mode, instruction set, cut and number of threads."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flexengine.native import adamw as native
from flexengine.optim import adamw as formula
from flexengine.optim.adamw import adamw_factors, adamw_update_reference
from flexengine.optim.rounding import split_fp32
from flexengine.random_bits import stream_keys

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MODES = ["fp32", "split", "bf16"]
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("native_library")


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def instruction_set(request, native_library):
    if request.param not in native.instruction_sets():
        pytest.skip(f"this processor has no {request.param}")
    return request.param


def make_segment(num_elements, mode, state_dtype):
    master = torch.randn(num_elements)
    remainder = None
    if mode == "split":
        weight, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
        split_fp32(master, weight, remainder)
    else:
        weight = master if mode == "fp32" else master.bfloat16()
    exp_avg = (0.1 * torch.randn(num_elements)).to(state_dtype)
    exp_avg_sq = (0.01 * torch.rand(num_elements)).to(state_dtype)
    return {"weight": weight, "remainder": remainder, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def clone(segment):
    return {name: t if t is None else t.clone() for name, t in segment.items()}


def cut(segment, begin, end):
    return {name: t if t is None else t[begin:end] for name, t in segment.items()}


def run_native(segment, grad, scale=0.37, step=3, element_offset=0, **extra):
    keys = [stream_keys(11, step, stream) for stream in range(3)]
    factors = adamw_factors(**SETTINGS, step=step)
    native.adamw_update_(
        **segment, grad=grad, grad_scale=torch.tensor([scale]), factors=factors, keys=keys,
        element_offset=element_offset, **extra,
    )  # fmt: skip


def run_reference(segment, grad, scale=0.37, step=3, element_offset=0):
    adamw_update_reference(
        **segment, grad=grad, grad_scale=torch.tensor([scale]), **SETTINGS, step=step, seed=11,
        element_offset=element_offset,
    )  # fmt: skip


def assert_same_bits(actual, expected, any_nan=False):
    """any_nan: a NaN counts as equal to any other one."""
    for name, tensor in expected.items():
        if tensor is None:
            continue
        pattern = torch.int32 if tensor.dtype == torch.float32 else torch.int16
        same = actual[name].view(pattern) == tensor.view(pattern)
        if any_nan:
            same |= actual[name].isnan() & tensor.isnan()
        assert same.all(), f"{name}: {int((~same).sum())} of {same.numel()} elements differ"


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=lambda dtype: f"grad-{dtype}")
@pytest.mark.parametrize("state_dtype", DTYPES, ids=lambda dtype: f"states-{dtype}")
@pytest.mark.parametrize("mode", MODES)
def test_bits_of_the_reference(instruction_set, mode, state_dtype, grad_dtype):
    for num_elements, num_threads in [(1, 1), (7, 3), (16, 1), (33, 2), (2111, 1), (20_011, 3)]:
        segment = make_segment(num_elements, mode, state_dtype)
        expected = clone(segment)
        offset = 2**32 - num_elements // 2  # the counter crosses a 32-bit border inside the segment
        for step in (1, 2):
            grad = torch.randn(num_elements).to(grad_dtype)
            run_reference(expected, grad, step=step, element_offset=offset)
            run_native(
                segment, grad, step=step, element_offset=offset, num_threads=num_threads,
                instruction_set=instruction_set,
            )  # fmt: skip
            assert_same_bits(segment, expected)


@pytest.mark.parametrize("mode", MODES)
def test_threads_do_not_change_a_bit(mode):
    segment, grad = make_segment(300_001, mode, torch.bfloat16), torch.randn(300_001)
    expected = clone(segment)
    run_native(expected, grad, num_threads=1)
    for num_threads in (2, 3, 16):
        actual = clone(segment)
        run_native(actual, grad, num_threads=num_threads)
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("mode", MODES)
def test_cuts_do_not_change_a_bit(instruction_set, mode):
    """Tiles of odd length, which begin at addresses of every alignment."""
    whole, grad = make_segment(1500, mode, torch.bfloat16), torch.randn(1500).bfloat16()
    parts = clone(whole)
    run_native(whole, grad, element_offset=100, instruction_set=instruction_set)
    for begin, end in [(0, 1), (1, 16), (16, 35), (35, 777), (777, 777), (777, 1500)]:
        run_native(
            cut(parts, begin, end), grad[begin:end], element_offset=100 + begin, instruction_set=instruction_set
        )  # fmt: skip
    assert_same_bits(parts, whole)


def odd_values(num_elements):
    """NaNs of several payloads, infinities, zeros, denormals and the largest numbers among ordinary ones."""
    patterns = [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x007FFFFF, 0x7F7FFFFF]
    special = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = torch.randn(num_elements)
    at = torch.randint(num_elements, (num_elements // 2,))
    values[at] = special[torch.randint(len(patterns), at.shape)]
    return values


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=lambda dtype: f"grad-{dtype}")
@pytest.mark.parametrize("state_dtype", DTYPES, ids=lambda dtype: f"states-{dtype}")
@pytest.mark.parametrize("mode", MODES)
def test_odd_values(instruction_set, mode, state_dtype, grad_dtype):
    n = 4099
    segment = make_segment(n, mode, state_dtype)
    segment["exp_avg"].copy_(odd_values(n))
    segment["exp_avg_sq"].copy_(odd_values(n).abs())
    if mode != "split":
        segment["weight"].copy_(odd_values(n))
    grad = odd_values(n).to(grad_dtype)
    expected, scalar = clone(segment), clone(segment)
    run_reference(expected, grad)
    run_native(scalar, grad, instruction_set="scalar")
    run_native(segment, grad, instruction_set=instruction_set)
    assert_same_bits(segment, expected, any_nan=True)
    assert_same_bits(segment, scalar)
    for name in ("weight", "exp_avg", "exp_avg_sq"):  # one NaN, the quiet one
        stored = segment[name].float().view(torch.int32)
        assert segment[name].isnan().any()
        assert (stored[segment[name].isnan()] == 0x7FC00000).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mode", MODES)
def test_a_non_finite_scale_writes_nothing(instruction_set, mode, bad):
    segment = make_segment(1030, mode, torch.bfloat16)
    before = clone(segment)
    run_native(segment, torch.randn(1030), scale=bad, instruction_set=instruction_set)
    assert_same_bits(segment, before)


def test_a_float64_scale_is_rounded_first():
    """1e300 is infinite in the float32 arithmetic, as in the reference."""
    segment = make_segment(100, "fp32", torch.float32)
    before = clone(segment)
    keys, factors = [(0, 0)] * 3, adamw_factors(**SETTINGS, step=1)
    scale = torch.tensor([1e300], dtype=torch.float64)
    native.adamw_update_(
        **segment, grad=torch.ones(100), grad_scale=scale, factors=factors, keys=keys, element_offset=0
    )  # fmt: skip
    assert_same_bits(segment, before)


def test_the_callers_rounding_of_denormals_does_not_matter(instruction_set):
    segment, grad = make_segment(1000, "fp32", torch.float32), torch.full((1000,), 1e-20)
    segment["exp_avg"].fill_(1e-39)
    expected = clone(segment)
    run_native(expected, grad, instruction_set=instruction_set)
    assert torch.set_flush_denormal(True)
    try:
        run_native(segment, grad, instruction_set=instruction_set)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(segment, expected)


def test_several_callers_at_once():
    segments = [make_segment(200_003, mode, torch.bfloat16) for mode in MODES] * 2
    segments = [clone(segment) for segment in segments]
    expected = [clone(segment) for segment in segments]
    grad = torch.randn(200_003)
    for segment in expected:
        run_native(segment, grad, num_threads=1)
    with ThreadPoolExecutor(6) as callers:
        list(callers.map(lambda segment: run_native(segment, grad, num_threads=4), segments))
    for actual, wanted in zip(segments, expected, strict=True):
        assert_same_bits(actual, wanted)


def test_a_forked_child_has_threads_of_its_own():
    """The pool's threads do not follow a fork; a child that waited for them would never end."""
    program = """
import os, torch
from flexengine.native.adamw import adamw_update_
torch.set_num_threads(1)  # torch's own threads do not survive a fork
tensors = [torch.ones(300_000) for _ in range(3)]
def update():
    w, m, v = (t.clone() for t in tensors)
    adamw_update_(w, None, m, v, w, torch.ones(1), [1.0] * 7, [(1, 2)] * 3, 0, num_threads=3)
    return float(w.double().sum())
parent, child = update(), os.fork()
if child == 0:
    os._exit(0 if update() == parent else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_public_update_runs_it(mode, monkeypatch):
    calls = []
    run = native.adamw_update_
    monkeypatch.setattr(native, "adamw_update_", lambda *args: (calls.append(args), run(*args)))
    segment, grad = make_segment(1001, mode, torch.float32), torch.randn(1001)
    expected = clone(segment)
    arguments = {"grad": grad, "grad_scale": torch.ones(1), **SETTINGS, "step": 2, "seed": 5, "element_offset": 9}
    formula.adamw_update(**segment, **arguments)
    adamw_update_reference(**expected, **arguments)
    assert len(calls) == 1
    assert_same_bits(segment, expected)


def test_what_it_does_not_support_is_left_to_torch():
    ones = torch.ones(4)
    assert native.supports(ones, ones, ones.bfloat16())
    assert not native.supports(ones.double(), ones.double(), ones)
    assert not native.supports(ones, ones, ones.half())
    assert not native.supports(ones.to("meta"), ones.to("meta"), ones.to("meta"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(4, dtype=torch.float16)}, "weight must be contiguous torch.float32 or torch.bfloat16"),
        ({"weight": torch.ones(2, 2)}, r"weight must have shape \[n\], got \[2, 2\]"),
        ({"remainder": torch.ones(4, dtype=torch.int16)}, "weight must be contiguous torch.bfloat16"),
        ({"exp_avg": torch.ones(4, dtype=torch.bfloat16)}, "exp_avg_sq must be contiguous torch.bfloat16"),
        (
            {"exp_avg_sq": torch.ones(3)},
            r"exp_avg_sq must be contiguous torch.float32 \[4\] .* got torch.float32 \[3\]",
        ),
        ({"grad": torch.ones(8)[::2]}, r"grad must be contiguous .* with strides \[2\]"),
        ({"grad": torch.ones(4, device="meta")}, "on the CPU, got torch.float32 .* on meta"),
        ({"grad_scale": torch.ones(2)}, "grad_scale must be one number"),
        ({"num_threads": 0}, "num_threads is 0, expected at least 1"),
    ],
)
def test_refuses_what_c_could_not_survive(change, message):
    arguments = {**make_segment(4, "fp32", torch.float32), "grad": torch.ones(4), "grad_scale": torch.ones(1)}
    arguments |= {"factors": [1.0] * 7, "keys": [(0, 0)] * 3, "element_offset": 0}
    with pytest.raises(ValueError, match=message):
        native.adamw_update_(**{**arguments, **change})


def test_an_instruction_set_that_is_missing_is_named():
    missing = [name for name in ("avx2", "avx512") if name not in native.instruction_sets()]
    if not missing:
        pytest.skip("this processor has them all")
    with pytest.raises(ValueError, match="is not that of this processor"):
        run_native(make_segment(4, "fp32", torch.float32), torch.ones(4), instruction_set=missing[0])
