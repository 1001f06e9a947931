"""Rotary frequencies against those that transformers computes from the same config."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from engine_helpers import spec_of, tiny_config
from family_configs import CASES, FAMILY_CASES
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flexengine.models.rope import ORIGINAL, rope_parameters
from flexengine.options.job import Job
from flexengine.request import described

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SCALINGS = {
    "default": None,
    "default, named": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
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
    with pytest.raises(ValueError, match=r"'spiral'.*supported: default, linear, dynamic, llama3, yarn"):
        rope_parameters({"rope_scaling": {"rope_type": "spiral"}}, 8)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "phi3"])
def test_longrope_has_the_frequencies_of_transformers_for_short_and_for_long_runs(family):
    """There the sequence chooses, here the longest one that a run allows."""
    factors = {"short_factor": [1.1, 1.2, 1.5], "long_factor": [2.0, 3.5, 7.0]}
    options = {"rope_type": "longrope", "factor": 4.0, **factors, "original_max_position_embeddings": 64}
    outside = {"original_max_position_embeddings": 64} if family == "phi3" else {}
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "head_dim": 6, "max_position_embeddings": 256, **outside}
    described = transformers.AutoConfig.for_model(family, **sizes, pad_token_id=None, rope_parameters={**options})
    module = LlamaRotaryEmbedding(described)
    own = tiny_config() if family == "llama" else CASES[FAMILY_CASES[family]]
    config = {**own, **sizes, "rope_scaling": options}
    (table,) = spec_of(config).tables
    for longest in (64, 65):
        module(torch.zeros(1), torch.arange(longest)[None])
        assert table.values_for(longest) == pytest.approx(module.inv_freq.tolist(), rel=3e-7)
    assert table.scaling == pytest.approx(module.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "max_seq_len", "said"),
    [
        ({"type": "dynamic", "factor": 2.0}, 300, "rotations for 256 tokens and frequencies that change"),
        ({"type": "dynamic", "factor": 2.0}, 256, None),
    ],
)
def test_dynamic_is_refused_beyond_its_length(options, max_seq_len, said):
    spec = spec_of(tiny_config(rope_scaling=options))
    job = Job(max_seq_len=max_seq_len, max_global_batch_tokens=512)
    with nullcontext() if said is None else pytest.raises(ValueError, match=said):
        described(spec, job)


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "factor": 4.0}
BEYOND_256 = {
    "unscaled": (None, 257, "rotations are not scaled, so those from position 256 on are new"),
    "within": (None, 256, None),
    "llama3": ({**LLAMA3, ORIGINAL: 64}, 257, "(llama3 by 8 from 64 positions) stays as its config.json has it"),
    "linear": ({"rope_type": "linear", "factor": 2.5}, 512, "(linear by 2.5) stays as its config.json has it"),
    "yarn within its reach": ({**YARN, ORIGINAL: 128}, 512, "yarn by 4 from 128 positions: up to 512 positions"),
    "yarn beyond its reach": ({**YARN, ORIGINAL: 128}, 513, "was not made for positions from 512 on"),
    "longrope, short": ({**LONGROPE, ORIGINAL: 64}, 64, None),
    "longrope, long": ({**LONGROPE, ORIGINAL: 64}, 65, "longer than the 64 tokens that tiny was made for before longr"),
    "longrope, beyond": ({**LONGROPE, ORIGINAL: 64}, 257, "(longrope by 4 from 64 positions) stays as its config.jso"),
}


@pytest.mark.parametrize(("options", "max_seq_len", "said"), BEYOND_256.values(), ids=BEYOND_256.keys())
def test_a_run_says_what_rotations_do_beyond_the_models_length(options, max_seq_len, said, caplog):
    spec = spec_of(tiny_config(rope_scaling=options))
    described(spec, Job(max_seq_len=max_seq_len, max_global_batch_tokens=1024))
    told = [record.getMessage() for record in caplog.records]
    assert (said is None and not told) or (said is not None and any(said in line for line in told)), told
    assert (f"max_seq_len={max_seq_len} is longer than the 256 positions that tiny" in caplog.text) == (
        max_seq_len > 256
    )
