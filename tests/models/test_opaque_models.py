"""Types without ops of their own, as opaque blocks: against transformers, under several plans, and what is refused."""

import pytest
from engine_helpers import build_engine, make_plan, same_bits, streamed_plan
from family_checks import MAX_SEQ_LEN, check_against_transformers, check_export, engine_like, reference_of

from flexengine import from_pretrained
from flexengine.models.registry import open_model
from flexengine.optim import AdamW

SIZES = {"vocab_size": 67, "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
USUAL = {**SIZES, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
OF_GPT = {**SIZES, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
CONFIGS = {
    "gpt_neox": {**USUAL, "rotary_pct": 0.5},  # branches side by side, norms with biases
    "gptj": {**OF_GPT, "rotary_dim": 4},  # a bias of the head
    "falcon": {**USUAL, "new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {**SIZES, "hidden_size": 24, "n_head": 4, "n_layer": 2},  # ALiBi, a norm after the embedding
    "gpt_neo": {**USUAL, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                "window_size": 5},  # learned positions, two kinds of layers
    "lfm2": {**USUAL, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "mamba2": {**SIZES, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 12, "state_size": 8,
               "n_groups": 1, "chunk_size": 16},
    "bamba": {**USUAL, **MAMBA, "attn_layer_indices": [1]},
    "apertus": {**USUAL},  # an activation with weights
    "cohere2_moe": {**USUAL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                    "logit_scale": 0.5},
    "granitemoehybrid": {**USUAL, **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4,
                         "num_experts_per_tok": 2, "shared_intermediate_size": 16, "logits_scaling": 2.0,
                         "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
}  # fmt: skip


def config_of(kind):
    return {"model_type": kind, **CONFIGS[kind]}


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request, tmp_path_factory):
    """What transformers says of each type."""
    return reference_of(config_of(request.param), tmp_path_factory.mktemp("reference"))


def test_loss_gradients_logits_and_export(reference, tmp_path):
    with engine_like(reference, chunk_tokens=MAX_SEQ_LEN) as engine:
        assert "opaque blocks" in engine.layout.model.notice
        check_against_transformers(engine, reference)
        check_export(engine, reference, tmp_path)


THREE = ["gpt_neo", "bamba", "cohere2_moe"]


def trained(folder, plan_of, **options):
    """Weights after two steps, and what the engine held."""
    source = open_model(folder)
    with build_engine(source, plan_of(source.spec), AdamW(lr=1e-2), **options) as engine:
        ids = [[(7 * i + n) % 67 for i in range(n)] for n in (48, 3, 21, 17, 40)]
        for _ in range(2):
            engine.train_step(ids)
        return engine.state_dict()


@pytest.mark.parametrize("reference", THREE, indirect=True)
def test_plans_give_the_same_bits_and_keep_to_their_budget(reference):
    sizes = {"chunk_tokens": MAX_SEQ_LEN, "max_seq_len": MAX_SEQ_LEN}
    streamed = trained(reference.folder, lambda spec: streamed_plan(spec, **sizes))
    same_bits(trained(reference.folder, lambda spec: make_plan(spec, **sizes)), streamed)
    spec = open_model(reference.folder).spec
    budget = 14 * spec.num_parameters + 2**20
    with from_pretrained(
        reference.folder, AdamW(lr=1e-2), max_seq_len=MAX_SEQ_LEN, max_global_batch_tokens=192, chunk_tokens=48,
        round_tokens=96, max_gpu_mem_bytes=budget, max_host_mem_gib=8, hardware="cpu-test", device="cpu",
        dtype="float32",
    ) as engine:  # fmt: skip
        ids = [[(7 * i + n) % 67 for i in range(n)] for n in (48, 3, 21, 17, 40)]
        for _ in range(2):
            engine.train_step(ids)
        assert engine.memory_peaks().gpu_bytes <= budget
        same_bits(engine.state_dict(), streamed)
