"""Distillation against TRL's GKD loss on whole vocabularies, and against a plain formula on parts of them."""

import pytest
import torch
from engine_helpers import build_engine, saved_model, streamed_plan, tiny_config, worst_error
from family_configs import CASES

from flexengine.models.registry import open_model
from flexengine.objectives import Distillation, likeliest
from flexengine.optim import AdamW

FAMILIES = {"llama": tiny_config(), "qwen3": CASES["qwen3"], "gemma2": CASES["gemma2"]}
PROMPTS, ANSWERS = (5, 3, 1, 6), (4, 7, 2, 9)


def opened(folder, config, seed):
    """A model and its source; another seed gives other weights."""
    model = saved_model(folder, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model, open_model(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """Columns, a student's engine and model, the teacher's logits and its rows for all tokens and for five."""
    folder = tmp_path_factory.mktemp("models")
    student, source = opened(folder / "student", FAMILIES[request.param], 1)
    teacher, taught = opened(folder / "teacher", FAMILIES[request.param], 2)
    vocab = source.spec.vocab_size
    generator = torch.Generator().manual_seed(3)
    ids = [
        torch.randint(0, vocab, (p + a,), generator=generator).tolist() for p, a in zip(PROMPTS, ANSWERS, strict=True)
    ]
    labels = [[-100] * p + row[p:] for p, row in zip(PROMPTS, ids, strict=True)]
    columns = {"input_ids": ids, "labels": labels}
    plan = streamed_plan(source.spec, chunk_tokens=16, chunks_per_round=2, max_seq_len=16)
    with build_engine(taught, plan, AdamW()) as engine:
        rows = {count: likeliest(engine, columns, count, 2.0) for count in (vocab, 5)}
    with build_engine(source, plan, AdamW()) as engine:
        yield engine, student, teacher, columns, rows


def logits_of(model, columns):
    """Logits and labels [N] of all target tokens."""
    rows = [model(torch.tensor([ids])).logits[0, :-1] for ids in columns["input_ids"]]
    labels = torch.cat([torch.tensor(row[1:]) for row in columns["labels"]])
    return torch.cat(rows)[labels != -100], labels[labels != -100]


def parts(logits, tokens):
    p = logits.double().softmax(-1)
    own = p.gather(1, tokens)
    return torch.cat((own, 1 - own.sum(1, keepdim=True)), 1)


def in_parts(student, teacher, beta, tokens):
    s, t = parts(student, tokens), parts(teacher, tokens)
    kl = lambda p, q: (p * (p / q).log()).sum()  # noqa: E731
    if beta in (0, 1):
        return kl(*((t, s) if beta == 0 else (s, t))) / len(s)
    m = (1 - beta) * s + beta * t
    return (beta * kl(t, m) + (1 - beta) * kl(s, m)) / len(s)


@pytest.mark.parametrize(("beta", "weight", "whole"), [(0, 0, 1), (1, 0, 1), (0.3, 0.5, 1), (0, 0, 0), (0.6, 0, 0)])
def test_loss_and_gradients(pair, beta, weight, whole):
    engine, student, teacher, columns, rows = pair
    found, labels = logits_of(student, columns)
    with torch.no_grad():
        wanted, _ = logits_of(teacher, columns)
    objective = Distillation(float(beta), 2.0, weight)
    count = found.shape[1] if whole else 5
    if whole:
        gkd = pytest.importorskip("trl.experimental.gkd").GKDTrainer.generalized_jsd_loss
        loss = gkd(found[None], wanted[None], labels[None], beta, 2.0)
    else:
        loss = in_parts(found / 2, wanted / 2, beta, wanted.topk(5).indices)
    loss = loss + weight * torch.nn.functional.cross_entropy(found, labels)
    student.zero_grad()
    loss.backward()
    function = objective.loss(columns, rows[count], engine.device)
    assert engine.evaluate(columns, loss=function).loss == pytest.approx(loss.item(), abs=1e-5)
    engine.fwd_bwd(columns, loss=function)
    expected = {key: p.grad for key, p in student.named_parameters() if p.grad is not None}
    error, where = worst_error(engine.gradients(), expected)
    engine.step(lr=0.0)
    assert error <= 1e-5, f"gradient of {where}: relative error {error:.1e}"
