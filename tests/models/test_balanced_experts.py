"""The loss that balances experts against transformers, in one round and in several, and under any plan."""

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    build_engine,
    make_plan,
    random_batch,
    same_bits,
    saved_model,
    spec_of,
    streamed_plan,
    worst_error,
)
from family_configs import experts, gpt_oss, without_head_dim

from flexengine.models.registry import open_model
from flexengine.ops.experts.balance import Balancing, ExpertBalance

ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
CASES = {
    "olmoe": without_head_dim(experts("olmoe", **ASKED)),
    "qwen3_moe, a layer without experts": experts("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], **ASKED),
    "gpt_oss": gpt_oss(**ASKED),
}
LENGTHS = (48, 3, 20, 17)


def reference(folder, config, ids, labels):
    """transformers on one padded batch."""
    model, longest = saved_model(folder, config), max(map(len, ids))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    targets = torch.tensor([row + [-100] * (longest - len(row)) for row in labels])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    out = model(input_ids=padded, attention_mask=mask, labels=targets, use_cache=False)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if ".experts." not in name}


def sizes(chunks_per_round):
    return {"chunk_tokens": 24, "chunks_per_round": chunks_per_round, "max_seq_len": 48, "numerics": FLOAT32}


@pytest.mark.parametrize("chunks_per_round", [6, 2], ids=["one round", "several rounds"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case, chunks_per_round, tmp_path):
    config = CASES[case]
    ids = random_batch(4, LENGTHS, config["vocab_size"])
    labels = [[-100 if i % 3 == 1 else t for i, t in enumerate(row)] for row in ids]
    wanted, gradients = reference(tmp_path, config, ids, labels)
    assert wanted.aux_loss.item() > 0.5
    engine = build_engine(open_model(tmp_path), streamed_plan(spec_of(config), **sizes(chunks_per_round)))
    assert engine.fwd_bwd(input_ids=ids, labels=labels).loss == pytest.approx(wanted.loss.item(), abs=1e-5)
    ours = {name: g for name, g in engine.gradients().items() if ".experts." not in name}
    error, name = worst_error(ours, gradients)
    assert error <= 1e-4, f"gradient of {name}: relative error {error:.1e}"
    plain = engine.evaluate(input_ids=ids, labels=labels).loss
    assert plain == pytest.approx(wanted.loss.item() - 0.7 * wanted.aux_loss.item(), abs=1e-5)
    engine.close()


@pytest.mark.parametrize("chunks_per_round", [6, 2], ids=["one round", "several rounds"])
def test_plans_give_the_same_bits(chunks_per_round, tmp_path):
    config = CASES["olmoe"]
    saved_model(tmp_path, config)
    spec, found = spec_of(config), []
    for plan in (streamed_plan(spec, **sizes(chunks_per_round)), make_plan(spec, **sizes(chunks_per_round))):
        engine = build_engine(open_model(tmp_path), plan)
        losses = [engine.train_step(random_batch(step, LENGTHS, config["vocab_size"]))[0].loss for step in range(2)]
        found.append((losses, engine.state_dict()))
        engine.close()
    assert found[0][0] == found[1][0]
    same_bits(found[0][1], found[1][1])


def test_even_rows_and_probabilities_cost_the_coefficient():
    """The least that the loss can be is coefficient * K."""
    balance = ExpertBalance.of_batch(Balancing(0.25, num_experts=4, num_routers=2), 6, 5, torch.device("cpu"))
    for _ in range(2):
        balance.collect(torch.tensor([3, 3, 3, 3]), torch.full((6, 4), 0.25))
    assert float(balance.loss()) == pytest.approx(0.25 * 2 * 5)
    assert balance.gradient().tolist() == pytest.approx([0.25 * 4 * 6 / 12**2 * 5] * 4)
