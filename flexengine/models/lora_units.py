"""Lets gated units of a block take over what adapters before and behind them would pass over memory for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexengine.ops.adapters.dora import DoRALinear
from flexengine.ops.adapters.lora import LoRALinear
from flexengine.ops.adapters.lora_fp8 import Fp8LoRALinear
from flexengine.ops.adapters.lora_glu import LoRAGLU
from flexengine.ops.adapters.rounded_lora_glu import LoRAGLUFromCodes, RoundedLoRAGLU, RoundGateUpSum
from flexengine.ops.base import Op
from flexengine.ops.glu import GLU, ClampedSwiGLU
from flexengine.ops.rounded_glu import GLUFromCodes, RoundedGLU, RoundGateUp


def with_sums_in_units(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Let gated units take over what adapters before and behind them would pass over memory for."""
    changed: dict[Op, Op] = {}
    for unit in ops:
        if isinstance(unit, GLU) and type(unit) in (GLU, RoundedGLU):
            changed |= _taking_over(ops, unit)
    return tuple(_with_kept_low([changed.get(op, op) for op in ops]))


def _taking_over(ops: tuple[Op, ...], unit: GLU) -> dict[Op, Op]:
    """Pair what changes around a unit with what takes its place: it adds what the layer before leaves to it, and makes
    low for the layer behind."""
    before, after = _neighbours(ops, unit)
    if before is None and after is None:
        return {}
    rounded = isinstance(unit, RoundedGLU)
    changed: dict[Op, Op] = {} if before is None else {before: before.leaving_sum(needed=not rounded)}
    if not rounded:
        changed |= {} if after is None else {after: after.taking_low()}
        return changed | {unit: LoRAGLU(unit, before, after)}
    new = RoundedLoRAGLU(unit, before, after)
    for op in ops:
        if isinstance(op, RoundGateUp) and op.gate_up == unit.gate_up:
            changed[op] = RoundGateUpSum(op, before)
        elif isinstance(op, GLUFromCodes) and op.glu is unit and after is not None:
            again = LoRAGLUFromCodes(new, after)
            changed |= {op: again, after: after.taking_low(again.low.name)}
    return changed | {unit: new}


def _neighbours(ops: tuple[Op, ...], unit: GLU) -> tuple[LoRALinear | None, LoRALinear | None]:
    """Find the layers with adapters before and behind a unit from which it can take something over."""
    if isinstance(unit.activation, ClampedSwiGLU):
        return None, None
    others = [op for op in ops if not isinstance(op, RoundGateUp)]  # it reads what the unit reads, and adds the same
    makers = [op for op in others if any(output.name == unit.gate_up for output in op.outputs)]
    before, after = _sole_adapted(others, makers, unit.gate_up), _sole_adapted(others, _readers(others, unit.y), unit.y)
    if before is not None and (before.residual is not None or not before.halves()):
        before = None
    if after is not None and (after.dropout or after.x != unit.y):
        after = None
    return before, after


def _with_kept_low(ops: list[Op]) -> Iterator[Op]:
    """Let linear layers give low beside an output that backward needs in any case: both are kept or made again."""
    needed = {tensor for op in ops for tensor in (*op.needs_input, *op.needs_weight)}
    lost = {op.in_place[0] for op in ops if op.in_place}
    for op in ops:
        linear = op if isinstance(op, LoRALinear) and not isinstance(op, DoRALinear) else None
        if linear is None or linear.gives_low or linear.takes_low or linear.y not in needed - lost:
            yield op
        else:
            yield linear.giving_low()


def _readers(ops: Sequence[Op], tensor: str) -> list[Op]:
    """List the ops that read a tensor, in forward or backward."""
    return [op for op in ops if tensor in (*op.inputs, *op.needs_input, *op.needs_weight)]


def _sole_adapted(ops: Sequence[Op], candidates: list[Op], tensor: str) -> LoRALinear | None:
    """Give the one linear layer with adapters among candidates, where one op alone reads the tensor."""
    op = candidates[0] if len(candidates) == 1 and len(_readers(ops, tensor)) == 1 else None
    return op if isinstance(op, LoRALinear) and type(op) in (LoRALinear, Fp8LoRALinear) else None
