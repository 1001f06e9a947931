"""The options that say what a run trains on and how it is read, which `TrainConfig` has among its own."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from flexengine.options.evaluation import FOR_RECORDS
from flexengine.options.option import Need, Option

BUNDLED_DATA = Path(__file__).resolve().parent.parent / "assets" / "demo" / "demo_instructions.jsonl"
"""Instructions that come with the package, and for how many steps a run without data of its own trains on them."""
TRIAL_STEPS = 20
DEMO_FACTS = BUNDLED_DATA.with_name("demo_facts.jsonl")
"""Questions with short answers, which the demo's model learns by heart."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data sets, their columns, and what is trained of their records."""

    data_source: Annotated[
        Literal["json_sft", "synthetic"], Option("json_sft = records of --dataset, synthetic = random tokens")
    ] = "json_sft"
    dataset: Annotated[
        Sequence[str],
        Option(
            "where records come from, as PLACE[:SPLIT][=WEIGHT]: files (JSON, CSV, Parquet, Arrow) or folders of them,"
            " ids on the Hugging Face hub (of both also PLACE:CONFIG:SPLIT), shards of tokens (.bin, .npy); without"
            f" any, json_sft tries the model for {TRIAL_STEPS} steps on a small set that comes with the package",
            needs=(Need("data_source", ("json_sft",), why="names records, but random tokens need no data"),),
        ),
    ] = ()
    columns: Annotated[
        Sequence[str],
        Option(
            "names for columns of records, as NAME=COLUMN: prompt=input answer=target, messages=chat, text=body; of"
            " --val-dataset, too",
            needs=(FOR_RECORDS,),
        ),
    ] = ()
    max_records: Annotated[
        int | None,
        Option(
            "read the first N records of each --dataset alone, without tokenizing the others (default: all)",
            above=0,
            most=10**12,
            needs=(FOR_RECORDS,),
        ),
    ] = None
    train_on: Annotated[
        Literal["assistant", "last", "all"] | None,
        Option(
            "what has a loss in conversations: the assistant's turns, the last of them, or every token (default:"
            " assistant)",
            needs=(FOR_RECORDS, Need("objective", ("sft",), why="trains more than the answers that are compared")),
        ),
    ] = None
    truncate_long: Annotated[
        bool,
        Option(
            "cut conversations longer than --max-seq-len instead of dropping them; texts are always split",
            needs=(FOR_RECORDS, Need("objective", ("sft",), why="cuts answers, which are compared as a whole")),
        ),
    ] = False
    bad_records: Annotated[
        Literal["stop", "skip"],
        Option(
            "what is done about records that cannot be read: stop at the first, or skip them all, count them and name"
            " the first",
            needs=(Need("data_source", ("json_sft",), of=("skip",), why="is about records"),),
        ),
    ] = "stop"
    template_date: Annotated[
        str | None,
        Option(
            "the day, as YYYY-MM-DD, that a chat template sees which writes today's date (default: today; with --resume"
            " that of the run)",
            needs=(FOR_RECORDS,),
        ),
    ] = None
    data_cache: Annotated[
        str | None,
        Option("folder of tokenized records (default: data/ in flexengine's cache folder)", needs=(FOR_RECORDS,)),
    ] = None

    def take_day(self) -> None:
        """Keep --template-date as YYYY-MM-DD. Raises ValueError for what is no day."""
        if self.template_date is not None:
            object.__setattr__(self, "template_date", _day(self.template_date))


def _day(given: object) -> str:
    """A day as YYYY-MM-DD; YAML reads one without quotes as a date. Raises ValueError for what is none."""
    try:
        return datetime.date.fromisoformat(str(given)).isoformat()
    except ValueError:
        raise ValueError(f"--template-date {given!r} is no day; give it as YYYY-MM-DD, such as 2026-01-31") from None
