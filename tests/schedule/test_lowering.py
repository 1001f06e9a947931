"""What a plan turns into: which copies there are, and how many."""

from collections import Counter

from flexengine.plan import GroupPlan, LayerPlan, Plan, Request
from flexengine.schedule.layout import Layout
from flexengine.schedule.programs import lower_round, lower_update
from tests.schedule.small_plans import full_round, resident_plan, small_model

REQUEST = Request(32, 512, 1 << 30, 1 << 40)


def kinds(program) -> Counter[str]:
    """Commands by label without names and numbers: `fetch weights`, `offload input`, ..."""
    return Counter(" ".join(c.label.split()[:2]) for c in program.commands if c.kind == "copy")


def test_resident_plan_copies_nothing_but_the_batch():
    layout = Layout(small_model(), resident_plan(small_model(), REQUEST))
    for first in (True, False):
        assert kinds(lower_round(layout, full_round(layout), first)) == {"fetch batch": 1}
    assert not kinds(lower_update(layout))


def test_streamed_plan_copies_each_thing_once_per_direction():
    model = small_model(blocks=4)
    layers = (LayerPlan(), *(LayerPlan((), ("rope",), "host"),) * 4, LayerPlan())
    plan = Plan("small", REQUEST, 64, 2, layers, (GroupPlan(),) * 6, weight_slots=2, optimizer_tile=1 << 20)
    layout = Layout(model, plan)
    copies = kinds(lower_round(layout, full_round(layout), first=False))
    # 4 blocks forward, 2 of them again backward (2 slots still hold the last ones), embedding and head
    assert copies["fetch weights"] == 4 + 2 + 2
    assert copies["offload input"] == copies["fetch input"] == 4 * 2
    assert copies["offload save"] == copies["fetch save"] == 4 * 2
    assert copies["fetch grad"] == copies["offload grad"] == 6
    update = kinds(lower_update(layout))
    assert update["fetch tile"] == update["return tile"] == 1 + 4 * 2 + 2  # matrices and vectors apart


def test_first_round_adds_no_earlier_gradients():
    model = small_model()
    layout = Layout(model, Plan("small", REQUEST, 64, 2, (LayerPlan(),) * 5, (GroupPlan(),) * 5))
    assert kinds(lower_round(layout, full_round(layout), first=True))["fetch grad"] == 0


def test_backward_does_every_op_of_every_chunk_once():
    model = small_model()
    layout = Layout(model, resident_plan(model, REQUEST))
    commands = Counter(c.kind for c in lower_round(layout, full_round(layout), True).commands)
    assert commands["forward"] == 4 * 2  # embedding and three blocks; the head's forward is in its backward
    assert commands["backward"] == 5 * 2
    assert commands["finish_gradient"] == 5
