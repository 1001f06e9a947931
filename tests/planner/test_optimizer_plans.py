"""Plans know what each optimizer stores, where it may be updated, and what its update takes."""

from dataclasses import replace

import pytest

from flexengine.hardware.presets import preset
from flexengine.models.registry import open_model
from flexengine.plan import Numerics, Request
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.planner import make_plan
from flexengine.schedule.commands import Stream
from flexengine.schedule.layout import Layout
from flexengine.schedule.programs import lower_update
from flexengine.schedule.simulator import simulate

GIB = 2**30
MODEL = open_model("preset:llama-3.2-1b").spec
REQUEST = Request(
    2048, 32768, 8 * GIB, 60 * GIB, 8192, 32768, numerics=Numerics(state="bfloat16"), clipping=False, graphs="never"
)
CHANGES = {"adamw": {}, "8-bit": {"state": "int8"}, "muon": {"optimizer": "muon"}}


@pytest.fixture(scope="module")
def plans(quick_search_in_module):
    requests = {k: replace(REQUEST, numerics=replace(REQUEST.numerics, **v)) for k, v in CHANGES.items()}
    return {name: make_plan(MODEL, request, preset("rtx-4090")) for name, request in requests.items()}


def test_plans_keep_within_their_budgets(plans):
    for name, plan in plans.items():
        layout = Layout(MODEL, plan)
        assert layout.gpu_bytes <= plan.predicted.gpu_bytes <= 8 * GIB, name
        assert layout.host_bytes <= plan.predicted.host_bytes <= 60 * GIB, name


def test_smaller_states_take_fewer_bytes_and_hardly_more_time(plans):
    """The CPU decodes and encodes 8-bit states no faster than it moves bfloat16 ones."""
    states = {}
    for name in ("adamw", "8-bit"):
        layout = Layout(MODEL, plans[name])
        states[name] = sum(sum(g.plane_bytes[kind] for kind in g.rule_states) for g in layout.groups[1:])
    assert 0.50 <= states["8-bit"] / states["adamw"] <= 0.52
    assert 0.99 <= plans["8-bit"].predicted.step_s / plans["adamw"].predicted.step_s <= 1.05


def test_the_cpu_is_not_asked_for_products(plans):
    assert plans["adamw"].updates_on_cpu  # it would be
    assert not any(home.update == "cpu" for home in plans["muon"].groups)


def test_an_update_by_products_costs_their_time(plans):
    layout = Layout(MODEL, plans["muon"])
    flops = sum(group.update_flops for group in layout.groups)
    assert flops == pytest.approx(16 * 5 * _flops_of_a_block())
    program, cost = lower_update(layout), CostModel(preset("rtx-4090"), 2, 4096, 2048)
    busy_s = simulate(program, cost.rates()).busy_s[Stream.COMPUTE]
    assert busy_s >= flops / cost.matmul_rate


def _flops_of_a_block():
    """An iteration on the matrices of a block: 4 n^2 m + 2 n^3 for each, n the smaller side."""
    shapes = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (2048, 8192), (2048, 8192), (2048, 8192)]
    return sum(4 * n * n * m + 2 * n**3 for n, m in shapes)


def test_tiles_have_room_for_the_largest_matrix(plans):
    layout = Layout(MODEL, plans["muon"])
    largest = 2048 * 8192
    assert layout.place("update_scratch").num_bytes == 4 * largest + 4 * 2048 * 2048
    if plans["muon"].uses_tiles:
        assert layout.tile_bytes >= 8 * largest
