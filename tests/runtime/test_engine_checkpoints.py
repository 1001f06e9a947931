"""A training state saved by an engine and loaded by another: every later step has the bits it would have had."""

import pytest
from engine_helpers import (
    FLOAT32,
    ON_GPU,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    streamed_plan,
    tiny_config,
)

from flexengine.checkpoint.manifest import verify_manifest
from flexengine.plan import GroupPlan, Numerics

NUMERICS = {
    "float32": FLOAT32,
    "bf16, exact master": Numerics("bfloat16", "split", "bfloat16", "float32"),
    "bf16, stochastic rounding, bf16 states": Numerics("bfloat16", "stochastic", "bfloat16", "bfloat16"),
}
BY_CPU = GroupPlan(update="cpu")
BATCHES = [random_batch(seed, (20, 9, 31), 67) for seed in range(6)]


def planned(spec, kind, numerics):
    if kind == "on the GPU":
        return make_plan(spec, numerics=numerics, groups=[ON_GPU] * len(spec.groups))
    if kind == "updated by the CPU":
        return (
            streamed_plan(spec, numerics=numerics, prefetch=2)
            if False
            else make_plan(spec, numerics=numerics, groups=[BY_CPU] * len(spec.groups))
        )
    return streamed_plan(spec, numerics=numerics)


def train(engine, batches):
    """Losses and norms of steps, and the state they leave."""
    found = []
    for batch in batches:
        out, update = engine.train_step(batch)
        found += [out.loss, update.grad_norm]
    return found, engine.state_dict()


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
@pytest.mark.parametrize(
    "kinds", [("streamed", "on the GPU"), ("on the GPU", "updated by the CPU"), ("updated by the CPU", "streamed")]
)
def test_resumed_under_another_plan_bit_by_bit(tmp_path, numerics, kinds):
    source = random_weights(tiny_config())
    first, second = (planned(source.spec, kind, numerics) for kind in kinds)
    with build_engine(source, first, seed=3, max_grad_norm=None) as engine:
        train(engine, BATCHES[:3])
        engine.save_checkpoint(tmp_path / "step-3", {"position": 3})
        expected, weights = train(engine, BATCHES[3:])
    verify_manifest(tmp_path / "step-3")
    with build_engine(source, second, seed=3, max_grad_norm=None) as engine:
        assert engine.load_checkpoint(tmp_path / "step-3") == {"position": 3}
        assert engine.step_count == 3
        found, resumed = train(engine, BATCHES[3:])
    assert found == expected
    same_bits(resumed, weights)
