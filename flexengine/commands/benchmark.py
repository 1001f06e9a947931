"""`flexengine benchmark`: a few steps of random tokens for each case, as a table and JSON, beside an earlier file."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexengine.commands.files import check_target, write_whole
from flexengine.commands.read_run import read_run
from flexengine.metrics import format_bytes, format_seconds, format_tokens_per_s
from flexengine.options.flags import add_flag, from_flags, positive_count
from flexengine.options.job import Job
from flexengine.options.option import Option, flag_of, options_of
from flexengine.options.other_names import translated_flags
from flexengine.options.train_config import CONFIG_FILE, TrainConfig
from flexengine.reports.text_format import align_columns, percent
from flexengine.wording import FlagParser, parse_json, shown

STEPS = 5
"""Steps of a case unless --steps says otherwise: the first two, which warm up and are timed, do not count."""
NAMES = ("model", "gpus", *(name for name, option in options_of(Job).items() if option.decides_plan))
OPTIONS: dict[str, Option] = {name: options_of(TrainConfig)[name] for name in NAMES}
"""Options that a case may differ by; each has as many cases as values."""


def main(argv: Sequence[str]) -> int:
    """Measure the cases that a command line asks for, print a table; returns the exit status: 2 if one did not run.

    Every case is a run of `flexengine train` in a process and a folder of its own. Raises: ValueError for what a person
    can correct, before the first one runs.
    """
    parser = _parser()
    flags = vars(parser.parse_args(translated_flags(argv, {action.dest for action in parser._actions})))
    steps, path, against = flags.pop("steps"), flags.pop("json"), flags.pop("against")
    check_target("--json", path)
    earlier = {} if against is None else _earlier(against)
    cases = list(_cases(flags))
    configs = [TrainConfig(**case, data_source="synthetic", steps=steps, logging="warning") for case in cases]
    rows = []
    for case, config in zip(cases, configs, strict=True):
        print(f"{len(rows) + 1} of {len(cases)}: {_label(case, cases)}", file=sys.stderr, flush=True)
        rows.append({"case": case, **_measured(config)})
    print(_table(rows, cases, earlier))
    if path is not None:
        text = json.dumps({"steps": steps, "cases": rows}, indent=1) + "\n"
        write_whole("--json", path, lambda beside: beside.write_text(text, encoding="utf-8"))
        print(f"wrote {path}", file=sys.stderr)
    return 2 if any("error" in row for row in rows) else 0


def _cases(flags: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the values that were given, the last option changing first."""
    values = {name: [value] if OPTIONS[name].is_list else value for name, value in flags.items()}
    for chosen in itertools.product(*(value if isinstance(value, list) else [value] for value in values.values())):
        yield from_flags(OPTIONS.values(), dict(zip(values, chosen, strict=True)))


def _measured(config: TrainConfig) -> dict[str, Any]:
    """Train a case; returns its figures, in seconds and bytes, or the message that it ended with."""
    with tempfile.TemporaryDirectory(prefix="flexengine-benchmark-") as place:
        asked, folder = Path(place, CONFIG_FILE), Path(place, "run")
        asked.write_text(config.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "flexengine", "train", "--config", asked, "--output-dir", folder]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = done.stderr.strip() or f"exit status {done.returncode}"
            return {"error": said.removeprefix("flexengine train: ")}
        run = read_run(folder)
    machine = next((line for line in done.stdout.splitlines() if line.startswith("machine: ")), "")
    steady, last = run.steady_steps, run.steps[-1]
    return {
        "machine": machine.partition(";")[0],
        "step_s": run.step_s,
        "predicted_step_s": run.predicted_s,
        "tokens_per_s": sum(step.num_tokens for step in steady) / sum(step.step_s for step in steady),
        "gpu_peak_bytes": last.gpu_peak_bytes,
        "host_peak_bytes": last.host_peak_bytes,
    }


def _table(rows: Sequence[Mapping[str, Any]], cases: Sequence[Mapping[str, Any]], earlier: Mapping[str, Any]) -> str:
    """Align the figures of all cases; below stand messages of those that did not run, and the machines."""
    head = ("case", "tokens/s", "step", "predicted", "GPU memory", "host memory", *(("change",) if earlier else ()))
    ran = [row for row in rows if "error" not in row]
    lines = align_columns([head, *(_cells(row, cases, earlier) for row in ran)], left=(0,)) if ran else []
    lines += [f"{_label(row['case'], cases)}: {row['error']}" for row in rows if "error" in row]
    machines = dict.fromkeys(row["machine"] for row in ran)
    others = dict.fromkeys(f"--against is of another {row['machine']}" for row in earlier.values())
    return "\n".join([*lines, *machines, *(line for line in others if not line.endswith(tuple(machines)))])


def _cells(row: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], earlier: Mapping[str, Any]) -> tuple[str, ...]:
    before = earlier.get(_key(row["case"]))
    change = "new" if before is None else f"{100 * (row['tokens_per_s'] / before['tokens_per_s'] - 1):+.1f}%"
    return (
        _label(row["case"], cases),
        format_tokens_per_s(row["tokens_per_s"]).removesuffix(" tokens/s"),
        format_seconds(row["step_s"]),
        f"{format_seconds(row['predicted_step_s'])} ({percent(row['predicted_step_s'] / row['step_s'])})",
        format_bytes(row["gpu_peak_bytes"]),
        format_bytes(row["host_peak_bytes"]),
        *((change,) if earlier else ()),
    )


def _label(case: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> str:
    """Name a case by the options that not all cases share; a single one by its model."""
    varied = [name for name in case if len({_key(other[name]) for other in cases}) > 1]
    return " ".join(f"{flag_of(name)} {OPTIONS[name].to_flag(case[name])}" for name in varied or ["model"])


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _earlier(path: Path) -> dict[str, Any]:
    """Read the cases of an earlier file that ran. Raises ValueError for what is none."""
    if not path.is_file():
        raise ValueError(f"--against {path}: no such file; give one that --json wrote")
    result = parse_json(path.read_bytes(), path)
    try:
        ran = {_key(row["case"]): row for row in result["cases"] if "error" not in row}
        assert all(isinstance(row["machine"], str) and row["tokens_per_s"] > 0 for row in ran.values())
    except (TypeError, KeyError, AssertionError):
        raise ValueError(f"--against {path}: {shown(result)} is no result of flexengine benchmark") from None
    return ran


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="flexengine benchmark",
        description="Takes a few steps of random tokens in every case and tells how fast they were, beside what was"
        " predicted. Options take several values; every combination is a case, in a process of its own.",
        argument_default=argparse.SUPPRESS,
    )
    text = f"steps of a case; the first two do not count (default: {STEPS})"
    parser.add_argument("--steps", type=positive_count, default=STEPS, metavar="N", help=text)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE.json", help="also write the figures to a file")
    parser.add_argument("--against", type=Path, default=None, metavar="FILE.json", help="compare with such a file")
    group = parser.add_argument_group("what is measured, as in train")
    for option in OPTIONS.values():
        add_flag(group, option, option.default, several=True)
    return parser
