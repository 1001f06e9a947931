"""Updates by the GPU inside the last round change no bit, whether gradients are stored or not."""

from dataclasses import replace

import pytest
import torch
from tests.engine_helpers import (
    FLOAT32,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    shuffled_order,
    tiny_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.test_engine_plan_independence import NUMERICS, SETTINGS, batches, models, plan_decisions, sizes, tokens_of

from flexengine.optim import AdamW, Muon
from flexengine.plan import GroupPlan, Numerics

MAX_SEQ_LEN = 40
RULES = NUMERICS | {
    "8-bit states": Numerics("bfloat16", "stochastic", "bfloat16", "int8"),
    "muon": Numerics("bfloat16", "split", "bfloat16", "bfloat16", optimizer="muon"),
}


def in_round(plan):
    """The plan without clipping whose GPU updates inside the last round."""
    return replace(plan, request=replace(plan.request, clipping=False, gpu_updates="in_round"))


def unstored(spec, home, group):
    """The home with no place for a gradient that one layer makes."""
    once = sum(group in layer.groups for layer in spec.layers) == 1
    return replace(home, grads="none") if once and home.update == "gpu" else home


def trained(engine, tokens, num_steps=2):
    """Losses, norms and weights after steps of one call each."""
    found = []
    for number in range(num_steps):
        out, step = engine.train_step(tokens[number % len(tokens)])
        found += [out.loss, step.grad_norm]
    weights = engine.state_dict()
    engine.close()
    return found, weights


@pytest.mark.long
@settings(SETTINGS, max_examples=30)
@given(
    model=models(), lengths=batches(), size=sizes(), data=st.data(), rule=st.sampled_from(list(RULES)),
    stored=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_plan_gives_the_bits_of_the_resident_plan(model, lengths, size, data, rule, stored, seed):
    source = random_weights(model)
    spec, tokens = source.spec, tokens_of(lengths, source.spec)
    chunks = size[1] if stored else 24
    options = {"chunk_tokens": size[0], "chunks_per_round": chunks, "max_seq_len": MAX_SEQ_LEN, "numerics": RULES[rule]}
    rules = {"optimizer": Muon(lr=1e-2) if rule == "muon" else AdamW(lr=1e-2), "max_grad_norm": None}
    resident = build_engine(source, make_plan(spec, **options), **rules)
    decisions = data.draw(plan_decisions(spec))
    if rule in ("8-bit states", "muon"):
        decisions["groups"] = [GroupPlan() if home.update == "cpu" else home for home in decisions["groups"]]
    if not stored:
        decisions["groups"] = [unstored(spec, home, group) for group, home in enumerate(decisions["groups"])]
    plan = in_round(make_plan(spec, **options, **decisions))
    losses, weights = trained(build_engine(source, plan, order=shuffled_order(seed), **rules), tokens)
    expected, expected_weights = trained(resident, tokens)
    assert losses == expected
    same_bits(weights, expected_weights)
