"""Reads the experts of types that have a row in `variant_rows.py`, by how their routers choose."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.models.block_shape import ExpertShape
from flexengine.models.fields import Fields
from flexengine.models.sizes import Sizes
from flexengine.ops.experts.router import RouterStyle
from flexengine.wording import shown

KINDS = ("dense", "sparse")


class Routed(NamedTuple):
    """The experts of a model, and the layers that have a plain FFN instead."""

    shape: ExpertShape
    dense: frozenset[int] = frozenset()


def sigmoid_experts(fields: Fields, sizes: Sizes) -> Routed:
    """Read experts that are chosen by sigmoids and a bias, within the best groups, as DeepSeek-V3's are."""
    count, per_token = fields.whole("n_routed_experts"), fields.whole("num_experts_per_tok")
    groups, taken = fields.whole("n_group", 1), fields.whole("topk_group", 1)
    check_groups(fields, count, groups, taken, per_token, best=2)
    scale = fields.number("routed_scaling_factor", 1.0, high=1e6)
    router = RouterStyle("sigmoid", groups, taken, 2, scale, biased=True, exact=True)
    width = fields.whole("moe_intermediate_size")
    normalised, shared = fields.switch("norm_topk_prob", True), width * fields.whole("n_shared_experts", 0, least=0)
    shape = ExpertShape(count, per_token, width, normalised, shared, shared_gated=False, router=router)
    return Routed(shape, _dense_layers(fields, sizes.num_hidden_layers))


def check_groups(fields: Fields, count: int, groups: int, taken: int, per_token: int, best: int) -> None:
    """Raise ValueError for groups and counts of experts that do not go together.

    best: experts whose scores make that of their group.
    """
    if count % groups or taken > groups or per_token > taken * (count // groups) or count // groups < best:
        raise ValueError(
            f"{fields.model}: n_routed_experts={count}, n_group={groups}, topk_group={taken} and num_experts_per_tok="
            f"{per_token} in config.json do not go together: groups are of one size, {best} or more, and those taken "
            "hold a token's experts. Fetch the published one again"
        )


def minimax_experts(fields: Fields, sizes: Sizes) -> Routed:
    """Read MiniMax-M2's: chosen by sigmoids and a bias, of the width that is intermediate_size."""
    count = fields.whole("num_local_experts")
    router = RouterStyle("sigmoid", biased=True)
    return Routed(ExpertShape(count, fields.whole("num_experts_per_tok"), sizes.intermediate_size, True, router=router))


def granite_experts(fields: Fields, sizes: Sizes) -> Routed:
    """Read Granite's: those with the largest logits, whose softmax weighs them, beside a shared one or none."""
    count, shared = fields.whole("num_local_experts"), fields.whole("shared_intermediate_size", 0, least=0)
    per_token = fields.whole("num_experts_per_tok")
    return Routed(ExpertShape(count, per_token, sizes.intermediate_size, True, shared, shared_gated=False))


def mellum_experts(fields: Fields, sizes: Sizes) -> Routed:
    """Read Mellum's: as Qwen3-MoE's, in the layers that mlp_layer_types names."""
    shape = ExpertShape(
        fields.whole("num_experts"),
        fields.whole("num_experts_per_tok"),
        fields.whole("moe_intermediate_size"),
        fields.switch("norm_topk_prob", True),
    )
    return Routed(shape, _dense_layers(fields, sizes.num_hidden_layers))


def hunyuan_experts(fields: Fields, sizes: Sizes) -> Routed:
    """Read Hunyuan's: one count of experts for all layers, beside one that all tokens share."""
    count, per_token = (_same_in_all(fields, name) for name in ("num_experts", "moe_topk"))
    width = sizes.intermediate_size
    return Routed(ExpertShape(count, per_token, width, True, width, shared_gated=False, router=RouterStyle(exact=True)))


def aria_experts(fields: Fields, sizes: Sizes) -> Routed:
    """Read Aria's: stored input by output, those with the largest logits beside shared ones."""
    count, width = fields.whole("moe_num_experts"), sizes.intermediate_size
    shared = width * fields.whole("moe_num_shared_experts", 0, least=0)
    per_token = fields.whole("moe_topk")
    return Routed(ExpertShape(count, per_token, width, True, shared, shared_gated=False, transposed=True))


def ernie_experts(fields: Fields, sizes: Sizes) -> Routed:
    """Read ERNIE's: a bias takes part in the choice by softmax; layers at both ends may have none."""
    width = fields.whole("moe_intermediate_size")
    shape = ExpertShape(
        fields.whole("moe_num_experts"),
        fields.whole("moe_k"),
        width,
        normalised=True,
        shared_width=width * fields.whole("moe_num_shared_experts", 0, least=0),
        shared_gated=False,
        router=RouterStyle(biased=True, exact=True),
    )
    layers, last = range(sizes.num_hidden_layers), fields.values.get("moe_layer_end_index")
    first, step = fields.whole("moe_layer_start_index", 1, least=0), fields.whole("moe_layer_interval", 1)
    last = len(layers) - 1 if last in (None, -1) else fields.whole("moe_layer_end_index", least=0)
    return Routed(shape, frozenset(i for i in layers if (i + 1) % step or not first <= i <= last))


def _same_in_all(fields: Fields, name: str) -> int:
    """Read a number that a config may state for every layer."""
    stated = fields.values.get(name)
    if isinstance(stated, list) and stated and all(value == stated[0] for value in stated):
        return Fields(fields.model, {name: stated[0]}).whole(name)
    return fields.whole(name)


def _dense_layers(fields: Fields, count: int) -> frozenset[int]:
    """Find the layers without experts: those that `mlp_layer_types` names, or the first ones."""
    stated, first = fields.values.get("mlp_layer_types"), fields.whole("first_k_dense_replace", 0, least=0)
    kinds = [KINDS[i >= first] for i in range(count)] if stated is None else stated
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in KINDS for kind in kinds):
        raise ValueError(
            f"{fields.model}: mlp_layer_types={shown(stated)} in config.json; expected a list of num_hidden_layers="
            f"{count} entries, each {' or '.join(KINDS)}. Fetch the published config.json again"
        )
    return frozenset(i for i, kind in enumerate(kinds) if kind == "dense")
