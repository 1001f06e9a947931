"""What does saving cost a run, and how near does it come to the disk's rate?

    python -m bench.checkpoints --model preset:llama-3.1-8b --gpu-gib 24 --folder /scratch --json out.json

Steps of random tokens are timed without saves, then with a checkpoint begun after one of every --save-steps of them.
Only the steps that a save touches are run (the step it follows, and those until it has ended); what they take longer
than others, over --save-steps steps, is the share that saving costs. The write rate is that of `save_checkpoint`,
which waits, against threads that write, sync and hash nothing of equally many bytes to the same folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.environment import write_json
from flexengine import from_pretrained
from flexengine.checkpoint.state_writer import NUM_THREADS
from flexengine.data.synthetic import SyntheticBatches
from flexengine.runtime.engine import Engine

BLOCK_BYTES = 32 << 20


def plain_write_s(folder: Path, num_bytes: int) -> float:
    """Seconds in which as many threads as a save has write so many bytes and sync them."""
    folder.mkdir(parents=True)
    block, share = os.urandom(BLOCK_BYTES), num_bytes // NUM_THREADS

    def write(number: int) -> None:
        with open(folder / str(number), "wb", buffering=0) as file:
            for start in range(0, share, BLOCK_BYTES):
                file.write(block[: min(BLOCK_BYTES, share - start)])
            os.fsync(file.fileno())

    begin = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(write, range(NUM_THREADS)))
    seconds = time.perf_counter() - begin
    shutil.rmtree(folder)
    return seconds


def timed_step(engine: Engine, batches: SyntheticBatches, step: int) -> float:
    batch, begin = batches.batch(step), time.perf_counter()
    engine.train_step(input_ids=batch.input_ids, labels=batch.labels, lr=1e-5)
    return time.perf_counter() - begin


def seconds_of_save(engine: Engine, batches: SyntheticBatches, folder: Path, step_s: float) -> tuple[float, int]:
    """Seconds that a save beside training adds to the steps that it touches, and how many these are."""
    begin, steps = time.perf_counter(), 0
    save = engine.start_checkpoint(folder)
    while not save.ended or not steps:
        timed_step(engine, batches, steps)
        steps += 1
    engine.executor.synchronize()
    seconds = time.perf_counter() - begin
    save.wait()
    shutil.rmtree(folder)
    return max(0.0, seconds - steps * step_s), steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:llama-3.1-8b")
    parser.add_argument("--gpu-gib", type=float, default=None)
    parser.add_argument("--host-gib", type=float, default=None)
    parser.add_argument("--state-dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of a step")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--steps", type=int, default=4, help="steps timed without a save")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, required=True, help="a folder on the disk that is measured")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    work = args.folder / "flexengine-checkpoint-bench"
    with from_pretrained(
        args.model, max_seq_len=args.seq_len, max_global_batch_tokens=args.tokens, max_gpu_mem_gib=args.gpu_gib,
        max_host_mem_gib=args.host_gib, optimizer_state_dtype=args.state_dtype,
    ) as engine:  # fmt: skip
        batches = SyntheticBatches(engine.model.vocab_size, args.seq_len, args.tokens, 0)
        timed_step(engine, batches, 0)
        step_s = statistics.median(timed_step(engine, batches, 1 + i) for i in range(args.steps))
        beside = [seconds_of_save(engine, batches, work / "beside", step_s) for _ in range(args.repeats)]
        rows = []
        for _ in range(args.repeats):
            begin = time.perf_counter()
            engine.save_checkpoint(work / "waited")
            waited_s = time.perf_counter() - begin
            num_bytes = sum(path.stat().st_size for path in (work / "waited").iterdir())
            shutil.rmtree(work / "waited")
            rows.append({"save_s": waited_s, "plain_s": plain_write_s(work / "plain", num_bytes), "bytes": num_bytes})
    extra_s = statistics.median(seconds for seconds, _ in beside)
    share = extra_s / (args.save_steps * step_s)
    rate = statistics.median(row["plain_s"] / row["save_s"] for row in rows)
    num_bytes, save_s = rows[-1]["bytes"], statistics.median(row["save_s"] for row in rows)
    print(
        f"step {step_s:.2f} s; a checkpoint of {num_bytes / 2**30:.2f} GiB adds {extra_s:.2f} s to {beside[0][1]}"
        f" steps: {100 * share:.2f}% at --save-steps {args.save_steps}; written at {num_bytes / save_s / 1e9:.2f} GB/s,"
        f" {100 * rate:.0f}% of the disk's rate"
    )
    figures = {"step_s": step_s, "beside": beside, "share": share, "writes": rows, "share_of_disk": rate}
    write_json(args.json, {**figures, "model": args.model, "save_steps": args.save_steps, "tokens": args.tokens})


if __name__ == "__main__":
    main()
