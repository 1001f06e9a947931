"""GRPO's losses and gradients against TRL's own, on tiny models of three families, with and without adapters."""

from itertools import product
from types import SimpleNamespace

import peft
import pytest
import torch
from engine_helpers import build_engine, saved_model, streamed_plan, tiny_config, worst_error
from family_configs import CASES
from thorough import cases

from flexengine import LoRA
from flexengine.models.lora import adapters, with_lora
from flexengine.models.registry import open_model
from flexengine.objectives.grpo import (
    GRPO,
    GroupLoss,
    Groups,
    advantages,
    token_log_probs,
    update_groups,
    weighed_groups,
)
from flexengine.optim import AdamW

trl = pytest.importorskip("trl")

FAMILIES = {"llama": tiny_config(), "qwen3": CASES["qwen3"], "gemma2": CASES["gemma2"]}
PROMPTS, ANSWERS, LONGEST, TEMPERATURE = (5, 5, 3, 3), (4, 1, 9, 6), 9, 1.3
REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.5])


class Metrics(dict):
    def __missing__(self, key):
        return self.setdefault(key, Metrics() if key in ("train", "eval") else [])


MODELS = [f"{family} {mode}" for family in FAMILIES for mode in ("whole", "adapters")]


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """An engine, a model of transformers that says the same, columns, and log-probabilities that say something else."""
    family, mode = request.param.split()
    folder, adapter = tmp_path_factory.mktemp("model"), None
    model = saved_model(folder / "base", FAMILIES[family])
    source = open_model(folder / "base")
    if mode == "adapters":
        source = source._replace(spec=with_lora(source.spec, LoRA(rank=3, alpha=5.0)))
        modules = [found.module.name for found in adapters(source.spec)]
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5.0, target_modules=modules))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(0.0, 0.2)
        adapter = folder / "adapter"
        model.save_pretrained(adapter)
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(0, source.spec.vocab_size, (n,), generator=generator).tolist()  # noqa: E731
    texts = [(draw(p), draw(a)) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    columns = {"input_ids": [p + a for p, a in texts], "labels": [[-100] * len(p) + a for p, a in texts]}
    plan = streamed_plan(source.spec, chunk_tokens=16, chunks_per_round=2, max_seq_len=16)
    with build_engine(source, plan, AdamW(), adapter=adapter) as engine:
        own = {temperature: token_log_probs(engine, columns, temperature) for temperature in (1.0, TEMPERATURE)}
        yield engine, model, texts, columns, own, mode


def trl_loss(objective, model, texts, gains, old, reference):
    """The loss of TRL's trainer on completions that are padded on the right."""

    def pad(rows):
        return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)

    completions = pad([answer for _, answer in texts])
    mask = pad([[1] * len(answer) for _, answer in texts])

    def log_probs(*_, **__):
        rows = []
        for prompt, answer in texts:
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / objective.temperature
            rows.append(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0])
        return pad(rows), torch.zeros_like(completions, dtype=torch.float32), None

    made, same = object.__new__(trl.GRPOTrainer), lambda x, **_: x
    high = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
    settings = {
        "_get_per_token_logps_and_entropies": log_probs, "aux_loss_enabled": False, "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None, "importance_sampling_level": "token", "beta": objective.beta,
        "loss_type": objective.loss_type, "epsilon_low": objective.epsilon, "epsilon_high": high, "use_vllm": False,
        "model": SimpleNamespace(training=True), "current_gradient_accumulation_steps": 1, "_metrics": Metrics(),
        "max_completion_length": objective.max_completion_length, "_entropy_bonus_enabled": False,
        "accelerator": SimpleNamespace(num_processes=1, gather=same, reduce=same),
        "args": SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
    }  # fmt: skip
    for name, value in settings.items():
        setattr(made, name, value)
    lengths = [len(answer) for _, answer in texts]
    inputs = {"prompt_ids": torch.zeros(4, 1), "prompt_mask": torch.ones(4, 1), "completion_ids": completions}
    inputs |= {"completion_mask": mask, "advantages": gains, "num_items_in_batch": mask.sum()}
    inputs |= {"old_per_token_logps": None if old is None else pad(old.split(lengths))}
    inputs |= {"ref_per_token_logps": pad(reference.split(lengths))}
    return made._compute_loss(model, inputs)


LOSSES = [
    ("grpo", 0.3, True, TEMPERATURE),
    ("dapo", 0.0, False, TEMPERATURE),
    ("bnpo", 0.0, True, 1.0),
    ("dr_grpo", 0.1, False, 1.0),
    ("grpo", 0.3, True, 1.0),
    ("dapo", 0.0, False, 1.0),
]
EVERY_OTHER = [(model, loss) for i, model in enumerate(MODELS) for loss in LOSSES[(i // 2 + i) % 2 : 4 : 2]]


@pytest.mark.parametrize(("case", "options"), cases(product(MODELS, LOSSES), EVERY_OTHER), ids=str, indirect=["case"])
def test_loss_and_gradients_are_those_of_trl(case, options):
    """By the loss of logits, and at temperature 1 also by weights of tokens."""
    kind, beta, moved, temperature = options
    engine, model, texts, columns, own, _ = case
    own, objective = own[temperature], GRPO(beta, 0.2, 0.28, kind, temperature, LONGEST)
    gains = advantages(REWARDS, 2)
    wave = torch.sin(torch.arange(len(own)) * 1.0)
    old, reference = own + 0.5 * wave if moved else None, own - 0.4 * wave
    loss = trl_loss(objective, model, texts, gains, old, reference)
    model.zero_grad()
    loss.backward()
    expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    expected = {key.replace(".default.", "."): gradient for key, gradient in expected.items()}

    def check(found, divided_by):
        assert found == pytest.approx(loss.item(), abs=1e-5)
        actual = {key: gradient * divided_by for key, gradient in engine.gradients().items()}
        engine.step(lr=0.0)
        error, where = worst_error(actual, expected)
        assert error <= 1e-5, f"gradient of {where}: relative error {error:.1e}"

    groups = Groups(columns, gains, old, reference if beta else None)
    function = GroupLoss(objective, groups, engine.device)
    out = engine.fwd_bwd(columns, loss=function)
    check(out.loss * out.num_target_tokens, out.num_target_tokens)
    assert bool(function.clipped.any()) == moved
    torch.testing.assert_close(function.log_probs, own)  # with which further updates on the same completions compare
    if temperature == 1.0:
        found = weighed_groups(engine, objective, groups)
        assert (found.log_probs is None) == (not moved and not beta)  # no pass where all ratios are 1
        engine.fwd_bwd(columns, weights=found.weights)
        check(found.loss, sum(float(row.abs().sum()) for row in found.weights))
        torch.testing.assert_close(found.tokens.clipped.float(), function.clipped)
        torch.testing.assert_close(found.tokens.kl.float(), function.kl, atol=1e-5, rtol=1e-4)


def test_groups_without_a_difference_are_a_step_that_moves_nothing(case):
    engine, _, _, columns, _, _ = case
    found = update_groups(engine, GRPO(), Groups(columns, torch.zeros(4)), lr=0.0)
    assert (found.loss, found.update.grad_norm, found.update.skipped) == (0.0, 0.0, False)


def test_adapters_that_are_off_leave_the_model_beneath(case):
    engine, model, texts, columns, own, mode = case
    if mode == "whole":
        with pytest.raises(ValueError, match="has no adapters"):
            token_log_probs(engine, columns, adapters=False)
        return
    found = token_log_probs(engine, columns, adapters=False)
    with torch.no_grad(), model.disable_adapter():
        rows = [model(torch.tensor([p + a])).logits[0, len(p) - 1 : -1].log_softmax(-1) for p, a in texts]
    wanted = torch.cat([row.gather(1, torch.tensor(a)[:, None])[:, 0] for row, (_, a) in zip(rows, texts, strict=True)])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(token_log_probs(engine, columns), own[1.0])


def test_advantages_of_groups():
    rewards = torch.tensor([1.0, 0.0, 2.0, 2.0])
    assert advantages(rewards, 2, "none").tolist() == [0.5, -0.5, 0.0, 0.0]
    assert advantages(rewards, 2)[0] == pytest.approx(0.5 / (0.5**0.5 + 1e-4))
    assert advantages(rewards, 2, "batch")[0] == pytest.approx(0.5 / (rewards.std().item() + 1e-4))
