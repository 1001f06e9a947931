"""Batches as tokenizers, collators and data sets give them: the same loss as the plain lists, and as transformers'."""

from collections import UserDict

import numpy as np
import pytest
import torch
import transformers
from engine_helpers import FLOAT32, build_engine, random_batch, saved_model, streamed_plan, tiny_config
from tokenizers import Tokenizer, models

from flexengine import from_pretrained
from flexengine.models.registry import open_model
from flexengine.runtime.engine import release_device

CONFIG = tiny_config()
BATCH = random_batch(0, (20, 7, 33), CONFIG["vocab_size"])
LABELS = [[-100 if i % 3 == 0 else token for i, token in enumerate(row)] for row in BATCH]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model of transformers and an engine with its weights."""
    folder = tmp_path_factory.mktemp("model")
    model = saved_model(folder, CONFIG)
    source = open_model(str(folder))
    return model, build_engine(source, streamed_plan(source.spec, numerics=FLOAT32, max_tokens=300))


@pytest.fixture
def engine(pair):
    return pair[1]


@pytest.fixture(scope="module")
def tokenizer():
    words = {f"w{i}": i for i in range(CONFIG["vocab_size"])}
    bare = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="w0")


def features():
    return [{"input_ids": row, "labels": labels} for row, labels in zip(BATCH, LABELS, strict=True)]


def pad(rows, value, side="right"):
    width = max(map(len, rows))
    fill = [[value] * (width - len(row)) for row in rows]
    return [f + r if side == "left" else r + f for r, f in zip(rows, fill, strict=True)]


# -- containers --------------------------------------------------------------------------------------------------------


def test_mappings_are_keywords(engine):
    expected = engine.evaluate(input_ids=BATCH, labels=LABELS)
    columns = {"input_ids": BATCH, "labels": LABELS, "attention_mask": None}
    for batch in (columns, UserDict(columns), transformers.BatchEncoding(columns)):
        assert engine.evaluate(batch) == expected
        assert engine.evaluate(**batch) == expected


def test_arrays(engine):
    mask, width = pad([[1] * len(row) for row in BATCH], 0), 33
    expected = engine.evaluate(BATCH)
    ids = np.array(pad(BATCH, 5), np.int32)
    assert ids.shape == (3, width)
    assert engine.evaluate({"input_ids": ids, "attention_mask": np.array(mask)}) == expected
    assert engine.evaluate({"input_ids": ids, "attention_mask": np.array(mask, bool)}) == expected
    assert engine.evaluate([np.array(row) for row in BATCH]) == expected
    assert engine.evaluate(np.array([np.array(row) for row in BATCH], object)) == expected


def test_columns_of_a_data_set(engine):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(features())
    expected = engine.evaluate(input_ids=BATCH, labels=LABELS)
    assert engine.evaluate(input_ids=data["input_ids"], labels=data["labels"]) == expected
    assert engine.evaluate(data[:3]) == expected
    assert engine.evaluate(data.with_format("numpy")[:3]) == expected


def test_left_padding_is_cut_off(engine):
    mask = pad([[1] * len(row) for row in BATCH], 0, "left")
    given = {"input_ids": pad(BATCH, 5, "left"), "labels": pad(LABELS, -100, "left"), "attention_mask": mask}
    expected = engine.evaluate(input_ids=BATCH, labels=LABELS)
    assert engine.evaluate(given) == expected
    positions = (torch.tensor(mask).cumsum(1) - 1).clamp(min=0)
    assert engine.evaluate(given, position_ids=None) == expected
    assert engine.evaluate({**given, "position_ids": positions}) == expected


@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_row_of_padding_is_a_sequence_of_no_tokens(engine, place):
    rows, labels = ([list(row) for row in some] for some in (BATCH, LABELS))
    rows.insert(place, [])
    labels.insert(place, [])
    mask = torch.tensor(pad([[1] * len(row) for row in rows], 0))
    given = {"input_ids": pad(rows, 5), "labels": pad(labels, -100), "attention_mask": mask}
    expected = engine.evaluate(input_ids=BATCH, labels=LABELS, per_token=True)
    found = engine.evaluate(given, per_token=True)
    assert found[:3] == expected[:3]
    assert [len(row) for row in found.token_log_probs] == [len(row) for row in rows]
    others = [row for row in found.token_log_probs if len(row)]
    assert all(torch.equal(*pair) for pair in zip(others, expected.token_log_probs, strict=True))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert engine.evaluate({**given, "position_ids": positions, "weights": torch.ones(mask.shape)})[:3] == expected[:3]


def test_a_batch_of_padding_alone_trains_nothing(engine):
    with pytest.raises(ValueError, match=r"no target token in 0 tokens.*or is padding"):
        engine.fwd_bwd(input_ids=[[5, 5]], attention_mask=[[0, 0]])
    with pytest.raises(ValueError, match="is empty; every sequence needs at least one token"):
        engine.fwd_bwd([[1, 2], []])


def test_position_ids_tell_sequences_of_a_row_apart(engine):
    row, labels = ([[token for rows in some for token in rows]] for some in (BATCH, LABELS))
    positions = [[i for rows in BATCH for i in range(len(rows))]]
    expected = engine.evaluate(input_ids=BATCH, labels=LABELS)
    assert engine.evaluate(input_ids=row, labels=labels, position_ids=positions) == expected
    padded = [value[0] + [0, 0] for value in (row, labels, positions)]
    ids, labels, positions = ([value] for value in padded)
    mask = [[1] * 60 + [0] * 2]
    assert engine.evaluate(input_ids=ids, labels=labels, position_ids=positions, attention_mask=mask) == expected


# -- collators ---------------------------------------------------------------------------------------------------------


def loss_of_transformers(model, batch):
    with torch.no_grad():
        return float(model(**batch, use_cache=False).loss)  # as in training: a cache would join packed sequences


@pytest.mark.parametrize("side", ["right", "left"])
def test_collator_for_seq2seq(pair, tokenizer, side):
    model, engine = pair
    tokenizer.padding_side = side
    batch = transformers.DataCollatorForSeq2Seq(tokenizer)(features())
    assert engine.evaluate(**batch).loss == pytest.approx(loss_of_transformers(model, batch), rel=1e-5)


def test_collator_for_language_modeling(pair, tokenizer):
    model, engine = pair
    tokenizer.padding_side = "right"
    rows = [{"input_ids": [token or 1 for token in row]} for row in BATCH]  # 0 is the padding, which it never trains
    batch = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    assert engine.evaluate(**batch).loss == pytest.approx(loss_of_transformers(model, batch), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}])
def test_collator_with_flattening(pair, options):
    model, engine = pair
    batch = transformers.DataCollatorWithFlattening(**options)(features())
    read = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    out = engine.evaluate(**batch)
    assert (out.num_tokens, out.num_target_tokens) == (60, sum(label != -100 for row in LABELS for label in row[1:]))
    assert out.loss == pytest.approx(loss_of_transformers(model, read), rel=1e-5)


def test_padded_batches_of_trl(pair):
    """Rows padded on the right, labels and mask with them, as SFTTrainer's collator makes them of completions."""
    model, engine = pair
    mask = pad([[1] * len(row) for row in BATCH], 0)
    columns = {"input_ids": pad(BATCH, 0), "labels": pad(LABELS, -100), "attention_mask": mask}
    batch = {name: torch.tensor(rows) for name, rows in columns.items()}
    assert engine.fwd_bwd(batch).loss == pytest.approx(loss_of_transformers(model, batch), rel=1e-5)


def test_padding_free_batches_of_trl(pair):
    """Rows end to end with position_ids, labels ignored by a completion mask, as SFTTrainer's collator makes them."""
    model, engine = pair
    ids = torch.tensor([[token for row in BATCH for token in row]])
    positions = torch.cat([torch.arange(len(row)) for row in BATCH])[None]
    labels = ids.clone()
    labels[positions < 4] = -100
    read = {"input_ids": ids, "labels": labels, "position_ids": positions}
    ends = torch.tensor([0, 20, 27, 60], dtype=torch.int32)
    implied = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 33, "max_length_k": 33}
    batch = {**read, **implied, "seq_idx": torch.tensor([[0] * 20 + [1] * 7 + [2] * 33], dtype=torch.int32)}
    assert engine.evaluate(batch).loss == pytest.approx(loss_of_transformers(model, read), rel=1e-5)
    assert engine.fwd_bwd(batch).loss == pytest.approx(loss_of_transformers(model, read), rel=1e-5)


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_log_probabilities_of_tokens(pair):
    model, engine = pair
    out = engine.evaluate(input_ids=BATCH, labels=LABELS, per_token=True)
    assert engine.evaluate(input_ids=BATCH, labels=LABELS).token_log_probs is None
    for row, labels, found in zip(BATCH, LABELS, out.token_log_probs, strict=True):
        with torch.no_grad():
            log_probs = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        expected = [0.0] + [float(log_probs[t - 1, row[t]]) * (labels[t] != -100) for t in range(1, len(row))]
        assert torch.allclose(found, torch.tensor(expected), atol=1e-5)
    total = -sum(float(found.double().sum()) for found in out.token_log_probs)
    assert total / out.num_target_tokens == pytest.approx(out.loss, rel=1e-6)


def test_an_engine_is_a_context(tmp_path):
    saved_model(tmp_path, CONFIG)
    source = open_model(str(tmp_path))
    with build_engine(source, streamed_plan(source.spec, max_tokens=300)) as engine:
        engine.evaluate(BATCH)
    with pytest.raises(ValueError, match="it was closed"):
        engine.evaluate(BATCH)


def test_closing_gives_the_limit_of_the_allocator_back(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: calls.append(given))
    release_device(torch.device("cuda:1"))
    release_device(torch.device("cpu"))
    assert calls == ["emptied", (1.0, torch.device("cuda:1"))]


def test_another_optimizer_is_answered_before_anything_loads(tmp_path):
    ours = torch.optim.AdamW([torch.zeros(1)], lr=2e-5, weight_decay=0.1)
    message = (
        r"optimizer is torch.optim.adamw.AdamW, .* write optimizer=flexengine.optim.AdamW\(lr=2e-05,"
        r" betas=\(0.9, 0.999\), eps=1e-08, weight_decay=0.1\)"
    )
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path / "nothing", optimizer=ours)
    with pytest.raises(ValueError, match=r"optimizer is torch.optim.sgd.SGD.*AdamW\(lr=3e-5\)"):
        from_pretrained(tmp_path / "nothing", optimizer=torch.optim.SGD)


# -- errors ------------------------------------------------------------------------------------------------------------

WRONG = {
    "columns_that_are_not_read": (
        {"batch": {"input_ids": BATCH, "pixel_values": [1]}},
        "the batch has pixel_values, but this engine trains the text alone; make it with max_image_tokens=",
    ),
    "keywords_that_are_not_read": (
        {"input_ids": BATCH, "rewards": [1], "loss_fn": max},
        "the batch has rewards, loss_fn, which would be ignored.*; for loss_fn give loss=, a function of blocks",
    ),
    "mapping_without_ids": ({"batch": {"text": ["a"]}}, "has no input_ids, only text; tokenize it"),
    "mapping_and_keywords": ({"batch": {"input_ids": BATCH}, "labels": LABELS}, "labels stand beside a batch"),
    "mask_with_holes": (
        {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]},
        r"attention_mask\[0\] is 0 between tokens.*set labels to -100",
    ),
    "positions_that_jump": (
        {"input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 3]]},
        r"position_ids\[0\] must count 0, 1, 2, ... and begin again",
    ),
    "positions_from_elsewhere": ({"input_ids": [[1, 2]], "position_ids": [[4, 5]]}, r"position_ids\[0\] must count"),
    "short_labels_under_a_mask": (
        {"input_ids": [[1, 2, 3]], "labels": [[1, 2]], "attention_mask": [[1, 1, 0]]},
        "sequence 0 has 3 input_ids but 2 labels",
    ),
    "array_of_one_dimension": ({"batch": np.arange(3)}, r"must have shape \[batch, tokens\], got \[3\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_batches(engine, name):
    given, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        engine.evaluate(**given)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([[True, 2, 3]], r"input_ids\[0\] must be a flat sequence of integers, got True or False among them"),
        ([[1, 2], (3, False)], r"input_ids\[1\] must be a flat sequence of integers, got True or False among them"),
        (torch.zeros(2, 3, dtype=torch.int64, device="meta"), "input_ids is a meta tensor; give a dense one"),
        ([torch.zeros(3, dtype=torch.int64, device="meta")], r"input_ids\[0\] is a meta tensor"),
        (torch.ones(2, 3, dtype=torch.int64).to_sparse(), "input_ids is a sparse_coo tensor"),
        (torch.ones(2, 3, dtype=torch.int64).to_sparse_csr(), "input_ids is a sparse_csr tensor"),
    ],
    ids=["bools", "a bool in a tuple", "meta", "meta row", "sparse", "sparse rows"],
)
def test_what_holds_no_ids_is_refused(engine, batch, message):
    with pytest.raises(ValueError, match=message):
        engine.fwd_bwd(batch)
