"""Tells opaque blocks how long a run's sequences are."""

from __future__ import annotations

from flexengine.models.spec import ModelSpec
from flexengine.ops.opaque import OpaqueBlock


def with_calls_up_to(model: ModelSpec, tokens: int) -> ModelSpec:
    """The model for sequences of at most so many tokens, of which each is a call of its opaque blocks."""
    if not model.whole_sequences:
        return model
    return model.with_ops(lambda op: op.up_to(tokens) if isinstance(op, OpaqueBlock) else op)
