"""Batches of ever new lengths: what is kept of earlier ones does not pile up."""

import gc

from engine_helpers import build_engine, make_plan, random_batch, random_weights, tiny_config
from torch import Tensor

from flexengine.runtime.layer_runner import MOST_LENGTHS

NUM_LENGTHS = 3 * MOST_LENGTHS


def num_tensors():
    gc.collect()
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


def test_views_of_old_lengths_are_forgotten():
    source = random_weights(tiny_config())
    engine = build_engine(source, make_plan(source.spec, chunk_tokens=128, max_seq_len=128, max_tokens=128))
    found = {}
    for length in range(2, NUM_LENGTHS + 1):
        engine.train_step(random_batch(length, (length,), source.spec.vocab_size))
        if length % MOST_LENGTHS == 0:
            found[length // MOST_LENGTHS] = num_tensors()
    assert found[3] == found[2] <= found[1] + NUM_LENGTHS
    engine.close()
