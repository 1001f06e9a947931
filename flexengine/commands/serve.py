"""`flexengine serve`: a model behind OpenAI's protocol on this machine, for trying it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flexengine.commands.generate import (
    add_images,
    add_longest,
    add_sampling,
    add_taken,
    opened,
    plan_for,
    sampling_of,
)
from flexengine.commands.places import add_place
from flexengine.options.flags import positive_count
from flexengine.wording import FlagParser

DEFAULT_PORT, DEFAULT_QUEUE = 8000, 8


def main(argv: Sequence[str]) -> int:
    """Serve the model that a command line names until an interrupt; returns the exit status.

    Raises: ValueError for what a person can correct, PlanError where not even one sequence fits; before any weight is
    read.
    """
    arguments = _parser().parse_args(argv)
    named = arguments.model
    from flexengine.api import build  # noqa: PLC0415, loads torch
    from flexengine.serving.answering import Jobs  # noqa: PLC0415
    from flexengine.serving.protocol import Defaults  # noqa: PLC0415
    from flexengine.serving.server import Server, is_loopback  # noqa: PLC0415

    if not (is_loopback(arguments.host) or arguments.allow_other_hosts):
        raise ValueError(
            f"--host {arguments.host} lets other machines in, whom nobody asks for a key; give --allow-other-hosts too,"
            " or leave --host out"
        )
    images, name = arguments.max_image_tokens, arguments.name or Path(named).name
    defaults = Defaults(name, arguments.max_new_tokens, *sampling_of(arguments), images=images > 0)
    defaults.check()
    model, tokenizer = opened(arguments, images > 0)
    longest = min(arguments.max_seq_len, model.longest_sequence or arguments.max_seq_len)
    jobs = Jobs(arguments.queue)
    with (
        Server(arguments.host, arguments.port, jobs, defaults, not arguments.allow_other_hosts) as server,
        build(plan_for(arguments, model, longest, longest, 1, images)) as engine,
    ):
        server.listen()
        print(f"{defaults.model}: up to {longest} tokens, at {server.url}; for trying, not for production", flush=True)
        try:
            jobs.answer_all(engine, tokenizer)
        except KeyboardInterrupt:
            print("stopped", flush=True)
        finally:
            server.shutdown()
    return 0


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="flexengine serve",
        description="Answers OpenAI's chat and completion requests within memory budgets, one at a time. It is for"
        " trying a model, no production server: there are neither keys nor batches.",
    )
    add_place(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help=f"default: {DEFAULT_PORT}; 0 = a free one")
    parser.add_argument(
        "--allow-other-hosts", action="store_true", help="let other machines in, where --host is an address they reach"
    )
    parser.add_argument(
        "--queue", type=positive_count, default=DEFAULT_QUEUE, metavar="N",
        help=f"most requests that wait while one is answered (default: {DEFAULT_QUEUE})",
    )  # fmt: skip
    parser.add_argument("--name", help="what requests call the model (default: the last part of what is served)")
    add_longest(parser, "longest prompt with its answer, in tokens")
    add_images(parser)
    add_sampling(parser, max_new_tokens=None)
    add_taken(parser)
    return parser


def _port(text: str) -> int:
    """Read the number of a port."""
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give 1 to 65535, or 0 for a free one")
    return int(text)
