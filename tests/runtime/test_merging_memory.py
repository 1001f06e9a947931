"""Merging adapters into a model takes a few pieces of one tensor, whatever the tensor's size and however it is stored.

Bytes are counted by torch's profiler: all that is allocated beside the arenas and not yet given back.
"""

from dataclasses import replace

import pytest
from engine_helpers import build_engine, peak_bytes, random_weights, streamed_plan, tiny_config
from safetensors import safe_open

from flexengine import LoRA
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.lora import with_lora
from flexengine.ops.formats import weight_format
from flexengine.plan import Numerics
from flexengine.runtime.weights import adapters, weight_store

PIECE = 1 << 13
CONFIG = tiny_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=4, head_dim=16)


@pytest.mark.parametrize(("base", "use_dora"), [("compute", True), ("nf4", False)])
def test_merging_takes_pieces_of_one_tensor(base, use_dora, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_store, "PIECE_ELEMENTS", PIECE)
    monkeypatch.setattr(adapters, "MERGED_ELEMENTS", PIECE)
    monkeypatch.setattr(weight_format, "SLAB_ELEMENTS", PIECE)
    source = random_weights(CONFIG)
    spec = with_base_dtype(with_lora(source.spec, LoRA(rank=4, use_dora=use_dora)), base)
    plan = streamed_plan(spec, chunk_tokens=48, chunks_per_round=1, numerics=replace(Numerics(), base=base))
    engine = build_engine(source._replace(spec=spec), plan)
    peak = peak_bytes(lambda: engine.save_pretrained(tmp_path, merged=True))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118 - it is no dict
    engine.close()
    largest = max(sizes.values())
    assert largest == 2 * 256 * 1024
    assert peak <= largest  # 64 pieces; the whole tensor in float32 with its product would be four times as much
