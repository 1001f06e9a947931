"""Random tiny models in float32 on the CPU against transformers and torch.optim.AdamW: loss, gradients, weights.

Odd cases run a hand-made plan that streams everything; even ones are planned by from_pretrained under a device budget
smaller than the training state.
"""

import json
import random

import pytest
import torch
import transformers
from engine_helpers import (
    FLOAT64,
    build_engine,
    random_batch,
    relative_error,
    saved_model,
    spec_of,
    streamed_plan,
    tiny_config,
    worst_error,
)
from thorough import cases
from transformers.models.llama import modeling_llama

from flexengine import from_pretrained
from flexengine.models.registry import open_model
from flexengine.optim import AdamW

MAX_SEQ_LEN = 48
# eps well above the rounding noise of float32 gradients: with 1e-8, AdamW turns the noise of a gradient near zero into
# a step of size lr, and torch in float32 differs from torch in float64 by 1e-4. The float64 test below has eps = 1e-8.
OPTIMIZER = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
MAX_GRAD_NORM = 1.0
ROPES = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0},
}
NUM_CASES = 14


def draw_config(case: int) -> dict:
    """Sizes at random; heads, rope kinds, ties and biases in turn, so that each appears several times."""
    rng = random.Random(1000 + case)
    kv_heads, group = [(2, 2), (3, 1), (1, 4), (2, 3)][case % 4]
    return tiny_config(
        hidden_size=kv_heads * group * rng.choice((11, 12, 16)),
        intermediate_size=rng.choice((77, 96, 131)),
        num_hidden_layers=rng.choice((2, 3)),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=rng.choice((6, 10, 16)),
        vocab_size=rng.choice((97, 133, 200)),
        tie_word_embeddings=case % 3 == 0,
        attention_bias=case % 5 in (1, 2),
        mlp_bias=case % 5 in (2, 3),
        rope_scaling=list(ROPES.values())[(case // 2) % 4] or None,
    )


def case_name(case: int) -> str:
    c = draw_config(case)
    heads = f"{c['num_attention_heads']}/{c['num_key_value_heads']}x{c['head_dim']}"
    kind = (c["rope_scaling"] or {}).get("rope_type", "default")
    biases = "".join(name[0] for name in ("attention_bias", "mlp_bias") if c[name])
    tied = "tied" if c["tie_word_embeddings"] else "untied"
    return f"{case}-D{c['hidden_size']}-{heads}-{kind}-{tied}-bias:{biases or '0'}"


def draw_batch(seed: int, vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """(input_ids, labels): ragged, one sequence of the full length, one single token, a third of the labels -100."""
    rng = random.Random(seed)
    ids = random_batch(seed, [rng.randint(2, MAX_SEQ_LEN) for _ in range(4)] + [MAX_SEQ_LEN, 1], vocab_size)
    rng.shuffle(ids)
    labels = [[-100 if rng.random() < 0.3 else t for t in row] for row in ids]
    return ids, labels


def reference_loss(model, ids, labels) -> torch.Tensor:
    """Mean over all target tokens of the batch, each sequence alone."""
    total, count = 0.0, 0
    for row, unshifted in zip(ids, labels, strict=True):
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
        target = torch.tensor(unshifted[1:], dtype=torch.int64)
        total = total + torch.nn.functional.cross_entropy(logits, target, reduction="sum", ignore_index=-100)
        count += int((target != -100).sum())
    return total / count


def reference_optimizer(model, settings: AdamW = OPTIMIZER) -> torch.optim.AdamW:
    """Matrices decay, norms and biases do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def open_engine(case: int, folder, config):
    if case % 2:
        plan = streamed_plan(spec_of(config), chunk_tokens=MAX_SEQ_LEN, max_seq_len=MAX_SEQ_LEN)
        return build_engine(open_model(folder), plan, OPTIMIZER, max_grad_norm=MAX_GRAD_NORM)
    state_bytes = 16 * spec_of(config).num_parameters  # float32 weight, gradient and two moments
    budget = int(0.7 * state_bytes)
    engine = from_pretrained(
        folder,
        OPTIMIZER,
        max_grad_norm=MAX_GRAD_NORM,
        max_seq_len=MAX_SEQ_LEN,
        max_global_batch_tokens=6 * MAX_SEQ_LEN,
        max_gpu_mem_bytes=budget,
        max_host_mem_gib=8,
        hardware="cpu-test",
        device="cpu",
        dtype="float32",
    )
    assert engine.layout.gpu_bytes <= budget
    assert engine.memory_peaks().gpu_bytes <= budget
    return engine


@pytest.mark.parametrize("case", cases(range(NUM_CASES), range(5)), ids=case_name)
def test_training_matches_transformers(case, tmp_path):
    config = draw_config(case)
    model = saved_model(tmp_path / "source", config)
    engine, optimizer = open_engine(case, tmp_path / "source", config), reference_optimizer(model)
    trained = dict(model.named_parameters())
    for step in range(5):
        ids, labels = draw_batch(10 * case + step, config["vocab_size"])
        loss = reference_loss(model, ids, labels)
        optimizer.zero_grad()
        loss.backward()
        out = engine.fwd_bwd(input_ids=ids, labels=labels)
        assert out.loss == pytest.approx(loss.item(), abs=1e-5)
        if step == 0:
            gradients = {name: p.grad for name, p in trained.items()}
            error, name = worst_error(engine.gradients(), gradients)
            assert error <= 1e-4, f"gradient of {name}: relative error {error:.1e}"
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        result = engine.step()
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        assert not result.skipped
    weights = engine.state_dict()
    assert weights.keys() == trained.keys()
    for name, parameter in trained.items():
        worst = (weights[name] - parameter).abs().max().item()
        assert worst <= 1e-5, f"{name} differs by {worst:.1e} after 5 steps"
    check_export(engine, model, tmp_path / "export", ids[0])
    engine.close()


def check_export(engine, model, folder, tokens):
    """What is saved loads in transformers with the same keys, dtypes and logits."""
    engine.save_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")
    original = model.state_dict()
    assert {k: (v.dtype, v.shape) for k, v in loaded.state_dict().items()} == {
        k: (v.dtype, v.shape) for k, v in original.items()
    }
    for name, value in engine.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([tokens])).logits[0, -1]
    assert relative_error(engine.next_token_logits(tokens), logits) < 1e-5


def test_half_of_the_cases_are_planned_under_a_small_budget():
    assert sum(case % 2 == 0 for case in range(NUM_CASES)) * 2 >= NUM_CASES >= 12


@pytest.fixture
def _no_float32_inside(monkeypatch):
    """transformers takes norms and rotary angles in float32 whatever the model's dtype; here they follow it."""

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def rotary(self, x, position_ids):
        angle = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
        both = torch.cat((angle, angle), dim=-1)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)


@pytest.mark.usefixtures("_no_float32_inside")
@pytest.mark.parametrize("case", [1, 2, 6, 7], ids=case_name)
def test_float64_training_matches_to_the_last_digits(case, tmp_path):
    """No rounding noise to hide behind, AdamW with its usual eps, long sequences cut into slices."""
    config, settings = draw_config(case), AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    model = saved_model(tmp_path, config, torch.float64, attention="sdpa")
    optimizer = reference_optimizer(model, settings)
    plan = streamed_plan(spec_of(config), chunk_tokens=20, chunks_per_round=4, numerics=FLOAT64)
    engine = build_engine(open_model(tmp_path), plan, settings, max_grad_norm=MAX_GRAD_NORM)
    for step in range(3):
        ids, labels = draw_batch(10 * case + step, config["vocab_size"])
        loss = reference_loss(model, ids, labels)
        optimizer.zero_grad()
        loss.backward()
        assert engine.fwd_bwd(input_ids=ids, labels=labels).loss == pytest.approx(loss.item(), rel=1e-9)
        error, name = worst_error(engine.gradients(), {n: p.grad for n, p in model.named_parameters()})
        assert error <= 1e-11, f"gradient of {name}: relative error {error:.1e}"
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        assert engine.step().grad_norm == pytest.approx(norm.item(), rel=1e-12)
    weights = engine.state_dict()
    for name, parameter in model.named_parameters():
        assert weights[name].dtype == torch.float64
        assert (weights[name] - parameter).abs().max().item() <= 1e-10, name
    engine.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_sharded_bf16_checkpoint_comes_back_with_its_shards(tied, tmp_path):
    """Names, dtypes and the shard of every tensor stay; untrained weights come back bit by bit."""
    config = tiny_config(tie_word_embeddings=tied, attention_bias=True)
    model = saved_model(tmp_path / "source", config, torch.bfloat16, max_shard_size=6_000)
    engine = from_pretrained(
        tmp_path / "source",
        max_seq_len=MAX_SEQ_LEN,
        max_global_batch_tokens=6 * MAX_SEQ_LEN,
        hardware="cpu-test",
        device="cpu",
    )
    engine.save_pretrained(tmp_path / "export")
    index = "model.safetensors.index.json"
    source, export = (json.loads((tmp_path / d / index).read_text()) for d in ("source", "export"))
    assert len(set(source["weight_map"].values())) > 2
    assert export["weight_map"] == source["weight_map"]
    assert export["metadata"]["total_size"] == source["metadata"]["total_size"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == torch.bfloat16
        assert torch.equal(loaded.state_dict()[name], value), name
    batch = random_batch(0, (20, 9), config["vocab_size"])
    engine.fwd_bwd(batch)
    engine.step(lr=1e-2)
    engine.save_pretrained(tmp_path / "trained")
    changed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype="auto").state_dict()
    for name, value in engine.state_dict().items():
        assert torch.equal(changed[name], value.bfloat16()), name
    assert not torch.equal(changed["model.norm.weight"], model.state_dict()["model.norm.weight"])


def test_bf16_gradients_are_close_to_float32(tmp_path):
    """A bf16 engine's gradients stay within bf16 rounding of the float32 reference."""
    config = tiny_config(hidden_size=48, head_dim=12, initializer_range=0.1)
    saved_model(tmp_path, config, torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    engine = from_pretrained(
        tmp_path, max_seq_len=MAX_SEQ_LEN, max_global_batch_tokens=6 * MAX_SEQ_LEN, hardware="cpu-test", device="cpu"
    )
    ids = random_batch(3, (30, 48, 2, 17), config["vocab_size"])
    loss = reference_loss(model, ids, ids)
    loss.backward()
    assert engine.fwd_bwd(ids).loss == pytest.approx(loss.item(), rel=1e-2)
    error, name = worst_error(engine.gradients(), {k: p.grad for k, p in model.named_parameters()})
    assert error < 4e-2, f"gradient of {name}: relative error {error:.1e}"
