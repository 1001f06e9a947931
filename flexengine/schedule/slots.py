"""Slots: fixed pieces of an arena, what each of them is for, and which of them share bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Memory = Literal["gpu", "host", "node", "drive"]
"""`host` is a rank's own memory of the host; `node` is one that all ranks of a machine map, where there are several.
`drive` is a file."""
HOST_SIDE: tuple[Memory, ...] = ("host", "node")
PlaneKind = str
"""Name of a stored array of a group: weights, remainder, grad, or a state that an optimizer rule declares."""
Role = str
"""What a slot holds. Beside planes of a group (`PlaneKind`), and slots that parts of weights and grad pass through:

- accumulator: a group's gradient of the round at work; spilled: the head's of a tied group, until the embedding's;
- decoded: elements of the compute dtype, made of weights that are stored in fewer bytes;
- batch, losses: one round's tokens and losses;
- given_rows, given_grads: rows that a tower gives to the tokens of a batch, and their gradients;
- received: pieces of all ranks' accumulators, of a split plan;
- handed, head_input: a chunk's input of a layer that another rank computes, then its gradient, in stages; the head's
  input of the round whose head is this rank's;
- norm_squares, partial_squares, run_squares, scales, grad_norm, scalars: numbers that the optimizer step depends on;
- hidden, grad_hidden, carry, bounds, window, grad_window: between layers, stages of a layer, and slices of a sequence;
  a chunk's slot `hidden` on the host, where it has one, holds its gradient as well, once the head has read it;
- input, save_gpu, save_host, save: what a layer keeps for backward: its input, its outputs on the GPU, staged for the
  host, and on the host;
- scratch, tile, update_scratch: temporaries of a layer; what an optimizer tile is updated in, and its temporaries;
- staged, staged_weights, staged_grads, staged_kept: on the host, a tile on its way from and to a drive; weights on
  theirs from there to the GPU; gradients, and what layers keep there, between both.
"""


class SlotKey(NamedTuple):
    """What a slot is for, as fields; its printed name follows from them.

    owner: the group of a plane, the slot class of slots that several groups share, or the layer of kept activations.
    index: its number in a ring of equal slots, or its chunk; -1 for the only slot of its kind; 1 for a second plane of
    a group that is updated speculatively. within: for a subslot, which one it is of the slot with the same other
    fields; empty for a whole slot.
    """

    role: Role
    owner: str | int = ""
    index: int = -1
    memory: Memory = "gpu"
    within: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        """Its name, as in `host.input.3[1]`, `weights.block[0]` or `grad.head@2`."""
        place = [self.memory] * (self.memory != "gpu") + [self.role] + [str(self.owner)] * (self.owner != "")
        index = f"[{self.index}]" if self.index >= 0 else ""
        return ".".join(place) + index + ("@" + "+".join(map(str, self.within)) if self.within else "")


class Slot(NamedTuple):
    """A fixed piece of an arena: `num_bytes` bytes at `offset`. `category` groups slots in memory reports."""

    key: SlotKey
    offset: int
    num_bytes: int
    category: str

    @property
    def memory(self) -> Memory:
        """The arena that it lies in."""
        return self.key.memory

    @property
    def name(self) -> str:
        """Its key in words, for messages."""
        return str(self.key)

    @property
    def end(self) -> int:
        """First byte after the slot."""
        return self.offset + self.num_bytes

    def subslot(self, within: tuple[str | int, ...], start: int, num_bytes: int, category: str) -> Slot:
        """A slot inside this one, `start` bytes from its beginning."""
        role, owner, index, memory, _ = self.key  # an update has 100,000 subslots; `_replace` takes three times as long
        return Slot(SlotKey(role, owner, index, memory, within), self.offset + start, num_bytes, category)


def overlapping_slots(slots: tuple[Slot, ...]) -> list[tuple[int, ...]]:
    """For every slot the indices of all slots, itself included, that share a byte with it."""
    result: list[list[int]] = [[i] for i in range(len(slots))]
    for memory in ("gpu", "host", "node", "drive"):
        order = sorted((i for i, s in enumerate(slots) if s.key.memory == memory), key=lambda i: slots[i].offset)
        active: list[int] = []
        for i in order:
            active = [j for j in active if slots[j].end > slots[i].offset]
            for j in active:
                if slots[j].num_bytes and slots[i].num_bytes:
                    result[i].append(j)
                    result[j].append(i)
            active.append(i)
    return [tuple(r) for r in result]


def borders_of_slots(slots: Iterable[Slot], memory: Memory) -> list[int]:
    """Offsets in a memory, in order, that no slot reaches across: where slots begin, but for those inside others."""
    found, reached = list[int](), 0
    for start, end in sorted((slot.offset, slot.end) for slot in slots if slot.key.memory == memory):
        if start >= reached and (not found or start > found[-1]):
            found.append(start)
        reached = max(reached, end)
    return found
