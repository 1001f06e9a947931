"""Steps predicted from their own batches, against simulations with the compute of every single chunk."""

from dataclasses import replace

import pytest

from flexengine.api import prepare
from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.planner.cost.cost_model import CostModel, StepPricer
from flexengine.run.step_prediction import StepPredictor
from flexengine.schedule.commands import LayerCall
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import pack, packed_shape
from flexengine.schedule.programs import lower_round
from flexengine.schedule.simulator import simulate
from flexengine.schedule.step_parts import simulated_rounds

FULL = [64] * 8
BATCHES = {
    "lengths": [60, 64, 3, 20, 30, 64, 41, 9, 64, 50, 33, 7, 64, 1],
    "short": [12, 9, 5, 20, 3],
    "one": [5],
}


def predictor_on(profile: HardwareProfile) -> StepPredictor:
    prepared = prepare(
        "preset:demo",
        max_seq_len=64,
        max_global_batch_tokens=512,
        max_gpu_mem_bytes=40 * 2**20,
        dtype="float32",
        device="cpu",
        hardware=profile,
        chunk_tokens=128,
        round_tokens=256,
    )
    return StepPredictor(prepared.plan, prepared.source.spec, prepared.profile)


@pytest.fixture(scope="module")
def predicted() -> StepPredictor:
    return predictor_on(preset("cpu-test"))


def chunk_by_chunk_s(predicted: StepPredictor, lengths: list[int]) -> float:
    """Simulate a step whose every layer call has the work of its own chunk."""
    plan, layout = predicted.plan, Layout(predicted.model, predicted.plan)
    cost = CostModel.of(plan.request, predicted.profile, plan.chunk_tokens)
    total_s = StepPricer(predicted.profile).update(layout, cost).step_s
    for number, chunks in enumerate(pack(lengths, plan.chunk_tokens, plan.chunks_per_round)):

        def compute_s(command, chunks=chunks):
            if not isinstance(command.args, LayerCall):
                return cost.work_s(command.work)
            parts = [part.length for part in chunks[command.args.chunk].ranges]
            tokens, seq_len = sum(parts), round(sum(part**2 for part in parts) / sum(parts))
            stage = command.args.program.stages(command.kind)[command.args.stage]
            own = replace(cost, chunk_tokens=tokens, seq_len=seq_len)
            return own.work_s(stage.work(tokens, seq_len, cost.compute_bytes))

        program = lower_round(layout, packed_shape(chunks, plan.chunk_tokens), first=number == 0)
        total_s += simulate(program, cost.rates()._replace(compute_s=compute_s)).total_s
    return total_s


def test_a_full_batch_takes_what_the_plan_says(predicted):
    assert predicted.step_s(FULL) == predicted.plan.predicted.step_s
    assert predicted.chunk_share(FULL) == pytest.approx(1.0)


@pytest.mark.parametrize(("name", "within"), [("lengths", 0.03), ("short", 0.03), ("one", 0.1)])
def test_a_ragged_batch_takes_what_its_own_chunks_take(predicted, name, within):
    assert not predicted.plan.updates_on_cpu
    assert predicted.step_s(BATCHES[name]) == pytest.approx(chunk_by_chunk_s(predicted, BATCHES[name]), rel=within)
    assert predicted.chunk_share(BATCHES[name]) < 1


def test_attention_counts_at_the_rate_for_its_own_lengths():
    """Programs price a chunk that is one sequence at the rate for the plan's, which may be half of the chunk's."""
    profile = preset("cpu-test")
    slow, fast = 1e-3 * profile.matmul.peak_flops_per_s, 1e-1 * profile.matmul.peak_flops_per_s
    rates = ((16, slow), (64, slow), (128, fast))
    predicted = predictor_on(profile.changed(attention_forward_flops_per_s=rates, attention_backward_flops_per_s=rates))
    lengths = BATCHES["lengths"]
    assert predicted.step_s(lengths) == pytest.approx(chunk_by_chunk_s(predicted, lengths), rel=0.03)


@pytest.mark.parametrize("name", ["short", "one"])
def test_a_batch_that_is_not_full_takes_less(predicted, name):
    assert predicted.step_s(BATCHES[name]) < predicted.plan.predicted.step_s


def test_shorter_sequences_of_as_many_tokens_take_less(predicted):
    long, short = (predicted.step_s([length] * (512 // length)) for length in (64, 16))
    assert short < long


def test_the_first_round_alone_waits_for_its_batch(predicted):
    layout = Layout(predicted.model, predicted.plan)
    rates = CostModel.of(predicted.plan.request, predicted.profile, predicted.plan.chunk_tokens).rates()
    at_once, late = (simulated_rounds(layout, rates._replace(batch_s=s)) for s in (0.0, 0.5))
    assert len(at_once) > 1
    waits = [after.timing.total_s - before.timing.total_s for before, after in zip(at_once, late, strict=True)]
    assert waits == pytest.approx([0.5] + [0.0] * (len(waits) - 1))
