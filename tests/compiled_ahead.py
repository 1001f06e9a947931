"""Notes what a tiny step would launch on an H100 and compiles one kernel ahead; prints what was found as JSON.

A process of its own, as tests have their kernels interpreted: python tests/compiled_ahead.py
"""

from __future__ import annotations

import json

import torch
from engine_helpers import make_plan, spec_of, tiny_config

from flexengine.hardware.measure.gpu import launch_all
from flexengine.hardware.profile import ProbeShape
from flexengine.kernels import ahead
from flexengine.ops.linear_shape import HeadShape
from flexengine.optim import AdamW
from flexengine.plan import Numerics
from flexengine.runtime.engine_parts import EngineSettings
from flexengine.runtime.launches import launch_step

CARD = ahead.Card((9, 0), 132, 227 * 1024)
BF16 = Numerics("bfloat16", "full", "float32", "bfloat16")


def main() -> None:
    spec = spec_of(tiny_config(hidden_size=64, head_dim=16))
    plan = make_plan(spec, numerics=BF16, chunk_tokens=64, max_seq_len=64, max_tokens=256)
    with ahead.recording(CARD) as step:
        launch_step(spec, plan, AdamW(), EngineSettings(attention="triton"))
    asked = ProbeShape(64, 200, 24, head=HeadShape(64, 300)), "float32", 2**30  # float32: no attention of ours
    with ahead.Compilation(CARD, launch_all, *asked, processes=1) as compilation:
        ended = compilation.wait()
    hits = list[bool]()
    ahead.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    with ahead.recording(CARD) as found:
        launch_all(*asked)
    with ahead.driver_for(CARD.target):
        failed = [ahead._failed(launch) for launch in found]
    names = sorted({f"{launch.module.rpartition('.')[2]}.{launch.name}" for launch in step})
    told = {"step": names, "ended": ended, "failed": failed, "hits": hits, "is_cuda": torch.empty(1).is_cuda}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
