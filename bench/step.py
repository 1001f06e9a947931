"""How fast is a capped training step, and does it keep its promises? One model under one or several GPU budgets.

    python -m bench.step --model preset:llama-3.1-8b --caps 24 --host-gib 110 --json out.json

Per cap: tokens/s, effective and hardware TFLOP/s, share of the 8192^3 bf16 matmul rate measured in the same process
right before (at least 1 s, back to back, random data), predicted against measured step time, peaks of GPU and host
memory. The batch is one set of random sequences repeated every step, so that the loss must fall.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch

from bench.environment import write_json
from flexengine.api import build, prepare
from flexengine.optim import AdamW

GIB = 2**30


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


def run_cap(args: argparse.Namespace, cap_gib: float | None) -> dict:
    """Train under one budget; returns the row of figures."""
    prepared = prepare(
        args.model,
        max_seq_len=args.seq_len,
        max_global_batch_tokens=args.tokens_per_step,
        max_gpu_mem_gib=cap_gib,
        max_host_mem_gib=args.host_gib,
        device=args.device,
        dtype=args.dtype,
        optimizer_state_dtype=args.optimizer_state_dtype,
        recompute=args.recompute,
        chunk_tokens=args.chunk_tokens,
        round_tokens=args.round_tokens,
    )
    print(prepared.describe(), flush=True)
    rate = matmul_rate()
    started = time.perf_counter()
    engine = build(prepared, AdamW(lr=args.lr), max_grad_norm=1.0, seed=0, deterministic=args.deterministic)
    build_s = time.perf_counter() - started
    generator = torch.Generator().manual_seed(0)
    shape = (args.tokens_per_step // args.seq_len, args.seq_len)
    batch = torch.randint(0, engine.model.vocab_size, shape, generator=generator)
    losses, seconds, model_flops, hardware_flops = [], [], 0.0, 0.0
    for index in range(args.warmup + args.steps):
        begin = time.perf_counter()
        out = engine.fwd_bwd(input_ids=batch, labels=batch)
        engine.step()
        elapsed = time.perf_counter() - begin
        losses.append(out.loss)
        model_flops, hardware_flops = out.model_flops, out.hardware_flops
        if index >= args.warmup:
            seconds.append(elapsed)
        print(
            f"step {index + 1}: loss {out.loss:.4f}, {elapsed:.2f} s, {out.num_tokens / elapsed:.0f} tokens/s",
            flush=True,
        )
    peaks, plan = engine.memory_peaks(), engine.plan
    engine.close()
    step_s = statistics.median(seconds)
    row = {
        "model": args.model,
        "gpu_cap_gib": cap_gib,
        "host_cap_gib": args.host_gib,
        "seq_len": args.seq_len,
        "tokens_per_step": args.tokens_per_step,
        "step_s": step_s,
        "steps_s": seconds,
        "predicted_step_s": plan.predicted.step_s,
        "speed_of_light_s": plan.predicted.speed_of_light_s,
        "tokens_per_s": args.tokens_per_step / step_s,
        "effective_tflops": model_flops / step_s / 1e12,
        "hardware_tflops": hardware_flops / step_s / 1e12,
        "matmul_8192_tflops": rate / 1e12,
        "share_of_matmul_rate": model_flops / step_s / rate if rate else None,
        "gpu_peak_gib": peaks.gpu_bytes / GIB if peaks.gpu_bytes else None,
        "gpu_predicted_gib": plan.predicted.gpu_bytes / GIB,
        "host_peak_gib": peaks.host_bytes / GIB,
        "host_predicted_gib": plan.predicted.host_bytes / GIB,
        "chunk_tokens": plan.chunk_tokens,
        "round_tokens": plan.round_tokens,
        "losses": losses,
        "build_s": build_s,
        "within_gpu_cap": cap_gib is None or peaks.gpu_bytes is None or peaks.gpu_bytes <= cap_gib * GIB,
        "within_host_cap": args.host_gib is None or peaks.host_bytes <= args.host_gib * GIB,
        "loss_finite_and_falling": all(map(math.isfinite, losses)) and losses[-1] < losses[0],
    }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:llama-3.1-8b")
    parser.add_argument("--caps", nargs="+", default=["24"], help="GPU budgets in GiB, or none")
    parser.add_argument("--host-gib", type=float, default=None)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--tokens-per-step", type=int, default=131072)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--optimizer-state-dtype", default="bfloat16")
    parser.add_argument("--recompute", default="auto")
    parser.add_argument("--chunk-tokens", type=int, default=None)
    parser.add_argument("--round-tokens", type=int, default=None)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    rows = []
    for cap in args.caps:
        rows.append(run_cap(args, None if cap == "none" else float(cap)))
        write_json(args.json, {"rows": rows})
        share = rows[-1]["share_of_matmul_rate"]
        print(
            f"cap {cap} GiB: {rows[-1]['tokens_per_s']:.0f} tokens/s, {rows[-1]['effective_tflops']:.1f} TFLOP/s"
            + (f" = {100 * share:.1f}% of the 8192^3 rate" if share else "")
            + f", step {rows[-1]['step_s']:.2f} s (predicted {rows[-1]['predicted_step_s']:.2f} s)"
            + f", GPU {rows[-1]['gpu_peak_gib'] or 0:.2f} GiB, host {rows[-1]['host_peak_gib']:.2f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
