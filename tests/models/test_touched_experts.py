"""Rounds of few tokens under plans of which experts that no token goes to stay on the host."""

from dataclasses import replace

import pytest
from engine_helpers import build_engine, random_batch, same_bits, saved_model, shuffled_order, spec_of, streamed_plan
from family_configs import CASES, experts, without_head_dim
from thorough import cases

from flexengine import LoRA
from flexengine.models import blocks
from flexengine.models.in_parts import in_parts
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.optim import AdamW
from flexengine.plan import Numerics, Plan
from flexengine.runtime import fetch_experts as fetch_module
from flexengine.runtime.execution import handlers as handlers_module
from flexengine.runtime.fetch_experts import fetch_experts
from flexengine.schedule.checker import ProgramError, check_program
from flexengine.schedule.expert_fetch import touched_share
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import ChunkShape, RoundShape
from flexengine.schedule.programs import lower_evaluation, lower_round

OLMOE = without_head_dim(experts("olmoe", num_experts=16, num_experts_per_tok=2))
CONFIGS = {"olmoe": OLMOE, "with biases": {**CASES["gpt_oss"], "num_local_experts": 16}}
ADAPTED = {"olmoe": None, "with biases": None, "olmoe with adapters": LoRA(["q_proj", "all-experts"], 3, use_dora=True)}
SIZES = {"chunk_tokens": 2, "chunks_per_round": 2, "max_seq_len": 4}


@pytest.fixture(autouse=True)
def four_experts_each(monkeypatch):
    """Parts of four experts."""
    monkeypatch.setattr(blocks, "expert_divisions", lambda s, _: 1 if s.experts is None else 4)


def trained(source, plan, **options):
    """Losses, an evaluation and weights after two steps of rounds of at most four tokens."""
    engine = build_engine(source, plan, AdamW(lr=1e-2), **options)
    found = []
    for step in range(2):
        found.append(engine.fwd_bwd(random_batch(step, [4, 2, 3], engine.model.vocab_size)).loss)
        engine.step()
    found.append(engine.evaluate(random_batch(9, [2, 2], engine.model.vocab_size)).loss)
    weights = engine.state_dict()
    engine.close()
    return found, weights


class Fetches:
    """Stands in for the engine's fetch: makes NaN of all that a slot holds, and counts bytes."""

    def __init__(self):
        self.possible_bytes = self.fetched_bytes = 0

    def __call__(self, args, slots, arenas):
        for target in {region.target for region in args.regions}:
            arenas.bytes_view("gpu", slots[target].offset, slots[target].num_bytes).fill_(255)
        fetch_experts(args, slots, arenas)
        for region in args.regions:
            place = slots[region.target].offset + region.target_offset
            shares = arenas.bytes_view("gpu", place, region.num_bytes).view(args.experts, -1)
            self.possible_bytes += region.num_bytes
            self.fetched_bytes += int((shares != 255).any(1).sum()) * shares.shape[1]


@pytest.mark.parametrize("name", cases(ADAPTED, ["with biases", "olmoe with adapters"]))
def test_untouched_experts_stay_on_the_host(name, tmp_path, monkeypatch):
    """With adapters also these of them, which are most of what is fetched here."""
    saved_model(tmp_path, CONFIGS[name.removesuffix(" with adapters")])
    source, lora = open_model(tmp_path), ADAPTED[name]
    source = source if lora is None else source._replace(spec=with_lora(source.spec, lora))
    whole = streamed_plan(source.spec, in_parts=True, **SIZES)
    expected = trained(source, whole)
    monkeypatch.setattr(handlers_module, "fetch_experts", fetches := Fetches())
    for slots, order in ((1, None), (5, shuffled_order(2))):
        losses, weights = trained(source, replace(whole, touched_only=True, weight_slots=slots), order=order)
        assert losses == expected[0]
        same_bits(weights, expected[1])
    assert 0 < fetches.fetched_bytes < 0.6 * fetches.possible_bytes


def test_the_kernel_gives_the_same_bits(tmp_path, monkeypatch):
    """In bf16, with shares of an odd number of elements, in Triton's interpreter."""
    config = {**CONFIGS["with biases"], "hidden_size": 21, "num_hidden_layers": 1}
    saved_model(tmp_path, config)
    whole = streamed_plan(spec_of(config), in_parts=True, numerics=Numerics(), **SIZES)
    source = open_model(tmp_path)
    expected = trained(source, whole)
    monkeypatch.setattr(fetch_module, "use_kernel", lambda target: True)
    monkeypatch.setattr(handlers_module, "fetch_experts", fetches := Fetches())
    losses, weights = trained(source, replace(whole, touched_only=True))
    assert losses == expected[0]
    same_bits(weights, expected[1])
    assert 0 < fetches.fetched_bytes < fetches.possible_bytes


def test_the_plan_says_so():
    spec = spec_of(OLMOE)
    plan = streamed_plan(spec, in_parts=True, touched_only=True, **SIZES)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="in_parts"):
        replace(plan, in_parts=False)
    assert touched_share(8, 2, 1) == pytest.approx(0.25)
    assert touched_share(8, 2, 2) == pytest.approx(0.25 + 0.75 * 0.25)
    assert touched_share(8, 8, 1) == 1


def programs(**decisions):
    """The layout of a plan, and a round's programs of training and evaluation."""
    layout = Layout(in_parts(spec_of(OLMOE)), streamed_plan(spec_of(OLMOE), in_parts=True, **SIZES, **decisions))
    shape = RoundShape((ChunkShape(2, 2), ChunkShape(2, 2)))
    return layout, (lower_round(layout, shape, first=True), lower_evaluation(layout, shape))


def test_programs_fetch_parts_of_experts_in_the_place_of_copies():
    whole, touched = programs(), programs(touched_only=True)
    assert whole[0].slots == touched[0].slots
    share = touched_share(16, 2, 4)
    for copied, fetched in zip(whole[1], touched[1], strict=True):
        check_program(fetched, touched[0].gpu_bytes, touched[0].host_bytes)
        pairs = zip(copied.commands, fetched.commands, strict=True)
        kinds = {}
        for before, after in pairs:
            assert (before.label, before.stream, before.writes) == (after.label, after.stream, after.writes)
            if before.kind != after.kind:
                kinds[after.kind] = before.kind
                assert "/0" not in after.label
                assert after.copy_bytes == pytest.approx(share * before.copy_bytes, abs=1)
        assert kinds == {"fetch_experts": "copy"}


def test_a_part_is_fetched_while_the_one_before_is_computed():
    _, (program, _) = programs(touched_only=True, weight_slots=3)
    first, second = [c for c in program.commands if c.kind == "fetch_experts"][:2]
    routers = [c for c in program.commands if c.kind == "forward" and c.args.layer == 1 and c.args.stage == 0]
    assert first.waits == (routers[-1].index,)
    assert second.waits == ()


@pytest.mark.parametrize("change", ["too many experts", "no bounds", "uneven"])
def test_checker_rejects_a_wrong_fetch(change):
    layout, (program, _) = programs(touched_only=True)
    fetch = next(c for c in program.commands if c.kind == "fetch_experts")
    changes = {
        "too many experts": {"args": fetch.args._replace(experts=128)},
        "no bounds": {"reads": fetch.reads[:-1]},
        "uneven": {"args": fetch.args._replace(experts=7)},
    }
    commands = tuple(replace(c, **changes[change]) if c is fetch else c for c in program.commands)
    with pytest.raises(ProgramError):
        check_program(replace(program, commands=commands), layout.gpu_bytes, layout.host_bytes)
