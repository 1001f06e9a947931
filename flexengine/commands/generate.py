"""`flexengine generate`: answers of a model to prompts, many at a time, within the memory budgets."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flexengine.commands.places import add_place, find_place
from flexengine.metrics import format_bytes
from flexengine.options.flags import add_flag, from_flags, positive_count
from flexengine.options.job import ForwardJob, Job
from flexengine.options.option import options_of
from flexengine.options.train_config import TrainConfig
from flexengine.wording import FlagParser, parse_json

if TYPE_CHECKING:
    from flexengine.api import PlannedRun, Sampling
    from flexengine.data import TokenizerProcess
    from flexengine.models.spec import ModelSpec

TAKEN = [
    options_of(TrainConfig)[name]
    for name in (
        "max_gpu_mem_gib", "max_host_mem_gib", "device", "dtype", "base_dtype", "adapter", "seed", "trust_remote_code",
    )
]  # fmt: skip
"""Options that mean what they mean to `train`."""
DEFAULT_SEQ_LEN = 2048
PREFILL_TOKENS = 4096
"""Tokens of prompts that go through the model together, where memory allows; more would wait less for weights."""


def main(argv: Sequence[str]) -> int:
    """Answer the prompts of a command line; returns the exit status.

    Raises: ValueError for what a person can correct, PlanError where not even one sequence fits; both before any weight
    is read.
    """
    arguments = _parser().parse_args(argv)
    prompts = [*arguments.prompt, *(_read_prompts(arguments.prompts) if arguments.prompts else ())]
    if not prompts:
        raise ValueError("there is no prompt: give --prompt TEXT, or --prompts FILE")
    from flexengine.api import build  # noqa: PLC0415, loads torch

    model, tokenizer = opened(arguments, bool(arguments.image))
    pixels: dict[str, Any] = {}
    if arguments.image:
        ids, pixels = _with_images(arguments, tokenizer, prompts)
    else:
        ids = [tokenizer.encode_prompt(prompt, arguments.raw) for prompt in prompts]
    longest = max(map(len, ids)) + arguments.max_new_tokens
    tokens = max(longest, min(PREFILL_TOKENS, sum(map(len, ids))))
    count = min(len(ids), arguments.batch_size or len(ids))
    planned = plan_for(arguments, model, longest, tokens, count, len(ids) * longest if pixels else 0)
    sampling = sampling_of(arguments)
    with build(planned) as engine:
        start_s = time.perf_counter()
        most, stop_ids = arguments.max_new_tokens, tokenizer.stop_ids
        answers = engine.generate(ids, most, stop_ids=stop_ids, sampling=sampling, images=pixels)
        seconds = time.perf_counter() - start_s
    _show(prompts, [tokenizer.decode(answer).strip() for answer in answers], arguments.json)
    count = sum(map(len, answers))
    print(f"{count} tokens after {len(prompts)} prompts, {count / seconds:.1f} tokens/s", file=sys.stderr)
    return 0


class Opened(NamedTuple):
    """The description of a model that was named, and its tokenizer, which runs before anything is planned."""

    model: ModelSpec
    tokenizer: TokenizerProcess


def opened(arguments: argparse.Namespace, images: bool = False) -> Opened:
    """Find what a command line names: of a run or an adapter the model beneath, which `arguments` then name.

    images: whether the model's processor is read, too. Raises: ValueError as `find_place` and `open_model`.
    """
    from flexengine.data import TokenizerOptions, TokenizerProcess  # noqa: PLC0415, loads torch
    from flexengine.models.registry import ASSETS, open_model  # noqa: PLC0415
    from flexengine.request import with_new_tokens  # noqa: PLC0415

    arguments.model, arguments.adapter = find_place(arguments.model, arguments.adapter)
    found = open_model(arguments.model, trust_remote_code=arguments.trust_remote_code)
    source = with_new_tokens(found, job_of(arguments))
    folder = source.tokenizer_folder or ASSETS / "demo"
    about = TokenizerOptions(folder, source.spec.vocab_size, source.new_tokens, images=images)
    return Opened(source.spec, TokenizerProcess(about))


def _with_images(
    arguments: argparse.Namespace, tokenizer: TokenizerProcess, prompts: Sequence[str]
) -> tuple[list[list[int]], dict[str, Any]]:
    """Ids of prompts that are each about all images of --image, and the columns of their pixels."""
    from flexengine.data.image_pixels import joined  # noqa: PLC0415

    if arguments.raw:
        raise ValueError("--image with --raw: images stand where a chat template puts them; leave --raw out")
    found = [tokenizer.encode_with_images(prompt, arguments.image) for prompt in prompts]
    return [ids for ids, _ in found], joined([columns for _, columns in found])


def plan_for(
    arguments: argparse.Namespace, model: ModelSpec, longest: int, tokens: int, count: int, max_image_tokens: int = 0
) -> PlannedRun:
    """Plan for as many sequences at a time as fit: `count`, half, a quarter ... Raises PlanError when one is too many.

    count: 0 where nothing is generated. longest: tokens of the longest sequence. tokens: of prompts that go through the
    model together.
    """
    from flexengine.api import prepare_job  # noqa: PLC0415
    from flexengine.plan import CacheBytes, PlanError  # noqa: PLC0415
    from flexengine.schedule.decoding_cache import sequence_cache_bytes  # noqa: PLC0415
    from flexengine.schedule.group_storage import DTYPE_BYTES  # noqa: PLC0415

    sizes = {"max_image_tokens": max_image_tokens} if max_image_tokens else {}
    job = job_of(arguments, max_seq_len=longest, max_global_batch_tokens=tokens, **sizes)
    sequence_bytes = sequence_cache_bytes(model, longest, DTYPE_BYTES[job.dtype])
    while True:
        try:
            return prepare_job(arguments.model, job, caches=CacheBytes(count * sequence_bytes))
        except PlanError as error:
            if not count:
                raise
            if count == 1:
                cache = f"the cache of one sequence of {longest} tokens takes {format_bytes(sequence_bytes)}"
                more = f"{cache} of the GPU budget beside that; answers of fewer tokens take less"
                raise ValueError(f"{error}\n  {more}") from None
            count //= 2


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """How tokens are chosen."""
    from flexengine.api import Sampling  # noqa: PLC0415, loads torch

    return Sampling(arguments.temperature, arguments.top_p, arguments.seed)


def job_of(arguments: argparse.Namespace, **sizes: int) -> Job:
    """The job of a forward pass alone, or on top of an adapter."""
    options: dict[str, Any] = {**from_flags(TAKEN, vars(arguments)), **sizes}
    if options["adapter"] is None:
        return ForwardJob(**options)
    return Job(**options, mode="lora")  # what is trained on it is not merged here, and has little beside it


def _read_prompts(path: Path) -> list[str]:
    """Read a prompt a line, or with .jsonl the `prompt` of each. Raises ValueError for what is neither."""
    if not path.is_file():
        raise ValueError(f"--prompts {path}: no such file; give a text with a prompt a line, or .jsonl")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {path}: no UTF-8 text ({error.reason} at byte {error.start})") from None
    if path.suffix != ".jsonl":
        return lines
    rows = [parse_json(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise ValueError(f'{path}, line {number} has no text "prompt"; write {{"prompt": "..."}}')
    return [row["prompt"] for row in rows]


def _show(prompts: list[str], answers: list[str], as_json: bool) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        if as_json:
            print(json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False))
        else:
            print(answer if len(prompts) == 1 else f"> {prompt}\n{answer}")


def add_longest(parser: argparse.ArgumentParser, what: str) -> None:
    """Let a person bound the tokens of what a command runs; what: that, in words."""
    parser.add_argument(
        "--max-seq-len", type=positive_count, default=DEFAULT_SEQ_LEN, metavar="N",
        help=f"{what} (default: {DEFAULT_SEQ_LEN})",
    )  # fmt: skip


def add_images(parser: argparse.ArgumentParser, what: str = "a conversation") -> None:
    """Let a person show images to what a command runs; what: has so many, in words."""
    parser.add_argument(
        "--max-image-tokens", type=positive_count, default=0, metavar="N",
        help=f"most tokens of {what} that stand for images; without it there are none",
    )  # fmt: skip


def add_taken(parser: argparse.ArgumentParser) -> None:
    """Let a person give what means the same to `train`."""
    for option in TAKEN:
        add_flag(parser, option, option.default)


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int | None) -> None:
    """Add the flags that say how long an answer is and how its tokens are chosen.

    max_new_tokens: where nothing is said; None for what is left.
    """
    parser.add_argument(
        "--max-new-tokens",
        type=positive_count,
        default=max_new_tokens,
        metavar="N",
        help=f"longest answer (default: {max_new_tokens or 'what is left'})",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (default); more draws"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="draw from the likeliest tokens that sum to X (default 1)",
    )


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="flexengine generate",
        description="Answers prompts with a model, many at a time. Weights beyond the GPU budget stream from"
        " the host; keys, values and states of the answers count in the budget.",
    )
    add_place(parser)
    parser.add_argument("--prompt", nargs="+", default=[], metavar="TEXT", help="prompts, each a user's message")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='a prompt a line, or .jsonl with {"prompt": ...}')
    parser.add_argument(
        "--image", nargs="+", default=[], metavar="FILE",
        help="images that each prompt is about; <image> in a prompt says where one stands, else they stand before it",
    )  # fmt: skip
    add_sampling(parser, max_new_tokens=128)
    parser.add_argument(
        "--batch-size", type=positive_count, metavar="N", help="most prompts at a time (default: as many as fit)"
    )
    parser.add_argument("--raw", action="store_true", help="prompts are texts to go on with, without a chat template")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")
    add_taken(parser)
    return parser
