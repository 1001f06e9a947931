"""How an engine trains, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexengine.ops.attention.choice import AttentionChoice, KernelName
from flexengine.runtime.execution.executor import CommandOrder
from flexengine.runtime.ranks.batches import Batches
from flexengine.runtime.ranks.context import RankGroup


@dataclass(frozen=True)
class EngineSettings:
    """How an engine trains, beside its model, plan and optimizer.

    max_grad_norm: global norm that gradients are clipped to; None = no clipping. seed: of random initial weights and
    stochastic rounding. deterministic: only kernels that torch knows to be deterministic. attention_choices: kernels
    for the shapes of attention that were measured; attention: for others. matmul_flops_per_s: measured rate that
    reports compare with. description: the plan in words. adapter: a folder that the adapters start from. order: the
    order of commands on the CPU, for tests. cache_bytes: GPU memory beside the plan's, for what sequences leave that
    are generated. lr_factors, decay_factors: of every group, on its learning rate and its weight decay; none: all 1.
    group: the ranks that train together; None = this process alone. batches: whether each of them gives the whole
    batch, or a part of its own.
    """

    max_grad_norm: float | None = 1.0
    seed: int = 0
    deterministic: bool = False
    attention: KernelName = "flash"
    attention_choices: tuple[AttentionChoice, ...] = ()
    matmul_flops_per_s: float = 0.0
    description: str = ""
    adapter: Path | None = None
    order: CommandOrder | None = None
    cache_bytes: int = 0
    lr_factors: tuple[float, ...] = ()
    decay_factors: tuple[float, ...] = ()
    group: RankGroup | None = None
    batches: Batches = "global"
