"""Commands replayed as CUDA graphs: the bits of a run without them, and no memory beside the plan's."""

from dataclasses import replace

import pytest
import torch

from flexengine.plan import Numerics
from flexengine.runtime.execution import replay
from flexengine.runtime.execution.replay import Replay
from tests.engine_helpers import (
    FLOAT32,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    streamed_plan,
    tiny_config,
)

EVEN, OTHER, RAGGED = (16, 16, 16, 16, 16, 16), (8, 8, 8, 8, 8, 8), (5, 16, 9, 16, 3)


class Recorder:
    """Stands for the capture of graphs on the CPU: a graph runs the call that it was captured from once more."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, run):
        self.captured += 1

        def again():
            self.replayed += 1
            run()

        return again


def engines(streams=True):
    """An engine whose blocks are replayed, one where they are not, and what records the replays."""
    source = random_weights(tiny_config(num_hidden_layers=3))
    sizes = {"chunk_tokens": 32, "chunks_per_round": 2, "max_seq_len": 16, "numerics": FLOAT32}
    plan = (streamed_plan if streams else make_plan)(source.spec, **sizes)
    replayed, plain = build_engine(source, plan), build_engine(source, plan)
    recorder = Recorder()
    layers = Replay(replayed.layers, lambda: recorder)
    replayed.handlers._replay = replayed.rounds._replay = layers
    return replayed, plain, layers, recorder


def train_both(replayed, plain, seed, lengths):
    batch = random_batch(seed, lengths, 67)
    outs = [engine.train_step(batch) for engine in (replayed, plain)]
    assert outs[0][0].loss == outs[1][0].loss
    assert outs[0][1].grad_norm == outs[1][1].grad_norm


@pytest.mark.parametrize("streams", [True, False])
def test_bits_of_a_run_without_graphs_for_lengths_that_stay_and_change(streams):
    replayed, plain, layers, recorder = engines(streams)
    for seed, lengths in enumerate((EVEN, EVEN, EVEN, RAGGED, EVEN, EVEN, EVEN, EVEN, OTHER)):
        train_both(replayed, plain, seed, lengths)
    same_bits(replayed.state_dict(), plain.state_dict())
    assert recorder.replayed > recorder.captured > 0
    assert layers.num_graphs == 0, "other lengths must have dropped all graphs, whose memory they need"


def test_rounds_of_one_step_share_their_graphs():
    replayed, plain, layers, recorder = engines()
    for seed in range(3):
        train_both(replayed, plain, seed, EVEN)
    blocks, chunks = 3, 2
    assert layers.num_graphs == recorder.captured == 2 * blocks * (chunks + 1) + 2 * (blocks + 2), (
        "forward and backward of each block, on the two chunks of full rounds and the one of the last round, whose"
        " backward is the first to write accumulators; every group's gradient, stored and added to what is stored"
    )


def test_an_evaluation_drops_the_graphs():
    replayed, plain, layers, _ = engines()
    for seed in range(2):
        train_both(replayed, plain, seed, EVEN)
    assert layers.num_graphs
    batch = random_batch(9, EVEN, 67)
    assert replayed.evaluate(batch).loss == plain.evaluate(batch).loss
    assert layers.num_graphs == 0
    train_both(replayed, plain, 5, EVEN)


def test_lengths_that_change_often_are_captured_less_and_less():
    replayed, plain, _, recorder = engines()
    counts = []
    for seed in range(3):
        for lengths in (EVEN, EVEN, OTHER):
            train_both(replayed, plain, seed, lengths)
        counts.append(recorder.captured)
    assert counts[0] > 0
    assert counts[2] == counts[0]


def test_no_memory_left_for_graphs_means_none(monkeypatch, caplog):
    monkeypatch.setattr(replay, "most_graph_bytes", lambda model, plan: 3 * 2**16)
    replayed, plain, layers, _ = engines()
    for seed in range(3):
        train_both(replayed, plain, seed, EVEN)
    assert layers.num_graphs == 0
    assert sum("MiB for graphs" in record.message for record in caplog.records) == 1


def test_no_memory_left_for_gradients_leaves_the_blocks_theirs(monkeypatch, caplog):
    monkeypatch.setattr(replay, "most_rounding_bytes", lambda model, plan: 2**17)
    replayed, plain, layers, _ = engines()
    for seed in range(3):
        train_both(replayed, plain, seed, EVEN)
    blocks, chunks = 3, 2
    assert layers.num_graphs == 2 * blocks * (chunks + 1) + 1
    assert not any("MiB for graphs" in record.message for record in caplog.records)


def test_gradients_are_rounded_once_before_that_is_captured():
    _, _, layers, recorder = engines()
    for _ in range(2):
        layers.begin_batch(EVEN)
    counts, runs = [], []
    for _ in range(3):
        layers.run_other("a gradient", "finish grad", 2, lambda: runs.append(1))
        counts.append((recorder.captured, recorder.replayed))
    assert counts == [(0, 0), (1, 1), (1, 2)]
    assert len(runs) == 3


def test_what_cannot_be_captured_is_told_once_and_runs_without(caplog):
    replayed, plain, layers, _ = engines()

    def fails(run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    layers._open_capture = lambda: fails
    for seed in range(3):
        train_both(replayed, plain, seed, EVEN)
    assert [record.levelname for record in caplog.records if "CUDA graph" in record.message] == ["WARNING"]


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
def test_cuda_gives_the_bits_of_a_run_without_graphs(tied):
    widths = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 700}
    config = tiny_config(**widths, num_hidden_layers=4, vocab_size=2003, tie_word_embeddings=tied)
    source = random_weights({**config, "initializer_range": 0.05})
    sizes = {"chunk_tokens": 1024, "chunks_per_round": 2, "max_seq_len": 1000, "numerics": Numerics()}
    plan = streamed_plan(source.spec, **sizes)
    replaying = replace(plan, request=replace(plan.request, graphs="always"))
    replayed, plain = (build_engine(source, p, device="cuda", deterministic=True) for p in (replaying, plan))
    even, ragged = (512,) * 6, (700, 130, 1000, 65, 900)
    for seed, lengths in enumerate((even, even, even, even, ragged, even, even, even, even)):
        batch = random_batch(seed, lengths, 2003)
        outs = [engine.train_step(batch) for engine in (replayed, plain)]
        assert outs[0][0].loss == outs[1][0].loss
        assert outs[0][1].grad_norm == outs[1][1].grad_norm
    assert replayed.replay is not None
    assert replayed.replay.num_graphs > 0
    same_bits(replayed.state_dict(), plain.state_dict())
    held = torch.cuda.memory_reserved()
    replayed.close()
    assert torch.cuda.memory_reserved() < held
