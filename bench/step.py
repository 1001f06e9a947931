"""How fast is a capped training step, and does it keep its promises? One model under one or several GPU budgets.

    python -m bench.step --preset llama-3.1-8b --caps 16 24 48 none --host-gib 110 --json out.json
    torchrun --nproc-per-node 2 -m bench.step --tokens-per-step 262144 --host-gib 220 --json two.json

Per cap: tokens/s, effective and hardware TFLOP/s, share of the 8192^3 bf16 matmul rate measured in the same process
right before (at least 1 s, back to back, random data), share of the run without a cap, predicted against measured step
time, how busy each stream was (in one more step, timed command by command) and was predicted to be, peaks of GPU and
host memory. The batch is one set of random sequences repeated every step, so that the loss must fall. Effective FLOPs
are those of ModelSpec.model_flops: with --freeze less than three times those of forward.

Of several GPUs, --host-gib and --tokens-per-step are those of all, the matmul rate is the sum of what each attains
while all multiply, busy seconds are rank 0's, the peaks are the highest of a GPU and the sum of what the ranks hold,
in which memory that they share counts once. --digest tells the weights after all steps in one number.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from bench.environment import require_native_code, write_json
from bench.job_flags import add_job_flags, job_from
from flexengine.api import build, prepare_job
from flexengine.hardware.memory_usage import MemoryPeaks, forget_peak_resident
from flexengine.models.registry import FAMILIES
from flexengine.ops.opaque import OpaqueBlock
from flexengine.optim import AdamW
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.team import Team, is_first, leave
from flexengine.plan import PlanError
from flexengine.reports.text_format import align_columns
from flexengine.runtime.engine import Engine

T = TypeVar("T")

GIB = 2**30
IMAGE_ROWS = 1024
"""Tokens that stand for an image."""
PIECE_BYTES = 16 * 2**20
"""Of planes that are copied from a GPU to be digested."""
OPTIONS = (
    "init", "max_seq_len", "max_global_batch_tokens", "max_host_mem_gib", "device", "dtype", "master_dtype",
    "optimizer_state_dtype", "matmul_dtype", "keep_dtype", "delta_dtype", "cuda_graphs", "freeze", "mode", "lora_rank",
    "lora_alpha", "lora_targets", "use_dora", "base_dtype", "max_grad_norm", "recompute", "chunk_tokens",
    "round_tokens", "round_multiple", "transport", "deterministic", "max_image_tokens", "train_tower", "offload_dir",
    "max_disk_gib",
)  # fmt: skip
"""Options of a job that are flags here."""


def matmul_rate(seconds: float = 1.5) -> float:
    """Sustained FLOP/s of 8192^3 bf16 products on normal random data; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0.0
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b, c = torch.randn_like(a), torch.empty_like(a)
    count, flops = 0, 2 * 8192**3
    torch.cuda.synchronize()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(50):
            torch.mm(a, b, out=c)
        torch.cuda.synchronize()
        count += 50
    rate = count * flops / (time.perf_counter() - start)
    del a, b, c
    torch.cuda.empty_cache()
    return rate


class Timed(NamedTuple):
    """Steps after the warm-up: their seconds, losses and norms of all steps, and FLOPs of a step without and with
    recomputation."""

    seconds: list[float]
    losses: list[float]
    norms: list[float]
    model_flops: float
    hardware_flops: float


def printer(team: Team | None) -> Callable[[str], None]:
    """Print at once, on rank 0 alone."""
    return lambda text: print(text, flush=True) if is_first(team) else None


def one_batch(engine: Engine) -> dict[str, Tensor]:
    """Full sequences of random tokens, a step's worth, the same in every process: int64 [sequences, max_seq_len].

    Where images are trained with, as many tokens as may be stand for images of IMAGE_ROWS, of which no label is.
    """
    request, given = engine.plan.request, engine.model.given
    shape = (request.max_global_batch_tokens // request.max_seq_len, request.max_seq_len)
    ids = torch.randint(0, engine.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    if given is None:
        return {"input_ids": ids, "labels": ids}
    ids[ids == given.token_id] = 0
    image = given.tower.example(IMAGE_ROWS)
    rows, count = given.tower.calls(image)[0].rows, 0
    for row in ids:  # a token of text lies between two images
        for start in range(1, len(row) - rows, rows + 1):
            if rows * (count + 1) <= given.max_tokens:
                row[start : start + rows], count = given.token_id, count + 1
    columns = {name: torch.cat([column] * count) for name, column in image.items()}
    return {"input_ids": ids, "labels": ids.where(ids != given.token_id, torch.tensor(-100)), **columns}


def timed_steps(
    engine: Engine, batch: dict[str, Tensor], warmup: int, steps: int, say: Callable[[str], None] = print
) -> Timed:
    """Train on the same batch again and again."""
    losses, norms, seconds, model_flops, hardware_flops = [], [], [], 0.0, 0.0
    for index in range(warmup + steps):
        begin = time.perf_counter()
        out, result = engine.train_step(batch)
        elapsed = time.perf_counter() - begin
        losses.append(out.loss)
        norms.append(result.grad_norm)
        model_flops, hardware_flops = out.model_flops, out.hardware_flops
        if index >= warmup:
            seconds.append(elapsed)
        speed = f"{elapsed:.2f} s, {out.num_tokens / elapsed:.0f} tokens/s"
        say(f"step {index + 1}: loss {out.loss:.4f}, norm {result.grad_norm:.3f}, {speed}")
    return Timed(seconds, losses, norms, model_flops, hardware_flops)


def measured_busy_s(engine: Engine, batch: dict[str, Tensor]) -> dict[str, float]:
    """Busy seconds per stream of one more step, in which every command is timed."""
    engine.measure_next_step(keep_runs=True)
    engine.train_step(batch)
    busy_s: dict[str, float] = {}
    for run in engine.take_timed_runs():
        for stream, seconds in run.timing.busy_s.items():
            busy_s[stream.value] = busy_s.get(stream.value, 0.0) + seconds
    return busy_s


def of_all(team: Team | None, value: T) -> list[T]:
    """The values of all ranks; of a process that is alone, its own."""
    return [value] if team is None else team.control.gather(value)


def summed_rate(team: Team | None) -> float:
    """FLOP/s of 8192^3 products on all GPUs at once."""
    of_all(team, None)  # all begin together
    return sum(of_all(team, matmul_rate()))


def peaks_of_all(team: Team | None, peaks: MemoryPeaks, shared_bytes: int) -> MemoryPeaks:
    """The highest peak of a GPU, and what all ranks hold of the host, where shared memory counts once."""
    fields = (peaks.gpu_bytes, peaks.host_bytes)  # ranks read no records but those they know
    told = [MemoryPeaks(*peak) for peak in of_all(team, fields)]
    gpu = [peak.gpu_bytes for peak in told if peak.gpu_bytes is not None]
    host = sum(peak.host_bytes for peak in told) - (len(told) - 1) * shared_bytes
    return MemoryPeaks(max(gpu, default=None), host)


def digest_of_masters(engine: Engine) -> str:
    """A digest of all weights and of what they lack of their masters, as they are stored, made by many threads.

    Every rank makes it, as ranks in stages first give back what they keep on their GPUs.
    """
    engine.executor.synchronize()
    engine.planes.write_back()
    layout = engine.layout
    stored = [(kind, group) for kind in ("weights", "remainder") for group in range(len(layout.groups))]

    def of_one(plane: tuple[str, int]) -> bytes:
        kind, group = plane
        num_bytes = layout.groups[group].plane_bytes.get(kind, 0)
        if not num_bytes:
            return b""
        slot, digest = layout.slots[layout.stored_slot(kind, group)], hashlib.blake2b(digest_size=16)
        for piece in engine.arenas.view(slot, 0, (num_bytes,), torch.uint8).split(PIECE_BYTES):
            digest.update(piece.cpu().numpy().data)
        return digest.digest()

    with ThreadPoolExecutor(16) as pool:
        return hashlib.blake2b(b"".join(pool.map(of_one, stored)), digest_size=16).hexdigest()


def run_cap(args: argparse.Namespace, cap_gib: float | None, tokens: int, first: bool = True) -> dict:
    """Train steps of so many tokens under one budget, the first of the process or a later one; returns the row of
    figures."""
    own_peak = forget_peak_resident() or first
    job = job_from(args, max_gpu_mem_gib=cap_gib, max_global_batch_tokens=tokens)
    planned = prepare_job(args.model, job, whole_steps=True)
    say = printer(planned.team)
    say(planned.describe())
    rate = summed_rate(planned.team)
    started = time.perf_counter()
    engine = build(planned, AdamW(lr=args.lr))
    build_s = time.perf_counter() - started
    batch = one_batch(engine)
    timed = timed_steps(engine, batch, args.warmup, args.steps, say)
    peaks = peaks_of_all(planned.team, engine.memory_peaks(), engine.plan.predicted.shared_host_bytes)
    digest = digest_of_masters(engine) if args.digest else None
    busy_s = measured_busy_s(engine, batch) if args.streams else {}
    plan = engine.plan
    engine.close()
    step_s = statistics.median(timed.seconds)
    return {
        "model": args.model,
        "opaque": any(isinstance(op, OpaqueBlock) for layer in planned.source.spec.layers for op in layer.ops),
        "gpu_cap_gib": cap_gib,
        "host_cap_gib": job.max_host_mem_gib,
        "seq_len": job.max_seq_len,
        "tokens_per_step": job.max_global_batch_tokens,
        "max_grad_norm": job.max_grad_norm or 0.0,
        "freeze": list(job.freeze),
        "gpus": plan.request.ranks,
        "transport": None if planned.team is None else plan.transport,
        "weights_digest": digest,
        "trained_parameters": planned.source.spec.num_trained_parameters,
        "step_s": step_s,
        "steps_s": timed.seconds,
        "predicted_step_s": plan.predicted.step_s,
        "predicted_after_clipping_s": plan.predicted.after_clipping_s or plan.predicted.step_s,
        "speed_of_light_s": plan.predicted.speed_of_light_s,
        "limiter": plan.predicted.limiter,
        "busy_s": busy_s,
        "predicted_busy_s": plan.predicted.busy_s,
        "tokens_per_s": job.max_global_batch_tokens / step_s,
        "effective_tflops": timed.model_flops / step_s / 1e12,
        "hardware_tflops": timed.hardware_flops / step_s / 1e12,
        "matmul_8192_tflops": rate / 1e12,
        "share_of_matmul_rate": timed.model_flops / step_s / rate if rate else None,
        "gpu_peak_gib": peaks.gpu_bytes / GIB if peaks.gpu_bytes else None,
        "gpu_predicted_gib": plan.predicted.gpu_bytes / GIB,
        "host_peak_gib": peaks.host_bytes / GIB if own_peak else None,
        "host_predicted_gib": plan.predicted.host_bytes / GIB,
        "chunk_tokens": plan.chunk_tokens,
        "round_tokens": plan.round_tokens,
        "losses": timed.losses,
        "grad_norms": timed.norms,
        "build_s": build_s,
        "within_gpu_cap": cap_gib is None or peaks.gpu_bytes is None or peaks.gpu_bytes <= cap_gib * GIB,
        "within_host_cap": job.max_host_mem_gib is None or peaks.host_bytes <= job.max_host_mem_gib * GIB,
        "loss_finite_and_falling": all(map(math.isfinite, timed.losses)) and timed.losses[-1] < timed.losses[0],
    }


HEAD = (
    "GPU cap", "tokens/step", "tokens/s", "effective TFLOP/s", "hardware", "of 8192^3", "of no cap", "step s",
    "predicted", "busy: compute", "h2d", "d2h", "cpu", "GPU GiB", "host GiB",
)  # fmt: skip


def summary(rows: list[dict]) -> list[str]:
    """One line per cap; a stream's share of the step as measured / predicted."""
    uncapped = next((row["tokens_per_s"] for row in rows if row["gpu_cap_gib"] is None), None)
    return align_columns([HEAD, *(_cells(row, uncapped) for row in rows)])


def _cells(row: dict, uncapped: float | None) -> tuple[str, ...]:
    share = row["share_of_matmul_rate"]
    busy, predicted = row["busy_s"], row["predicted_busy_s"]
    return (
        "none" if row["gpu_cap_gib"] is None else f"{row['gpu_cap_gib']:g}",
        str(row["tokens_per_step"]),
        f"{row['tokens_per_s']:.0f}",
        f"{row['effective_tflops']:.1f}",
        f"{row['hardware_tflops']:.1f}",
        f"{100 * share:.1f}%" if share else "-",
        f"{100 * row['tokens_per_s'] / uncapped:.1f}%" if uncapped else "-",
        f"{row['step_s']:.2f}",
        f"{row['predicted_step_s']:.2f}",
        *(
            f"{100 * busy.get(stream, 0.0) / row['step_s']:.0f}"
            f" / {100 * predicted.get(stream, 0.0) / row['predicted_step_s']:.0f}%"
            for stream in ("compute", "h2d", "d2h", "cpu")
        ),
        f"{row['gpu_peak_gib'] or 0:.2f}",
        f"{row['host_peak_gib'] or 0:.2f}",
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of a command line, or of `argv`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="preset:llama-3.1-8b", help="a folder, or preset:NAME")
    model.add_argument("--preset", default=None, help="name of a preset")
    parser.add_argument("--caps", nargs="+", default=["24"], help="GPU budgets in GiB, or none")
    parser.add_argument("--also-tokens", nargs="+", type=int, default=[], help="steps of so many tokens, too")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--opaque", action="store_true", help="run a native type as opaque blocks of transformers")
    parser.add_argument("--digest", action="store_true", help="tell a digest of all weights after the steps")
    parser.add_argument("--no-streams", dest="streams", action="store_false", help="leave out the step that is timed")
    add_job_flags(parser, *OPTIONS, optimizer_state_dtype="bfloat16")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args(argv)
    args.model = f"preset:{args.preset}" if args.preset else args.model
    if args.opaque:
        FAMILIES.clear()
    return args


def main() -> int:
    args, rows = parse(), []
    first_rank = Ranks.of_environment().rank == 0
    require_native_code("bench.step")
    for cap, tokens in product(args.caps, (args.max_global_batch_tokens, *args.also_tokens)):
        try:
            rows.append(run_cap(args, None if cap == "none" else float(cap), tokens, first=not rows))
        except PlanError as error:
            if first_rank:
                print(f"bench.step: {error}", file=sys.stderr)
            return 1
        if first_rank:
            write_json(args.json, {"rows": rows})
    if first_rank:
        print("\n".join(["", *summary(rows)]))
    leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
