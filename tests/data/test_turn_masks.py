"""Turns that a record masks are not trained, whichever tool named the mask; what may be a mask is never passed over."""

from collections import Counter

import pytest

from flexengine.data import ChatTokenizer, parse_record
from flexengine.data.masks import LeftOutError
from flexengine.data.turn_masks import TRAINED
from flexengine.models.registry import ASSETS

USER, WRONG, GOOD = ({"role": role, "content": text} for role, text in
                     (("user", "q"), ("assistant", "wrong"), ("assistant", "good")))  # fmt: skip


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.from_folder(ASSETS / "demo")


def trained(chat, raw):
    unread = Counter()
    ids, labels = chat.encode_record(parse_record(raw, "x.jsonl, line 3", unread))
    assert not unread
    return chat.decode([token for token, label in zip(ids, labels, strict=True) if label == token])


def conversation(**says):
    return {"messages": [USER, {**WRONG, **says}, USER, GOOD]}


@pytest.mark.parametrize("key", TRAINED)
def test_every_name_of_a_mask_is_honoured(chat, key):
    for no in (0, False, 0.0, "false", "False", "0"):
        assert trained(chat, conversation(**{key: no})) == "good"
    for yes in (1, True, 1.0, "true", None):
        assert trained(chat, conversation(**{key: yes})) == "wronggood"


def test_the_mask_that_means_the_reverse(chat):
    assert trained(chat, conversation(masked=True)) == "good"
    assert trained(chat, conversation(masked=False, weight=1)) == "wronggood"


def test_masks_of_sharegpt_turns_and_of_completions(chat):
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "wrong", "loss": False}]
    turns += [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good", "loss": True}]
    assert trained(chat, {"conversations": turns}) == "good"
    assert trained(chat, {"prompt": [USER], "completion": [{**WRONG, "trainable": False}, USER, GOOD]}) == "good"


REFUSED = {
    "half": (conversation(loss_weight=0.5), "loss_weight of a message is 0 or 1, found 0.5"),
    "a_word": (conversation(train="maybe"), "train of a message is 0 or 1, found 'maybe'"),
    "a_mask_of_tokens": (conversation(loss_mask=[0, 1]), r"loss_mask of a message is 0 or 1, found \[0, 1\]"),
    "yes_and_no": (conversation(weight=1, loss=False), "weight and loss of a message contradict each other"),
    "reversed": (conversation(train=True, masked=True), "train and masked of a message contradict each other"),
    "a_trained_question": ({"messages": [{**USER, "trainable": True}, GOOD]}, "trainable is set on a turn of user"),
    "parts_of_a_turn": (
        conversation(train_detail=[{"begin_offset": 0, "end_offset": 2, "train": False}]),
        "train_detail of a message may say what is trained, and is not read",
    ),
    "a_scale": (conversation(loss_scale=0), "loss_scale of a message may say"),
    "no_loss": (conversation(no_loss=True), "no_loss of a message may say"),
    "camel_case": (conversation(shouldTrain=False), "shouldTrain of a message may say"),
    "ignored": (conversation(ignore="true"), "ignore of a message may say"),
    "a_masked_part": (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a", "train": False}]}]},
        "train of a part may say",
    ),
    "a_masked_call": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "weight": 0}]}]},
        "weight of a tool call may say",
    ),
    "a_trained_prompt": (
        {"prompt": [USER, {**WRONG, "train": True}, USER], "completion": [GOOD]},
        "a turn of prompt is to be trained; only completion is",
    ),
    "record_not_trained": ({**conversation(), "train": False}, "train of the record, False, may say what is trained"),
    "record_of_weight_0": ({"question": "a", "answer": "b", "weight": "0"}, "weight of the record, '0', may say"),
    "record_of_half_a_weight": ({"question": "a", "answer": "b", "sample_weight": 0.5}, "sample_weight of the record"),
    "turns_by_a_list": ({**conversation(), "loss_mask": [0, 0, 0, 1]}, r"loss_mask of the record, \[0, 0, 0, 1\]"),
    "unmasked": ({**conversation(), "unmask": True}, "unmask of the record, True"),
    "weights_of_tokens": ({"input_ids": [1, 2], "loss_weights": [0.0, 1.0]}, "loss_weights of the record"),
    "a_weight_of_a_spreadsheet": ({"question": "a", "answer": "b", "weight": "0.5"}, "weight of the record, '0.5'"),
    "a_mask_of_a_spreadsheet": ({"text": "a b", "loss_mask": "[0, 1]"}, r"loss_mask of the record, '\[0, 1\]'"),
    "labels_beside_a_text": ({"text": "a b", "input_ids": [1, 2], "labels": [-100, 2]}, r"labels of the record, \["),
    "a_mask_of_a_text": ({"text": "a b", "train_mask": [0, 1]}, "train_mask of the record"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_be_a_mask_is_refused_by_name(name):
    raw, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"x\.jsonl, line 3: {message}"):
        parse_record(raw, "x.jsonl, line 3")


def test_what_is_no_mask_is_read_past_and_told():
    unread = Counter()
    beside = {"loss": 2.31, "weight": 1, "sample_weight": 1.0, "train": True, "masked": None, "training_set": "web"}
    turn = {**GOOD, "constraint": 1, "training_note": "from the web", "train_detail": []}
    parse_record({"messages": [USER, turn], **beside}, "x", unread)
    assert unread == {"loss": 1, "training_set": 1, "constraint of a message": 1, "training_note of a message": 1}
    parse_record({"text": "a", "input_ids": [1], "attention_mask": [1], "labels": [1]}, "x")


def test_training_every_token_leaves_records_that_mask_turns_out(chat):
    chat.train_on = "all"
    try:
        with pytest.raises(LeftOutError, match="it masks a turn, and --train-on all trains every token"):
            trained(chat, conversation(loss=False))
        assert "wrong" in trained(chat, {"prompt": [USER, WRONG, USER], "completion": [GOOD]})
    finally:
        chat.train_on = "assistant"
