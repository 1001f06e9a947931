"""`flexengine generate`: answers equal to the engine's, in as many passes as memory takes, and what is refused."""

import json
import shutil

import pytest
import transformers
from engine_helpers import saved_model, tiny_config

from flexengine import cli, from_pretrained
from flexengine.data import ChatTokenizer
from flexengine.models.registry import ASSETS

PROMPTS = ["What is 2 plus 3?", "Which day comes after Monday?", "Name a river."]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    saved_model(folder, tiny_config(vocab_size=2944, tie_word_embeddings=True, max_position_embeddings=512))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((ASSETS / "demo" / name).read_text())
    return folder


@pytest.fixture(scope="module")
def expected(model):
    tokenizer = ChatTokenizer.from_folder(model)
    with from_pretrained(model, dtype="float32", device="cpu", max_seq_len=64, max_global_batch_tokens=256) as engine:
        rows = engine.generate([tokenizer.encode_prompt(p) for p in PROMPTS], 8, stop_ids=tokenizer.stop_ids)
    return [tokenizer.decode(row).strip() for row in rows]


def arguments(model, *more):
    return ["generate", "--model", str(model), "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8", *more]


@pytest.mark.parametrize("more", [(), ("--batch-size", "2"), ("--max-gpu-mem-gib", "0.004")])
def test_answers(model, expected, capsys, more, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[1:]))
    assert cli.main(arguments(model, "--prompt", PROMPTS[0], "--prompts", str(path), "--json", *more)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"prompt": p, "answer": a} for p, a in zip(PROMPTS, expected, strict=True)]


def test_one_answer_is_printed_alone(model, expected, capsys):
    assert cli.main(arguments(model, "--prompt", PROMPTS[1])) == 0
    assert capsys.readouterr().out.strip() == expected[1]


@pytest.mark.parametrize("ends", ["an id", "a list", "only in config.json"])
def test_answers_stop_where_those_of_transformers_do(model, tmp_path, capsys, ends):
    prompt = [{"role": "user", "content": PROMPTS[0]}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def answer(folder):
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
        return reference.generate(**ids, max_new_tokens=8, do_sample=False)[0][ids["input_ids"].shape[1] :].tolist()

    end = answer(model)[3]
    folder = shutil.copytree(model, tmp_path / "model")
    name = "config.json" if ends == "only in config.json" else "generation_config.json"
    found = {**json.loads((folder / name).read_text()), "eos_token_id": end if ends == "an id" else [end, 6]}
    (folder / "generation_config.json").unlink()
    (folder / name).write_text(json.dumps(found))
    expected = answer(folder)
    assert len(expected) <= 4
    assert cli.main(arguments(folder, "--prompt", PROMPTS[0])) == 0
    out, err = capsys.readouterr()
    assert out.strip() == tokenizer.decode(expected[:-1]).strip()
    assert f"{len(expected) - 1} tokens after 1 prompts" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "there is no prompt: give --prompt TEXT"),
        (("--prompts", "missing.txt"), "--prompts missing.txt: no such file"),
        (("--prompt", "a", "--max-gpu-mem-gib", "0.00001"), "the cache of one sequence of"),
        (("--prompt", "a", "--top-p", "0"), "top_p must be above 0"),
        (("--prompt", "a", "--top-p", "0.5"), "top_p=0.5 is about drawing tokens, got temperature=0"),
    ],
)
def test_refusals(model, capsys, more, message):
    assert cli.main(arguments(model, *more)) == cli.BAD_INPUT
    assert message in capsys.readouterr().err
