"""What would fit instead: the nearest budgets, sizes and types, each tried before it is advised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB, format_bytes
from flexengine.plan import Request
from flexengine.planner.sizes import MOST_SLICES, chunk_sizes

SMALLEST_CHUNK_TOKENS = 32
"""No smaller chunk and no shorter sequence is advised."""
UNLIMITED_BYTES = 1 << 60
NUM_RAISES = 6
"""Budgets tried above the least conceivable one, each a twelfth larger than the one before."""
IN_BLOCKS = ("adamw", "muon")
"""Optimizers whose states may be 8-bit codes in blocks."""
LONG_TOKENS = 1 << 15
"""Inputs of layers take much of the memory where sequences are as long."""
LARGEST_CARD_BYTES = 288 * GIB
"""No GPU has more memory, so that no such budget is advised."""


class Remedy(NamedTuple):
    """A change that makes the job fit: flags to add to the command, the request that they make, and what it calls for
    that the machine has not ("" when nothing)."""

    flags: str
    request: Request
    note: str = ""

    def __str__(self) -> str:
        return f"{self.flags} ({self.note})" if self.note else self.flags


class Least(NamedTuple):
    """Bytes of the plan that takes the least GPU memory, and of one within the GPU budget that takes the least host
    memory (None when none is within it)."""

    gpu_bytes: int
    host_bytes: int | None


class Try(NamedTuple):
    """How a changed request is judged: whether anything fits whose steps run once, and the least it takes.

    drive_bytes: of all planes that may lie on a drive, and with what layers keep of a step.
    """

    fits: Callable[[Request], bool]
    least: Callable[[Request], Least]
    drive_bytes: tuple[int, ...] = ()


def remedies(request: Request, least: Least, judge: Try) -> Iterator[Remedy]:
    """Changes that make the job fit: what changes least of the result first, then sizes, then budgets."""
    yield from _cheaper_types(request, judge.fits)
    yield from _smaller_sizes(request, judge)
    yield from _budgets(request, least, judge)
    yield from _drive(request, judge)


def _smaller_sizes(request: Request, judge: Try) -> Iterator[Remedy]:
    """Chunks, rounds, sequences and batches that need less memory."""
    chunks = islice((r for r in _smaller_chunks(request) if judge.fits(r.request)), 1)
    if request.reproducible:  # whose rule has other sizes for another sequence or batch, and is given both or none
        yield from (r._replace(flags=f"{r.flags} --round-tokens {request.round_tokens}") for r in chunks)
    else:
        yield from chunks
        yield from islice((r for r in _shorter_rounds(request) if judge.fits(r.request)), 1)
        yield from _longest_sequence(request, judge.fits)
        yield from islice((r for r in _smaller_batches(request) if judge.fits(r.request)), 1)
    if request.recompute == "none":
        changed = replace(request, recompute="auto")
        if judge.fits(changed):
            yield Remedy("--recompute auto", changed)


def gib_text(num_bytes: int) -> str:
    """GiB rounded up to about three significant digits, so that following the advice works."""
    digits = 1 if num_bytes >= 10 * GIB else 2
    while digits < 6 and num_bytes * 10 ** (digits - 2) < GIB:
        digits += 1
    return f"{-(-num_bytes * 10**digits // GIB) / 10**digits:.{digits}f}"


def bytes_of(gib: str) -> int:
    """What a flag with this text asks for."""
    return int(float(gib) * GIB)


# ---- budgets ---------------------------------------------------------------------------------------------------


def _budgets(request: Request, least: Least, judge: Try) -> Iterator[Remedy]:
    """One budget raised, or both where raising one is not enough."""
    if least.host_bytes is None:
        raised = _raised(request, "max_gpu_bytes", least.gpu_bytes, judge.fits)
    else:
        host = _raised(request, "max_host_bytes", least.host_bytes, judge.fits)
        if host is not None:
            yield host
        missing = max(0, least.host_bytes - request.max_host_bytes)  # what the GPU would have to hold instead
        raised = _raised(request, "max_gpu_bytes", max(request.max_gpu_bytes, least.gpu_bytes) + missing, judge.fits)
    if raised is not None:
        yield raised
    elif least.host_bytes is None:
        both = _raised_both(request, least, judge)
        if both is not None:
            yield both


def _raised(request: Request, field: str, start: int, fits: Callable[[Request], bool]) -> Remedy | None:
    """The smallest budget of one memory, in printed GiB, that was seen to fit; the other budget stays."""
    flag = "--max-gpu-mem-gib" if field == "max_gpu_bytes" else "--max-host-mem-gib"
    gib = gib_text(start)
    for _ in range(NUM_RAISES):
        if field == "max_gpu_bytes" and bytes_of(gib) > LARGEST_CARD_BYTES:
            return None
        changed = replace(request, **{field: bytes_of(gib)})
        if fits(changed):
            return Remedy(f"{flag} {gib}", changed)
        gib = gib_text(bytes_of(gib) * 13 // 12 + 1)
    return None


def _raised_both(request: Request, least: Least, judge: Try) -> Remedy | None:
    """The least GPU memory, and the least host memory that a plan within it takes."""
    gpu = gib_text(max(request.max_gpu_bytes, least.gpu_bytes))
    if bytes_of(gpu) > LARGEST_CARD_BYTES:
        return None
    open_host = replace(request, max_gpu_bytes=bytes_of(gpu), max_host_bytes=UNLIMITED_BYTES)
    host_bytes = judge.least(open_host).host_bytes
    if host_bytes is None:
        return None
    host = gib_text(host_bytes)
    changed = replace(open_host, max_host_bytes=bytes_of(host))
    return Remedy(f"--max-gpu-mem-gib {gpu} --max-host-mem-gib {host}", changed) if judge.fits(changed) else None


def _drive(request: Request, judge: Try) -> Iterator[Remedy]:
    """A drive, or more of the one that was given, for planes, and for what layers keep where these are not enough."""
    if not request.may_use_drive:
        return
    flags = "--max-disk-gib" if request.max_drive_bytes else "--offload-dir DIR --max-disk-gib"
    for gib in (gib_text(num_bytes) for num_bytes in judge.drive_bytes if num_bytes > request.max_drive_bytes):
        changed = replace(request, max_drive_bytes=bytes_of(gib))
        if judge.fits(changed):
            yield Remedy(f"{flags} {gib}", changed)
            return


# ---- sizes -----------------------------------------------------------------------------------------------------


def _smaller_chunks(request: Request) -> Iterator[Remedy]:
    """Chunk sizes below those that were tried, largest first, that the pinned round and the batch allow."""
    chunk = min(c for c, _ in chunk_sizes(request)) // 2
    smallest = request.max_seq_len if request.whole_sequences else SMALLEST_CHUNK_TOKENS
    while chunk >= smallest and request.slices(chunk) <= MOST_SLICES:
        if (request.round_tokens or 0) % chunk == 0:
            yield Remedy(f"--chunk-tokens {chunk}", replace(request, chunk_tokens=chunk))
        chunk //= 2


def _shorter_rounds(request: Request) -> Iterator[Remedy]:
    """Halves of a pinned round, as long as it takes the longest sequence."""
    tokens = (request.round_tokens or 0) // 2
    while tokens >= request.max_seq_len and tokens % (request.chunk_tokens or 1) == 0:
        yield Remedy(f"--round-tokens {tokens}", replace(request, round_tokens=tokens))
        tokens //= 2


def _longest_sequence(request: Request, fits: Callable[[Request], bool]) -> Iterator[Remedy]:
    """The longest of the halves of the sequence that fits, or three quarters of the one above it; tried from the
    shortest end, as what does not fit there fits nowhere."""
    lengths = [request.max_seq_len // 2]
    while lengths[-1] >= 2 * SMALLEST_CHUNK_TOKENS:
        lengths.append(lengths[-1] // 2)
    tried: dict[int, bool] = {}

    def works(length: int) -> bool:
        if length not in tried:
            tried[length] = length >= SMALLEST_CHUNK_TOKENS and fits(replace(request, max_seq_len=length))
        return tried[length]

    if not works(lengths[-1]):
        return
    low, high = 0, len(lengths) - 1  # lengths[high] fits
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(lengths[middle]) else (middle + 1, high)
    longer = lengths[high] * 3 // 2
    length = longer if longer < request.max_seq_len and works(longer) else lengths[high]
    yield Remedy(f"--max-seq-len {length}", replace(request, max_seq_len=length))


def _smaller_batches(request: Request) -> Iterator[Remedy]:
    """Halves of the batch, as long as it takes the longest sequence."""
    tokens = request.max_global_batch_tokens // 2
    smallest = min(c * n for c, n in chunk_sizes(request))
    while tokens >= request.max_seq_len:
        if tokens < smallest:  # otherwise its shortest rounds are those that were tried
            yield Remedy(f"--max-global-batch-tokens {tokens}", replace(request, max_global_batch_tokens=tokens))
        tokens //= 2


# ---- types -----------------------------------------------------------------------------------------------------


class _Change(NamedTuple):
    """A cheaper way to store or update, as flags and as what becomes of a request."""

    flags: str
    numerics: dict[str, str]
    clipping: bool = True

    def of(self, request: Request) -> Request:
        """The request with this change."""
        numerics = replace(request.numerics, **self.numerics)
        return replace(request, numerics=numerics, clipping=request.clipping and self.clipping)


def _cheaper_types(request: Request, fits: Callable[[Request], bool]) -> Iterator[Remedy]:
    """Every single cheaper way that suffices, else the first of them together that do."""
    changes = list(_type_changes(request))
    enough = [found for change in changes if fits(found := change.of(request))]
    yield from (Remedy(change.flags, change.of(request)) for change in changes if change.of(request) in enough)
    together, flags = request, dict[str, str]()
    for change in () if enough else changes:
        together = change.of(together)
        flags[change.flags.split()[0]] = change.flags
        if len(flags) > 1 and fits(together):
            yield Remedy(" ".join(flags.values()), together)
            if flags.pop("--max-grad-norm", None):  # with it nothing is stored, either
                yield Remedy(" ".join(flags.values()), replace(together, clipping=True), "every step runs twice")
            return


def _type_changes(request: Request) -> Iterator[_Change]:
    """Cheaper types and updates, the least harmful first."""
    numerics = request.numerics
    if numerics.state == "float32":
        yield _Change("--optimizer-state-dtype bfloat16", {"state": "bfloat16"})
    if numerics.state in ("float32", "bfloat16") and numerics.optimizer in IN_BLOCKS and numerics.compute != "float64":
        yield _Change("--optimizer-state-dtype int8", {"state": "int8"})
    if numerics.grad == "float32" and numerics.compute in ("bfloat16", "float16"):
        yield _Change("--grad-dtype bfloat16", {"grad": "bfloat16"})
    if numerics.master == "split":
        yield _Change("--master-dtype bfloat16", {"master": "stochastic"})
    keep = {"compute": "fp8-inputs", "fp8": "fp8-all"}.get(numerics.keep)
    if keep and request.max_seq_len >= LONG_TOKENS and not request.whole_sequences and not numerics.scales_loss:
        yield _Change(f"--keep-dtype {keep}", {"keep": keep})
    waits = request.clipping and not numerics.scales_loss
    if waits and request.whole_steps and not request.shares_node:
        yield _Change("--max-grad-norm 0", {}, clipping=False)


# ---- the machine -----------------------------------------------------------------------------------------------


def remedy_note(changed: Request, request: Request, profile: HardwareProfile) -> str:
    """ "more than this card's 23.50 GiB" if `changed` has a budget above that of `request` and what there is, or "".

    On a CPU both budgets are of one memory.
    """
    gpu_bytes, host_bytes = profile.memory.gpu_total_bytes, profile.memory.host_total_bytes
    if profile.device_type == "cpu":
        new, old = (each.max_gpu_bytes + each.max_host_bytes for each in (changed, request))
        more = f"both budgets together more than this machine's {format_bytes(host_bytes)}"
        return more if new > max(old, host_bytes) else ""
    card, machine = ("card", gpu_bytes), ("machine", host_bytes)
    notes = [
        f"more than this {place}'s {format_bytes(total_bytes)}"
        for (place, total_bytes), new, old in (
            (card, changed.max_gpu_bytes, request.max_gpu_bytes),
            (machine, changed.max_host_bytes, request.max_host_bytes),
        )
        if new > max(old, total_bytes)
    ]
    return " and ".join(notes)


def budget_notes(request: Request, profile: HardwareProfile) -> list[str]:
    """A line for every budget above what the machine of the profile has, for which plans are possible all the same.

    On a CPU both budgets are of one memory.
    """
    gpu_bytes, host_bytes = request.max_gpu_bytes, request.max_host_bytes
    if profile.device_type == "cpu":
        pools = [
            ("machine", "the sum of the two memory budgets", gpu_bytes + host_bytes, profile.memory.host_total_bytes)
        ]
    else:
        pools = [
            ("card", "the GPU memory budget", gpu_bytes, profile.memory.gpu_total_bytes),
            ("machine", "the host memory budget", host_bytes, profile.memory.host_total_bytes),
        ]
    return [
        f"{budget}, {format_bytes(asked_bytes)}, is more than the {format_bytes(total_bytes)} of this {place}:"
        f" this plan is for another {place}"
        for place, budget, asked_bytes, total_bytes in pools
        if asked_bytes > total_bytes
    ]
