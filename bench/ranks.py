"""What a machine with several GPUs moves when all of them are at work: links, host memory, signals, NCCL. As JSON.

python -m bench.ranks --json out.json
python -m bench.ranks --device cpu --small --json out.json

A process, a rank, for each GPU, bound to its share of the cores as in training. Every part has processes of its own, so
that one that fails is noted with what it has printed, and the others run. The file is written after every part.

- topology: what nvidia-smi tells, which GPUs reach each other, whether streams await words of host memory, cores.
- links: page-locked copies in each direction and both, alone and beside AdamW on the CPU; one rank, and all at once.
- host: copies within host memory; pages that all ranks share: mapping, page-locking, copies to the GPU.
- hops: seconds from a signal of one rank until another has seen it: of hosts, and of streams of two GPUs.
- collectives: gathers, exchanges and sums by `flexengine.parallel.collectives`: whether they are right, how fast by
  size, alone and beside products of 8192^3, and what they take of GPU memory.

On a CPU collectives go through the host's memory, and what needs GPUs is left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.environment import write_json
from bench.rank_collectives import Bench, slowest_rows
from bench.rank_hops import hops
from bench.rank_links import host, links
from bench.rank_processes import RanksFailedError, required, run_ranks, save, told
from bench.shared_pages import shmem_setting
from flexengine.hardware.devices import choose_device
from flexengine.native import allocate_host
from flexengine.native.host_memory import gpu_numa_node
from flexengine.native.transfer import open_transfers
from flexengine.parallel.cores import cores_of_node, take_cores
from flexengine.parallel.devices import device_of_rank
from flexengine.parallel.team import Team, join, leave

PARTS = ("topology", "links", "host", "hops", "collectives")
MIB, GIB = 2**20, 2**30
GIVE_UP_S = 100.0


class Size(NamedTuple):
    """How much is moved, and for how long."""

    link_bytes: int
    adamw_numel: int
    shared_bytes: int
    host_copy_bytes: int
    seconds: float


WHOLE = Size(512 * MIB, 2**26, 4 * GIB, 512 * MIB, 0.5)
SMALL = Size(16 * MIB, 2**18, 32 * MIB, 8 * MIB, 0.02)


# ---- what each rank does ----------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """Be one of the ranks of a part."""
    out = Path(args.out)
    if args.worker == "topology":
        save(out, topology(args.device))
        return
    team = required(join())
    device = choose_device(device_of_rank(args.device, team.ranks))
    threads = take_cores(team.ranks, team.control, gpu_numa_node() if device.type == "cuda" else None)
    found = measure(args.worker, team, device, SMALL if args.small else WHOLE, out)
    cores = sorted(os.sched_getaffinity(0))
    save(out, {"rank": team.ranks.rank, "device": str(device), "threads": threads, "cores": cores, **found})
    leave()


def measure(part: str, team: Team, device: torch.device, size: Size, out: Path) -> dict[str, Any]:
    """What a rank finds in a part."""
    if part == "links":
        return links(team, device, size.link_bytes, size.adamw_numel, size.seconds)
    if part == "host":
        return host(team, device, size.shared_bytes, size.host_copy_bytes, size.seconds)
    if part == "hops":
        return hops(team, device)
    return Bench(team, device, size is SMALL, out).run()


def topology(device: str) -> dict[str, Any]:
    """What is known of the machine without measuring."""
    found: dict[str, Any] = {
        "cores": sorted(os.sched_getaffinity(0)),
        "shmem_enabled": shmem_setting(),
        "numa_nodes": {node.name: sorted(cores_of_node(int(node.name[4:]))) for node in _numa_nodes()},
        "memory_kib": _meminfo(),
    }
    if device == "cpu":
        return found
    count = torch.cuda.device_count()
    asked = ("topo", "-m"), ("topo", "-p2p", "r"), ("nvlink", "-s"), ("-q", "-d", "CLOCK,POWER"), ("-L",)
    found["nvidia-smi"] = {" ".join(flags): output_of(["nvidia-smi", *flags]) for flags in asked}
    found["reach_each_other"] = [
        [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)
    ]
    found["gpus"] = [gpu(index) for index in range(count)]
    return found


def gpu(index: int) -> dict[str, Any]:
    """What is known of a GPU."""
    torch.cuda.set_device(index)
    with allocate_host(4096, page_locked=True) as buffer:
        transfers = open_transfers(torch.device("cuda", index))
        waits = transfers.word_address(buffer.tensor.data_ptr()) is not None
        transfers.close()
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "uuid": str(properties.uuid),
        "memory_bytes": properties.total_memory,
        "numa_node": gpu_numa_node(),
        "streams_await_words": waits,
    }


def output_of(command: Sequence[str]) -> str:
    """What a command prints, or why it cannot."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout + done.stderr


def _numa_nodes() -> list[Path]:
    return sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))


def _meminfo() -> dict[str, int]:
    names = ("MemTotal", "MemAvailable", "ShmemHugePages", "Hugepagesize")
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) for words in lines if words[0][:-1] in names}


# ---- all ranks --------------------------------------------------------------------------------------------------


def run_part(part: str, count: int, args: argparse.Namespace) -> dict[str, Any]:
    """What all ranks have found, or why they have not."""
    ranks = {"topology": 1, "hops": 2}.get(part, count)
    flags = ["--worker", part, "--device", args.device, *(["--small"] if args.small else [])]
    start = time.perf_counter()
    try:
        found: dict[str, Any] = {"ranks": run_ranks("bench.ranks", flags, ranks, args.give_up_s)}
    except RanksFailedError as error:
        found = {"failed": str(error), "ranks": error.found}
    return {"wall_s": time.perf_counter() - start, **found}


def shown(part: str, found: dict[str, Any]) -> str:
    """The figures of a part in a few lines."""
    if "failed" in found:
        return f"{part}: FAILED after {found['wall_s']:.0f} s\n{found['failed']}"
    lines, ranks = [f"{part}: {found['wall_s']:.0f} s"], found["ranks"]
    if part == "topology":
        lines += [ranks[0].get("nvidia-smi", {}).get("topo -m", "")]
        lines += [told(each) for each in ranks[0].get("gpus", [])]
    elif part == "links":
        for row in zip(*(rank["all at once"] for rank in ranks), strict=True):
            rates = " + ".join(
                f"({r['h2d_bytes_per_s'] / 1e9:.1f}, {r['d2h_bytes_per_s'] / 1e9:.1f},"
                f" {r['host_work_bytes_per_s'] / 1e9:.1f})"
                for r in row
            )
            lines.append(f"  GB/s to, from, of {row[0]['host_work'] or 'nothing'} on the host: {rates}")
    elif part == "collectives":
        lines += [told({name: ranks[0][name] for name in ("way", "connect_s", "memory", "right")})]
        for kind in ("alone", "beside"):
            lines += [f"  {kind}: {told(row)}" for row in slowest_rows(ranks, kind)] if kind in ranks[0] else []
    else:
        lines += ["  " + told(rank) for rank in ranks]
    return "\n".join(lines)


def main() -> None:
    """Measure, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=None, help="ranks; default all GPUs, two on a CPU")
    parser.add_argument("--small", action="store_true", help="little of everything, in seconds")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--give-up-s", type=float, default=GIVE_UP_S, help="most seconds of a part")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    parser.add_argument("--worker", choices=PARTS, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args)
        return
    count = args.gpus or (2 if args.device == "cpu" else torch.cuda.device_count())
    if count < 2:
        parser.error(f"{count} GPUs; expected at least 2, or --device cpu")
    results: dict[str, Any] = {"device": args.device, "count": count, "parts": {}}
    for part in args.parts:
        if part == "links" and args.device == "cpu":
            continue
        found = results["parts"][part] = run_part(part, count, args)
        print(shown(part, found), flush=True)
        write_json(args.json, results)


if __name__ == "__main__":
    main()
