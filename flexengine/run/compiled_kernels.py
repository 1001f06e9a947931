"""The kernels of a run, which compile in other processes while its weights are loaded (`runtime/launches.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from flexengine.api import PlannedRun, build, open_source
from flexengine.hardware.profile import attention_choices, preferred_attention
from flexengine.metrics import format_bytes
from flexengine.ops.compiling import compiles
from flexengine.ops.ready_compiler import READY
from flexengine.optim import OPTIMIZERS, Optimizer
from flexengine.options.job import Job
from flexengine.options.option import options_of
from flexengine.plan import Plan
from flexengine.request import described, with_read_adapter
from flexengine.run.first_start import COMPILING
from flexengine.runtime.engine import Engine
from flexengine.runtime.engine_parts import EngineSettings
from flexengine.runtime.launches import CompiledAhead, launch_step
from flexengine.runtime.weights.weight_store import check_checkpoint


def begin_compiler(device: torch.device) -> None:
    """Have a process import what compiling for a device takes, while a plan is searched for."""
    if compiles(device):
        READY.begin(*COMPILING)


def built_with_kernels(model: str | Path, planned: PlannedRun, optimizer: Optimizer) -> Engine:
    """Load the weights of a planned run, and wait for its kernels, which compile meanwhile; tell where weights stay."""
    with READY, kernels_of(model, planned) as kernels:
        engine = build(planned, optimizer)
        if kernels is not None:
            kernels.wait()
    if engine.arenas.linked is not None:
        of_files = format_bytes(engine.arenas.linked.num_bytes)
        print(f"drive: {of_files} of frozen weights are read from the checkpoint's own files", flush=True)
    return engine


def kernels_of(model: str | Path, planned: PlannedRun) -> CompiledAhead | nullcontext[None]:
    """Begin to compile what a run's steps launch: on a node's first rank, whose work all others find.

    Opaque blocks launch no kernels of ours.
    """
    is_first = planned.team is None or planned.team.ranks.local_rank == 0
    if not is_first or planned.source.spec.whole_sequences:
        return nullcontext()
    options = {name: getattr(planned.job, name) for name in options_of(Job)}
    attention, choices = preferred_attention(planned.profile, planned.job.reproducible)
    asked = json.dumps(options, default=str), planned.plan.to_json(), attention, json.dumps(choices)
    memory = planned.profile.memory
    room_bytes = memory.host_available_bytes + memory.host_base_bytes - planned.plan.request.max_host_bytes
    named, work = (planned.source.spec.name, planned.device), (launch_planned, str(model), *asked)
    return CompiledAhead(*named, *work, room_bytes=room_bytes)


def launch_planned(model: str, options: str, plan: str, attention: Any, choices: str) -> None:
    """Launch every kind of command of a planned run's step once, on tensors without memory.

    options, plan, choices: JSON of the job's, of the plan, and of the kernels that attention was measured with.
    attention: the name of those for other shapes.
    """
    given: Mapping[str, Any] = json.loads(options)
    job = with_read_adapter(Job(**{name: _as_option(value) for name, value in given.items()}))
    source = open_source(model, job)
    spec = described(source.spec, job)
    if source.weights_folder is not None:
        spec = check_checkpoint(spec, source.weights_folder)
    settings = EngineSettings(
        max_grad_norm=job.max_grad_norm,
        attention=attention,
        attention_choices=attention_choices(json.loads(choices)),
        seed=job.seed,
    )
    launch_step(spec, Plan.from_json(plan), OPTIMIZERS[job.optimizer](), settings)


def _as_option(value: Any) -> Any:
    """A value out of JSON as options have it: several of something are a tuple."""
    return tuple(_as_option(each) for each in value) if isinstance(value, list) else value
