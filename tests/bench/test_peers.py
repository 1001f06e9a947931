"""bench/peers.py with tiny models on the CPU: figures come from steps, and a failed run says why."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench import peer_engines, peer_packages, peers
from bench.job_flags import job_from
from bench.peer_engines import (
    FILES,
    LORA_ALPHA,
    LORA_RANK,
    OURS,
    PACKAGE_OF,
    Setting,
    apply_liger,
    config_of,
    measure,
    model_without_values,
    with_adapters,
)
from bench.peer_engines import WORKS as CAN
from bench.peer_results import markdown, merge, reason
from bench.peers import WORKS, line, parse, run, runs_of, settings_of, table, without_folders

ONE = Setting(
    engine="peft-liger", preset="tiny-llama3-50m", layers=1, seq_len=8, tokens=32, micro_batches=(4, 2), tries=1,
    recompute=True, liger="none", attention="cudnn", adapter_dtype="float32", cap_gib=None, device="cpu", ranks=1,
    warmup=0, steps=3, lr=1e-2,
)  # fmt: skip


@pytest.mark.parametrize(("engine", "mode"), [("hf-liger", "full"), ("peft-liger", "lora")])
def test_engines_learn(engine, mode):
    row = measure(ONE._replace(engine=engine, mode=mode))
    assert row["micro_batch"] == 4
    assert len(row["losses"]) == len(row["steps_s"]) == 3
    assert row["losses"][-1] < row["losses"][0]
    assert row["tokens_per_s"] == pytest.approx(32 / row["step_s"])


def test_experts_and_router_get_no_adapters_where_ours_get_none():
    setting = ONE._replace(preset="qwen3-30b-a3b", mode="lora")
    model = with_adapters(model_without_values(config_of(setting), recompute=False), setting)
    trained = {name.split("layers.0.")[1].split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"self_attn.{letter}_proj" for letter in "qkvo"}


@pytest.mark.parametrize(
    ("preset", "mode", "expected"),
    [
        ("qwen3-30b-a3b", "lora", {"qwen3_moe": {"swiglu": False}}),
        ("deepseek-v3", "lora", {"deepseek_v3": {"swiglu": False}}),
        ("qwen3-30b-a3b", "full", {"qwen3_moe": {}}),
        ("llama-3.1-8b", "lora", {"llama": {}}),
    ],
)
def test_frozen_experts_are_not_those_of_liger(monkeypatch, preset, mode, expected):
    asked = {}
    liger = SimpleNamespace(_apply_liger_kernel=lambda model_type, **options: asked.update({model_type: options}))
    monkeypatch.setattr(peer_engines, "import_module", lambda _: liger)
    setting = ONE._replace(preset=preset, mode=mode, liger="all")
    apply_liger(config_of(setting), setting)
    assert asked == expected


def test_ours_is_asked_for_the_same_work(monkeypatch):
    asked = {}

    def run_cap(args, cap_gib, tokens):
        asked.update(job=job_from(args, max_gpu_mem_gib=cap_gib, max_global_batch_tokens=tokens), lr=args.lr)
        return {"chunk_tokens": 12}

    monkeypatch.setattr("bench.step.run_cap", run_cap)
    ours = ONE._replace(engine=OURS, mode="lora", base_dtype="nf4", cap_gib=6.0, host_gib=9.0, layers=None)
    assert measure(ours)["micro_batch"] == 1.5
    job = asked["job"]
    assert (job.mode, job.base_dtype, job.lora_rank, job.lora_alpha) == ("lora", "nf4", LORA_RANK, LORA_ALPHA)
    assert (job.max_seq_len, job.max_global_batch_tokens, job.max_grad_norm) == (8, 32, None)
    assert (job.max_gpu_mem_gib, job.max_host_mem_gib, job.init, asked["lr"]) == (6.0, 9.0, "random", 1e-2)
    measure(ours._replace(base_dtype="bfloat16"))
    assert asked["job"].base_dtype == "bf16"


def test_settings_divide_the_batch():
    args = parse(["--seq-len", "8", "--tokens-per-step", "96", "--cap-gib", "24"])
    assert [s.micro_batches for s in settings_of(args, "hf-liger")] == [(4, 2, 1), (4, 2, 1)]
    found = [(s.micro_batches, s.ranks, s.liger) for s in settings_of(args, "fsdp2-offload")]
    assert found == [((4,), 2, "all"), ((4,), 2, "no-loss")]
    assert [(s.micro_batches, s.ranks) for s in settings_of(args, "roundpipe")] == [((n,), 1) for n in (4, 2, 1)]
    found = [(s.micro_batches, s.recompute, s.ranks) for s in settings_of(args, "fsdp2")]
    assert found == [((n,), recompute, 2) for recompute in (False, True) for n in (4, 2, 1)]


@pytest.mark.parametrize("work", WORKS)
def test_works_ask_engines_for_what_they_train(work):
    args = parse(["--work", work, "--limit-s", "30"])
    assert args.engines[0] == OURS
    assert args.limit_s == 30
    for engine in args.engines:
        for setting in settings_of(args, engine):
            assert (setting.mode, setting.base_dtype) in CAN[engine]
            assert (setting.cap_gib, setting.ranks) == (args.cap_gib, 1)
    assert settings_of(parse(["--work", work, "--cap-gib", "inf"]), OURS)[0].cap_gib is None


def test_engines_that_are_not_installed_say_so_in_one_line(monkeypatch):
    monkeypatch.setitem(PACKAGE_OF, "unsloth", ("no_such_package",))
    with pytest.raises(SystemExit, match=r"^unsloth: not installed here: no_such_package$"):
        measure(ONE._replace(engine="unsloth", mode="lora"))
    with pytest.raises(SystemExit, match=r"^hf-liger: trains full with bfloat16, not lora with nf4 weights$"):
        measure(ONE._replace(engine="hf-liger", mode="lora", base_dtype="nf4"))


def test_blocks_in_a_row_have_the_loss_of_the_model():
    setting = ONE._replace(engine="block-streamer", mode="lora", layers=2)
    config = config_of(setting)
    model, base, blocks = peer_packages.parts_of(setting, config, torch.device("cpu"))
    first, last = peer_packages.First(base.model.embed_tokens), peer_packages.Last(base, fused=False, share=0.5)
    ids = torch.randint(0, config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    states = first(ids)
    for block in blocks:
        states = block(states)
    torch.testing.assert_close(2 * last(states), model(input_ids=ids, labels=ids).loss.float(), rtol=1e-2, atol=0)


def test_checkpoints_are_written_once_and_load(tmp_path, monkeypatch):
    monkeypatch.setenv(FILES, str(tmp_path))
    config = config_of(ONE)
    folder = peer_packages.checkpoint_of(ONE, config)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert peer_packages.checkpoint_of(ONE, config) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters():
        drawn = parameter.float()
        expected = (config.initializer_range, 0.0) if drawn.dim() > 1 else (0.0, 1.0)
        assert (drawn.std().item(), drawn.mean().item()) == pytest.approx(expected, abs=0.002)


def test_drawn_values_go_on_where_the_last_matrix_ended(monkeypatch):
    monkeypatch.setattr(peer_engines, "DRAWN_ELEMENTS", 7)
    drawn = peer_engines._Drawn(1.0, torch.bfloat16)
    values = torch.full((3, 10), math.nan, dtype=torch.bfloat16)
    for row in values:
        drawn.copy_to(row)
    period = values.view(-1)[:7]
    assert len(period.unique()) > 3
    torch.testing.assert_close(values.view(-1), period.repeat(5)[:30], rtol=0, atol=0)


def test_smaller_micro_batches_follow_where_memory_ran_out(monkeypatch):
    fails = {8: "Traceback\ntorch.OutOfMemoryError: CUDA out of memory", 2: "Traceback\nValueError: odd"}
    times = []

    def run(setting, limit_s, packages, alone):
        times.append(limit_s)
        (size,) = setting.micro_batches
        how = {"failed": fails[size]} if size in fails else {"micro_batch": size, "tokens_per_s": 1.0, "step_s": 1.0}
        measured = {"gpu_peak_gib": None, "host_system_gib": 0.0, "host_resident_gib": 0.0}
        return {**setting._asdict(), **measured, **how}

    monkeypatch.setattr(peers, "run", run)
    args = parse(["--tokens-per-step", "16384", "--ranks", "1", "--tries", "2", "--limit-s", "50"])

    def sizes():
        return [row["micro_batches"][0] for row in runs_of(args, "trainstream", left_s=40.0)]

    assert sizes() == [8, 4, 2]
    assert times[0] == pytest.approx(40, abs=1)
    fails[4] = fails.pop(8)
    assert sizes() == [8, 4, 2]
    args.tries = 1
    assert sizes() == [8]
    fails[8] = "stopped after 40 s"
    assert sizes() == [8]


def test_a_call_without_time_starts_nothing():
    row = run(ONE, 3.0)
    assert row["failed"] == "not started: 3 s were left"
    assert "not started" in table([row])[1]


def test_tables_rank_the_best_runs_and_keep_failures():
    ran = {"engine": "a", "tokens_per_s": 1.0, "step_s": 2.0, "gpu_peak_gib": None, "host_system_gib": 3.0}
    rows = [
        {"engine": "b", "failed": "Traceback\nMemoryError: no memory"},
        {**ran, "micro_batch": 2},
        {**ran, "micro_batch": 4, "tokens_per_s": 5.0},
        {"engine": "a", "failed": "too late"},
    ]
    lines = table(rows)
    assert [text.split()[0] for text in lines] == ["engine", "a", "b"]
    assert " 5 " in lines[1]
    assert lines[2].endswith("MemoryError: no memory")


def test_a_failed_run_tells_its_error():
    failed = line({**ONE._asdict(), "failed": "Traceback\ntorch.OutOfMemoryError: no memory"})
    assert failed.endswith("FAILED: torch.OutOfMemoryError: no memory")


def test_errors_name_files_without_their_folders():
    text = 'File "/a/b/site-packages/torch/nn/x.py", line 3\nsee https://a.b/c'
    assert without_folders(text) == 'File "x.py", line 3\nsee https://a.b/c'


def test_results_keep_the_best_row_of_each_engine_and_request():
    def run(work, *rows):
        command = f"python -m bench.peers --work {work} --json OUT.json"
        return {"environment": {"gpu": "H200", "commit": "abc", "command": command}, "versions": {}, "rows": list(rows)}

    def ran(engine, rate):
        times = {"tokens_per_s": rate, "step_s": 1 / 3, "losses": [3.0, 2.0, 1.0], "gpu_peak_gib": 2.0}
        return {"engine": engine, "micro_batch": 2, "host_resident_gib": 1.0, "micro_batches": [4, 2], **times}

    failed = "Trace\nOutOfMemoryError: Tried to allocate 5.00 MiB. GPU 0"
    lost = {"engine": "soup", "micro_batches": [4], "failed": failed}
    other = {**lost, "engine": "odd"}
    results = merge({}, [run("nf4-8b-6gib", ran("flexengine", 5.0), lost, other)], "busy", ["nf4-8b-6gib:odd"])
    late = {**lost, "engine": "late", "failed": "not started: 3 s were left"}
    first = run("lora-8b-16k", late, ran("soup", 7.0), ran("soup", 9.0), ran("unsloth", 10.0))
    results = merge(results, [first, run("nf4-8b-6gib", ran("soup", 4.0), {**lost, "engine": "flexengine"})])
    told = [(row["work"], row["engine"], row["tokens_per_s"], row["call"]) for row in results["rows"]]
    assert told[:2] == [("lora-8b-16k", "unsloth", 10.0, 1), ("lora-8b-16k", "soup", 9.0, 1)]
    assert told[2:] == [("nf4-8b-6gib", "flexengine", 5.0, 0), ("nf4-8b-6gib", "soup", 4.0, 1)]
    assert results["rows"][0]["losses"] == [3.0, 1.0]
    assert [call["note"] for call in results["calls"]] == ["busy", ""]
    assert results["calls"][0]["commands"] == ["python -m bench.peers --work nf4-8b-6gib"]
    assert reason(failed) == "OutOfMemoryError: Tried to allocate 5.00 MiB"
    assert markdown(results["rows"])[2] == "| lora-8b-16k | unsloth | 10 | 0.33 | 2.0 | 1.0 | 2 | |"
