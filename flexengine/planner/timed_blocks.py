"""Prices opaque blocks by calls that were timed on the machine that will run them."""

from __future__ import annotations

from collections.abc import Callable

from flexengine.hardware.profile import HardwareProfile
from flexengine.hardware.timed_calls import CallRun, OpaqueCall, TimedCalls, timed_opaque_calls
from flexengine.models.spec import ModelSpec
from flexengine.ops.base import Op
from flexengine.ops.opaque import OpaqueBlock
from flexengine.ops.opaque_cost import CostCurve, TimedCall, TimedCosts
from flexengine.planner.cost.cost_model import CostModel


def opaque_calls(model: ModelSpec) -> list[OpaqueCall]:
    """The opaque blocks of a model, each once, as the first layer has it whose op it is."""
    found: dict[OpaqueBlock, OpaqueCall] = {}
    for index, layer in enumerate(model.layers):
        params = {(g, param.name): param.shape for g in layer.groups for param in model.groups[g].params}
        shapes = {local: params[group, name] for local, group, name in layer.params}
        buffers = {name: source.shape for name, source in layer.buffers}
        for op in layer.ops:
            if isinstance(op, OpaqueBlock):
                found.setdefault(op, OpaqueCall(op, index, shapes, buffers))
    return list(found.values())


def with_timed_blocks(
    model: ModelSpec, run: CallRun, told: Callable[[Callable[[], TimedCalls], type], TimedCalls]
) -> tuple[ModelSpec, HardwareProfile]:
    """The model with what its opaque blocks take on this machine, and the profile of a process that has run them.

    told: what the first of several ranks finds, on all of them.
    """
    calls = opaque_calls(model)
    if not calls:
        return model, run.profile
    run = run._replace(tokens=min(run.tokens, model.longest_sequence or run.tokens))
    found = told(lambda: timed_opaque_calls(calls, run), TimedCalls)
    timed: dict[Op, Op] = {
        call.op: call.op.costing(_costs(call.op, one, run))
        for call, one in zip(calls, found.calls, strict=True)
        if one is not None
    }
    return model.with_ops(lambda op: timed.get(op, op)), found.with_kernels(run.profile)


def _costs(op: OpaqueBlock, call: TimedCall, run: CallRun) -> TimedCosts:
    assert isinstance(op.cost, CostCurve), "calls are timed once"
    seconds = CostModel(run.profile, run.dtype.itemsize, call.tokens, call.tokens).work_s
    return TimedCosts(op.cost, call, seconds, run.profile.memory.bytes_per_s)
