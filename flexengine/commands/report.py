"""`flexengine report`: draws where the time of a run went, simulated and measured, on one page; needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexengine.commands.files import check_target, write_whole
from flexengine.commands.parsers import report_parser
from flexengine.commands.read_run import read_run
from flexengine.options.train_config import LOG_FILE
from flexengine.reports.run_page import HOW_TO_TRACE, run_page

REPORT_FILE = "report.html"


def main(argv: Sequence[str]) -> int:
    """Write the report of the run folder that `argv` names; returns the exit status.

    Raises: ValueError for what a person can correct, before anything is written.
    """
    arguments = report_parser().parse_args(argv)
    folder: Path = arguments.run_folder
    # Everything is read before anything is written: a damaged run leaves no page.
    run = read_run(folder)
    target = arguments.html if arguments.html is not None else folder / REPORT_FILE
    check_target("--html", target)
    text = run_page(run)
    write_whole("--html", target, lambda beside: beside.write_text(text, encoding="utf-8"))
    print(f"wrote {target}")
    if run.num_damaged_lines:
        print(f"{run.num_damaged_lines} damaged lines of {folder / LOG_FILE} are left out")
    if run.measured is None:
        print(f"no step was measured: {HOW_TO_TRACE}")
    return 0
