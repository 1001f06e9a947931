"""Flags of a benchmark that are options of a job: types, defaults and checks are those of `flexengine train`."""

from __future__ import annotations

import argparse
from typing import Any

from flexengine.options.flags import add_flag, from_flags
from flexengine.options.job import Job
from flexengine.options.option import options_of

SHORT = {
    "max_seq_len": "--seq-len",
    "max_global_batch_tokens": "--tokens-per-step",
    "max_host_mem_gib": "--host-gib",
}
"""Options that benchmarks name more briefly."""


def add_job_flags(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """One flag for each named option, with the defaults that differ from a job's."""
    for name in names:
        option = options_of(Job)[name]
        add_flag(parser, option, defaults.get(name, option.default), flag=SHORT.get(name))


def job_from(args: argparse.Namespace, **changes: Any) -> Job:
    """The job of the flags. Raises: ValueError for values that no run can have."""
    return Job(**from_flags(options_of(Job).values(), {**vars(args), **changes}))
