"""The benchmark that kills ranks: which of its findings are wrong, and the runs that it starts."""

import argparse

from bench.kill_ranks import command, write_model, wrong

KILL = {"ended_after_s": 1.0, "left": 0, "status": 1, "after_step": 5, "checkpoint": 4}
FOUND = {"one_equals_several": True, "killed_equals_whole": True, "save_steps": 2, "kills": [KILL]}


def test_what_is_found_is_judged():
    assert wrong(FOUND) == []
    assert wrong({**FOUND, "killed_equals_whole": False}) == ["killed_equals_whole"]
    for change in ({"ended_after_s": 11.0}, {"left": 1}, {"status": 0}, {"checkpoint": 2}):
        assert len(wrong({**FOUND, "kills": [KILL | change]})) == 1


def test_only_runs_that_are_killed_save(tmp_path):
    args = argparse.Namespace(
        steps=4, gpus=2, host_gib=8, device="cpu", transport="relay", save_steps=2, kills=1, seed=0
    )
    model = write_model("cpu", tmp_path / "model")
    assert (model / "config.json").is_file()
    plain, saving = (command(args, model, tmp_path / "run", 2, saving) for saving in (False, True))
    assert set(saving) - set(plain) == {"--save-steps=2", "--save-total-limit=2", "--resume=auto"}
    assert "--transport=relay" in plain
    assert "--transport=relay" not in command(args, model, tmp_path / "run", 1)
