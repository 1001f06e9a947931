"""Describes a model whose blocks keep the largest activation, the output of the gate and up projection, in FP8."""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Op
from flexengine.ops.experts.experts import WeightedGLU
from flexengine.ops.glu import GLU
from flexengine.ops.linear import Linear
from flexengine.ops.rounded_glu import Codes, GLUFromCodes, RoundedGLU, RoundGateUp


def check_keep_dtype(model: ModelSpec, keep: str) -> None:
    """Raise ValueError unless the blocks keep what numerics say: `compute` or `fp8`."""
    # A plan priced for one must not run with the other: its seconds and bytes would be wrong.
    found = "fp8" if any(isinstance(op, RoundGateUp) for layer in model.blocks for op in layer.ops) else "compute"
    if found != keep:
        raise ValueError(f"{model.name} keeps gate and up in {found}, but numerics ask for {keep}")


def with_keep_dtype(model: ModelSpec, keep: str) -> ModelSpec:
    """Let backward of the blocks' gated units read gate and up rounded to FP8, whatever a plan keeps.

    Blocks that shared their ops share the new ones. Raises: ValueError for a model without gated units, or with
    experts.
    """
    if keep == "compute":
        return model
    leave = "leave --keep-dtype out"
    ops = [op for layer in model.blocks for op in layer.ops]
    if any(isinstance(op, WeightedGLU) for op in ops):
        raise ValueError(f"keep_dtype={keep} is for dense gated FFNs, and {model.name} has experts; {leave}")
    if not any(isinstance(op, GLU) for op in ops):
        raise ValueError(f"keep_dtype={keep} is for gated FFNs, and {model.name} has none; {leave}")
    known: dict[tuple[Op, ...], tuple[Op, ...]] = {}

    def rounded(layer: LayerSpec) -> LayerSpec:
        if layer.ops not in known:
            known[layer.ops] = _rounded(layer.ops)
        return replace(layer, ops=known[layer.ops])

    return replace(model, layers=tuple(rounded(layer) for layer in model.layers))


def _rounded(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Round gate_up before each gated unit, and let readers of the unit's output read it from the codes in backward."""
    found: list[Op] = []
    again: dict[str, str] = {}
    for op in ops:
        if isinstance(op, GLU):
            kept = Codes(f"{op.gate_up}_codes", f"{op.gate_up}_scales", op.width)
            unit = RoundedGLU(op, kept)
            from_codes = GLUFromCodes(unit, kept)
            found += [RoundGateUp(f"{op.gate_up}_fp8", op.gate_up, kept), unit, from_codes]
            again[op.y] = from_codes.y
        elif isinstance(op, Linear) and op.x in again:
            found.append(op.reading_again(again[op.x]))
        else:
            assert not again.keys() & {*op.needs_input, *op.needs_weight}, f"{op.name} reads a unit's exact output"
            found.append(op)
    return tuple(found)
