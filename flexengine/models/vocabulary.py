"""Describes a model with rows for more tokens than its checkpoint has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flexengine.models.registry import build_model
from flexengine.models.spec import ModelSpec, ParamSpec, WeightSource

ROW_MULTIPLE = 8
"""Rows are added up to a multiple of this, so that the head's products stay aligned."""


def with_rows(model: ModelSpec, rows: int, in_checkpoint: bool) -> ModelSpec:
    """Describe a model whose embedding and head have `rows` rows.

    in_checkpoint: whether there is a checkpoint, which holds the first of them.
    Call it before everything else that replaces ops or groups. Raises: ValueError as `build_model`.
    """
    wider = build_model(model.name, _config_with(model.hf_config, rows))
    if not in_checkpoint:
        return wider

    def grown(source: WeightSource, shape: tuple[int, ...]) -> WeightSource:
        return replace(source, shape=shape, rows_in_file=source.shape[0])

    def of_param(own: ParamSpec, param: ParamSpec) -> ParamSpec:
        if own.shape == param.shape:
            return own  # as the checkpoint holds it, which the config alone does not tell
        pairs = zip(own.sources, param.sources, strict=True)
        return replace(param, sources=tuple(grown(source, new.shape) for source, new in pairs))

    groups = (
        replace(group, params=tuple(map(of_param, group.params, other.params)))
        for group, other in zip(model.groups, wider.groups, strict=True)
    )
    return replace(wider, groups=tuple(groups), notice=model.notice)


def _config_with(config: dict[str, Any], rows: int) -> dict[str, Any]:
    """A config with another vocab_size; of a model with images it is the text's."""
    text, own = config.get("text_config"), {"vocab_size": rows}
    if not isinstance(text, dict):
        return {**config, **own}
    return {**config, **(own if "vocab_size" in config else {}), "text_config": {**text, **own}}
