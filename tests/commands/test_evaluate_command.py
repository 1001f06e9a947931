"""`flexengine evaluate` gives what lm-eval gives with transformers, on local tasks, and says what it cannot do."""

import json
from importlib.util import find_spec

import pytest
from engine_helpers import saved_model, tiny_config
from family_configs import CASES

from flexengine import cli
from flexengine.models.registry import ASSETS

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")

FAMILIES = {
    "llama": tiny_config(),
    "gpt2": {**CASES["gpt2"], "n_positions": 256},
    "qwen3_moe": CASES["qwen3_moe"],
}
LONGEST = 48
FACTS = [
    ("What is the capital of Peru?", ["Lima", " Cusco is a town", "Quito"], "Lima"),
    ("Which day comes after Monday?", ["Sunday", "Tuesday", "a day"], "Tuesday"),
    ("Name a river. " * 20, ["The Nile", "The moon"], "The Nile"),
]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices.index(answer)}}"
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{answer}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: chrf}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in FACTS]
    (folder / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        data = (
            f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'facts.jsonl'}}}}}\ntest_split: test"
        )
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}\n{text}")
    return [str(folder / f"{name}.yaml") for name in TASKS]


def model_of(family, folder):
    config = {**FAMILIES[family], "vocab_size": 2944, "bos_token_id": 1, "eos_token_id": 2}
    saved_model(folder, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((ASSETS / "demo" / name).read_text())
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_results_equal_those_with_transformers(family, tasks, tmp_path, capsys):
    from lm_eval import simple_evaluate  # noqa: PLC0415, where lm-eval is there
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

    folder, output = model_of(family, tmp_path / "model"), tmp_path / "results.json"
    options = ("--dtype", "float32", "--device", "cpu", "--max-seq-len", str(LONGEST), "--output", str(output))
    budgets = ("--max-gpu-mem-gib", "0.02", "--bootstrap", "0")
    assert cli.main(["evaluate", str(folder), "--tasks", *tasks, *options, *budgets]) == 0
    out = capsys.readouterr().out
    assert "texts lost their beginning, being longer than --max-seq-len 48" in out
    found = json.loads(output.read_text())
    reference = HFLM(str(folder), dtype="float32", device="cpu", batch_size=2, max_length=LONGEST - 1)
    expected = simple_evaluate(reference, tasks=tasks, bootstrap_iters=0)["results"]
    assert found["model"] == "model"
    assert found["results"].keys() == expected.keys() == TASKS.keys()
    assert expected["answers"]["chrf,none"] > 0.0
    for task, metrics in expected.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert found["results"][task][name] == pytest.approx(value, rel=1e-4, abs=1e-4), (task, name)


def test_tasks_that_are_not_there(tasks, tmp_path, capsys):
    for more, message in (
        (("--tasks", "gone.yaml"), "--tasks gone.yaml: no such file; give a task of lm-eval by name"),
        (("--tasks", *tasks, "--output", "gone/a.json"), "--output gone/a.json: there is no folder gone"),
    ):
        assert cli.main(["evaluate", "preset:demo", *more]) == cli.BAD_INPUT
        assert message in capsys.readouterr().err
