"""Losses, gradients and rewards of objectives against TRL's trainers, on tiny models of three families.

The trainers' own loss functions run on log-probabilities of transformers' logits, for whole models and for adapters.
"""

from itertools import product
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from engine_helpers import build_engine, saved_model, streamed_plan, tiny_config, worst_error
from family_configs import CASES
from thorough import cases

from flexengine import LoRA
from flexengine.models.lora import adapters, with_lora
from flexengine.models.registry import open_model
from flexengine.models.task_heads import with_head_saved
from flexengine.objectives import (
    DPO,
    IPO,
    KTO,
    ORPO,
    AnswerRows,
    Reward,
    SimPO,
    evaluate,
    reference_log_probs,
    weighted,
)
from flexengine.optim import AdamW

pytest.importorskip("trl")

PROMPTS, ANSWERS = (5, 3, 1, 6), ((4, 7), (2, 6), (5, 5), (1, 3))
"""Lengths of prompts, and of the two answers to each."""
WANTED = (True, False, False, True)
FAMILIES = {"llama": tiny_config(), "qwen3": CASES["qwen3"], "gemma2": CASES["gemma2"]}
OBJECTIVES = {
    "dpo": DPO(0.3),
    "smoothed dpo": DPO(0.3, label_smoothing=0.2),
    "ipo": IPO(0.4),
    "kto": KTO(0.3, desirable_weight=1.5, undesirable_weight=0.7),
    "orpo": ORPO(0.6),
    "simpo": SimPO(1.5, gamma=0.4),
}


def drawn_rows(vocab_size):
    """Rows of records, chosen before rejected; answers alone have labels."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda count: torch.randint(0, vocab_size, (count,), generator=generator).tolist()  # noqa: E731
    ids, labels = [], []
    for length, answers in zip(PROMPTS, ANSWERS, strict=True):
        prompt = draw(length)
        for answer in map(draw, answers):
            ids.append(prompt + answer)
            labels.append([-100] * length + answer)
    return AnswerRows(ids, labels)


# ---- TRL ---------------------------------------------------------------------------------------------------------


def padded(rows, fill):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


def columns_of(rows):
    """input_ids, attention_mask and completion_mask as TRL's collators pad them."""
    masks = [[int(label != -100) for label in row] for row in rows.labels]
    ones = [[1] * len(row) for row in rows.input_ids]
    return padded(rows.input_ids, 0), padded(ones, 0), padded(masks, 0)


def fused(model):
    """A model that returns what that of TRL's trainers does: log-probabilities [rows, tokens - 1] of labels."""

    def forward(input_ids, attention_mask, labels, **_):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        targets, zeros = labels[:, 1:], torch.zeros(logits.shape[:2])
        found = logits.log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
        log_probs = torch.where(targets != -100, found, zeros)
        return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    return forward


class Metrics(dict):
    def __missing__(self, mode):
        return self.setdefault(mode, Metrics() if mode in ("train", "eval") else [])


def trainer(kind, model, **settings):
    """A trainer of TRL with what its loss reads, and nothing else."""
    same = lambda x: x  # noqa: E731
    made = object.__new__(kind)
    made.accelerator = SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)
    common = {"model": model, "aux_loss_enabled": False, "_metrics": Metrics(), "_tp_size": 1}
    common |= {
        "_total_train_tokens": 0,
        "is_encoder_decoder": False,
        "padding_value": 0,
        "pad_token_id": 0,
        "use_weighting": False,
    }
    for name, value in {**common, "label_smoothing": 0.0, **settings}.items():
        setattr(made, name, value)
    return made


def by_row(columns):
    """Rows of pairs as TRL has them: all chosen ones, then all rejected ones."""
    return [torch.cat((column[0::2], column[1::2])) for column in columns]


def loss_of_dpo(objective, rows, model, kind):
    from trl import DPOTrainer  # noqa: PLC0415 - takes seconds

    ids, attention, completion = by_row(columns_of(rows))
    settings = {"loss_types": [kind], "loss_weights": [1.0], "f_divergence_type": "reverse_kl", "ld_alpha": None}
    made = trainer(DPOTrainer, model, precompute_ref_logps=True, beta=objective.beta, **settings)
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}
    inputs |= {"ref_chosen_logps": rows.reference[0::2], "ref_rejected_logps": rows.reference[1::2]}
    if getattr(objective, "label_smoothing", 0):
        kinds = [("sigmoid", 1 - objective.label_smoothing), ("flipped", objective.label_smoothing)]
        flipped = {**inputs, "ref_chosen_logps": rows.reference[1::2], "ref_rejected_logps": rows.reference[0::2]}
        for name in ("input_ids", "attention_mask", "completion_mask"):
            flipped[name] = torch.cat(inputs[name].chunk(2)[::-1])
        both = (made._compute_loss(fused(model), given, False) for given in (inputs, flipped))
        return sum(share * loss for (_, share), loss in zip(kinds, both, strict=True))
    return made._compute_loss(fused(model), inputs, False)


def loss_of_kto(objective, rows, model):
    from trl import KTOTrainer  # noqa: PLC0415

    ids, attention, completion = columns_of(rows)
    weights = {"desirable_weight": objective.desirable_weight, "undesirable_weight": objective.undesirable_weight}
    settings = {"loss_type": "kto", "calculate_KL": True, "precompute_ref_logps": True}
    made = trainer(KTOTrainer, model, beta=objective.beta, **weights, **settings)
    inputs = {"input_ids": ids[0::2], "attention_mask": attention[0::2], "completion_mask": completion[0::2]}
    inputs |= {"KL_input_ids": ids[1::2], "KL_attention_mask": attention[1::2], "KL_completion_mask": completion[1::2]}
    inputs |= {"ref_logps": rows.reference[0::2], "ref_KL_logps": rows.reference[1::2], "label": torch.tensor(WANTED)}
    return made._compute_loss(fused(model), inputs, False)


def loss_of_experimental(objective, rows, model):
    """ORPO, and SimPO, which is a loss of the CPO trainer."""
    from trl.experimental.cpo import CPOTrainer  # noqa: PLC0415
    from trl.experimental.orpo import ORPOTrainer  # noqa: PLC0415

    ids, attention, completion = columns_of(rows)
    labels = torch.where(completion == 1, ids, -100)
    batch = {}
    for name, which in (("chosen", slice(0, None, 2)), ("rejected", slice(1, None, 2))):
        batch |= {f"{name}_input_ids": ids[which], f"{name}_attention_mask": attention[which]}
        batch |= {f"{name}_labels": labels[which]}
    batch |= {"prompt_input_ids": ids[0::2], "prompt_attention_mask": attention[0::2]}
    if isinstance(objective, ORPO):
        return trainer(ORPOTrainer, model, beta=objective.beta).get_batch_loss_metrics(model, batch)[0]
    settings = {"loss_type": "simpo", "simpo_gamma": objective.gamma, "cpo_alpha": 0.0, "alpha": 0.0}
    return trainer(CPOTrainer, model, beta=objective.beta, **settings).get_batch_loss_metrics(model, batch)[0]


def trl_loss(objective, rows, model):
    if isinstance(objective, (DPO, IPO)):
        return loss_of_dpo(objective, rows, model, "ipo" if isinstance(objective, IPO) else "sigmoid")
    return (loss_of_kto if isinstance(objective, KTO) else loss_of_experimental)(objective, rows, model)


# ---- both --------------------------------------------------------------------------------------------------------


PAIRS = [f"{family} {mode}" for family in FAMILIES for mode in ("whole", "adapters")]
EVERY_OTHER = [(pair, name) for i, pair in enumerate(PAIRS) for name in list(OBJECTIVES)[(i // 2 + i) % 2 :: 2]]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request, tmp_path_factory):
    """An engine and a model of transformers that say the same, and rows with a reference that says something else."""
    family, mode = request.param.split()
    folder = tmp_path_factory.mktemp("model")
    model = saved_model(folder / "base", FAMILIES[family])
    source, adapter = open_model(folder / "base"), None
    if mode == "adapters":
        lora = LoRA(rank=3, alpha=5.0)
        source = source._replace(spec=with_lora(source.spec, lora))
        modules = [found.module.name for found in adapters(source.spec)]
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5.0, target_modules=modules))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(0.0, 0.2)
        adapter = folder / "adapter"
        model.save_pretrained(adapter)
    plan = streamed_plan(source.spec, chunk_tokens=16, chunks_per_round=2, max_seq_len=16)
    rows = drawn_rows(source.spec.vocab_size)
    with build_engine(source, plan, AdamW(), adapter=adapter) as engine:
        found = reference_log_probs(engine, rows)
        moved = found + torch.tensor([0.9, -0.4, 0.3, 0.8, -0.6, 0.2, -0.3, -0.7], dtype=torch.float64)
        yield engine, model, rows._replace(reference=moved, wanted=WANTED)


@pytest.mark.parametrize(("pair", "name"), cases(product(PAIRS, OBJECTIVES), EVERY_OTHER), indirect=["pair"])
def test_loss_and_gradients_are_those_of_trl(pair, name):
    engine, model, rows = pair
    objective = OBJECTIVES[name]
    check_gradients(engine, model, rows, objective, trl_loss(objective, rows, model))


def check_gradients(engine, model, rows, objective, loss):
    """Compare with a loss of TRL's and its gradients."""
    model.zero_grad()
    loss.backward()
    found, columns, weights = weighted(engine, objective, rows)
    assert found.loss == pytest.approx(loss.item(), abs=1e-5)
    assert evaluate(engine, objective, rows) == found
    engine.fwd_bwd(columns, weights=weights)
    divided_by = sum(float(row.abs().sum()) for row in weights)
    actual = {key: gradient * divided_by for key, gradient in engine.gradients().items()}
    expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    names = (key.replace(".default.", ".").replace(".modules_to_save.", ".") for key in expected)
    expected = dict(zip(names, expected.values(), strict=True))
    if any(key.startswith("base_model.") for key in expected):  # what is trained in full has the base's name here
        expected = {key if ".lora_" in key else key.removeprefix("base_model.model."): g for key, g in expected.items()}
    engine.step(lr=0.0)
    error, where = worst_error(actual, expected)
    assert error <= 1e-5, f"gradient of {where}: relative error {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["whole", "adapters"])
def test_rewards_are_those_of_trl(tmp_path, family, mode):
    from trl import RewardTrainer  # noqa: PLC0415

    config = {**FAMILIES[family], "num_labels": 1, "pad_token_id": 0}
    model = saved_model(tmp_path / "base", config, kind_of_model=transformers.AutoModelForSequenceClassification)
    source, adapter = open_model(tmp_path / "base"), None
    if mode == "adapters":
        lora = LoRA(rank=3, alpha=5.0)
        source = source._replace(spec=with_lora(source.spec, with_head_saved(lora, source.spec)))
        modules = [found.module.name for found in adapters(source.spec)]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=3, lora_alpha=5.0, target_modules=modules, task_type="SEQ_CLS")
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name or ".modules_to_save." in name:
                    parameter.normal_(0.0, 0.2)
        adapter = tmp_path / "adapter"
        model.save_pretrained(adapter)
    rows = drawn_rows(source.spec.vocab_size)
    ids = [[max(1, token) for token in row] for row in rows.input_ids]
    ids[3][-1] = 0  # what the config calls padding is not scored
    rows = rows._replace(input_ids=ids, margins=[0.0, 0.3, -0.2, 1.0])
    tokens, attention, _ = by_row(columns_of(rows))
    given = {"input_ids": tokens, "attention_mask": attention, "margin": torch.tensor(rows.margins)}
    args = SimpleNamespace(center_rewards_coefficient=0.05)
    made = trainer(RewardTrainer, scores_of(model), args=args)
    plan = streamed_plan(source.spec, chunk_tokens=16, chunks_per_round=2, max_seq_len=16)
    with build_engine(source, plan, AdamW(), adapter=adapter) as engine:
        loss = made.compute_loss(made.model, given)
        check_gradients(engine, model, rows, Reward(center_coefficient=0.05), loss)
        engine.save_pretrained(tmp_path / "out")
    if mode == "adapters":
        base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
        again = peft.PeftModel.from_pretrained(base, tmp_path / "out")
        found, expected = (one.eval()(input_ids=tokens).logits for one in (again, model))
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)  # other kernels of attention


def scores_of(model):
    """A model that takes what TRL's trainer hands on beside the tokens."""

    def forward(input_ids, attention_mask, **_):
        return model(input_ids=input_ids, attention_mask=attention_mask)

    forward.training = False
    return forward
