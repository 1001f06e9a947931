"""The record that an export holds of its run: every option, and no place of the machine that it ran on."""

import json

from flexengine.options.option import options_of
from flexengine.options.train_config import TrainConfig
from flexengine.run import folder as run_folder


def test_final_tells_no_local_place(tmp_path):
    """Every option that takes text, given a path: none of its folders is in the record."""
    texts = {name: o for name, o in options_of(TrainConfig).items() if o.value_type is str and not o.choices}
    lists = {name for name, option in options_of(TrainConfig).items() if option.is_list}
    free = {"device", "lora_init"} | {"sample_prompts", "report_to", "lr_groups", "weight_decay_groups"}
    free |= {"freeze", "lora_targets", "modules_to_save"}  # names of parts of a model, questions, trackers
    free |= {"add_tokens", "labels", "template_date", "columns"}
    of_objectives = {"teacher", "rewards", "reward_weights", "generator"}
    places = (texts.keys() | lists | {"trace"}) - free - of_objectives
    assert {"model", "dataset", "val_dataset", "adapter", "plan_json", "data_cache", "output_dir"} <= places
    values = {name: f"/home/ann/secret/{name}" for name in places - {"resume"}}
    lists_of = {name: (f"/home/ann/secret/{name}.jsonl:train=2", "org/name:main") for name in places & lists}
    config = TrainConfig(**{**values, **lists_of}, eval_steps=2, mode="lora", resume="/home/ann/secret/run")
    text = run_folder.run_record(config, 3)
    assert "secret" not in text
    assert "ann" not in text
    record = json.loads(text)["config"]
    assert (record["model"], record["adapter"]) == ("model", "adapter")
    assert record["dataset"] == ["dataset.jsonl:train=2", "org/name:main"]
    data = {"model": "preset:demo", "data_source": "json_sft", "dataset": ("/home/ann/secret/x.jsonl",)}
    for own in (
        {"objective": "distill", "teacher": "/home/ann/secret/teacher"},
        {"objective": "grpo", "rewards": ("/home/ann/secret/rewards.py:short",), "generator": "http://secret:8000"},
    ):
        text = run_folder.run_record(TrainConfig(**data, **own), 3)
        assert "secret" not in text
        assert "ann" not in text
