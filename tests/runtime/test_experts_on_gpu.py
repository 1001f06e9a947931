"""What a model of experts promises on a GPU: the host waits for nothing within a layer, and no routing takes memory."""

import gc

import pytest
import torch
from engine_helpers import random_batch, saved_model
from family_configs import experts, without_head_dim
from safetensors.torch import load_file, save_file

from flexengine import from_pretrained
from flexengine.runtime.layer_runner import LayerRunner

WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 2000, "max_position_embeddings": 1024, "initializer_range": 0.02,
    "num_experts": 64, "num_experts_per_tok": 1,
}  # fmt: skip
WAITS = ("Synchronize", "aten::_local_scalar_dense", "aten::nonzero", "Pageable")
"""What names of events contain where the host waits for the device."""

pytestmark = pytest.mark.gpu


def engine_of(folder):
    options = {"max_seq_len": 512, "max_global_batch_tokens": 16384, "max_gpu_mem_gib": 3, "max_host_mem_gib": 8}
    return from_pretrained(folder, **options, chunk_tokens=4096, device="cuda")


@pytest.mark.alone
def test_the_host_waits_for_nothing_within_a_layer(monkeypatch, tmp_path):
    saved_model(tmp_path, without_head_dim(experts("olmoe", **{**WIDE, "num_experts_per_tok": 8})), torch.bfloat16)
    engine, run = engine_of(tmp_path), LayerRunner.run

    def in_range(self, kind, call):
        with torch.profiler.record_function("a layer"):
            return run(self, kind, call)

    batch = random_batch(1, [512] * 32, 2000)
    engine.train_step(batch)
    monkeypatch.setattr(LayerRunner, "run", in_range)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        engine.train_step(batch)
        torch.cuda.synchronize()  # one wait that the profiler sees, outside of all layers
    engine.close()
    events = profile.events()
    layers = [e for e in events if e.name == "a layer" and e.device_type == torch.autograd.DeviceType.CPU]
    waits = [e for e in events if any(word in e.name for word in WAITS)]
    assert len(layers) >= 20
    assert waits
    inside = [
        wait.name
        for wait in waits
        for layer in layers
        if layer.time_range.start <= wait.time_range.start <= layer.time_range.end
    ]
    assert not inside


def test_memory_does_not_depend_on_routing(tmp_path):
    """Random routing against all tokens of every layer on one expert."""
    saved_model(tmp_path, without_head_dim(experts("olmoe", **WIDE)), torch.bfloat16)
    weights = load_file(tmp_path / "model.safetensors")
    batch, taken = random_batch(1, [512] * 32, 2000), {}
    for routing in ("warm up", "balanced", "one expert"):
        if routing == "one expert":  # equal logits: the first expert has the least index
            weights |= {name: torch.zeros_like(w) for name, w in weights.items() if name.endswith("mlp.gate.weight")}
            save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        engine = engine_of(tmp_path)
        engine.train_step(batch)
        taken[routing] = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        engine.close()
    print(f"most bytes reserved and allocated: {taken}")
    for balanced, one in zip(taken["balanced"], taken["one expert"], strict=True):
        assert abs(one - balanced) <= 0.02 * balanced
