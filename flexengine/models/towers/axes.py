"""Rotations by positions in three axes: frames, rows and columns of images. For text all three are equal."""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.fields import Fields
from flexengine.models.spec import ModelSpec, Table
from flexengine.ops.base import Op
from flexengine.ops.rope import RoPE, RoPEInAxes, table_of_axis

NUM_AXES = 3
INTERLEAVED = {
    "qwen3_vl": [24, 20, 20],
    "qwen3_vl_moe": [24, 20, 20],
    "qwen3_5": [11, 11, 10],
    "qwen3_5_moe": [11, 11, 10],
}
"""Types that share out frequencies in turns -> the sections of a config that states none."""


def with_axes(model: ModelSpec) -> ModelSpec:
    """Have blocks rotate by positions in three axes, as the config's mrope_section shares out the frequencies.

    That is one section behind the other, or in turns, of which the first axis has those that the others leave.

    Raises: ValueError for a config that says no such thing, or scales the rotations.
    """
    fields = Fields(model.name, model.hf_config)
    text = Fields(model.name, fields.nested("text_config") or model.hf_config)
    options = text.nested("rope_parameters") or text.nested("rope_scaling")
    turns = INTERLEAVED.get(model.family)
    sections, (table,) = options.get("mrope_section", turns), model.tables
    if (
        not isinstance(sections, list)
        or not all(isinstance(count, int) for count in sections)
        or sum(sections) != len(table.values)
        or table.scaling != 1.0
        or table.long_values
    ):
        raise ValueError(
            f"{model.name}: mrope_section={sections} in the rope options of config.json does not share out"
            f" {len(table.values)} frequencies among the axes of images; leave max_image_tokens out to train the text"
            " alone"
        )
    axis_of = [number % NUM_AXES for number, count in enumerate(sections) for _ in range(count)]
    if turns is not None:
        shares = ((i // NUM_AXES < sections[i % NUM_AXES], i % NUM_AXES) for i in range(len(table.values)))
        axis_of = [axis if has else 0 for has, axis in shares]
    tables = (
        Table(
            table_of_axis(table.name, axis),
            tuple(value if own == axis else 0.0 for value, own in zip(table.values, axis_of, strict=True)),
        )
        for axis in range(NUM_AXES)
    )
    known: dict[tuple[Op, ...], tuple[Op, ...]] = {}
    layers = []
    for layer in model.layers:
        if layer.ops not in known:  # equal blocks go on sharing their ops
            known[layer.ops] = tuple(RoPEInAxes(op, NUM_AXES) if isinstance(op, RoPE) else op for op in layer.ops)
        layers.append(replace(layer, ops=known[layer.ops]))
    return replace(model, layers=tuple(layers), tables=(*model.tables, *tables))
