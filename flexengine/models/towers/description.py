"""Describes a model whose images give rows to tokens: the text as it is, and a tower in front of its embedding."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from flexengine.models.opaque.loading import empty_model
from flexengine.models.opaque.names import sources_of
from flexengine.models.spec import GroupSpec, LayerSpec, ModelSpec, ParamSpec
from flexengine.models.towers.axes import NUM_AXES, with_axes
from flexengine.models.towers.cost import TYPICAL_ROWS, cost_of, traced_forward
from flexengine.models.towers.layouts import CALL_ROWS, Grids, Layout, Placed, Sizes, Tiles
from flexengine.models.towers.pooling import with_rows_of_any_call
from flexengine.models.towers.tower import TransformersTower
from flexengine.models.with_images import NOTICE
from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.attention.seen_blocks import BlockAttention
from flexengine.ops.base import Op
from flexengine.ops.embedding import Embedding
from flexengine.ops.given_rows import AddRows, GivenRows, PlaceRows
from flexengine.options.job import Job

TOWER, PROJECTOR, CONSTANTS = "tower", "projector", "tower_constants"
"""Groups of what gives rows: what sees images, what makes rows of the text's width of that, and what nobody trains."""
_PROJECTOR = re.compile(
    r"(^|\.)((multi_modal_projector|vision_projection|connector|merger|deepstack_merger_list)\.|"
    r"embed_vision\.(?!patch_|pos_))"
)


def _tiles(config: Any, **options: Any) -> Layout:
    vision = config.vision_config
    size = vision.image_size if isinstance(vision.image_size, (list, tuple)) else [vision.image_size] * 2
    return Tiles(1, vision.num_channels, (size[0], size[1]), **options)


def _nested_tiles(config: Any) -> Layout:
    return _tiles(config, nested=True, mask="pixel_attention_mask")


def _sizes(config: Any) -> Layout:
    vision = config.vision_config
    return Sizes(vision.num_channels, vision.patch_size * getattr(config, "spatial_merge_size", 1))


def _tiles_or_sizes(config: Any) -> Layout:
    return _sizes(config) if config.vision_config.model_type == "pixtral" else _tiles(config)


def _grids(config: Any) -> Layout:
    vision = config.vision_config
    return Grids(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2, vision.spatial_merge_size)


def _placed(config: Any) -> Layout:
    vision = config.vision_config
    if getattr(vision, "use_clipped_linears", False):
        raise ValueError(
            "use_clipped_linears in vision_config of config.json: towers whose values are clipped are not"
            " trained; leave max_image_tokens out to train the text alone"
        )
    return Placed(3 * vision.patch_size**2, vision.pooling_kernel_size)


def _placed_rows(config: Any) -> Layout:
    return Placed(3 * config.vision_config.model_patch_size**2, 1)


LAYOUTS: dict[str, Callable[[Any], Layout]] = {
    "llava": _tiles_or_sizes,
    "internvl": _tiles,
    "aya_vision": _tiles,
    "cohere2_vision": _tiles,
    "idefics3": _nested_tiles,
    "smolvlm": _nested_tiles,
    "mistral3": _sizes,
    "lighton_ocr": _sizes,
    "qwen2_vl": _grids,
    "qwen2_5_vl": _grids,
    "qwen3_vl": _grids,
    "qwen3_vl_moe": _grids,
    "qwen3_5": _grids,
    "qwen3_5_moe": _grids,
    "gemma3": _tiles,
    "gemma4": _placed,
    "gemma4_unified": _placed_rows,
}
"""Model type -> how its processor lays out images."""
SEE_EACH_OTHER = ("gemma3", "gemma4", "gemma4_unified")
"""Types whose text may let the tokens of an image see each other, the later ones too: all do in Gemma 3, and in Gemma 4
those of layers with a window, where the config says so."""
PHOTO_ROWS = 280
"""Rows of an image of Gemma 4, as its processor is published."""


def with_images(model: ModelSpec, job: Job) -> ModelSpec:
    """Have rows of images stand for their tokens, where a job trains with images. Call it before what freezes.

    What makes them is two more groups of the embedding layer: tower and projector. Raises: ValueError for a model whose
    images are not trained, or where there is no transformers.
    """
    if not job.max_image_tokens:
        return model
    _check(model, job)
    shell = empty_model(model.hf_config, "AutoModelForImageTextToText", job.dtype)
    layout = LAYOUTS[model.family](shell.config)
    with_rows_of_any_call(shell)
    # an image lies within a sequence
    most = min(job.max_image_tokens, max(job.max_seq_len, CALL_ROWS))
    made = model.hidden_size, getattr(torch, job.dtype), most
    tower = TransformersTower(shell, layout, *made)
    if isinstance(layout, Tiles):
        layout = layout._replace(rows=traced_forward(tower, 1).shape[1])
        tower = TransformersTower(shell, layout, *made)
    params = [_param(shell, name, shape) for name, shape in tower.shapes.items()]
    given = _given(tower, layout, shell.config.image_token_id, job)
    if given.num_axes > 1:
        model = with_axes(model)
    if model.family in SEE_EACH_OTHER:
        model, given = _with_blocks(model, given, layout, shell.config.text_config)
    return _with_rows(model, given, params, tower.constants)


def _with_blocks(model: ModelSpec, given: GivenRows, layout: Layout, text: Any) -> tuple[ModelSpec, GivenRows]:
    """Let tokens of an image see each other, in the layers that do."""
    within_windows = isinstance(layout, Placed)
    if within_windows and text.use_bidirectional_attention != "vision":
        return model, given
    rows = given.tower.calls(layout.probe(1))[0].rows if isinstance(layout, Tiles) else PHOTO_ROWS
    given = replace(given, block_rows=min(rows, TYPICAL_ROWS))

    def sees(op: Op) -> Op:
        if isinstance(op, CausalAttention) and (op.style.window > 0 or not within_windows):
            return BlockAttention(op, given)
        return op

    return model.with_ops(sees), given


def _given(tower: TransformersTower, layout: Layout, token_id: int, job: Job) -> GivenRows:
    largest = traced_forward(tower, tower.most)
    depth, count = largest.shape[:2]
    return GivenRows(
        name="images",
        token_id=token_id,
        max_tokens=job.max_image_tokens,
        share=min(1.0, job.max_image_tokens / job.max_global_batch_tokens),
        tower=tower,
        # a function whose name the digest of bits has known
        cost_of=lru_cache(maxsize=None)(lambda tower, trained: cost_of(tower, trained)),  # noqa: PLW0108
        row_bytes=-(-largest.column_bytes // count),
        depth=depth,
        num_axes=NUM_AXES if isinstance(layout, Grids) else 1,
    )


def _param(shell: Any, name: str, shape: tuple[int, ...]) -> ParamSpec:
    kind = "matrix" if len(shape) > 1 else "vector"
    init = "normal" if kind == "matrix" else "ones" if name.endswith("weight") else "zeros"
    return ParamSpec(name, shape, sources_of(shell, name, shape), kind, init)


def _with_rows(
    model: ModelSpec, given: GivenRows, params: Sequence[ParamSpec], constants: Collection[str]
) -> ModelSpec:
    """Put the groups of a tower behind the embedding's, an op behind the embedding, and one behind the first blocks."""
    split = dict[str, list[ParamSpec]]({TOWER: [], PROJECTOR: [], CONSTANTS: []})
    for p in params:
        name = CONSTANTS if p.name in constants else PROJECTOR if _PROJECTOR.search(p.name) else TOWER
        split[name].append(p)
    named = ((name, members) for name, members in split.items() if members)
    own = [GroupSpec(name, name, tuple(members), frozen=name == CONSTANTS) for name, members in named]

    def moved(layer: LayerSpec) -> LayerSpec:
        places = ((local, group + len(own) * (group > 0), name) for local, group, name in layer.params)
        return replace(layer, params=tuple(places))

    embedding, *others = map(moved, model.layers)
    there = ((p.name, number, p.name) for number, group in enumerate(own, 1) for p in group.params)
    names, ops = tuple(p.name for p in params), list[Op]()
    for op in embedding.ops:
        ops += _placing(op, given, names) if isinstance(op, Embedding) else [op]
    layers = [replace(embedding, ops=tuple(ops), params=(*embedding.params, *there)), *others]
    for depth in range(1, given.depth):
        block = layers[depth]
        assert block.output is not None
        op = AddRows(block.output, f"{block.output}.rows", model.hidden_size, given, depth)
        layers[depth] = replace(block, ops=(*block.ops, op), output=op.y)
    groups = (model.groups[0], *own, *model.groups[1:])
    notice = model.notice.removeprefix(NOTICE).removeprefix("; ")
    return replace(model, layers=tuple(layers), groups=groups, given=given, notice=notice)


def _placing(op: Embedding, given: GivenRows, weights: tuple[str, ...]) -> list[Op]:
    text = Embedding(op.name, f"{op.y}.text", op.vocab_size, op.width, op.weight, op.scale)
    return [text, PlaceRows(text.y, op.y, op.width, given, weights)]


def frozen_of_images(model: ModelSpec, job: Job) -> tuple[str, ...]:
    """What of a model is frozen unless a job says otherwise: the tower, but not the projector.

    Raises: ValueError where a job trains a tower that there is not, or adapters beside it.
    """
    if job.train_tower and (model.given is None or job.lora_setup):
        asked = job.words.setting("train_tower", True)
        instead = (
            f"it takes {job.words.spelled('max_image_tokens')}"
            if model.given is None
            else "in mode lora modules_to_save names it"
        )
        raise ValueError(f"{asked}: trains all of what sees images, and {instead}; leave it out, or say so")
    if model.given is None:
        return ()
    stays = (CONSTANTS,) if job.train_tower else (TOWER, CONSTANTS)
    return tuple(group.name for group in model.groups if group.name in stays)


def _check(model: ModelSpec, job: Job) -> None:
    """Raise ValueError for what images are not trained with."""
    asked = job.words.setting("max_image_tokens", job.max_image_tokens)
    if model.family not in LAYOUTS:
        raise ValueError(
            f"{asked}: images of {model.family} models are not trained, only those of {', '.join(LAYOUTS)}; leave it"
            " out to train the text alone"
        )
    if find_spec("transformers") is None:
        raise ValueError(f"{asked}: images take the towers of transformers: pip install transformers")
