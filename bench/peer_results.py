"""Which engine did what with which request, in one small file: the best row of every engine, from files of bench.peers.

    python -m bench.peer_results RUN.json ... --out bench/results/h200_peers.json --note "the other GPU was busy"

Of a request and an engine that the file has already, the faster row stays. It prints the file's table in Markdown, as
docs/performance.md has it. --without leaves out what says nothing of an engine.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.environment import in_rows
from bench.peers import NOT_STARTED, WORKS

KEPT = ("engine", "micro_batch", "tokens_per_s", "step_s", "losses", "gpu_peak_gib", "host_resident_gib")
DIGITS = 6
MOST_CHARACTERS = 110
HEAD = ("work", "engine", "tokens/s", "step s", "GPU GiB", "host GiB", "sequences at once", "what happened")


def compact(row: dict) -> dict:
    """What a table and its reader need of a row of bench.peers: of losses the first and the last."""
    row = {**row, "losses": row["losses"][:: max(1, len(row["losses"]) - 1)]} if "losses" in row else row
    kept = {name: _short(row[name]) for name in KEPT if row.get(name) is not None}
    if "failed" in row:
        return {"engine": row["engine"], "micro_batches": row["micro_batches"], "failed": reason(row["failed"])}
    return kept


def reason(text: str) -> str:
    """The last line of a failure, without advice that follows its first sentences."""
    last = text.strip().splitlines()[-1]
    return re.sub(r"(MiB|GiB)\..*", r"\1", last)[:MOST_CHARACTERS]


def _short(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return [_short(each) for each in value] if isinstance(value, list) else value


def best_rows(rows: Iterable[dict]) -> list[dict]:
    """The fastest row of each request and engine, or its last failure where none ran; in the requests' order."""
    best: dict[tuple[str, str], dict] = {}
    for row in rows:
        key = row["work"], row["engine"]
        if key not in best or row.get("tokens_per_s", 0) >= best[key].get("tokens_per_s", 0):
            best[key] = row
    order = list(WORKS)
    return sorted(best.values(), key=lambda row: (order.index(row["work"]), -row.get("tokens_per_s", 0)))


def merge(into: dict, runs: Sequence[dict], note: str = "", without: Sequence[str] = ()) -> dict:
    """A file of results with the best rows of runs of `bench.peers --work` of one commit."""
    call = {"commit": runs[0]["environment"]["commit"], "note": note, "commands": list[str]()}
    calls, rows = [*into.get("calls", []), call], list(into.get("rows", []))
    for run in runs:
        command = re.sub(r" --(json|limit-s|total-s) \S+", "", run["environment"]["command"])
        named = re.search(r"--work (\S+)", command)
        if named is None or run["environment"]["commit"] != call["commit"]:
            raise SystemExit(f"runs of one commit and with --work are asked for, {call['commit']}; found: {command}")
        call["commands"].append(command)
        began = [row for row in run["rows"] if not row.get("failed", "").startswith(NOT_STARTED)]
        new = [row for row in began if f"{named[1]}:{row['engine']}" not in without]
        rows += [{"work": named[1], "call": len(calls) - 1, **compact(row)} for row in new]
    environment = {name: value for name, value in runs[-1]["environment"].items() if name not in ("commit", "command")}
    return {"environment": environment, "versions": runs[-1]["versions"], "calls": calls, "rows": best_rows(rows)}


def markdown(rows: list[dict]) -> list[str]:
    """The rows as a table."""
    lines = [HEAD, tuple("-" for _ in HEAD)]
    for row in rows:
        cells = (row["work"], row["engine"])
        if "failed" in row:
            lines.append((*cells, *"-----", row["failed"]))
            continue
        gpu = f"{row['gpu_peak_gib']:.1f}" if "gpu_peak_gib" in row else "-"
        rate, host = f"{row['tokens_per_s']:,.0f}", f"{row['host_resident_gib']:.1f}"
        lines.append((*cells, rate, f"{row['step_s']:.2f}", gpu, host, f"{row['micro_batch']:g}", ""))
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="files that bench.peers --json wrote")
    parser.add_argument("--out", type=Path, required=True, help="the file that these go into")
    parser.add_argument("--note", default="", help="what else is to be known of these runs")
    parser.add_argument("--without", nargs="*", default=[], metavar="WORK:ENGINE")
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    results = merge(results, [json.loads(path.read_text()) for path in args.runs], args.note, args.without)
    args.out.write_text(in_rows(results))
    print("\n".join(markdown(results["rows"])))


if __name__ == "__main__":
    main()
