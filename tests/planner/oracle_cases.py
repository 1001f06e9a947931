"""Small planning problems, and what the wide oracle found for each; oracle_cases.json holds the answers.

A hundred clip gradients. In the others the GPU may update inside backward, from gradients that are stored or not.

python -m tests.planner.oracle_cases            # computes them all again, about half an hour
python -m tests.planner.oracle_cases --plans    # tells how near all plans are, in a minute
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from unittest import mock

from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Numerics, Request
from flexengine.planner.bound.speed_of_light import speed_of_light_s
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from flexengine.schedule.layout import Layout
from tests.planner.wide_oracle import Verdict, judge
from tests.schedule.small_plans import FLOAT32, resident_plan, small_model

NUM_CLIPPED = 100
NUM_CASES = NUM_CLIPPED + 16
ANSWERS = Path(__file__).with_name("oracle_cases.json")
ROOMY = 1 << 40
NEAR = 1.02
"""Times the best that a plan may take to be near it."""


@dataclass(frozen=True)
class Case:
    """A model, a machine whose link has some rates, and a request."""

    seed: int
    blocks: int
    tied: bool
    hidden: int
    vocab: int
    link_bytes_per_s: float
    duplex_share: float
    compute_share: float
    seq_len: int
    batch_tokens: int
    chunk_tokens: int | None
    round_tokens: int | None
    split_masters: bool
    gpu_share: float
    host_share: float
    clipping: bool

    def model(self) -> ModelSpec:
        """The model."""
        return small_model(self.blocks, self.tied, self.hidden, self.vocab)

    def profile(self) -> HardwareProfile:
        """The machine: a small CPU whose matrix products run at some share of its rate, and its link."""
        plain = preset("cpu-test")
        both = self.duplex_share * self.link_bytes_per_s
        return plain.changed(
            matmul_flops_per_s=tuple((n, self.compute_share * rate) for n, rate in plain.matmul.flops_per_s),
            h2d_bytes_per_s=self.link_bytes_per_s,
            d2h_bytes_per_s=self.link_bytes_per_s,
            h2d_duplex_bytes_per_s=both,
            d2h_duplex_bytes_per_s=both,
        )

    def request(self) -> Request:
        """Budgets between the least that fits and what holds everything: GPU first, then the host under it."""
        model, profile = self.model(), self.profile()
        numerics = Numerics() if self.split_masters else FLOAT32
        request = Request(
            self.seq_len,
            self.batch_tokens,
            ROOMY,
            ROOMY,
            self.chunk_tokens,
            self.round_tokens,
            clipping=self.clipping,
            whole_steps=not self.clipping,
            numerics=numerics,
        )
        chunk = self.chunk_tokens or self.batch_tokens
        resident = Layout(model, resident_plan(model, request, chunk, max(1, (self.round_tokens or chunk) // chunk)))
        least = Feasibility(Problem(model, request, profile)).least_gpu()
        most_bytes = max(least.gpu_bytes, gpu_required_bytes(resident, profile))
        gpu_bytes = least.gpu_bytes + int(self.gpu_share * (most_bytes - least.gpu_bytes))
        request = replace(request, max_gpu_bytes=gpu_bytes)
        on_host = Feasibility(Problem(model, request, profile)).least_host()
        assert on_host is not None
        everything = host_required_bytes(Layout(model, least.plan), profile)
        host_bytes = on_host.host_bytes + int(self.host_share * max(1 << 16, everything - on_host.host_bytes))
        return replace(request, max_host_bytes=host_bytes)


def case(seed: int) -> Case:
    """The case of a seed."""
    random = Random(seed)
    blocks = random.choice([2, 2, 2, 3, 3, 4])
    seq_len = random.choice([32, 64, 128])
    # free sizes only where there are few of them
    sizes = random.choice([(64, 128), (64, 256), (128, 128), (128, 256), (None, None) if blocks == 2 else (64, 128)])
    chunk, tokens = sizes
    return Case(
        seed=seed,
        blocks=blocks,
        tied=random.random() < 0.3,
        hidden=random.choice([64, 128]),
        vocab=random.choice([64, 256, 1024]),
        link_bytes_per_s=10 ** random.uniform(8, 10.3),
        duplex_share=random.choice([0.6, 0.8, 1.0]),
        compute_share=random.choice([0.5, 1.0, 4.0]),
        seq_len=seq_len,
        batch_tokens=128 if chunk is None else (tokens or chunk) * random.choice([1, 2, 3]),
        chunk_tokens=chunk,
        round_tokens=tokens,
        split_masters=random.random() < 0.5,
        gpu_share=random.uniform(0.0, 0.9),
        host_share=random.choice([100.0, 100.0, 1.0, 0.5, 0.1]),
        clipping=seed < NUM_CLIPPED,
    )


def answer(which: Case) -> dict[str, object]:
    """A case with what the oracle found."""
    found: Verdict = judge(which.model(), which.request(), which.profile())
    counts = {"placements": found.placements, "fitting": found.fitting, "simulated": found.simulated}
    return {"case": asdict(which), "best_s": found.best_s, **counts}


def without_temporaries() -> AbstractContextManager[object]:
    """Leave out of budgets what ops allocate on a CPU, as on the cards that the cases stand for."""
    return mock.patch("flexengine.planner.cost.memory._temporaries", return_value={})


def answers() -> list[dict]:
    """The stored answers."""
    return json.loads(ANSWERS.read_text())


def ratios(seeds: Iterable[int], best_s: Mapping[int, float]) -> dict[int, float]:
    """Seconds of plans over the best ones, by seed. No bound is above a plan or an answer, or AssertionError."""
    found = {}
    for seed in seeds:
        which = case(seed)
        model, request, profile = which.model(), which.request(), which.profile()
        predicted = make_plan(model, request, profile).predicted
        found[seed] = predicted.step_s / best_s[seed]
        least_s = min(predicted.step_s, best_s[seed])
        assert 0 < predicted.speed_of_light_s <= least_s, seed
        # the prediction names the smaller of bound and step; the bound itself must not need that
        assert speed_of_light_s(model, request, profile) <= least_s, seed
    return found


def show_plans() -> None:
    """Print how far plans are from the best, worst first."""
    with without_temporaries():
        found = ratios(range(NUM_CASES), {seed: row["best_s"] for seed, row in enumerate(answers())})
    for seed, ratio in sorted(found.items(), key=lambda item: -item[1])[:10]:
        print(f"case {seed}: {ratio:.4f} times the best")
    print(f"{sum(ratio <= NEAR for ratio in found.values())} of {NUM_CASES} within {NEAR - 1:.0%}")


def main() -> None:
    """Ask the oracle about all cases, one process per core; or tell how near plans are."""
    if "--plans" in sys.argv:
        return show_plans()
    found = []
    with without_temporaries(), ProcessPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(answer, map(case, range(NUM_CASES))):
            found.append(result)
            print({k: v for k, v in result.items() if k != "case"}, flush=True)
    ANSWERS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
