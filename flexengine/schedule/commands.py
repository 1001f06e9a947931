"""The vocabulary of a program: streams, commands and their arguments.

A command is bound to one stream and names the slots it reads and writes with what it expects or leaves in them.
Streams run their commands in order; between streams a command waits for exactly the conflicting commands before it.
Nobody places events by hand: `program_builder.py` derives waits. Prefetch depth is the number of slots, back-pressure
is their reuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from flexengine.ops.base import TensorSpec, Work
from flexengine.schedule.layer_program import LayerProgram
from flexengine.schedule.slots import Slot
from flexengine.schedule.stored_pieces import Piece


class Stream(StrEnum):
    """Queues that run beside each other: kernels, the two directions of the link, and work of the CPU.

    relay_in, relay_out: what one of several ranks takes over and passes on: gradients, in stages also hidden states.
    They share the link's directions with h2d and d2h; waiting for another rank, they hold nothing else up.
    comm: collectives, in which all ranks of a node take part in the same order, and what follows them at once.
    drive_in, drive_out: reads of a drive into the host's memory for the CPU, and writes back.
    drive_fetch: reads of a drive into the host's memory for copies to the GPU, which wait for them.
    drive_store: writes to a drive of what copies from the GPU have left in the host's memory.
    """

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"
    RELAY_IN = "relay_in"
    RELAY_OUT = "relay_out"
    COMM = "comm"
    DRIVE_IN = "drive_in"
    DRIVE_OUT = "drive_out"
    DRIVE_FETCH = "drive_fetch"
    DRIVE_STORE = "drive_store"


BASE_STREAMS = (Stream.COMPUTE, Stream.H2D, Stream.D2H, Stream.CPU)
STREAMS = tuple(Stream)
DRIVE_WRITES = (Stream.DRIVE_OUT, Stream.DRIVE_STORE)
DRIVE_READS = (Stream.DRIVE_IN, Stream.DRIVE_FETCH)
DRIVE_STREAMS = (*DRIVE_READS, *DRIVE_WRITES)
HOST_STREAMS = (Stream.CPU, Stream.DRIVE_IN, Stream.DRIVE_OUT)
"""Those that go on beyond a program's end on the GPU; within a program no other stream waits for them."""
LASTING_STREAMS = (*HOST_STREAMS, Stream.DRIVE_STORE)
"""Those that may still run when a program has ended on the GPU."""
THREAD_STREAMS = (*LASTING_STREAMS, Stream.DRIVE_FETCH)
"""Those that threads of the host carry out; before a copy that waits for one the host itself waits."""
STREAM_INDEX = {stream: i for i, stream in enumerate(STREAMS)}
DIRECTIONS = {Stream.H2D: Stream.H2D, Stream.RELAY_IN: Stream.H2D, Stream.D2H: Stream.D2H, Stream.RELAY_OUT: Stream.D2H}
"""The direction of the link, h2d or d2h, of each stream that copies."""


Subject = Literal[
    "",
    "weights",
    "grad",
    "input",
    "save",
    "tile",
    "batch",
    "scale",
    "scalars",
    "spilled",
    "norm",
    "squares",
    "window",
    "sums",
]
"""What a command moves or finishes; empty where its kind says all."""


class CommandName(NamedTuple):
    """What a command does, as fields; its label follows from them.

    owner: the layer, group, part of a group or tile that it is about. chunk: the chunk of the round, -1 for none.
    """

    verb: str
    subject: Subject = ""
    owner: str = ""
    chunk: int = -1

    def __str__(self) -> str:
        """Its label, as in `fetch weights block.3` or `backward block.3 chunk 0`."""
        chunk = f"chunk {self.chunk}" if self.chunk >= 0 else ""
        return " ".join(filter(None, (self.verb, self.subject, self.owner, chunk)))

    @property
    def short(self) -> str:
        """The label without its verb, for a bar whose colour tells that: `block.3 0`."""
        return " ".join(filter(None, (self.subject, self.owner, str(self.chunk) if self.chunk >= 0 else "")))


class Access(NamedTuple):
    """A slot (by index) with the content that a command expects to read or leaves behind."""

    slot: int
    content: str


class CopyRegion(NamedTuple):
    """`num_bytes` bytes from one slot to another, offsets in bytes from the slots' starts."""

    source: int
    source_offset: int
    target: int
    target_offset: int
    num_bytes: int

    @property
    def reversed(self) -> CopyRegion:
        """The same bytes the other way."""
        return CopyRegion(self.target, self.target_offset, self.source, self.source_offset, self.num_bytes)


class Signal(NamedTuple):
    """A semaphore of the node's table that a command of one of several ranks awaits, or raises when it has ended.

    of: whose row: this rank's own, that of the rank of the round before, that of the rank of the step's last round,
    those of all ranks, or that of the rank with this number. The value is the running number of the round, or of the
    update that the step ends with, less `lag`; semaphores only rise. In stages all rounds of a wave have one number.
    """

    semaphore: int
    of: Literal["own", "previous", "last", "all"] | int
    clock: Literal["round", "update"]
    lag: int = 0


class GroupScale(NamedTuple):
    """Arguments of `scale`: the group whose gradient is complete."""

    group: int


@dataclass(frozen=True, eq=False)
class LayerCall:
    """Arguments of a layer's commands: a layer program and the slots its areas are bound to.

    areas: area name -> slot. weights and accumulators: parameter group -> slot. first: the accumulators hold nothing
    yet. stage: which of the program's stages runs, with this part of the group.
    """

    layer: int
    chunk: int
    program: LayerProgram
    areas: dict[str, int]
    weights: dict[int, int]
    accumulators: dict[int, int] = field(default_factory=dict)
    first: bool = True
    stage: int = 0
    part: int = 0


class StoredRun(NamedTuple):
    """Where consecutive elements of a gradient go.

    They go from element `start` of the accumulator to element `stored_start` of a slot; their sum of squares is entry
    `number` of all. They may be a share of the run of that number: `before` elements of its `whole` come before them.
    """

    start: int
    slot: int
    stored_start: int
    numel: int
    number: int
    before: int
    whole: int


class RowCopy(NamedTuple):
    """Arguments of a copy of a chunk's activations: regions of a full chunk, one for each tensor, with its spec.

    A run moves the rows that its chunk has. Nobody reads the others: ops see tensors of the chunk's tokens.
    """

    chunk: int
    tensors: tuple[tuple[CopyRegion, TensorSpec], ...]
    compute_bytes: int

    def regions(self, tokens: int) -> list[CopyRegion]:
        """What is moved of a chunk of so many tokens."""
        width = self.compute_bytes
        return [region._replace(num_bytes=spec.num_bytes(tokens, width)) for region, spec in self.tensors]


class SlotOffset(NamedTuple):
    """A place inside a slot: `offset` bytes from its start."""

    slot: int
    offset: int


class DecodedPiece(NamedTuple):
    """A piece of a group's part: where its bytes begin in the source slot, and its elements in the target slot."""

    piece: Piece
    source_offset: int
    first_element: int


class Touched(NamedTuple):
    """Which of a part's experts have rows in some chunk: where each chunk's [experts + 1] bounds of rows begin.

    share: of the experts that are expected to, for prices; the routing decides which do.
    """

    experts: int
    bounds: tuple[SlotOffset, ...]
    share: float


class DecodeWeights(NamedTuple):
    """Arguments of `decode`: elements of `element_bytes` bytes in slot `target`, from stored bytes in `source`.

    touched: what is decoded of the experts, where the others were not fetched; None for all.
    """

    group: int
    source: int
    target: int
    element_bytes: int
    pieces: tuple[DecodedPiece, ...]
    touched: Touched | None = None


class FinishGradient(NamedTuple):
    """stored = round(accumulator (+ stored)) for a part of a group, with the sums of squares of what was stored.

    squares: whether these count; not where another accumulator is still to be added.
    """

    group: int
    accumulator: int
    runs: tuple[StoredRun, ...]
    has_previous: bool
    squares: bool = True


class UpdateTile(NamedTuple):
    """Arguments of `update`: elements [start, start + count) of a group's segment, with the places of their planes.

    targets: where new values go, by the CPU, as if nothing were clipped; none of what a drive then takes from where it
    was updated to second planes. None: in place. urgent: for prices, work of an earlier program
    that the CPU ends first.
    """

    group: int
    segment: str
    start: int
    count: int
    planes: dict[str, SlotOffset]
    targets: dict[str, SlotOffset] | None = None
    urgent: bool = False


class DriveCopy(NamedTuple):
    """Arguments of a copy between a drive and the host: the group whose planes move. left: for prices, the share of
    the bytes that remains."""

    group: int
    left: float = 1.0


BOUND_BYTES = 4
"""Bytes of the int32 that says where an expert's rows begin or end."""


class FetchExperts(NamedTuple):
    """Arguments of `fetch_experts`: copy the experts that have rows in some chunk.

    regions: one for every parameter, cut into equal shares for `experts` experts. bounds: where each chunk's
    [experts + 1] bounds of rows begin. share: the part of the regions' bytes that is expected to cross the
    link, for prices; the routing decides what does.
    """

    regions: tuple[CopyRegion, ...]
    experts: int
    bounds: tuple[SlotOffset, ...]
    share: float


@dataclass(frozen=True, eq=False)
class Command:
    """One unit of issue. `waits` are indices of commands on other streams that must have finished before it starts.

    awaits, signals: semaphores of other ranks that must have been raised before it starts, and own ones that its end
    raises.
    """

    index: int
    kind: str
    name: CommandName
    stream: Stream
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    waits: tuple[int, ...]
    work: Work = Work()  # noqa: RUF009 (an immutable NamedTuple)
    copies: tuple[CopyRegion, ...] = ()
    args: Any = None
    awaits: tuple[Signal, ...] = ()
    signals: tuple[Signal, ...] = ()

    def moved(self, index: int, waits: tuple[int, ...]) -> Command:
        """The same at another place of a program. `dataclasses.replace` takes three times as long."""
        found = object.__new__(Command)
        vars(found).update(vars(self), index=index, waits=waits)
        return found

    @property
    def label(self) -> str:
        """Its name in words."""
        return str(self.name)

    @property
    def regions(self) -> tuple[CopyRegion, ...]:
        """The copies that it makes; a fetch of experts makes only some of them."""
        return self.args.regions if isinstance(self.args, FetchExperts) else self.copies

    @property
    def peer_bytes(self) -> int:
        """Bytes that a collective has this rank send to others, or receive if that is more."""
        return getattr(self.args, "peer_bytes", 0)

    @property
    def brings_own(self) -> bool:
        """Whether a gather or an exchange copies the rank's own piece, too."""
        return getattr(self.args, "brings_own", False)

    @property
    def copy_bytes(self) -> int:
        """Bytes that cross a link; for a fetch of experts, those that are expected to, and for a drive, those left."""
        num_bytes = sum(region.num_bytes for region in self.regions)
        if isinstance(self.args, DriveCopy):
            return round(self.args.left * num_bytes)
        return round(self.args.share * num_bytes) if isinstance(self.args, FetchExperts) else num_bytes


@dataclass(frozen=True, eq=False)
class Program:
    """Commands in issue order over a table of slots. `initial` says what slots hold when it starts."""

    name: str
    slots: tuple[Slot, ...]
    commands: tuple[Command, ...]
    initial: tuple[Access, ...] = ()


def streams_of(program: Program) -> tuple[Stream, ...]:
    """The streams that a program is told of by: those of every program, and the others that it uses."""
    used = {command.stream for command in program.commands}
    return tuple(stream for stream in STREAMS if stream in BASE_STREAMS or stream in used)


def host_lane(command: Command) -> int:
    """What a command runs in order with: its stream, or of the CPU, which takes groups in any order, its group."""
    if command.stream is Stream.CPU:
        return len(STREAMS) + getattr(command.args, "group", 0)
    return STREAM_INDEX[command.stream]


def cpu_priority(command: Command) -> tuple[int, int]:
    """The CPU runs the ready command with the least of this first: the first group's, which forward needs first.

    Commands become ready in program order. What is left of an earlier program comes before all.
    """
    urgent = getattr(command.args, "urgent", False)
    return -1 if urgent else getattr(command.args, "group", 0), command.index
