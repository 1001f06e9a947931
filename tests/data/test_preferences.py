"""Records of preferences: every format, what has a loss, what is refused, and pairs on disk and in batches."""

import json
from collections import Counter

import numpy as np
import pytest

from flexengine.data import ChatTokenizer, GlobalBatches, ValidationBatches, hold_out, prepare_sources, sources_of
from flexengine.data.preferences import parse_pair, parse_ranking, parse_rated, with_others
from flexengine.models.registry import ASSETS

USER, GOOD, BAD = {"role": "user", "content": "a?"}, *({"role": "assistant", "content": c} for c in ("yes", "no"))
EARLIER = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
PAIRS = {
    "texts": {"prompt": "a?", "chosen": "yes", "rejected": "no"},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "one message": {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    "a text before messages": {"prompt": "a?", "chosen": [GOOD], "rejected": [BAD]},
    "texts after messages": {"prompt": [USER], "chosen": "yes", "rejected": "no"},
    "whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "whole conversations and their question": {"prompt": "a?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "a?"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    "instruction": {"instruction": "a?", "input": "", "chosen": "yes", "rejected": "no"},
    "question": {"question": "a?", "chosen": "yes", "rejected": "no"},
    "query": {"query": "a?", "chosen": "yes", "rejected": "no"},
}


def said(record):
    return [(turn.role, turn.content) for turn in record.messages]


@pytest.mark.parametrize("name", PAIRS)
def test_formats_of_pairs(name):
    unread = Counter()
    found = parse_pair({**PAIRS[name], "score": 4, "extra": None}, "f, line 1", unread)
    assert said(found.first) == [("user", "a?"), ("assistant", "yes")]
    assert said(found.second) == [("user", "a?"), ("assistant", "no")]
    assert unread == {"score": 1}


@pytest.mark.parametrize(
    "raw",
    [
        {"prompt": [*EARLIER, USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]},
        {"conversations": [*EARLIER, USER], "chosen": GOOD, "rejected": BAD},
        {"instruction": "a?", "history": [["hi", "ho"]], "chosen": "yes", "rejected": "no"},
    ],
    ids=["prompt", "whole", "conversations", "history"],
)
def test_earlier_answers_are_context(raw):
    for record in (found := parse_pair(raw, "f, line 1")).first, found.second:
        assert [turn.train for turn in record.messages if turn.role == "assistant"] == [False, None]


@pytest.mark.parametrize(
    ("raw", "message"),
    {
        "one side": ({"prompt": "a", "chosen": "b"}, "the pair has no rejected; a pair is .*--columns chosen=NAME"),
        "no prompt": ({"chosen": "H: a A: b", "rejected": "H: a A: c"}, "no prompt, and chosen and rejected are texts"),
        "nothing shared": ({"chosen": [GOOD], "rejected": [BAD]}, "no prompt, and .* without a common beginning"),
        "the same": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same, so there is nothing to prefer"),
        "no answer": ({"prompt": [USER], "chosen": [GOOD], "rejected": [USER]}, "must end with a turn of"),
        "media": ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x"]}, "images is not read"),
        "no object": (["a"], "must be a JSON object, found list"),
    }.values(),
)  # fmt: skip
def test_what_is_no_pair(raw, message):
    with pytest.raises(ValueError, match=f"^f, line 1: .*{message}"):
        parse_pair(raw, "f, line 1")


RANKINGS = {
    "ranked": {"prompt": "a?", "ranked": ["yes", "well", "no"]},
    "scores": {"prompt": "a?", "answers": ["no", "yes", "well"], "scores": [-1, 2.5, 0]},
    "ranks": {"question": "a?", "answers": ["well", "no", "yes"], "ranks": [2, 3, 1]},
    "messages": {"prompt": [USER], "ranked": [GOOD, [{**GOOD, "content": "well"}], BAD]},
    "conversations": {"ranked": [[USER, GOOD], [USER, {**GOOD, "content": "well"}], [USER, BAD]]},
}


@pytest.mark.parametrize("name", RANKINGS)
def test_rankings_are_pairs_of_every_two_answers(name):
    unread, remarks = Counter(), Counter()
    pairs = parse_ranking({**RANKINGS[name], "extra": 4, "chosen": None}, "f, line 1", unread, remarks)
    assert [(said(two.first)[-1][1], said(two.second)[-1][1]) for two in pairs] == [
        ("yes", "well"), ("yes", "no"), ("well", "no")
    ]  # fmt: skip
    assert all(said(record)[:-1] == [("user", "a?")] for two in pairs for record in (two.first, two.second))
    assert unread == {"extra": 1}
    assert sorted(remarks.values()) == [1, 3]


@pytest.mark.parametrize(
    ("raw", "message"),
    {
        "one": (
            {"prompt": "a", "ranked": ["b"]},
            "ranked must be a list of two answers or more, found 1; a ranking is",
        ),
        "no list": ({"prompt": "a", "ranked": "b"}, "ranked must be a list of two answers or more, found 'b'"),
        "the same": ({"prompt": "a", "ranked": ["b", "c", "b"]}, "answers 1 and 3 of the ranking are the same"),
        "null": ({"prompt": "a", "ranked": ["b", None]}, "answer 2 of ranked must be a text or messages, found None"),
        "no ranks": ({"prompt": "a", "answers": ["b", "c"]}, "answers have neither scores nor ranks; a ranking is"),
        "unknown": (
            {"prompt": "a", "answers": ["b", "c"], "ranks": [1, None]},
            r"ranks must be a number for each of the 2 answers, found \[1, None\]",
        ),
        "too few": (
            {"prompt": "a", "answers": ["b", "c"], "scores": [1]},
            "scores must be a number for each of the 2 answers, found 1$",
        ),
        "all equal": (
            {"prompt": "a", "answers": ["b", "c"], "scores": [1, 1.0]},
            "all 2 answers have the same rank, so there is nothing to prefer; leave it out",
        ),
        "no prompt": ({"ranked": ["b", "c"]}, "the ranking has no prompt, and its answers are texts; a ranking is"),
    }.values(),
)
def test_what_is_no_ranking(raw, message):
    with pytest.raises(ValueError, match=f"^f, line 1: {message}"):
        parse_ranking(raw, "f, line 1")


def test_rated_answers():
    (single,) = parse_rated({"prompt": "a?", "completion": "no", "label": False}, "f, line 1")
    assert (said(single.record), single.wanted) == ([("user", "a?"), ("assistant", "no")], False)
    (chat,) = parse_rated({"messages": [*EARLIER, USER, GOOD], "label": True}, "f, line 1")
    assert [turn.train for turn in chat.record.messages] == [None, False, None, None]
    both = parse_rated(PAIRS["texts"], "f, line 1")
    assert [(found.answer[0].content, found.wanted) for found in both] == [("yes", True), ("no", False)]
    with pytest.raises(ValueError, match="a rated answer needs label, true or false, found 1; --columns label=NAME"):
        parse_rated({"prompt": "a", "completion": "b", "label": 1}, "f, line 1")


def test_rated_answers_stand_beside_those_of_the_next_record():
    raws = [{"prompt": f"p{i}", "completion": f"a{i}", "label": i != 1} for i in range(3)]
    found = list(with_others(parse_rated(raw, "f") for raw in raws))
    assert [(said(two.first)[1][1], said(two.second)) for two in found] == [
        (f"a{i}", [("user", f"p{i}"), ("assistant", f"a{(i + 1) % 3}")]) for i in range(3)
    ]
    assert [two.wanted for two in found] == [True, False, True]
    with pytest.raises(ValueError, match=r"the only record.*give two or more"):
        list(with_others([parse_rated(raws[0], "f, line 1")]))


# ---- on disk and in batches ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.from_folder(ASSETS / "demo")


def prepared(chat, path, raws, kind, max_seq_len=64, **options):
    path.write_text("".join(json.dumps(raw) + "\n" for raw in raws))
    return prepare_sources(sources_of([str(path)], kind=kind), chat, max_seq_len, False, None, **options)


def test_pairs_are_kept_whole(chat, tmp_path):
    """A pair with one side that is too long, or is left out by the template, goes as a whole."""
    long = {"prompt": "q", "chosen": "word " * 80, "rejected": "no"}
    raws = [PAIRS["texts"], long, {"prompt": "b?", "chosen": "oh", "rejected": "no"}, PAIRS["messages"]]
    (part,) = prepared(chat, tmp_path / "pairs.jsonl", raws, "pair")
    assert "3 of 4 records" in part.describe()
    assert "1 dropped as longer than --max-seq-len" in part.describe()
    first, second = part.sequences[1].first, part.sequences[1].second
    for row, answer in ((first, "oh"), (second, "no")):
        trained = [label for label in row.labels[1:] if label != -100]
        assert chat.decode(trained).strip() == answer
    batches = GlobalBatches.of_parts([part], 64, seed=0)
    (batch,) = batches.batches(1)
    assert len(batch.input_ids) == 2 * len(batch.wanted)
    assert batch.num_tokens == sum(map(len, batch.input_ids)) <= 64


def test_verdicts_and_references_follow_their_answers(chat, tmp_path):
    raws = [{"prompt": f"question {i}", "completion": f"answer {i}", "label": i % 3 == 0} for i in range(9)]
    (part,) = prepared(chat, tmp_path / "rated.jsonl", raws, "rated")
    trained, held = hold_out(part, 0.34, seed=1)
    assert (len(trained.sequences), len(held.sequences)) == (6, 3)
    batches = GlobalBatches.of_parts([trained], 64, seed=0), ValidationBatches.of_parts([held], 64)
    seen = []
    for found in batches:
        numbers = [int(chat.decode(pair.first.input_ids).split("question ")[1][0]) for pair in found.sequences]
        found.reference = np.array([(i, i + 0.5) for i in numbers], np.float64)
        for batch in found.batches(found.num_steps(None, 1)) if isinstance(found, GlobalBatches) else found:
            for i, wanted in enumerate(batch.wanted):
                number = int(chat.decode(batch.input_ids[2 * i]).split("question ")[1][0])
                assert wanted is (number % 3 == 0)
                assert batch.reference[2 * i : 2 * i + 2].tolist() == [number, number + 0.5]
                seen.append(number)
    assert sorted(seen) == list(range(9))


def test_pairs_of_a_prompt_are_trained_or_evaluated_together(chat, tmp_path):
    """A ranking, and a record further down that has its prompt."""
    raws = [{"prompt": f"question {i}", "ranked": ["best", "fair", "bad"]} for i in range(6)]
    raws += [{"prompt": "question 2", "chosen": "yes", "rejected": "no"}]
    (part,) = prepared(chat, tmp_path / "ranked.jsonl", raws, "ranked")
    for seed in range(4):
        sides = [[pair.first.input_ids for pair in half.sequences] for half in hold_out(part, 0.34, seed)]
        asked = [{chat.decode(ids).split("question ")[1][0] for ids in side} for side in sides]
        assert sorted(map(len, asked)) == [2, 4]
        assert not asked[0] & asked[1]
        assert sum(map(len, sides)) == 19


def test_bad_pairs_are_skipped_as_a_whole(chat, tmp_path):
    raws = [PAIRS["texts"], {"prompt": "a", "chosen": "b"}, PAIRS["query"]]
    with pytest.raises(ValueError, match="line 2: the pair has no rejected"):
        prepared(chat, tmp_path / "a.jsonl", raws, "pair")
    (part,) = prepared(chat, tmp_path / "b.jsonl", raws, "pair", bad_records="skip")
    assert (len(part.sequences), part.table.num_bad) == (2, 1)


def test_rankings_beside_pairs_are_counted(chat, tmp_path):
    tied = {"prompt": "b?", "answers": ["oh", "ah", "no"], "scores": [1, 1, 0]}
    raws = [PAIRS["texts"], RANKINGS["ranked"], tied, {"prompt": "a", "ranked": ["b"]}]
    (part,) = prepared(chat, tmp_path / "data.jsonl", raws, "ranked", bad_records="skip")
    assert len(part.sequences) == 1 + 3 + 2
    assert "6 of 7 records" in part.describe()
    assert part.table.notes == {
        "rankings, each a pair of every two answers of different rank": 2,
        "pairs made of rankings": 5,
        "pairs of equal rank that rankings do not make": 1,
    }
