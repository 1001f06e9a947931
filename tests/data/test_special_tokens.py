"""Special tokens around texts and behind answers: what the files of a tokenizer name, in each form that they have."""

import json
import shutil

import pytest
import transformers
from tokenizers import Tokenizer, processors

from flexengine.data.encoding import encode_records
from flexengine.data.records import Message, Record
from flexengine.data.tokenizer import ChatTokenizer
from flexengine.models.registry import ASSETS

DEMO = ASSETS / "demo"
TEXT = "The capital of Latvia is Riga."
BEGIN, PAD, USER, END = "<|begin_of_text|>", "<|pad|>", "<|user|>", "<|end|>"
OWN = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
ID = OWN.token_to_id
PLAIN = OWN.encode(TEXT, add_special_tokens=False).ids


def folder_with(folder, options, post_processor=None, **files):
    """A folder with the bundled tokenizer; post_processor "" takes its own away, `files` are JSON files by stem."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    if post_processor is not None:
        text = json.loads(tokenizer.to_str())
        tokenizer = Tokenizer.from_str(json.dumps({**text, "post_processor": None}))
    if post_processor:
        template = {"single": post_processor, "special_tokens": [(t, ID(t)) for t in (BEGIN, END)]}
        tokenizer.post_processor = processors.TemplateProcessing(**template)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, contents in {"tokenizer_config": options, **files}.items():
        if contents is not None:
            (folder / f"{name}.json").write_text(json.dumps(contents))
    return folder


def ids_of(folder, text=TEXT):
    found = ChatTokenizer.from_folder(folder).encode_record(Record(text=text))
    assert found.labels == found.input_ids
    return found.input_ids


ADDS_NONE = {"bos_token": BEGIN, "eos_token": END}


@pytest.mark.parametrize(
    ("config", "post_processor", "begins", "ends"),
    [
        (ADDS_NONE, None, [BEGIN], [END]),
        (ADDS_NONE, "", [], [END]),
        ({**ADDS_NONE, "add_bos_token": False}, "", [], [END]),
        ({**ADDS_NONE, "bos_token": USER}, "", [], [END]),
        ({**ADDS_NONE, "bos_token": END}, "", [], [END]),
        ({**ADDS_NONE, "pad_token": END}, "", [], [END]),
        ({"eos_token": END}, "", [], [END]),
        (ADDS_NONE, f"{BEGIN} $A {END}", [BEGIN], [END]),
        (ADDS_NONE, f"$A {END}", [], [END]),
        ({"eos_token": PAD}, f"$A {END}", [], [END, PAD]),
        ({"eos_token": {"content": END, "lstrip": False}}, "", [], [END]),
        ({"eos_token": {"__type": "AddedToken", "content": END, "lstrip": False}}, "", [], [END]),
    ],
)
def test_a_text_has_the_ids_of_its_tokenizer_and_its_end_once(tmp_path, config, post_processor, begins, ends, caplog):
    folder = folder_with(tmp_path, config, post_processor)
    assert ids_of(folder) == [*map(ID, begins), *PLAIN, *map(ID, ends)]
    if "__type" in str(config) or not isinstance(config["eos_token"], dict):  # transformers refuses others
        expected = transformers.AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
        assert ids_of(folder)[: len(expected)] == expected
    assert not caplog.records


LISTED = {"added_tokens_decoder": {str(ID(END)): {"content": END, "special": True}}}


@pytest.mark.parametrize(
    "files",
    [
        {"special_tokens_map": {"eos_token": END}},
        {"special_tokens_map": {"eos_token": {"content": END, "lstrip": False, "normalized": False}}},
        {"tokenizer_config": LISTED, "special_tokens_map": {"eos_token": {"content": END}}},
        {"config": {"model_type": "llama", "eos_token_id": ID(END)}},
        {"config": {"model_type": "gemma3", "text_config": {"eos_token_id": [ID(END), ID(PAD)]}}},
        {"generation_config": {"eos_token_id": [ID(END), ID(PAD)]}, "config": {"eos_token_id": ID(USER)}},
    ],
)
def test_an_end_is_found_where_tokenizer_config_names_none(tmp_path, files, caplog):
    folder = folder_with(tmp_path, None, "", **files)
    assert ids_of(folder) == [*PLAIN, ID(END)]
    assert not caplog.records


def test_an_end_that_only_the_class_of_the_model_names(tmp_path):
    config = {"model_type": "gpt2", "vocab_size": 2944, "n_layer": 1}
    folder = folder_with(tmp_path, {"model_max_length": 1024}, "", config=config)
    text = (folder / "tokenizer.json").read_text().replace(END, "<|endoftext|>")
    (folder / "tokenizer.json").write_text(text)
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == "<|endoftext|>"  # nothing in the files does
    assert ids_of(folder) == [*PLAIN, ID(END)]


@pytest.mark.parametrize("config", [{}, {"eos_token": None}, {"eos_token": "<|no such token|>"}])
def test_texts_without_an_end_are_told(tmp_path, config, caplog):
    chat = ChatTokenizer.from_folder(folder_with(tmp_path, config, ""))
    assert [row.input_ids for row in encode_records([Record(text=TEXT)] * 3, chat)] == [PLAIN] * 3
    assert [record.message[:52] for record in caplog.records] == [
        "the tokenizer names no token that ends a text, so te"
    ]
    assert list(chat.notes.values()) == [3]


def test_what_a_text_begins_and_ends_with_already_is_not_written_twice(tmp_path):
    folder = folder_with(tmp_path, ADDS_NONE)
    assert ids_of(folder, f"{BEGIN}{TEXT}{END}") == [ID(BEGIN), *PLAIN, ID(END)]
    chat = ChatTokenizer.from_folder(folder)
    assert chat.encode_prompt(TEXT, raw=True) == [ID(BEGIN), *PLAIN]
    conversation = Record(messages=(Message("user", "a"), Message("assistant", "b")))
    assert chat.encode_record(conversation).input_ids.count(ID(BEGIN)) == 1  # the made-up template writes it, too


def test_a_made_up_template_begins_and_ends_as_the_tokenizer_does(tmp_path):
    chat = ChatTokenizer.from_folder(
        folder_with(tmp_path, {"bos_token": USER}, "", generation_config={"eos_token_id": ID(END)})
    )
    found = chat.encode_record(Record(messages=(Message("user", "a"), Message("assistant", "b"))))
    assert chat.tokenizer.decode(found.input_ids, skip_special_tokens=False).startswith("### User:")
    assert ID(END) in found.labels
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    for name, text in chat.own_files().items():  # transformers writes the same with it
        (tmp_path / name).write_text(text)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(turns).input_ids == found.input_ids


def test_a_class_of_the_folder_s_own_is_not_run(tmp_path):
    config = {**ADDS_NONE, "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own"}
    folder = folder_with(tmp_path, config, "", config={"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    (folder / "tokenization_own.py").write_text("raise SystemExit('this ran')")
    (folder / "own.py").write_text("raise SystemExit('this ran')")
    assert ids_of(folder) == [*PLAIN, ID(END)]


# ---- the end of an answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({"generation_config": {"eos_token_id": [6, 9]}, "config": {"eos_token_id": 7}}, {6, 9}),
        ({"generation_config": {"eos_token_id": 9}}, {9}),
        ({"generation_config": {"pad_token_id": 2}, "config": {"eos_token_id": [7]}}, {7}),
        ({"config": {"eos_token_id": 7}}, {7}),
        ({"config": {"text_config": {"eos_token_id": [7, 8]}}}, {7, 8}),
        ({}, {ID(END), ID(PAD)}),
    ],
)
def test_answers_stop_where_those_of_transformers_do(tmp_path, files, stops):
    template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    folder = folder_with(tmp_path, {"eos_token": PAD, "chat_template": template}, **files)
    assert ChatTokenizer.from_folder(folder).stop_ids == stops


def test_ends_that_are_no_ids_are_refused(tmp_path):
    folder = folder_with(tmp_path, ADDS_NONE, generation_config={"eos_token_id": ["<|end|>"]})
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id is \['<|end|>'\], expected ids"):
        ChatTokenizer.from_folder(folder)


def test_conversations_that_end_where_generation_goes_on_are_told_once(tmp_path, caplog):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    conversation = Record(messages=(Message("user", "a"), Message("assistant", "b")))
    for ends, warnings in (([ID(PAD)], 1), ([ID(PAD), ID(END)], 0)):
        caplog.clear()
        files = {"generation_config": {"eos_token_id": ends}}
        chat = ChatTokenizer.from_folder(folder_with(tmp_path, {"chat_template": template}, **files))
        list(encode_records([conversation] * 2, chat))
        assert len(caplog.records) == warnings
        assert all("add its id 6 to eos_token_id" in record.message for record in caplog.records)
