"""The memory that Slurm grants a job on this node, as its environment tells.

Slurm's control group enforces it on most clusters; where it does not, a job that takes more is killed by the daemon.
Source: sbatch(1), output environment variables; sizes are in MiB, and 0 is all of the node's memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

MIB = 2**20


def slurm_memory_bytes(environ: Mapping[str, str] = os.environ) -> int | None:
    """Read the bytes that a Slurm job may use on this node; None outside of one, or where it says nothing."""
    if "SLURM_JOB_ID" not in environ:
        return None
    for size, count in (
        ("SLURM_MEM_PER_NODE", ""),
        ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
        ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
    ):
        mib, number = environ.get(size, ""), environ.get(count, "") if count else "1"
        if mib.isdecimal() and number.isdecimal() and int(mib) * int(number):
            return int(mib) * int(number) * MIB
    return None
