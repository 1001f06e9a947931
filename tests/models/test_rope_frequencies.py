"""Rotary frequencies against those that transformers computes from the same config."""

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flexengine.models.rope import rope_parameters

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SCALINGS = {
    "default": None,
    "default, named": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3, factor 32": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "yarn": YARN,
    "yarn, betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, attention factor": {**YARN, "attention_factor": 1.7},
    "yarn, mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, not truncated": {**YARN, "truncate": False},
}
SIZES = [(64, 10000.0), (128, 500000.0), (6, 10000.0), (80, 1e6)]


def reference(scaling, head_dim, theta):
    options = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": theta}
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters=options,
    )
    module = LlamaRotaryEmbedding(config)
    return config, module.inv_freq.tolist(), module.attention_scaling


@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_frequencies_are_those_of_transformers(scaling, head_dim, theta):
    config, inv_freq, factor = reference(scaling, head_dim, theta)
    written_today = config.to_dict()
    older = {"rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": 8192}
    for form in (written_today, older):
        ours = rope_parameters(form, head_dim)
        assert torch.allclose(torch.tensor(ours.inv_freq), torch.tensor(inv_freq), rtol=3e-7, atol=0.0)
        assert ours.scaling == pytest.approx(factor, rel=1e-12)


def test_the_older_key_type_means_rope_type():
    new = rope_parameters({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 8)
    assert rope_parameters({"rope_scaling": {"type": "linear", "factor": 2.0}}, 8) == new


def test_a_missing_theta_is_ten_thousand():
    assert rope_parameters({}, 8) == rope_parameters({"rope_theta": 10000.0}, 8)


def test_an_unknown_kind_is_refused_with_those_supported():
    with pytest.raises(ValueError, match=r"'dynamic'.*supported: default, linear, llama3, yarn"):
        rope_parameters({"rope_scaling": {"rope_type": "dynamic"}}, 8)
