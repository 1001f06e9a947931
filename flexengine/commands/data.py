"""`flexengine data`: shows what a run would learn from its data before it runs, and clears the tokens that are kept."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flexengine.metrics import format_bytes
from flexengine.options.flags import add_flag, from_flags, positive_count
from flexengine.options.job import Job
from flexengine.options.option import options_of
from flexengine.options.train_config import TrainConfig
from flexengine.wording import FlagParser

PREVIEWED = [
    options_of(TrainConfig)[name]
    for name in (
        *("max_seq_len", "truncate_long", "train_on", "template_date", "data_cache"),
        *("columns", "max_records", "bad_records", "objective", "adapter", "tokenizer"),
        *("add_tokens", "resize_embeddings", "max_image_tokens"),
    )
]
"""Options that mean what they mean to `train`, beside --model and --dataset."""


def main(argv: Sequence[str]) -> int:
    """Carry out `preview` or `clear-cache`; returns the exit status."""
    arguments = _parser().parse_args(argv)
    from flexengine.data import store  # noqa: PLC0415 - what takes a second is not waited for by --help

    cache = Path(arguments.data_cache) if arguments.data_cache else store.default_cache()
    if arguments.what == "preview":
        return _preview(arguments, cache)
    num_bytes = store.clear_cache(cache) if cache is not None else 0
    print(f"removed {format_bytes(num_bytes)} of tokens from {cache}; runs tokenize their data again")
    return 0


def _preview(arguments: argparse.Namespace, cache: Path | None) -> int:
    from flexengine.checkpoint.atomic import write_text  # noqa: PLC0415
    from flexengine.data import TokenizerOptions, TokenizerProcess, prepare_sources, sources_of  # noqa: PLC0415
    from flexengine.data.batches import room_for_images  # noqa: PLC0415
    from flexengine.data.preview import MARKS, preview, shown_sequences  # noqa: PLC0415
    from flexengine.models.registry import ASSETS, open_model  # noqa: PLC0415
    from flexengine.objectives import OBJECTIVES  # noqa: PLC0415
    from flexengine.reports.data_page import data_page  # noqa: PLC0415
    from flexengine.request import with_new_tokens  # noqa: PLC0415

    options = from_flags(PREVIEWED, vars(arguments))
    job = Job(**{name: options[name] for name in ("adapter", "tokenizer", "add_tokens", "resize_embeddings")})
    source = with_new_tokens(open_model(arguments.model, needs_weights=False), job)
    folder = source.tokenizer_folder or ASSETS / "demo"
    about = TokenizerOptions(
        folder, source.spec.vocab_size, source.new_tokens, options["template_date"],
        options["train_on"] or "assistant", bool(options["max_image_tokens"]),
    )  # fmt: skip
    tokenizer = TokenizerProcess(about)
    kind = OBJECTIVES[options["objective"]].records if options["objective"] in OBJECTIVES else "answers"
    kind = "prompt" if options["objective"] == "grpo" else kind
    sources = sources_of(arguments.dataset, options["columns"], options["max_records"], kind, images=about.images)
    lengths = options["max_seq_len"], options["truncate_long"]
    prepared = prepare_sources(sources, tokenizer, *lengths, cache, options["bad_records"])
    for part in prepared:
        room_for_images(part.sequences, options["max_image_tokens"])
    if arguments.html is not None:
        parts = ([part.describe(), *part.bad_lines] for part in prepared)
        seen = (shown_sequences(part, tokenizer, arguments.records) for part in prepared)
        write_text(arguments.html, data_page(f"data of {arguments.model}", zip(parts, seen, strict=True)))
        print(f"page: {arguments.html}")
    print(f"tokenizer: {folder}; trained tokens stand between {MARKS[0]} and {MARKS[1]}")
    for line in preview(prepared, tokenizer, arguments.records):
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="flexengine data", description="Shows what a run would learn from data sets.")
    commands = parser.add_subparsers(dest="what", required=True, metavar="preview | clear-cache")
    shown = commands.add_parser(
        "preview",
        help="records as the model sees them, with the trained tokens marked",
        description="Shows records as the model sees them with the trained tokens marked, counts, lengths, and what was"
        " cut or left out and why. Tokens are kept for the run.",
    )
    options = options_of(TrainConfig)
    shown.add_argument(
        "--model", required=True, help="model folder or id on the hub, for its tokenizer and chat template (required)"
    )
    shown.add_argument(
        "--dataset", nargs="+", required=True, metavar="PLACE[:SPLIT][=WEIGHT]", help=f"{options['dataset'].help}"
    )
    for option in PREVIEWED:
        add_flag(shown, option, option.default)
    shown.add_argument(
        "--records", type=positive_count, default=3, metavar="N", help="sequences to show of each data set (default: 3)"
    )
    shown.add_argument(
        "--html", type=Path, metavar="FILE.html", help="write the same sequences with small pictures of their images"
    )
    cleared = commands.add_parser("clear-cache", help="remove the tokens of earlier runs")
    add_flag(cleared, options["data_cache"])
    return parser
