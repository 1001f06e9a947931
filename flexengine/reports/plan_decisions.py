"""What a plan decides, in words: where parameters live, how they are updated, what each block keeps for backward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import Literal, NamedTuple

from flexengine.metrics import format_bytes, format_seconds, three_digits
from flexengine.models.lora import adapters
from flexengine.models.saved_modules import saved_tensors
from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.plan import MOST_ROUNDED, GroupPlan, Home, LayerPlan, Plan
from flexengine.reports.bits import bits_line
from flexengine.reports.text_format import number_ranges, positions_by_value
from flexengine.schedule.group_storage import GroupStorage, group_storage


class GroupData(NamedTuple):
    """One kind of data that a parameter group has: its name in reports and the field of `GroupPlan` that places it."""

    name: str
    field: str

    def home(self, group: GroupPlan) -> Home | Literal["nodes", "dealt", "shard"] | None:
        """Where a group's data of this kind live; None for gradients and states that a frozen group does not have."""
        return getattr(group, self.field) if self.field == "weights" or group.trained else None

    def num_bytes(self, layout: GroupStorage) -> int:
        """Bytes of this kind of data in one group."""
        # States are every plane but these two, so that a new optimizer's planes are counted without a change here.
        own_plane = {"weights": "weights", "grads": "grad"}
        if self.field in own_plane:
            return layout.plane_bytes[own_plane[self.field]]
        return sum(size for plane, size in layout.plane_bytes.items() if plane not in own_plane.values())


PLACES = (
    ("gpu", "on the GPU"),
    ("shard", "in shards on all GPUs"),
    ("nodes", "divided over the nodes, each of which updates its share on the CPU"),
    ("dealt", "divided over the GPUs, masters streamed from the host"),
    ("host", "streamed from the host"),
    ("drive", "on the drive"),
)
TRANSPORT_WORDS = {
    "relay": "which take rounds in turn and relay gradients through the host",
    "split": "which run as many rounds together; each moves a share of weights and gradients, the rest crosses between"
    " GPUs",
    "stages": "which run as many rounds together; each has blocks of its own, takes hidden states over through the host"
    " and runs the head of one round",
    "context": "which cut every round: each runs some of its chunks, and hands keys, values and gradients over through"
    " the host",
}
GROUP_DATA = (
    GroupData("weights", "weights"),
    GroupData("gradients", "grads"),
    GroupData("optimizer states", "states"),
)


def decision_lines(plan: Plan, model: ModelSpec | None) -> list[str]:
    """Tell all decisions of a plan, a line each; without the model the lines lack sizes."""
    size = f", {model.num_parameters / 1e9:.2f} G parameters" if model is not None else ""
    return [
        f"model {plan.model}{size}",
        f"step of {plan.request.max_global_batch_tokens} tokens: {plan.num_rounds} round(s) of {plan.chunks_per_round}"
        f" x {plan.chunk_tokens} tokens, sequences up to {plan.request.max_seq_len}",
        *([] if model is None else [bits_line(model, plan)]),
        *gpu_lines(plan),
        *_residency_lines(plan, model),
        *_expert_lines(plan, model),
        *_frozen_lines(plan, model),
        *_adapter_lines(model),
        *_gradient_lines(plan),
        *drive_lines(plan),
        _update_line(plan),
        *_graph_lines(plan),
        *_activation_lines(plan, model),
    ]


def _graph_lines(plan: Plan) -> list[str]:
    """Tell that commands are replayed, and for which batches."""
    return ["CUDA graphs: blocks' commands are replayed where sequences keep their lengths"] if plan.replays else []


def gpu_lines(plan: Plan) -> list[str]:
    """Tell how several GPUs share a step, and the host memory of a node; nothing for one GPU."""
    request, p = plan.request, plan.predicted
    if request.ranks == request.nodes == 1:
        return []
    nodes = f"{request.nodes} nodes of " if request.nodes > 1 else ""
    shared = TRANSPORT_WORDS[plan.transport] if request.ranks > 1 else "each of which runs rounds of its own"
    lines = [f"GPUs: {nodes}{request.ranks}, {shared}"]
    if plan.owns_blocks:
        lines.append(f"blocks: {_owners(plan)}")
    if p.shared_host_bytes:
        own = format_bytes(host_bytes_of_gpu(plan))
        lines.append(f"host memory of a node: state once {format_bytes(p.shared_host_bytes)}, per GPU {own}")
    if p.exchange_s:
        share = f"{100 * p.exchange_wait_s / max(p.step_s, 1e-30):.1f}% of the step"
        at_work, waits = format_seconds(p.exchange_s), format_seconds(p.exchange_wait_s)
        beside = f"for {at_work} beside the last backward pass; {waits} of it, {share}, all else waits"
        does = f"add up gradients in {request.exchanged}"
        does += " and give each other weights" if plan.divides_states else ""
        coding = "; coding, by the CPU, is not priced" if request.exchanged == "fp8" else ""
        lines.append(f"network: nodes {does} {beside}{coding}")
    return lines


def _owners(plan: Plan) -> str:
    """Tell which GPU has which blocks."""
    ranks, blocks = plan.request.ranks, len(plan.layers) - 2
    shown = [", ".join(map(str, range(rank, blocks, ranks)[:3])) for rank in range(ranks)]
    more = ", ..." if blocks > 3 * ranks else ""
    return "; ".join(f"GPU {rank} has {numbers}{more}" for rank, numbers in enumerate(shown))


def host_bytes_of_gpu(plan: Plan) -> int:
    """Host bytes that each GPU of a node adds to what all have once."""
    return max(0, plan.predicted.host_bytes - plan.predicted.shared_host_bytes) // plan.request.ranks


# ---- parameters ------------------------------------------------------------------------------------------------


def _residency_lines(plan: Plan, model: ModelSpec | None) -> list[str]:
    """Count the groups that live on the GPU and on the host, a line per kind of data."""
    layouts = [group_storage(group, plan.request.numerics) for group in model.groups] if model is not None else None
    lines = []
    for data in GROUP_DATA:
        homes = [data.home(group) for group in plan.groups]
        # Frozen groups have no gradients and no states, so they do not count among the groups of these lines.
        num_groups = sum(home is not None for home in homes)
        texts = []
        for place, words in PLACES:
            members = [i for i, home in enumerate(homes) if home == place]
            if members:
                where = "on the GPUs of their ranks" if plan.owns_blocks and place == "gpu" else words
                texts.append(f"{len(members)} of {num_groups} groups {where}{_size(data, members, layouts)}")
        unstored = homes.count("none")
        texts += [f"{unstored} of {num_groups} groups not stored"] if unstored else []
        lines.append(f"{data.name}: {', '.join(texts)}")
    return lines


def _size(data: GroupData, members: Sequence[int], layouts: Sequence[GroupStorage] | None) -> str:
    if layouts is None:
        return ""
    return f" ({format_bytes(sum(data.num_bytes(layouts[i]) for i in members))})"


def _expert_lines(plan: Plan, model: ModelSpec | None) -> list[str]:
    """Tell how experts are streamed when they do not cross the link with the rest of their block."""
    if not plan.in_parts:
        return []
    which = ", only those that some token of the round goes to" if plan.touched_only else ""
    if model is None:
        return [f"experts: streamed in parts{which}"]
    # Blocks with experts are of one size in every model; groups without experts divide into one part.
    divided = max(model.groups, key=lambda group: group.divisions)
    expert_numel = sum(param.numel for param in divided.params if param.name in divided.cut)
    size = f"{expert_numel / divided.divisions / 1e6:.0f} M parameters"
    return [f"experts: streamed in {divided.divisions} parts of {size}, {plan.weight_slots} at once{which}"]


def _frozen_lines(plan: Plan, model: ModelSpec | None) -> list[str]:
    frozen = [i for i, group in enumerate(plan.groups) if not group.trained]
    if not frozen:
        return []
    size = ""
    if model is not None:
        size = f" ({sum(model.groups[i].numel for i in frozen) / 1e9:.2f} G parameters)"
    base = plan.request.numerics.base
    what = "experts" if base == "mxfp4" else "linear layers"
    stored = "" if base == "compute" else f"; {what} of frozen blocks are stored in {base}, {_how_read(model)}"
    return [f"frozen: {len(frozen)} of {len(plan.groups)} groups{size}, with weights alone{stored}"]


def _how_read(model: ModelSpec | None) -> str:
    """Tell how layers read what is stored in fewer bytes."""
    params = [] if model is None else [p for group in model.groups for p in group.params if p.storage != "compute"]
    as_stored = {param.multiplied_as_stored for param in params}
    if as_stored == {True}:
        return "multiplied as stored"
    return "decoded on the GPU" + (", or in some blocks multiplied as stored" if True in as_stored else "")


def _adapter_lines(model: ModelSpec | None) -> list[str]:
    """Tell how many parameters of adapters are trained, by the modules that have them."""
    if model is None or model.lora is None:
        return []
    counts = ", ".join(f"{name} {count:,}" for name, count in adapter_counts(model).items())
    return [f"adapters: rank {model.lora.rank}, {model.num_trained_parameters:,} parameters ({counts})"]


def adapter_counts(model: ModelSpec) -> dict[str, int]:
    """Count trained parameters by the own names of modules, those of adapters first."""
    counts: Counter[str] = Counter()
    for adapter in adapters(model):
        counts[adapter.module.short] += sum(math.prod(part.shape) for part in adapter.parts)
    for source in {source.name: source for _, source in saved_tensors(model)}.values():
        counts[source.name.rpartition(".")[0].rpartition(".")[2]] += math.prod(source.shape)
    return dict(counts)


def _gradient_lines(plan: Plan) -> list[str]:
    """Tell of a step of so many rounds that 16 bits are too few for the sum of their gradients."""
    numerics, rounds = plan.request.numerics, plan.num_rounds
    if numerics.compute != "bfloat16" or rounds <= MOST_ROUNDED:
        return []
    why = f"sums of {rounds} rounds in bfloat16 would be off by more than 1%"
    if numerics.grad == "bfloat16":
        return [f"gradients: {why}; --grad-dtype float32 keeps them exact"]
    return [f"gradients: stored in {numerics.grad}, as {why}"]


def drive_lines(plan: Plan) -> list[str]:
    """Tell what a step writes to a drive, which wears out by it; nothing without one."""
    num_bytes, written = plan.predicted.drive_bytes, plan.predicted.drive_written_bytes / 1e9
    if not num_bytes:
        return []
    there = f"drive: {format_bytes(num_bytes)}" + (" once for all GPUs" if plan.shares_node else "")
    if not written:
        return [f"{there}, which steps only read"]
    count = three_digits(written)
    each = f"a step writes {count} GB, 1000 steps {count} TB"
    return [f"{there}; {each} (drives of 1 TB are made for some 600 TB)"]


def _update_line(plan: Plan) -> str:
    trained = sum(group.trained for group in plan.groups)
    by_cpu = sum(group.update == "cpu" for group in plan.groups)
    bold = sum(group.speculative for group in plan.groups) if plan.speculates else 0
    since = " from the last backward on" if plan.updates_in_backward else ""
    since += f" ({bold} of them from the last backward on, as if nothing were clipped)" if bold else ""
    if by_cpu == trained > 0:
        return f"update: on the CPU{since}"
    cpu = f"{by_cpu} of {trained} groups on the CPU{since}, the others " if by_cpu else ""
    if not plan.uses_tiles:
        return f"update: {cpu}on the GPU, in place"
    # Small models have tiles of a few thousand elements, which "0.0 M" would not tell.
    tile = f"{three_digits(plan.optimizer_tile / 1e6)} M" if plan.optimizer_tile >= 1e5 else f"{plan.optimizer_tile}"
    slots = f"{plan.optimizer_slots} tile(s) of {tile} elements"
    return f"update: {cpu}on the GPU, what lives on the host through {slots}"


# ---- activations -----------------------------------------------------------------------------------------------


def _activation_lines(plan: Plan, model: ModelSpec | None) -> list[str]:
    """Tell what blocks keep for backward, a line per distinct choice."""
    # The embedding has nothing to keep, and the head runs forward and backward in one command.
    kept, blocks = plan.layers[1:-1], repeat(None) if model is None else model.blocks
    lines = [
        f"block{'' if len(members) == 1 else 's'} {number_ranges(members)}: {words}"
        for words, members in positions_by_value(map(kept_words, kept, blocks)).items()
    ]
    lines += ["blocks of a segment run backward together, chunk by chunk"] * plan.request.segments_by_chunk
    return lines + ["hidden states and their gradients wait on the host between layers"] * plan.request.hidden_on_host


def kept_words(kept: LayerPlan, block: LayerSpec | None) -> str:
    """Tell what a block keeps from forward to backward."""
    if block is not None and not block.keeps:
        return "forward only, as nothing is trained there or below"
    place = input_place(kept)
    on_gpu = [*(["input"] if place == "gpu" else []), *kept.keep_gpu]
    away = [*(["input"] if place in ("host", "drive") else []), *kept.keep_host]
    texts = [f"GPU keeps {', '.join(on_gpu)}"] if on_gpu else []
    texts += [f"{'drive' if kept.on_drive else 'host'} keeps {', '.join(away)}"] if away else []
    texts += ["the block before makes the input again"] if place == "recomputed" else []
    return "; ".join([*texts, "nothing is recomputed" if _keeps_all(kept, block) else "the rest is recomputed"])


def _keeps_all(kept: LayerPlan, block: LayerSpec | None) -> bool:
    """Whether a block keeps all outputs that its backward reads."""
    if block is None or kept.input_again:
        return False
    read = {name for op in block.ops for name in (*op.needs_input, *op.needs_weight)}
    makers = {op.name for op in block.ops if any(output.name in read for output in op.outputs)}
    return makers <= {*kept.keep_gpu, *kept.keep_host}


def input_place(kept: LayerPlan) -> str:
    """Say where a layer's input is between forward and backward: "gpu", "host", "drive" or "recomputed"."""
    away = "drive" if kept.on_drive else "host"
    return "recomputed" if kept.input_again else away if kept.input_home == "host" else "gpu"


def output_place(op_name: str, kept: LayerPlan) -> str:
    """Say where an op's outputs are between forward and backward: "gpu", "host", "drive" or "recomputed"."""
    if op_name in kept.keep_gpu:
        return "gpu"
    away = "drive" if kept.on_drive else "host"
    return away if op_name in kept.keep_host else "recomputed"
