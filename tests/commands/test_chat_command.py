"""`flexengine chat`: turns over a terminal, answers piece by piece, and what a person may name."""

import io
import json
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engine_helpers import saved_model, tiny_config

from flexengine import LoRA, cli, from_pretrained
from flexengine.commands.chat import Conversation
from flexengine.commands.places import Place, find_place
from flexengine.data import ChatTokenizer
from flexengine.data.templates import ChatTemplate
from flexengine.models.registry import ASSETS
from flexengine.options.train_config import TrainConfig

TURNS = ["What is 2 plus 3?", "And Monday?", "Name a river.", "Why?", "So?"]
OPTIONS = ("--dtype", "float32", "--device", "cpu", "--max-new-tokens", "6", "--max-seq-len", "160")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    saved_model(folder, tiny_config(vocab_size=2944, tie_word_embeddings=True, max_position_embeddings=512))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((ASSETS / "demo" / name).read_text())
    return folder


@pytest.fixture(scope="module")
def adapter(model):
    folder = model.parent / "adapter"
    with from_pretrained(model, lora=LoRA(rank=2), device="cpu", max_seq_len=16, max_global_batch_tokens=16) as engine:
        engine.save_pretrained(folder)
    return folder


@pytest.fixture
def terminal(monkeypatch):
    """Says lines on a pseudo terminal, which is the standard input of what follows."""
    master, slave = os.openpty()
    with open(slave, encoding="utf-8") as typed:
        monkeypatch.setattr("sys.stdin", typed)
        yield lambda *lines: os.write(master, "".join(f"{line}\n" for line in lines).encode())
    os.close(master)


def expected(model, turns, **options):
    """Greedy answers, each after all that was said before."""
    tokenizer, said, answers = ChatTokenizer.from_folder(model), [], []
    sizes = {"max_seq_len": 160, "max_global_batch_tokens": 160}
    with from_pretrained(model, dtype="float32", device="cpu", **sizes, **options) as engine:
        for turn in turns:
            said.append({"role": "user", "content": turn})
            (row,) = engine.generate([tokenizer.encode_prompt(said)], 6, stop_ids=tokenizer.stop_ids)
            answers.append(tokenizer.decode(row))
            said.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_five_turns_over_a_terminal(model, terminal, capsys):
    terminal(*TURNS, "/exit")
    assert cli.main(["chat", "--model", str(model), *OPTIONS]) == 0
    out = capsys.readouterr().out
    assert out.startswith("model: up to 160 tokens; /new begins again")
    answers = [said.removesuffix("\n") for said in out.partition("ends\n")[2].removeprefix("> ").split("> ")]
    assert answers[:5] == expected(model, TURNS)


def test_old_turns_that_do_not_fit_are_left_out_and_new_ones_begin_again(model, terminal, capsys):
    terminal(*TURNS[:3], "/new", TURNS[0], "/exit")
    options = ("--dtype", "float32", "--device", "cpu", "--max-new-tokens", "6", "--max-seq-len", "32")
    assert cli.main(["chat", "--model", str(model), *options]) == 0
    found = capsys.readouterr()
    assert "oldest turns no longer fit and are left out" in found.err
    answers = found.out.partition("ends\n")[2].split("> ")
    assert answers[1] == answers[5]


def test_answers_on_an_adapter(model, adapter, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli.main(["chat", "--model", str(adapter), *OPTIONS]) == 0
    flags = ("--dtype", "float32", "--device", "cpu", "--max-new-tokens", "6")
    assert cli.main(["generate", "--model", str(adapter), *flags, "--prompt", TURNS[0]]) == 0
    assert capsys.readouterr().out.strip() == expected(model, TURNS[:1])[0].strip()  # new adapters change nothing


TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %} <think></think>{% endif %}"
)


def test_thinking_is_asked_for_and_shown_apart(model):
    """By a template that has the switch, with a tokenizer and an engine that say what they are told to."""
    tokenizer = ChatTokenizer.from_folder(model)
    with pytest.raises(ValueError, match="chat template has no enable_thinking; leave --thinking out"):
        tokenizer.encode_prompt("a", thinking=True)
    tokenizer._template = ChatTemplate(TEMPLATE, {})
    begun = f"{TEMPLATE} <think>"
    answers, prompts, found = ["<think>why</think> so <b", "why</think>so"], [], []

    class Says:
        plan = SimpleNamespace(request=SimpleNamespace(max_seq_len=999))

        def generate(self, ids, *_, tell, **__):
            prompts.append(tokenizer.decode(ids[0], skip_special_tokens=False))
            for token in tokenizer.encode_prompt(answers.pop(0), raw=True):
                tell(0, token)

    engine, words = cast(Any, Says()), cast(Any, tokenizer)
    words.encode_turns = lambda turns, thinking: (tokenizer.encode_prompt(turns, thinking=thinking), {})
    conversation = Conversation(engine, words, 9, {}, thinking=False)
    said = conversation.say("a", lambda *part: found.append(part))
    tokenizer._template = ChatTemplate(begun, {})
    conversation.say("b", lambda *part: found.append(part))
    assert said == "<think>why</think> so <b"
    assert prompts[0].endswith("<think></think>")
    apart = ["".join(text for text, thought in found if thought is kind) for kind in (True, False)]
    assert apart == ["<think>why</think>why</think>", " so <bso"]


def test_places(model, adapter, tmp_path):
    assert find_place(str(model), "a") == Place(str(model), "a")
    assert find_place("preset:demo") == Place("preset:demo")
    assert find_place("org/name@main") == Place("org/name@main")
    assert find_place(str(adapter)) == Place(str(model), str(adapter))
    with pytest.raises(ValueError, match="is an adapter, and --adapter b another one"):
        find_place(str(adapter), "b")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(TrainConfig(model="preset:demo", data_source="synthetic").to_yaml())
    with pytest.raises(ValueError, match=r"has no final/.*flexengine export --run"):
        find_place(str(run))
    (run / "final").mkdir()
    (run / "final" / "adapter_config.json").write_text("{}")
    assert find_place(str(run)) == Place("preset:demo", str(run / "final"))
    (run / "final" / "config.json").write_text("{}")
    assert find_place(str(run)) == Place(str(run / "final"))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/gone"}))
    with pytest.raises(ValueError, match="names /gone; give --model BASE --adapter"):
        find_place(str(tmp_path))
