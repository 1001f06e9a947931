"""from_pretrained: from what a person asks for to a running engine. Measures, plans, and only then loads."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import torch

from flexengine.hardware.devices import choose_device
from flexengine.hardware.drive import with_drive
from flexengine.hardware.memory_usage import cap_allocator, release_unused_heap
from flexengine.hardware.node_probe import with_ranks_at_work
from flexengine.hardware.presets import named_profile
from flexengine.hardware.probe import check_multiplies, mend, probe
from flexengine.hardware.profile import HardwareProfile, preferred_attention
from flexengine.hardware.timed_calls import CallRun
from flexengine.models.group_factors import group_factors
from flexengine.models.registry import ModelSource, open_initial
from flexengine.models.spec import ModelSpec
from flexengine.models.task_heads import new_head_notice
from flexengine.native.host_memory import gpu_numa_node
from flexengine.native.threads import few_threads
from flexengine.optim import OPTIMIZERS, AdamW, Optimizer, name_of
from flexengine.options.adapters import LORA_OPTIONS, meant_by
from flexengine.options.job import ADAPTER_LR, Job, OptimizerName, plans_clipping
from flexengine.options.keywords import takes
from flexengine.options.lora import LoRA
from flexengine.options.option import options_of
from flexengine.parallel.cores import take_cores
from flexengine.parallel.devices import device_of_rank, gpus_of_ranks
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.team import Team, join, told_by_first
from flexengine.plan import CacheBytes, Plan, Request
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.planner.remembered import remembered_plan
from flexengine.planner.timed_blocks import with_timed_blocks
from flexengine.reports.picture import Picture
from flexengine.reports.plan_data import step_timeline
from flexengine.reports.plan_text import brief, describe, machine_line
from flexengine.request import (
    budget_gib,
    budgets_found,
    check_is_free,
    check_new_rows,
    described,
    lora_options,
    make_request,
    probe_shape,
    with_cache,
    with_new_tokens,
    with_read_adapter,
    with_task,
    without_cache,
)
from flexengine.runtime.engine import Engine, EngineSettings
from flexengine.runtime.generation import Sampling  # noqa: F401 (part of the interface)
from flexengine.runtime.ranks.batches import Batches
from flexengine.runtime.ranks.context import RankGroup
from flexengine.runtime.weights.weight_store import check_checkpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class PlannedRun:
    """A run that fits, before anything is loaded: the model, the job, the plan, and the machine it was made for.

    team: the ranks that train together; None for a process that is alone.
    """

    source: ModelSource
    job: Job
    plan: Plan
    profile: HardwareProfile
    device: torch.device
    cache_bytes: int = 0
    team: Team | None = None

    def describe(self) -> str:
        """The plan in words."""
        return describe(self.plan, self.source.spec)

    def brief(self) -> str:
        """The plan and the machine in a line each."""
        kind = self.device.type
        found = budgets_found(self.job, self.plan.request, self.profile, kind)
        return "\n".join([*brief(self.plan, self.source.spec), machine_line(self.profile, kind, found)])

    def mend_rates(self, mended: Callable[[HardwareProfile], HardwareProfile]) -> bool:
        """Change what is remembered of this machine by what a run showed; False where nothing is remembered."""
        return mend(self.device, getattr(torch, self.job.dtype), probe_shape(self.source.spec, self.job), mended)

    def timeline(self) -> str:
        """The simulated step as Chrome trace JSON; open it in Perfetto."""
        return step_timeline(Picture(self.plan, self.source.spec, self.profile))


@dataclass(frozen=True)
class ModelArgument:
    """The argument that comes first. A base of its own puts it before those of a job, whose order fields keep."""

    path_or_preset: str | Path


@dataclass(frozen=True, kw_only=True)
class PrepareArguments(Job, ModelArgument):
    """What `prepare` is called with: a job's options, budgets in bytes too, a machine, adapters as a value."""

    max_gpu_mem_bytes: int | None = None
    max_host_mem_bytes: int | None = None
    hardware: HardwareProfile | str | Path | None = None
    whole_steps: bool = False
    lora: InitVar[LoRA | None] = None

    def __post_init__(self, lora: LoRA | None) -> None:
        for place in ("gpu", "host"):
            gib, num_bytes = f"max_{place}_mem_gib", f"max_{place}_mem_bytes"
            budget = budget_gib(place, getattr(self, gib), getattr(self, num_bytes))
            object.__setattr__(self, gib, budget)
        several = "freeze lora_targets modules_to_save lr_groups weight_decay_groups add_tokens labels"
        for name in several.split():
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        self._take_adapters({} if lora is None else lora_options(lora))
        super().__post_init__()

    def _take_adapters(self, lora: dict[str, Any]) -> None:
        """Have options of adapters, or `lora` as options, mean mode lora. Raises: ValueError where both are given."""
        own, options = {name: getattr(self, name) for name in ("mode", *LORA_OPTIONS)}, options_of(Job)
        for name, value in lora.items():
            if own[name] not in (options[name].default, value):
                raise ValueError(f"{name}={own[name]!r} contradicts lora=, which says {value!r}; give one of them")
        for name, value in (lora or meant_by(own)).items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class EngineArguments(PrepareArguments):
    """What `from_pretrained` is called with."""

    optimizer: Optimizer | OptimizerName = field(default="adamw", kw_only=False)
    batches: Batches = "global"

    def __post_init__(self, lora: LoRA | None) -> None:
        if self.optimizer is None:
            object.__setattr__(self, "optimizer", "adamw")
        if self.batches not in get_args(Batches):
            raise ValueError(f"batches={self.batches!r}; choose global or local")
        super().__post_init__(lora)
        if not isinstance(self.optimizer, str):
            check_optimizer(self.optimizer)

    def as_job(self) -> Job:
        """The options of a job alone; what the plan knows of the optimizer is its name."""
        values = {name: getattr(self, name) for name in options_of(Job)}
        if not isinstance(self.optimizer, str):
            values["optimizer"] = name_of(self.optimizer)
        return Job(**values)

    @property
    def settings(self) -> Optimizer | None:
        """The optimizer's settings; None for the defaults of the one that the job names."""
        return None if isinstance(self.optimizer, str) else self.optimizer


@takes(EngineArguments)
def from_pretrained(arguments: EngineArguments) -> Engine:
    """An engine for a model folder, an id on the Hugging Face hub, or `preset:NAME` with random initial weights.

    init: "random" takes a folder without weights, such as config.json and a tokenizer alone.
    optimizer: AdamW(...), Lion(...) or SGD(...) of `flexengine.optim`, or a name. batches: of several ranks, each gives
    every call the whole batch ("global"), or a part of its own, as a DistributedSampler does ("local"); parts are
    joined in the order of ranks. The other keywords are those of `prepare`.
    Nothing is loaded before a plan is found. Raises PlanError when none fits, ValueError for bad input.
    """
    return build(_prepare(arguments), arguments.settings, arguments.batches)


@takes(PrepareArguments)
def prepare(arguments: PrepareArguments) -> PlannedRun:
    """Read the model's description, measure the machine, plan.

    Budgets bound the whole process: GPU memory as NVML shows it, and the resident set; None takes what is free. On the
    CPU the GPU budget bounds the device arena, which is ordinary memory there, and the host budget everything else.
    max_gpu_mem_bytes, max_host_mem_bytes: the same budgets in another unit. lora: LoRA(...) in place of mode and the
    options of adapters.
    hardware: a HardwareProfile, a preset's name or a profile's JSON file; None measures this machine.
    whole_steps: every step will be one `train_step`; without clipping gradients then need not be stored.
    """
    return _prepare(arguments)


def _prepare(arguments: PrepareArguments) -> PlannedRun:
    path_or_preset, job = arguments.path_or_preset, arguments.as_job()
    return prepare_job(path_or_preset, job, arguments.hardware, whole_steps=arguments.whole_steps)


def prepare_job(
    path_or_preset: str | Path,
    job: Job,
    hardware: HardwareProfile | str | Path | None = None,
    caches: CacheBytes = CacheBytes(),  # noqa: B008 (an immutable value)
    needs_weights: bool = True,
    tell: bool = True,
    whole_steps: bool = False,
    searching: Callable[[torch.device], object] = lambda _: None,
) -> PlannedRun:
    """What `prepare` does, for a job that is a value already.

    caches: of the budgets, what sequences get that are generated. needs_weights: False where nothing
    will be built of the plan. tell: whether budgets that were found are logged. whole_steps: as of `prepare`.
    searching: called with the device when a plan has to be searched for, by rank 0 alone.
    """
    team = join()
    with nullcontext() if team is None else team.control.all_or_none():
        opened = _open(path_or_preset, job, team, needs_weights)
    if team is not None:
        _check_same_job(team, opened)
        gpus_of_ranks(team.control, opened.device).check_own()
        take_cores(team.ranks, team.control, gpu_numa_node() if opened.device.type == "cuda" else None)
    elif opened.device.type == "cuda" and (few := few_threads()):
        logger.warning(few)
    profile = told_by_first(team, lambda: _profile(hardware, opened), HardwareProfile)
    if hardware is None:
        opened, profile = _at_work(opened, profile, team)
    ranks = Ranks.alone() if team is None else team.ranks
    asked = profile, hardware is None, ranks, caches, whole_steps and team is None, searching
    plan = told_by_first(team, lambda: _plan(opened, *asked), Plan)
    planned = PlannedRun(opened.source, opened.job, plan, profile, opened.device, caches.gpu_bytes, team)
    if tell and (found := budgets_found(opened.job, plan.request, profile, opened.device.type)):
        logger.info(found)
    return planned


def open_source(path_or_preset: str | Path, job: Job, needs_weights: bool = True) -> ModelSource:
    """Read the description of the model that a job trains, with its head and the tokens that it adds. Loads no weights.

    Raises: ValueError as `open_initial`, `with_task` and `with_new_tokens`.
    """
    source = open_initial(path_or_preset, job.init, needs_weights, job.trust_remote_code)
    return with_new_tokens(with_task(source, job), job)


class _Opened(NamedTuple):
    """What a job is about: the model as it is trained, the job with what files say, the device."""

    source: ModelSource
    job: Job
    device: torch.device


def _open(path_or_preset: str | Path, job: Job, team: Team | None, needs_weights: bool) -> _Opened:
    source, job = open_source(path_or_preset, job, needs_weights), with_read_adapter(job)
    source = source._replace(spec=described(source.spec, job))
    check_new_rows(source, job)
    if source.spec.notice:
        logger.warning("%s: %s", source.spec.name, source.spec.notice)
    if source.weights_folder is not None:
        source = source._replace(spec=check_checkpoint(source.spec, source.weights_folder))
        if told := new_head_notice(source.spec):
            logger.warning("%s: %s", source.spec.name, told)
    device = choose_device(job.device if team is None else device_of_rank(job.device, team.ranks))
    check_multiplies(device, job.dtype, job.matmul_dtype)
    return _Opened(source, job, device)


def _check_same_job(team: Team, opened: _Opened) -> None:
    """Raise ValueError on all ranks where one has another model or another option. Paths may differ between nodes."""
    spec = opened.source.spec
    model = repr([(group.name, [(p.name, p.shape) for p in group.params]) for group in spec.groups])
    values = {name: getattr(opened.job, name) for name in options_of(Job) if name not in ("adapter", "tokenizer")}
    digest = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
    team.control.agree_on({**values, "model": f"{spec.num_parameters} parameters, {digest}"}, "model and options")


def _profile(hardware: HardwareProfile | str | Path | None, opened: _Opened) -> HardwareProfile:
    """The machine that is named, or this one as it was measured."""
    if isinstance(hardware, HardwareProfile):
        return hardware
    if hardware is None:
        return probe(opened.device, getattr(torch, opened.job.dtype), probe_shape(opened.source.spec, opened.job))
    return named_profile(hardware)


def _at_work(opened: _Opened, profile: HardwareProfile, team: Team | None) -> tuple[_Opened, HardwareProfile]:
    """What was measured, with what opaque blocks take here and what all ranks reach at once."""
    job, dtype = opened.job, getattr(torch, opened.job.dtype)
    run = CallRun(opened.device, dtype, job.max_seq_len, profile, job.max_gpu_mem_gib, job.deterministic)
    spec, profile = with_timed_blocks(opened.source.spec, run, partial(told_by_first, team))
    if job.max_disk_gib is not None and job.offload_dir is None:
        raise ValueError(
            f"max_disk_gib={job.max_disk_gib} is for a drive, and none is named; give --offload-dir DIR too"
        )
    if team is not None:
        profile = with_ranks_at_work(profile, team, opened.device, dtype)
    if job.offload_dir is not None:
        profile = told_by_first(team, partial(with_drive, profile, job.offload_dir), HardwareProfile)
    return opened._replace(source=opened.source._replace(spec=spec)), profile


def _plan(
    opened: _Opened, profile: HardwareProfile, is_here: bool, ranks: Ranks, caches: CacheBytes, whole_steps: bool,
    searching: Callable[[torch.device], object],
) -> Plan:  # fmt: skip
    """The plan of all ranks. is_here: its memory has to be free. The others are as of `prepare_job`."""
    source, job, device = opened
    request = make_request(
        job, profile, device.type, ranks.local_size, ranks.nodes, source.spec.whole_sequences, whole_steps
    )

    def search(model: ModelSpec, request: Request, profile: HardwareProfile) -> Plan:
        searching(device)
        return plan_for_ranks(model, request, profile)

    find = partial(remembered_plan, search) if is_here and device.type == "cuda" else plan_for_ranks
    plan = with_cache(find(source.spec, without_cache(request, caches), profile), request, caches)
    release_unused_heap()  # the profile's process, to which arenas are added, holds nothing of planning
    if is_here:
        check_is_free(plan, profile, device.type)
    return plan


def build(
    planned: PlannedRun, optimizer: Optimizer | None = None, batches: Batches = "global", **changes: Any
) -> Engine:
    """Load the weights of a planned run and return its engine. batches: as of `from_pretrained`.

    changes: options of the job that leave the plan as it is: seed, deterministic, another max_grad_norm. Raises
    ValueError for those that the plan was made for.
    """
    check_optimizer(optimizer)
    if batches == "local" and planned.team is not None and planned.job.max_image_tokens:
        raise ValueError('batches="local": images take whole batches; give every rank all of it by batches="global"')
    name = planned.plan.request.numerics.optimizer
    if optimizer is None:
        optimizer = AdamW(lr=ADAPTER_LR) if name == "adamw" and planned.job.mode == "lora" else OPTIMIZERS[name]()
    elif name_of(optimizer) != name:
        raise ValueError(
            f"the plan was made for optimizer={name!r}, which decides what is stored, but {optimizer} was given; give"
            f" prepare optimizer={name_of(optimizer)!r}"
        )
    job = replace(planned.job, **changes)
    _check_same_plan(planned, job)
    if planned.device.type == "cuda":
        cap_allocator(planned.device, planned.plan.request.max_gpu_bytes - planned.profile.memory.gpu_context_bytes)
    attention, choices = preferred_attention(planned.profile, job.reproducible)
    settings = EngineSettings(
        max_grad_norm=job.max_grad_norm,
        seed=job.seed,
        deterministic=job.deterministic,
        attention=attention,
        attention_choices=choices,
        matmul_flops_per_s=planned.profile.matmul.peak_flops_per_s,
        description=planned.describe(),
        adapter=None if job.adapter is None else Path(job.adapter),
        cache_bytes=planned.cache_bytes,
        lr_factors=group_factors(planned.source.spec, "lr_groups", job.lr_groups),
        decay_factors=group_factors(planned.source.spec, "weight_decay_groups", job.weight_decay_groups),
        group=None if planned.team is None else RankGroup(*planned.team),
        batches=batches,
        offload_dir=job.offload_dir,
    )
    return Engine(planned.source, planned.plan, planned.device, optimizer, settings)


def check_optimizer(optimizer: object) -> None:
    """Raise ValueError, saying what to write, for what is no optimizer of this package."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return
    given = getattr(optimizer, "defaults", {})  # an optimizer of torch keeps its options there
    same = {name: given[name] for name in ("lr", "betas", "eps", "weight_decay") if name in given}
    options = ", ".join(f"{name}={value!r}" for name, value in same.items()) or "lr=3e-5"
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    raise ValueError(
        f"optimizer is {kind.__module__}.{kind.__qualname__}, but an engine updates its weights itself, where the plan"
        f" puts them; write optimizer=flexengine.optim.AdamW({options})"
    )


def _check_same_plan(planned: PlannedRun, job: Job) -> None:
    """Raise ValueError for a change that the plan does not know of."""
    if planned.plan.request.clipping != plans_clipping(job):
        made = "with" if planned.plan.request.clipping else "without"
        raise ValueError(
            f"max_grad_norm={job.max_grad_norm}, but the plan was made {made} clipping; give prepare the same"
            " max_grad_norm"
        )
    for name, option in options_of(Job).items():
        if option.decides_plan and name != "max_grad_norm" and getattr(job, name) != getattr(planned.job, name):
            raise ValueError(f"{name}={getattr(job, name)!r} decides the plan, which is made; give it to prepare")
