"""Benchmarks that ask about images: answers are those of lm-eval with transformers, choices those of its logits."""

import json
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers
from image_models import IMAGE_TOKENS, write_llava
from PIL import Image

from flexengine import cli

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")

DOCS = [
    {"question": "<image> what is this", "files": ["0.png"]},
    {"question": "what is this", "files": []},
    {"question": "<image> and <image> what is the other one", "files": ["1.png", "2.png"]},
]
CHOICES = ["disc", "square yes", "cross"]
FUNCTIONS = """
from pathlib import Path
from PIL import Image

def images(doc):
    return [Image.open(Path(__file__).parent / name).convert("RGB") for name in doc["files"]]
"""
TASKS = {
    "shown": """
output_type: generate_until
doc_to_target: disc
generation_kwargs: {until: ["yes"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: chrf}]
""",
    "chosen": f"""
output_type: multiple_choice
doc_to_target: 0
doc_to_choice: {CHOICES}
metric_list: [{{metric: acc}}]
""",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, its tasks and their pictures."""
    folder = tmp_path_factory.mktemp("tasks")
    for i, colour in enumerate(((200, 10, 30), (0, 90, 255), (250, 250, 0))):
        Image.new("RGB", (40, 28 + 9 * i), colour).save(folder / f"{i}.png")
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (folder / "pictures.py").write_text(FUNCTIONS)
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'docs.jsonl'}}}}}\ntest_split: test"
    asks = 'doc_to_text: "{{question}}"\ndoc_to_image: !function pictures.images'
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}\n{asks}\n{text}")
    return write_llava(folder / "model"), {name: str(folder / f"{name}.yaml") for name in TASKS}


@pytest.fixture(scope="module")
def ours(files):
    """What the harness answers to the requests of a task, in calls of 20 tokens of images: two images at most."""
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports] # noqa: PLC0415

    from flexengine import from_pretrained  # noqa: PLC0415
    from flexengine.data import TokenizerOptions, TokenizerProcess  # noqa: PLC0415
    from flexengine.harness import FlexLM  # noqa: PLC0415

    folder, tasks = files
    loaded = TaskManager(include_defaults=False).load([*tasks.values()])["tasks"]
    tokenizer = TokenizerProcess(TokenizerOptions(folder, 24, images=True))
    sizes: dict[str, Any] = {"max_seq_len": 96, "max_global_batch_tokens": 128, "max_image_tokens": 2 * IMAGE_TOKENS}
    with from_pretrained(folder, dtype="float32", device="cpu", hardware="cpu-test", **sizes) as engine:
        yield FlexLM(engine, tokenizer), loaded
    tokenizer.close()


def requests_of(task, chat_template=None):
    task.build_all_requests(apply_chat_template=chat_template is not None, chat_template=chat_template)
    return task.instances


def test_answers_equal_those_of_lm_eval(files, ours):
    from lm_eval.models.hf_vlms import HFMultimodalLM  # pyright: ignore[reportMissingImports] # noqa: PLC0415

    model, tasks = ours
    reference = HFMultimodalLM(str(files[0]), dtype="float32", device="cpu", batch_size=1, max_length=95)
    assert model.MULTIMODAL
    asked = [r for r in requests_of(tasks["shown"]) if r.doc["files"]]  # lm-eval's answers no question without images
    answers = reference.generate_until(asked)
    assert len({*answers}) == len(asked) == 2
    assert model.generate_until(asked) == answers
    chats = [[{"role": "user", "content": r.doc["question"]}] for r in asked]
    for chat in chats:
        written = model.apply_chat_template(json.loads(json.dumps(chat)))
        assert written == reference.apply_chat_template(json.loads(json.dumps(chat)))


def test_choices_equal_those_of_transformers(files, ours):
    model, tasks = ours
    asked = requests_of(tasks["chosen"])
    own = transformers.AutoModelForImageTextToText.from_pretrained(files[0], dtype=torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(files[0])
    expected = []
    for request in asked:
        context, rest, beside = request.args
        inputs = processor(text=[context + rest], images=beside["visual"] or None, return_tensors="pt")
        count = len(processor.tokenizer(rest, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logs = torch.log_softmax(own(**inputs).logits[0, -count - 1 : -1].double(), dim=-1)
        ids = inputs["input_ids"][0, -count:]
        expected.append((logs.gather(1, ids[:, None]).sum().item(), bool((logs.argmax(1) == ids).all())))
    found = model.loglikelihood(asked)
    assert len(found) == len(DOCS) * len(CHOICES)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-4)
    assert [best for _, best in found] == [best for _, best in expected]


def test_the_command_asks_for_room_for_images(files, tmp_path, capsys):
    folder, tasks = files
    options = ["--dtype", "float32", "--device", "cpu", "--max-seq-len", "96", "--bootstrap", "0"]
    command = ["evaluate", str(folder), "--tasks", *tasks.values(), *options, "--output", str(tmp_path / "found.json")]
    assert cli.main(command) == cli.BAD_INPUT
    assert "chosen asks about images; give --max-image-tokens N" in capsys.readouterr().err
    assert cli.main([*command, "--max-image-tokens", str(IMAGE_TOKENS)]) == cli.BAD_INPUT
    assert f"a question has 32 tokens of images, of at most {IMAGE_TOKENS}" in capsys.readouterr().err
    assert cli.main([*command, "--max-image-tokens", "96"]) == 0
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert results.keys() == TASKS.keys()


def test_images_in_too_long_questions_and_sound(ours):
    model, tasks = ours
    (asked, *_) = requests_of(tasks["shown"])
    asked.arguments = ("<image> " + "what is " * 40, *asked.args[1:])
    with pytest.raises(ValueError, match="a question with images has 96 tokens, of at most 89, and is not cut"):
        model.generate_until([asked])
    asked.arguments = (asked.args[0], asked.args[1], {"audio": ["a.wav"]})
    with pytest.raises(ValueError, match="asks about sound, which is not built"):
        model.generate_until([asked])
