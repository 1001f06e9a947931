"""Which commands of a step are launched ahead, for their kernels to be compiled."""

from dataclasses import replace

from engine_helpers import random_weights, streamed_plan
from family_configs import CASES

from flexengine.models import blocks
from flexengine.runtime.launches import _full_batch, _kinds
from flexengine.schedule.ranks.transports import layout_of


def test_parts_that_begin_end_and_continue_sums_are_launched(monkeypatch):
    monkeypatch.setattr(blocks, "PART_ELEMENTS", 1)
    spec = random_weights(CASES["olmoe, many experts"]).spec
    plan = replace(streamed_plan(spec, max_tokens=64), in_parts=True)
    layout = layout_of(spec, plan)
    commands = [command for _, command in _kinds(layout, _full_batch(plan)[1], clips=True)]
    for kind, wanted in (("forward", [0, 1, 2, 17]), ("backward", [0, 1, 16, 17])):
        parts = {command.args.part for command in commands if command.kind == kind}
        assert sorted(parts) == wanted
