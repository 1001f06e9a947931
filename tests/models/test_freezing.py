"""Which groups names stand for, what becomes of a model's description, and what is refused; against transformers."""

import pytest
import safetensors
import torch
from engine_helpers import (
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    saved_model,
    spec_of,
    streamed_plan,
    tiny_config,
)
from family_configs import CASES, FEW, OF_BLOCKS
from thorough import cases

from flexengine.models.freezing import forward_only, with_frozen
from flexengine.models.matmul_dtype import with_fp8_linears
from flexengine.models.registry import open_model
from flexengine.optim import AdamW
from flexengine.plan import GroupPlan, Numerics
from flexengine.planner.blocks import block_kinds
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layout import Layout
from flexengine.schedule.save_sets import savable_ops

SETTINGS = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)


def four_blocks(tied: bool = False):
    return spec_of(tiny_config(num_hidden_layers=4, tie_word_embeddings=tied))


def frozen_names(model) -> list[str]:
    return [group.name for group in model.groups if group.frozen]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), []),
        (("embed",), ["embed"]),
        (("block.2", "block.2"), ["block.2"]),
        (("block.1-3",), ["block.1", "block.2", "block.3"]),
        (("block.0-0", "head"), ["block.0", "head"]),
        (("blocks", "embed"), ["embed", "block.0", "block.1", "block.2", "block.3"]),
        ("head", ["head"]),
    ],
    ids=str,
)
def test_names(names, expected):
    assert frozen_names(with_frozen(four_blocks(), names)) == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["block.4"], r"freeze='block.4': tiny has no such parameters.*embed, head, blocks .*block.0 to block.3"),
        (["block.2-4"], r"freeze='block.2-4': tiny has no such"),
        (["block.2-1"], r"freeze='block.2-1': tiny has no such"),
        (["block.0-99999999999"], r"no such parameters"),
        (["blocs"], r"'blocs': tiny has no such parameters; did you mean block"),
        (["block"], r"no such parameters"),
        ([""], r"freeze='': tiny has no such"),
        (["embed", "blocks", "head"], r"freeze=embed blocks head: that is all of tiny, and nothing is left to train"),
    ],
)
def test_refused_names(names, message):
    with pytest.raises(ValueError, match=message):
        with_frozen(four_blocks(), names)


def test_layers_below_all_that_is_trained_have_no_backward_and_frozen_ones_above_no_weight_halves():
    whole = four_blocks()
    model = with_frozen(whole, ["embed", "block.0-1", "block.3"])
    assert [layer.has_backward for layer in model.layers] == [False, False, False, True, True, True]
    assert [layer.keeps for layer in model.layers] == [False, False, False, True, True, False]
    assert model.blocks[0].ops is model.blocks[1].ops  # what is derived from ops is derived once
    assert model.blocks[2].ops == whole.blocks[2].ops
    kinds, kind_of = block_kinds(model)
    assert (len(kinds), kind_of.tolist()) == (3, [0, 0, 1, 2])
    forward_only, trained, frozen = (compile_layer(model.blocks[i], (), (), 8, 4) for i in (0, 2, 3))
    assert forward_only.backward == ()
    assert {step.half for step in frozen.backward} == {"forward", "input"}
    assert [s.op.name for s in frozen.backward if s.half == "input"] == [
        s.op.name for s in trained.backward if s.half == "input"
    ]
    # what only weight halves read is neither kept nor recomputed
    assert set(savable_ops(trained_ops := model.blocks[2].ops)) - set(savable_ops(model.blocks[3].ops)) == {"swiglu"}
    again = [step.op.name for step in frozen.backward if step.recompute]
    assert "swiglu" not in again
    assert len(again) == len([s for s in trained.backward if s.recompute]) - 1
    assert savable_ops(model.blocks[0].ops) == ()
    assert [op.name for op in trained_ops] == [op.name for op in model.blocks[3].ops]


def test_a_frozen_embedding_is_frozen_for_a_tied_head_too():
    model = with_frozen(four_blocks(tied=True), ["embed"])
    halves = {op.name: op.has_weight_half for op in model.layers[-1].ops}
    assert halves == {"final_norm": True, "lm_head": False}
    model = with_frozen(four_blocks(tied=True), ["head"])
    halves = {op.name: op.has_weight_half for op in model.layers[-1].ops}
    assert halves == {"final_norm": False, "lm_head": True}
    assert all(layer.has_backward for layer in model.layers)


@pytest.mark.parametrize("numerics", [Numerics(), Numerics(master="stochastic"), Numerics("float32", "full")], ids=str)
def test_frozen_groups_have_weights_alone(numerics):
    group = with_frozen(four_blocks(), ["block.1"]).groups[2]
    planes = dict(group_storage(group, numerics).plane_bytes)
    assert planes.pop("weights") == group.numel * (2 if numerics.compute == "bfloat16" else 4)
    assert set(planes.values()) == {0}


def test_a_groups_layout_is_shared_and_cannot_be_written_to():
    group = four_blocks().groups[2]
    layout = group_storage(group, Numerics())
    assert group_storage(group, Numerics()) is layout
    for mapping in (layout.plane_bytes, layout.offsets):
        with pytest.raises(TypeError):
            mapping["weights"] = 0
        with pytest.raises(AttributeError):
            mapping.pop("weights")


def test_a_plan_for_another_model_is_refused():
    whole = four_blocks()
    model = with_frozen(whole, ["block.1"])
    with pytest.raises(ValueError, match=r"block.1 of tiny is frozen, but the plan has update=gpu for it"):
        Layout(model, make_plan(whole))
    with pytest.raises(ValueError, match=r"block.1 of tiny is trained, but the plan has update=none for it"):
        Layout(whole, make_plan(model))
    with pytest.raises(ValueError, match=r"no gradients and no optimizer states"):
        GroupPlan("gpu", "gpu", update="none")


def test_model_flops_by_hand():
    """D=24, F=40, 4 heads of 6 with 2 key/value heads, V=67, 4 layers."""
    matrices, tokens = 24 * (4 + 2 * 2) * 6 + 24 * 24 + 24 * 80 + 40 * 24, 6
    block, head, pairs = 2 * tokens * matrices, 2 * tokens * 67 * 24, 2 * 24 * tokens * tokens
    whole = four_blocks()
    assert whole.model_flops([tokens]) == 3 * (4 * block + head + 4 * pairs)
    low = with_frozen(whole, ["embed", "block.0-1"])
    assert low.model_flops([tokens]) == 3 * (2 * block + head + 2 * pairs) + 2 * (block + pairs)
    high = with_frozen(whole, ["block.3", "head"])
    assert high.model_flops([tokens]) == 3 * (3 * block + 4 * pairs) + 2 * (block + head)


def test_frozen_fp8_layers_round_their_gradients_once():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    whole = with_fp8_linears(spec_of(tiny_config(**sizes)))
    model = with_frozen(whole, ["block.1"])
    names = [{name for s in compile_layer(b, (), (), 16, 2).backward for name, _ in s.tensors} for b in model.blocks]
    assert "down_proj_grad8_t" in names[0]
    assert "down_proj_grad8_t" not in names[1]


@pytest.mark.parametrize("name", cases(OF_BLOCKS.values(), [OF_BLOCKS[family] for family in FEW]))
def test_layers_without_backward_compute_what_they_do_with_one(name):
    """Of every family: a frozen beginning, and a model of which nothing is trained."""
    whole = random_weights(CASES[name])
    batch = random_batch(2, (20, 33, 5), whole.spec.vocab_size)

    def engine_of(spec):
        return build_engine(whole._replace(spec=spec), streamed_plan(spec))

    with engine_of(whole.spec) as engine:
        loss, gradients = engine.fwd_bwd(batch).loss, engine.gradients()
    with engine_of(with_frozen(whole.spec, ["embed", "block.0"])) as engine:
        assert engine.fwd_bwd(batch).loss == loss
        above = engine.gradients()
        same_bits(above, {name: gradients[name] for name in above})
        assert 0 < len(above) < len(gradients)
    with engine_of(forward_only(whole.spec)) as engine:
        assert engine.evaluate(batch).loss == loss


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("names", [("embed", "block.0"), ("block.1", "head"), ("blocks",), ("embed",)], ids=" ".join)
def test_three_steps_are_those_of_transformers(names, tied, tmp_path):
    """Parameters without requires_grad there; the export has them bit for bit."""
    model = saved_model(tmp_path / "source", tiny_config(num_hidden_layers=3, tie_word_embeddings=tied))
    source = open_model(tmp_path / "source")
    source = source._replace(spec=with_frozen(source.spec, names))
    frozen = {s.name for g in source.spec.groups if g.frozen for param in g.params for s in param.sources}
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)
    trained = [p for p in parameters.values() if p.requires_grad]
    decays = [
        {"params": [p for p in trained if (p.dim() > 1) == big], "weight_decay": w} for big, w in ((1, 0.1), (0, 0))
    ]
    optimizer = torch.optim.AdamW(decays, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)
    engine = build_engine(source, streamed_plan(source.spec), SETTINGS)
    for step in range(3):
        tokens = torch.tensor(random_batch(step, (24, 24), 67))
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        out, result = engine.train_step(input_ids=tokens, labels=tokens)
        optimizer.step()
        assert out.loss == pytest.approx(loss.item(), abs=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for name, value in engine.state_dict().items():
        assert (value - parameters[name]).abs().max() <= (0 if name in frozen else 1e-5)
    engine.save_pretrained(tmp_path / "export")
    engine.close()
    before, after = (
        safetensors.safe_open(tmp_path / folder / "model.safetensors", framework="pt")
        for folder in ("source", "export")
    )
    assert set(before.keys()) == set(after.keys())
    for name in before.keys():  # noqa: SIM118 (not a dictionary)
        assert torch.equal(before.get_tensor(name), after.get_tensor(name)) == (name in frozen)
