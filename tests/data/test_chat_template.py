import json
import shutil

import pytest
from tokenizers import Tokenizer

from flexengine.data.chat_template import IGNORE, ChatTokenizer
from flexengine.data.sources import Message, Record
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
    "{%- for m in messages %}<|user|>{{ m.role }}\n{% generation %}{{ m.content }}<|end|>\n{% endgeneration %}"
    "{%- endfor %}{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
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


def targets(chat, record):
    """The text of each run of consecutive target tokens."""
    ids, labels = chat.encode_record(record)
    assert len(ids) == len(labels)
    assert all(label in (IGNORE, token) for token, label in zip(ids, labels, strict=True))
    runs, previous = [], IGNORE
    for label in labels:
        if label != IGNORE:
            runs = [*runs, []] if previous == IGNORE else runs
            runs[-1].append(label)
        previous = label
    return [chat.tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize("template", [LLAMA_3, CHATML, STRICT], ids=["llama3", "chatml", "strict"])
def test_loss_on_answers_and_their_end_token(template, caplog):
    assert targets(with_template(template), Record(messages=TURNS[1:])) == ["Paris.<|end|>", "Rome.<|end|>"]
    assert not caplog.records


def test_demo_template(demo):
    assert targets(demo, Record(messages=TURNS)) == ["Paris.<|end|>", "Rome.<|end|>"]
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
    # The last answer follows a blank, which is part of its first token.
    assert targets(chat, Record(messages=TURNS[1:])) == ["Paris.<|end|>", " Rome.<|end|>"]
    targets(chat, Record(messages=TURNS[1:]))
    assert [r.message for r in caplog.records] == [
        "the chat template rewrites earlier turns; targets are found by the content of each answer"
    ]


def test_fallback_template_ends_answers_with_eos():
    chat = with_template(None)
    assert not chat.has_own_template
    found = targets(chat, Record(messages=TURNS))
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
    conversation = [m._asdict() for m in TURNS]
    expected = reference.apply_chat_template(conversation, tokenize=True, return_dict=True)["input_ids"]
    assert demo.encode_record(Record(messages=TURNS)).input_ids == expected


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
