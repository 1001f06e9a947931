"""How fast plans of several GPUs are, all ranks simulated together."""

from __future__ import annotations

from dataclasses import replace

from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.plan import Numerics, Request
from flexengine.plan_for_ranks import plan_for_ranks


def test_four_gpus_are_four_times_as_fast_as_one():
    spec, numerics = open_model("preset:llama-3.1-8b").spec, Numerics(state="bfloat16")
    one = Request(2048, 131072, 24 * GIB, 110 * GIB, numerics=numerics)
    four = replace(one, max_global_batch_tokens=4 * 131072, max_host_bytes=440 * GIB, ranks=4)
    alone, together = (plan_for_ranks(spec, r, with_gpus(preset("h200"), r.ranks)).predicted for r in (one, four))
    assert 4 * alone.step_s / together.step_s > 4.0
