"""Experts that cross the link part by part: equal to transformers, and bit for bit to experts that do not."""

from dataclasses import replace

import pytest
from engine_helpers import (
    ON_GPU,
    build_engine,
    random_batch,
    random_weights,
    same_bits,
    saved_model,
    spec_of,
    streamed_plan,
)
from family_checks import MAX_SEQ_LEN, check_against_transformers, check_export, engine_like, reference_of
from family_configs import CASES, FAMILY_CASES, OF_BLOCKS
from thorough import cases

from flexengine.models import blocks
from flexengine.models.in_parts import in_parts, may_be_in_parts
from flexengine.models.registry import open_model
from flexengine.models.variant_rows import VARIANTS
from flexengine.optim import AdamW
from flexengine.plan import GroupPlan, LayerPlan, Numerics
from flexengine.schedule.save_sets import savable_ops

WITH_EXPERTS = [
    name for name, config in CASES.items() if any(op.name == "combine" for b in spec_of(config).blocks for op in b.ops)
]
FAMILIES = [family for family, case in FAMILY_CASES.items() if case in WITH_EXPERTS]
LIKE_OTHERS = ("qwen3_next", "qwen2_moe", "deepseek_v2", *(family for family in FAMILIES if family in VARIANTS))
"""Families whose experts others have as well; a GPU runs them, too."""


@pytest.fixture(autouse=True)
def one_expert_each(monkeypatch):
    """Every expert may be a part of its own."""
    monkeypatch.setattr(blocks, "PART_ELEMENTS", 1)


@pytest.mark.parametrize(
    "case",
    cases(
        WITH_EXPERTS, [OF_BLOCKS[family] for family in FAMILIES if family in OF_BLOCKS and family not in LIKE_OTHERS]
    ),
)
def test_parts_give_the_bits_that_match_transformers(case):
    """Experts that come whole match transformers in test_families_match_transformers.py, under the same plan: a
    sequence that is cut and two that are not."""
    source, found = random_weights(CASES[case]), []
    ids = random_batch(5, [MAX_SEQ_LEN, 3, 17], source.spec.vocab_size)
    for in_parts_too in (False, True):
        sizes = {"chunk_tokens": 20, "chunks_per_round": 4, "max_seq_len": MAX_SEQ_LEN}
        engine = build_engine(source, streamed_plan(source.spec, in_parts=in_parts_too, **sizes), AdamW(lr=1e-2))
        loss, gradients = engine.fwd_bwd(ids).loss, engine.gradients()
        engine.step()
        found.append((loss, gradients, {"logits": engine.next_token_logits(ids[0]), **engine.state_dict()}))
        engine.close()
    whole, parts = found
    assert parts[0] == whole[0]
    same_bits(parts[1], whole[1])
    same_bits(parts[2], whole[2])  # after a step, so that no bias is zero


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_an_engine_with_parts_is_saved_as_transformers_reads_it(family, tmp_path):
    """Each of them stores its experts in another way."""
    reference = reference_of(CASES[FAMILY_CASES[family]], tmp_path / "source")
    engine = engine_like(reference, chunk_tokens=20, in_parts=True)
    check_against_transformers(engine, reference)
    check_export(engine, reference, tmp_path / "export")
    engine.close()


STEPS = ([48, 3, 20], [21])
"""Sequences of two steps: two rounds, cut sequences and whole ones, then a single round."""


def trained(folder, plan, device="cpu"):
    """Losses and weights after two steps; gradients are clipped unless the plan lets the CPU update in backward."""
    clip = 0.5 if plan.request.clipping else None
    options = {"device": device, "max_grad_norm": clip, "deterministic": device == "cuda"}
    engine, losses = build_engine(open_model(folder), plan, AdamW(lr=1e-2), **options), []
    for step, lengths in enumerate(STEPS):
        losses.append(engine.train_step(random_batch(step, lengths, engine.model.vocab_size))[0].loss)
    found = losses, engine.state_dict()
    engine.close()
    return found


def kept_layers(spec):
    """All that can be kept, on the GPU by one block and on the host by the next."""
    kept = [savable_ops(block.ops) for block in spec.blocks]
    blocks = [LayerPlan((), names, "host") if i % 2 else LayerPlan(names) for i, names in enumerate(kept)]
    return (LayerPlan(), *blocks, LayerPlan())


def check_bits(folder, config, device="cpu", **sizes):
    """In parts or not, all of them or those of touched experts, streamed or resident, updated by either processor, with
    several rounds, with and without clipped gradients."""
    saved_model(folder, config)
    spec = spec_of(config)
    assert may_be_in_parts(spec)
    assert not may_be_in_parts(in_parts(spec))
    streamed = streamed_plan(spec, chunk_tokens=20, chunks_per_round=3, max_seq_len=MAX_SEQ_LEN, **sizes)
    homes = [GroupPlan(update="cpu"), ON_GPU, GroupPlan(weights="gpu"), GroupPlan(grads="gpu")]
    groups = tuple(homes[i % len(homes)] for i in range(len(spec.groups)))
    plans = [
        replace(streamed, in_parts=True, weight_slots=1, grad_slots=1, touched_only=True),
        replace(streamed, in_parts=True, weight_slots=5, grad_slots=3, groups=groups, touched_only=True),
        replace(streamed, in_parts=True, layers=kept_layers(in_parts(spec))),
    ]
    if device == "cuda":  # on a CPU the test above compares one of these, test_families_match_transformers.py the other
        plans += [replace(streamed, in_parts=True), replace(streamed, groups=(ON_GPU,) * len(spec.groups))]
    expected = trained(folder, streamed, device)
    for plan in plans:
        losses, weights = trained(folder, plan, device)
        assert losses == expected[0]
        same_bits(weights, expected[1])
    hurried = replace(streamed, groups=groups, request=replace(streamed.request, clipping=False))
    expected = trained(folder, hurried, device)
    by_gpu = replace(hurried, in_parts=True, request=replace(hurried.request, gpu_updates="in_round"))
    for plan in (replace(hurried, in_parts=True), by_gpu):
        losses, weights = trained(folder, plan, device)
        assert losses == expected[0]
        same_bits(weights, expected[1])


@pytest.mark.parametrize(
    "family",
    cases((*(name for name in FAMILIES if name not in LIKE_OTHERS), "granitemoe"), ("mixtral", "gpt_oss")),
)
def test_parts_keep_the_bits(family, tmp_path):
    check_bits(tmp_path, CASES[FAMILY_CASES[family]])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_keep_the_bits_on_cuda(family, tmp_path):
    check_bits(tmp_path, CASES[FAMILY_CASES[family]], "cuda", numerics=Numerics())
