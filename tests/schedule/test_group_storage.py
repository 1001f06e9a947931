"""A group's storage follows from what its optimizer rule declares."""

import json
from dataclasses import asdict

import pytest

from flexengine.models.freezing import with_frozen
from flexengine.optim.rules import rule_of
from flexengine.plan import Numerics, Plan, Request
from flexengine.schedule.group_storage import Plane, Segment, group_storage, tile_offsets
from tests.schedule.small_plans import FLOAT32, resident_plan, small_model

SPLIT = Numerics("bfloat16", "split", "bfloat16", "bfloat16")


def test_planes_are_weights_remainder_the_rules_states_and_the_gradient():
    stored = group_storage(small_model().groups[1], SPLIT)
    assert list(stored.plane_bytes) == ["weights", "remainder", "exp_avg", "exp_avg_sq", "grad"]
    assert stored.rule_states == ("exp_avg", "exp_avg_sq")
    assert [(s.name, s.rule.name, s.decays) for s in stored.segments] == [
        ("matrix", "AdamW", True),
        ("vector", "AdamW", False),
    ]


def test_a_frozen_group_has_weights_alone():
    stored = group_storage(with_frozen(small_model(), ["embed"]).groups[0], SPLIT)
    assert {kind: num for kind, num in stored.plane_bytes.items() if num} == {"weights": 2 * stored.numel}
    assert stored.state_kinds == ()
    assert stored.segments[0].rule is None


def test_a_plane_of_blocks_has_an_entry_for_every_block_begun():
    plane = Plane("scales", 0, "float32", block=256)
    assert [plane.num_bytes(n) for n in (0, 1, 256, 257, 512)] == [0, 4, 4, 8, 8]


def test_tiles_cover_a_segment():
    segment = Segment("matrix", 0, 1000, (), rule_of("adamw", "matrix", "float32", "float32"))
    assert segment.tiles(400) == [(0, 400), (400, 400), (800, 200)]


def test_an_optimizer_tile_has_room_for_the_widest_plane_of_each_kind():
    groups = [group_storage(group, SPLIT) for group in small_model().groups]
    offsets = tile_offsets(groups, 1 << 12)
    ends = [*list(offsets.values())[1:]]
    widths = [(end - start) // (1 << 12) for start, end in zip(offsets.values(), ends, strict=False)]
    assert dict(zip(offsets, widths, strict=False)) == {
        "weights": 2, "remainder": 2, "exp_avg": 4, "exp_avg_sq": 4, "grad": 2,
    }  # fmt: skip


def test_a_plan_keeps_the_optimizers_name_and_older_files_mean_adamw():
    plan = resident_plan(small_model(), Request(64, 128, 1 << 30, 1 << 30, numerics=FLOAT32))
    assert Plan.from_json(plan.to_json()) == plan
    older = asdict(plan)
    assert older["request"]["numerics"].pop("optimizer") == "adamw"
    assert Plan.from_json(json.dumps(older)) == plan


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="optimizer='adagrad' is not known"):
        rule_of("adagrad", "matrix", "float32", "float32")
