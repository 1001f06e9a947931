"""Fetches of touched experts alone: how many to expect, and the arguments of the command.

An expert is touched when some token of the round goes to it. The router writes on the GPU which ones are, while the
round runs; a program depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from flexengine.models.spec import ModelSpec
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.schedule.commands import BOUND_BYTES, CopyRegion, FetchExperts, SlotOffset, Touched
from flexengine.schedule.layer_program import Stage


def touched_share(num_experts: int, per_token: int, tokens: int) -> float:
    """Expected share of E experts that some of T tokens goes to, K experts each: 1 - (1 - K / E)**T for even routing.

    Source: elementary probability. A token leaves an expert out with probability 1 - K / E, all of T tokens that choose
    independently with its T-th power. Uneven routing touches fewer.
    """
    return 1.0 - (1.0 - per_token / num_experts) ** tokens


def least_touched_share(model: ModelSpec, tokens: int) -> float:
    """The least `touched_share` of any layer of a model; 1 where no experts come in parts."""
    ops = {op for layer in model.layers for op in layer.ops if isinstance(op, GroupedLinear) and op.num_parts > 1}
    return min((touched_share(op.num_experts, op.per_token, tokens) for op in ops), default=1.0)


def fetch_of_experts(
    stage: Stage, part: int, regions: Iterable[CopyRegion], bounds_slots: Iterable[int], tokens: int
) -> FetchExperts:
    """Arguments of the command that fetches part 1 or above, for a stage of a round of `tokens` tokens in all.

    regions: one for every whole parameter of the part. bounds_slots: the slots of each chunk's bounds.
    """
    return FetchExperts(tuple(regions), *touched_experts(stage, part, bounds_slots, tokens))


def touched_experts(stage: Stage, part: int, bounds_slots: Iterable[int], tokens: int) -> Touched:
    """Which experts of part 1 or above are touched, for a stage of a round of `tokens` tokens in all."""
    op, place = next(
        (step.op, dict(step.tensors)[step.op.bounds]) for step in stage.steps if isinstance(step.op, GroupedLinear)
    )
    assert place.area == "bounds", "what is fetched is known before the parts begin"
    experts = op.num_experts // op.num_parts
    first = place.offset + BOUND_BYTES * (part - 1) * experts
    bounds = tuple(SlotOffset(slot, first) for slot in bounds_slots)
    return Touched(experts, bounds, touched_share(op.num_experts, op.per_token, tokens))
