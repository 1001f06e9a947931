"""How fast are several nodes, by simulation? Plans steps of Llama 3.1 8B on nodes of eight H200 and on one of them.

python -m bench.node_tables --json bench/results/ranks_tables.json   # replaces the rows of nodes in that file
python -m bench.node_tables --exchanges --json bench/results/ranks_tables.json   # those of what two nodes send, alone
python -m bench.node_tables --large --json bench/results/ranks_tables.json   # those of Llama 3.1 70B on one node

The share is of what the nodes would do if each were as fast as one alone, under the plan that is fastest there: what
nodes cost altogether, what they wait for and what they may not do. Rates of a network are what it is called.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal

from bench.environment import describe_environment
from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.plan import Numerics, Plan, Request
from flexengine.planner.feasibility.shortage import ShortageError
from flexengine.planner.ranks.plan import plan_for_ranks

Exchange = Literal["float32", "bfloat16", "fp8"]

MODEL, CARD, GPUS = "llama-3.1-8b", "h200", 8
GPU_GIB, HOST_GIB = 24, 110  # of each GPU
TOKENS = (131072, 32768)
NODES = (2, 16, 128)
GBIT_PER_S = (25, 100, 400)
EXCHANGES: tuple[Exchange, ...] = ("float32", "bfloat16", "fp8")
SLOW_GBIT_PER_S = (10, 25, 100)
LARGE, LARGE_TOKENS = "llama-3.1-70b", 131072
LARGE_NODES = ((4, 130, 480), (8, 130, 535), (8, 78, 520), (4, 80, 1000), (8, 80, 1500), (8, 24, 1000))
"""GPUs, GiB of each, and GiB of the host."""


def planned(nodes: int, tokens: int, gbit_per_s: float = 100.0, exchange: Exchange = "bfloat16") -> Plan:
    """The fastest plan of so many nodes, each GPU of which has so many tokens of a step."""
    numerics = Numerics(state="bfloat16", grad="float32" if exchange == "float32" else "bfloat16")
    request = Request(
        2048, nodes * GPUS * tokens, GPU_GIB * GIB, GPUS * HOST_GIB * GIB, numerics=numerics,
        ranks=GPUS, nodes=nodes, whole_steps=True, exchange="fp8" if exchange == "fp8" else None,
    )  # fmt: skip
    model = open_model(f"preset:{MODEL}", needs_weights=False).spec
    return plan_for_ranks(model, request, with_gpus(preset(CARD), GPUS), gbit_per_s * 1e9 / 8)


def rows() -> list[dict[str, Any]]:
    """A row for each number of tokens, of nodes, and rate of the network."""
    found = []
    for tokens in TOKENS:
        alone_s = planned(1, tokens).predicted.step_s
        for nodes in NODES:
            for gbit_per_s in GBIT_PER_S:
                plan = planned(nodes, tokens, gbit_per_s)
                told = plan.predicted
                row = {"gpus": GPUS * nodes, "nodes": nodes, "network_gbit_per_s": gbit_per_s, "tokens_per_gpu": tokens}
                row |= {"step_s": round(told.step_s, 3), "exchange_wait_s": round(told.exchange_wait_s, 3)}
                row |= {"transport": plan.transport, "efficiency": round(alone_s / told.step_s, 3)}
                print(row, flush=True)
                found.append(row)
    return found


def rows_of_exchanges() -> list[list[Any]]:
    """What two nodes send, Gbit/s, seconds of a step and those that all else waits, and the share of what two nodes
    would do if each were as fast as one alone that stores bfloat16."""
    tokens, found = TOKENS[-1], []
    alone_s = planned(1, tokens).predicted.step_s
    for exchange in EXCHANGES:
        for gbit_per_s in SLOW_GBIT_PER_S:
            told = planned(2, tokens, gbit_per_s, exchange).predicted
            figures = (told.step_s, told.exchange_wait_s, alone_s / told.step_s)
            found.append([exchange, gbit_per_s, *(round(figure, 3) for figure in figures)])
            print(found[-1], flush=True)
    return found


def rows_of_large() -> list[dict[str, Any]]:
    """A row for each node, with float32 states and with bf16 ones."""
    model, found = open_model(f"preset:{LARGE}", needs_weights=False).spec, list[dict[str, Any]]()
    for gpus, gpu_gib, host_gib in LARGE_NODES:
        for state in ("float32", "bfloat16"):
            sizes = 2048, gpus * LARGE_TOKENS, gpu_gib * GIB, host_gib * GIB
            row: dict[str, Any] = {"gpus": gpus, "gpu_gib": gpu_gib, "host_gib": host_gib, "state": state}
            try:
                request = Request(*sizes, numerics=Numerics(state=state), ranks=gpus, whole_steps=True)
                plan = plan_for_ranks(model, request, with_gpus(preset(CARD), gpus))
                homes = sorted({home.states for home in plan.groups})
                row |= {"step_s": round(plan.predicted.step_s, 1), "states": homes, "transport": plan.transport}
                row |= {"tokens_per_s": round(gpus * LARGE_TOKENS / plan.predicted.step_s)}
            except ShortageError as error:
                row |= {"fits_with": error.remedies[0].flags}
            print(row, flush=True)
            found.append(row)
    return found


def main() -> None:
    """Plan all rows, and replace those of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None, help="the file whose rows are replaced")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--exchanges", action="store_true", help="plan two nodes that send gradients in several dtypes")
    either.add_argument("--large", action="store_true", help="plan a model of 70 billion parameters on one node")
    flags = parser.parse_args()
    if flags.large:
        about = describe_environment()
        found = {"70b": {"commit": about["commit"], "command": about["command"], "rows": rows_of_large()}}
    else:
        found = {"exchanges": rows_of_exchanges()} if flags.exchanges else {"nodes": rows()}
    if flags.json is not None:
        told = {**json.loads(flags.json.read_text()), **found}
        flags.json.write_text(json.dumps(told, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
