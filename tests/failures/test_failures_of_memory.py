"""Too little memory, however it shows: budgets, machines, containers, limits of the process, refused page-locks."""

import json
from dataclasses import replace

import pytest
import torch
from provoke import Case, arguments, cases, check_error, check_message

from flexengine import from_pretrained
from flexengine.api import prepare
from flexengine.hardware import cache, probe
from flexengine.hardware.host_memory import host_memory
from flexengine.hardware.presets import preset, with_memory
from flexengine.native import page_lock
from flexengine.plan import PlanError, PlanReason
from flexengine.request import check_is_free

GIB = 2**30
BUDGETS = (
    Case(
        "gpu_budget_too_small_for_one_layer",
        {"max_gpu_mem_gib": 1e-5},
        (
            "INSUFFICIENT_DEVICE_MEMORY",
            "needs \\S+ GiB of GPU memory, budget is \\S+ GiB",
            "fits with: --max-gpu-mem-gib",
        ),
    ),
    Case(
        "host_budget_too_small",
        {"max_host_mem_gib": 0.5},
        ("INSUFFICIENT_HOST_MEMORY", "of host memory, budget is 0.50?0? GiB", "fits with: --max-host-mem-gib"),
    ),
    Case(
        "round_that_is_no_multiple_of_the_chunk",
        {"chunk_tokens": 12, "round_tokens": 32},
        ("round_tokens=32 is not a multiple of chunk_tokens=12", "works with: --round-tokens 36, or --chunk-tokens 32"),
    ),
    Case(
        "round_shorter_than_a_sequence",
        {"chunk_tokens": 8, "round_tokens": 8},
        ("round_tokens=8 is less than max_seq_len=16", "works with: --round-tokens 16, or --max-seq-len 8"),
    ),
    Case(
        "no_recomputation_in_too_little_memory",
        {"max_gpu_mem_gib": 2e-4, "max_host_mem_gib": 1.0001, "recompute": "none", "max_global_batch_tokens": 4096},
        ("INSUFFICIENT", "GiB", "fits with|no single change"),
    ),
)


@cases(*BUDGETS)
def test_budgets(case, model, command, known_machine, tmp_path):
    outcome = command("train", *arguments(model=model, output_dir="run", save=True, **case.provoke))
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert not (tmp_path / "run").exists()


def test_the_remedy_of_a_budget_works(model, command, known_machine):
    """Following the advice of the message gives a plan."""
    refused = command("train", *arguments(model=model, output_dir="run", max_gpu_mem_gib=1e-5))
    flag, value = refused.err.partition("fits with: ")[2].replace(",", " ").split()[:2]
    assert flag == "--max-gpu-mem-gib"
    accepted = command("train", *arguments(model=model, output_dir="run", max_gpu_mem_gib=value, dry_run=True))
    assert accepted.status == 0, accepted.err


def container(folder, limit_bytes, used_bytes):
    """Stand-ins of /proc and /sys/fs/cgroup: 64 GiB of RAM, and a container that may use limit_bytes of them."""
    proc, cgroups = folder / "proc", folder / "cgroups"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    (proc / "self" / "status").write_text("VmSize: 1000 kB\n")
    (cgroups / "memory.max").write_text(f"{limit_bytes}\n")
    (cgroups / "memory.current").write_text(f"{used_bytes}\n")
    (cgroups / "memory.stat").write_text("inactive_file 0\n")
    return host_memory(proc, cgroups)


def test_container_smaller_than_the_plan(model, command, monkeypatch, tmp_path):
    """The budget allows what the container does not have: refused when planned, not killed when run."""
    memory = container(tmp_path / "system", 3 * GIB // 2, 5 * GIB // 4)
    assert memory.total_bytes == 3 * GIB // 2
    small = with_memory(preset("cpu-test"), host_total_bytes=memory.total_bytes)
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: small)
    flags = arguments(model="preset:tiny-llama3-50m", output_dir="run", max_gpu_mem_gib=2, max_host_mem_gib=64)
    outcome = command("train", *flags)
    assert outcome.status == 2
    says = (
        "INSUFFICIENT_HOST_MEMORY\\): the plan takes 1.\\d+ GiB of host memory, but 1.50 GiB of 1.50 GiB are left",
        "raise the container's limit, or give --max-host-mem-gib",
    )
    check_message(outcome.err, says)
    assert not (tmp_path / "run").exists()


def test_gpu_that_others_fill(model, monkeypatch):
    """A GPU budget above what is free is refused before CUDA would run out of memory."""
    plan = prepare(model, device="cpu", dtype="float32", hardware="cpu-test", max_seq_len=16).plan
    with_little = with_memory(preset("rtx-4090"), host_total_bytes=64 * GIB)
    check_is_free(plan, with_little, "cuda")
    object.__setattr__(with_little.memory, "gpu_free_bytes", 0)
    object.__setattr__(with_little.memory, "gpu_context_bytes", 1000)
    says = ("takes \\S+ \\S+ of GPU memory, but 1000 bytes of 23.50 GiB are left", "give --max-gpu-mem-gib")
    check_error(lambda: check_is_free(plan, with_little, "cuda"), says, PlanError)


def test_what_ranks_have_taken_already_counts_as_theirs(model):
    """A plan of two ranks counts both processes, and both are there when it is held against what is left."""
    plan = prepare(model, device="cpu", dtype="float32", hardware="cpu-test", max_seq_len=16).plan
    plan = replace(plan, request=replace(plan.request, ranks=2))
    needed = plan.predicted.host_bytes + 2 * plan.predicted.gpu_bytes
    exact = preset("cpu-test").changed(host_base_bytes=1000, host_available_bytes=needed - 2000)
    check_is_free(plan, exact, "cpu")
    with pytest.raises(PlanError, match="of host memory, but"):
        check_is_free(plan, exact.changed(host_available_bytes=needed - 2001), "cpu")


class Refusing:
    """A driver that page-locks at most so many bytes."""

    def __init__(self, most_bytes):
        self.most_bytes, self.held = most_bytes, 0

    def register(self, address, num_bytes):
        if num_bytes > self.most_bytes:
            return "out of memory (CUDA error 2)"
        self.held += 1
        return None

    def unregister(self, address):
        self.held -= 1


def test_page_lock_refused():
    pinner = Refusing(GIB)
    says = (
        "cannot page-lock 4294967296 bytes \\(4.00 GiB\\)",
        "1.00 GiB\\) of it could be locked",
        "ulimit -l",
        "host budget",
    )
    check_error(lambda: page_lock.lock_pages(0, 4 * GIB, pinner), says, MemoryError)
    assert pinner.held == 0


def test_more_to_page_lock_than_the_container_has(monkeypatch):
    monkeypatch.setattr(page_lock, "pin_limit_bytes", lambda: 2 * GIB)
    says = ("cannot page-lock 4294967296 bytes", "2147483648 bytes \\(2.00 GiB\\) at most", "lower the host budget")
    check_error(lambda: page_lock.check_pin_limit(4 * GIB), says, MemoryError)


DEVICES = (
    Case(
        "torch_without_cuda_asked_for_cuda",
        "cuda",
        ("device='cuda': this machine has 0 usable NVIDIA GPUs", "device='cpu'"),
    ),
    Case("gpu_that_is_not_there", "cuda:7", ("device='cuda:7': this machine has 0 usable NVIDIA GPUs", "device='cpu'")),
)


@cases(*DEVICES)
def test_devices(case, model, command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = command("train", *arguments(model=model, output_dir="run", device=case.provoke))
    assert outcome.status == case.status
    check_message(outcome.err, case.says)


PROFILES = {
    "profile_no_json": "{",
    "profile_empty": "",
    "profile_of_another_format": json.dumps({"format": 99}),
    "profile_a_list": "[1]",
    "profile_with_nan": preset("cpu-test")
    .to_json()
    .replace('"peak_matmul_flops_per_s": 50000000000.0', '"peak_matmul_flops_per_s": NaN'),
    "profile_with_a_text": preset("cpu-test").to_json().replace('"launch_s": 1e-06', '"launch_s": "fast"'),
}


@pytest.mark.parametrize("name", PROFILES)
def test_damaged_profile(name, model, tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text(PROFILES[name])
    check_error(lambda: from_pretrained(model, device="cpu", hardware=path), ("gpu.json",))


@pytest.mark.parametrize("name", ["profile_no_json", "profile_with_nan"])
def test_damaged_cache_is_said_and_measured_again(name, model, command, monkeypatch, tmp_path):
    """A cache is no input of the user's: the run goes on, and says why it took longer."""
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "_measured", lambda *_: preset("cpu-test"))
    cache._say_unusable.cache_clear()
    flags = arguments(model=model, output_dir="run", dry_run=True)
    assert command("train", *flags).status == 0
    (path,) = (tmp_path / "cache" / "profiles").iterdir()
    path.write_text(PROFILES[name])
    outcome = command("train", *flags, untouched=model)
    assert outcome.status == 0
    check_message(outcome.err, (f"{path.name} cannot be used, measuring again",))
    assert "step of" in outcome.out


def test_reasons_are_for_programs_too(model):
    """Whoever calls from Python can tell the cases apart, in bytes."""
    with pytest.raises(PlanError) as caught:
        from_pretrained(model, device="cpu", dtype="float32", hardware="cpu-test", max_gpu_mem_bytes=1000)
    assert caught.value.reason == PlanReason.INSUFFICIENT_DEVICE_MEMORY
    assert caught.value.required_bytes > caught.value.budget_bytes == 1000
