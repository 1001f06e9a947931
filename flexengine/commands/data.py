"""`flexengine data preview`: what a run would learn from a data set, before it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from flexengine.data import ChatTokenizer, default_cache, parse_source, prepare_sources
from flexengine.data.masks import TrainOn
from flexengine.data.preview import MARKS, preview
from flexengine.models.registry import ASSETS, open_model
from flexengine.wording import FlagParser


def main(argv: Sequence[str]) -> int:
    """Print the preview; returns the exit status."""
    arguments = _parser().parse_args(argv)
    folder = open_model(arguments.model, needs_weights=False).support_folder or ASSETS / "demo"
    tokenizer = ChatTokenizer.from_folder(folder)
    tokenizer.train_on = arguments.train_on
    sources = [parse_source(text) for text in arguments.dataset]
    cache = Path(arguments.data_cache) if arguments.data_cache else default_cache()
    prepared = prepare_sources(sources, tokenizer, arguments.max_seq_len, arguments.truncate_long, cache)
    print(f"tokenizer: {folder}; trained tokens stand between {MARKS[0]} and {MARKS[1]}")
    for line in preview(prepared, tokenizer, arguments.records):
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="flexengine data",
        description="Shows what a run would learn from data sets: records as the model sees them, the trained tokens"
        " marked, counts, lengths, and what was cut or left out and why. Tokens are kept for the run.",
    )
    parser.add_argument("what", choices=["preview"], help="preview is all there is")
    parser.add_argument("--model", required=True, help="model folder, for its tokenizer and chat template")
    parser.add_argument(
        "--dataset",
        nargs="+",
        required=True,
        metavar="PLACE[:SPLIT][=WEIGHT]",
        help="file or folder of records, id on the Hugging Face hub, or shard of tokens (.bin, .npy)",
    )
    parser.add_argument("--max-seq-len", type=int, default=2048, help="longest sequence, in tokens (default: 2048)")
    parser.add_argument("--truncate-long", action="store_true", help="cut conversations that are longer")
    parser.add_argument(
        "--train-on", choices=get_args(TrainOn), default="assistant", help="what is trained (default: assistant)"
    )
    parser.add_argument("--data-cache", metavar="DIR", help="where tokens are kept (default: the user's cache folder)")
    parser.add_argument("--records", type=int, default=3, help="sequences to show of each data set (default: 3)")
    return parser
