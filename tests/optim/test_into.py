"""Updates into other tensors have the bits of updates in place, and leave what they read as it was."""

import pytest
import torch

from flexengine.native import adamw, library
from flexengine.native import update as native
from flexengine.optim.into import update_into
from tests.rule_helpers import FLOATS, MASTERS, assert_same_bits, copied, random_update


def filled(update, skip: int):
    """A tensor for every plane but the gradient, `skip` elements into its memory, filled with what is no result."""
    planes = {name: plane for name, plane in update.planes.items() if name != "grad"}
    return {name: torch.full((len(p) + skip,), -77, dtype=p.dtype)[skip:] for name, p in planes.items()}


def check(rule, update, skip: int):
    expected, before, targets = copied(update), copied(update), filled(update, skip)
    update_into(rule, update, targets)
    rule.update(expected)
    assert_same_bits(update, before)
    assert_same_bits(update._replace(planes={**targets, "grad": update.planes["grad"]}), expected)


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(("optimizer", "state"), FLOATS)
@pytest.mark.parametrize("path", ["torch", *adamw.instruction_sets()])
def test_bits_of_an_update_in_place(monkeypatch, path, optimizer, state, master):
    if path == "torch":
        monkeypatch.setattr(library, "load", lambda: None)
    else:
        into = native.update_into
        monkeypatch.setattr(native, "update_into", lambda *args: into(*args, 3, path))
    torch.manual_seed(1)
    for count, skip in ((1, 0), (1023, 1), (5001, 0), (40_003, 3)):  # targets on borders of 16 bytes, and not
        check(*random_update(optimizer, state, master, count, element_offset=2**32 - count // 2), skip)


@pytest.mark.skipif(library.load() is None, reason="the native library is missing")
def test_the_native_path_refuses_targets_of_other_types():
    rule, update = random_update("adamw", "float32", "fp32", 10)
    name, call = rule.native(update)
    halves = tuple(state.bfloat16() for state in call.states)
    with pytest.raises(ValueError, match="dtypes of what is read"):
        native.update_into(name, call, native.Targets(call.weight.clone(), None, halves))


def test_states_in_blocks_have_no_such_update():
    rule, update = random_update("adamw", "int8", "split", 300)
    with pytest.raises(ValueError, match="no update into other tensors"):
        update_into(rule, update, filled(update, 0))
