"""train_step: the same bits as fwd_bwd and step, and without clipping the CPU's updates inside the last backward."""

import math
import os
import threading

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    before_cpu_updates,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    shuffled_order,
    streamed_plan,
    tiny_config,
)
from thorough import cases

from flexengine.plan import GroupPlan, LayerPlan, Numerics
from flexengine.runtime.execution.bound_program import NO_FENCE
from flexengine.runtime.execution.executor import Executor
from flexengine.schedule.commands import Stream

PATIENCE_S = 60.0
BF16 = Numerics("bfloat16", "split", "bfloat16", "bfloat16")
SOURCES = {tied: random_weights(tiny_config(num_hidden_layers=3, tie_word_embeddings=tied)) for tied in (False, True)}
LENGTHS = {"one round": [30, 11], "rounds": [30, 11, 40, 7, 22, 35, 40, 13]}
BATCHES = {rounds: [random_batch(i, lengths, 67) for i in range(3)] for rounds, lengths in LENGTHS.items()}


def plan_of(source, by_cpu, numerics=FLOAT32, **decisions):
    """Which groups the CPU updates: every, no or each second one."""
    levels = {"all": ["cpu"], "none": ["gpu"], "some": ["cpu", "gpu"]}[by_cpu]
    groups = [GroupPlan(update=levels[i % len(levels)]) for i in range(len(source.spec.groups))]
    blocks = [LayerPlan((), (), "host")] * len(source.spec.blocks)
    sizes = {"chunk_tokens": 64, "chunks_per_round": 2, "max_seq_len": 40}
    return make_plan(source.spec, **sizes, numerics=numerics, groups=groups, blocks=blocks, **decisions)


def new_engine(by_cpu="all", tied=False, max_grad_norm=None, numerics=FLOAT32, **options):
    source = SOURCES[tied]
    return build_engine(source, plan_of(source, by_cpu, numerics), max_grad_norm=max_grad_norm, **options)


def trained(engine, batches, at_once=True):
    """(loss, norm, skipped) of every step, and the weights."""
    outcomes = []
    for batch in batches:
        out, update = engine.train_step(batch) if at_once else (engine.fwd_bwd(batch), engine.step())
        outcomes.append((out.loss, update.grad_norm, update.skipped))
    weights = engine.state_dict()
    engine.close()
    return outcomes, weights


WAYS = [
    (rounds, tied, max_grad_norm, numerics)
    for rounds in BATCHES
    for max_grad_norm in (None, 0.5)
    for tied, numerics in ((False, FLOAT32), (True, BF16))
]
EVERY_PAIR = [way for i, way in enumerate(WAYS) if i % 8 in (0, 3, 5, 6)]
"""Of rounds, clipping and numerics every pair of two occurs."""


@pytest.mark.parametrize(("rounds", "tied", "max_grad_norm", "numerics"), cases(WAYS, EVERY_PAIR), ids=str)
def test_the_same_bits_as_two_calls_whoever_updates(rounds, tied, max_grad_norm, numerics):
    options = {"tied": tied, "max_grad_norm": max_grad_norm, "numerics": numerics}
    expected = trained(new_engine("none", **options), BATCHES[rounds], at_once=False)
    for by_cpu in ("all", "some", "none"):
        outcomes, weights = trained(new_engine(by_cpu, **options), BATCHES[rounds])
        assert outcomes == expected[0], by_cpu
        same_bits(weights, expected[1])


@pytest.mark.parametrize("seed", range(3))
def test_any_order_that_respects_waits_gives_the_same_bits(seed):
    expected = trained(new_engine("none"), BATCHES["rounds"])
    outcomes, weights = trained(new_engine("some", order=shuffled_order(seed)), BATCHES["rounds"])
    assert outcomes == expected[0]
    same_bits(weights, expected[1])


@pytest.mark.parametrize("rounds", BATCHES)
def test_slow_updates_give_the_same_bits(monkeypatch, rounds):
    expected = trained(new_engine("none"), BATCHES[rounds])
    before_cpu_updates(monkeypatch, lambda: threading.Event().wait(0.01))
    outcomes, weights = trained(new_engine("all"), BATCHES[rounds])
    assert outcomes == expected[0]
    same_bits(weights, expected[1])


def test_without_waiting_they_would_not(monkeypatch):
    """The test above can fail."""
    expected = trained(new_engine("none"), BATCHES["rounds"])
    before_cpu_updates(monkeypatch, lambda: threading.Event().wait(0.01))
    monkeypatch.setattr(Executor, "_fence", lambda self, program: NO_FENCE)
    assert trained(new_engine("all"), BATCHES["rounds"])[0] != expected[0]


@pytest.mark.parametrize("rounds", BATCHES)
def test_after_gradients_of_earlier_calls(rounds):
    earlier, batch = BATCHES[rounds][:2]
    outcomes = []
    for at_once in (True, False):
        engine = new_engine()
        engine.fwd_bwd(earlier)
        outcomes.append(trained(engine, [batch, earlier], at_once))
    assert outcomes[0][0] == outcomes[1][0]
    same_bits(outcomes[0][1], outcomes[1][1])


def test_without_clipping_the_cpu_updates_in_the_last_round():
    engine = new_engine("some")
    engine.measure_next_step(keep_runs=True)
    engine.train_step(BATCHES["rounds"][0])
    *rounds, update = engine.take_timed_runs()
    on_cpu = [[c for c in run.program.commands if c.stream is Stream.CPU] for run in rounds]
    assert len(rounds) > 1
    assert not any(on_cpu[:-1])
    assert {c.args.group for c in on_cpu[-1]} == {0, 2, 4}
    backward = [c for c in rounds[-1].program.commands if c.kind == "backward"]
    assert on_cpu[-1][0].index < backward[-1].index  # the first update does not wait for the end
    assert {c.args.group for c in update.program.commands if c.kind == "update"} == {1, 3}
    assert rounds[-1].timing.busy_s[Stream.CPU] > 0
    engine.close()


def test_with_clipping_nothing_is_updated_before_the_norm_is_known():
    engine = new_engine("all", max_grad_norm=1.0)
    engine.measure_next_step(keep_runs=True)
    engine.train_step(BATCHES["rounds"][0])
    *rounds, update = engine.take_timed_runs()
    assert not any(c.stream is Stream.CPU for run in rounds for c in run.program.commands)
    assert any(c.stream is Stream.CPU for c in update.program.commands)
    engine.close()


def test_a_step_returns_before_its_updates_have_ended(monkeypatch):
    go_on, waited = threading.Event(), []
    before_cpu_updates(monkeypatch, lambda: waited.append(go_on.wait(PATIENCE_S)))
    engine = new_engine("all")
    _, update = engine.train_step(BATCHES["one round"][0])
    assert update.grad_norm > 0
    assert False not in waited
    go_on.set()
    engine.train_step(BATCHES["one round"][1])
    engine.close()
    assert waited
    assert all(waited)


def test_a_failure_of_the_cpu_is_raised_by_what_comes_next(monkeypatch):
    def fail():
        raise RuntimeError("the update broke")

    before_cpu_updates(monkeypatch, fail)
    engine = new_engine("all")
    engine.train_step(BATCHES["one round"][0])
    with pytest.raises(RuntimeError, match="the update broke"):
        engine.train_step(BATCHES["one round"][1])
    with pytest.raises(RuntimeError, match="the update broke"):
        engine.close()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("by_cpu", ["all", "some", "none"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite(max_grad_norm, by_cpu, at_once):
    """With clipping no layer is updated, without it all but that of the gradient."""
    engine = new_engine(by_cpu, max_grad_norm=max_grad_norm)
    before, handlers, broken = engine.state_dict(), engine.handlers.by_kind, 2
    finish = handlers["finish_gradient"]

    def finish_badly(command, *rest):
        if command.args.group == broken:
            slot = engine.layout.slots[command.args.accumulator]
            engine.arenas.view(slot, 0, (1,), torch.float32).fill_(math.inf)
        finish(command, *rest)

    handlers["finish_gradient"] = finish_badly
    outcomes, after = trained(engine, BATCHES["one round"][:1], at_once)
    assert outcomes[0][1:] == (math.inf, True)
    for name, run in engine.weights.runs.items():
        stays = max_grad_norm is not None or run.group == broken
        assert torch.equal(before[name], after[name]) == stays, name
    assert engine.step_count == (max_grad_norm is None)


def test_an_interrupted_last_round_ends_the_engine(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    engine = new_engine("all")
    with monkeypatch.context() as patch:
        patch.setattr(engine.handlers, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.train_step(BATCHES["one round"][0])
    with pytest.raises(ValueError, match="an optimizer step was interrupted, so its weights are half updated"):
        engine.train_step(BATCHES["one round"][0])
    engine.close()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_bad_learning_rate_is_refused_before_anything_runs(max_grad_norm):
    engine = new_engine("all", max_grad_norm=max_grad_norm)
    with pytest.raises(ValueError, match="lr must be a finite number >= 0, got -1"):
        engine.train_step(BATCHES["one round"][0], lr=-1.0)
    with pytest.raises(ValueError, match="call fwd_bwd"):
        engine.step()
    fresh = new_engine("all", max_grad_norm=max_grad_norm)
    outcomes = [trained(either, BATCHES["one round"]) for either in (engine, fresh)]
    assert outcomes[0][0] == outcomes[1][0]


def test_the_learning_rate_is_that_of_the_call():
    plain, called = new_engine("all", optimizer=None), new_engine("all")
    plain.train_step(BATCHES["one round"][0], lr=0.0)
    before = called.state_dict()
    same_bits(plain.state_dict(), before)
    called.train_step(BATCHES["one round"][0], lr=1e-3)
    assert any(not torch.equal(value, before[name]) for name, value in called.state_dict().items())
    for engine in (plain, called):
        engine.close()


def gpu_source():
    """Weights of shapes that the kernels on a GPU take."""
    widths = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 700}
    return random_weights(tiny_config(**widths, num_hidden_layers=4, vocab_size=2003, initializer_range=0.05))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1024, 2), (256, 4)], ids=["packed", "sliced"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_cuda_gives_the_same_bits_whoever_updates(sizes, max_grad_norm):
    source = gpu_source()
    options = {"chunk_tokens": sizes[0], "chunks_per_round": sizes[1], "max_seq_len": 1000, "numerics": BF16}
    batches = [random_batch(i, n, 2003) for i, n in enumerate([(700, 130, 1000, 65, 900), (300, 513, 90), (200, 800)])]
    outcomes = []
    for update, at_once in (("gpu", False), ("cpu", False), ("cpu", True)):
        groups = [GroupPlan(update=update)] * len(source.spec.groups)
        plan = streamed_plan(source.spec, **options)
        plan = make_plan(source.spec, **options, blocks=plan.layers[1:-1], groups=groups)
        engine = build_engine(source, plan, device="cuda", deterministic=True, max_grad_norm=max_grad_norm)
        outcomes.append(trained(engine, batches * 3, at_once))
    for losses, weights in outcomes[1:]:
        assert losses == outcomes[0][0]
        same_bits(weights, outcomes[0][1])


def story(engine, batches):
    """Losses and norms of steps of every kind, an evaluation and a measured step in between; and the weights."""
    losses = []
    for index, batch in enumerate(batches):
        if index == 4:
            engine.measure_next_step(keep_runs=True)
        if index == 2:
            losses.append(engine.fwd_bwd(batch).loss)
            losses.append(engine.step().grad_norm)
        else:
            out, update = engine.train_step(batch)
            losses += [out.loss, update.grad_norm]
        if index == 1:
            losses.append(engine.evaluate(batch).loss)
    weights = engine.state_dict()
    engine.close()
    return losses, weights


@pytest.mark.parametrize("rounds", BATCHES)
def test_a_slow_cpu_and_other_calls_in_between(monkeypatch, rounds):
    """Updates that go on far into the next step."""
    expected = story(new_engine("none"), BATCHES[rounds] * 2)
    before_cpu_updates(monkeypatch, lambda: threading.Event().wait(0.005))
    losses, weights = story(new_engine("all"), BATCHES[rounds] * 2)
    assert losses == expected[0]
    same_bits(weights, expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(700, 130), (700, 130, 1000, 65, 900, 800)], ids=["one round", "rounds"])
def test_cuda_with_a_slow_cpu_and_other_calls_in_between(monkeypatch, lengths):
    source = gpu_source()
    options = {"chunk_tokens": 1024, "chunks_per_round": 3, "max_seq_len": 1000, "numerics": BF16}
    batches = [random_batch(i, lengths, 2003) for i in range(6)]
    blocks = streamed_plan(source.spec, **options).layers[1:-1]

    def engine_of(update):
        groups = [GroupPlan(update=update)] * len(source.spec.groups)
        plan = make_plan(source.spec, **options, blocks=blocks, groups=groups)
        return build_engine(source, plan, device="cuda", deterministic=True, max_grad_norm=None)

    expected = story(engine_of("gpu"), batches)
    before_cpu_updates(monkeypatch, lambda: threading.Event().wait(0.02))
    losses, weights = story(engine_of("cpu"), batches)
    assert losses == expected[0]
    same_bits(weights, expected[1])
