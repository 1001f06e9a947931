"""The transfer engine on torch's own streams and events: what is used where csrc is not built.

The results are the same. Every copy and event is a call from Python that holds the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.native.transfer_operations import (
    Await,
    Copy,
    Operation,
    PreparedOperations,
    Raise,
    Record,
    Wait,
    WordValue,
    byte_address,
    check_ranges,
)


class _BoundCopy(NamedTuple):
    stream: torch.cuda.Stream
    target: Tensor
    source: Tensor


class TorchTransfers:
    """`Transfers` of a CUDA device in plain torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events: dict[int, torch.cuda.Event] = {}
        self._recorded: set[int] = set()
        self._next_event = 1

    def create_events(self, count: int, timing: bool = False, blocking: bool = False) -> list[int]:
        created = list(range(self._next_event, self._next_event + count))
        self._next_event += count
        self._events.update({event: torch.cuda.Event(enable_timing=timing, blocking=blocking) for event in created})
        return created

    def release_events(self, events: Sequence[int]) -> None:
        for event in events:
            del self._events[event]
        self._recorded.difference_update(events)

    def prepare(self, operations: Iterable[Operation]) -> PreparedOperations:
        listed = list(operations)
        assert not any(isinstance(o, (Await, Raise)) for o in listed), "word_address says that there are none"
        bound = [_bind(o) if isinstance(o, Copy) else o for o in listed]
        return PreparedOperations(bound, len(bound), ())

    def word_address(self, host_address: int) -> int | None:
        return None  # torch has no such operations

    def set_words(self, prepared: PreparedOperations, words: Iterable[tuple[int, WordValue]]) -> None:
        raise NotImplementedError("torch's streams cannot wait for words of memory")

    def set_copies(self, prepared: PreparedOperations, copies: Iterable[tuple[int, Copy]]) -> None:
        for index, copy in copies:
            prepared.operations[index] = _bind(copy)

    def submit(self, prepared: PreparedOperations, first: int = 0, last: int | None = None) -> None:
        before = torch.cuda.current_stream(self.device)
        try:
            for operation in prepared.operations[first:last]:
                self._issue(operation, operation.stream)
        finally:
            torch.cuda.set_stream(before)

    def synchronize(self, event: int) -> None:
        self._events[event].synchronize()

    def elapsed_s(self, start: int, end: int) -> float:
        return self._events[start].elapsed_time(self._events[end]) * 1e-3

    def close(self) -> None:
        self._events.clear()

    def _issue(self, operation: _BoundCopy | Wait | Record, stream: torch.cuda.Stream) -> None:
        if isinstance(operation, _BoundCopy):
            torch.cuda.set_stream(stream)
            operation.target.copy_(operation.source, non_blocking=True)
        elif isinstance(operation, Record):
            self._events[operation.event].record(stream)
            self._recorded.add(operation.event)
        elif operation.event not in self._recorded:
            raise ValueError("a wait for an event that nothing has recorded; CUDA would not wait at all")
        else:
            stream.wait_event(self._events[operation.event])


def _bind(copy: Copy) -> _BoundCopy:
    for tensor in (copy.target, copy.source):
        byte_address(tensor)  # raises: torch itself would convert, or write to strides
    check_ranges(copy)
    assert isinstance(copy.target, Tensor), "raw memory is for who has asked for word_address"
    assert isinstance(copy.source, Tensor), "raw memory is for who has asked for word_address"
    target = copy.target.narrow(0, copy.target_offset, copy.num_bytes)
    source = copy.source.narrow(0, copy.source_offset, copy.num_bytes)
    assert isinstance(copy.stream, torch.cuda.Stream), "torch copies on torch's streams"
    return _BoundCopy(copy.stream, target, source)
