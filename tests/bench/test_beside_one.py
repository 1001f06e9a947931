"""bench/beside_one.py: its commands are ones that their modules take, and what they write becomes rows and a table."""

import math
import time

import psutil
import pytest

from bench import kill_ranks, peers, step
from bench.beside_one import MEASUREMENTS, Command, measure, told
from bench.job_flags import job_from

FAKE = """
import argparse, json, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--way", default="good"); parser.add_argument("--tokens-per-step", type=int)
parser.add_argument("--also-tokens", type=int, nargs="*", default=[]); parser.add_argument("--json")
args, rows = parser.parse_args(), []
for tokens in (args.tokens_per_step, *args.also_tokens):
    row = {"tokens_per_step": tokens, "tokens_per_s": 10.0 * tokens, "step_s": 0.1, "predicted_step_s": 0.125}
    rows.append({**row, "weights_digest": "ab", "losses": [2.0, 1.0], "busy_s": {}})
    json.dump({"environment": {}, "rows": rows}, open(args.json, "w"))
print("went", args.way, flush=True)
if args.way == "stuck":
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    print(rank.pid, flush=True)
    time.sleep(60)
sys.exit(args.way == "bad")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The name of a module that writes figures without measuring them."""
    (tmp_path / "fake_bench.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "fake_bench"


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_command_is_one_that_its_module_takes(name, tmp_path):
    for command in MEASUREMENTS[name]:
        line = command.line(4, 110.0, tmp_path)
        flags = line[line.index(command.module) + 1 :]
        if command.module == "bench.step":
            args = step.parse(flags)
            count = command.count(4)
            job = job_from(args, max_gpu_mem_gib=None, max_global_batch_tokens=args.max_global_batch_tokens)
            assert job.max_host_mem_gib in (40.0, 110.0 * count)
            if command.tokens:
                assert args.max_global_batch_tokens == count * command.tokens[0]
        elif command.module == "bench.peers":
            assert peers.parse(flags).ranks == 4
        else:
            assert (command.module, kill_ranks.parse(flags).gpus) == ("bench.kill_ranks", 4)


def test_rows_of_commands_and_what_went_wrong(fake, capsys):
    commands = (
        Command("one", "", (64, 32, 16), fake),
        Command("all", "", (32, 16), fake),
        Command("all", "--way bad", (8,), fake),
    )
    kept = list[int]()
    rows = measure(commands, 2, 1.0, math.inf, lambda rows: kept.append(len(rows)))
    assert kept == [3, 5, 7]
    assert [(row["gpus"], row.get("tokens_per_step")) for row in rows] == [
        *((1, tokens) for tokens in (64, 32, 16)), *((2, tokens) for tokens in (64, 32)), (2, 16), (2, None)
    ]  # fmt: skip
    assert rows[-1]["failed"] == "went bad"
    assert "busy_s" not in rows[0]
    assert rows[3]["command"] == "python -m fake_bench --tokens-per-step 64 --also-tokens 32 --json OUT.json"
    table = told(rows)
    assert [line.split()[3] for line in table[4:6]] == ["2.00x", "2.00x"]  # beside one GPU with as many tokens a GPU
    assert "the same" in table[4]
    assert table[-1].endswith("went bad")
    rows[4]["losses"] = [2.0, 1.1]
    assert "OTHERS" in told(rows)[5]
    assert "went good" in capsys.readouterr().out


def test_commands_that_take_too_long_or_come_too_late(fake, monkeypatch):
    monkeypatch.setattr("bench.beside_one.LEAST_S", 0.0)
    stuck = Command("one", "--way stuck", (8,), fake, limit_s=2.0)
    rows = measure([stuck], 2, 1.0, math.inf)
    assert rows[0]["tokens_per_step"] == 8  # what it wrote before is kept
    *said, rank = rows[1]["failed"].splitlines()
    assert said == ["stopped after 2 s", "went stuck"]
    assert any(has_ended(int(rank)) or time.sleep(0.1) for _ in range(200))
    monkeypatch.setattr("bench.beside_one.LEAST_S", 15.0)
    [row] = measure([stuck._replace(limit_s=240.0)], 2, 1.0, time.monotonic() + 9.5)
    assert row["failed"].startswith("not started: ")
