"""Reward models with images in float32 on the CPU: losses, gradients and exported scores are those of transformers."""

import pytest
import torch
import transformers
from engine_helpers import build_engine, relative_error, saved_model, streamed_plan, worst_error
from family_checks import as_stored

from flexengine.objectives import AnswerRows, evaluate, weighted
from flexengine.objectives.preferences import Reward
from tests.models.test_images_match_transformers import (
    DECAYS,
    FAMILIES,
    IMAGE,
    drawn,
    drop_biases_of_keys,
    joined,
    kinds_of,
    opened,
)

SCORED = transformers.AutoModelForSequenceClassification


def saved(case, folder):
    own = FAMILIES[case][0]
    text = {**own["text_config"], "pad_token_id": 65}
    config = {"model_type": case, "image_token_id": IMAGE, "image_token_index": IMAGE, **own, "text_config": text}
    return saved_model(folder, {**config, "id2label": {0: "score"}}, kind_of_model=SCORED).eval()


def scores_of(model, rows, images):
    """The score of each row, alone. images: those of each."""
    found = []
    for ids, own in zip(rows, images, strict=True):
        given = joined(own) if own else {}
        given |= kinds_of(model, ids, given)
        found.append(model(input_ids=torch.tensor([ids]), use_cache=False, **given).logits[0, 0])
    return torch.stack(found)


@pytest.mark.parametrize("case", ["gemma3", "qwen3_5"])
def test_rewards_of_answers_about_images(case, tmp_path):
    """Of two pairs one has two images in both rows, and one none."""
    model, (_, draw, rows) = saved(case, tmp_path / "model"), FAMILIES[case]
    images = draw(3)
    first, plain, _ = drawn(images, rows)[0]
    ids = [[*first[:44], 5], [*first[:40], 7, 9], plain, plain[:-2]]
    shown = [images[:2], images[:2], [], []]
    scores = scores_of(model, ids, shown)
    loss = -torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2]).mean()
    loss.backward()
    given = AnswerRows(ids, ids, columns=joined([one for own in shown for one in own]))
    source = opened(tmp_path / "model", train_tower=True)
    with build_engine(source, streamed_plan(source.spec, chunk_tokens=48, chunks_per_round=4)) as engine:
        found, columns, weights = weighted(engine, Reward(), given)
        assert found.loss == pytest.approx(loss.item(), abs=1e-5)
        assert evaluate(engine, Reward(), given) == found
        engine.fwd_bwd(columns, weights=weights)
        size = sum(float(row.abs().sum()) for row in weights)
        actual = {name: gradient * size for name, gradient in engine.gradients().items()}
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        wanted = grads if grads.keys() == actual.keys() else as_stored(model, grads)
        assert actual.keys() == wanted.keys()
        assert any("visual" in name or "vision" in name for name in wanted)
        drop_biases_of_keys(actual, wanted)
        for name in [name for name in wanted if name.endswith(DECAYS)]:
            assert relative_error(actual.pop(name), wanted.pop(name)) <= 1e-3
        error, where = worst_error(actual, wanted)
        assert error <= 1e-4, f"gradient of {where}: relative error {error:.1e}"
        engine.step(lr=1e-2)
        after = engine.evaluate(columns, per_token=True).token_log_probs or []
        engine.save_pretrained(tmp_path / "out")
    again, said = SCORED.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    told = torch.tensor([float(row.sum()) for row in after])
    assert torch.allclose(scores_of(again.eval(), ids, shown), told, atol=1e-4)
