"""Modules of transformers whose formulas have kernels here: which are known, as what, and which are not."""

from typing import Any

import pytest
from opaque_configs import USUAL
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from flexengine.models.opaque.known import KnownModules, norm_style
from flexengine.models.registry import build_model
from flexengine.ops.opaque import OpaqueBlock
from flexengine.ops.rmsnorm import NormStyle


@pytest.mark.parametrize(
    ("module", "style"),
    [
        (LlamaRMSNorm(96, eps=1e-6), NormStyle(1e-6)),
        (GemmaRMSNorm(96, eps=1e-3), NormStyle(1e-3, 1.0, True)),
        (nn.RMSNorm(96, eps=1e-5), NormStyle(1e-5, 0.0, True)),
    ],
)
def test_norms_are_known(module, style):
    assert norm_style(module.to("meta")) == style


class Halved(LlamaRMSNorm):
    """Its gradient is not that of its formula."""

    def forward(self, hidden_states):
        y = super().forward(hidden_states)
        return 0.5 * y + 0.5 * y.detach()


class Shifted(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states.roll(1, -2))


@pytest.mark.parametrize("module", [nn.LayerNorm(96, bias=False), Halved(96), Shifted(96)])
def test_what_computes_something_else_is_not_known(module):
    assert norm_style(module) is None


def test_modules_that_take_more_than_x_are_not_asked():
    layers = nn.ModuleList([nn.ModuleList([MambaRMSNormGated(8, 8), LlamaRMSNorm(8)]), nn.Linear(8, 8)])
    known = KnownModules(layers)
    assert [known.count(index) for index in range(2)] == [1, 0]


LFM2 = {**USUAL, "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}


def test_blocks_call_what_is_known():
    op = build_model("tiny", LFM2).blocks[0].ops[0]
    assert isinstance(op, OpaqueBlock)
    calls: Any = op.function
    assert [calls.known.count(index) for index in range(2)] == [2, 4]
    norm = calls.skeleton.layers[0].operator_norm
    with calls.known.called(0):
        assert "forward" in vars(norm)
    assert "forward" not in vars(norm)


def test_gradients_are_compared_with_those_of_the_modules_themselves(monkeypatch):
    monkeypatch.setattr("flexengine.models.opaque.known.norm_style", lambda module: NormStyle(1e-2))
    with pytest.raises(ValueError, match=r"the gradient of .* is not that of its own forward"):
        build_model("tiny", LFM2)
