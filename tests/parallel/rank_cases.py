"""Models under plans that several ranks train to the bits of one, with how many ranks each is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from engine_helpers import FLOAT32, ON_GPU, random_batch, random_weights, streamed_plan, tiny_config
from family_configs import CASES as FAMILIES
from opaque_configs import config_of

from flexengine import LoRA
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.freezing import with_frozen
from flexengine.models.lora import with_lora
from flexengine.models.registry import ModelSource
from flexengine.optim import Muon, Optimizer
from flexengine.optim.rules import IN_BLOCKS
from flexengine.options.job import Job
from flexengine.parallel.ranks import Ranks
from flexengine.plan import GroupPlan, LayerPlan, Numerics, Plan
from flexengine.request import described
from flexengine.schedule.save_sets import savable_ops

ROUND_MULTIPLE = 12  # pinned, so that every number of ranks packs alike
BF16 = Numerics("bfloat16", "split", "bfloat16", "float32")
BF16_STATES = Numerics("bfloat16", "stochastic", "bfloat16", "bfloat16")
LENGTHS = [30, 17, 24, 32, 9, 28, 31]
SHARD = GroupPlan("shard", "shard", "shard")
ON_CPU, BOLD = GroupPlan(update="cpu"), GroupPlan(update="cpu", speculative=True)


class Case(NamedTuple):
    """A model under a plan, and for each step the batches of its calls.

    dealt: several ranks divide the optimizer states of what the GPU updates. split: they walk the layers together.
    shards: so, and keep shards on their GPUs of all groups but every third.
    stages: so, and each has blocks of its own. context: each runs some chunks of every round. bold: the CPU updates
    before the norm is known what it updates. drive: so much of what may lie there lies on the node's drive. by_nodes:
    nodes divide the optimizer states of what the CPU updates.
    """

    source: ModelSource
    plan: Plan
    steps: list[list[Any]]
    clip: float | None = 1.0
    optimizer: Optimizer | None = None
    dealt: bool = False
    split: bool = False
    shards: bool = False
    stages: bool = False
    context: bool = False
    bold: bool = False
    drive: bool = False
    by_nodes: bool = False


def steps_of(vocab_size: int, *lengths: list[int], count: int = 2) -> list[list[Any]]:
    """So many steps of calls with sequences of these lengths."""
    return [[random_batch(10 * step + i, row, vocab_size) for i, row in enumerate(lengths)] for step in range(count)]


def streamed(source: ModelSource, *, home: GroupPlan = ON_CPU, clip: bool = True, **changes: Any) -> Plan:
    plan = streamed_plan(source.spec, **{"chunks_per_round": 1, "max_seq_len": 32, "numerics": FLOAT32, **changes})
    groups = tuple(home.of_frozen() if group.frozen else home for group in source.spec.groups)
    return replace(plan, groups=groups, request=replace(plan.request, clipping=clip))


def float32() -> Case:
    source = random_weights(tiny_config())
    return Case(source, streamed(source, home=GroupPlan()), steps_of(67, LENGTHS, count=3))


def several_calls() -> Case:
    source = random_weights(tiny_config())
    return Case(source, streamed(source), steps_of(67, LENGTHS, [30], [31, 12, 5, 29]))


def bf16() -> Case:
    """Some planes stream, some outputs are kept on the host, the CPU updates some groups and the GPU others."""
    source = random_weights(tiny_config(attention_bias=True))
    kept = [LayerPlan((), savable_ops(block.ops), "host") for block in source.spec.blocks]
    plan = streamed(source, numerics=BF16, chunks_per_round=2, optimizer_tile=257)
    groups = tuple(GroupPlan() if i % 2 else ON_CPU for i in range(len(plan.groups)))
    plan = replace(plan, layers=(LayerPlan(), *kept, LayerPlan()), groups=groups)
    return Case(source, plan, steps_of(67, LENGTHS * 2))


def bf16_states() -> Case:
    source = random_weights(tiny_config())
    return Case(source, streamed(source, home=GroupPlan(), numerics=BF16_STATES), steps_of(67, LENGTHS))


def tied() -> Case:
    source = random_weights(tiny_config(tie_word_embeddings=True))
    return Case(source, streamed(source, numerics=BF16), steps_of(67, LENGTHS, [20, 31]))


def tied_in_shared_slots() -> Case:
    source = random_weights(tiny_config(tie_word_embeddings=True))
    plan = streamed(source, share_edge_slots=True, grads_over_weights=True, weight_slots=1, grad_slots=1)
    return Case(source, plan, steps_of(67, LENGTHS))


def frozen() -> Case:
    """Frozen weights may lie on each GPU."""
    source = random_weights(tiny_config(num_hidden_layers=3))
    source = source._replace(spec=with_frozen(source.spec, ["embed", "block.1"]))
    plan = streamed(source)
    groups = tuple(ON_GPU.of_frozen() if i == 0 else home for i, home in enumerate(plan.groups))
    return Case(source, replace(plan, groups=groups), steps_of(67, LENGTHS))


def sliced() -> Case:
    source = random_weights(tiny_config())
    plan = streamed(source, chunk_tokens=16, chunks_per_round=3, max_seq_len=48)
    return Case(source, plan, steps_of(67, [48, 12, 33, 7, 16, 41, 9, 20]))


def states_of_slices() -> Case:
    """Layers that hand states of a delta rule and the tails of a convolution from slice to slice, and one with keys."""
    source = random_weights(FAMILIES["qwen3_next"])
    plan = streamed(source, chunk_tokens=16, chunks_per_round=4, max_seq_len=60)
    return Case(source, plan, steps_of(source.spec.vocab_size, [60, 7, 12, 33]))


def unclipped() -> Case:
    source = random_weights(tiny_config())
    return Case(source, streamed(source, clip=False), steps_of(67, LENGTHS), clip=None)


def unclipped_by_gpu() -> Case:
    source = random_weights(tiny_config())
    return Case(source, streamed(source, home=GroupPlan(), clip=False), steps_of(67, LENGTHS), clip=None)


def not_finite() -> Case:
    """The loss of the second of three steps overflows."""
    source, steps = random_weights(tiny_config()), steps_of(67, LENGTHS, count=3)
    steps[1][0] = {"input_ids": steps[1][0], "weights": [[3e38] * length for length in LENGTHS]}
    return Case(source, streamed(source), steps)


def experts() -> Case:
    source = random_weights(FAMILIES["qwen3_moe"])
    return Case(source, streamed(source), steps_of(source.spec.vocab_size, LENGTHS))


def experts_in_parts() -> Case:
    source = random_weights(FAMILIES["qwen3_moe"])
    plan = streamed(source, in_parts=True, touched_only=True)
    return Case(source, plan, steps_of(source.spec.vocab_size, LENGTHS))


def balanced_experts() -> Case:
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
    source = random_weights({**FAMILIES["qwen3_moe"], **asked})
    return Case(source, streamed(source), steps_of(source.spec.vocab_size, LENGTHS, [20]))


def lora() -> Case:
    source = random_weights(tiny_config())
    source = source._replace(spec=with_lora(source.spec, LoRA(rank=2, dropout=0.25)))
    return Case(source, streamed(source, numerics=BF16), steps_of(67, LENGTHS))


def adapters_in_one_slot() -> Case:
    """A block needs its frozen weights and its adapters at once, the head its own and a norm that is trained."""
    source = random_weights(tiny_config())
    lora = LoRA(["q_proj", "up_proj"], rank=2, modules_to_save=["norm", "input_layernorm"])
    source = source._replace(spec=with_lora(source.spec, lora))
    slots = {"weight_slots": 1, "grad_slots": 1, "share_edge_slots": True}
    return Case(source, streamed(source, numerics=BF16, **slots), steps_of(67, LENGTHS))


def adapters_of_experts_in_parts() -> Case:
    """Adapters of experts stream in the parts of these; those of attention and of the router with the rest."""
    source = random_weights(FAMILIES["qwen3_moe"])
    spec = with_lora(source.spec, LoRA(["all-linear", "all-experts", "gate"], rank=2))
    source = source._replace(spec=spec)
    plan = streamed(source, in_parts=True, touched_only=True, weight_slots=1)
    return Case(source, plan, steps_of(spec.vocab_size, LENGTHS))


def adapters_of_whole_experts() -> Case:
    """A base in 4 bits, with adapters of experts that cross the link with all of their block's; more blocks than
    ranks, and sequences in slices."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    source = random_weights({**FAMILIES["qwen3_moe"], **sizes})
    spec = with_base_dtype(with_lora(source.spec, LoRA(["all-linear", "all-experts", "gate"], rank=2)), "nf4")
    source = source._replace(spec=spec)
    plan = streamed(source, chunk_tokens=16, chunks_per_round=3, max_seq_len=48, numerics=replace(BF16, base="nf4"))
    return Case(source, plan, steps_of(spec.vocab_size, [48, 12, 33, 7, 16, 41, 9, 20]))


def pissa() -> Case:
    """Adapters that begin with the principal parts of the weights, which lose them; beside them magnitudes."""
    source = random_weights(tiny_config())
    source = source._replace(spec=with_lora(source.spec, LoRA(rank=2, use_dora=True, init="pissa")))
    return Case(source, streamed(source), steps_of(67, LENGTHS))


def stored_base() -> Case:
    """Adapters over a base in 4 bits, which every rank may have on its GPU."""
    config = tiny_config(hidden_size=32, intermediate_size=64, head_dim=8)
    source = random_weights(config)
    spec = with_base_dtype(with_lora(source.spec, LoRA(rank=2)), "nf4")
    plan = streamed(source._replace(spec=spec), numerics=replace(BF16, base="nf4"))
    groups = (g if g.trained or i % 2 else ON_GPU.of_frozen() for i, g in enumerate(plan.groups))
    return Case(source._replace(spec=spec), replace(plan, groups=tuple(groups)), steps_of(67, LENGTHS))


def muon() -> Case:
    """Whole matrices are updated by one rank or another, and the rest in shares; their states are with who updates."""
    source = random_weights(tiny_config())
    plan = streamed(source, home=GroupPlan(), numerics=replace(BF16, optimizer="muon"), optimizer_tile=1024)
    return Case(source, plan, steps_of(67, LENGTHS), optimizer=Muon(lr=1e-2), dealt=True)


def states_in_blocks() -> Case:
    """Optimizer states of 8 bits share a scale with their neighbours."""
    source = random_weights(tiny_config())
    homes = [GroupPlan(), ON_CPU]
    plan = streamed(source, numerics=replace(BF16, state=IN_BLOCKS), optimizer_tile=512)
    groups = tuple(homes[i % 2] for i in range(len(plan.groups)))
    return Case(source, replace(plan, groups=groups), steps_of(67, LENGTHS), dealt=True)


def blocks_of_ranks() -> Case:
    """More blocks than ranks, and a wave with fewer rounds than ranks at the end of each call."""
    source = random_weights(tiny_config(num_hidden_layers=4))
    return Case(source, streamed(source), steps_of(67, LENGTHS, [31, 12, 5, 29], count=3))


def one_round() -> Case:
    """More ranks than rounds."""
    source = random_weights(tiny_config())
    return Case(source, streamed(source), steps_of(67, [30]))


def opaque_blocks() -> Case:
    """Layers of transformers, which take sequences whole."""
    source = random_weights(config_of("gpt_neox"))
    return Case(source, streamed(source, numerics=BF16), steps_of(67, LENGTHS))


IMAGE = 66
CLIP = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 8}  # fmt: skip
QWEN3_VISION = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 7,
                "out_hidden_size": 24, "spatial_merge_size": 2, "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1]}  # fmt: skip
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}}


def with_pictures(kind: str, text: dict[str, Any], vision: dict[str, Any], **job: Any) -> ModelSource:
    config = {"model_type": kind, "image_token_id": IMAGE, "image_token_index": IMAGE, "vision_config": vision}
    source = random_weights({**config, "text_config": {**tiny_config(), **text}, "tie_word_embeddings": False})
    sizes = {"max_image_tokens": 64, "max_seq_len": 32, "max_global_batch_tokens": 4096}
    return source._replace(spec=described(source.spec, Job(**sizes, **job)))


def about_pictures(steps: list[list[Any]], *, grids: bool = False) -> list[list[Any]]:
    """Put pictures of 4 tokens into all sequences but the third: two into the first."""
    torch.manual_seed(5)
    for batch in (batch for calls in steps for batch in calls):
        places = [(number, 2) for number in range(len(batch)) if number != 2]
        for number, start in [*places, (0, 9)]:
            batch[number] = [token % 60 if token == IMAGE else token for token in batch[number]]
            batch[number][start : start + 4] = [IMAGE] * 4
    return [[{"input_ids": batch, **pictures(batch, grids)} for batch in calls] for calls in steps]


def pictures(batch: list[list[int]], grids: bool) -> dict[str, torch.Tensor]:
    count = sum(row.count(IMAGE) for row in batch) // 4
    if grids:
        return {"pixel_values": torch.randn(count * 16, 294), "image_grid_thw": torch.tensor([[1, 4, 4]] * count)}
    return {"pixel_values": torch.randn(count, 3, 28, 28)}


def projector() -> Case:
    """Images, whose tower is frozen and whose projector is trained."""
    source = with_pictures("llava", {"model_type": "llama"}, CLIP, dtype="float32")
    return Case(source, streamed(source), about_pictures(steps_of(60, LENGTHS[:5], [31, 12])))


def tower() -> Case:
    """Images, whose tower is trained, which gives rows to the first blocks, too; slices of long sequences."""
    text = {"model_type": "qwen3_vl_text", **AXES}
    source = with_pictures("qwen3_vl", text, QWEN3_VISION, dtype="bfloat16", train_tower=True)
    plan = streamed(source, numerics=BF16, chunk_tokens=16, chunks_per_round=2)
    return Case(source, plan, about_pictures(steps_of(60, LENGTHS[:5]), grids=True))


CASES: dict[Callable[[], Case], tuple[int, ...]] = {
    float32: (3,), several_calls: (2,), bf16: (4,), bf16_states: (3,), tied: (2, 4), tied_in_shared_slots: (3,),
    frozen: (3,), sliced: (), states_of_slices: (), unclipped: (3,), unclipped_by_gpu: (2,), not_finite: (2,),
    experts: (4,), experts_in_parts: (2,), balanced_experts: (3,), lora: (2,), adapters_in_one_slot: (3,),
    adapters_of_experts_in_parts: (2,), adapters_of_whole_experts: (), pissa: (3,), stored_base: (2,), muon: (3,),
    states_in_blocks: (3,), blocks_of_ranks: (), one_round: (2,), opaque_blocks: (2,),
    projector: (2,), tower: (2,),
}  # fmt: skip
"""With the numbers of ranks that are tried; few, as each takes seconds of two cores."""

WITH_ALL_TESTS = (
    float32, bf16, tied_in_shared_slots, frozen, sliced, unclipped_by_gpu, not_finite, experts_in_parts, muon,
    states_in_blocks, blocks_of_ranks, one_round,
)  # fmt: skip
"""Every way of dividing work, state and time among ranks; the others are further models under the same ways."""


SPLIT_CASES: dict[Callable[[], Case], int] = {
    several_calls: 3, tied_in_shared_slots: 2, experts_in_parts: 2, adapters_in_one_slot: 2,
    adapters_of_experts_in_parts: 3, opaque_blocks: 2, tower: 2, muon: 2, states_in_blocks: 3,
}  # fmt: skip
"""Those of which ranks also walk the layers together, and how many ranks."""


SHARDS_CASES: dict[Callable[[], Case], int] = {
    bf16: 4, sliced: 2, frozen: 2, experts: 3, adapters_in_one_slot: 2, stored_base: 3,
}  # fmt: skip
"""The same of ranks that keep shards on their GPUs, but for every third group, which they split."""


STAGES_CASES: dict[Callable[[], Case], int] = {
    float32: 2, bf16: 2, sliced: 2, unclipped: 2, not_finite: 2, experts: 2, muon: 2, blocks_of_ranks: 3,
    one_round: 2, opaque_blocks: 2, lora: 2, adapters_of_whole_experts: 2,
}  # fmt: skip
"""The same of ranks that have blocks of their own. The last wave of most steps has fewer rounds than ranks."""


CONTEXT_CASES: dict[Callable[[], Case], int] = {
    tied: 2, frozen: 2, sliced: 3, states_of_slices: 2, adapters_in_one_slot: 3,
}  # fmt: skip
"""The same of ranks that run some chunks of every round; some rounds have fewer chunks than there are ranks."""


DRIVE_CASES: dict[Callable[[], Case], int] = {
    tied_in_shared_slots: 3, states_in_blocks: 2, lora: 2, adapters_of_experts_in_parts: 2, stored_base: 2,
}  # fmt: skip
"""The same of ranks that share a drive, of which half relay and half split."""


def planned(case: Case, ranks: Ranks) -> Plan:
    """The plan of a case for so many ranks."""
    changes = {"ranks": ranks.local_size, "nodes": ranks.nodes, "round_multiple": ROUND_MULTIPLE}
    splits = {"transport": "split", "touched_only": False} if (case.split or case.shards) and ranks.size > 1 else {}
    plan = replace(case.plan, request=replace(case.plan.request, **changes), **splits)
    if case.shards and ranks.size > 1:
        kept = (SHARD if home.trained else SHARD.of_frozen() for home in plan.groups)
        homes = (old if i % 3 == 2 else new for i, (old, new) in enumerate(zip(plan.groups, kept, strict=True)))
        plan = replace(plan, groups=tuple(homes))
    if case.stages and ranks.size > 1:
        plan = in_stages(plan)
    if case.context and ranks.size > 1:
        homes = (home if home.update == "none" else GroupPlan(update=home.update) for home in plan.groups)
        plan = replace(plan, transport="context", groups=tuple(homes), window_slots=1 + ranks.size % 2)
    if case.bold and ranks.size > 1:
        homes = [replace(home, speculative=home.update == "cpu") for home in plan.groups]
        if case.stages:  # the second block of two would be on a GPU
            homes = [plan.groups[0], homes[1], *[BOLD] * (len(homes) - 3), plan.groups[-1]]
        plan = replace(plan, groups=tuple(homes))
    if case.by_nodes and ranks.nodes > 1:
        homes = (replace(home, states="nodes") if home.update == "cpu" else home for home in plan.groups)
        plan = replace(plan, groups=tuple(homes))
    if case.drive and ranks.size > 1:
        return on_drive(plan)
    if not case.dealt or case.stages or case.shards or ranks.size == 1:
        return plan
    homes = (replace(g, states="dealt") if g.update == "gpu" else g for g in plan.groups)
    return replace(plan, groups=tuple(homes))


def on_drive(plan: Plan) -> Plan:
    """The plan with states of every group on the drive, and weights of every second one that is trained."""
    homes = [GroupPlan("drive" if i % 2 else "host", "host", "drive", "cpu") for i in range(len(plan.groups))]
    frozen = GroupPlan("drive", update="none")
    groups = (new if old.trained else frozen for old, new in zip(plan.groups, homes, strict=True))
    return replace(plan, groups=tuple(groups), touched_only=False, drive_tile=1, drive_slots=2)


def in_stages(plan: Plan) -> Plan:
    """The plan with blocks that have a rank: of three, one is on its GPU, one is updated there, one by the CPU."""
    homes = [ON_GPU, GroupPlan("gpu", "host", "host"), ON_CPU]
    head = len(plan.layers) - 1  # groups behind it are of adapters
    kept = (plan.groups[i] if i in (0, head) else homes[(i - 1 - (i > head)) % 3] for i in range(len(plan.groups)))
    groups = (new if old.trained else new.of_frozen() for old, new in zip(plan.groups, kept, strict=True))
    return replace(plan, transport="stages", groups=tuple(groups))
