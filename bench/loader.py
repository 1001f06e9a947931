"""How fast are weights loaded, against a plain parallel read of the same files?

    python -m bench.loader --gib 4 --threads 16 --json out.json
    python -m bench.loader --folder CHECKPOINT --cold

The plain read is the yardstick: as many threads, each os.preadv of 8 MiB at a time, the files' bytes into a buffer that
is already in RAM. The loads are what WeightStore.load does for weights at home in host memory: open the folder, read
all tensors into such a buffer, straight or converted. Rates are bytes of the files per second. Both run in turns, which
goes first alternates, and the files are in the page cache at the start of every run (--cold: dropped from it, as far as
the system does that on request).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from bench.environment import write_json
from flexengine.checkpoint.reader import CheckpointReader, ReadRequest
from flexengine.checkpoint.writer import TensorSource, write_checkpoint
from flexengine.native import allocate_host, library
from flexengine.native import reader as native_reader

BLOCK_BYTES = 8 << 20
TENSOR_ELEMENTS = 4096 * 14336  # a gate projection of an 8B model
FORMATS = {
    "bfloat16": (torch.bfloat16, False),
    "float32": (torch.float32, False),
    "bfloat16 and remainder": (torch.bfloat16, True),
}


def write_shards(folder: Path, gib: float, dtype: torch.dtype, num_shards: int) -> None:
    """A checkpoint of equal tensors with random bits of finite numbers, and a norm vector after each."""
    count = max(1, int(gib * 2**30) // (TENSOR_ELEMENTS * dtype.itemsize))
    values = torch.randn(TENSOR_ELEMENTS).to(dtype).view(4096, -1)
    tensors = []
    for index in range(count):
        tensors.append(TensorSource(f"{index:04d}.weight", dtype, tuple(values.shape), lambda: values))
        tensors.append(TensorSource(f"{index:04d}.norm", dtype, (4096,), lambda: values[0].repeat(2)[:4096]))
    total = sum(t.num_bytes for t in tensors)
    write_checkpoint(folder, tensors, max_shard_bytes=-(-total // num_shards))


def plain_read(paths: list[Path], buffer: Tensor, num_threads: int) -> None:
    """Every byte of the files into `buffer`, in blocks, by `num_threads` threads."""
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    blocks, begin = [], 0
    for descriptor in descriptors:
        size = os.fstat(descriptor).st_size
        blocks += [(descriptor, at, begin + at, min(BLOCK_BYTES, size - at)) for at in range(0, size, BLOCK_BYTES)]
        begin += size
    memory = buffer.numpy().data

    def read(block: tuple[int, int, int, int]) -> None:
        descriptor, offset, at, count = block
        while count:
            got = os.preadv(descriptor, [memory[at : at + count]], offset)
            assert got, "the file became shorter while it was read"
            offset, at, count = offset + got, at + got, count - got

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read, blocks))
    for descriptor in descriptors:
        os.close(descriptor)


def load(folder: Path, buffer: Tensor, dtype: torch.dtype, split: bool) -> None:
    """All tensors of the checkpoint one behind the other in `buffer`, as `dtype`, with their remainders if `split`."""
    used = 0

    def take(count: int, kind: torch.dtype) -> Tensor:
        nonlocal used
        begin, used = used, used + count * kind.itemsize
        return buffer[begin:used].view(kind)

    with CheckpointReader.open(folder) as reader:
        requests = []
        for name, entry in reader.tensors.items():
            target = take(entry.num_elements, dtype)
            requests.append(ReadRequest(name, target, take(entry.num_elements, torch.int16) if split else None))
        reader.read_many(requests)


def drop_from_cache(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # only what is on the disk can be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def time_in_turns(
    runs: dict[str, Callable[[], None]], before: Callable[[], None], repeats: int
) -> dict[str, list[float]]:
    """Seconds of every run, `repeats` times (and once before, not counted), in alternating order."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name in list(runs) if repeat % 2 else reversed(runs):
            before()
            start = time.perf_counter()
            runs[name]()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(folder: Path, num_threads: int, repeats: int, cold: bool) -> list[dict]:
    """Rows for the plain read and every format of loading, each paired with plain reads of its own."""
    paths = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in paths)
    with CheckpointReader.open(folder) as reader:
        num_elements = sum(entry.num_elements for entry in reader.tensors.values())
        stored = {str(entry.dtype).removeprefix("torch.") for entry in reader.tensors.values()}
    native_reader.default_threads = lambda: num_threads
    rows = []
    with allocate_host(max(num_bytes, 4 * num_elements), page_locked=False) as arena:
        for name, (dtype, split) in FORMATS.items():
            runs = {
                "plain": lambda: plain_read(paths, arena.tensor, num_threads),
                "load": lambda dtype=dtype, split=split: load(folder, arena.tensor, dtype, split),
            }
            seconds = time_in_turns(runs, lambda: drop_from_cache(paths) if cold else None, repeats)
            plain_s, load_s = (statistics.median(seconds[run]) for run in ("plain", "load"))
            rows.append(
                {
                    "stored": ", ".join(sorted(stored)),
                    "loaded_as": name,
                    "file_bytes": num_bytes,
                    "num_files": len(paths),
                    "num_threads": num_threads,
                    "page_cache": "cold" if cold else "warm",
                    "plain_s": seconds["plain"],
                    "load_s": seconds["load"],
                    "plain_bytes_per_s": num_bytes / plain_s,
                    "load_bytes_per_s": num_bytes / load_s,
                    "share_of_plain": plain_s / load_s,
                }
            )
            print(
                f"{rows[-1]['stored']} as {name}: {num_bytes / load_s / 1e9:.2f} GB/s, plain read "
                f"{num_bytes / plain_s / 1e9:.2f} GB/s: {100 * plain_s / load_s:.0f}%",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="a checkpoint; default: one is written")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the written checkpoint")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="of written checkpoints")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--threads", type=int, default=native_reader.default_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before every run")
    parser.add_argument("--scratch", default=None, help="where checkpoints are written; default: the temporary folder")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    rows = []
    if args.folder is not None:
        rows = measure(args.folder, args.threads, args.repeats, args.cold)
    for dtype in args.dtypes if args.folder is None else ():
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            write_shards(Path(folder), args.gib, getattr(torch, dtype), args.shards)
            rows += measure(Path(folder), args.threads, args.repeats, args.cold)
    write_json(args.json, {"native": library.load() is not None, "rows": rows})


if __name__ == "__main__":
    main()
