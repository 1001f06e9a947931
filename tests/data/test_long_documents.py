"""Documents and conversations that are as long as the longest sequences."""

import json
import tracemalloc

import pytest

from flexengine.data import ChatTokenizer, GlobalBatches, parse_source, prepare_sources, templates
from flexengine.data.preview import first_line
from flexengine.data.records import parse_record
from flexengine.data.validation import ValidationBatches
from flexengine.run.training_data import DEMO_FOLDER

NUM_TURNS, COPIES = 200, 6000
BYTES_PER_TOKEN = 150
"""Of ids as numbers of Python, 36 bytes, and what is beside them for a while."""


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.from_folder(DEMO_FOLDER)


def test_a_long_document_streams_in_memory_of_one_sequence(chat, tmp_path, monkeypatch):
    text = "The opposite of give is take. " * COPIES
    place = tmp_path / "long.jsonl"
    place.write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(2)))
    source = [parse_source(str(place))]
    ids = chat.encode_record(parse_record({"text": text}, "here")).input_ids
    (whole,) = prepare_sources(source, chat, len(ids), truncate_long=False, cache=None)
    assert whole.cut.lengths.tolist() == [len(ids)] * 2
    data, decoded = GlobalBatches.of_parts([whole], len(ids), seed=0), []
    monkeypatch.setattr(chat, "decode", lambda ids, **_: decoded.append(len(ids)) or "x" * len(ids))
    tracemalloc.start()
    data.fingerprint()
    for made in (data.batches(2), ValidationBatches.of_parts([whole], len(ids))):
        assert all(batch.input_ids == [ids] and batch.num_target_tokens == len(ids) - 1 for batch in made)
    assert len(first_line(chat, data.sequences[0])) < 1000
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(decoded) < len(ids) / 10
    assert 36 * len(ids) < peak_bytes < BYTES_PER_TOKEN * len(ids), f"{peak_bytes / len(ids):.0f} bytes a token"


def test_a_long_conversation_tells_that_it_goes_on(chat, monkeypatch):
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"This is number {i}."} for i in range(NUM_TURNS)]
    told = []
    monkeypatch.setattr(templates, "report_alive", told.append)
    found = chat.mark(parse_record({"messages": turns}, "here, line 3"))
    assert [found.text[span.start : span.end].split("<")[0].strip() for span in found.spans] == [
        turn["content"] for turn in turns[1::2]
    ]
    assert len(told) >= NUM_TURNS, "between two signs the time is bounded"
    assert set(told) == {"here, line 3"}
