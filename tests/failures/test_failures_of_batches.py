"""Batches and calls that an engine cannot use: refused before anything runs, and the engine goes on as if nothing had
been."""

import pytest
import torch
from provoke import CONFIG, OPTIONS, check_error, write_model

from flexengine import from_pretrained
from flexengine.api import build, prepare
from flexengine.optim import AdamW

VOCAB = CONFIG["vocab_size"]
SHAPE = {name: OPTIONS[name] for name in ("max_seq_len", "max_global_batch_tokens", "dtype", "device")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
    engine = from_pretrained(folder, hardware="cpu-test", **SHAPE)
    yield engine
    engine.close()


IDS = [[1, 2, 3, 4]]
TENSOR = torch.arange(8).view(2, 4)
BATCHES = {
    "empty_batch": ({"batch": []}, ("the batch has no sequences; give at least one",)),
    "empty_sequence": ({"batch": [[1, 2], []]}, (r"sequence 1|input_ids\[1\] is empty", "at least one token")),
    "batch_of_one_token": ({"batch": [[7]]}, ("no target token in 1 tokens", "sequence of two tokens or more")),
    "labels_all_ignored": (
        {"input_ids": IDS, "labels": [[-100] * 4]},
        ("no target token in 4 tokens.*-100", "other than"),
    ),
    "token_id_too_large": (
        {"batch": [[1, VOCAB]]},
        ("ids 1..61, outside the vocabulary 0..60", "tokenizer of this mod"),
    ),
    "token_id_negative": ({"batch": [[-1, 3]]}, ("ids -1..3, outside the vocabulary 0..60",)),
    "label_too_large": ({"input_ids": IDS, "labels": [[1, 2, 3, 61]]}, ("labels 1..61, outside 0..60 and not -100",)),
    "sequence_too_long": ({"batch": [[1] * 17]}, ("17 tokens, more than max_seq_len=16", "engine for max_seq_len=17")),
    "too_many_tokens": (
        {"batch": [[1] * 16] * 3},
        ("48 tokens, more than max_global_batch_tokens=32; plan for max_global_batch_tokens=48", "several fwd_bwd"),
    ),
    "more_sequences_than_labels": (
        {"input_ids": IDS * 2, "labels": IDS},
        ("2 sequences of input_ids but 1 of labels",),
    ),
    "fewer_labels_than_tokens": ({"input_ids": IDS, "labels": [[1, 2]]}, ("4 input_ids but 2 labels; give one label",)),
    "flat_list": ({"batch": [1, 2, 3]}, ("list of sequences, got a list of int",)),
    "text": ({"batch": "hello"}, ("list of token lists or a tensor, got str",)),
    "fractions": ({"batch": [[1.5, 2.0]]}, ("flat sequence of integers, got torch.float",)),
    "nested_too_deep": ({"batch": [[[1, 2]]]}, (r"flat sequence of integers, got torch.int64 of shape \[1, 2\]",)),
    "tensor_of_one_dimension": ({"input_ids": TENSOR[0]}, (r"must have shape \[batch, tokens\], got \[4\]",)),
    "words_in_place_of_tokens": ({"batch": [["a", "b"]]}, (r"input_ids\[0\].*integers",)),
    "token_id_of_100_bits": ({"batch": [[2**100, 1]]}, (r"input_ids\[0\].*integers",)),
    "ragged_tokens": ({"batch": [[1, [2, 3]]]}, (r"input_ids\[0\].*integers of 64 bits, got a list",)),
    "complex_tokens": ({"batch": [[1j, 2]]}, (r"input_ids\[0\].*flat sequence of integers, got torch.complex64",)),
    "mask_of_words": ({"input_ids": IDS, "attention_mask": [["a"]]}, (r"attention_mask\[0\].*integers",)),
    "mask_with_a_hole": (
        {"input_ids": TENSOR, "attention_mask": torch.tensor([[1, 0, 1, 1]] * 2)},
        ("is 0 between tokens; it may be so before or behind them",),
    ),
    "mask_of_another_shape": (
        {"input_ids": TENSOR, "attention_mask": TENSOR[:, :2]},
        (r"the shape of input_ids: it has rows of \[2, 2\], they of \[4, 4\]",),
    ),
    "mask_that_hides_everything": (
        {"input_ids": TENSOR, "attention_mask": 0 * TENSOR},
        ("no target token in 0 tokens",),
    ),
    "nothing": ({}, ("give a batch of token lists, or input_ids",)),
    "batch_and_input_ids": ({"batch": IDS, "input_ids": IDS}, ("not both",)),
    "labels_without_input_ids": ({"batch": IDS, "labels": IDS}, ("labels go with input_ids",)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(engine, name):
    given, says = BATCHES[name]
    check_error(lambda: engine.fwd_bwd(**given), says)
    check_error(lambda: engine.evaluate(**given), says)
    check_error(engine.gradients, ("no gradients", "fwd_bwd"))


@pytest.mark.parametrize("lr", [-1e-3, float("nan"), float("inf")])
def test_learning_rates(engine, lr):
    engine.fwd_bwd(IDS)
    check_error(lambda: engine.step(lr=lr), ("lr", str(lr)))


def test_step_without_a_batch(folder):
    with_nothing = from_pretrained(folder, hardware="cpu-test", **SHAPE)
    check_error(with_nothing.step, ("fwd_bwd",))
    with_nothing.close()
    check_error(lambda: with_nothing.fwd_bwd(IDS), ("cannot go on: it was closed", "from_pretrained"))


def test_an_engine_goes_on_after_failures(folder):
    """The same losses and weights, bit by bit, as an engine that never saw a wrong batch."""
    quiet, troubled = (
        from_pretrained(folder, optimizer=AdamW(lr=1e-2), hardware="cpu-test", **SHAPE) for _ in range(2)
    )
    for _ in range(2):
        for given, _ in BATCHES.values():
            with pytest.raises(ValueError, match=r"."):
                troubled.fwd_bwd(**given)
        losses = [engine.fwd_bwd(IDS).loss for engine in (quiet, troubled)]
        with pytest.raises(ValueError, match="lr"):
            troubled.step(lr=-1.0)
        for engine in (quiet, troubled):
            engine.step()
        assert losses[0] == losses[1]
    states = [engine.state_dict() for engine in (quiet, troubled)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    quiet.close()
    troubled.close()


REQUESTS = {
    "lr_negative": (lambda: AdamW(lr=-1.0), ("lr must be finite and at least 0, got -1.0",)),
    "beta_of_one": (lambda: AdamW(betas=(0.9, 1.0)), (r"betas.*got \(0.9, 1.0\)",)),
    "eps_zero": (lambda: AdamW(eps=0.0), ("eps must be finite and above 0, got 0.0",)),
    "dtype_unknown": (
        {"dtype": "float8"},
        ("dtype='float8' is not supported; choose bfloat16, float16, float32, float64",),
    ),
    "state_dtype_unknown": ({"optimizer_state_dtype": "int4"}, ("optimizer_state_dtype='int4'.*choose float32",)),
    "recompute_unknown": ({"recompute": "some"}, ("recompute='some'; choose auto, none or full",)),
    "budget_twice": (
        {"max_gpu_mem_gib": 1.0, "max_gpu_mem_bytes": 5},
        ("max_gpu_mem_gib or max_gpu_mem_bytes, not both",),
    ),
    "budget_nan": ({"max_gpu_mem_gib": float("nan")}, ("max_gpu_mem_gib must be a finite number of GiB, got nan",)),
    "budget_infinite": ({"max_host_mem_gib": float("inf")}, ("max_host_mem_gib must be a finite number.*got inf",)),
    "budget_negative": ({"max_host_mem_gib": -2.0}, ("host memory budget must be positive, got -2147483648 bytes",)),
    "seed_negative": ({"seed": -1}, ("seed must be from 0 to 4294967295, got -1",)),
    "seed_of_70_bits": ({"seed": 2**70}, ("seed must be from 0 to 4294967295, got 1180591620717411303424",)),
    "clipping_to_zero": ({"max_grad_norm": 0.0}, ("max_grad_norm must be positive, or None", "got 0.0")),
    "sequences_of_no_tokens": ({"max_seq_len": 0}, ("max_seq_len must be positive, got 0",)),
    "hardware_unknown": ({"hardware": "rtx-4091"}, ("no hardware preset is called 'rtx-4091'", "rtx-4090")),
    "hardware_file_absent": ({"hardware": "nowhere.json"}, ("nowhere.json",)),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(folder, name):
    given, says = REQUESTS[name]
    made = given if callable(given) else lambda: from_pretrained(folder, **{"hardware": "cpu-test", **SHAPE, **given})
    check_error(made, says)


@pytest.mark.parametrize(("planned", "built", "word"), [(1.0, None, "with"), (None, 1.0, "without")])
def test_clipping_of_another_plan(folder, planned, built, word):
    prepared = prepare(folder, hardware="cpu-test", max_grad_norm=planned, **SHAPE)
    says = (f"max_grad_norm={built}, but the plan was made {word} clipping; give prepare the same max_grad_norm",)
    check_error(lambda: build(prepared, max_grad_norm=built), says)


def test_two_threads(folder):
    """The second call would mix its batch with that of the first, and give wrong weights."""
    engine = from_pretrained(folder, hardware="cpu-test", **SHAPE)
    engine.state.running["call"] = object()  # as while a call of another thread runs
    says = (r"train_step\(\) while another call of this engine runs, in another thread.*one after the other",)
    check_error(lambda: engine.train_step([[1, 2, 3]]), says, RuntimeError)
    engine.state.running.clear()
    engine.train_step([[1, 2, 3]])
    engine.close()
