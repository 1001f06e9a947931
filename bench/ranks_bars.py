"""Are plans of several GPUs never slower than of fewer, and than with a transport or recomputation pinned?

python -m bench.ranks_bars [--count 60] [--seed 0] [--json FILE]

Draws requests and plans each for 1, 2 and 4 GPUs of a machine, whose host memory grows with them, with the same tokens
a step. A plan of several GPUs that says "use fewer" counts as what it advises. Then the request of one of these numbers
is planned with each transport and with `--recompute none` and `full` pinned. Prints what is slower by more than 1%.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from bench.environment import rounded, write_json
from bench.plan_bars import CARDS, SMALL_MODELS, TOLERANCE
from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.options.job import Job
from flexengine.plan import Numerics, Plan, PlanError, Request
from flexengine.planner.collector import collector_paused
from flexengine.planner.ranks.fewer import beside_fewer_gpus
from flexengine.planner.ranks.plan import KINDS, NodeProblem, plan_for_ranks
from flexengine.planner.variants import Variant, fastest
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


def planned(spec: ModelSpec, request: Request, profile: HardwareProfile) -> Plan | None:
    """The plan; None where nothing fits, or ranks cannot train so."""
    try:
        return plan_for_ranks(spec, request, profile)
    except PlanError:
        return None


class Freely:
    """The plan of a request that is free to choose, and those of the transports that it was chosen from."""

    def __init__(self, spec: ModelSpec, request: Request, profile: HardwareProfile) -> None:
        self._asked = spec, request, profile
        self._tried: dict[str, Plan | None] = {}
        self.plan = self._planned() if request.ranks > 1 else planned(*self._asked)

    def _planned(self) -> Plan | None:
        spec, request, profile = self._asked

        def kept(name: str, kind: Variant[NodeProblem, Plan]) -> Variant[NodeProblem, Plan]:
            def plans(node: NodeProblem, best: Plan | None) -> Plan | None:
                self._tried[name] = kind.planned(node, best)
                return self._tried[name]

            return replace(kind, planned=plans)

        with collector_paused():
            try:
                kinds = [kept(name, kind) for name, kind in KINDS.items()]
                return fastest(kinds, NodeProblem(spec, request, profile))
            except PlanError:  # of whole rounds on every rank
                return planned(*self._asked)

    def with_pins(self) -> Iterator[tuple[str, Plan | None]]:
        """The plan with each pin. That of a transport is the one that was tried, if it was."""
        spec, request, profile = self._asked
        for recompute in ("none", "full"):
            yield f"recompute={recompute}", planned(spec, replace(request, recompute=recompute), profile)
        for name in KINDS if request.ranks > 1 else ():
            if name not in self._tried:
                self._tried[name] = planned(spec, replace(request, transport=name), profile)
            yield f"transport={name}", self._tried[name]


def check(random: Random) -> dict[str, Any] | None:
    """The seconds of a drawn request's plans, and what is wrong with them; None where nothing fits."""
    told, spec, request, profile = drawn(random)
    pinned_gpus = random.choice(GPUS)
    start_s, found, broken = time.process_time(), dict[str, float](), list[str]()
    free: tuple[int, Freely] | None = None
    for gpus in GPUS:
        node = with_gpus(profile, gpus)
        freely = Freely(spec, replace(request, ranks=gpus, max_host_bytes=gpus * request.max_host_bytes), node)
        plan = freely.plan
        if plan is None:
            if found:
                broken.append(f"{gpus} GPUs: nothing fits")
            continue
        free = (gpus, freely) if free is None or free[0] < pinned_gpus else free
        if plan.predicted.speed_of_light_s > plan.predicted.step_s * (1 + 1e-9):
            broken.append(f"{gpus} GPUs: {plan.predicted.step_s:.4f} s, above the speed of light")
        advised = beside_fewer_gpus(spec, plan, node).predicted
        found[str(gpus)] = advised.fewer_gpus_step_s or advised.step_s
        least_s = min(found.values())
        if found[str(gpus)] > TOLERANCE * least_s:
            broken.append(f"{gpus} GPUs: {found[str(gpus)]:.4f} s, fewer: {least_s:.4f}")
    if free is None:
        return None
    gpus, freely = free
    assert freely.plan is not None, "it fits"
    free_s = freely.plan.predicted.step_s
    for pin, plan in freely.with_pins():
        if plan is None:
            continue
        pinned_s = found[f"{gpus} {pin}"] = plan.predicted.step_s
        if free_s > TOLERANCE * pinned_s:
            by = f"{gpus} GPUs, {freely.plan.transport}: {free_s:.4f} s"
            broken.append(f"{by}, {pin}: {pinned_s:.4f} s, {free_s / pinned_s:.3f} times")
    return {"id": told, "step_s": rounded(found, 4), "cpu_s": round(time.process_time() - start_s), "broken": broken}


def main() -> None:
    """Check as many requests as are asked for, but those that the file has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="requests that fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file, and go on from it")
    args = parser.parse_args()
    known = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"drawn": 0, "rows": []}
    number, rows = known["drawn"], known["rows"]
    while len(rows) < args.count:
        row = check(Random(f"{args.seed} {number}"))
        number += 1
        if row is not None:
            rows.append(row)
            print(f"{row['cpu_s']:4} s  {row['id']}", *row["broken"], sep="\n         ", flush=True)
        write_json(args.json, {"drawn": number, "rows": rows, "broken": sum(bool(row["broken"]) for row in rows)})
    print(f"{len(rows)} requests, {sum(bool(row['broken']) for row in rows)} of them with something that is wrong")


if __name__ == "__main__":
    main()
