"""Weighted tokens and losses of one's own, against plain torch in float64: values, gradients, any plan."""

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    FLOAT64,
    build_engine,
    make_plan,
    random_batch,
    same_bits,
    saved_model,
    streamed_plan,
    tiny_config,
    worst_error,
)
from family_configs import gpt2

from flexengine.models.registry import open_model
from flexengine.ops.custom_loss import call_tokens

CONFIG = gpt2()  # transformers rotates positions in float32, even in a model of float64; here they are learned
BATCH = random_batch(0, (20, 7, 45, 33), CONFIG["vocab_size"])
LABELS = [[-100 if i % 3 == 0 else token for i, token in enumerate(row)] for row in BATCH]
WEIGHTS = [[0.25 * ((5 * i + len(row)) % 9) - 0.5 for i in range(len(row))] for row in BATCH]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return saved_model(folder, CONFIG).double(), open_model(str(folder))


@pytest.fixture
def model(saved):
    return saved[0]


@pytest.fixture
def make_engine(saved):
    def make(plan=streamed_plan, numerics=FLOAT64, **options):
        return build_engine(saved[1], plan(saved[1].spec, numerics=numerics), **options)

    return make


def log_probs(model, row):
    """Log-probabilities [S - 1, V] of what follows each token but the last."""
    return model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)


def token_log_probs(model, row):
    return log_probs(model, row).gather(1, torch.tensor(row[1:])[:, None])[:, 0]


def by_torch(model, total):
    """A loss and its gradients by name."""
    gradients = torch.autograd.grad(total, list(model.parameters()))
    return float(total.detach()), dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))


def check(engine, model, total, value=None):
    """The engine's gradients are those of the loss that torch computes."""
    expected, gradients = by_torch(model, total)
    if value is not None:
        assert value == pytest.approx(expected, rel=1e-10)
    error, name = worst_error(engine.gradients(), gradients)
    assert error < 1e-10, f"{name}: {error:.1e}"


def weighted_sum(model, batch=BATCH, labels=LABELS, weights=WEIGHTS):
    """(sum of weights * losses, sum of the sizes of the weights) over the tokens that have a loss."""
    total, size = 0.0, 0.0
    for row, kept, factors in zip(batch, labels, weights, strict=True):
        active = torch.tensor(kept[1:]) != -100
        factor = torch.tensor(factors[1:], dtype=torch.float64)[active]
        total, size = total - (factor * token_log_probs(model, row)[active]).sum(), size + float(factor.abs().sum())
    return total, size


# -- weights -----------------------------------------------------------------------------------------------------------


def test_weighted_tokens_match_torch(make_engine, model):
    engine = make_engine()
    out = engine.fwd_bwd(input_ids=BATCH, labels=LABELS, weights=WEIGHTS)
    total, size = weighted_sum(model)
    check(engine, model, total / size, out.loss)
    assert engine.evaluate(input_ids=BATCH, labels=LABELS, weights=WEIGHTS).loss == pytest.approx(out.loss, rel=1e-12)


def test_weights_of_one_change_no_bits(make_engine):
    plain, weighted = make_engine(numerics=FLOAT32), make_engine(numerics=FLOAT32)
    ones = [[1.0] * len(row) for row in BATCH]
    assert plain.train_step(BATCH)[0] == weighted.train_step(BATCH, weights=ones)[0]
    same_bits(weighted.state_dict(), plain.state_dict())


def test_weights_of_a_step_add_up_over_its_calls(make_engine, model):
    engine = make_engine()
    engine.fwd_bwd(input_ids=BATCH[:1], labels=LABELS[:1], weights=WEIGHTS[:1])
    engine.fwd_bwd(input_ids=BATCH[1:2], labels=LABELS[1:2])
    total, size = weighted_sum(model, BATCH[:1], LABELS[:1], WEIGHTS[:1])
    more, ones = weighted_sum(model, BATCH[1:2], LABELS[1:2], [[1.0] * len(BATCH[1])])
    check(engine, model, (total + more) / (size + ones))


def test_weights_change_no_bits_under_another_plan(make_engine):
    engines = [make_engine(plan, FLOAT32) for plan in (streamed_plan, make_plan)]
    for engine in engines:
        engine.train_step(input_ids=BATCH, labels=LABELS, weights=WEIGHTS)
    same_bits(engines[0].state_dict(), engines[1].state_dict())


def test_a_divisor_replaces_the_weight_of_a_step(make_engine, model):
    engine = make_engine(max_grad_norm=None)
    engine.fwd_bwd(input_ids=BATCH, labels=LABELS, weights=WEIGHTS)
    _, gradients = by_torch(model, weighted_sum(model)[0] / 7.0)
    norm = float(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt())
    assert engine.step(divisor=7.0).grad_norm == pytest.approx(norm, rel=1e-6)
    assert engine.train_step(BATCH, divisor=2.0, lr=0.0)[1].grad_norm == pytest.approx(
        engine.train_step(BATCH, divisor=1.0, lr=0.0)[1].grad_norm / 2, rel=1e-6
    )


def test_weights_follow_padding_and_packed_rows(make_engine):
    engine = make_engine()
    expected = engine.evaluate(input_ids=BATCH, labels=LABELS, weights=WEIGHTS).loss
    row, labels, weights = ([[value for part in rows for value in part]] for rows in (BATCH, LABELS, WEIGHTS))
    positions = [[i for part in BATCH for i in range(len(part))]]
    packed = {"input_ids": row, "labels": labels, "position_ids": positions}
    assert engine.evaluate(packed, weights=torch.tensor(weights, dtype=torch.float64)).loss == expected
    left = [[0] * (47 - len(part)) for part in BATCH]
    batch = {
        "input_ids": [f + part for f, part in zip(left, BATCH, strict=True)],
        "labels": [[-100] * len(f) + part for f, part in zip(left, LABELS, strict=True)],
        "attention_mask": [[0] * len(f) + [1] * len(part) for f, part in zip(left, BATCH, strict=True)],
        "weights": [[9.0] * len(f) + part for f, part in zip(left, WEIGHTS, strict=True)],
    }
    assert engine.evaluate(batch).loss == expected


def test_log_probabilities_have_no_weights(make_engine):
    engine = make_engine(numerics=FLOAT32)
    plain = engine.evaluate(input_ids=BATCH, labels=LABELS, per_token=True)
    weighted = engine.evaluate(input_ids=BATCH, labels=LABELS, weights=WEIGHTS, per_token=True)
    for some, others in zip(plain.token_log_probs, weighted.token_log_probs, strict=True):
        assert torch.equal(some, others)
    loss = engine.evaluate(input_ids=BATCH, labels=LABELS, weights=WEIGHTS).loss
    assert weighted.loss == pytest.approx(loss, rel=1e-5)


def test_a_loss_of_log_probabilities_is_a_weight_on_each_token(make_engine, model):
    """DPO on a pair: evaluate, differentiate by the log-probabilities, and train with the derivatives as weights."""
    engine, beta, reference = make_engine(), 0.1, torch.tensor([-60.0, -31.0], dtype=torch.float64)

    def dpo(sums):
        margins = beta * (sums - reference)
        return -torch.nn.functional.logsigmoid(margins[0] - margins[1])

    pair = BATCH[:2]
    found = [row.double().requires_grad_() for row in engine.evaluate(pair, per_token=True).token_log_probs]
    dpo(torch.stack([row.sum() for row in found])).backward()
    engine.fwd_bwd(pair, weights=[-row.grad for row in found])
    expected = by_torch(model, dpo(torch.stack([token_log_probs(model, row).sum() for row in pair])))[1]
    size = engine.state.loss_weight
    error, name = worst_error({name: grad * size for name, grad in engine.gradients().items()}, expected)
    assert error < 1e-6, f"{name}: {error:.1e}"  # the log-probabilities come in float32


# -- losses of one's own -----------------------------------------------------------------------------------------------


def cross_entropy(block):
    return torch.nn.functional.cross_entropy(block.logits, block.labels, reduction="sum")


@pytest.mark.parametrize("plan", [streamed_plan, make_plan])
def test_a_loss_of_logits_matches_the_head(make_engine, plan, monkeypatch):
    monkeypatch.setattr("flexengine.ops.custom_loss.CALL_BYTES", 4 * 67 * 8)  # calls of 8 tokens
    assert call_tokens(67) == 8
    engine, plain = make_engine(plan), make_engine(plan)
    out = engine.fwd_bwd(input_ids=BATCH, labels=LABELS, loss=cross_entropy)
    assert out.loss == pytest.approx(plain.fwd_bwd(input_ids=BATCH, labels=LABELS).loss, rel=1e-12)
    error, name = worst_error(engine.gradients(), plain.gradients())
    assert error < 1e-12, f"{name}: {error:.1e}"
    found = engine.evaluate(input_ids=BATCH, labels=LABELS, loss=cross_entropy).loss
    assert found == pytest.approx(out.loss, rel=1e-12)


def test_distillation_finds_the_teachers_rows(make_engine, model):
    """The divergence from a teacher's distributions, which the function finds by sequence and position."""
    teacher = [torch.randn(len(row), CONFIG["vocab_size"], dtype=torch.float64).log_softmax(-1) for row in BATCH]
    padded = torch.nn.utils.rnn.pad_sequence(teacher, batch_first=True)

    def divergence(block):
        wanted = padded[block.sequences, block.positions]
        found = block.logits.log_softmax(-1)
        return torch.nn.functional.kl_div(found, wanted, reduction="sum", log_target=True)

    engine = make_engine()
    out = engine.fwd_bwd(input_ids=BATCH, labels=LABELS, loss=divergence)
    total = 0.0
    for row, kept, wanted in zip(BATCH, LABELS, teacher, strict=True):
        active = torch.tensor(kept[1:]) != -100
        found, goal = log_probs(model, row)[active], wanted[1:][active]
        total = total + torch.nn.functional.kl_div(found, goal, reduction="sum", log_target=True)
    check(engine, model, total / out.num_target_tokens, out.loss)


def test_a_clipped_ratio_reads_weights(make_engine, model):
    """GRPO's clipped ratio with the advantage as weight, and log-probabilities of the policy that sampled."""
    engine = make_engine()
    old = [row.double() + 0.3 * torch.sin(torch.arange(len(row))) for row in engine.evaluate(BATCH, per_token=True)[3]]
    padded = torch.nn.utils.rnn.pad_sequence(old, batch_first=True)

    def clipped(new, before, advantages):
        ratio = (new - before).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()

    def loss(block):
        new = block.logits.log_softmax(-1).gather(1, block.labels[:, None])[:, 0]
        return clipped(new, padded[block.sequences, block.positions], block.weights)

    engine.fwd_bwd(BATCH, weights=WEIGHTS, loss=loss)
    size = sum(sum(map(abs, row[1:])) for row in WEIGHTS)
    parts = [
        clipped(token_log_probs(model, row), before[1:], torch.tensor(weights[1:], dtype=torch.float64))
        for row, before, weights in zip(BATCH, old, WEIGHTS, strict=True)
    ]
    check(engine, model, torch.stack(parts).sum() / size)


def test_a_loss_sees_capped_logits(tmp_path):
    config = tiny_config(
        model_type="gemma2", final_logit_softcapping=1.5, attn_logit_softcapping=None, query_pre_attn_scalar=6,
        hidden_activation="gelu_pytorch_tanh", sliding_window=64, tie_word_embeddings=True,
    )  # fmt: skip
    saved_model(tmp_path, config)
    source = open_model(str(tmp_path))
    engines = [build_engine(source, streamed_plan(source.spec, numerics=FLOAT64)) for _ in range(2)]
    expected, found = engines[0].fwd_bwd(BATCH).loss, engines[1].fwd_bwd(BATCH, loss=cross_entropy).loss
    assert found == pytest.approx(expected, rel=1e-12)
    error, name = worst_error(engines[1].gradients(), engines[0].gradients())
    assert error < 1e-12, f"{name}: {error:.1e}"


# -- errors ------------------------------------------------------------------------------------------------------------

WRONG = {
    "weights_of_another_length": ({"weights": [[1.0]]}, "1 of weights"),
    "weights_of_a_shorter_row": ({"weights": [[1.0] * (len(row) - 1) for row in BATCH]}, "weights must have the shape"),
    "weights_that_are_not_finite": (
        {"weights": [[float("nan")] * len(row) for row in BATCH]},
        r"weights\[0\].* finite",
    ),
    "weights_that_are_words": ({"weights": [["a"] * len(row) for row in BATCH]}, r"weights\[0\] must be .* numbers"),
    "weights_that_are_all_zero": ({"weights": [[0] * len(row) for row in BATCH]}, "every token with a loss .*weight 0"),
    "loss_that_is_no_function": ({"loss": "dpo"}, "loss must be a function of a block of logits, got str"),
    "loss_that_is_no_sum": ({"loss": lambda block: block.logits.sum(1)}, r"tensor of shape \[\d+\]; return the sum"),
    "loss_that_is_a_number": ({"loss": lambda block: 1.0}, "loss returned a float"),
    "loss_without_a_gradient": ({"loss": lambda block: block.logits.detach().sum()}, "does not depend on the logits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_and_losses(make_engine, name):
    arguments, message = WRONG[name]
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.fwd_bwd(input_ids=BATCH, **arguments)
    engine.fwd_bwd(BATCH)


def test_wrong_combinations(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match=r"weights stand in the batch and beside it"):
        engine.evaluate({"input_ids": BATCH, "weights": WEIGHTS}, weights=WEIGHTS)
    with pytest.raises(ValueError, match=r"per_token gives log-probabilities"):
        engine.evaluate(BATCH, per_token=True, loss=cross_entropy)
    engine.fwd_bwd(BATCH)
    with pytest.raises(ValueError, match=r"divisor must be a finite number above 0, got 0"):
        engine.step(divisor=0)


@pytest.mark.gpu
def test_weights_and_losses_of_logits_on_the_gpu(make_engine, saved):
    """As on the CPU: the kernel's weights, and autograd inside the head's blocks."""
    source, padded = saved[1], torch.zeros(len(BATCH), 48, device="cuda")

    def weighted(block):
        losses = torch.nn.functional.cross_entropy(block.logits, block.labels, reduction="none")
        return (block.weights * losses + padded[block.sequences, block.positions]).sum()

    engines = [make_engine(numerics=FLOAT32)]
    engines += [build_engine(source, streamed_plan(source.spec, numerics=FLOAT32), device="cuda") for _ in range(2)]
    for engine, loss in zip(engines, (None, None, weighted), strict=True):
        engine.fwd_bwd(input_ids=BATCH, labels=LABELS, weights=WEIGHTS, loss=loss)
    for engine in engines[1:]:
        error, name = worst_error(engine.gradients(), engines[0].gradients())
        assert error < 1e-4, f"{name}: {error:.1e}"
