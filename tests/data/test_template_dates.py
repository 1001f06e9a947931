"""Templates that write today's date write the day of the run, also when it goes on another day."""

import datetime
import json
import shutil
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from flexengine import cli
from flexengine.data import templates
from flexengine.data.records import Message, Record
from flexengine.data.tokenizer import ChatTokenizer
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS
from flexengine.options.train_config import TrainConfig
from tests.failures.provoke import write_model

DEMO = ASSETS / "demo"
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}"
TURNS += "<|assistant|>{% endif %}"
DATED = "<|system|>Today: {{ strftime_now('%d %b %Y') }}<|end|>" + TURNS
MESSAGES = (Message("user", "a"), Message("assistant", "b"))
DAY = datetime.date(2024, 3, 4)


def written(template, date):
    chat = templates.ChatTemplate(template, {})
    chat.date = date
    return chat.render([Message("user", "x")]).text


@pytest.mark.parametrize(
    "template",
    [
        DATED,
        "{%- if strftime_now is defined %}\n  {%- set day = strftime_now('%A, %-d %B') %}\n{%- endif %}\n\n{{ day }}",
        "\n\n  {% macro day() %}{{ strftime_now('%F') }}{% endmacro %}\n{{ day() }}",
        "{% set now = strftime_now %}{{ now('%y') }}",
        "{{ strftime_now('%Y')|int + 1 }}{% for c in ['%d', '%m'] %}{{ strftime_now(c) }}{% endfor %}",
        "  {% set percent = strftime_now('100%% on %j, %%d') %}\n{{ percent }}",
    ],
)
def test_a_template_writes_the_pinned_day_as_transformers_writes_today(template):
    today = datetime.datetime.now().date()
    (expected,), _ = render_jinja_template([[{"role": "user", "content": "x"}]], chat_template=template)
    assert written(template, today) == expected
    assert written(template, DAY) != expected
    assert written(DATED, DAY).startswith("<|system|>Today: 04 Mar 2024<|end|>")


def folder_with(folder, template, base=DEMO):
    config = {**json.loads((DEMO / "tokenizer_config.json").read_text()), "chat_template": template}
    shutil.copy(DEMO / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_tokens_of_another_day_are_not_taken_from_the_cache(tmp_path):
    keys = set()
    for template, day in ((DATED, "2024-03-04"), (DATED, "2024-03-05"), (TURNS, "2024-03-04"), (TURNS, "2024-03-05")):
        chat = ChatTokenizer.from_folder(folder_with(tmp_path, template))
        chat.pin_date(day)
        keys.add(chat.key())
        assert chat.date == (datetime.date.fromisoformat(day) if template is DATED else None)
        text = chat.tokenizer.decode(chat.encode_record(Record(messages=MESSAGES)).input_ids, skip_special_tokens=False)
        assert (f"Today: {day[-2:]} Mar 2024" in text) == (template is DATED)
    assert len(keys) == 3


@pytest.mark.parametrize("day", ["tomorrow", "2024-13-01", "4.3.2024"])
def test_what_is_no_day_is_refused(day):
    with pytest.raises(ValueError, match=rf"--template-date '{day}' is no day; give it as YYYY-MM-DD"):
        TrainConfig(model="preset:demo", dataset="chats.jsonl", template_date=day)


def test_yaml_may_give_a_day_without_quotes():
    config = TrainConfig.from_yaml("model: preset:demo\ndataset: [chats.jsonl]\ntemplate_date: 2026-01-31\n")
    assert config.template_date == "2026-01-31"


@pytest.fixture
def on(monkeypatch):
    """Has the day of the machine be another one."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))

    def on(day):
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2026, 1, day, tzinfo=tz)

        monkeypatch.setattr(templates.datetime, "datetime", Clock)

    return on


@pytest.fixture
def model(tmp_path):
    folder = write_model(tmp_path / "model", vocab_size=2944)
    return folder_with(folder, DATED)


def test_a_run_goes_on_with_its_day(model, tmp_path, on, capsys):
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": [m.for_template() for m in MESSAGES]}) + "\n" for _ in range(8))
    )

    def train(run, *more):
        sizes = ["--max-seq-len", "64", "--max-global-batch-tokens", "64", "--device", "cpu", "--dtype", "float32"]
        where = ["--dataset", str(tmp_path / "chat.jsonl"), "--output-dir", str(tmp_path / run), "--steps", "4"]
        return cli.main(["train", "--model", str(model), *where, *sizes, "--save-steps", "2", "-v", *more])

    def losses(run):
        return [json.loads(line)["loss"] for line in (tmp_path / run / "train_log.jsonl").read_text().splitlines()]

    on(1)
    assert train("run", "--save") == 0
    out = capsys.readouterr().out
    assert "the chat template writes the date 2026-01-01; --template-date gives another" in out
    assert "<|system|>Today: 01 Jan 2026<|end|>" in out
    whole = losses("run")
    assert TrainConfig.from_yaml((tmp_path / "run" / "config.yaml").read_text()).template_date == "2026-01-01"
    shutil.copytree(tmp_path / "run", tmp_path / "cut", ignore=shutil.ignore_patterns("step-4", "final"))
    on(2)
    for source in ("auto", str(tmp_path / "run" / "checkpoints" / "step-2")):
        assert train("cut", "--resume", source, "--data-cache", str(tmp_path / "another node")) == 0
        assert "Today: 01 Jan 2026" in capsys.readouterr().out
        assert losses("cut") == whole
    assert train("again", "--template-date", "2026-01-01") == 0
    assert losses("again") == whole
    assert train("other") == 0
    assert losses("other") != whole
    other_day = train("cut", "--resume", str(Path(source)), "--template-date", "2026-01-03")
    assert other_day == cli.BAD_INPUT
    assert "was saved on other data: give the same --dataset" in capsys.readouterr().err


def test_preview_tells_the_day(model, tmp_path, on, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [m.for_template() for m in MESSAGES]}) + "\n")
    on(9)
    preview = ["data", "preview", "--model", str(model), "--dataset", str(tmp_path / "a.jsonl")]
    for more, day in (((), "2026-01-09"), (("--template-date", "2024-03-04"), "2024-03-04")):
        assert cli.main([*preview, *more]) == 0
        out = capsys.readouterr().out
        assert f"the chat template writes the date {day}" in out
        assert f"Today: {datetime.date.fromisoformat(day):%d %b %Y}" in out
