"""Delta rules that store bfloat16 between their kernels: near the exact rule, and the same bits under any plan."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from engine_helpers import (
    FLOAT32,
    build_engine,
    config_of,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    streamed_plan,
)
from family_configs import CASES, FAMILY_CASES

from flexengine.models.delta_dtype import check_delta_dtype, with_delta_dtype
from flexengine.models.registry import open_model
from flexengine.options.job import Job
from flexengine.plan import LayerPlan, Numerics
from flexengine.request import described
from tests.schedule.small_plans import small_model

QWEN = CASES[FAMILY_CASES["qwen3_5_text"]]
NARROW = replace(FLOAT32, delta="bfloat16")
LENGTHS = [40, 3, 17]
SLICED: dict[str, Any] = {"chunk_tokens": 16, "chunks_per_round": 4, "numerics": NARROW}
"""Sequences of 40 tokens are cut, and hand over states."""


def stored_in(delta, source):
    return source._replace(spec=with_delta_dtype(source.spec, delta))


def trained(source, plan, steps=2):
    """(losses, gradients of the last step, weights)."""
    engine = build_engine(source, plan)
    losses, gradients = [], {}
    for number in range(steps):
        losses.append(engine.fwd_bwd(random_batch(number, LENGTHS, source.spec.vocab_size)).loss)
        gradients = engine.gradients()
        engine.step()
    weights = engine.state_dict()
    engine.close()
    return losses, gradients, weights


def test_no_plan_changes_a_bit():
    source = stored_in("bfloat16", random_weights(QWEN))
    spec, everything = source.spec, make_plan(source.spec, **SLICED)
    mixed = [everything.layers[1], *[LayerPlan((), (), "host")] * (len(spec.blocks) - 1)]
    first, *rest = (trained(source, plan) for plan in (
        everything, streamed_plan(spec, **SLICED), make_plan(spec, blocks=mixed, **SLICED),
    ))  # fmt: skip
    for losses, gradients, weights in rest:
        assert losses == first[0]
        same_bits(gradients, first[1])
        same_bits(weights, first[2])


def test_losses_and_gradients_are_near_those_of_transformers(tmp_path):
    """The loss within a thousandth and gradients within 4% of the exact rule's; whole sequences and slices."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(QWEN)).eval()
    model.save_pretrained(tmp_path)
    batch = random_batch(0, LENGTHS, QWEN["vocab_size"])
    source = stored_in("bfloat16", open_model(tmp_path))
    exact = [model(input_ids=torch.as_tensor(ids)[None]).logits[0, :-1].log_softmax(-1) for ids in batch]
    found = [rows.gather(1, torch.as_tensor(ids)[1:, None]).sum() for rows, ids in zip(exact, batch, strict=True)]
    loss = -torch.stack(found).sum() / sum(len(ids) - 1 for ids in batch)
    loss.backward()
    for plan in (make_plan(source.spec, **SLICED), make_plan(source.spec, numerics=NARROW)):
        losses, gradients, _ = trained(source, plan, steps=1)
        assert 1e-6 < abs(losses[0] / loss.item() - 1) < 1e-3
        off = {name: float((gradients[name] - p.grad).norm() / p.grad.norm()) for name, p in model.named_parameters()}
        assert 1e-4 < max(off.values()) < 0.04, off


def test_only_models_with_delta_rules_have_the_option():
    message = "delta_dtype=bfloat16 is for gated delta rules, as of Qwen3-Next and Qwen3.5, and tiny has none; leave"
    for case in ("bamba", "olmoe, many experts"):
        with pytest.raises(ValueError, match=message):
            described(random_weights(CASES[case]).spec, Job(delta_dtype="bfloat16"))
    with pytest.raises(ValueError, match="delta_dtype=bfloat16 needs dtype=bfloat16, got dtype=float32"):
        Job(dtype="float32", delta_dtype="bfloat16")


def test_refuses_plans_for_another_dtype():
    assert Job(delta_dtype="bfloat16").numerics == Numerics(delta="bfloat16")
    spec = described(random_weights(QWEN).spec, Job(delta_dtype="bfloat16"))
    check_delta_dtype(spec, "bfloat16")
    with pytest.raises(ValueError, match="delta rules that store bfloat16, but numerics ask for float32"):
        check_delta_dtype(spec, "float32")
    with pytest.raises(ValueError, match="delta rules that store float32, but numerics ask for bfloat16"):
        check_delta_dtype(small_model(), "bfloat16")
