"""Experts that cross the link part by part: equal to transformers, and bit for bit to experts that do not."""

from dataclasses import replace

import pytest
from engine_helpers import ON_GPU, build_engine, make_plan, random_batch, same_bits, saved_model, spec_of, streamed_plan
from family_checks import MAX_SEQ_LEN, check_against_transformers
from family_configs import CASES, FAMILY_CASES

from flexengine.models import blocks
from flexengine.models.in_parts import in_parts, may_be_in_parts
from flexengine.models.registry import open_model
from flexengine.optim import AdamW
from flexengine.plan import GroupPlan

WITH_EXPERTS = [
    name for name, config in CASES.items() if any(op.name == "gather" for b in spec_of(config).blocks for op in b.ops)
]
FAMILIES = [family for family, case in FAMILY_CASES.items() if case in WITH_EXPERTS]


@pytest.fixture(autouse=True)
def one_expert_each(monkeypatch):
    """Every expert may be a part of its own."""
    monkeypatch.setattr(blocks, "PART_ELEMENTS", 1)


@pytest.mark.parametrize("chunk_tokens", [MAX_SEQ_LEN, 20], ids=["whole sequences", "cut sequences"])
@pytest.mark.parametrize("case", WITH_EXPERTS)
def test_parts_match_transformers(case, chunk_tokens, tmp_path):
    check_against_transformers(CASES[case], chunk_tokens, tmp_path, in_parts=True)


def trained(folder, plan, steps=2, clip=0.5):
    """Losses and weights after some steps."""
    engine = build_engine(open_model(folder), plan, AdamW(lr=1e-2), max_grad_norm=clip)
    losses = []
    for step in range(steps):
        losses.append(engine.fwd_bwd(random_batch(step, [48, 3, 20, 17, 31, 40], engine.model.vocab_size)).loss)
        engine.step()
    found = losses, engine.state_dict()
    engine.close()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_keep_the_bits(family, tmp_path):
    """In parts or not, all of them or those of touched experts, streamed or resident, updated by either processor, with
    several rounds and clipped gradients."""
    config = CASES[FAMILY_CASES[family]]
    saved_model(tmp_path, config)
    spec = spec_of(config)
    assert may_be_in_parts(spec)
    assert not may_be_in_parts(in_parts(spec))
    sizes = {"chunk_tokens": 20, "chunks_per_round": 3, "max_seq_len": MAX_SEQ_LEN}
    streamed = streamed_plan(spec, **sizes)
    expected = trained(tmp_path, streamed)
    homes = [GroupPlan(update="cpu"), ON_GPU, GroupPlan(weights="gpu"), GroupPlan(grads="gpu")]
    groups = [homes[i % len(homes)] for i in range(len(spec.groups))]
    plans = [
        make_plan(spec, **sizes),
        replace(streamed, in_parts=True),
        replace(streamed, in_parts=True, weight_slots=1, grad_slots=1, touched_only=True),
        replace(streamed, in_parts=True, weight_slots=5, grad_slots=3, groups=tuple(groups), touched_only=True),
    ]
    for plan in plans:
        losses, weights = trained(tmp_path, plan)
        assert losses == expected[0]
        same_bits(weights, expected[1])
