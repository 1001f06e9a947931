"""An interrupt at any line: the next step is right, or the engine refuses. bench.interrupts tries thousands."""

import inspect
import sys
from pathlib import Path

import pytest
from engine_helpers import build_engine, random_batch, random_weights, streamed_plan, tiny_config

from flexengine.runtime.step_runner import StepRunner

sys.path.append(str(Path(__file__).resolve().parents[2]))
interrupts = pytest.importorskip("bench.interrupts", reason="bench/ is not beside an installed package")

POINTS = 5


def judged(name, points, expected):
    return [interrupts.interrupted(name, point, expected) for point in points]


def wrong(outcomes):
    return [outcome for outcome in outcomes if outcome.outcome == "wrong"]


def test_an_interrupt_at_a_random_line():
    outcomes = interrupts.sample(POINTS, seed=1)
    assert len(outcomes) == POINTS
    assert not wrong(outcomes)
    assert any(outcome.outcome == "right" for outcome in outcomes)


def test_an_interrupt_where_a_call_ends():
    """When all is done and only the return is left."""
    name = "fwd_bwd, step"
    places, expected = interrupts.undisturbed(interrupts.STORIES[name])
    last = {place: point for point, place in enumerate(places, start=1) if place.startswith("runtime/one_caller")}
    assert len(last) > 5
    assert not wrong(judged(name, last.values(), expected))


def test_the_judge_sees_a_batch_that_counts_twice(monkeypatch):
    name = "fwd_bwd, step"
    places, expected = interrupts.undisturbed(interrupts.STORIES[name])
    lines, first = inspect.getsourcelines(StepRunner.forward_backward)
    returns = f"runtime/step_runner.py:{first + len(lines) - 1}"
    ends = [point for point, place in enumerate(places, start=1) if place == returns]
    assert judged(name, ends[:1], expected)[0].outcome == "right"
    monkeypatch.setattr("flexengine.runtime.step_state.StepState.drop_interrupted", lambda state: None)
    assert judged(name, ends[:1], expected)[0].outcome == "wrong"


def test_an_engine_that_was_half_closed_refuses_and_can_be_closed(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    config = tiny_config()
    source, batch = random_weights(config), random_batch(0, (20, 7), config["vocab_size"])
    engine = build_engine(source, streamed_plan(source.spec))
    engine.train_step(batch)
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "synchronize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    with pytest.raises(ValueError, match="it was closed"):
        engine.train_step(batch)
    engine.close()
