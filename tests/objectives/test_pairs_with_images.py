"""Preferences of answers about images: losses and gradients are those of the formula on transformers' model."""

from typing import Any

import pytest
import torch
import transformers
from engine_helpers import worst_error
from image_models import IMAGE_TOKENS, write_llava

from flexengine import from_pretrained
from flexengine.objectives import (
    DPO,
    GRPO,
    KTO,
    ORPO,
    AnswerRows,
    Groups,
    evaluate,
    reference_log_probs,
    train_step,
    weighted,
)
from flexengine.objectives.grpo import weighed_groups

IMAGE_ID = 3
PROMPT = [1, 5, *[IMAGE_ID] * IMAGE_TOKENS, 7, 8, 9]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """An engine, transformers' model, rows of two pairs of which one has an image, and a reference that says else."""
    folder = write_llava(tmp_path_factory.mktemp("llava"))
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder).float()
    texts = [(PROMPT, [14, 2]), (PROMPT, [15, 16, 2]), ([1, 7, 8], [17, 2]), ([1, 7, 8], [18, 18, 2])]
    ids, labels = [p + a for p, a in texts], [[-100] * len(p) + a for p, a in texts]
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1, 1)
    sizes: dict[str, Any] = {
        "max_seq_len": 32,
        "max_global_batch_tokens": 96,
        "max_image_tokens": 64,
        "chunk_tokens": 32,
    }
    with from_pretrained(
        folder, dtype="float32", device="cpu", hardware="cpu-test", max_grad_norm=None, **sizes
    ) as engine:
        rows = AnswerRows(ids, labels, columns={"pixel_values": pixels})
        reference = reference_log_probs(engine, rows)
        yield engine, model, rows._replace(reference=reference + torch.tensor([0.5, -0.2, 0.1, 0.7])), reference


def by_transformers(model, rows):
    """Log-probabilities of each row's tokens, and which of these are its answer's, and which no image's."""
    found = []
    for i, (ids, labels) in enumerate(zip(rows.input_ids, rows.labels, strict=True)):
        given = {"pixel_values": rows.columns["pixel_values"][i : i + 1]} if IMAGE_ID in ids else {}
        logits = model(input_ids=torch.tensor([ids]), **given).logits[0, :-1].log_softmax(-1)
        tokens = torch.tensor(ids[1:])
        found.append((logits.gather(1, tokens[:, None])[:, 0], torch.tensor(labels[1:]) != -100, tokens != IMAGE_ID))
    return found


def dpo(texts, reference):
    """Of answers alone, beside a reference."""
    ahead = torch.stack([own[answer].sum() for own, answer, _ in texts]) - reference
    return -torch.nn.functional.logsigmoid(0.3 * (ahead[0::2] - ahead[1::2])).mean()


def orpo(texts, _):
    """Of answers, and of chosen texts whose tokens of images are no targets."""
    means = torch.stack([own[answer].mean() for own, answer, _ in texts])
    odds = means - torch.log1p(-means.exp())
    chosen = torch.cat([own[text] for own, _, text in texts[0::2]])
    return -chosen.mean() - 0.3 * torch.nn.functional.logsigmoid(odds[0::2] - odds[1::2]).mean()


GAINS = torch.tensor([0.7, -0.7, -0.2, 0.2])


def groups(texts, _):
    """Of completions that the model wrote itself: the gradient alone says something."""
    losses = [-gain * (own - own.detach()).exp()[answer] for gain, (own, answer, _) in zip(GAINS, texts, strict=True)]
    return torch.cat(losses).mean()


def of_pairs(objective):
    """The loss and the second pass of an objective of preferences."""

    def found(engine, rows):
        told, *rest = weighted(engine, objective, rows)
        assert evaluate(engine, objective, rows).loss == pytest.approx(told.loss, abs=1e-6)
        return told.loss, *rest

    return found


def of_groups(engine, rows):
    """The same rows as completions of two prompts."""
    columns = {"input_ids": rows.input_ids, "labels": rows.labels, **rows.columns}
    told = weighed_groups(engine, GRPO(), Groups(columns, GAINS))
    return told.loss, columns, told.weights


CASES = {
    "dpo": (of_pairs(DPO(beta=0.3)), dpo),
    "orpo": (of_pairs(ORPO(beta=0.3)), orpo),
    "grpo": (of_groups, groups),
}


@pytest.mark.parametrize(("find", "formula"), CASES.values(), ids=CASES)
def test_losses_are_those_of_transformers(case, find, formula):
    engine, model, rows, reference = case
    texts = by_transformers(model, rows)
    log_probs = torch.stack([own[answer].sum() for own, answer, _ in texts])
    torch.testing.assert_close(reference.float(), log_probs.detach(), atol=1e-5, rtol=1e-5)
    loss = formula(texts, rows.reference)
    model.zero_grad()
    loss.backward()
    found, columns, weights = find(engine, rows)
    assert found == pytest.approx(loss.item(), abs=1e-5)
    engine.fwd_bwd(columns, weights=weights)
    size = sum(float(row.abs().sum()) for row in weights)
    actual = {name: gradient * size for name, gradient in engine.gradients().items()}
    engine.step(lr=0.0)
    grads = {name: p.grad for name, p in model.named_parameters() if "vision_tower" not in name}
    expected = {name if name in actual else name.removeprefix("model."): grad for name, grad in grads.items()}
    assert any("projector" in name for name in expected)
    error, where = worst_error(actual, expected)
    assert error <= 1e-5, f"gradient of {where}: relative error {error:.1e}"


def test_answers_without_gradients_keep_their_images(case):
    """Second answers of KTO, whose rows would be left out."""
    engine, _, rows, _ = case
    found, columns, weights = weighted(engine, KTO(), rows)
    assert len(columns["input_ids"]) == 4
    assert [bool(row.any()) for row in weights] == [True, False, True, False]
    before = found.loss
    for _ in range(4):
        train_step(engine, KTO(), rows, lr=1e-2)
    assert evaluate(engine, KTO(), rows).loss < before
