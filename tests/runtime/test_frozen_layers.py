"""Frozen groups: the gradients of the others and the losses as without, weights that never move, under any plan."""

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    shuffled_order,
    streamed_plan,
    tiny_config,
)

from flexengine.models.freezing import with_frozen
from flexengine.optim.rounding import round_bf16_ties_away
from flexengine.plan import Numerics

NUMERICS = {
    "float32": FLOAT32,
    "bf16, exact master": Numerics("bfloat16", "split", "bfloat16", "float32"),
    "bf16, stochastic rounding": Numerics("bfloat16", "stochastic", "bfloat16", "bfloat16"),
}
FROZEN = (
    ("embed",),
    ("head",),
    ("blocks",),
    ("embed", "blocks"),
    ("embed", "block.0-1"),
    ("block.1", "head"),
    ("embed", "block.0", "block.2", "head"),
)


def sources(tied: bool, *names: str):
    whole = random_weights(tiny_config(num_hidden_layers=3, tie_word_embeddings=tied))
    return whole, whole._replace(spec=with_frozen(whole.spec, names))


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("names", FROZEN, ids=" ".join)
def test_gradients_of_what_is_trained_are_those_of_a_model_without_frozen_layers(names, tied, numerics):
    whole, frozen = sources(tied, *names)
    tokens = random_batch(1, (40, 7, 33, 20), 67)
    trained = {s.name for g in frozen.spec.groups if not g.frozen for p in g.params for s in p.sources}
    engines = []
    for source, make in ((whole, make_plan), (frozen, make_plan), (frozen, streamed_plan)):
        plan = make(source.spec, chunk_tokens=24, chunks_per_round=3, numerics=NUMERICS[numerics])
        engines.append(build_engine(source, plan, order=shuffled_order(3)))
    before = engines[0].state_dict()
    outs = [[engine.fwd_bwd(tokens).loss for _ in range(2)] for engine in engines]
    assert outs[1] == outs[0]
    assert outs[2] == outs[0]
    expected = {name: grad for name, grad in engines[0].gradients().items() if name in trained}
    for engine in engines[1:]:
        same_bits(engine.gradients(), expected)
        norm = torch.stack([grad.double().square().sum() for grad in expected.values()]).sum().sqrt()
        assert engine.step().grad_norm == pytest.approx(float(norm), rel=1e-5)
        after = engine.state_dict()
        for name, value in after.items():
            used = before[name] if numerics == "float32" else round_bf16_ties_away(before[name]).float()
            assert torch.equal(value, used) == (name not in trained)
