"""Describes a model whose images give rows to tokens: the text as it is, and a tower in front of its embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from flexengine.models.opaque.loading import empty_model
from flexengine.models.spec import ModelSpec
from flexengine.models.towers.axes import NUM_AXES, with_axes
from flexengine.models.towers.layouts import CALL_ROWS, Grids, Layout, Sizes, Tiles
from flexengine.models.towers.tower import TransformersTower
from flexengine.ops.embedding import Embedding
from flexengine.ops.given_rows import Columns, EmbeddingWithRows, GivenRows, TowerCost
from flexengine.ops.opaque_cost import traced_forward
from flexengine.options.job import Job


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
}
"""Model type -> how its processor lays out images."""


def with_images(model: ModelSpec, job: Job) -> ModelSpec:
    """Have rows of images stand for their tokens, where a job trains with images. Call it before what freezes.

    Raises: ValueError for a model whose images are not trained, for several GPUs, or where there is no transformers.
    """
    if not job.max_image_tokens:
        return model
    _check(model, job)
    shell = empty_model(model.hf_config, "AutoModelForImageTextToText", job.dtype)
    layout = LAYOUTS[model.family](shell.config)
    # an image lies within a sequence
    most = min(job.max_image_tokens, max(job.max_seq_len, CALL_ROWS))
    made = model.hidden_size, getattr(torch, job.dtype), most
    tower = TransformersTower(shell, layout, *made)
    if isinstance(layout, Tiles):
        layout = layout._replace(rows=len(_rows(tower, layout.probe(1))))
        tower = TransformersTower(shell, layout, *made)
    share = min(1.0, job.max_image_tokens / job.max_global_batch_tokens)
    cost = _cost(tower, layout)
    axes = NUM_AXES if isinstance(layout, Grids) else 1
    given = GivenRows("images", shell.config.image_token_id, job.max_image_tokens, share, tower, cost, axes)
    model = model if axes == 1 else with_axes(model)
    embedding, *others = model.layers
    ops = tuple(EmbeddingWithRows(op, given) if isinstance(op, Embedding) else op for op in embedding.ops)
    return replace(model, layers=(replace(embedding, ops=ops), *others), given=given)


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


def _rows(tower: TransformersTower, call: Columns) -> torch.Tensor:
    """The rows of a call, without numbers: weights are zeros that take no memory."""
    found = []
    traced_forward(lambda: found.append(_run_empty(tower, call)))
    return found[0]


def _run_empty(tower: TransformersTower, call: Columns) -> torch.Tensor:
    dtype = tower.dtype
    call = {name: c.to(dtype) if c.is_floating_point() else c for name, c in call.items()}
    return tower.run(lambda name: torch.zeros((), dtype=dtype).expand(tower.shapes[name]), call)


def _cost(tower: TransformersTower, layout: Layout) -> TowerCost:
    """What the largest call costs, traced."""
    call = layout.probe(tower.most)
    count = len(_rows(tower, call))
    work, peak = traced_forward(lambda: _run_empty(tower, call))
    column_bytes = sum(c.numel() * c.element_size() for c in call.values())
    weights = sorted((torch.Size(shape).numel() for shape in tower.shapes.values()), reverse=True)
    # pixels as they come and in the compute dtype; two modules' weights and the next one's, as one calls another
    held = 2 * column_bytes + sum(weights[:4]) * tower.dtype.itemsize
    return TowerCost(peak + held, work.times(1 / count), -(-column_bytes // count))
