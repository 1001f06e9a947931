"""Gradients of very many calls of fwd_bwd in one step, against those of one call."""

import logging

import pytest
import torch
from engine_helpers import build_engine, make_plan, random_batch, random_weights, tiny_config

from flexengine.plan import MOST_ROUNDED, Numerics


def gradients(source, grad_dtype, num_calls, batch):
    """All gradients of a batch that is given in so many calls, in one vector."""
    numerics = Numerics("bfloat16", "split", grad_dtype, "float32")
    sizes = {"chunk_tokens": 256, "chunks_per_round": 64, "max_seq_len": 8, "max_tokens": 8 * len(batch)}
    engine = build_engine(source, make_plan(source.spec, numerics=numerics, **sizes))
    each = len(batch) // num_calls
    for start in range(0, len(batch), each):
        engine.fwd_bwd(batch[start : start + each])
    found = torch.cat([gradient.double().flatten() for gradient in engine.weights.read_gradients(1.0).values()])
    engine.close()
    return found


@pytest.mark.parametrize(
    ("grad_dtype", "num_calls"),
    [("bfloat16", MOST_ROUNDED), pytest.param("float32", 512, marks=pytest.mark.thorough)],
)
def test_gradients_of_many_calls_are_within_1_percent_of_one(caplog, grad_dtype, num_calls):
    source, batch = random_weights(tiny_config(num_hidden_layers=1)), random_batch(0, [8] * 1024, 67)
    one = gradients(source, grad_dtype, 1, batch)
    many = gradients(source, grad_dtype, num_calls, batch)
    assert float((many - one).norm() / one.norm()) < 0.01
    assert not caplog.records


def test_rounding_a_sum_too_often_is_told_once_with_the_remedy(caplog):
    source, batch = random_weights(tiny_config()), random_batch(0, [8] * (MOST_ROUNDED + 2), 67)
    with caplog.at_level(logging.WARNING):
        gradients(source, "bfloat16", len(batch), batch)
    assert [f"over {MOST_ROUNDED + 1} rounds" in record.message for record in caplog.records] == [True]
    assert "--grad-dtype float32" in caplog.text
