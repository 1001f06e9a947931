"""Changing the plan between steps changes where everything lies and no bit of any result; measuring changes nothing."""

from random import Random

import pytest
import torch

from flexengine.plan import GroupPlan, LayerPlan, Numerics
from flexengine.runtime import arena, engine
from flexengine.schedule.save_sets import savable_ops
from tests.engine_helpers import (
    FLOAT32,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    streamed_plan,
    tiny_config,
)
from tests.thorough import cases

NUMERICS = {
    "float32": FLOAT32,
    "split": Numerics(),
    "stochastic": Numerics(master="stochastic", state="bfloat16"),
}
SPARE_BYTES = 4 << 20


@pytest.fixture
def roomy_arenas(monkeypatch):
    """Arenas with more room than the first plan needs."""

    class Roomy(arena.Arenas):
        def __init__(self, device, gpu_bytes, host_bytes):
            super().__init__(device, gpu_bytes + SPARE_BYTES, host_bytes + SPARE_BYTES)

    monkeypatch.setattr(engine, "Arenas", Roomy)


def random_decisions(random: Random, spec) -> dict:
    names = savable_ops(spec.blocks[0].ops)

    def block() -> LayerPlan:
        where = {name: random.choice(("gpu", "host", "recompute")) for name in names}
        kept = [tuple(n for n in names if where[n] == home) for home in ("gpu", "host")]
        return LayerPlan(*kept, random.choice(("gpu", "host")))

    def group() -> GroupPlan:
        weights = random.choice(("gpu", "host"))
        states = random.choice(("gpu", "host")) if weights == "gpu" else "host"
        return GroupPlan(weights, random.choice(("gpu", "host")), states)

    slots = {f"{kind}_slots": random.randint(1, 3) for kind in ("weight", "grad", "save", "optimizer")}
    blocks, groups = [block() for _ in spec.blocks], [group() for _ in spec.groups]
    flags = {flag: random.random() < 0.5 for flag in ("share_edge_slots", "grads_over_weights")}
    return {"blocks": blocks, "groups": groups, **flags, **slots}


def take_step(trained, seed: int, vocab_size: int) -> tuple[float, float]:
    out = trained.fwd_bwd(random_batch(seed, (48, 20, 7, 33), vocab_size))
    return out.loss, trained.step().grad_norm


@pytest.mark.usefixtures("roomy_arenas")
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("seed", cases(range(2), [0]))
def test_plans_may_change_between_steps(numerics, seed):
    random = Random(seed)
    source = random_weights(tiny_config(num_hidden_layers=3, tie_word_embeddings=seed % 2 == 1))
    options = {"numerics": NUMERICS[numerics]}
    plans = [make_plan(source.spec, **options, **random_decisions(random, source.spec)) for _ in range(4)]
    steady = build_engine(source, make_plan(source.spec, **options))
    changing = build_engine(source, plans[0])
    for step, plan in enumerate(plans):
        changing.adopt(plan, f"plan {step}")
        assert changing.describe() == f"plan {step}"
        assert take_step(changing, step, source.spec.vocab_size) == take_step(steady, step, source.spec.vocab_size)
    same_bits(changing.state_dict(), steady.state_dict())


def test_shifting_pieces_keep_their_order(monkeypatch):
    monkeypatch.setattr(arena, "RELOCATION_PIECE_BYTES", 7)
    arenas = arena.Arenas(torch.device("cpu"), 256, 256)
    whole = arenas.bytes_view("host", 0, 256)
    for source, target in ((10, 13), (13, 10), (0, 1), (30, 0)):
        whole.copy_(torch.arange(256, dtype=torch.uint8))
        spans = [arena.ByteRange("host", start, 100) for start in (source, target)]
        arenas.relocate([arena.Copy(*spans)])
        expected = torch.arange(source, source + 100, dtype=torch.uint8)
        assert torch.equal(arenas.bytes_view("host", target, 100), expected)


def test_refused_changes_change_nothing():
    source = random_weights(tiny_config())
    trained = build_engine(source, make_plan(source.spec))
    before = trained.state_dict()
    with pytest.raises(ValueError, match="arena, which has"):
        trained.adopt(streamed_plan(source.spec))
    with pytest.raises(ValueError, match="same numerics"):
        trained.adopt(make_plan(source.spec, max_seq_len=32))
    trained.fwd_bwd(random_batch(0, (30,), source.spec.vocab_size))
    with pytest.raises(ValueError, match=r"call step\(\) first"):
        trained.adopt(trained.plan)
    same_bits(trained.state_dict(), before)
    trained.step()


def test_measuring_a_step_times_every_command_and_changes_no_bit():
    source = random_weights(tiny_config())
    plain, measured = (build_engine(source, streamed_plan(source.spec)) for _ in range(2))
    for step in range(3):
        if step == 1:
            measured.measure_next_step()
        assert take_step(measured, step, 67) == take_step(plain, step, 67)
    assert plain.command_totals == {}
    totals = measured.command_totals
    assert {("compute", "forward", "block"), ("compute", "backward", "head"), ("h2d", "copy", "")} <= totals.keys()
    assert totals["compute", "update", ""].count > 0
    assert all(total.seconds > 0 for total in totals.values())
    assert totals["d2h", "copy", ""].num_bytes > 0
    rounds_of_chunks = totals["compute", "forward", "embedding"].count
    assert totals["compute", "forward", "block"].count == len(source.spec.blocks) * rounds_of_chunks


def test_the_programs_of_a_measured_step_are_kept_in_order():
    source = random_weights(tiny_config())
    trained = build_engine(source, streamed_plan(source.spec))
    trained.measure_next_step(keep_runs=True)
    trained.fwd_bwd(random_batch(0, (30, 12, 41), 67))
    trained.fwd_bwd(random_batch(1, (48, 9, 20), 67))
    seconds = trained.step().seconds
    runs = trained.take_timed_runs()
    assert [run.program.name for run in runs] == ["round"] * (len(runs) - 1) + ["update"]
    assert len(runs) > 3
    end_s = 0.0
    for run in runs:
        assert len(run.spans_s) == len(run.program.commands)
        assert run.start_s >= end_s
        end_s = run.start_s + run.timing.total_s
        busy_s = run.timing.busy_s
        assert sum(busy_s.values()) <= run.timing.total_s + 1e-9  # on the CPU commands run one after the other
    assert 0.0 < end_s <= seconds
    assert trained.take_timed_runs() == []
    take_step(trained, 1, 67)
    assert trained.take_timed_runs() == []
    trained.measure_next_step()
    take_step(trained, 2, 67)
    assert trained.command_totals
    assert trained.take_timed_runs() == []


def test_evaluating_is_no_part_of_a_measured_step():
    source = random_weights(tiny_config())
    trained, evaluated = (build_engine(source, streamed_plan(source.spec)) for _ in range(2))
    for built in (trained, evaluated):
        built.measure_next_step()
    evaluated.evaluate(random_batch(0, (30, 12), 67))
    evaluated.next_token_logits([1, 2, 3])
    for built in (trained, evaluated):
        take_step(built, 1, 67)
    counts = [{key: total.count for key, total in b.command_totals.items()} for b in (trained, evaluated)]
    assert counts[0] == counts[1]
