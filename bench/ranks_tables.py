"""What several GPUs promise: tables of docs/several_gpus.md, SIMULATED on presets; nothing here was measured.

python -m bench.ranks_tables --json out.json [--only cards 70b nodes]

relay: the project's own plan, all ranks simulated together. Beside it stand two estimates of what is not built, both
better than what they stand for could reach:
- split: the relay with a link to the device that is as fast as 1/N of the bytes over PCIe and the rest from the other
  cards. Saved activations, which would not be split, count as fast too.
- stages: the least that a pipeline takes with the relay's compute and no wait for any link, host or update. 1F1B on
  microbatches of a chunk has a bubble of (N - 1) / (M + N - 1), interleaved with v parts of a GPU (N - 1) / (v M + N -
  1), both times the largest stage (whole blocks; the head is one piece). Source: Narayanan et al. 2021, "Efficient
  Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2. Round-robin: S pieces in turn on
  N GPUs, which start one chunk after another: a fill of (N - 1) chunks of one piece. Batches of fewer than N chunks are
  cut into N.
"""

import argparse
from dataclasses import replace
from time import perf_counter

from bench.environment import write_json
from flexengine.hardware.nodes import NETWORK_BYTES_PER_S, assumed_node_rate, with_gpus
from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import Numerics, Plan, PlanError, Request
from flexengine.plan_for_ranks import plan_for_ranks

PEER_BYTES_PER_S = {"h200": 350e9}
"""Between cards of a node, where they need not pass through the host: NVLink, assumed; GeForce cards have none."""
SEQ_LEN = 2048
HOST_GIB = 110
GPU_GIB = {"h200": 24.0, "rtx4090": 23.0}
NETWORKS_GBIT = (25, 100, 400)
INTERLEAVED = 2


def planned(
    spec: ModelSpec,
    profile: HardwareProfile,
    gpus: int,
    tokens: int,
    gib: tuple[float, float],
    nodes: int = 1,
    network: float = NETWORK_BYTES_PER_S,
) -> Plan:
    """The plan of `gpus` on each node; tokens: of each GPU and step. gib: memory of a GPU, of a node's host."""
    numerics = Numerics(state="bfloat16")
    budgets = int(gib[0] * GIB), int(gib[1] * GIB)
    request = Request(SEQ_LEN, nodes * gpus * tokens, *budgets, numerics=numerics, ranks=gpus, nodes=nodes)
    return plan_for_ranks(spec, request, profile, network)


def shown(plan: Plan) -> dict[str, object]:
    """What a row tells of a plan."""
    step = plan.predicted
    return {
        "step_s": round(step.step_s, 3),
        "tokens_per_s": round(plan.request.max_global_batch_tokens / step.step_s),
        "round": f"{plan.chunks_per_round} x {plan.chunk_tokens}",
        "states": "dealt" if plan.deals_states else "host",
        "limited_by": step.limiter,
    }


def with_split(profile: HardwareProfile, gpus: int, peers: float) -> HardwareProfile:
    """A profile whose cards each fetch 1/N and get the rest from each other."""
    share = 1 / gpus + (1 - 1 / gpus) * profile.h2d_bytes_per_s / peers
    names = ("h2d_bytes_per_s", "h2d_duplex_bytes_per_s", "h2d_beside_cpu_bytes_per_s", "host_bytes_per_s")
    return replace(profile, **{name: getattr(profile, name) / share for name in names})


def largest_stage(spec: ModelSpec, stages: int) -> float:
    """Work of the largest of so many stages on end over the mean one; blocks and the head are pieces."""
    pieces = [float(group.numel) for group in spec.groups[1:]]
    low, high = max(pieces), sum(pieces)
    while high - low > 1e-6 * high:  # the least capacity with which so many stages hold all pieces in order
        middle, used, filled = (low + high) / 2, 1, 0.0
        for piece in pieces:
            used, filled = (used + 1, piece) if filled + piece > middle else (used, filled + piece)
        low, high = (low, middle) if used <= stages else (middle, high)
    return high * stages / sum(pieces)


def stages_s(spec: ModelSpec, relay: Plan) -> dict[str, float]:
    """The least seconds of pipelines with the relay's compute."""
    gpus, compute_s = relay.request.ranks, relay.predicted.busy_s["compute"]
    chunks = max(gpus, -(-relay.request.max_global_batch_tokens // relay.chunk_tokens))
    pieces = len(spec.groups) - 1
    return {
        "1f1b_s": compute_s * largest_stage(spec, gpus) * (1 + (gpus - 1) / chunks),
        "interleaved_s": compute_s * largest_stage(spec, INTERLEAVED * gpus) * (1 + (gpus - 1) / INTERLEAVED / chunks),
        "round_robin_s": compute_s * (1 + gpus * (gpus - 1) / (2 * pieces * chunks)),
    }


def rows_of_cards(model: str = "llama-3.1-8b") -> list[dict[str, object]]:
    """Relay, split and stages on one node, beside one GPU of it with as many tokens."""
    spec, rows = open_model(f"preset:{model}").spec, []
    for card, counts in (("h200", (2, 4, 8)), ("rtx4090", (4, 8))):
        for tokens in (131072, 32768, 8192):
            gib = GPU_GIB[card]
            one = planned(spec, preset(card), 1, tokens, (gib, HOST_GIB)).predicted.step_s
            for gpus in counts:
                profile = with_gpus(preset(card), gpus)
                began = perf_counter()
                relay = planned(spec, profile, gpus, tokens, (gib, gpus * HOST_GIB))
                row = {"card": card, "gpus": gpus, "tokens_per_gpu": tokens, **shown(relay)}
                row["planning_s"] = round(perf_counter() - began, 1)
                step_s = {"relay": relay.predicted.step_s, **stages_s(spec, relay)}
                if card in PEER_BYTES_PER_S:
                    split = with_split(profile, gpus, PEER_BYTES_PER_S[card])
                    step_s["split"] = planned(spec, split, gpus, tokens, (gib, gpus * HOST_GIB)).predicted.step_s
                row["speedups"] = {name.removesuffix("_s"): round(gpus * one / s, 2) for name, s in step_s.items()}
                rows.append(row)
                print(row, flush=True)
    return rows


def rows_of_70b() -> list[dict[str, object]]:
    """Llama 3.1 70B in full on one node of H200 cards; gib: of a GPU, of the host."""
    spec, rows = open_model("preset:llama-3.1-70b").spec, []
    for gpus, *gib in ((4, 130, 480), (8, 130, 535), (4, 80, 1000), (8, 80, 1500), (8, 24, 1000)):
        row: dict[str, object] = {"card": "h200", "gpus": gpus, "gpu_gib": gib[0], "host_gib": gib[1]}
        began = perf_counter()
        try:
            row |= shown(planned(spec, with_gpus(preset("h200"), gpus), gpus, 131072, (gib[0], gib[1])))
        except PlanError as error:
            row["refused"] = str(error).splitlines()[0]
        rows.append({**row, "planning_s": round(perf_counter() - began, 1)})
        print(rows[-1], flush=True)
    return rows


def rows_of_nodes(model: str = "llama-3.1-8b") -> list[dict[str, object]]:
    """Nodes of eight H200 cards on networks of several rates; efficiency: of one node with as many tokens per GPU."""
    spec, profile, rows = open_model(f"preset:{model}").spec, with_gpus(preset("h200"), 8), []
    for tokens in (131072, 32768):
        alone = planned(spec, profile, 8, tokens, (24, 8 * HOST_GIB)).predicted.step_s
        for nodes in (2, 16, 128):
            for gbit in NETWORKS_GBIT:
                plan = planned(spec, profile, 8, tokens, (24, 8 * HOST_GIB), nodes, gbit * 1e9 / 8)
                row = {"gpus": 8 * nodes, "nodes": nodes, "network_gbit_per_s": gbit, "tokens_per_gpu": tokens}
                rows.append({**row, **shown(plan), "efficiency": round(alone / plan.predicted.step_s, 3)})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Plan all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write the rows")
    tables = {"cards": rows_of_cards, "70b": rows_of_70b, "nodes": rows_of_nodes}
    parser.add_argument("--only", nargs="+", choices=tables, default=list(tables), help="which tables")
    args = parser.parse_args()
    found: dict[str, object] = {
        "assumed": {
            "node_bytes_per_s": {card: {n: assumed_node_rate(preset(card), n) for n in (2, 4, 8)} for card in GPU_GIB},
            "peer_bytes_per_s": PEER_BYTES_PER_S,
            "network_gbit_per_s": NETWORKS_GBIT,
        }
    }
    found |= {name: tables[name]() for name in args.only}
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
