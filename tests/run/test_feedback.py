"""From a measured step to another plan: what changes, what stays, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from flexengine.api import build, prepare
from flexengine.hardware.presets import preset
from flexengine.planner.bound.speed_of_light import speed_of_light_s
from flexengine.planner.correction import Factors, Review, corrected_prediction, corrected_profile
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.planner.ranks.price import review_for_ranks
from flexengine.run import feedback
from flexengine.schedule.layout import Layout
from tests.engine_helpers import random_batch, same_bits

MIB = 2**20


@pytest.fixture(scope="module")
def prepared():
    """A plan made for a link so fast that nothing is recomputed."""
    fast = preset("cpu-test").changed(
        **{f"{way}{both}_bytes_per_s": 1e15 for way in ("h2d", "d2h") for both in ("", "_duplex")},
    )
    return prepare(
        "preset:demo",
        max_seq_len=64,
        max_global_batch_tokens=256,
        max_gpu_mem_bytes=40 * MIB,
        dtype="float32",
        device="cpu",
        hardware=fast,
        chunk_tokens=64,
        round_tokens=128,
    )


def slow_link(prepared) -> Review:
    """What a step would have shown on a machine whose link is five million times slower."""
    factors = Factors(1.0, 5e6, 5e6)
    profile = corrected_profile(prepared.profile, factors)
    expected = corrected_prediction(Layout(prepared.source.spec, prepared.plan), profile)
    return Review(prepared.plan.predicted.step_s, expected.step_s, expected, factors, profile)


def test_a_slower_link_changes_the_plan_and_no_bit(prepared):
    found = slow_link(prepared)
    steady, changing = build(prepared), build(prepared)
    plan = feedback.faster_plan(prepared, changing, found)
    assert plan is not None
    assert plan.layers != prepared.plan.layers
    assert plan.predicted.step_s < found.expected.step_s
    assert plan.predicted.speed_of_light_s == speed_of_light_s(prepared.source.spec, plan.request, found.profile)
    assert (plan.chunk_tokens, plan.chunks_per_round) == (prepared.plan.chunk_tokens, prepared.plan.chunks_per_round)
    assert plan.predicted.gpu_bytes <= prepared.plan.predicted.gpu_bytes
    assert plan.predicted.host_bytes <= prepared.plan.predicted.host_bytes
    for step in range(3):
        batch = random_batch(step, (64, 30, 64, 5), 512)
        losses = [engine.fwd_bwd(batch).loss for engine in (steady, changing)]
        assert losses[0] == losses[1]
        assert steady.step().grad_norm == changing.step().grad_norm
        if step == 0:
            assert feedback.change_plan(prepared, changing, found).startswith("changed the plan")
            assert changing.plan == plan
    same_bits(changing.state_dict(), steady.state_dict())


def test_a_plan_without_a_faster_one_stays(prepared):
    engine = build(prepared)
    expected = prepared.plan.predicted
    same = Review(expected.step_s, expected.step_s, expected, Factors(), prepared.profile)
    assert feedback.change_plan(prepared, engine, same).startswith("the plan stays")
    assert engine.plan == prepared.plan


def test_a_corrected_prediction_decides_nothing_else(prepared):
    engine, found = build(prepared), slow_link(prepared)
    feedback.correct_prediction(engine, found)
    assert engine.plan.predicted == found.expected
    assert replace(engine.plan, predicted=prepared.plan.predicted) == prepared.plan
    engine.fwd_bwd(random_batch(0, (64, 30), 512))
    engine.step()


def test_what_is_expected_of_several_ranks_is_of_all_together(prepared):
    request = replace(prepared.plan.request, ranks=2, max_global_batch_tokens=512)
    plan = plan_for_ranks(prepared.source.spec, request, prepared.profile)
    found = review_for_ranks(plan, prepared.source.spec, prepared.profile, {}, measured_step_s=1.0)
    assert found.factors == Factors()
    assert found.expected == plan.predicted


def test_a_step_that_beats_its_bound_mends_the_remembered_rates(prepared, monkeypatch, capsys):
    """Compute took a tenth of what was predicted: the profile was measured while the machine was busy."""
    measured = replace(prepared, profile=replace(prepared.profile, source="measured"))
    remembered = {}

    def mend(device, dtype, shape, mended):
        remembered["profile"] = mended(measured.profile)
        return True

    monkeypatch.setattr("flexengine.api.mend", mend)
    reviewer = feedback.Reviewer.__new__(feedback.Reviewer)
    reviewer.planned, reviewer.engine = measured, build(prepared)
    factors = Factors(0.1, 1.0, 2.0, 1.0)
    found = replace(slow_link(prepared), factors=factors)
    metrics = SimpleNamespace(step=3, step_s=10.0, sol_pct=80.0)
    reviewer._mend(metrics, found)
    assert not remembered
    reviewer._mend(SimpleNamespace(step=3, step_s=10.0, sol_pct=1470.0), found)
    assert "step 3 took 10.0 s, less than the 2 min 27 s" in capsys.readouterr().out
    mended = remembered["profile"]
    before = measured.profile
    assert mended.matmul.peak_flops_per_s == pytest.approx(10 * before.matmul.peak_flops_per_s)
    assert mended.matmul.flops_per_s[0][1] == pytest.approx(10 * before.matmul.flops_per_s[0][1])
    assert mended.link.d2h_bytes_per_s == before.link.d2h_bytes_per_s, "a stream that was slower stays"
    assert reviewer.engine.matmul_flops_per_s == mended.matmul.peak_flops_per_s
