"""Native updates of every rule have the bits of plain torch: any mode, instruction set, cut and number of threads."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from flexengine.native import adamw, library
from flexengine.native import update as native
from tests.rule_helpers import MASTERS, STATES, assert_same_bits, copied, random_update

pytestmark = pytest.mark.usefixtures("native_library")
GRADS = [torch.float32, torch.bfloat16]


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
    """What the library makes of a copy of an update."""
    actual = copied(update)
    with patch.object(native, "update_", partial(native.update_, **options)):
        rule.update(actual)
    return actual


@pytest.mark.parametrize("grad_dtype", GRADS, ids=lambda dtype: f"grad-{dtype}")
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(("optimizer", "state"), STATES)
def test_bits_of_plain_torch(instruction_set, optimizer, state, master, grad_dtype):
    torch.manual_seed(0)
    for count in (1, 300, 4099):  # the counter crosses a 32-bit border inside the segment, and inside a block
        rule, update = random_update(optimizer, state, master, count, grad_dtype, element_offset=2**32 - count // 2)
        assert_same_bits(by_library(rule, update, instruction_set=instruction_set), by_torch(rule, update))


@pytest.mark.parametrize(("optimizer", "state"), STATES)
def test_threads_do_not_change_bits(optimizer, state):
    torch.manual_seed(0)
    rule, update = random_update(optimizer, state, "split", 70_001)
    one = by_library(rule, update, num_threads=1)
    for threads in (2, 5):
        assert_same_bits(by_library(rule, update, num_threads=threads), one)


@pytest.mark.parametrize(("optimizer", "state"), STATES)
def test_values_that_are_not_finite_pass_alike(instruction_set, optimizer, state):
    torch.manual_seed(0)
    rule, update = random_update(optimizer, state, "fp32", 1024, torch.float32)
    grad = update.planes["grad"]
    grad[::97], grad[5::131], grad[7::151], grad[9::173] = torch.inf, -torch.inf, torch.nan, 3e38
    grad[512:768] = 0.0  # a block of zeros
    update.planes["weights"][3::177] = torch.nan
    actual, expected = by_library(rule, update, instruction_set=instruction_set), by_torch(rule, update)
    for name, plane in expected.planes.items():
        found = actual.planes[name]
        if plane.is_floating_point():
            assert torch.equal(found.isnan(), plane.isnan()), name
            assert torch.equal(found.nan_to_num(0.0, 1.0, -1.0), plane.nan_to_num(0.0, 1.0, -1.0)), name
        else:
            assert torch.equal(found, plane), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("optimizer", "state"), STATES)
def test_a_scale_that_is_not_finite_changes_nothing(optimizer, state, bad):
    rule, update = random_update(optimizer, state, "split", 600, scale=bad)
    assert_same_bits(by_library(rule, update), update)
    assert_same_bits(by_torch(rule, update), update)


def test_wrong_tensors_are_refused():
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
        ({"states": good.states[:1]}, "1 states were given"),
        ({"grad": planes["grad"][1:]}, "grad must be contiguous"),
        ({"blocks": blocks, "grad_scale": torch.ones(2)}, "grad_scale must be one number"),
        ({"blocks": blocks}, "steps must be contiguous"),
        ({"blocks": blocks._replace(exp_avg_scales=torch.zeros(2))}, "exp_avg_scales must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            native.update_("adamw", good._replace(**changes))
