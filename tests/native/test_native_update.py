"""Native updates of every rule have the bits of plain torch: any mode, instruction set, cut and number of threads."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch

from flexengine.native import adamw, library
from flexengine.native import update as native
from tests.rule_helpers import ALL, FLOATS, MASTERS, assert_same_bits, copied, patterns, random_update

pytestmark = pytest.mark.usefixtures("native_library")
GRADS = [torch.float32, torch.bfloat16]
BAD = [float("nan"), float("inf"), -float("inf")]
every_rule = pytest.mark.parametrize(("optimizer", "state"), ALL)
every_master = pytest.mark.parametrize("master", MASTERS)


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def instruction_set(request, native_library):
    if request.param not in adamw.instruction_sets():
        pytest.skip(f"this processor has no {request.param}")
    return request.param


def by_torch(rule, update):
    """What plain torch makes of a copy of an update."""
    expected = copied(update)
    with patch.object(library, "load", lambda: None):
        rule.update(expected)
    return expected


def by_library(rule, update, **options):
    """What the library makes of a copy of an update, by one call."""
    actual = copied(update)
    with patch.object(native, "update_", Mock(side_effect=partial(native.update_, **options))) as called:
        rule.update(actual)
    assert called.call_count == 1
    return actual


@every_rule
@every_master
@pytest.mark.parametrize("grad_dtype", GRADS, ids=lambda dtype: f"grad-{dtype}")
def test_bits_of_plain_torch(instruction_set, optimizer, state, master, grad_dtype):
    """The counter crosses a 32-bit border inside the segment, and inside a block."""
    for count, threads in ((1, 1), (7, 3), (16, 1), (33, 2), (300, 1), (4099, 1), (20_011, 3)):
        rule, update = random_update(optimizer, state, master, count, grad_dtype, element_offset=2**32 - count // 2)
        actual = by_library(rule, update, instruction_set=instruction_set, num_threads=threads)
        assert_same_bits(actual, by_torch(rule, update))


@every_rule
@every_master
def test_threads_do_not_change_bits(optimizer, state, master):
    rule, update = random_update(optimizer, state, master, 70_001)
    one = by_library(rule, update, num_threads=1)
    for threads in (2, 5, 16):
        assert_same_bits(by_library(rule, update, num_threads=threads), one)


@pytest.mark.parametrize(("optimizer", "state"), FLOATS)
@every_master
def test_cuts_do_not_change_a_bit(instruction_set, optimizer, state, master):
    """Tiles of odd length, which begin at addresses of every alignment."""
    rule, whole = random_update(optimizer, state, master, 1500, element_offset=100)
    parts = copied(whole)
    with patch.object(native, "update_", partial(native.update_, instruction_set=instruction_set)):
        rule.update(whole)
        for begin, end in [(0, 1), (1, 16), (16, 35), (35, 777), (777, 777), (777, 1500)]:
            planes = {name: plane[begin:end] for name, plane in parts.planes.items()}
            rule.update(parts._replace(planes=planes, element_offset=100 + begin))
    assert_same_bits(parts, whole)


def odd_values(count):
    """NaNs of several payloads, infinities, zeros, denormals and the largest numbers among ordinary ones."""
    patterns = [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x007FFFFF, 0x7F7FFFFF]
    special = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = torch.randn(count)
    at = torch.randint(count, (count // 2,))
    values[at] = special[torch.randint(len(patterns), at.shape)]
    return values


@every_rule
@every_master
@pytest.mark.parametrize("grad_dtype", GRADS, ids=lambda dtype: f"grad-{dtype}")
def test_odd_values(instruction_set, optimizer, state, master, grad_dtype):
    """All paths store one NaN, the quiet one, where plain torch has any."""
    rule, update = random_update(optimizer, state, master, 4099, grad_dtype)
    planes = update.planes
    planes["grad"].copy_(odd_values(4099))
    planes["grad"][512:768] = 0.0  # a block of zeros
    if master != "split":
        planes["weights"].copy_(odd_values(4099))
    if state != "int8":
        for plane in rule.states:
            values = odd_values(4099)
            planes[plane.kind].copy_(values.abs() if plane.kind == "exp_avg_sq" else values)
    actual, scalar = (by_library(rule, update, instruction_set=path) for path in (instruction_set, "scalar"))
    assert_same_bits(actual, scalar)
    written = {name: plane for name, plane in by_torch(rule, update).planes.items() if name != "grad"}
    for name, expected in written.items():
        found = actual.planes[name]
        nan = expected.isnan() if expected.is_floating_point() else torch.zeros_like(expected, dtype=torch.bool)
        assert torch.equal(patterns(found)[~nan], patterns(expected)[~nan]), name
        assert (found[nan].float().view(torch.int32) == 0x7FC00000).all(), name
    assert written["weights"].isnan().any() or master == "split"


@every_rule
@every_master
@pytest.mark.parametrize("bad", BAD)
def test_a_scale_that_is_not_finite_changes_nothing(instruction_set, optimizer, state, master, bad):
    rule, update = random_update(optimizer, state, master, 1030, scale=bad)
    assert_same_bits(by_library(rule, update, instruction_set=instruction_set), update)
    assert_same_bits(by_torch(rule, update), update)


@every_rule
def test_a_float64_scale_is_rounded_first(optimizer, state):
    """1e300 is infinite in the float32 arithmetic."""
    rule, update = random_update(optimizer, state, "split", 600)
    update = update._replace(grad_scale=torch.tensor([1e300], dtype=torch.float64))
    assert_same_bits(by_library(rule, update), update)
    assert_same_bits(by_torch(rule, update), update)


def test_the_callers_rounding_of_denormals_does_not_matter(instruction_set):
    rule, update = random_update("adamw", "float32", "fp32", 1000, torch.float32)
    update.planes["grad"].fill_(1e-20)
    update.planes["exp_avg"].fill_(1e-39)
    expected = by_library(rule, update, instruction_set=instruction_set)
    assert torch.set_flush_denormal(True)
    try:
        actual = copied(update)
        with patch.object(native, "update_", partial(native.update_, instruction_set=instruction_set)):
            rule.update(actual)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(actual, expected)


def test_several_callers_at_once():
    updates = [random_update("adamw", "bfloat16", master, 200_003) for master in MASTERS] * 2
    expected = [by_library(rule, update, num_threads=1) for rule, update in updates]
    actual = [copied(update) for _, update in updates]
    with patch.object(native, "update_", partial(native.update_, num_threads=4)), ThreadPoolExecutor(6) as callers:
        list(callers.map(lambda call: call[0][0].update(call[1]), zip(updates, actual, strict=True)))
    for found, wanted in zip(actual, expected, strict=True):
        assert_same_bits(found, wanted)


def test_a_forked_child_has_threads_of_its_own():
    """The pool's threads do not follow a fork; a child that waited for them would never end."""
    program = """
import os, torch
from flexengine.native.update import HostUpdate, update_
torch.set_num_threads(1)  # torch's own threads do not survive a fork
def update():
    w, m, v = (torch.ones(300_000) for _ in range(3))
    update_("adamw", HostUpdate(w, None, (m, v), w, torch.ones(1), [1.0] * 7, [(1, 2)] * 3, 0), num_threads=3)
    return float(w.double().sum())
parent, child = update(), os.fork()
if child == 0:
    os._exit(0 if update() == parent else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


def test_what_it_does_not_support_is_left_to_torch():
    ones = torch.ones(4)
    assert native.supports(ones, ones.bfloat16())
    assert not native.supports(ones.double(), ones)
    assert not native.supports(ones, ones.half())
    assert not native.supports(ones.to("meta"), ones.to("meta"))


def float_update(**changes):
    ones = torch.ones(4)
    update = native.HostUpdate(ones, None, (ones, ones), ones, torch.ones(1), [1.0] * 7, [(0, 0)] * 3, 0)
    return update._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(4).half()}, "weight must be contiguous torch.float32 or torch.bfloat16"),
        ({"weight": torch.ones(2, 2)}, r"weight must have shape \[n\], got \[2, 2\]"),
        ({"remainder": torch.ones(4, dtype=torch.int16)}, "weight must be contiguous torch.bfloat16"),
        ({"states": (torch.ones(4).bfloat16(), torch.ones(4))}, "state 1 must be contiguous torch.bfloat16"),
        ({"states": (torch.ones(4), torch.ones(3))}, r"state 1 must be .* \[4\] .* got torch.float32 \[3\]"),
        ({"states": (torch.ones(4),)}, "1 states were given"),
        ({"grad": torch.ones(8)[::2]}, r"grad must be contiguous .* with strides \[2\]"),
        ({"grad": torch.ones(4, device="meta")}, "on the CPU, got torch.float32 .* on meta"),
        ({"grad_scale": torch.ones(2)}, "grad_scale must be one number"),
    ],
)
def test_refuses_what_c_could_not_survive(changes, message):
    with pytest.raises(ValueError, match=message):
        native.update_("adamw", float_update(**changes))


def test_threads_and_instruction_sets_that_are_missing_are_named():
    with pytest.raises(ValueError, match="num_threads is 0, expected at least 1"):
        native.update_("adamw", float_update(), num_threads=0)
    for missing in {"avx2", "avx512"} - set(adamw.instruction_sets()):
        with pytest.raises(ValueError, match="is not that of this processor"):
            native.update_("adamw", float_update(), instruction_set=missing)


def test_wrong_blocks_are_refused():
    _, update = random_update("adamw", "int8", "split", 600)
    planes = update.planes
    good = native.HostUpdate(
        planes["weights"], planes["remainder"], (planes["exp_avg"], planes["exp_avg_sq"]), planes["grad"],
        update.grad_scale, (0.0,) * 7, ((0, 0),) * 3, 0,
    )  # fmt: skip
    tables = native.Tables(torch.zeros(256), torch.zeros(65536, dtype=torch.int32))
    blocks = native.Blocks(planes["exp_avg_scale"], planes["exp_avg_sq_scale"], tables, tables)
    for changes, message in (
        ({}, "state 0 must be contiguous torch.float32 or torch.bfloat16"),
        ({"blocks": blocks}, "steps must be contiguous"),
        ({"blocks": blocks._replace(exp_avg_scales=torch.zeros(2))}, "exp_avg_scales must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            native.update_("adamw", good._replace(**changes))
