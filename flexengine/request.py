"""From a job and a machine to what is asked of the planner: the trained model, budgets in bytes, and early refusals."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.checkpoint.adapter_config import embedding_rows, named_tokenizer, read_lora, tokenizer_of
from flexengine.checkpoint.layout import CONFIG_FILE
from flexengine.checkpoint.tokenizer_files import add_tokens, files_with_tokens, read_tokenizer, tokens_beyond
from flexengine.hardware.drive import drive_budget
from flexengine.hardware.presets import lacks_bfloat16
from flexengine.hardware.profile import HardwareProfile, ProbeShape
from flexengine.metrics import GIB, format_bytes
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.delta_dtype import with_delta_dtype
from flexengine.models.freezing import forward_only, with_frozen
from flexengine.models.group_factors import group_factors
from flexengine.models.keep_dtype import with_coded_inputs, with_keep_dtype
from flexengine.models.lora import with_lora
from flexengine.models.lora_files import unread_by_peft
from flexengine.models.matmul_dtype import with_matmul_dtype
from flexengine.models.opaque.lengths import with_calls_up_to
from flexengine.models.probe_shapes import attention_shapes, expert_shapes, head_shape, linear_shapes
from flexengine.models.registry import ModelSource
from flexengine.models.sequence_length import check_sequence_length
from flexengine.models.spec import ModelSpec
from flexengine.models.task_heads import config_for, read_head, with_head_saved, with_task_head
from flexengine.models.towers.description import frozen_of_images, with_images
from flexengine.models.vocabulary import ROW_MULTIPLE, with_rows
from flexengine.options.adapters import LORA_OPTIONS
from flexengine.options.job import Job, plans_clipping
from flexengine.options.lora import LoRA
from flexengine.options.ranks import check_several
from flexengine.plan import CacheBytes, Plan, PlanError, PlanReason, Request
from flexengine.wording import hub_model, shown

logger = logging.getLogger(__name__)

PADDING_UNNAMED = (
    "%s: config.json names no pad_token_id, so transformers will score one sequence at a time with the exported model;"
    " add it there for batches"
)


def described(spec: ModelSpec, job: Job) -> ModelSpec:
    """Describe the model as a job trains it: its linear layers in the job's matmul dtype, what backward reads of its
    gated FFNs in the job's keep dtype, what its delta rules store in the job's delta dtype, its frozen layers marked,
    and these in the job's base dtype.

    This is the order of the passes, each of which finds what those before it made: products, as adapters come before
    or behind them by their kind; rounding of gated units, of whose codes layers read in backward, which adapters then
    read, too; adapters or freezing, which takes weight halves from ops that nobody replaces any more; forward alone,
    where nothing is trained; the base dtype, which is for frozen groups; codes between layers, which have a backward
    where these have one.

    Warns when sequences may be longer than the model was made for, and of adapters that PEFT will not read. Raises
    ValueError where it cannot take them, or as `with_delta_dtype`, `with_matmul_dtype`, `with_keep_dtype`,
    `with_frozen` and `with_base_dtype`.
    """
    _check_opaque(spec, job)
    model = with_delta_dtype(with_images(spec, job), job.delta_dtype)
    model = with_keep_dtype(with_matmul_dtype(model, job.matmul_dtype), job.keep_dtype)
    frozen = (*job.freeze, *frozen_of_images(model, job))
    model = with_lora(model, with_head_saved(own, spec)) if (own := job.lora_setup) else with_frozen(model, frozen)
    if job.trains and (unread := unread_by_peft(model)):
        logger.warning(unread)
    model = model if job.trains else forward_only(model)
    model = with_coded_inputs(with_base_dtype(model, job.stored_base), job.keep_dtype)
    model = with_calls_up_to(model, job.max_seq_len)
    check_sequence_length(model, job.max_seq_len)
    for option in ("lr_groups", "weight_decay_groups"):
        group_factors(model, option, getattr(job, option))
    return model


def _check_opaque(spec: ModelSpec, job: Job) -> None:
    """Raise ValueError for what takes the single ops of a layer, where layers are opaque blocks."""
    if not spec.whole_sequences:
        return
    for option in ("matmul_dtype", "keep_dtype"):
        if (value := getattr(job, option)) != "compute":
            raise ValueError(
                f"{job.words.setting(option, value)}: layers of {spec.family} run as opaque blocks, whose products are"
                " not replaced; leave it out, or give a model of a type that flexengine models lists"
            )


def with_task(source: ModelSource, job: Job) -> ModelSource:
    """Give a model the head for labels that a job asks for, with the config that says so.

    One of the same task that the model has stays, unless other labels are named. Raises: ValueError for classes
    without names, and as `config_for` and `read_head`.
    """
    spec = source.spec
    if job.task is None or (spec.task is not None and spec.task.task == job.task and not job.labels):
        return source
    job.check_task()
    labels, problem = tuple(job.labels), job.problem_type
    labels = labels or (("LABEL_0",) if problem == "regression" else ())  # as transformers calls the only one
    if not labels:
        raise ValueError(
            f"{job.words.setting('task', job.task)}: {spec.name} has no head with classes of its own; name them:"
            f" {job.words.spelled('labels')}"
        )
    config = config_for(spec.name, spec.hf_config, job.task, labels, problem)
    head = read_head(spec.name, config)
    assert head is not None, "the config says so"
    if head.pad_token_id is None and head.task == "sequence":
        logger.warning(PADDING_UNNAMED, spec.name)
    texts = {**(source.texts or {}), CONFIG_FILE: json.dumps(config, indent=2) + "\n"}
    return source._replace(spec=with_task_head(replace(spec, hf_config=config), head), texts=texts)


def lora_options(lora: LoRA) -> dict[str, Any]:
    """Adapters as options of a job."""
    return {"mode": "lora", **{option: getattr(lora, field) for option, field in LORA_OPTIONS.items()}}


def with_read_adapter(job: Job) -> Job:
    """Fill in what the adapter that a job starts from says of itself.

    Raises ValueError where the job says otherwise, or where there is no adapter.
    """
    if job.adapter is None:
        return job
    job = replace(job, adapter=str(_adapter_folder(job.adapter)))
    assert job.adapter is not None
    lora = read_lora(job.adapter)
    stored = {name: value for name, value in lora_options(lora).items() if name != "lora_dropout"}
    for name, value in stored.items():
        if getattr(job, name) not in (None, (), value):
            given = job.words.setting(name, getattr(job, name))
            raise ValueError(f"{given}, but {job.adapter} was made with {shown(value)}; leave it out")
    return replace(job, **stored)


def _adapter_folder(adapter: str) -> Path:
    """The folder of an adapter: the one that is named, or that of an id on the hub, in the hub's cache."""
    if hub_model(adapter) is None:
        return Path(adapter)
    from flexengine.checkpoint.hub_cache import cached_adapter  # noqa: PLC0415 - as few commands need the hub

    return cached_adapter(adapter)


def with_new_tokens(source: ModelSource, job: Job) -> ModelSource:
    """Describe a model with the tokens that a job adds, and with rows for them in its embedding and its head.

    An adapter that the job starts from may have added tokens, too, and may bring a tokenizer with its chat template.
    Raises: ValueError where there is no tokenizer, also in the folder that the job names for it.
    """
    adapter = None if job.adapter is None else _adapter_folder(job.adapter)
    if adapter is not None:
        source = source._replace(other_tokenizer=tokenizer_of(adapter))
    if job.tokenizer is not None:
        source = source._replace(other_tokenizer=named_tokenizer(Path(job.tokenizer)))
    rows = source.spec.vocab_size
    of_adapter = 0 if adapter is None else embedding_rows(adapter, source.spec.embedding_source)
    if not (job.add_tokens or job.resize_embeddings or of_adapter > rows):
        return source
    if source.tokenizer_folder is None:
        given = "add_tokens" if job.add_tokens else "resize_embeddings"
        raise ValueError(
            f"{job.words.spelled(given)}: {source.spec.name} has no tokenizer of its own; give a model folder that has"
        )
    folder = source.tokenizer_folder
    tokenizer, tokens = read_tokenizer(folder), tuple(job.add_tokens)
    if adapter is not None and not tokens and of_adapter > rows:
        own = source.support_folder or folder  # folder may be the adapter's, whose tokenizer has the tokens already
        tokens = tokens_beyond(adapter, read_tokenizer(own))
    add_tokens(tokenizer, tokens)
    texts = files_with_tokens(folder, tokenizer, tokens) if tokens else {}
    last = max(tokenizer.get_vocab(with_added_tokens=True).values())
    wanted = of_adapter if of_adapter > rows else rows if last < rows else -(-(last + 1) // ROW_MULTIPLE) * ROW_MULTIPLE
    if wanted == rows:
        return source._replace(new_tokens=tokens, texts=texts)
    spec = with_rows(source.spec, wanted, in_checkpoint=source.weights_folder is not None)
    texts = {**texts, CONFIG_FILE: json.dumps(spec.hf_config, indent=2) + "\n"}
    return source._replace(spec=spec, new_tokens=tokens, texts=texts)


def check_new_rows(source: ModelSource, job: Job) -> None:
    """Warn of new tokens whose rows are not trained."""
    groups = [group for group in source.spec.groups if group.frozen]
    frozen = [s.name for g in groups for p in g.params for s in p.sources if s.rows_in_file is not None]
    if frozen and source.new_tokens and job.trains and job.adapter is None:
        modules = " ".join(name.removesuffix(".weight").rpartition(".")[2] for name in frozen)
        remedy = f"--modules-to-save {modules} trains them" if job.mode == "lora" else "leave them out of --freeze"
        logger.warning("rows of new tokens stay the mean of the others, since %s is frozen: %s", modules, remedy)


def probe_shape(spec: ModelSpec, job: Job | None = None) -> ProbeShape:
    """Describe a model's blocks and head to the probe: the widest input of a block's matrices is the MLP's last."""
    groups = [spec.groups[index] for layer in spec.blocks for index in layer.groups]
    widths = [param.shape[-1] for group in groups for param in group.params if param.kind == "matrix"]
    widest = max([spec.hidden_size, *widths])
    return ProbeShape(
        spec.hidden_size, widest, spec.head_dim, attention_shapes(spec), expert_shapes(spec), linear_shapes(spec),
        head_shape(spec), job is not None and job.deterministic,
    )  # fmt: skip


# ---- budgets ----------------------------------------------------------------------------------------------------


def _check_products(job: Job, profile: HardwareProfile, device_type: str) -> None:
    """Raise ValueError where a machine multiplies no operands as a job asks."""
    asked = job.words.setting("matmul_dtype", job.matmul_dtype)
    if job.matmul_dtype != "compute" and not profile.matmul.fp8_flops_per_s:
        raise ValueError(
            f"{asked}: {profile.name} multiplies no FP8 operands; that takes compute capability 8.9 or more (L40S, RTX"
            " 4090, H100 and newer); leave it out"
        )
    if device_type == "cuda" and profile.matmul.blackwell_shares.get(job.matmul_dtype) == ():
        raise ValueError(
            f"{asked} takes a Blackwell card (B200, RTX 5090, DGX Spark and newer), and the profile of {profile.name}"
            " has no rate of such products; leave it out"
            f"{', or on such a card measure it again: flexengine probe --force' * (profile.source == 'measured')}"
        )


def make_request(
    job: Job, profile: HardwareProfile, device_type: str, ranks: int = 1, nodes: int = 1,
    whole_sequences: bool = False, whole_steps: bool = False,
) -> Request:  # fmt: skip
    """Make what a job asks of the planner for all ranks.

    A budget that is not given is what is free less room for the system (`system_room`). device_type: cuda or cpu, on
    which the GPU budget is taken out of the host's. ranks: of a node. whole_sequences: as of the model. whole_steps: as
    of a request. Raises ValueError where the machine cannot do what the job wants.
    """
    check_several(job, ranks * nodes, nodes)
    if job.dtype == "bfloat16" and lacks_bfloat16(profile):
        asked, instead = (job.words.setting("dtype", name) for name in ("bfloat16", "float16"))
        raise ValueError(f"{asked}: {profile.name} multiplies no bfloat16; give {instead}")
    _check_products(job, profile, device_type)
    if job.cuda_graphs == "always" and device_type != "cuda":
        raise ValueError(
            f"{job.words.setting('cuda_graphs', 'always')}: {profile.name} has no CUDA graphs; they take an NVIDIA GPU,"
            " so leave it out"
        )
    gpu_bytes, host_bytes = _budgets(job, profile, device_type)
    return Request(
        max_seq_len=job.max_seq_len,
        max_global_batch_tokens=job.max_global_batch_tokens,
        max_gpu_bytes=gpu_bytes,
        max_host_bytes=host_bytes,
        chunk_tokens=job.chunk_tokens,
        round_tokens=job.round_tokens,
        round_multiple=job.round_multiple,
        transport=job.transport,
        exchange=job.exchange_dtype,
        recompute=job.recompute,
        reproducible=job.reproducible,
        whole_sequences=whole_sequences,
        whole_steps=whole_steps,
        graphs=job.cuda_graphs,
        numerics=job.numerics,
        clipping=plans_clipping(job),
        ranks=ranks,
        nodes=nodes,
        max_drive_bytes=drive_budget(job.offload_dir, job.max_disk_gib),
    )


def without_cache(request: Request, caches: CacheBytes) -> Request:
    """Take what sequences that are generated need out of the budgets. Raises PlanError where the cache takes all."""
    if caches.gpu_bytes >= request.max_gpu_bytes:
        raise PlanError(
            PlanReason.INSUFFICIENT_DEVICE_MEMORY,
            f"the cache of the sequences takes {format_bytes(caches.gpu_bytes)}, the GPU budget is"
            f" {format_bytes(request.max_gpu_bytes)}; give shorter prompts, fewer new tokens, or a larger budget",
        )
    host_bytes = max(0, request.max_host_bytes - caches.host_bytes)
    return replace(request, max_gpu_bytes=request.max_gpu_bytes - caches.gpu_bytes, max_host_bytes=host_bytes)


def with_cache(plan: Plan, request: Request, caches: CacheBytes) -> Plan:
    """Count the cache in a plan that was made without it: its bytes, and the budgets that were asked for."""
    return plan.for_request(request).with_caches(caches) if any(caches) else plan


class Room(NamedTuple):
    """What is left to the system and others where a budget is not given: a share of the memory, within limits."""

    share: float
    least_bytes: int
    most_bytes: int

    def of(self, total_bytes: int, free_bytes: int) -> int:
        """Bytes of it, at most a quarter of what is free."""
        wanted = min(max(int(self.share * total_bytes), self.least_bytes), self.most_bytes)
        return max(0, min(wanted, free_bytes // 4))


ROOM = {"gpu": Room(1 / 32, GIB // 4, 2 * GIB), "host": Room(1 / 16, GIB, 8 * GIB)}
"""Desktops, drivers and page tables take more from time to time than when a run begins."""
BUDGET_STEPS = 64
"""At least so many steps fit a budget of the host that is found."""


def _budgets(job: Job, profile: HardwareProfile, device_type: str) -> tuple[int, int]:
    """Budgets of GPU and host in bytes; on the CPU both are of the host's memory, half of it each."""
    gpu_room, host_room = system_room(profile, device_type)
    free_host = profile.memory.host_available_bytes + profile.memory.host_base_bytes - host_room
    free_gpu = profile.memory.gpu_free_bytes + profile.memory.gpu_context_bytes - gpu_room
    if device_type != "cuda":
        free_gpu = free_host // 2
    gpu_bytes = _budget_bytes("gpu", job.max_gpu_mem_gib, free_gpu)
    if device_type == "cpu":
        free_host = max(1, free_host - gpu_bytes)
    return gpu_bytes, _budget_bytes("host", job.max_host_mem_gib, free_host)


def system_room(profile: HardwareProfile, device_type: str) -> tuple[int, int]:
    """Bytes of GPU and host memory that budgets which are not given leave to the system and others."""
    free_gpu, free_host = profile.memory.gpu_free_bytes, profile.memory.host_available_bytes
    gpu = ROOM["gpu"].of(profile.memory.gpu_total_bytes, free_gpu) if device_type == "cuda" else 0
    host = ROOM["host"].of(profile.memory.host_total_bytes, free_host)
    return gpu, host + _beyond_a_step(free_host + profile.memory.host_base_bytes - host)


def _beyond_a_step(num_bytes: int) -> int:
    """What a budget has beyond the multiple of a power of two, up to 1/64 of it, that it is rounded down to.

    What is free differs from start to start, and plans and kernels of earlier starts are found by the budget.
    """
    num_bytes = max(0, num_bytes)
    return num_bytes % (1 << max(0, (num_bytes // BUDGET_STEPS).bit_length() - 1))


def budgets_found(job: Job, request: Request, profile: HardwareProfile, device_type: str) -> str:
    """Say which budgets were not given, what they are, and how much they leave; empty where both were given."""
    given = (job.max_gpu_mem_gib, job.max_host_mem_gib)
    budgets = zip(("GPU", "host"), given, (request.max_gpu_bytes, request.max_host_bytes), strict=True)
    found = [f"{place} {format_bytes(num_bytes)}" for place, gib, num_bytes in budgets if gib is None]
    if not found:
        return ""
    rooms = zip(("GPU", "host"), given, system_room(profile, device_type), strict=True)
    left = [f"{format_bytes(room)} of {place} memory" for place, gib, room in rooms if gib is None and room]
    return f"budgets found: {', '.join(found)}; left to the system: {', '.join(left) or 'nothing'}"


def _budget_bytes(place: str, gib: float | None, free_bytes: int) -> int:
    if gib is None and free_bytes <= 0:
        raise ValueError(
            f"no {place} memory is free on this machine; end what else uses it, or give max_{place}_mem_gib"
        )
    return free_bytes if gib is None else positive_budget(place, int(gib * GIB))


def budget_gib(place: str, gib: float | None, num_bytes: int | None) -> float | None:
    """Convert Python's two keywords of one budget, max_PLACE_mem_gib and max_PLACE_mem_bytes, to GiB.

    A count of bytes below 2**53 is exact in GiB, since a division by 2**30 only changes the exponent. Raises ValueError
    where both are given, or the budget is nothing.
    """
    if gib is not None and num_bytes is not None:
        raise ValueError(f"give max_{place}_mem_gib or max_{place}_mem_bytes, not both")
    if num_bytes is not None:
        return positive_budget(place, num_bytes) / GIB
    if isinstance(gib, Real):
        if not abs(gib) < 2**53:  # NaN too
            raise ValueError(f"max_{place}_mem_gib must be a finite number of GiB, got {gib}")
        positive_budget(place, int(gib * GIB))
    return gib


def positive_budget(place: str, num_bytes: int) -> int:
    """Round a budget to whole bytes. Raises: ValueError when it is nothing."""
    if num_bytes <= 0:
        raise ValueError(f"the {place} memory budget must be positive, got {num_bytes} bytes")
    return int(num_bytes)


def check_is_free(plan: Plan, profile: HardwareProfile, device_type: str) -> None:
    """Raise PlanError when a plan within its budgets takes more than its machine has left now, all ranks begun."""
    gpu_bytes, host_bytes = plan.predicted.gpu_bytes, plan.predicted.host_bytes
    free_gpu = profile.memory.gpu_free_bytes + profile.memory.gpu_context_bytes
    free_host = profile.memory.host_available_bytes + plan.request.ranks * profile.memory.host_base_bytes
    if device_type == "cpu":  # both arenas are host memory
        gpu_bytes, host_bytes = 0, plan.request.ranks * gpu_bytes + host_bytes
    for needed, free, total, name, flag, reason in (
        (gpu_bytes, free_gpu, profile.memory.gpu_total_bytes, "GPU", "gpu", PlanReason.INSUFFICIENT_DEVICE_MEMORY),
        (host_bytes, free_host, profile.memory.host_total_bytes, "host", "host", PlanReason.INSUFFICIENT_HOST_MEMORY),
    ):
        if needed > free:
            raise PlanError(
                reason,
                f"the plan takes {format_bytes(needed)} of {name} memory, but {format_bytes(free)} of"
                f" {format_bytes(total)} are left on this machine or in its container\n"
                f"  end what else uses it, raise the container's limit, or give --max-{flag}-mem-gib {free / GIB:.2f}",
                needed,
                free,
            )
