"""Are plans of several GPUs never slower than of fewer, and than with a transport or recomputation pinned?

python -m bench.ranks_bars [--count 60] [--seed 0] [--json FILE]

Draws requests and plans each for 1, 2 and 4 GPUs of a machine, whose host memory grows with them, with the same tokens
a step. A plan of several GPUs that says "use fewer" counts as what it advises. Then the request of one of these numbers
is planned with each transport and with `--recompute none` and `full` pinned. Prints what is slower by more than 1%.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, get_args

from bench.environment import write_json
from bench.plan_bars import CARDS, SMALL_MODELS, TOLERANCE
from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.options.job import Job
from flexengine.plan import Numerics, Plan, PlanError, Request
from flexengine.plan.request import TransportName
from flexengine.planner.ranks.plan import beside_fewer_gpus, plan_for_ranks
from flexengine.request import described

GPUS = (1, 2, 4)
STEP_TOKENS = (4096, 16384, 65536, 262144)


def drawn(random: Random) -> tuple[str, ModelSpec, Request, HardwareProfile]:
    """A name, and a request of one GPU on a card, in full or with adapters."""
    name, (card, most_gib) = random.choice(SMALL_MODELS), random.choice(CARDS)
    mode, tokens = random.choice(("full", "lora", "nf4")), random.choice(STEP_TOKENS)
    gpu_gib, host_gib = round(6.0 * (most_gib / 6.0) ** random.random(), 1), random.choice((64, 128))
    adapters = {"full": {}, "lora": {"mode": "lora"}, "nf4": {"mode": "lora", "base_dtype": "nf4"}}[mode]
    job = Job(max_seq_len=2048, max_global_batch_tokens=tokens, max_gpu_mem_gib=gpu_gib, **adapters)
    clipping, state = random.random() < 0.7, random.choice(("bfloat16", "float32"))
    numerics = Numerics(state=state, base="nf4" if mode == "nf4" else "compute")
    gpu, host = int(gpu_gib * GIB), int(host_gib * GIB)
    request = Request(2048, tokens, gpu, host, numerics=numerics, clipping=clipping, whole_steps=True)
    told = f"{name} {mode} {card} {gpu_gib:g}+{host_gib}GiB {tokens} {state}{'' if clipping else ' no-clipping'}"
    return told, described(open_model(f"preset:{name}", needs_weights=False).spec, job), request, preset(card)


def of_gpus(request: Request, gpus: int) -> Request:
    """The same step on so many GPUs, each with the host memory of one."""
    return replace(request, ranks=gpus, max_host_bytes=gpus * request.max_host_bytes)


def planned(spec: ModelSpec, request: Request, profile: HardwareProfile) -> Plan | None:
    """The plan; None where nothing fits, or ranks cannot train so."""
    try:
        return plan_for_ranks(spec, request, with_gpus(profile, request.ranks))
    except PlanError:
        return None


def pins(request: Request) -> Iterator[tuple[str, Request]]:
    """The request with each of its pins."""
    for recompute in ("none", "full"):
        yield f"recompute={recompute}", replace(request, recompute=recompute)
    for name in get_args(TransportName) if request.ranks > 1 else ():
        yield f"transport={name}", replace(request, transport=name)


def check(random: Random) -> dict[str, Any] | None:
    """The seconds of a drawn request's plans, and what is wrong with them; None where nothing fits one GPU."""
    told, spec, request, profile = drawn(random)
    start_s, found, broken = time.process_time(), dict[str, float](), list[str]()
    for gpus in GPUS:
        plan = planned(spec, of_gpus(request, gpus), profile)
        if plan is None:
            if found:
                broken.append(f"{gpus} GPUs: nothing fits")
            continue
        if plan.predicted.speed_of_light_s > plan.predicted.step_s * (1 + 1e-9):
            broken.append(f"{gpus} GPUs: {plan.predicted.step_s:.4f} s, above the speed of light")
        plan = beside_fewer_gpus(spec, plan, with_gpus(profile, gpus))
        found[str(gpus)] = min(filter(None, (plan.predicted.step_s, plan.predicted.fewer_gpus_step_s)))
        if gpus != GPUS[0] and found[str(gpus)] > TOLERANCE * min(found.values()):
            broken.append(f"{gpus} GPUs: {found[str(gpus)]:.4f} s, fewer {min(found.values()):.4f}")
    if not found:
        return None
    gpus = random.choice([int(gpus) for gpus in found])
    free = planned(spec, of_gpus(request, gpus), profile)
    assert free is not None, "it was planned before"
    free_s, by = free.predicted.step_s, f"{gpus} GPUs, {free.transport}"
    for name, pinned in pins(of_gpus(request, gpus)):
        plan = planned(spec, pinned, profile)
        if plan is None:
            continue
        pinned_s = found[f"{gpus} {name}"] = plan.predicted.step_s
        if free_s > TOLERANCE * pinned_s:
            broken.append(f"{by}: {free_s:.4f} s, {name}: {pinned_s:.4f}")
    return {"id": told, "step_s": found, "cpu_s": round(time.process_time() - start_s, 1), "broken": broken}


def main() -> None:
    """Check as many requests as are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="requests that fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    random, rows = Random(args.seed), list[dict[str, Any]]()
    while len(rows) < args.count:
        row = check(random)
        if row is not None:
            rows.append(row)
            print(f"{row['cpu_s']:6.1f} s  {row['id']}", *row["broken"], sep="\n         ", flush=True)
    broken = sum(bool(row["broken"]) for row in rows)
    print(f"{len(rows)} requests, {broken} of them with something that is wrong")
    write_json(args.json, {"rows": rows, "broken": broken})


if __name__ == "__main__":
    main()
