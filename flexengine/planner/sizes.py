"""Chunk and round sizes worth planning for: the only decisions of a plan that may change low-order bits."""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.in_parts import may_be_in_parts
from flexengine.models.spec import ModelSpec
from flexengine.plan import MOST_ROUNDED, PlanError, PlanReason, Request, rounds_of_step
from flexengine.schedule.group_storage import DTYPE_BYTES
from flexengine.schedule.packing import most_chunks

CHUNK_TOKENS = tuple(1 << i for i in range(8, 15))
LARGE_CHUNK_TOKENS = 1 << 15
"""Of sequences that CHUNK_TOKENS hold whole: half the launches and sums of gradients where layers are small."""
CHUNKS_PER_ROUND = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

MOST_SLICES = 512
"""Parts of a sequence. With more of them a layer's scratch saves a few hundredths of the GPU memory that its keys and
values take, and a plan takes minutes to find: each layer has commands of its own for every part."""
ALIGNED_TOKENS = 64
"""Chunks are multiples of it where sequences do not decide: matrix products run at full rate then."""
SEGMENT_BLOCKS = (2, 3, 4, 6, 8, 12)
"""Lengths of segments whose first block's input alone is kept."""
LARGE_HIDDEN = 8
"""The tensor between layers may wait on the host where it and its gradient take this part of the GPU's budget."""
MOST_PARTS = 6
"""A batch that is no power of two is also tried in up to so many equal chunks."""


def chunk_sizes(request: Request) -> list[tuple[int, int]]:
    """(chunk_tokens, chunks_per_round) worth a look. Raises PlanError when pinned sizes contradict each other.

    A round is at most the batch, rounded up to chunks, and takes the longest sequence whole. Where gradients are stored
    in 16 bits, no size makes more rounds of a step than these bear, as far as others are left. Where they are not
    stored, a round takes any batch whole, however its sequences fill chunks; then there may be no size.
    """
    check_sizes(request)
    sizes = []
    for chunk in in_few_slices(request, _allowed(request, _chunk_choices(request))):
        slices = request.slices(chunk)
        if request.gpu_updates == "unstored":
            counts = _of_any_batch(request, chunk)
        elif request.round_tokens is not None:
            counts = [request.round_tokens // chunk]
        else:
            units = max(1, -(-request.max_global_batch_tokens // chunk) // slices)
            fitting, even = (n for n in CHUNKS_PER_ROUND if n <= units), request.shares_node  # ranks fill rounds evenly
            counts = sorted({slices * (-(-units // -(-units // n)) if even else n) for n in fitting})
        sizes += [(chunk, n) for n in counts if n >= slices]
    return [size for size in sizes if _sums_well(request, *size)] or sizes


def in_few_slices(request: Request, chunks: list[int]) -> list[int]:
    """The chunk sizes, in rising order, that cut no sequence into more than MOST_SLICES; else the largest of them."""
    return [chunk for chunk in chunks if request.slices(chunk) <= MOST_SLICES] or chunks[-1:]


def segment_lengths(model: ModelSpec) -> list[int]:
    """Blocks of a segment worth a look, up to the length that keeps the fewest inputs at one time."""
    count = len(model.blocks)
    longest = min(range(1, count + 1), key=lambda blocks: -(-count // blocks) + blocks, default=1)
    usual = [blocks for blocks in SEGMENT_BLOCKS if blocks < longest]
    return [*usual, longest] if longest > 1 else []


def may_wait_on_host(model: ModelSpec, request: Request) -> bool:
    """Whether plans are worth a look whose tensor between layers waits on the host: it and its gradient take much of
    the GPU's budget for one of the longest sequences, and no block runs part by part."""
    if request.shares_node or request.hidden_on_host or may_be_in_parts(model):
        return False
    row_bytes = 2 * model.hidden_size * DTYPE_BYTES[request.numerics.compute]
    return request.max_seq_len * row_bytes * LARGE_HIDDEN >= request.max_gpu_bytes


def hidden_on_host(request: Request) -> Request:
    """The same with the tensor between layers on the host, which no graph replays."""
    return replace(request, hidden_home="host", graphs="never")


def ways_of(request: Request) -> list[Request]:
    """The request, and the same from gradients that are not stored, where it allows that."""
    if not (request.whole_steps and request.may_update_in_round and not request.updates_in_round):
        return [request]
    unstored = replace(request, gpu_updates="unstored")
    return [request, unstored] if chunk_sizes(unstored) else [request]


def _of_any_batch(request: Request, chunk_tokens: int) -> list[int]:
    """The least chunks of a round that takes any batch, or the pinned ones where they do."""
    any_batch = most_chunks(request.max_seq_len, request.max_global_batch_tokens, chunk_tokens)
    least = max(request.slices(chunk_tokens), any_batch)
    pinned = least if request.round_tokens is None else request.round_tokens // chunk_tokens
    return [pinned] if pinned >= least else []


def _sums_well(request: Request, chunk_tokens: int, chunks: int) -> bool:
    """Whether the gradients of a step's rounds, of all ranks, add up within 1% in the dtype that they are stored in."""
    rounds = rounds_of_step(request.max_seq_len, request.max_global_batch_tokens, chunk_tokens, chunks)
    return request.numerics.grad != "bfloat16" or rounds * request.ranks <= MOST_ROUNDED


def check_sizes(request: Request) -> None:
    """Raise PlanError when pinned sizes contradict each other, or cut sequences that layers take whole."""
    request.check_pinned_sizes()
    chunk, longest = request.chunk_tokens, request.max_seq_len
    if request.whole_sequences and chunk is not None and chunk < longest:
        raise PlanError(
            PlanReason.INVALID_REQUEST,
            f"chunk_tokens={chunk} is less than max_seq_len={longest}, and layers that run as opaque blocks take"
            f" sequences whole\n  works with: --chunk-tokens {longest}, or --max-seq-len {chunk}",
        )


def _allowed(request: Request, chunks: list[int]) -> list[int]:
    """The sizes that take the longest sequence whole where layers, or segments, ask for that: at least one of them."""
    if not (request.whole_sequences or request.segments_by_chunk):
        return chunks
    longest, tokens = request.max_seq_len, request.round_tokens
    return [c for c in chunks if c >= longest] or [tokens if tokens is not None else longest]


def _chunk_choices(request: Request) -> list[int]:
    """The pinned size, else about powers of two up to the round, and exact sizes where those are few."""
    if request.chunk_tokens is not None:
        return [request.chunk_tokens]
    limit = request.round_tokens or request.max_global_batch_tokens
    if request.gpu_updates == "unstored" and request.round_tokens is None:
        usual = {c for c in (*CHUNK_TOKENS, limit) if c <= min(limit, LARGE_CHUNK_TOKENS)}
        return sorted(usual | _with_room_for_one(limit, request.max_seq_len))
    choices = {c for c in CHUNK_TOKENS if c <= limit}
    if limit < 2 * CHUNK_TOKENS[0]:
        choices |= {limit, max(1, limit // 2), request.max_seq_len}
    if request.round_tokens is None:
        if request.max_seq_len <= CHUNK_TOKENS[-1] and limit >= LARGE_CHUNK_TOKENS:
            choices.add(LARGE_CHUNK_TOKENS)
        whole = {filled(c, request.max_seq_len) for c in choices if c >= CHUNK_TOKENS[0]}
        return sorted({c for c in choices if c < CHUNK_TOKENS[0]} | whole | _even_parts(limit, request.max_seq_len))
    parts = {limit // n for n in CHUNKS_PER_ROUND if limit % n == 0}
    return sorted(c for c in choices | parts if limit % c == 0 and c <= max(CHUNK_TOKENS[-1], min(parts)))


def _with_room_for_one(batch_tokens: int, seq_len: int) -> set[int]:
    """Chunks with room for a sequence more than an equal part of a batch: so many chunks take any batch."""
    parts = (batch_tokens // n + seq_len for n in CHUNKS_PER_ROUND)
    aligned = {-(-tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS for tokens in parts}
    return {tokens for tokens in aligned if CHUNK_TOKENS[0] <= tokens <= min(batch_tokens, LARGE_CHUNK_TOKENS)}


def filled(chunk_tokens: int, seq_len: int) -> int:
    """About `chunk_tokens`, but so that sequences of seq_len tokens fill the chunks: as many as fit, or even slices."""
    if seq_len <= chunk_tokens:
        tokens = chunk_tokens // seq_len * seq_len
    else:
        tokens = -(-seq_len // -(-seq_len // chunk_tokens))
    return min(chunk_tokens, -(-tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS)


def _even_parts(batch_tokens: int, seq_len: int) -> set[int]:
    """Parts of a batch, of whole sequences, in which no chunk is less full than the others."""
    parts = {batch_tokens // n for n in range(1, MOST_PARTS + 1) if batch_tokens % n == 0}
    return {p for p in parts if p % seq_len == 0 and CHUNK_TOKENS[0] <= p <= CHUNK_TOKENS[-1]}
