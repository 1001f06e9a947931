"""Heads for labels of sequences and tokens against transformers: losses, gradients, names, new heads, refusals."""

import json

import pytest
import torch
import transformers
from engine_helpers import (
    ON_GPU,
    build_engine,
    make_plan,
    random_batch,
    same_bits,
    saved_model,
    streamed_plan,
    tiny_config,
    worst_error,
)
from family_configs import CASES, gpt2
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto

from flexengine.models.registry import FAMILIES, build_model, open_model
from flexengine.models.task_heads import WITH_SEQUENCES, WITH_TOKENS, new_head_notice, with_new_head
from flexengine.models.wrappers import WRAPPERS
from flexengine.runtime.weights.weight_store import check_checkpoint

CONFIGS = {"llama": tiny_config(pad_token_id=0), "qwen3": CASES["qwen3"], "gemma2": CASES["gemma2"], "gpt2": gpt2()}
KINDS = {
    "sequence": transformers.AutoModelForSequenceClassification,
    "token": transformers.AutoModelForTokenClassification,
}
LENGTHS = (20, 7, 45, 1, 33)


def saved(folder, family, task, num_labels=3, **changes):
    names = {i: f"L{i}" for i in range(num_labels)}
    own = {"id2label": names, "classifier_dropout": 0.0, "resid_pdrop": 0.0, "pad_token_id": 0, **changes}
    model = saved_model(folder, {**CONFIGS[family], **own}, kind_of_model=KINDS[task])
    return model.eval(), open_model(str(folder))


def drawn_batch(task, vocab_size, num_labels):
    """Token ids without padding (0), and labels: of the last token, or of most tokens."""
    ids = [[max(1, token) for token in row] for row in random_batch(0, LENGTHS, vocab_size)]
    labels = random_batch(1, LENGTHS, num_labels)
    if task == "sequence":
        return ids, [[-100] * (len(row) - 1) + row[-1:] for row in labels]
    return ids, [[-100 if i % 3 == 1 else label for i, label in enumerate(row)] for row in labels]


def by_transformers(model, task, ids, labels):
    """The mean loss and its gradients, of a batch padded on the right."""
    pad = lambda rows, fill: torch.nn.utils.rnn.pad_sequence(  # noqa: E731
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=fill
    )
    given = torch.tensor([row[-1] for row in labels]) if task == "sequence" else pad(labels, -100)
    mask = pad([[1] * len(row) for row in ids], 0)
    loss = model(input_ids=pad(ids, 0), attention_mask=mask, labels=given).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("task", KINDS)
def test_losses_and_gradients_match_transformers_under_two_plans(tmp_path, family, task):
    model, source = saved(tmp_path, family, task)
    ids, labels = drawn_batch(task, source.spec.vocab_size, 3)
    expected, gradients = by_transformers(model, task, ids, labels)
    found = []
    for plan in (make_plan, streamed_plan):
        with build_engine(source, plan(source.spec)) as engine:
            out = engine.fwd_bwd(input_ids=ids, labels=labels)
            assert out.loss == pytest.approx(expected, rel=1e-5)
            assert engine.evaluate(input_ids=ids, labels=labels).loss == pytest.approx(expected, rel=1e-5)
            found.append(engine.gradients())
    same_bits(found[0], found[1])
    error, name = worst_error(found[0], gradients)
    assert error < 1e-5, name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_single_score_is_a_weighted_sum_in_either_pass(tmp_path, family):
    model, source = saved(tmp_path, family, "sequence", num_labels=1)
    ids, labels = drawn_batch("sequence", source.spec.vocab_size, 1)
    weights = [[0.5 - i] * len(row) for i, row in enumerate(ids)]
    scores = torch.cat([model(input_ids=torch.tensor([row])).logits[:, 0] for row in ids])
    factors = torch.tensor([row[0] for row in weights])
    (-(scores * factors).sum() / factors.abs().sum()).backward()
    with build_engine(source, streamed_plan(source.spec)) as engine:
        found = engine.evaluate(input_ids=ids, labels=labels, per_token=True).token_log_probs or []
        engine.fwd_bwd(input_ids=ids, labels=labels, weights=weights)
        error, name = worst_error(engine.gradients(), {name: p.grad for name, p in model.named_parameters()})
    assert error < 1e-5, name
    assert torch.stack([row[-1] for row in found]).tolist() == pytest.approx(scores.tolist(), abs=1e-5)


def test_a_loss_of_logits_sees_the_tokens_that_have_labels(tmp_path):
    """As multi-label classification, whose targets are numbers."""
    model, source = saved(tmp_path, "llama", "sequence", problem_type="multi_label_classification")
    ids, labels = drawn_batch("sequence", source.spec.vocab_size, 3)
    wanted = torch.tensor([[1.0, 0, 1], [0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    logits = torch.cat([model(input_ids=torch.tensor([row])).logits for row in ids])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted)

    def loss(block):
        assert block.positions.tolist() == [len(ids[i]) - 1 for i in block.sequences.tolist()]
        of_rows = wanted[block.sequences]
        return torch.nn.functional.binary_cross_entropy_with_logits(block.logits, of_rows, reduction="sum") / 3

    with build_engine(source, make_plan(source.spec)) as engine:
        assert engine.evaluate(input_ids=ids, labels=labels, loss=loss).loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("family", "task"), [("llama", "sequence"), ("gemma2", "sequence"), ("llama", "token")])
def test_a_new_head_begins_at_random_and_is_exported_as_transformers_loads_it(tmp_path, family, task):
    saved_model(tmp_path / "base", CONFIGS[family])
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    kind = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}[task]
    config |= {"architectures": [config["architectures"][0].replace("ForCausalLM", kind)], "pad_token_id": 0}
    config |= {"id2label": {str(i): f"L{i}" for i in range(3)}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    source = open_model(str(tmp_path / "base"))
    source = source._replace(spec=check_checkpoint(source.spec, tmp_path / "base"))
    assert "not in the checkpoint: a new head with 3 outputs" in new_head_notice(source.spec)
    ids, labels = drawn_batch(task, source.spec.vocab_size, 3)
    with build_engine(source, make_plan(source.spec)) as engine:
        engine.train_step(input_ids=ids, labels=labels, lr=1e-3)
        expected = engine.evaluate(input_ids=ids, labels=labels).loss
        engine.save_pretrained(tmp_path / "final")
    assert "lm_head.weight" not in load_file(tmp_path / "final" / "model.safetensors")
    model, said = KINDS[task].from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    loss, _ = by_transformers(model.eval(), task, ids, labels)
    assert loss == pytest.approx(expected, rel=1e-5)
    again = open_model(str(tmp_path / "final"))
    assert not new_head_notice(check_checkpoint(again.spec, tmp_path / "final"))


def test_families_with_heads_are_those_that_transformers_has_classes_for():
    text, sequences = set(FAMILIES) - set(WRAPPERS), set(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    assert set(FAMILIES) & sequences == WITH_SEQUENCES
    own_tokens = text & set(modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES)
    assert own_tokens - {"apertus"} == WITH_TOKENS


def test_what_a_head_cannot_be(tmp_path):
    named = {"architectures": ["LlamaForSequenceClassification"]}
    for changes, said in (
        ({"architectures": ["GraniteForSequenceClassification"], "model_type": "granite"}, "has no class for it"),
        ({"num_labels": 0}, "0 labels in config.json"),
        ({"problem_type": "ranking"}, "problem_type='ranking'"),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, "classes are two or more"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "question answering"),
    ):
        with pytest.raises(ValueError, match=said):
            build_model("m", {**tiny_config(), **named, **changes})
    source = open_model(str(saved(tmp_path, "llama", "sequence")[1].weights_folder))
    spec = with_new_head(source.spec, ())
    with build_engine(source._replace(spec=spec), make_plan(spec, groups=[ON_GPU] * len(spec.groups))) as engine:
        with pytest.raises(ValueError, match="no labels, which a head for labels"):
            engine.fwd_bwd([[1, 2, 3]])
        with pytest.raises(ValueError, match=r"labels 5..5, outside 0..2"):
            engine.fwd_bwd(input_ids=[[1, 2]], labels=[[-100, 5]])
        with pytest.raises(ValueError, match="predicts no tokens"):
            engine.generate([[1, 2]])
