import dataclasses
import json
import shutil

import pytest
from conversations import trained_runs
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from flexengine.data import templates
from flexengine.data.encoding import encode_records
from flexengine.data.records import IGNORE, Message, Record, TokenizedRecord
from flexengine.data.tokenizer import ChatTokenizer
from flexengine.models.registry import ASSETS

DEMO = ASSETS / "demo"
TURNS = (
    Message("system", "Be brief."),
    Message("user", "What is the capital of France?"),
    Message("assistant", "Paris."),
    Message("user", "And of Italy? Say Paris or Rome."),
    Message("assistant", "Rome."),
)

LLAMA_3 = (  # written after the published description of the Llama 3 prompt format, with its trimming of contents
    "{{ bos_token }}{% for m in messages %}{{ '<|user|>' + m['role'] + '\n\n' + m['content'] | trim + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|user|>assistant\n\n' }}{% endif %}"
)
CHATML = (  # a newline after the end-of-turn token
    "{%- for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{%- endfor %}{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
MARKED = (  # marks the content of each answer in a piece of its own, and its end
    "{%- for m in messages %}<|user|>{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% generation %}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
    "{%- endfor %}"
)
STRICT = (  # refuses a conversation that does not begin with a user, and a prefix without messages
    "{% if not messages or messages[0].role == 'assistant' %}{{ raise_exception('user first') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REWRITING = (  # writes an earlier answer differently from the last one, so no prefix is stable
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% if loop.last %}(thought) {% endif %}"
    "{{ m.content }}<|end|>{% else %}<|user|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def demo():
    return ChatTokenizer.from_folder(DEMO)


def with_template(template):
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return ChatTokenizer(tokenizer, template, "<|begin_of_text|>", "<|end|>")


@pytest.mark.parametrize("template", [LLAMA_3, CHATML, STRICT, MARKED], ids=["llama3", "chatml", "strict", "marked"])
def test_loss_on_answers_and_their_end_token(template, caplog):
    assert trained_runs(with_template(template), Record(messages=TURNS[1:])) == ["Paris.<|end|>", "Rome.<|end|>"]
    assert not caplog.records


def test_demo_template(demo):
    assert trained_runs(demo, Record(messages=TURNS)) == ["Paris.<|end|>", "Rome.<|end|>"]
    ids, labels = demo.encode_record(Record(messages=TURNS))
    assert ids[0] == 0
    assert labels[0] == IGNORE
    assert demo.stop_ids == {demo.tokenizer.token_to_id("<|end|>")}


def test_prompt_is_the_prefix_of_the_training_sequence(demo):
    ids, labels = demo.encode_record(Record(messages=TURNS[1:3]))
    first_target = next(i for i, label in enumerate(labels) if label != IGNORE)
    assert demo.encode_prompt(TURNS[1].content) == ids[:first_target]
    assert demo.decode(ids[first_target:]) == "Paris."


def test_template_that_rewrites_history_says_so_once(caplog):
    chat = with_template(REWRITING)
    assert trained_runs(chat, Record(messages=TURNS[1:])) == ["(thought) Rome.<|end|>"]
    trained_runs(chat, Record(messages=TURNS[1:]))
    assert [r.message for r in caplog.records] == [
        "the chat template rewrites earlier turns; of such a conversation only the last are trained"
    ]


def test_marks_of_a_turn_are_found_where_only_some_turns_are_trained():
    first = dataclasses.replace(TURNS[2], train=False)
    chat = with_template(MARKED)
    assert trained_runs(chat, Record(messages=TURNS[1:])) == ["Paris.<|end|>", "Rome.<|end|>"]
    assert trained_runs(chat, Record(messages=(TURNS[1], first, *TURNS[3:]))) == ["Rome.<|end|>"]
    chat.train_on = "last"
    assert trained_runs(chat, Record(messages=TURNS[1:])) == ["Rome.<|end|>"]


def test_an_answer_that_lacks_the_opening_it_is_asked_with_begins_after_what_they_share():
    opened = "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    opened += "{% if add_generation_prompt %}<|user|>assistant\n(thinks:{% endif %}"
    said = Message("assistant", "(thinking is over) Rome.")  # shares "(think" with the opening, which is no boundary
    assert trained_runs(with_template(opened), Record(messages=(TURNS[1], said))) == ["(thinking is over) Rome.<|end|>"]


def test_conversations_without_an_end_are_counted():
    chat = with_template("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")
    list(encode_records([Record(messages=TURNS[1:])] * 3, chat))
    (note,) = chat.notes.items()
    assert note == ("conversations end without a token that ends a turn, so that the model may not learn to stop", 3)


LATIN = st.text(st.characters(categories=["L", "N", "P", "Zs"], exclude_characters="<>|"), max_size=12)


@given(st.lists(st.tuples(LATIN, LATIN), min_size=1, max_size=4), st.sampled_from([LLAMA_3, CHATML, STRICT, MARKED]))
def test_trained_tokens_say_every_answer_once_and_nothing_of_a_user(pairs, template):
    said = [(f"u{question}", answer.strip()) for question, answer in pairs]
    turns = [turn for q, a in said for turn in (Message("user", q), Message("assistant", a))]
    assert trained_runs(with_template(template), Record(messages=tuple(turns))) == [f"{a}<|end|>" for _, a in said]


def test_stored_truncation_and_padding_are_switched_off(tmp_path):
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Record(text="The river is wide and long, and slow.")
    assert ChatTokenizer.from_folder(tmp_path).encode_record(text) == with_template(None).__class__(
        Tokenizer.from_file(str(DEMO / "tokenizer.json")), None
    ).encode_record(text)


def test_what_the_tokenizer_cannot_encode_is_told_with_the_text():
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match=r"the tokenizer cannot encode 'b'.*fetch tokenizer.json"):
        ChatTokenizer(tokenizer, None).encode_record(Record(text="b"))


def test_templates_have_a_limit_of_time(monkeypatch):
    monkeypatch.setattr(templates, "TEMPLATE_SECONDS", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match=r"refuses.*did not end within 0.2 s"):
        with_template(endless).encode_record(Record(messages=TURNS))


def test_templates_have_a_limit_of_size(monkeypatch):
    monkeypatch.setattr(templates, "TEMPLATE_CHARACTERS", 1000)
    with pytest.raises(ValueError, match="wrote 5000 characters, the limit is 1000"):
        with_template("{{ 'a' * 5000 }}").encode_record(Record(messages=TURNS))


def test_many_records_are_encoded_as_one_is(demo, monkeypatch):
    monkeypatch.setattr("flexengine.data.encoding.BATCH_CHARACTERS", 100)
    tokens = Record(tokens=TokenizedRecord([5, 6], [IGNORE, 6]))
    records = [Record(messages=TURNS), Record(text="The river."), tokens, *[Record(messages=TURNS[1:])] * 5]
    assert list(encode_records(records, demo)) == [demo.encode_record(record) for record in records]


def test_a_record_that_a_template_would_lose_a_part_of_is_left_out_and_counted(demo):
    with_tools = Record(messages=TURNS, tools=({"type": "function", "function": {"name": "get_weather"}},))
    assert list(encode_records([with_tools, with_tools], demo)) == []
    assert demo.left_out == {"the chat template does not write the record's tools": 2}


def test_ids_above_the_vocabulary_are_refused(demo):
    with pytest.raises(ValueError, match=r"input_ids hold 999999, the tokenizer's largest id is \d+"):
        demo.encode_record(Record(tokens=TokenizedRecord([1, 999999], [1, 1])))


@pytest.mark.parametrize("place", ["config", "file"])
def test_conversations_with_tools_may_have_a_template_of_their_own(tmp_path, place):
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    with_tools = STRICT.replace("{% for m", "{{ tools[0].function.name }}{% for m", 1)
    named = [{"name": "default", "template": STRICT}]
    if place == "config":
        named.append({"name": "tool_use", "template": with_tools})
    else:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chat, tool = ChatTokenizer.from_folder(tmp_path), {"type": "function", "function": {"name": "get_weather"}}
    called = chat.encode_record(Record(messages=TURNS[1:], tools=(tool,)))
    assert chat.tokenizer.decode(called.input_ids, skip_special_tokens=False).startswith("get_weather<|user|>")
    assert trained_runs(chat, Record(messages=TURNS[1:])) == ["Paris.<|end|>", "Rome.<|end|>"]


def test_invented_template_is_told_and_exported(caplog):
    chat = with_template(None)
    chat.encode_record(Record(messages=TURNS))
    assert "no chat template" in caplog.text
    assert "### {{ message['role'] | capitalize }}" in caplog.text
    assert chat.own_files() == {"chat_template.jinja": chat.template}
    assert with_template(LLAMA_3).own_files() == {}  # the folder has its own already


def test_fallback_template_ends_answers_with_eos():
    chat = with_template(None)
    assert not chat.has_own_template
    found = trained_runs(chat, Record(messages=TURNS))
    assert found == ["Paris.<|end|>", "Rome.<|end|>"]


def test_plain_text_is_all_target_with_bos_and_eos(demo):
    ids, labels = demo.encode_record(Record(text="The river is wide."))
    assert ids == labels
    assert (ids[0], ids[-1]) == (demo.tokenizer.token_to_id("<|begin_of_text|>"), demo.tokenizer.token_to_id("<|end|>"))
    assert ids.count(ids[0]) == 1


def test_conversation_that_the_template_refuses():
    with pytest.raises(ValueError, match="refuses a conversation of assistant: user first"):
        with_template(STRICT).encode_record(Record(messages=(Message("assistant", "hi"),)))


def test_template_does_not_parse():
    with pytest.raises(ValueError, match="does not parse: line 1"):
        with_template("{% for m in messages %}")


def test_sandbox_refuses_private_attributes():
    with pytest.raises(ValueError, match="refuses"):
        with_template("{{ messages.__class__.__mro__ }}").encode_record(Record(messages=TURNS))


def test_agrees_with_transformers(demo):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(DEMO)
    conversation = [m.for_template() for m in TURNS]
    expected = reference.apply_chat_template(conversation, tokenize=True, return_dict=True)["input_ids"]
    assert demo.encode_record(Record(messages=TURNS)).input_ids == expected


def test_a_tokenizer_model_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.model").write_bytes(b"no sentencepiece model")
    with pytest.raises(ValueError, match=r"tokenizer\.model cannot be read as a tokenizer: .*; fetch tokenizer\.model"):
        ChatTokenizer.from_folder(tmp_path)


def test_folder_variants(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        ChatTokenizer.from_folder(tmp_path)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    assert not ChatTokenizer.from_folder(tmp_path).has_own_template
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": STRICT}]
    config = {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": None, "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = ChatTokenizer.from_folder(tmp_path)
    assert chat.has_own_template
    assert (chat.bos_token, chat.eos_token) == ("<|begin_of_text|>", "")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert ChatTokenizer.from_folder(tmp_path).encode_prompt("x") == with_template(CHATML).encode_prompt("x")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as a tokenizer"):
        ChatTokenizer.from_folder(tmp_path)
