"""Which commands of layers may be replayed as CUDA graphs, and the GPU memory that graphs take.

A block's forward or backward on a chunk launches tens of kernels, each by a call of Python. A graph launches them in
one call. It holds the addresses that it was captured with, so that there is one for every block and chunk of a round.
"""

from __future__ import annotations

from collections import Counter

from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan
from flexengine.schedule.group_storage import DTYPE_BYTES
from flexengine.schedule.layer_compiler import compile_layer

GRAPH_BYTES, KERNEL_BYTES = 64 * 2**10, 9 * 2**9
"""GPU memory of a graph, and of each of its kernels: 112 to 256 graphs of 29 kernels took 165 to 195 KiB each on an
H100, 24 of 56 kernels 260 KiB (driver of CUDA 13)."""
MORE_BYTES = 32 * 2**20
"""What graphs may take beyond those of a full round, out of what plans keep free on CUDA: for a shorter last round and
for rounds that update speculatively. Besides, cuBLAS keeps a workspace of as much there (8 MiB before Hopper) for the
stream on which graphs are captured."""
ROUNDING_KERNELS = 4
"""Of a graph that rounds a part of a group's gradient: for matrices and vectors one that rounds, one that adds up."""


def may_replay(model: ModelSpec) -> bool:
    """Whether a model's blocks launch the same work for every batch of sequences of the same lengths."""
    return model.balancing is None and all(op.replays for block in model.blocks for op in block.ops)


def graph_bytes(num_kernels: float) -> int:
    """GPU bytes of a graph with so many kernels."""
    return GRAPH_BYTES + int(KERNEL_BYTES * num_kernels)


def workspace_bytes_of(kind: str, model: ModelSpec, plan: Plan) -> int:
    """Bytes that the calls of ops of layers of some kind may take at one moment."""
    sizes = plan.chunk_tokens, DTYPE_BYTES[plan.request.numerics.compute]
    kinds = {layer.ops for layer in model.layers if (layer.kind == "block") == (kind == "block")}
    return max((op.workspace_bytes(*sizes) for ops in kinds for op in ops), default=0)


def most_graph_bytes(model: ModelSpec, plan: Plan) -> int:
    """GPU bytes that graphs of blocks' commands may take."""
    return _full_round_bytes(model, plan) + MORE_BYTES


def _full_round_bytes(model: ModelSpec, plan: Plan) -> int:
    """GPU bytes of all graphs of a plan's full round: nothing is taken to be kept, so that each holds most kernels."""
    compute_bytes, total = DTYPE_BYTES[plan.request.numerics.compute], 0
    firsts = {block.ops: block for block in model.blocks}
    for ops, count in _kinds(model).items():
        program = compile_layer(firsts[ops], (), (), plan.chunk_tokens, compute_bytes)
        stages = (*program.forward_stages, *program.backward_stages)
        sizes = plan.chunk_tokens, plan.request.max_seq_len, compute_bytes
        per_chunk = sum(len(stage.parts) * graph_bytes(stage.work(*sizes).kernels) for stage in stages)
        total += count * plan.num_chunks * per_chunk
    return total


def most_rounding_bytes(model: ModelSpec, plan: Plan) -> int:
    """GPU bytes that graphs of the rounding of gradients may take: of the first round and of those that add to it."""
    parts = sum(group.num_parts for group in model.groups if not group.frozen)
    return parts * min(2, plan.num_rounds) * graph_bytes(ROUNDING_KERNELS)


def replay_bytes(model: ModelSpec, plan: Plan) -> int:
    """GPU bytes that a plan takes for graphs beside its workspace; 0 where it replays none.

    What blocks take of the workspace belongs to the graphs, so that embedding and head need theirs besides.
    """
    if not plan.replays:
        return 0
    return workspace_bytes_of("edge", model, plan) + _full_round_bytes(model, plan) + most_rounding_bytes(model, plan)


def _kinds(model: ModelSpec) -> Counter:
    """How many blocks there are of each sequence of ops."""
    return Counter(block.ops for block in model.blocks)
