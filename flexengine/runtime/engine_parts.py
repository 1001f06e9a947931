"""How an engine trains, as a value, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flexengine.hardware.memory_usage import GpuMemoryMeter
from flexengine.models.registry import ModelSource
from flexengine.models.spec import ModelSpec
from flexengine.ops.attention.choice import AttentionChoice, KernelName
from flexengine.optim import Optimizer
from flexengine.plan import Plan
from flexengine.runtime.execution.executor import CommandOrder, Executor
from flexengine.runtime.execution.measurement import StepMeasurement
from flexengine.runtime.layer_runner import LayerRunner
from flexengine.runtime.ranks.batches import Batches
from flexengine.runtime.ranks.context import RankContext, RankGroup
from flexengine.runtime.ranks.stage_planes import StagePlanes
from flexengine.runtime.rounds import RoundRunner
from flexengine.runtime.step_runner import StepRunner
from flexengine.runtime.step_state import StepState
from flexengine.runtime.weights.weight_store import WeightStore


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
    batch, or a part of its own. offload_dir: a folder of the drive that plans may keep optimizer states on.
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
    offload_dir: str | None = None


class EngineParts:
    """What the calls of an engine work on."""

    source: ModelSource
    model: ModelSpec
    plan: Plan
    optimizer: Optimizer
    settings: EngineSettings
    seed: int
    made_from: dict[str, Any]
    state: StepState
    context: RankContext
    executor: Executor
    measurement: StepMeasurement
    meter: GpuMemoryMeter
    buffers: dict[str, Tensor]
    weights: WeightStore
    planes: StagePlanes
    layers: LayerRunner
    rounds: RoundRunner
    steps: StepRunner

    def _show_masters(self, call: str) -> None:
        """Have this rank's node hold all masters, for a call that reads or writes them. Waits until nothing runs.

        Raises: ValueError where nodes divide masters and there are gradients, whose place they would take.
        """
        self.executor.synchronize()
        nodes = self.context.over_nodes
        if nodes is None or not nodes.divides_masters:
            return
        if self.state.has_gradients:
            raise ValueError(
                f"{call} between fwd_bwd and step: nodes divide the masters, which would take the place of the"
                " gradients; call step() first"
            )
        nodes.show_masters()
