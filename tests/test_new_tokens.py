"""Tokens that a model has no rows for: passed over, refused, or given rows that train, resume and export."""

import json
import shutil
from functools import partial

import pytest
import torch
import transformers
from engine_helpers import build_engine, make_plan, random_batch, same_bits, saved_model, streamed_plan, tiny_config
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken, Tokenizer

from flexengine import cli, from_pretrained
from flexengine.api import prepare
from flexengine.checkpoint.adapter import adapter_tensors
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS, open_model
from flexengine.models.vocabulary import with_rows
from flexengine.parallel.team import leave
from flexengine.plan import Numerics
from tests.parallel.ranks_helper import run_ranks, values_of

ROWS = 2938
"""Rows of the models, as many as the bundled tokenizer has tokens."""
NEW = ["<think>", "</think>"]
KEYWORDS = {"dtype": "float32", "device": "cpu", "max_seq_len": 64, "max_global_batch_tokens": 256}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
CONFIGS = {
    "untied": tiny_config(vocab_size=ROWS, num_hidden_layers=1, eos_token_id=6),
    "tied": tiny_config(vocab_size=ROWS, num_hidden_layers=1, eos_token_id=6, tie_word_embeddings=True),
    "gpt2": {**GPT2, "vocab_size": ROWS, "eos_token_id": 6, "bos_token_id": 6},
    "sharded": tiny_config(vocab_size=ROWS, num_hidden_layers=1, eos_token_id=6),
}
IDS = [0, ROWS, 5, 700, ROWS + 1, 9, ROWS, 6]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of each config, with the bundled tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        saved_model(root / name, config, **({"max_shard_size": "200KB"} if name == "sharded" else {}))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ASSETS / "demo" / file, root / name)
    return root


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))


def loss_of(model):
    return float(model(torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.detach())


def rows_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_added_and_exported(models, name, tmp_path):
    folder = models / name
    with from_pretrained(folder, add_tokens=NEW, **KEYWORDS) as engine:
        assert engine.model.vocab_size == ROWS + 6  # a multiple of 8
        loss = float(engine.evaluate([IDS]).loss)
        engine.save_pretrained(tmp_path / "out")
    for whole, old in zip(rows_of(tmp_path / "out"), rows_of(folder), strict=True):
        assert torch.equal(whole[:ROWS], old)
        torch.testing.assert_close(whole[ROWS:], old.double().mean(0).float().expand(6, -1), rtol=1e-6, atol=1e-7)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.config.vocab_size == ROWS + 6
    assert loss == pytest.approx(loss_of(exported), abs=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("<think></think>", add_special_tokens=False).input_ids == [ROWS, ROWS + 1]
    assert tokenizer.decode([ROWS], skip_special_tokens=True) == ""
    with from_pretrained(tmp_path / "out", add_tokens=NEW, **KEYWORDS) as engine:  # they are there already
        assert engine.model.vocab_size == ROWS + 6
        assert float(engine.evaluate([IDS]).loss) == loss


def test_new_rows_are_those_of_transformers(models):
    reference = transformers.AutoModelForCausalLM.from_pretrained(models / "untied")
    reference.resize_token_embeddings(ROWS + 2, pad_to_multiple_of=8)  # draws around the mean, within 1e-9 of it
    with from_pretrained(models / "untied", add_tokens=NEW, **KEYWORDS) as engine:
        assert float(engine.evaluate([IDS]).loss) == pytest.approx(loss_of(reference), abs=1e-3)


SPLIT = Numerics("bfloat16", "split", "bfloat16", "float32")


@pytest.mark.parametrize("name", ["untied", "tied", "gpt2"])
def test_no_plan_changes_a_bit(models, name):
    source = open_model(models / name)
    source = source._replace(spec=with_rows(source.spec, ROWS + 6, in_checkpoint=True))
    found = []
    for plan_of in (make_plan, streamed_plan):
        with build_engine(source, plan_of(source.spec, numerics=SPLIT)) as engine:
            before = engine.state_dict()
            for step in range(2):
                engine.train_step([*random_batch(step, [16, 9, 16, 5], ROWS + 2), IDS])
            found.append((before, engine.state_dict()))
    for one, other in zip(*found, strict=True):
        same_bits(one, other)
    moved = found[0][1][source.spec.embedding_source] - found[0][0][source.spec.embedding_source]
    assert moved[ROWS : ROWS + 2].abs().max() > 0


@pytest.mark.parametrize("frozen", ["embed", "head"])
def test_frozen_rows_are_carried_through(models, tmp_path, frozen, caplog):
    options = {**KEYWORDS, "dtype": "bfloat16", "freeze": frozen}
    with from_pretrained(models / "sharded", add_tokens=NEW, **options) as engine:
        engine.train_step([IDS])
        engine.save_pretrained(tmp_path)
    index = 0 if frozen == "embed" else 1
    whole, old = rows_of(tmp_path)[index], rows_of(models / "sharded")[index]
    assert torch.equal(whole[:ROWS], old)  # in float32, though bfloat16 was computed with
    torch.testing.assert_close(whole[ROWS:], old.mean(0).expand(6, -1), rtol=1e-2, atol=1e-4)
    assert "rows of new tokens stay the mean of the others" in caplog.text


def test_a_model_from_scratch_has_random_rows(models, tmp_path):
    shutil.copytree(models / "untied", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    with from_pretrained(tmp_path / "bare", add_tokens=NEW, init="random", **KEYWORDS) as engine:
        rows = engine.state_dict()["model.embed_tokens.weight"]
        engine.save_pretrained(tmp_path / "out")
    assert rows.shape[0] == ROWS + 6
    assert (rows[ROWS] - rows[ROWS + 1]).abs().max() > 0.01
    assert torch.equal(rows_of(tmp_path / "out")[0], rows)


def test_rows_for_a_token_that_is_there_already_are_not_added(models, tmp_path):
    shutil.copytree(models / "untied", tmp_path / "model")
    config = {**json.loads((tmp_path / "model" / "config.json").read_text()), "vocab_size": ROWS + 600}
    saved_model(tmp_path / "model", {**CONFIGS["untied"], "vocab_size": config["vocab_size"]})
    for options in ({"add_tokens": NEW}, {"resize_embeddings": True}):
        planned = prepare(tmp_path / "model", **options, **KEYWORDS)
        assert planned.source.spec.vocab_size == ROWS + 600


def test_plans_know_the_rows(models):
    found = [prepare(models / "untied", **options, **KEYWORDS) for options in ({}, {"add_tokens": NEW})]
    bytes_of = [sum(plan.plan.predicted.gpu_categories.values()) for plan in found]
    assert bytes_of[1] > bytes_of[0]
    assert found[1].source.spec.num_parameters - found[0].source.spec.num_parameters == 6 * 24 * 2


@pytest.mark.parametrize(
    ("model", "tokens", "message"),
    [
        ("untied", ["<a>", "<a>"], r"add_tokens: '<a>' is given twice; give each token once"),
        ("untied", [" "], r"add_tokens: ' ' is blank"),
        ("preset:llama-3.2-1b", ["<a>"], r"add_tokens: llama-3.2-1b has no tokenizer of its own"),
    ],
)
def test_refusals(models, model, tokens, message):
    with pytest.raises(ValueError, match=message):
        prepare(model if ":" in model else models / model, add_tokens=tokens, **KEYWORDS)


# ---- runs ----------------------------------------------------------------------------------------------------------


def run(model, data, output, *more):
    sizes = ["--max-seq-len", "64", "--max-global-batch-tokens", "128", "--dtype", "float32", "--device", "cpu"]
    return cli.main(
        ["train", "--model", str(model), "--dataset", str(data), *sizes, "--output-dir", str(output), *more]
    )


def data_of(tmp_path, text):
    turns = [{"role": "user", "content": "What is 2 plus 2?"}, {"role": "assistant", "content": text}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return tmp_path / "chat.jsonl"


@pytest.fixture
def padded(models, tmp_path):
    """A model whose tokenizer was given a padding token, and its embedding no row for it."""
    shutil.copytree(models / "untied", tmp_path / "padded")
    path = tmp_path / "padded" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken("[PAD]", normalized=False)])
    tokenizer.save(str(path))
    return tmp_path / "padded"


def test_a_token_without_a_row_hinders_only_records_that_use_it(padded, tmp_path, capsys):
    assert run(padded, data_of(tmp_path, "It is 4."), tmp_path / "a", "--steps", "1") == 0
    assert "ids up to 2938, but the model's vocab_size is 2938: records with an added token" in capsys.readouterr().err
    assert run(padded, data_of(tmp_path, "It is [PAD]."), tmp_path / "b", "--steps", "1") == cli.BAD_INPUT
    err = capsys.readouterr().err
    assert "chat.jsonl, line 1: the token '[PAD]' has id 2938, but the model's embedding has 2938 rows" in err
    both = tmp_path / "both.jsonl"
    both.write_text((tmp_path / "chat.jsonl").read_text() + data_of(tmp_path, "It is 4.").read_text())
    assert run(padded, both, tmp_path / "e", "--steps", "1", "--bad-records", "skip") == 0
    assert "both.jsonl: 1 of 2 records" in capsys.readouterr().out
    resized = run(padded, data_of(tmp_path, "It is [PAD]."), tmp_path / "c", "--steps", "1", "--resize-embeddings")
    assert resized == 0
    assert run(padded, data_of(tmp_path, "It is [PAD]."), tmp_path / "d", "--steps", "1") == cli.BAD_INPUT  # no cache


def test_a_run_with_new_tokens_resumes_bit_by_bit(models, tmp_path, capsys):
    data = data_of(tmp_path, "<think>2 and 2</think>It is 4.")
    more = ("--add-tokens", *NEW, "--save", "--save-steps", "1", "-v")
    assert run(models / "untied", data, tmp_path / "whole", "--steps", "3", *more) == 0
    assert "<|assistant|>[[<think>2 and 2</think>It is 4.<|end|>]]" in capsys.readouterr().out
    shutil.copytree(tmp_path / "whole", tmp_path / "cut", ignore=shutil.ignore_patterns("step-3", "final"))
    assert run(models / "untied", data, tmp_path / "cut", "--steps", "3", *more, "--resume", "auto") == 0
    finals = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert finals[0] == finals[1]
    arguments = ["--run", str(tmp_path / "whole"), "--output", str(tmp_path / "exported")]
    assert cli.main(["export", *arguments]) == 0
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == finals[0]
    preview = ["data", "preview", "--model", str(models / "untied"), "--dataset", str(data), "--add-tokens", *NEW]
    assert cli.main(preview) == 0
    assert "sequence 1: 25 tokens" in capsys.readouterr().out


def train_ranks(model, rank):
    engine = from_pretrained(model, add_tokens=NEW, **{**KEYWORDS, "chunk_tokens": 64, "round_tokens": 64})
    losses = [float(engine.train_step([IDS, IDS[::-1], IDS[1:]])[0].loss) for _ in range(2)]
    engine.close()
    leave()
    return losses


def test_several_ranks_add_the_same_rows(models):
    work = partial(train_ranks, str(models / "untied"))
    [alone] = values_of(run_ranks(work, 1))
    assert values_of(run_ranks(work, 2)) == [alone] * 2


# ---- adapters ------------------------------------------------------------------------------------------------------

LORA = {**KEYWORDS, "mode": "lora", "lora_rank": 2}


def with_peft(base, adapter):
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(ROWS + 6)
    return PeftModel.from_pretrained(model, adapter)


@pytest.mark.parametrize("saved", [(), ("embed_tokens", "lm_head")], ids=["frozen", "trained"])
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_adapters_hold_the_rows_where_peft_reads_them(models, tmp_path, name, saved, caplog):
    with from_pretrained(models / name, add_tokens=NEW, modules_to_save=saved, **LORA) as engine:
        engine.train_step([IDS], lr=0.1)
        loss = float(engine.evaluate([IDS]).loss)
        engine.save_pretrained(tmp_path / "adapter")
        engine.save_pretrained(tmp_path / "merged", merged=True)
    assert ("to save embed_tokens" in caplog.text.replace("-", " ")) is not bool(saved)
    assert loss_of(with_peft(models / name, tmp_path / "adapter")) == pytest.approx(loss, abs=1e-5)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loss_of(merged) == pytest.approx(loss, abs=1e-5)
    adapter = str(tmp_path / "adapter")
    with from_pretrained(models / name, adapter=adapter, **{**LORA, "lora_rank": None}) as engine:
        assert engine.source.new_tokens == tuple(NEW)
        assert float(engine.evaluate([IDS]).loss) == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(("name", "target"), [("untied", "q_proj"), ("tied", "q_proj"), ("gpt2", "c_attn")])
def test_adapters_of_peft_with_new_tokens_are_read(models, tmp_path, name, target):
    base = transformers.AutoModelForCausalLM.from_pretrained(models / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / name)
    tokenizer.add_special_tokens({"additional_special_tokens": NEW})
    base.resize_token_embeddings(len(tokenizer))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=[target]))
    torch.nn.init.normal_(next(p for n, p in model.named_parameters() if "lora_B" in n), 0.0, 0.2)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    with from_pretrained(models / name, adapter=str(tmp_path / "adapter"), **{**LORA, "lora_rank": None}) as engine:
        assert engine.model.vocab_size == ROWS + 2
        assert float(engine.evaluate([IDS]).loss) == pytest.approx(loss_of(model.eval()), abs=1e-5)
        engine.save_pretrained(tmp_path / "again")
    names = {f"base_model.model.{n}" for n in ("lm_head.weight", "model.embed_tokens.weight")}
    if name != "gpt2":
        again = dict(adapter_tensors(tmp_path / "again", shapes_of(tmp_path / "adapter"), {}))
        first = dict(adapter_tensors(tmp_path / "adapter", shapes_of(tmp_path / "adapter"), {}))
        assert names <= again.keys()
        same_bits(again, first)


def shapes_of(folder):
    from safetensors import safe_open  # noqa: PLC0415

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
