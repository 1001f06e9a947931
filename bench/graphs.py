"""Would CUDA graphs make a block faster? Needs an NVIDIA GPU.

    python -m bench.graphs --model preset:llama-3.1-8b --json out.json

One block's forward and backward, every op called as the engine calls it, by tokens of a chunk: seconds of the device
when Python issues the calls back to back, seconds when they are replayed from one CUDA graph, and the host's seconds to
issue them. Python's calls are free where the first two are equal; a graph could save what lies between them, less what
it costs to hold one for every layer, slot and size of chunk that a plan has.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch

from bench.block_ops import block_env
from bench.environment import require_gpu, write_json
from flexengine.models.matmul_dtype import with_matmul_dtype
from flexengine.models.registry import open_model
from flexengine.models.spec import LayerSpec
from flexengine.ops.base import OpEnv

TOKENS = (256, 1024, 4096, 16384)
WARM_UP, BLOCKS, REPEATS = 2, 8, 5


class Row(NamedTuple):
    """Seconds of one block."""

    tokens: int
    eager_s: float
    graph_s: float
    issue_s: float


def run_block(layer: LayerSpec, env: OpEnv) -> None:
    """All ops forward, then both halves of each in reverse."""
    for op in layer.ops:
        op.forward(env)
    for op in reversed(layer.ops):
        if op.grad_inputs:
            op.backward_input(env)
        if op.params:
            op.backward_weight(env)


def seconds_of(run, count: int) -> tuple[float, float]:
    """(device, host) seconds per call, the least of REPEATS runs of `count` calls."""
    device, host = [], []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        start.record()
        for _ in range(count):
            run()
        end.record()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end) / 1e3)
    return min(device) / count, min(host) / count


def measure(args: argparse.Namespace, tokens: int, device: torch.device) -> Row:
    """One chunk size."""
    spec = with_matmul_dtype(open_model(args.model, needs_weights=False).spec, args.matmul_dtype)
    layer = spec.blocks[0]
    env = block_env(spec, layer, tokens, min(tokens, args.seq_len), device, torch.bfloat16)
    env.chunk.attention = args.attention
    for _ in range(WARM_UP):
        run_block(layer, env)
    eager_s, issue_s = seconds_of(lambda: run_block(layer, env), BLOCKS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_block(layer, env)
    graph_s, _ = seconds_of(graph.replay, BLOCKS)
    return Row(tokens, eager_s, graph_s, issue_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:llama-3.1-8b", help="whose block")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a sequence, for attention")
    parser.add_argument("--attention", choices=["cudnn", "flash"], default="flash", help="kernels that are preferred")
    parser.add_argument(
        "--matmul-dtype", choices=["compute", "fp8"], default="compute", help="of the block's linear layers"
    )
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    require_gpu("bench.graphs")
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    print(f"{'tokens':>8}{'eager ms':>10}{'graph ms':>10}{'issue ms':>10}")
    with torch.no_grad():
        for tokens in TOKENS:
            row = measure(args, tokens, device)
            rows.append(row._asdict())
            print(f"{tokens:8}{1e3 * row.eager_s:10.3f}{1e3 * row.graph_s:10.3f}{1e3 * row.issue_s:10.3f}", flush=True)
            torch.cuda.empty_cache()
    write_json(args.json, {"model": args.model, "matmul_dtype": args.matmul_dtype, "blocks": rows})


if __name__ == "__main__":
    main()
