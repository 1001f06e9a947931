"""What several GPUs promise: tables of docs/several_gpus.md, SIMULATED on presets; nothing here was measured.

python -m bench.ranks_tables --json out.json [--only cards 70b nodes]

relay, split, stages: the project's own plans with each transport, all ranks simulated together.
1F1B, interleaved, round-robin: bounds, the least that a pipeline takes with the relay's compute and no wait for any
link, host or update.
- 1F1B on microbatches of a chunk has a bubble of (N - 1) / (M + N - 1), interleaved with v parts of a GPU
  (N - 1) / (v M + N - 1), both times the largest stage (whole blocks; the head is one piece). Source: Narayanan et al.
  2021,
  "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.
- Round-robin: S pieces in turn on N GPUs, which start one chunk after another: a fill of (N - 1) chunks of one piece.
  Batches of fewer than N chunks are cut into N.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from time import process_time
from typing import Literal

from bench.environment import write_json
from flexengine.hardware.nodes import NETWORK_BYTES_PER_S, assumed_node_rate, with_gpus
from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import Numerics, Plan, PlanError, Request
from flexengine.planner.ranks.plan import plan_for_ranks

SEQ_LEN = 2048
HOST_GIB = 110
Transport = Literal["auto", "relay", "split", "stages"]
GPU_GIB = {"h200": 24.0, "rtx4090": 23.0}
NETWORKS_GBIT = (25, 100, 400)
TOKENS = (131072, 32768, 8192, 4096)
INTERLEAVED = 2
WORKERS = 2


def planned(
    spec: ModelSpec,
    profile: HardwareProfile,
    gpus: int,
    tokens: int,
    gib: tuple[float, float],
    nodes: int = 1,
    network: float = NETWORK_BYTES_PER_S,
    transport: Transport = "relay",
) -> Plan:
    """The plan of `gpus` on each node; tokens: of each GPU and step. gib: memory of a GPU, of a node's host."""
    numerics = Numerics(state="bfloat16")
    budgets = int(gib[0] * GIB), int(gib[1] * GIB)
    request = Request(
        SEQ_LEN,
        nodes * gpus * tokens,
        *budgets,
        numerics=numerics,
        ranks=gpus,
        nodes=nodes,
        transport=transport,
    )
    return plan_for_ranks(spec, request, profile, network)


def shown(plan: Plan) -> dict[str, object]:
    """What a row tells of a plan."""
    step = plan.predicted
    return {
        "step_s": round(step.step_s, 3),
        "tokens_per_s": round(plan.request.max_global_batch_tokens / step.step_s),
        "round": f"{plan.chunks_per_round} x {plan.chunk_tokens}",
        "states": "dealt" if plan.deals_states else "host",
        "transport": plan.transport,
        "limited_by": step.limiter,
    }


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


def bounds_s(spec: ModelSpec, relay: Plan) -> dict[str, float]:
    """The least seconds of pipelines with the relay's compute."""
    gpus, compute_s = relay.request.ranks, relay.predicted.busy_s["compute"]
    chunks = max(gpus, -(-relay.request.max_global_batch_tokens // relay.chunk_tokens))
    pieces = len(spec.groups) - 1
    return {
        "1f1b_s": compute_s * largest_stage(spec, gpus) * (1 + (gpus - 1) / chunks),
        "interleaved_s": compute_s * largest_stage(spec, INTERLEAVED * gpus) * (1 + (gpus - 1) / INTERLEAVED / chunks),
        "round_robin_s": compute_s * (1 + gpus * (gpus - 1) / (2 * pieces * chunks)),
    }


def rows_of_cards(model: str = "llama-3.1-8b", workers: int = WORKERS) -> list[dict[str, object]]:
    """Relay, split and stages on one node, beside one GPU of it with as many tokens. workers: processes."""
    cells = [(model, card, tokens, gpus) for card in GPU_GIB for tokens in TOKENS for gpus in (2, 4, 8)]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(row_of_card, *zip(*cells, strict=True)))


def row_of_card(model: str, card: str, tokens: int, gpus: int) -> dict[str, object]:
    """One row; tokens: of each GPU and step."""
    spec, profile, gib = open_model(f"preset:{model}").spec, with_gpus(preset(card), gpus), GPU_GIB[card]
    one = planned(spec, preset(card), 1, tokens, (gib, HOST_GIB)).predicted.step_s
    began = process_time()
    relay = planned(spec, profile, gpus, tokens, (gib, gpus * HOST_GIB))
    row: dict[str, object] = {"card": card, "gpus": gpus, "tokens_per_gpu": tokens, **shown(relay)}
    row["planning_cpu_s"] = round(process_time() - began, 1)
    step_s = {"relay": relay.predicted.step_s, **bounds_s(spec, relay)}
    if profile.link.peer_bytes_per_s:
        split = planned(spec, profile, gpus, tokens, (gib, gpus * HOST_GIB), transport="split")
        step_s["split"] = split.predicted.step_s
    began = process_time()
    stages = planned(spec, profile, gpus, tokens, (gib, gpus * HOST_GIB), transport="stages")
    step_s["stages"] = stages.predicted.step_s
    on_gpus = sum(home.states == "gpu" for home in stages.groups)
    row["stages"] = {**shown(stages), "blocks_on_gpus": on_gpus, "planning_cpu_s": round(process_time() - began, 1)}
    row["speedups"] = {name.removesuffix("_s"): round(gpus * one / s, 2) for name, s in step_s.items()}
    print(row, flush=True)
    return row


def rows_of_70b() -> list[dict[str, object]]:
    """Llama 3.1 70B in full on one node of H200 cards; gib: of a GPU, of the host."""
    spec, rows = open_model("preset:llama-3.1-70b").spec, []
    for gpus, *gib in ((4, 130, 480), (8, 130, 535), (4, 80, 1000), (8, 80, 1500), (8, 24, 1000)):
        row: dict[str, object] = {"card": "h200", "gpus": gpus, "gpu_gib": gib[0], "host_gib": gib[1]}
        began = process_time()
        try:
            profile = with_gpus(preset("h200"), gpus)
            row |= shown(planned(spec, profile, gpus, 131072, (gib[0], gib[1]), transport="auto"))
        except PlanError as error:
            row["refused"] = str(error).splitlines()[0]
        rows.append({**row, "planning_cpu_s": round(process_time() - began, 1)})
        print(rows[-1], flush=True)
    return rows


def rows_of_nodes(model: str = "llama-3.1-8b") -> list[dict[str, object]]:
    """Nodes of eight H200 cards on networks of several rates; efficiency: of one node with as many tokens per GPU.

    pipeline_bound: the same of nodes that each have a part of the layers, which hand a step's hidden states over, and
    their gradients back, while they compute, and wait for nothing else.
    """
    spec, profile, rows = open_model(f"preset:{model}").spec, with_gpus(preset("h200"), 8), []
    for tokens in (131072, 32768):
        alone = planned(spec, profile, 8, tokens, (24, 8 * HOST_GIB)).predicted.step_s
        for nodes in (2, 16, 128):
            for gbit in NETWORKS_GBIT:
                plan = planned(spec, profile, 8, tokens, (24, 8 * HOST_GIB), nodes, gbit * 1e9 / 8)
                row = {"gpus": 8 * nodes, "nodes": nodes, "network_gbit_per_s": gbit, "tokens_per_gpu": tokens}
                # a node between others sends both what forward leaves and what backward does
                borders = min(2, nodes - 1)
                handed_s = borders * 8 * nodes * tokens * 2 * spec.hidden_size / (gbit * 1e9 / 8)
                bound = round(alone / max(alone, handed_s), 3)
                efficiency = round(alone / plan.predicted.step_s, 3)
                rows.append({**row, **shown(plan), "efficiency": efficiency, "pipeline_bound": bound})
                print(rows[-1], flush=True)
    return rows


# ---- as the documentation has them ------------------------------------------------------------------------------


def card_lines(rows: list[dict]) -> list[str]:
    """Lines of a table: speed over one GPU that takes as many tokens a step as each of several."""
    lines = []
    for (card, tokens), found in grouped(rows, "card", "tokens_per_gpu"):
        columns = [
            " / ".join(f"{row['speedups'][name]:.2f}" for row in found) if name in found[0]["speedups"] else "-"
            for name in ("relay", "split", "stages", "1f1b", "interleaved", "round_robin")
        ]
        gpus = " / ".join(str(row["gpus"]) for row in found)
        lines.append(f"| {card} | {tokens} | {gpus} | {' | '.join(columns)} |")
    return lines


def lines_of_70b(rows: list[dict]) -> list[str]:
    """Lines of a table: what fits, and how fast."""
    lines = []
    for row in rows:
        fits = [f"{row['tokens_per_s']:,}", row["states"], row["transport"]] if "step_s" in row else ["-"] * 3
        lines.append(f"| {row['gpus']} | {row['gpu_gib']} | {row['host_gib']} | {' | '.join(fits)} |")
    return lines


def node_lines(rows: list[dict]) -> list[str]:
    """Lines of a table: share of the speed that nodes without a network between them would have, and the bound."""
    return [
        f"| {gpus} | {tokens} | "
        + " | ".join(f"{100 * row['efficiency']:.0f}% ({100 * row['pipeline_bound']:.0f}%)" for row in found)
        + " |"
        for (tokens, gpus), found in grouped(rows, "tokens_per_gpu", "gpus")
    ]


def grouped(rows: list[dict], *names: str) -> list[tuple[tuple, list[dict]]]:
    """Rows on end that agree in some values."""
    return [(key, list(found)) for key, found in groupby(rows, key=lambda row: tuple(row[name] for name in names))]


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
            "peer_bytes_per_s": {card: preset(card).link.peer_bytes_per_s for card in GPU_GIB},
            "network_gbit_per_s": NETWORKS_GBIT,
        }
    }
    found |= {name: tables[name]() for name in args.only}
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
