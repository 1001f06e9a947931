"""Which processor cores a rank works with: its share of what the ranks of a node have, near its GPU.

torchrun sets OMP_NUM_THREADS=1 for each of several processes, so that torch has one thread. Updates on the CPU and the
touching of pages have threads of their own number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from flexengine.native.proc_files import read_text
from flexengine.native.threads import VARIABLE, set_host_threads
from flexengine.parallel.control import Control
from flexengine.parallel.parent import AGENT_VARIABLE, STORE_VARIABLE
from flexengine.parallel.ranks import Ranks

NODES = Path("/sys/devices/system/node")


def take_cores(ranks: Ranks, control: Control, numa_node: int | None = None, nodes: Path = NODES) -> int:
    """Bind this process to the cores of its GPU's node and count its threads on host memory; gives their number.

    All ranks make this call together, before arenas are made and the engine counts threads. A process that somebody
    has bound to some of the node's cores, and a number of threads that somebody has chosen, stay as they are.
    numa_node: the GPU's; None where nobody knows.
    """
    if ranks.size == 1:
        return len(os.sched_getaffinity(0))
    allowed = frozenset(os.sched_getaffinity(0))
    gathered = control.gather((allowed, cores_of_node(numa_node, nodes)))
    own = [gathered[rank] for rank in ranks.of_node]
    if len({cores for cores, _ in own}) == 1:  # nobody has bound each of them to its own
        bound = [cores & near or cores for cores, near in own]
        os.sched_setaffinity(0, bound[ranks.local_rank])
    else:
        bound = [cores for cores, _ in own]
    threads = chosen_threads(os.environ) or share_of(bound[ranks.local_rank], bound)
    set_host_threads(threads)
    return threads


def share_of(own: Set[int], of_ranks: Sequence[Set[int]]) -> int:
    """How many of its cores a rank has when every core is shared evenly by the ranks that may use it; at least 1."""
    return max(1, int(sum(1 / sum(core in cores for cores in of_ranks) for core in own) + 1e-6))


def chosen_threads(environment: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS where a person has set it; None where it is missing, or as torchrun and `launch` set it."""
    text = environment.get(VARIABLE, "").partition(",")[0].strip()
    if not text.isdecimal() or int(text) < 1 or (text == "1" and environment.keys() & {AGENT_VARIABLE, STORE_VARIABLE}):
        return None
    return int(text)


def cores_of_node(numa_node: int | None, nodes: Path = NODES) -> frozenset[int]:
    """The cores of a NUMA node, as the kernel lists them ("0-3,8"); none where it does not."""
    text = "" if numa_node is None else read_text(nodes / f"node{numa_node}" / "cpulist").strip()
    cores: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
