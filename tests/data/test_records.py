"""Records of each schema, and that nothing of them is lost without a word."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from flexengine.data.records import IGNORE, Message, TokenizedRecord, named_columns, parse_record, remarks
from flexengine.data.sources import parse_columns

USER, ANSWER = Message("user", "2+2?"), Message("assistant", "4")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def turns(*pairs, keys=("role", "content")):
    return [dict(zip(keys, pair, strict=True)) for pair in pairs]


PAIR = turns(("user", "2+2?"), ("assistant", "4"))
CONVERSATIONS = {
    "role_content_in_conversations": ({"conversations": PAIR}, [USER, ANSWER]),
    "from_value_in_messages": (
        {"messages": turns(("human", "2+2?"), ("gpt", "4"), keys=("from", "value"))},
        [USER, ANSWER],
    ),
    "system_beside_messages": ({"messages": PAIR, "system": "Be brief"}, [Message("system", "Be brief"), USER, ANSWER]),
    "system_beside_conversations": (
        {"conversations": PAIR, "system_prompt": "Be brief"},
        [Message("system", "Be brief"), USER, ANSWER],
    ),
    "list_content": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"text": "2?"}]}, PAIR[1]]},
        [USER, ANSWER],
    ),
    "conversation_as_text": ({"messages": json.dumps(PAIR)}, [USER, ANSWER]),
    "null_columns": ({"messages": PAIR, "tools": None, "system": None, "images": None}, [USER, ANSWER]),
    "tool_calls": (
        {"messages": [PAIR[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        [USER, Message("assistant", None, {"tool_calls": [CALL]})],
    ),
    "arguments_as_text": (
        {
            "messages": [
                PAIR[0],
                {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]},
            ]
        },
        [USER, Message("assistant", None, {"tool_calls": [CALL]})],
    ),
    "old_function_call": (
        {
            "messages": [
                PAIR[0],
                {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}},
                {"role": "function", "name": "add", "content": "4"},
            ]
        },
        [USER, Message("assistant", None, {"tool_calls": [CALL]}), Message("tool", "4", {"name": "add"})],
    ),
    "sharegpt_calls": (
        {
            "conversations": turns(
                ("human", "2+2?"),
                ("function_call", '{"name": "add", "arguments": {"a": 2}}'),
                ("observation", "4"),
                ("gpt", "4"),
                keys=("from", "value"),
            ),
            "tools": '[{"name": "add", "parameters": {}}]',
        },
        [USER, Message("assistant", None, {"tool_calls": [CALL]}), Message("tool", "4"), ANSWER],
    ),
    "reasoning": (
        {"messages": [PAIR[0], {**PAIR[1], "reasoning_content": "two pairs"}]},
        [USER, Message("assistant", "4", {"reasoning_content": "two pairs"})],
    ),
    "weights": (
        {"messages": [{**PAIR[0], "weight": 0}, {**PAIR[1], "weight": 0}, PAIR[0], {**PAIR[1], "train": True}]},
        [
            Message("user", "2+2?", train=False),
            Message("assistant", "4", train=False),
            USER,
            Message("assistant", "4", train=True),
        ],
    ),
    "both_pairs_of_keys_one_null": (
        {
            "messages": [
                {"role": "user", "content": "2+2?", "from": None, "value": None},
                {"role": None, "content": None, "from": "gpt", "value": "4"},
            ]
        },
        [USER, ANSWER],
    ),
    "keys_of_both_pairs": (
        {"messages": [{"from": "human", "content": "2+2?"}, {"role": "assistant", "value": "4"}]},
        [USER, ANSWER],
    ),
    "both_pairs_say_the_same": (
        {"messages": [{"role": "user", "from": "human", "content": "2+2?", "value": "2+2?"}, PAIR[1]]},
        [USER, ANSWER],
    ),
    "roles_in_capitals_and_with_blanks": (
        {"messages": turns(("Human", "2+2?"), ("AI ", "4"), ("USER", "2+2?"), ("Assistant", "4"))},
        [USER, ANSWER, USER, ANSWER],
    ),
    "empty_media_and_annotations": (
        {"messages": [PAIR[0], {**PAIR[1], "annotations": []}], "images": [], "image": {"bytes": None, "path": None}},
        [USER, ANSWER],
    ),
    "a_part_beside_a_null_image": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?", "image": None}]}, PAIR[1]]},
        [USER, ANSWER],
    ),
    "alpaca_history": (
        {"instruction": "2+2?", "input": "", "output": "4", "history": [["1+1?", "2"]], "system": "Be brief"},
        [Message("system", "Be brief"), Message("user", "1+1?"), Message("assistant", "2"), USER, ANSWER],
    ),
    "query_and_response": ({"query": "2+2?", "response": "4"}, [USER, ANSWER]),
    "problem_and_solution": ({"problem": "2+2?", "solution": "4"}, [USER, ANSWER]),
    "input_and_output": ({"input": "2+2?", "output": "4"}, [USER, ANSWER]),
    "prompt_and_answer": ({"prompt": "2+2?", "answer": "4"}, [USER, ANSWER]),
    "dolly": (
        {"instruction": "2+2?", "context": "Numbers add up.", "response": "4"},
        [Message("user", "2+2?\n\nNumbers add up."), ANSWER],
    ),
    "open_orca": (
        {"system_prompt": "Be brief", "question": "2+2?", "response": "4"},
        [Message("system", "Be brief"), USER, ANSWER],
    ),
    "trl_lists": (
        {"prompt": turns(("user", "1+1?"), ("assistant", "2"), ("user", "2+2?")), "completion": [PAIR[1]]},
        [
            Message("user", "1+1?", train=False),
            Message("assistant", "2", train=False),
            Message("user", "2+2?", train=False),
            ANSWER,
        ],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations(name):
    raw, messages = CONVERSATIONS[name]
    unread = Counter()
    record = parse_record(raw, name, unread)
    assert list(record.messages) == messages
    assert not unread
    assert list(record.tools) == ([TOOL] if raw.get("tools") else [])


def test_columns_by_other_names():
    columns = {"prompt": "input", "answer": "target"}
    unread = Counter()
    row = named_columns({"input": "2+2?", "target": "4", "prompt": "old", "id": 3}, columns, unread)
    assert list(parse_record(row, "x", unread).messages) == [USER, ANSWER]
    assert unread == {"the column prompt, whose name --columns gives to another,": 1, "id": 1}
    assert named_columns({"text": "a"}, columns) == {"text": "a"}
    assert parse_record({"content": "a"}, "x").text == "a"
    with pytest.raises(ValueError, match="unknown record format with keys content, role"):
        parse_record({"role": "user", "content": "a"}, "x")
    assert parse_columns(["prompt=input", "text=a=b"]) == (("prompt", "input"), ("text", "a=b"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["prompt"], "--columns prompt: write NAME=COLUMN"),
        (["promt=a"], "records have no promt; did you mean prompt?"),
        (["text=a", "text=b"], "--columns gives text twice"),
    ],
)
def test_columns_that_cannot_be(given, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_columns(given)


TOKENS = {
    "all": ({"input_ids": [1, 2, 3]}, ([1, 2, 3], [1, 2, 3])),
    "labels": ({"input_ids": [1, 2, 3], "labels": [IGNORE, 2, 3]}, ([1, 2, 3], [IGNORE, 2, 3])),
    "mask": ({"input_ids": [1, 2, 3], "assistant_masks": [0, 0, 1]}, ([1, 2, 3], [IGNORE, IGNORE, 3])),
    "completion_mask": ({"input_ids": [1, 2], "completion_mask": [0, 1], "length": 2}, ([1, 2], [IGNORE, 2])),
    "padding_left": ({"input_ids": [0, 1, 2], "attention_mask": [0, 1, 1]}, ([1, 2], [1, 2])),
    "a_mask_of_bools": ({"input_ids": [1, 2], "loss_mask": [False, True]}, ([1, 2], [IGNORE, 2])),
    "labels_and_a_mask": (
        {"input_ids": [1, 2, 3], "labels": [IGNORE, 2, 3], "loss_mask": [1, 1, 0]},
        ([1, 2, 3], [IGNORE, 2, IGNORE]),
    ),
    "two_masks": (
        {"input_ids": [1, 2, 3], "assistant_masks": [1, 0, 1], "completion_mask": [0, 1, 1]},
        ([1, 2, 3], [IGNORE, IGNORE, 3]),
    ),
    "special_tokens": ({"input_ids": [1, 2], "special_tokens_mask": [1, 0]}, ([1, 2], [1, 2])),
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens(name):
    raw, expected = TOKENS[name]
    unread = Counter()
    assert parse_record(raw, name, unread).tokens == TokenizedRecord(*expected)
    assert not unread


REFUSED = {
    "preferences": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "a preference pair.*--objective dpo",
    ),
    "good_and_bad_answers": ({"prompt": "a", "completion": "b", "label": False}, "whether the answer is a good one"),
    "images": ({"messages": PAIR, "images": ["cat.png"]}, "images is not read, train takes text only"),
    "image_parts": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}, PAIR[1]]},
        r"part that is no text \(image\)",
    ),
    "two_systems": (
        {"messages": [{"role": "system", "content": "a"}, *PAIR], "system": "b"},
        "beside the conversation and another one in it",
    ),
    "half_a_weight": ({"messages": [PAIR[0], {**PAIR[1], "weight": 0.5}]}, "weight of a message is 0 or 1, found 0.5"),
    "trained_user": ({"messages": [{**PAIR[0], "train": True}, PAIR[1]]}, "train is set on a turn of user"),
    "call_without_name": (
        {"messages": [PAIR[0], {"role": "assistant", "tool_calls": [{"arguments": {}}]}]},
        "a tool call needs the name of a function",
    ),
    "call_that_is_no_json": (
        {"conversations": turns(("human", "a"), ("function_call", "add(2)"), keys=("from", "value"))},
        r"tools and tool calls must be JSON, found 'add\(2\)'",
    ),
    "null_content": ({"messages": [PAIR[0], {"role": "assistant", "content": None}]}, "content must be a string"),
    "a_refusal": (
        {"messages": [PAIR[0], {"role": "assistant", "content": None, "refusal": "no"}]},
        "content must be a string, found null beside a refusal.*a turn of assistant",
    ),
    "reasoning_alone": (
        {"messages": [PAIR[0], {"role": "assistant", "reasoning_content": "think"}]},
        "a message needs the keys role and content, found reasoning_content, role",
    ),
    "an_object_as_a_result": (
        {"messages": [*PAIR, {"role": "tool", "content": {"temp": 20}}]},
        r"content must be a string, found dict: \{'temp': 20\} \(a turn of tool\); write its JSON text",
    ),
    "a_number_as_a_result": ({"messages": [*PAIR, {"role": "tool", "content": 20}]}, "must be a string, found int: 20"),
    "role_and_from_differ": ({"messages": [{**PAIR[0], "from": "gpt"}]}, "role and from of a message say different"),
    "content_and_value_differ": ({"messages": [{**PAIR[0], "value": "3+3?"}]}, "content and value of a message say"),
    "an_image_beside_a_text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image": "cat.png"}]}, PAIR[1]]},
        "image is not read, train takes text only",
    ),
    "a_conversation_as_python_writes_it": ({"messages": str(PAIR)}, "a conversation that is a text must be JSON"),
    "a_tool_with_a_key_twice": ({"messages": PAIR, "tools": '{"name": "f", "name": "g"}'}, "'name' is listed twice"),
    "a_list_of_texts": ({"question": "a", "answer": ["b"]}, "answer is a list of 1 texts; write one text"),
    "nulls": ({"question": None, "answer": None}, r"the record is empty \(null: answer, question\)"),
    "a_null_answer": ({"question": "a", "answer": None}, r"with keys question \(null: answer\)"),
    "a_blank_in_a_key": ({"question": "a", " answer": "b"}, "with keys ' answer', question"),
    "bools_for_ids": ({"input_ids": [True, 2, 3]}, r"input_ids must be a flat list of integers, found \[True, 2, 3\]"),
    "bools_of_numpy_for_ids": ({"input_ids": np.array([True, False])}, "input_ids must be a flat list of integers"),
    "bools_for_labels": ({"input_ids": [1, 2], "labels": [True, 2]}, "labels must be a flat list of integers"),
    "floats_for_ids": ({"input_ids": [1.0, 2.0]}, "input_ids must be a flat list of integers"),
    "floats_for_a_mask": ({"input_ids": [1, 2], "loss_mask": [0.5, 1.0]}, "loss_mask must be a flat list of integers"),
    "packed_by_attention_mask": (
        {"input_ids": [1, 2], "attention_mask": [1, 2]},
        "attention_mask holds 0 and 1, found",
    ),
    "history_of_texts": ({"instruction": "a", "output": "b", "history": ["c"]}, "history must be a list of pairs"),
    "shifted_labels": ({"input_ids": [1, 2], "labels": [2, 3]}, "label 2 at position 0 is neither.*not shifted"),
    "uneven_labels": ({"input_ids": [1, 2], "labels": [2]}, "labels has 1 entries, input_ids has 2"),
    "negative_ids": ({"input_ids": [1, -100]}, "input_ids holds a negative number"),
    "nested_ids": ({"input_ids": [[1], [2]]}, "input_ids must be a flat list of integers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    raw, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"x\.jsonl, line 3: .*{message}"):
        parse_record(raw, "x.jsonl, line 3")


def test_keys_that_are_not_read_are_counted():
    unread = Counter()
    parse_record({"messages": [{**PAIR[0], "mood": "calm"}, PAIR[1]], "source": "web", "score": None}, "x", unread)
    parse_record({"text": "a", "source": "web"}, "x", unread)
    assert unread == {"source": 2, "mood of a message": 1}


def test_what_is_read_but_may_surprise_is_remarked():
    def of(raw):
        return list(remarks(parse_record(raw, "x")))

    assert of({"question": "a", "answer": ""}) == ["answers are empty, so that the model learns to say nothing"]
    assert of({"messages": [PAIR[0], {"role": "assistant", "content": " \n", "weight": 0}]}) == []
    assert of({"messages": [PAIR[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]}) == []
    assert of({"text": " "}) == ["texts are empty"]
    assert of({"messages": turns(("narrator", "a"), ("user", "b"), ("assistant", "c"))}) == [
        "turns have the unknown role 'narrator' and are context"
    ]
