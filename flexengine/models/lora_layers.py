"""Puts the ops of adapters beside the frozen ops of a layer, and lets gated units and kept outputs spare their passes.

A frozen product or router is preceded by `LoraDown`, which makes low of what it reads, and by `LoraUp`, whose sum it
adds to. FP8 products come before `LoraUp`. Experts and layers with magnitudes add low @ B.T themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from flexengine.ops.adapters.dora import Magnitude
from flexengine.ops.adapters.dropout import Dropout
from flexengine.ops.adapters.experts import GroupedLoraUp, GroupedMagnitude
from flexengine.ops.adapters.lora import LoraDown, LoraUp
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import Op, TensorSpec
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.experts.router import Router
from flexengine.ops.fp8 import Fp8Linear
from flexengine.ops.given_rows import PlaceRows
from flexengine.ops.glu import GLU
from flexengine.ops.glu_down import GLUDown
from flexengine.ops.linear import Linear
from flexengine.ops.opaque import OpaqueBlock
from flexengine.ops.rounded_glu import RoundGateUp


def with_adapters(ops: tuple[Op, ...], adapters: tuple[Adapters, ...], dropout: float) -> tuple[Op, ...]:
    """Put adapters beside the ops, and linear layers of opaque blocks and towers, whose names they have.

    Experts and routers have them without dropout.
    """
    of_op, outputs = {own.name: own for own in adapters}, {op.name: op.outputs[0].name for op in ops}
    # Ops that backward alone needs do not change the numbers by which dropout draws.
    numbers = accumulate((not op.for_backward for op in ops[:-1]), initial=0)
    found: list[Op] = []
    for op, number in zip(ops, numbers, strict=True):
        if isinstance(op, OpaqueBlock | PlaceRows):
            own = [of_op[linear.name] for linear in op.linears if linear.name in of_op]
            found.append(op.adapted(own) if own else op)
        else:
            found += _adapted(op, of_op[op.name], dropout, number, ops) if op.name in of_op else [op]
    for unit in [op for op in found if isinstance(op, GLU) and op.takes_addends]:
        found = _with_sums_in(unit, found)
    return tuple(_keeping_low(found, outputs))


def _adapted(op: Op, adapters: Adapters, dropout: float, number: int, ops: tuple[Op, ...]) -> list[Op]:
    """The ops that take the place of one."""
    if isinstance(op, GroupedLinear):
        kind = GroupedMagnitude if adapters.has_magnitude else GroupedLoraUp
        return [LoraDown(adapters, op.x, divisions=op.divisions), kind(op, adapters)]
    if isinstance(op, Router):
        added = TensorSpec(f"{op.name}.added", (op.num_experts,))
        return [LoraDown(adapters, op.x), LoraUp(adapters, adapters.low.name, "", added), op.onto(added.name)]
    assert isinstance(op, Linear)
    drops = Dropout(dropout, number, TensorSpec(f"{op.name}.dropped", (op.in_features,)))
    down, again = LoraDown(adapters, op.x, drops), list[Op]()
    low_again = down.low.name
    if op.x_again != op.x:
        down, made_again = down.reading_again(op.x_again)
        low_again, again = made_again.low.name, [made_again]
    if adapters.has_magnitude:
        assert not isinstance(op, Fp8Linear), "a job refuses magnitudes beside FP8 products"
        down = down.leaving_gradient() if dropout else down
        return [down, *again, Magnitude(op, adapters, low_again, drops)]
    if op.residual is None and _adds_to(op.y, adapters, ops):
        return [down, *again, LoraUp(adapters, low_again, op.y, None), op]
    y = op.outputs[0]
    if isinstance(op, Fp8Linear):
        product = op.leaving_residual().writing(f"{op.y}.product")
        up = LoraUp(adapters, low_again, op.y, y, product.y, in_place=True)
        return [down, *again, product, up if op.residual is None else up.adding(op.residual)]
    start = TensorSpec(f"{op.y}.start", y.shape)
    up = LoraUp(adapters, low_again, op.y, start, op.residual, op.bias)
    return [down, *again, up, op.onto(start.name)]


def _adds_to(y: str, adapters: Adapters, ops: Sequence[Op]) -> bool:
    """Whether a gated unit alone, beside what rounds the same sums, reads y and can add what these adapters do."""
    taken = [isinstance(op, GLU) and op.takes_addends for op in _readers(ops, y) if not isinstance(op, RoundGateUp)]
    return taken == [True] and adapters.added_to_halves() is not None


def _with_sums_in(unit: GLU, ops: list[Op]) -> list[Op]:
    """Let a unit add low @ B.T of adapters before it, and grad_low @ A of those behind it, or do the work of that A."""
    befores = [op.adapters for op in ops if isinstance(op, LoraUp) and op.grad_reads == (unit.gate_up,)]
    behind = [op for op in ops if isinstance(op, LoraDown) and op.x == unit.y]
    if len(behind) != 1 or behind[0].dropout.probability or len(_readers(ops, unit.y)) > 2:  # the layer's op, and it
        behind = []
    before = befores[0].added_to_halves() if befores else None
    if behind and GLUDown.takes(unit, behind[0].adapters):
        return [GLUDown(unit, before, behind[0].adapters) if op is unit else op for op in ops if op is not behind[0]]
    gradient = behind[0].adapters.added_to_gradient() if behind else None
    changed: dict[Op, Op] = {unit: unit.adding(before, gradient), **{op: op.leaving_gradient() for op in behind}}
    if before is not None:
        changed |= {op: op.adding(before) for op in ops if isinstance(op, RoundGateUp) and op.gate_up == unit.gate_up}
    return [changed.get(op, op) for op in ops]


def _keeping_low(ops: list[Op], outputs: dict[str, str]) -> Iterator[Op]:
    """Let low be kept where an output is that backward needs anyway: its layer's (outputs: by name), its router's, what
    the unit that makes low reads, or that of the unit that adds the gradient of what low is made of."""
    last = dict(op.in_place for op in ops if op.in_place)  # names by those that they write over
    needed = {tensor for op in ops for tensor in (*op.needs_input, *op.needs_weight)} - last.keys()
    producer = {spec.name: op for op in ops for spec in op.outputs}
    beside: dict[Op, list[TensorSpec]] = {}
    for op in ops:
        if isinstance(op, LoraDown | GLUDown) and not op.for_backward and op.adapters.low.name in needed:
            # What is made again for backward is made of codes, and never of what forward has.
            experts, own = op.adapters.experts, outputs[op.adapters.name]
            kept = experts.bounds if experts else last.get(own, own)
            if not experts and kept not in needed:
                kept = "" if isinstance(op, LoraDown) and op.grad_inputs else op.inputs[0]
            if kept in producer:
                beside.setdefault(producer[kept], []).append(op.adapters.low)
    return (op.changed(beside=(*op.beside, *beside[op])) if op in beside else op for op in ops)


def _readers(ops: Sequence[Op], tensor: str) -> list[Op]:
    """List the ops that read a tensor, in forward or backward."""
    return [op for op in ops if tensor in (*op.inputs, *op.needs_input, *op.needs_weight)]
