"""Loads onto the GPU through a small buffer: one half of it is read into while the other is sent.

The buffer is page-locked, so that sending runs beside reading; it is all that loading takes beside the arenas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from flexengine.checkpoint.reader import CheckpointReader, ReadRequest
from flexengine.native import allocate_host

HALF_BYTES = 16 << 20
"""Bytes of each half: 0.3 ms of the link at 55 GB/s, long against the fixed cost of a read and a copy."""
ALIGNMENT_BYTES = 64


def load_staged(reader: CheckpointReader, requests: Iterable[ReadRequest], device: torch.device) -> None:
    """Read requests whose flat targets or remainders may live on the GPU. Blocks until all is there."""
    on_cuda = device.type == "cuda"
    with allocate_host(2 * HALF_BYTES, page_locked=on_cuda) as buffer:
        halves = buffer.tensor.view(2, HALF_BYTES)
        try:
            _load(reader, requests, halves, device)
        finally:
            if on_cuda:  # nothing may be on its way when the buffer goes
                torch.cuda.synchronize(device)


def _load(reader: CheckpointReader, requests: Iterable[ReadRequest], halves: Tensor, device: torch.device) -> None:
    sent: list[torch.cuda.Event | None] = [None, None]
    for number, fill in enumerate(_fills(requests, HALF_BYTES)):
        side = number % 2
        before = sent[side]
        if before is not None:
            before.synchronize()
        staged = _place(fill, halves[side])
        reader.read_many(staged)
        _send(fill, staged)
        if device.type == "cuda":
            event = sent[side] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))  # where copies to it go, whichever device is current


def _width(request: ReadRequest) -> int:
    """Bytes per element in the buffer."""
    return request.target.element_size() + (0 if request.remainder is None else request.remainder.element_size())


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _fills(requests: Iterable[ReadRequest], capacity_bytes: int) -> Iterator[list[ReadRequest]]:
    """Cut requests into pieces, and group these so that each group fits `capacity_bytes` with every tensor aligned."""
    fill: list[ReadRequest] = []
    left = capacity_bytes
    for request in requests:
        start, width = 0, _width(request)
        while start < request.target.numel():
            room = (left - 2 * ALIGNMENT_BYTES) // width
            if room < 1:
                yield fill
                fill, left = [], capacity_bytes
                continue
            count = min(room, request.target.numel() - start)
            fill.append(_part(request, start, count))
            left -= width * count + 2 * ALIGNMENT_BYTES
            start += count
    if fill:
        yield fill


def _part(request: ReadRequest, start: int, count: int) -> ReadRequest:
    end = start + count
    remainder = None if request.remainder is None else request.remainder[start:end]
    return ReadRequest(request.name, request.target[start:end], remainder, request.first_element + start)


def _place(fill: list[ReadRequest], half: Tensor) -> list[ReadRequest]:
    """Give requests other targets and remainders: one behind the other in half of the buffer."""
    used = 0

    def take(like: Tensor) -> Tensor:
        nonlocal used
        begin, num_bytes = used, like.numel() * like.element_size()
        used += _padded(num_bytes)
        return half[begin : begin + num_bytes].view(like.dtype)

    return [
        request._replace(
            target=take(request.target), remainder=None if request.remainder is None else take(request.remainder)
        )
        for request in fill
    ]


def _send(fill: list[ReadRequest], staged: list[ReadRequest]) -> None:
    for wanted, here in zip(fill, staged, strict=True):
        wanted.target.copy_(here.target, non_blocking=True)
        if wanted.remainder is not None and here.remainder is not None:
            wanted.remainder.copy_(here.remainder, non_blocking=True)


def on_host(request: ReadRequest) -> bool:
    """Whether a request can be read straight into its place, without staging."""
    return request.target.device.type == "cpu" and (request.remainder is None or request.remainder.device.type == "cpu")
