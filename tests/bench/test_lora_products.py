"""The bench of adapters' products on a tiny model on the CPU: every form runs, and gated units take over the sums."""

import torch
from engine_helpers import spec_of, tiny_config

from bench.lora_products import FORMS, forms, measure, table
from flexengine.models.matmul_dtype import with_matmul_dtype
from flexengine.ops.adapters.lora_glu import LoRAGLU


def timer(work, least_s):
    work()
    return 1e-3


def test_forms_differ_in_who_adds():
    spec = with_matmul_dtype(spec_of(tiny_config(hidden_size=64, intermediate_size=96, head_dim=16)), "fp8")
    found = {}
    for form, model in forms(spec, 4).items():
        assert any(isinstance(op, LoRAGLU) for op in model.blocks[1].ops) == (form in FORMS[2:])
        found[form] = measure(model, 32, 16, torch.device("cpu"), timer)
    printed = table(found)
    assert "gate_up_proj" in printed
    assert "swiglu" in printed
    assert [len(times) for times in found.values()] == [10, 34, 32, 32]
