"""Describes a model whose layers keep in FP8 their inputs, or the largest activation, the output of the gate and up
projection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Op, TensorSpec
from flexengine.ops.coded_rows import ReadCodes, WriteCodes
from flexengine.ops.experts.experts import WeightedGLU
from flexengine.ops.glu import GLU
from flexengine.ops.linear import Linear
from flexengine.ops.rounded_glu import Codes, GLUFromCodes, RoundedGLU, RoundGateUp


def check_keep_dtype(model: ModelSpec, keep: str) -> None:
    """Raise ValueError unless the layers keep what numerics say: `compute`, `fp8`, `fp8-inputs` or `fp8-all`."""
    # A plan priced for one must not run with the other: its seconds and bytes would be wrong.
    gate_up = any(isinstance(op, RoundGateUp) for layer in model.blocks for op in layer.ops)
    found = _VALUES[gate_up, model.hidden.dtype == "uint8"]
    if found != keep:
        raise ValueError(f"{model.name} keeps for backward what keep_dtype={found} says, but numerics ask for {keep}")


_VALUES = {(False, False): "compute", (True, False): "fp8", (False, True): "fp8-inputs", (True, True): "fp8-all"}
"""The option by whether gate and up, and whether inputs, are rounded."""


def with_coded_inputs(model: ModelSpec, keep: str) -> ModelSpec:
    """Let every layer write its output as FP8 codes, which the next one reads, where `keep` covers inputs and they do
    not yet.

    Layers that shared their ops share the new ones. Those without a backward have none either: freezing comes before.
    """
    if keep not in ("fp8-inputs", "fp8-all") or model.hidden.dtype == "uint8":
        return model
    known: dict[tuple[tuple[Op, ...], int], tuple[tuple[Op, ...], TensorSpec | None]] = {}
    layers, entering = list[LayerSpec](), dict[str, Any]()
    for layer in model.layers:
        key = layer.ops, layer.input_width
        if key not in known:
            known[key] = _coded(layer)
        ops, output = known[key]
        layers.append(replace(layer, ops=ops, output=output and output.name, **entering))
        if output is not None:
            entering = {"input": "x.codes", "input_width": output.shape[0], "input_dtype": output.dtype}
    return replace(model, layers=tuple(layers))


def _coded(layer: LayerSpec) -> tuple[tuple[Op, ...], TensorSpec | None]:
    """A layer's ops between one that reads its input from codes and one that writes its output as some; these codes."""
    ops, rows, output = list(layer.ops), layer.input_spec, None
    if rows is not None:
        ops.insert(0, ReadCodes("read_codes", rows, "x.codes"))
    if layer.output is not None:
        found = next(spec for op in ops for spec in op.outputs if spec.name == layer.output)
        writes = WriteCodes("write_codes", found, "y.codes", max(op.divisions for op in ops))
        output = writes.codes
        ops.append(writes.changed(num_parts=max(op.num_parts for op in ops)))
    return tuple(ops if layer.has_backward else [op.forward_only() for op in ops]), output


def with_keep_dtype(model: ModelSpec, keep: str) -> ModelSpec:
    """Let backward of the blocks' gated units read gate and up rounded to FP8, whatever a plan keeps, where `keep`
    covers them.

    Blocks that shared their ops share the new ones. Raises: ValueError for a model without gated units, or with
    experts.
    """
    if keep not in ("fp8", "fp8-all"):
        return model
    leave = f"leave {'--keep-dtype out' if keep == 'fp8' else 'it at fp8-inputs'}"
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
