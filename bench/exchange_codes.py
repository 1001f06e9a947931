"""What does it take to code gradients that nodes exchange? CPU seconds of one thread for 10^9 elements.

    python -m bench.exchange_codes --json bench/results/ranks_tables.json   # adds them to that file

Coded and decoded are strips as `parallel/nodes.py` has them, natively and by torch; `exchange` is all that two nodes
do in one process each, over loopback, with the network library's threads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

from flexengine.native import fp8
from flexengine.parallel.control import Control
from flexengine.parallel.nodes import STRIP, NodeLink, Piece
from flexengine.parallel.ranks import Ranks
from flexengine.runtime.ranks.sent_gradients import sent_gradients
from flexengine.schedule.node_states import PIECE_ELEMENTS
from flexengine.schedule.ranks.node_exchange import SentAs
from tests.parallel.ranks_helper import run_ranks, values_of

CALLS, PIECES = 100, 24


def seconds_of(call: Callable[[], object]) -> float:
    """CPU seconds of a call on a strip, for 10^9 elements."""
    call()
    start_s = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - start_s) / CALLS / STRIP * 1e9


def coding() -> dict[str, float]:
    """Seconds of a strip's codes, and of adding what they stand for."""
    values, left, total = torch.randn(STRIP), torch.empty(STRIP), torch.zeros(STRIP)
    codes, scales = torch.empty(STRIP, dtype=torch.uint8), torch.empty(STRIP // fp8.BLOCK, dtype=torch.uint8)
    return {
        "encode": seconds_of(lambda: fp8.encode_fp8(left.copy_(values), codes, scales)),
        "decode": seconds_of(lambda: fp8.decode_fp8(codes, scales, total, add=True)),
    }


def exchanged(_: int, sent: SentAs) -> float:
    """Seconds of a node that adds up pieces with another one."""
    link, dtype = NodeLink(Control.open(Ranks.of_environment())), getattr(torch, sent.stored)
    errors = [torch.zeros(PIECE_ELEMENTS, dtype=torch.bfloat16) if sent.keeps_errors else None for _ in range(PIECES)]
    pieces = [Piece(torch.randn(PIECE_ELEMENTS).to(dtype), error) for error in errors]
    link.add(pieces, range(2), torch.float32, sent_gradients(sent))
    start_s = time.process_time()
    link.add(pieces, range(2), torch.float32, sent_gradients(sent))
    return (time.process_time() - start_s) / PIECES / PIECE_ELEMENTS * 1e9


def main() -> None:
    """Measure, and add the figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None, help="the file that figures are added to")
    path = parser.parse_args().json
    torch.set_num_threads(1)
    found: dict[str, float] = {f"native {name}": seconds for name, seconds in coding().items()}
    with patch.object(fp8, "_encoder", lambda: None), patch.object(fp8, "_decoder", lambda: None):
        found |= {f"torch {name}": seconds for name, seconds in coding().items()}
    for name in ("bfloat16", "fp8"):
        sent = SentAs(name, "bfloat16")
        found[f"exchange {name}"] = max(values_of(run_ranks(exchanged, 2, sent, nodes=2)))
    found = {name: round(seconds, 2) for name, seconds in found.items()}
    print(found)
    if path is not None:
        told = {**json.loads(path.read_text()), "codes_cpu_s": found}
        path.write_text(json.dumps(told, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
