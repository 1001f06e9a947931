"""Is the CPU AdamW bound by host memory, and is it as fast as torch's fused one? By dtype mode and threads.

    python -m bench.cpu_adamw --json out.json

Per mode and number of threads: parameters/s, and bytes/s of what an update must move (each plane read once, all but the
gradient written once), also as a share of the best host copy measured in the same run (bytes read plus bytes written
by torch's copy). "native, elsewhere" has its results in other planes than it reads, as updates that may be dropped.
torch.optim.AdamW(fused=True) runs in the two modes that it has, on the same kind of memory; with bf16
states it rounds to nearest where flexengine rounds stochastically. Every figure is the best of --repeats runs of at
least --seconds each, since others may use the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from bench.environment import write_json
from flexengine.hardware.measure.host import thread_counts
from flexengine.hardware.measure.timing import cpu_timer
from flexengine.native import allocate_host
from flexengine.native.adamw import instruction_sets
from flexengine.native.update import HostUpdate, Targets, update_, update_into
from flexengine.optim.adamw import adamw_factors
from flexengine.random_bits import stream_keys

F32, BF16, I16 = torch.float32, torch.bfloat16, torch.int16
SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FEW_CORES = 4
SMALL_NUMEL, LARGE_NUMEL = 2**24, 2**27  # both far beyond any cache


class Mode(NamedTuple):
    """Dtypes of the planes; `remainder` where a bf16 weight keeps the other half of its float32 beside it."""

    weight: torch.dtype
    state: torch.dtype
    grad: torch.dtype
    remainder: bool = False

    @property
    def planes(self) -> tuple[torch.dtype, ...]:
        """exp_avg, exp_avg_sq, weight, grad and perhaps remainder: wide ones first, so that all are aligned."""
        return (self.state, self.state, self.weight, self.grad, *((I16,) if self.remainder else ()))

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes that an update must read and write."""
        return 2 * sum(plane.itemsize for plane in self.planes) - self.grad.itemsize


MODES = {
    "float32": Mode(F32, F32, F32),
    "split master, float32 states, bf16 gradient": Mode(BF16, F32, BF16, remainder=True),
    "split master, bf16 states, bf16 gradient": Mode(BF16, BF16, BF16, remainder=True),
    "bf16": Mode(BF16, BF16, BF16),
}
TORCH_MODES = ("float32", "bf16")


def best_seconds(works: Mapping[str, Callable[[], object]], args: argparse.Namespace) -> dict[str, float]:
    """The least seconds of each, which take turns, so that others who use the machine disturb them alike."""
    rows = [{name: cpu_timer(work, args.seconds) for name, work in works.items()} for _ in range(args.repeats)]
    return {name: min(row[name] for row in rows) for name in works}


@contextmanager
def planes_of(mode: Mode, numel: int) -> Iterator[list[Tensor]]:
    """Planes in host memory as the engine's arena has it: huge pages, touched by all threads."""
    with allocate_host(numel * sum(plane.itemsize for plane in mode.planes), page_locked=False) as buffer:
        planes, offset = [], 0
        for dtype in mode.planes:
            planes.append(buffer.tensor[offset : offset + numel * dtype.itemsize].view(dtype))
            offset += numel * dtype.itemsize
        planes[2].normal_()
        planes[3].normal_()
        yield planes


def host_update(planes: list[Tensor]) -> HostUpdate:
    exp_avg, exp_avg_sq, weight, grad, *rest = planes
    factors, keys = adamw_factors(**SETTINGS, step=10), [stream_keys(0, 10, stream) for stream in range(3)]
    return HostUpdate(
        weight, rest[0] if rest else None, (exp_avg, exp_avg_sq), grad, torch.ones(1), factors, keys, element_offset=0
    )


def native_update(planes: list[Tensor], threads: int) -> Callable[[], object]:
    update = host_update(planes)
    return lambda: update_("adamw", update, threads)


def native_update_elsewhere(planes: list[Tensor], targets: list[Tensor], threads: int) -> Callable[[], object]:
    update = host_update(planes)
    places = Targets(targets[2], None if update.remainder is None else targets[4], (targets[0], targets[1]))
    return lambda: update_into("adamw", update, places, threads)


def torch_update(planes: list[Tensor]) -> Callable[[], object]:
    exp_avg, exp_avg_sq, weight, grad = planes
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], fused=True, **SETTINGS)
    optimizer.state[parameter] = {"step": torch.tensor(9.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return optimizer.step


def measure_copy(args: argparse.Namespace, threads: list[int]) -> dict[int, float]:
    """Bytes read plus written per second of a copy, by threads."""
    rates = {}
    with allocate_host(8 * args.numel, page_locked=False) as buffer:
        source, target = buffer.tensor.view(F32).chunk(2)
        for count in threads:
            torch.set_num_threads(count)
            rates[count] = 8 * args.numel / best_seconds({"copy": lambda: target.copy_(source)}, args)["copy"]
            print(f"host copy, {count} threads: {rates[count] / 1e9:.1f} GB/s", flush=True)
    return rates


def measure_mode(name: str, args: argparse.Namespace, threads: list[int], copy_bytes_per_s: float) -> list[dict]:
    mode, rows = MODES[name], []
    with planes_of(mode, args.numel) as planes, planes_of(mode, args.numel) as others:
        for count in threads:
            torch.set_num_threads(count)
            updates = {
                "native": native_update(planes, count),
                "native, elsewhere": native_update_elsewhere(planes, others, count),
            }
            if name in TORCH_MODES:
                updates["torch fused"] = torch_update(planes)
            for implementation, seconds in best_seconds(updates, args).items():
                rate = args.numel / seconds
                moved = rate * mode.bytes_per_parameter
                row = {
                    "mode": name,
                    "implementation": implementation,
                    "threads": count,
                    "parameters_per_s": rate,
                    "bytes_per_s": moved,
                    "share_of_host_copy": moved / copy_bytes_per_s,
                }
                rows.append(row)
                print(
                    f"{name}, {implementation}, {count} threads: {rate / 1e6:.0f} million parameters/s, "
                    f"{moved / 1e9:.1f} GB/s, {row['share_of_host_copy']:.0%} of the host copy",
                    flush=True,
                )
    return rows


def main() -> None:
    """Measure all modes with 1, 2, 4, ... and all threads."""
    most = torch.get_num_threads()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=SMALL_NUMEL if most <= FEW_CORES else LARGE_NUMEL)
    parser.add_argument("--threads", type=int, nargs="*", default=thread_counts(most))
    parser.add_argument("--seconds", type=float, default=0.5, help="least time of a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    if not instruction_sets():
        raise SystemExit("the native library is not built: pip install -e . with a C++ compiler builds it")
    copies = measure_copy(args, args.threads)
    rows = [row for name in MODES for row in measure_mode(name, args, args.threads, max(copies.values()))]
    results = {
        "instruction_set": instruction_sets()[-1],
        "numel": args.numel,
        "bytes_per_parameter": {name: mode.bytes_per_parameter for name, mode in MODES.items()},
        "host_copy_bytes_per_s": {str(count): rate for count, rate in copies.items()},
        "rows": rows,
    }
    write_json(args.json, results)


if __name__ == "__main__":
    main()
