"""The configs of 100 of the most used checkpoints: each is described, tiny and at its size, and some are planned."""

import pytest

from flexengine.hardware.presets import preset
from flexengine.models.registry import FAMILIES, build_model
from flexengine.plan import Request
from flexengine.planner.planner import make_plan
from tests.models.popular_checkpoints import CHECKPOINTS, tiny

REFUSED = {"internlm/internlm2_5-7b-chat": "brings code of its own", "moonshotai/Kimi-K2-Instruct": "code of its own"}
"""Those that bring code of their own, and so do not train."""


def test_at_least_95_of_100_are_described():
    accepted, refused = 0, dict[str, str]()
    for name, (_, config) in CHECKPOINTS.items():
        try:
            spec = build_model(name, tiny(config))
        except ValueError as error:
            refused[name] = str(error)
            continue
        assert spec.num_parameters < 10**7, name
        assert spec.blocks, name
        accepted += 1
    assert refused.keys() == REFUSED.keys(), refused
    assert all(said in refused[name] for name, said in REFUSED.items())
    assert len(CHECKPOINTS) >= 100
    assert accepted >= 0.95 * len(CHECKPOINTS)


def test_native_ones_have_their_published_size():
    """A field that is read wrongly would show: sizes agree to 1%."""
    found = {
        name: build_model(name, config).num_parameters / 1e9 / size
        for name, (size, config) in CHECKPOINTS.items()
        if size and config["model_type"] in FAMILIES
    }
    assert {name: share for name, share in found.items() if abs(share - 1) > 0.01} == {}


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM3-3B", "google/gemma-3-4b-it"])
def test_plans_at_full_size_keep_their_budgets(name):
    spec = build_model(name, CHECKPOINTS[name][1])
    request = Request(2048, 32768, 24 << 30, 640 << 30, chunk_tokens=4096, round_tokens=16384)
    predicted = make_plan(spec, request, preset("h200")).predicted
    assert predicted.gpu_bytes <= request.max_gpu_bytes
    assert predicted.host_bytes <= request.max_host_bytes
    assert predicted.speed_of_light_s <= predicted.step_s
