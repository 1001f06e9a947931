"""Every family in bf16 for five steps against transformers in float32, at widths that kernels serve."""

import pytest
import torch
import transformers
from engine_helpers import config_of, random_batch, saved_model
from family_configs import CASES, FAMILY_CASES, LONGROPE

from flexengine import from_pretrained
from flexengine.models.registry import open_model
from flexengine.optim import AdamW

LENGTHS = (512, 300, 37, 129)
WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "vocab_size": 2000, "max_position_embeddings": 1024, "n_embd": 512, "n_head": 8, "n_positions": 600,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512, "sliding_window": 100,
    "query_pre_attn_scalar": 64, "initializer_range": 0.02, "linear_key_head_dim": 64, "linear_value_head_dim": 32,
    "q_lora_rank": 192, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
FACTORS = {name: [1.0 + i / 32 for i in range(32)] for name in ("short_factor", "long_factor")}


def widened(config):
    """The config with its own fields at realistic sizes."""
    wide = {name: WIDE[name] for name in WIDE if config.get(name) is not None}
    if config.get("rope_scaling") == LONGROPE:
        wide |= {"rope_scaling": {**LONGROPE, **FACTORS}, "original_max_position_embeddings": 64}
    if "kv_lora_rank" in config:
        wide |= {"num_key_value_heads": WIDE["num_attention_heads"]}
    return {**config, **wide}


def losses_of_transformers(folder, batches, optimizer, device):
    """Mean loss per token of every step, each sequence alone, in float32, its experts one by one."""
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kinds)
    model = model.to(device).train()
    for experts in (module for module in model.modules() if hasattr(module, "limit")):
        experts.limit = model.config.swiglu_limit  # some versions of transformers have 7 there whatever is asked for
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    update = torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)
    losses = []
    for batch in batches:
        count, total = sum(len(row) - 1 for row in batch), 0.0
        update.zero_grad()
        for row in batch:
            ids = torch.tensor([row], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        update.step()
        losses.append(total)
    return losses


def check(case, device, tmp_path, lengths=LENGTHS):
    """Losses of five steps within 0.5%, and they fall."""
    config, optimizer = widened(CASES[case]), AdamW(lr=2**-12, weight_decay=0.1)
    saved_model(tmp_path, config, torch.bfloat16)
    batches = [random_batch(1, lengths, 200)] * 5  # of few words, so that there is something to learn
    engine = from_pretrained(
        tmp_path,
        optimizer,
        max_seq_len=512,
        max_global_batch_tokens=1024,
        max_gpu_mem_gib=3,
        max_host_mem_gib=8,
        hardware="cpu-test" if device == "cpu" else "h100",  # no probe for each type
        device=device,
    )
    losses = [engine.train_step(batch)[0].loss for batch in batches]
    engine.close()
    wanted = losses_of_transformers(tmp_path, batches, optimizer, device)
    assert losses == pytest.approx(wanted, rel=5e-3)
    assert losses[-1] < losses[0] - (0.02 if case == "minicpm3" else 0.1)  # whose outputs are scaled down


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_five_steps_on_cuda(case, tmp_path):
    check(case, "cuda", tmp_path)


def test_five_steps_on_the_cpu(tmp_path):
    check(FAMILY_CASES["qwen3"], "cpu", tmp_path, lengths=(150, 37, 100))


@pytest.mark.parametrize("case", CASES)
def test_every_wide_config_is_understood(case, tmp_path):
    described = config_of(widened(CASES[case]))
    described.save_pretrained(tmp_path)
    spec = open_model(tmp_path, needs_weights=False).spec
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(described)
    trained = (p for name, p in model.named_parameters() if p.requires_grad and ".indexer." not in name)
    assert spec.num_parameters == sum(p.numel() for p in trained)
    assert spec.hidden_size == 512
