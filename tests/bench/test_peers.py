"""bench/peers.py with tiny models on the CPU: figures come from steps, and a failed run says why."""

import argparse

import pytest

from bench.peer_engines import Setting, measure
from bench.peers import line, settings_of, without_folders

ONE = Setting(
    engine="peft-liger", preset="tiny-llama3-50m", layers=1, seq_len=8, tokens=32, micro_batches=(4, 2), tries=1,
    recompute=True, liger="none", attention="cudnn", adapter_dtype="float32", cap_gib=None, device="cpu", ranks=1,
    warmup=0, steps=3, lr=1e-2,
)  # fmt: skip


@pytest.mark.parametrize("engine", ["hf-liger", "peft-liger"])
def test_resident_engines_learn(engine):
    row = measure(ONE._replace(engine=engine))
    assert row["micro_batch"] == 4
    assert len(row["losses"]) == len(row["steps_s"]) == 3
    assert row["losses"][-1] < row["losses"][0]
    assert row["tokens_per_s"] == pytest.approx(32 / row["step_s"])


def test_settings_divide_the_batch():
    given = {name: getattr(ONE, name) for name in ("preset", "layers", "seq_len", "tries", "liger", "attention")}
    args = argparse.Namespace(
        **given, tokens_per_step=96, micro_batches=None, recompute=[False, True], adapter_dtype="float32", cap_gib=24.0,
        device="cuda", ranks=2, warmup=1, steps=2, lr=1e-5,
    )  # fmt: skip
    assert [s.micro_batches for s in settings_of(args, "hf-liger")] == [(4, 2, 1), (4, 2, 1)]
    assert [(s.micro_batches, s.ranks) for s in settings_of(args, "fsdp2-offload")] == [((4,), 2)]
    found = [(s.micro_batches, s.recompute, s.ranks) for s in settings_of(args, "fsdp2")]
    assert found == [((n,), recompute, 2) for recompute in (False, True) for n in (4, 2, 1)]


def test_a_failed_run_tells_its_error():
    failed = line({**ONE._asdict(), "failed": "Traceback\ntorch.OutOfMemoryError: no memory"})
    assert failed.endswith("FAILED: torch.OutOfMemoryError: no memory")


def test_errors_name_files_without_their_folders():
    text = 'File "/a/b/site-packages/torch/nn/x.py", line 3\nsee https://a.b/c'
    assert without_folders(text) == 'File "x.py", line 3\nsee https://a.b/c'
