"""Small models and random plans for tests of the schedule and the planner."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Literal
from unittest.mock import patch

from flexengine.models import blocks as block_parts
from flexengine.models.block_shape import BlockShape, ExpertShape
from flexengine.models.decoder import DecoderShape, decoder_model
from flexengine.models.llama import build
from flexengine.models.spec import LayerSpec, ModelSpec, Table
from flexengine.ops.rmsnorm import NormStyle
from flexengine.plan import GroupPlan, LayerPlan, Numerics, Plan, Request
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import ChunkShape, RoundShape
from flexengine.schedule.save_sets import savable_ops

FLOAT32 = Numerics("float32", "full", "float32", "float32")


def small_model(blocks: int = 3, tied: bool = False, hidden: int = 64, vocab: int = 256) -> ModelSpec:
    """A Llama of a few blocks."""
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    return build("small", config)


def mixed_model(blocks: int = 4, hidden: int = 64) -> ModelSpec:
    """A decoder whose blocks take turns: dense, with experts, dense with normalised queries and keys, with experts."""
    dense = BlockShape(hidden, 3 * hidden, 4, 2, hidden // 4, NormStyle(1e-5))
    experts = replace(dense, experts=ExpertShape(count=5, per_token=2, width=2 * hidden, normalised=True))
    turn = (dense, experts, replace(dense, qk_norm="head"), experts)
    shape = DecoderShape(
        vocab_size=256,
        tie_word_embeddings=False,
        blocks=tuple(turn[i % len(turn)] for i in range(blocks)),
        tables=(Table("inv_freq", tuple(0.1**i for i in range(hidden // 8))),),
        final_norm=dense.norm,
    )
    return decoder_model("mixed", "mixed", {}, shape)


def divided_model(blocks: int = 4, hidden: int = 64) -> ModelSpec:
    """The same with experts each of which may be a part of its own, and are most of what there is."""
    with patch.object(block_parts, "PART_ELEMENTS", 1):
        return mixed_model(blocks, hidden)


def resident_plan(model: ModelSpec, request: Request, chunk: int = 64, chunks: int = 2) -> Plan:
    """Everything on the GPU, everything kept."""
    kept = (LayerPlan(savable_ops(block.ops), (), "gpu") for block in model.blocks)
    layers = (LayerPlan(), *kept, LayerPlan())
    groups = homes_of(model, [GroupPlan("gpu", "gpu", "gpu")] * len(model.groups))
    return Plan("small", request, chunk, chunks, layers, groups)


def homes_of(model: ModelSpec, groups: Sequence[GroupPlan]) -> tuple[GroupPlan, ...]:
    """Homes of a model's groups, of which those that are frozen have only weights."""
    return tuple(home.of_frozen() if g.frozen else home for g, home in zip(model.groups, groups, strict=True))


def random_plan(
    random: Random, model: ModelSpec, sliced: bool, segments: bool = True, hidden_home: Literal["auto", "host"] = "auto"
) -> Plan:
    """Any legal mixture of placements, levels and slot counts; segments: inputs may be made again."""
    numerics = random.choice([FLOAT32, Numerics()])
    request = Request(128 if sliced else 32, 512, 1 << 30, 1 << 40, numerics=numerics, hidden_home=hidden_home)

    def layer(number: int, block: LayerSpec) -> LayerPlan:
        names = savable_ops(block.ops)
        homes = {name: random.choice(["gpu", "host", "recompute"]) for name in names}
        parts = (tuple(n for n in names if homes[n] == home) for home in ("gpu", "host"))
        again = segments and number > 0 and model.blocks[number - 1].keeps and random.random() < 0.5
        return LayerPlan(*parts, random.choice(["gpu", "host"]), again)

    def group() -> GroupPlan:
        weights, grads = random.choice(["gpu", "host"]), random.choice(["gpu", "host"])
        if weights == grads == "host" and random.random() < 0.5:
            return GroupPlan(update="cpu")
        return GroupPlan(weights, grads, random.choice(["gpu", "host"]) if weights == "gpu" else "host")

    return Plan(
        "small",
        request,
        chunk_tokens=64,
        chunks_per_round=2,
        layers=(LayerPlan(), *(layer(i, block) for i, block in enumerate(model.blocks)), LayerPlan()),
        groups=homes_of(model, [group() for _ in model.groups]),
        weight_slots=random.randint(1, 3),
        grad_slots=random.randint(1, 2),
        save_slots=random.randint(1, 3),
        optimizer_slots=random.randint(1, 2),
        optimizer_tile=1 << random.choice([10, 12, 16]),
        share_edge_slots=random.random() < 0.5,
        grads_over_weights=random.random() < 0.5,
    )


def full_round(layout: Layout) -> RoundShape:
    """A round of full chunks for the two plans above."""
    if layout.plan.slices_sequences:
        return RoundShape((ChunkShape(64, 64, 0, 1, 0), ChunkShape(64, 192, 0, 1, 64)))
    return RoundShape((ChunkShape(64, 32),) * 2)
