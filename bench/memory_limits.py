"""Does a run on the CPU keep to its budgets? Trains in control groups of just that much memory, and writes JSON.

python -m bench.memory_limits --json out.json [--only NAME ...]

Every case is planned twice: generously, and then with the budgets that this plan predicts, so that nothing is to spare.
A refusal that names a host budget which would fit is followed once: loading large data takes memory that a plan of
cached data does not show.
The training process runs alone in a memory control group (v1 or v2) whose limit is the sum of both budgets; where none
can be made, only its resident set is watched. The data cache is written by a run before, outside the group.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.environment import write_json

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "flexengine" / "assets" / "demo"
GIB, MIB = 2**30, 2**20
GROUPS = Path("/sys/fs/cgroup")
KILLED = -9
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GEMMA = {
    **LLAMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 256,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip


class Case(NamedTuple):
    """A run. ragged: texts of any length, else random tokens of full length. data_bytes: of the file of texts.
    container_bytes: the run gets no budgets, but a container of this size. flags: further ones. ranks: processes that
    train together, all of them and their launcher in one group."""

    name: str
    vocab_size: int
    dtype: str
    ragged: bool = True
    model: dict = LLAMA
    steps: int = 6
    data_bytes: int = 4 * MIB
    container_bytes: int = 0
    flags: tuple[str, ...] = ()
    ranks: int = 1


CASES = [
    *(
        Case(f"{vocab // 1000}k, {dtype}, {'ragged' if ragged else 'full'}", vocab, dtype, ragged)
        for vocab in (32_000, 152_000)
        for dtype in ("float32", "bfloat16")
        for ragged in (False, True)
    ),
    Case("soft caps, float32", 32_000, "float32", model=GEMMA),
    Case("soft caps, bfloat16", 32_000, "bfloat16", model=GEMMA),
    Case("slices, bfloat16", 32_000, "bfloat16", False, flags=("--max-seq-len", "2048", "--chunk-tokens", "512")),
    Case("152k in 2 GiB without budgets", 152_000, "bfloat16", container_bytes=2 * GIB),
    Case("1 GB of data", 32_000, "float32", data_bytes=10**9),
    Case("300 ragged steps", 8_000, "bfloat16", steps=300, flags=("--max-global-batch-tokens", "1024")),
    Case("2 ranks, 152k, float32", 152_000, "float32", ranks=2),
    Case("3 ranks, 32k, bfloat16", 32_000, "bfloat16", ranks=3),
]


def texts(path: Path, num_bytes: int) -> None:
    """A file of records of random lengths, as many bytes as asked for; one that is there already is kept."""
    if path.exists():
        return
    chosen = random.Random(0)
    words = [json.loads(line) for line in (DEMO / "demo_instructions.jsonl").read_text().splitlines()[:200]]
    vocabulary = " ".join(str(value) for record in words for value in record.values()).split()
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < num_bytes:
            file.write(json.dumps({"text": " ".join(chosen.choices(vocabulary, k=chosen.randint(3, 400)))}) + "\n")


def model_folder(case: Case, folder: Path) -> Path:
    """A folder with a config and the demo's tokenizer; weights are drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**case.model, "vocab_size": case.vocab_size}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


def command(case: Case, work: Path, budgets: tuple[float, float] | None, *more: str) -> list[str]:
    """The command line of a run."""
    data = work / f"{case.data_bytes}.jsonl"
    given = ["--dataset", str(data), "--data-cache", str(work / "cache")] if case.ragged else []
    if budgets is not None:
        more = (*more, "--max-gpu-mem-gib", str(budgets[0]), "--max-host-mem-gib", str(budgets[1]))
    return [
        sys.executable, "-m", "flexengine", "train", "--model", str(model_folder(case, work / "model")),
        "--init", "random", "--device", "cpu", "--dtype", case.dtype, "--max-seq-len", "512",
        "--max-global-batch-tokens", "4096", "--steps", str(case.steps), "--output-dir", str(work / "run"),
        "--gpus", str(case.ranks), *(given or ["--data-source", "synthetic"]), *case.flags, *more,
    ]  # fmt: skip


class Ended(NamedTuple):
    """How a process ended: status, most bytes resident, the end of what it said, and what the group counted."""

    status: int
    resident_bytes: int
    said: str
    group: dict[str, int]


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """A memory control group below this process's own, with a limit; None where none can be made."""
    own = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    first = GROUPS / "memory" / own.get("memory", "").lstrip("/") if "memory" in own else GROUPS / own[""].lstrip("/")
    group = first / f"flexengine-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (group / name).exists():
                (group / name).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def counted(group: Path | None) -> dict[str, int]:
    """What a group counted: the most bytes, page cache included, and kills."""
    found = {}
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if group is not None and (group / name).exists():
            found["most_bytes"] = int((group / name).read_text())
    for name in ("memory.oom_control", "memory.events"):
        if group is not None and (group / name).exists():
            events = dict(line.split() for line in (group / name).read_text().splitlines())
            found["kills"] = int(events.get("oom_kill", 0))
    return found


def run(arguments: list[str], limit_bytes: int = 0) -> Ended:
    """Run a process to its end, in a group of its own where a limit is given."""
    with memory_group(limit_bytes) if limit_bytes else contextlib.nullcontext() as group:
        if group is not None:  # a shell joins the group, and becomes the process
            arguments = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *arguments]
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(arguments, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            text = said.read().decode(errors="replace")
        return Ended(process.returncode, usage.ru_maxrss * 1024, text[-600:], counted(group))


def planned_bytes(case: Case, work: Path, budgets: tuple[float, float]) -> tuple[int, int]:
    """What the plan predicts, (GPU, host) bytes; it also fills the data cache."""
    plan = work / "plan.json"
    ended = run(command(case, work, budgets, "--dry-run", "--plan-json", str(plan)))
    if ended.status:
        raise RuntimeError(f"{case.name}: {ended.said}")
    predicted = json.loads(plan.read_text())["predicted"]
    return predicted["gpu_bytes"], predicted["host_bytes"]


def measure(case: Case, work: Path) -> dict[str, object]:
    """Figures of one case."""
    shutil.rmtree(work / "run", ignore_errors=True)
    if case.ragged:
        texts(work / f"{case.data_bytes}.jsonl", case.data_bytes)
    budgets, limit_bytes = None, case.container_bytes
    if not limit_bytes:
        gpu_bytes, host_bytes = planned_bytes(case, work, (8.0, 8.0))
        budgets = ((gpu_bytes + MIB) / GIB, (host_bytes + MIB) / GIB)
        limit_bytes = case.ranks * gpu_bytes + host_bytes + 2 * MIB
    ended = run(command(case, work, budgets), limit_bytes)
    advised = re.search(r"fits with: --max-host-mem-gib ([0-9.]+)", ended.said)
    if budgets and advised:
        budgets = (budgets[0], float(advised[1]))
        limit_bytes = int((case.ranks * budgets[0] + budgets[1]) * GIB)
        ended = run(command(case, work, budgets), limit_bytes)
    refused = ended.status == 2
    return {
        "case": case.name,
        "limit_bytes": limit_bytes,
        "resident_bytes": ended.resident_bytes,
        "group": ended.group,
        "status": ended.status,
        "outcome": "killed" if ended.status == KILLED else "refused" if refused else str(ended.status or "trained"),
        "above": ended.resident_bytes > limit_bytes,
        **growth(work / "run"),
        **({} if ended.status == 0 else {"said": ended.said}),
    }


def growth(folder: Path) -> dict[str, object]:
    """The most resident bytes by then, a sixth into a run and at its end, from its log."""
    log = folder / "train_log.jsonl"
    if not log.exists():
        return {}
    peaks = [json.loads(line).get("host_peak_bytes", 0) for line in log.read_text().splitlines()]
    return {"early_peak_bytes": peaks[len(peaks) // 6], "last_peak_bytes": peaks[-1]} if peaks else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name holds one of these (default: all)")
    parser.add_argument("--work", type=Path, help="folder for data and runs (default: a temporary one)")
    parser.add_argument("--json", metavar="OUT.json", help="also write the figures to a file")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    chosen = [case for case in CASES if not arguments.only or any(part in case.name for part in arguments.only)]
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for case in chosen:
            found.append(measure(case, work))
            print(json.dumps(found[-1]), flush=True)
    bad = sum(bool(result["above"]) or result["outcome"] not in ("trained", "refused") for result in found)
    write_json(arguments.json, {"killed_or_above": bad, "cases": found})
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
