"""Options about several GPUs and nodes: how they share weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

from flexengine.options.option import Option, Words
from flexengine.plan.request import SHARES_DRIVE


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Without them the planner chooses, and nodes exchange gradients as they are stored."""

    transport: Annotated[
        Literal["auto", "relay", "split", "stages", "context"],
        Option(
            "how several GPUs share weights and gradients: relay = each reads all weights over its own link and takes"
            " gradients over through the host, split = each moves a share over its link and the rest between GPUs,"
            " stages = each has some of the blocks and hands hidden states over through the host, context = each has"
            " some of the tokens of every sequence that is longer than a chunk, and hands keys and values over through"
            " the host; auto = what the planner finds fastest, without split where the rate between GPUs is not known"
        ),
    ] = "auto"
    exchange_dtype: Annotated[
        Literal["bfloat16", "fp8"] | None,
        Option(
            "dtype in which several nodes exchange gradients (default: that of --grad-dtype); bfloat16 = half the bytes"
            " of float32, rounded twice, so that the bits of a run change; fp8 = half of those of bfloat16, rounded to"
            " 4 bits of precision, where what rounding loses is kept on the host, 2 bytes for each trained parameter"
            " on each node, and added in the next step: bits and gradients change"
        ),
    ] = None


class Asked(Protocol):
    """What `check_several` asks of a job."""

    words: ClassVar[Words]

    @property
    def transport(self) -> str: ...
    @property
    def exchange_dtype(self) -> str | None: ...
    @property
    def offload_dir(self) -> str | None: ...
    @property
    def max_disk_gib(self) -> float | None: ...


def check_several(job: Asked, gpus: int, nodes: int) -> None:
    """Raise ValueError where a job sets what is about several GPUs, or nodes, and there is one; or a drive that these
    cannot share."""
    if job.transport != "auto" and gpus == 1:
        asked = job.words.setting("transport", job.transport)
        raise ValueError(f"{asked} is about several GPUs, and there is one; give more with --gpus, or leave it out")
    if job.transport == "split" and gpus == nodes:
        asked = job.words.setting("transport", job.transport)
        raise ValueError(f"{asked} is about several GPUs of a node, and each node has one; leave it out")
    if job.exchange_dtype is not None and nodes == 1:
        asked = job.words.setting("exchange_dtype", job.exchange_dtype)
        raise ValueError(
            f"{asked} is about several nodes, and there is one; start more by torchrun (plan: --nodes), or leave it out"
        )
    values = {"offload_dir": job.offload_dir, "max_disk_gib": job.max_disk_gib}
    drive = [job.words.setting(name, value) for name, value in values.items() if value is not None]
    if drive and nodes > 1:
        raise ValueError(f"{drive[0]} is about the GPUs of one node, and there are {nodes} nodes; leave it out")
    if drive and job.transport not in ("auto", *SHARES_DRIVE):
        asked = job.words.setting("transport", job.transport)
        able = " or ".join(job.words.setting("transport", name) for name in SHARES_DRIVE)
        raise ValueError(f"GPUs share {drive[0]} with {able}, and {asked} was given; leave one of the two out")
