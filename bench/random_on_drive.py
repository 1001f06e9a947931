"""Does a drive ever change a result? Random jobs, each trained in memory and with random planes on a drive.

    python -m bench.random_on_drive --seeds 0 100

A job (`bench.random_cases`: families, adapters, experts, optimizers, numerics) is trained for two steps under its plan
of one rank, and again with states, weights and gradients of random groups on a drive, in random tiles and slots, by one
rank or by two that relay or split; of one rank some are updated before the norm is known, and random blocks keep what
they keep there. Losses, norms and all weights have to be equal in every bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import torch

from bench.random_cases import Case, Variant, draw_case
from bench.random_plans import promised
from bench.random_runs import MOST_BYTES, Outcome, on_ranks, planned_run, train
from flexengine.api import PlannedRun
from flexengine.models import blocks
from flexengine.plan import GroupPlan, LayerPlan
from flexengine.planner.on_drive import home_on_drive, numbers_on_drive
from flexengine.schedule.layout import Layout
from flexengine.schedule.second_planes import may_speculate


def on_drive(planned: PlannedRun, random: Random) -> PlannedRun:
    """The run with planes of random groups on a drive."""
    plan, model = planned.plan, planned.source.spec
    layout = Layout(model, plan)
    homes = list(plan.groups)
    for i, (group, stored) in enumerate(zip(layout.model.groups, layout.groups, strict=True)):
        if random.random() < 0.2 or stored.on_gpu_only:
            continue
        if group.frozen and numbers_on_drive(group, on_drive=True):
            homes[i] = GroupPlan(weights="drive", update="none")
        elif not group.frozen:
            there = home_on_drive(group, True, plan.request.ranks)
            kept = tuple(kind for kind in ("weights", "grads") if random.random() < 0.3)
            there = there.off_the_drive(kept)
            alone = plan.request.ranks == 1
            bold = alone and plan.may_speculate and may_speculate(stored, there) and random.random() < 0.5
            homes[i] = replace(there, speculative=bold)
    tile, slots = random.choice((1, 3000)), random.randint(1, 4)
    layers = tuple(
        _kept_on_drive(kept, random) if layer.kind == "block" and plan.request.ranks == 1 else kept
        for kept, layer in zip(plan.layers, model.layers, strict=True)
    )
    moved = replace(plan, groups=tuple(homes), layers=layers, touched_only=False, drive_tile=tile, drive_slots=slots)
    return replace(planned, plan=promised(moved, Layout(model, moved)))


def _kept_on_drive(kept: LayerPlan, random: Random) -> LayerPlan:
    """Often with what it keeps on the host, or on the GPU, on a drive."""
    if random.random() < 0.3:
        return kept
    if random.random() < 0.7:
        moved = kept.keep_gpu[: random.randint(0, len(kept.keep_gpu))]
        home = kept.input_home if kept.input_again else "host"
        stay = tuple(op for op in kept.keep_gpu if op not in moved)
        kept = replace(kept, keep_gpu=stay, keep_host=(*kept.keep_host, *moved), input_home=home)
    there = kept.keep_host or (kept.input_home == "host" and not kept.input_again)
    return replace(kept, on_drive=bool(there))


def _on_drive(folder: Path, case: Case, variant: Variant) -> Outcome:
    def train_one() -> Outcome:
        return train(case, on_drive(planned_run(folder, case, variant, MOST_BYTES), Random(f"drive of {case.seed}")))

    return train_one() if variant.ranks == 1 else on_ranks(train_one, variant.ranks)


@patch.object(blocks, "PART_ELEMENTS", 1)
def compare(case: Case, folder: Path) -> str:
    """What came of a job: same, nothing on the drive, refused, or a complaint."""
    random = Random(-1 - case.seed)
    (folder / "config.json").write_text(json.dumps(case.config))
    options = case.options | {"offload_dir": str(folder / "drive"), "max_disk_gib": 0.25}
    case = case._replace(options=options)
    try:
        planned = planned_run(folder, case, case.variants[0], MOST_BYTES)
    except ValueError as error:
        return f"refused: {error}"
    choice = {1: {}, 2: {"transport": random.choice(("relay", "split"))}}
    ranks = random.choice((1, 2))
    variant = case.variants[0]._replace(options=case.variants[0].options | choice[ranks], ranks=ranks)
    try:
        if not on_drive(planned, Random(f"drive of {case.seed}")).plan.uses_drive:
            return "nothing on the drive"
        expected, found = train(case, planned), _on_drive(folder, case, variant)
    except Exception:
        return f"crash: {traceback.format_exc()[-3000:]}"
    return "same" if found.agrees(expected) else f"bits differ: {found.losses} instead of {expected.losses}"


def compared(seeds: Iterable[int]) -> Counter[str]:
    """Outcomes of jobs; complaints are printed."""
    found = Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        for seed in seeds:
            case = draw_case(seed, most_ranks=2)
            outcome = compare(case, Path(name))
            found[outcome.split(":")[0]] += 1
            if outcome.startswith(("crash", "bits")):
                print(seed, case.name, case.options, outcome, flush=True)
    return found


def main() -> None:
    """Parse arguments, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 100), metavar=("FIRST", "END"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # a forked rank would wait forever for threads that it has not
    print(dict(compared(range(*args.seeds))))


if __name__ == "__main__":
    main()
