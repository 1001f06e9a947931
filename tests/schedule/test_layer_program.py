"""Layer programs: save sets, recomputation, scratch by liveness, bytes by hand."""

from dataclasses import replace
from itertools import combinations

import pytest

from flexengine.models.matmul_dtype import with_fp8_linears
from flexengine.ops.base import Work
from flexengine.ops.fp8 import Fp8Linear
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layer_program import LayerProgram, OpStep, align
from flexengine.schedule.save_sets import recomputed, savable_ops, save_sets
from tests.schedule.golden_cases import balanced_experts
from tests.schedule.small_plans import small_model

TOKENS, WIDTH = 64, 4  # a chunk in float32


@pytest.fixture(scope="module")
def block():
    return small_model().blocks[0]


def test_save_sets_are_all_subsets_of_what_some_backward_reads(block):
    names = savable_ops(block.ops)
    assert names == ("attn_norm", "rope", "attention", "o_proj", "mlp_norm", "gate_up_proj", "swiglu")
    sets = save_sets(block.ops)
    assert len(sets) == len(set(sets)) == 2 ** len(names)
    assert sets[0] == ()


def test_saved_bytes_by_hand(block):
    # hidden 64, 4 query and 2 key/value heads of 16, FFN 192, float32: qkv 128 columns, o 64 columns + 4 statistics
    program = compile_layer(block, ("rope", "attention"), ("gate_up_proj",), TOKENS, WIDTH)
    assert program.save_gpu_bytes == TOKENS * 128 * 4 + TOKENS * 64 * 4 + align(TOKENS * 4 * 4)
    assert program.save_host_bytes == TOKENS * 384 * 4
    assert [p.spec.name for p in program.saved_gpu] == ["qkv", "o", "o_lse"]


def test_keeping_all_recomputes_nothing_and_keeping_nothing_spares_the_last_projection(block):
    everything = compile_layer(block, savable_ops(block.ops), (), TOKENS, WIDTH)
    assert everything.recompute_work(TOKENS, TOKENS, WIDTH) == Work()
    nothing = compile_layer(block, (), (), TOKENS, WIDTH)
    again = [step.op.name for step in nothing.backward if step.recompute]
    assert sorted(again) == sorted(op.name for op in block.ops if op.name != "down_proj")


def test_recompute_never_grows_with_the_save_set(block):
    def flops(kept: tuple[str, ...]) -> float:
        return compile_layer(block, kept, (), TOKENS, WIDTH).recompute_work(TOKENS, TOKENS, WIDTH).flops

    names = savable_ops(block.ops)
    for subset in save_sets(block.ops):
        for name in set(names) - set(subset):
            larger = tuple(n for n in names if n in subset or n == name)
            assert flops(larger) <= flops(subset)


@pytest.mark.parametrize(
    "kept", [(), ("rope",), ("gate_up_proj", "swiglu"), ("attention", "o_proj", "mlp_norm")], ids=str
)
def test_live_temporaries_never_overlap(block, kept):
    program = compile_layer(block, kept, (), TOKENS, WIDTH)
    for steps, limit in _scratch_of(program):
        lives = _lives(steps)
        assert all(end <= limit for _, _, _, end in lives.values())
        for a, b in combinations(lives.values(), 2):
            alive_together = a[0] <= b[1] and b[0] <= a[1]
            share_bytes = a[2] < b[3] and b[2] < a[3]
            assert not (alive_together and share_bytes) or a[2:] == b[2:]


def _scratch_of(program: LayerProgram) -> list[tuple[tuple[OpStep, ...], int]]:
    return [
        (program.forward, program.forward_scratch_bytes),
        (program.backward, program.backward_scratch_bytes),
        (program.window, program.window_scratch_bytes),
    ]


def _lives(steps: tuple[OpStep, ...]) -> dict[tuple[str, str, int], tuple[int, int, int, int]]:
    """(first step, last step, start, end) of every scratch tensor, told apart by name, kind and place."""
    lives: dict[tuple[str, str, int], tuple[int, int, int, int]] = {}
    for number, step in enumerate(steps):
        for kind, places in (("tensor", step.tensors), ("grad", step.grads)):
            for name, place in places:
                if place.area == "scratch":
                    key = (kind, name, place.offset)
                    first = lives[key][0] if key in lives else number
                    lives[key] = (first, number, place.offset, place.offset + place.spec.num_bytes(TOKENS, WIDTH))
    return lives


def test_a_buffer_of_both_backward_halves_is_one_that_nothing_else_touches_between():
    """FP8 linear layers leave the rounded gradient for the weight half."""
    program = compile_layer(with_fp8_linears(small_model()).blocks[0], (), (), TOKENS, 2)
    linears = [step for step in program.backward if isinstance(step.op, Fp8Linear) and step.half != "forward"]
    assert len(linears) == 2 * 4
    for made, used in zip(linears[::2], linears[1::2], strict=True):
        assert (made.op, made.half, used.half) == (used.op, "input", "weight")
        left, found = (dict(step.tensors)[f"{made.op.name}_grad8_t"] for step in (made, used))
        assert left == found
        between = program.backward[program.backward.index(made) + 1 : program.backward.index(used)]
        assert not between


def test_unknown_op_is_refused(block):
    with pytest.raises(ValueError, match="no op"):
        compile_layer(block, ("conv",), (), TOKENS, WIDTH)


def steps_of_experts(kept: tuple[str, ...], trained: bool = True) -> tuple[tuple[OpStep, ...], list[str]]:
    """Steps of backward of a block with experts; and what a plan without compiling takes for recomputed."""
    block = balanced_experts().blocks[0]
    ops = tuple(op if trained or op.name != "experts_down" else op.untrained() for op in block.ops)
    return compile_layer(replace(block, ops=ops), kept, (), TOKENS, WIDTH).backward, recomputed(ops, block.input, kept)


def test_a_gated_unit_writes_its_output_again_for_the_weights_behind_it():
    """It lies over its gradient, so that the weights' gradient comes after the unit, whose price has the bytes."""
    steps, again = steps_of_experts(("router",))
    order = [(step.op.name, step.half) for step in steps if not step.recompute]
    names = [step.op.name for step in steps if step.recompute]
    assert ["experts_glu" in found for found in (names, again)] == [False, False]
    assert ["experts_gate_up" in found for found in (names, again)] == [True, True]
    unit, product = order.index(("experts_glu", "input")), order.index(("experts_down", "weight"))
    assert order.index(("experts_down", "input")) < unit < product
    place = dict(_step(steps, "experts_glu").grads)["a"]
    assert dict(_step(steps, "experts_glu").tensors)["a"] == place
    assert dict(_step(steps, "experts_down", "weight").tensors)["a"] == place
    kept, _ = steps_of_experts(("router", "experts_glu"))
    more = _memory(steps, "experts_glu") - _memory(kept, "experts_glu")
    assert more == place.spec.num_bytes(TOKENS, WIDTH)


@pytest.mark.parametrize("kept", [("experts_glu",), ()], ids=["kept", "nobody reads it"])
def test_a_gated_unit_writes_nothing_that_is_there_or_that_nobody_reads(kept):
    steps, _ = steps_of_experts(kept, trained=bool(kept))
    assert "a" not in dict(_step(steps, "experts_glu").tensors)
    assert "experts_glu" not in [step.op.name for step in steps if step.recompute]


def _step(steps: tuple[OpStep, ...], name: str, half: str = "input") -> OpStep:
    """The only such step."""
    (found,) = (step for step in steps if (step.op.name, step.half) == (name, half))
    return found


def _memory(steps: tuple[OpStep, ...], name: str) -> float:
    return _step(steps, name).work(TOKENS, TOKENS, WIDTH).memory_bytes
