"""Chat templates of many models against kinds of conversations: trained is what the model would be asked to write."""

from functools import cache

import pytest
from conversations import BOS_EOS, EARLIER, ENDED, KINDS, chat_of, record_of, trained_runs
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.data.encoding import encode_records
from flexengine.data.masks import LeftOutError
from flexengine.data.records import IGNORE, Message, Record

PLAIN = ("single", "several", "system", "system_several", "one_letter", "echo", "unicode", "empty_answer")
NO_SYSTEM = {"gemma-2", "mistral-v1"}
TOOL_CALLS = {
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Zürich"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
    "gpt-oss": ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Zürich"}<|call|>',
    "llama-3.1": '{"name": "get_weather", "parameters": {"city": "Zürich"}}<|eot_id|>',
    "mistral-v3": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich"}, "id": "call12345"}]</s>',
    "qwen2.5": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call><|im_end|>',
    "qwen3": "<think>\n\n</think>\n\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call><|im_end|>',
}
REASONING = {
    "gpt-oss": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>",
    "qwen3": "<think>\n{}\n</think>\n\n{}<|im_end|>",
}


@pytest.fixture(scope="module", params=BOS_EOS)
def named(request):
    return request.param, chat_of(request.param)


def answers(kind):
    return [turn["content"] for turn in KINDS[kind]["messages"] if turn["role"] == "assistant"]


@pytest.mark.parametrize("kind", PLAIN)
def test_answers_and_their_end_are_trained(named, kind):
    name, chat = named
    if kind.startswith("system") and name in NO_SYSTEM:
        with pytest.raises(ValueError, match="refuses a conversation of system"):
            chat.encode_record(record_of(kind))
    elif kind.startswith("system") and name == "mistral-v3":  # it writes the system text while it asks, and only then
        with pytest.raises(LeftOutError, match="otherwise than it asks"):
            chat.encode_record(record_of(kind))
    else:
        *earlier, last = answers(kind)
        kept = [EARLIER[name].format(text) for text in earlier if EARLIER[name]]
        assert trained_runs(chat, record_of(kind)) == [*kept, ENDED[name].format(last)]


SAID = st.text(st.characters(codec="utf-8", exclude_characters="<>[]|｜▁"), max_size=20).map(str.strip)
chat_once = cache(chat_of)


@settings(max_examples=150)
@given(st.sampled_from(sorted(BOS_EOS)), st.lists(st.tuples(SAID, SAID), min_size=1, max_size=3))
def test_any_answers_are_trained_once_and_no_question(name, pairs):
    turns = [turn for q, a in pairs for turn in (Message("user", q), Message("assistant", a))]
    *earlier, last = [answer for _, answer in pairs]
    expected = [EARLIER[name].format(text) for text in earlier if EARLIER[name]] + [ENDED[name].format(last)]
    assert trained_runs(chat_once(name), Record(messages=tuple(turns))) == expected


def test_a_turn_of_weight_0_is_context(named):
    name, chat = named
    assert trained_runs(chat, record_of("first_not_trained")) == [ENDED[name].format("Right.")]


@pytest.mark.parametrize("train_on", ["last", "all"])
def test_train_on(named, train_on):
    name, chat = named
    chat.train_on = train_on
    try:
        ids, labels = chat.encode_record(record_of("several"))
        runs = trained_runs(chat, record_of("several"))
    finally:
        chat.train_on = "assistant"
    assert runs == [ENDED[name].format("Rome!")] if train_on == "last" else ids == labels


def test_tool_calls_are_trained_or_the_record_is_not(named):
    name, chat = named
    if name in TOOL_CALLS:
        assert trained_runs(chat, record_of("tool_call")) == [TOOL_CALLS[name]]
        call = [] if name == "qwen3" else [TOOL_CALLS[name]]  # qwen3 rewrites a call once it has a result
        assert trained_runs(chat, record_of("tool_result")) == [*call, ENDED[name].format("Warm: 21.")]
    else:
        for kind in ("tool_call", "tool_result"):
            with pytest.raises(ValueError, match=r"does not write the record's tools|refuses a conversation of user"):
                chat.encode_record(record_of(kind))


def test_reasoning_is_trained_or_the_record_is_not(named):
    name, chat = named
    if name in REASONING:
        assert trained_runs(chat, record_of("reasoning")) == [REASONING[name].format("Two pairs", "4.")]
        assert trained_runs(chat, record_of("reasoning_several")) == [REASONING[name].format("Two threes", "6.")]
    else:
        for kind in ("reasoning", "reasoning_several"):
            with pytest.raises(LeftOutError, match="does not write the reasoning of a turn of assistant"):
                chat.encode_record(record_of(kind))


def test_a_thought_inside_the_content_is_trained_or_the_record_is_not(named):
    name, chat = named
    record = record_of("thought_in_content")
    if name == "deepseek-v3":  # it drops what stands before </think>
        with pytest.raises(LeftOutError, match="does not write the content of a turn of assistant"):
            chat.encode_record(record)
        return
    (run,) = trained_runs(chat, record)
    assert run.count("<think>\nTwo pairs\n</think>\n\nIt is 4.") == 1


def test_rewritten_turns_are_counted_and_told_once(caplog):
    chat = chat_of("qwen3")
    list(encode_records([record_of("several"), record_of("one_letter")], chat))
    assert sum(chat.notes.values()) == 2
    assert [r.message for r in caplog.records] == [
        "the chat template rewrites earlier turns; of such a conversation only the last are trained"
    ]


@pytest.mark.parametrize("kind", PLAIN)
def test_marked_turns_are_those_of_transformers(kind, tmp_path):
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    chat = chat_of("smollm3")
    reference = PreTrainedTokenizerFast(
        tokenizer_object=chat.tokenizer,
        chat_template=chat.template,
        **{"bos_token": chat.bos_token, "eos_token": chat.eos_token},
    )
    expected = reference.apply_chat_template(
        KINDS[kind]["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, labels = chat.encode_record(record_of(kind))
    assert ids == expected["input_ids"]
    assert [int(label != IGNORE) for label in labels] == expected["assistant_masks"]


@pytest.mark.parametrize("kind", ["single", "several", "unicode", "tool_result", "reasoning"])
def test_ids_are_those_of_transformers(kind):
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    for name in ("qwen3", "gpt-oss", "llama-3.1"):
        chat = chat_of(name)
        if kind == "reasoning" and name == "llama-3.1":
            continue
        tokens = {"bos_token": chat.bos_token or None, "eos_token": chat.eos_token}
        reference = PreTrainedTokenizerFast(tokenizer_object=chat.tokenizer, chat_template=chat.template, **tokens)
        record = record_of(kind)
        messages = [message.for_template() for message in record.messages]
        expected = reference.apply_chat_template(messages, tools=list(record.tools) or None, return_dict=True)
        assert chat.encode_record(record).input_ids == expected["input_ids"]
