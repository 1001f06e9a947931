"""The configs of 100 of the most used checkpoints: each is described, tiny and at its size, and some are planned.

    python -m tests.models.test_popular_checkpoints [TYPE ...]

trains a step of every tiny one beside transformers, those that are equal once, which takes a minute.
"""

import json
import sys
import warnings

import pytest
import transformers
from thorough import cases

from bench.coverage import OPAQUE_BOUND, ROUNDED, TOKENS, TOWER, compared, shrunk
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


@pytest.mark.parametrize("name", cases(["HuggingFaceTB/SmolLM3-3B", "google/gemma-3-4b-it"], ["google/gemma-3-4b-it"]))
def test_plans_at_full_size_keep_their_budgets(name):
    spec = build_model(name, CHECKPOINTS[name][1])
    request = Request(2048, 32768, 24 << 30, 640 << 30, chunk_tokens=4096, round_tokens=16384)
    predicted = make_plan(spec, request, preset("h200")).predicted
    assert predicted.gpu_bytes <= request.max_gpu_bytes
    assert predicted.host_bytes <= request.max_host_bytes
    assert predicted.speed_of_light_s <= predicted.step_s


def errors_of(config):
    """The relative errors of loss and gradients of a step of a tiny model, whose weights are not quantised."""
    kind, drawn = config["model_type"], {"initializer_range": 0.2, "pad_token_id": None}
    small = {name: value for name, value in tiny(config).items() if name != "quantization_config"} | drawn
    parts = {"text_config": small["text_config"] | drawn} if "text_config" in small else {}
    read = type(transformers.AutoConfig.for_model(kind)).from_dict(small | parts)
    if hasattr(read, "vision_config"):
        read.vision_config = shrunk(read.vision_config, TOWER)
        for name in TOKENS.keys() & vars(read).keys():
            setattr(read, name, TOKENS[name])
    return compared(kind, "float64" if kind in ROUNDED else "float32", 1e-3, read)


@pytest.mark.parametrize("name", ["microsoft/phi-2", "google/gemma-3-4b-it", "Qwen/Qwen2.5-VL-7B-Instruct"])
def test_a_step_is_that_of_transformers(name):
    assert max(errors_of(CHECKPOINTS[name][1]).values()) <= OPAQUE_BOUND


def main():
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    known, errors, kinds = {}, {}, sys.argv[1:]
    for name, (_, config) in CHECKPOINTS.items():
        if name in REFUSED or (kinds and config["model_type"] not in kinds):
            continue
        key = json.dumps({**tiny(config), "architectures": None}, sort_keys=True)
        if key not in known:
            try:
                known[key] = max(errors_of(config).values())
            except Exception as error:  # that of one checkpoint shall not cost the others'
                known[key] = f"{type(error).__name__}: {error}"[:200]
            print(name, config["model_type"], known[key], flush=True)
        errors[name] = known[key]
    trained = [error for error in errors.values() if isinstance(error, float) and error <= OPAQUE_BOUND]
    print(f"{len(trained)} of {len(CHECKPOINTS)} train, {len(known)} distinct, largest error {max(trained):.1e}")


if __name__ == "__main__":
    main()
