"""Proves that a program is right before it runs: order, contents, bounds.

- bounds: every slot lies inside its arena, every copy inside its slots and in the direction of its stream, and a copy
  covers all of its host slot;
- declarations: what a command really touches, the ends of its copies and the slots in its arguments, it declares as
  read or written;
- operands: those of a layer's call lie apart;
- order: any two commands that touch a common byte, one of them writing, are ordered by stream order and waits;
- CPU order: the CPU runs ready commands by group, so it keeps the order within a group alone;
- drives: what crosses to or from one are whole blocks, and all of what its slot holds; what was updated goes back;
- speculation: what is updated before it is known whether it counts may be kept or thrown away
  (`speculation_checker.py`);
- contents: walking the commands in issue order, every read finds what it expects, whichever slots lie over each other.
Together: any execution that respects streams and waits computes what the issue order says.
"""

from __future__ import annotations

from flexengine.schedule.commands import (
    BOUND_BYTES,
    DIRECTIONS,
    DRIVE_STREAMS,
    Command,
    CopyRegion,
    DecodeWeights,
    FetchExperts,
    FinishGradient,
    LayerCall,
    Program,
    SlotOffset,
    Stream,
    UpdateTile,
    host_lane,
)
from flexengine.schedule.drive_checker import check_drive_copy, check_written_back
from flexengine.schedule.layer_program import ALIGNMENT
from flexengine.schedule.program_builder import merge_regions
from flexengine.schedule.program_error import ProgramError
from flexengine.schedule.ranks.split_commands import (
    AddTables,
    ExchangeParts,
    FoldParts,
    GatherOwned,
    GatherShares,
    ShareOfFetch,
    ShareOfRead,
)
from flexengine.schedule.ranks.waves import own_regions
from flexengine.schedule.slots import HOST_SIDE, overlapping_slots
from flexengine.schedule.speculation_checker import check_speculation


def check_program(program: Program, gpu_bytes: int, host_bytes: int, node_bytes: int = 0, drive_bytes: int = 0) -> None:
    """Raise ProgramError unless the program is proven right within the arenas. `ranks.checker` proves those of ranks
    together."""
    overlaps = overlapping_slots(program.slots)
    check_bounds(program, gpu_bytes, host_bytes, node_bytes, drive_bytes)
    check_declarations(program)
    check_operands(program, overlaps)
    check_order(program, overlaps)
    check_contents(program, overlaps)
    check_written_back(program)
    check_speculation(program, overlaps)


def check_bounds(program: Program, gpu_bytes: int, host_bytes: int, node_bytes: int = 0, drive_bytes: int = 0) -> None:
    """Check that slots lie within arenas, and copies within slots, in their stream's direction, covering host slots."""
    limits = {"gpu": gpu_bytes, "host": host_bytes, "node": node_bytes, "drive": drive_bytes}
    for slot in program.slots:
        if slot.offset < 0 or slot.end > limits[slot.memory]:
            raise ProgramError(
                f"slot {slot.name} ends at byte {slot.end}, but the {slot.memory} arena has {limits[slot.memory]} bytes"
            )
    for command in program.commands:
        for c in command.regions:
            source, target = program.slots[c.source], program.slots[c.target]
            if c.source_offset + c.num_bytes > source.num_bytes or c.target_offset + c.num_bytes > target.num_bytes:
                raise ProgramError(
                    f"{command.label}: {c.num_bytes} bytes do not fit {source.name}+{c.source_offset}"
                    f" or {target.name}+{c.target_offset}"
                )
        _check_direction(program, command)
        _check_exchanges(program, command)
        if isinstance(command.args, FetchExperts):
            _check_routing(program, command)
        if isinstance(command.args, DecodeWeights):
            _check_pieces(program, command.label, command.args)
            if command.args.touched is not None:
                _check_bounds_of_experts(program, command.label, *command.args.touched[:2])


def _check_routing(program: Program, command: Command) -> None:
    """Check that a fetch of experts finds all their bounds within slots, and cuts no expert's share in two."""
    args = command.args
    _check_bounds_of_experts(program, command.label, args.experts, args.bounds)
    if any(region.num_bytes % args.experts for region in args.regions):
        raise ProgramError(f"{command.label}: some region has no equal shares for {args.experts} experts")


def _check_bounds_of_experts(program: Program, label: str, experts: int, bounds: tuple[SlotOffset, ...]) -> None:
    for slot, offset in bounds:
        if offset + BOUND_BYTES * (experts + 1) > program.slots[slot].num_bytes:
            raise ProgramError(f"{label}: {experts} experts' bounds do not fit {program.slots[slot].name}")


def _check_exchanges(program: Program, command: Command) -> None:
    """Check that what ranks gather, exchange and fold lies within its slots."""
    args, needed = command.args, dict[int, int]()
    if isinstance(args, GatherShares):
        needed = {args.slot: args.size * args.share_bytes}
    elif isinstance(args, GatherOwned):
        needed = {args.source: args.counts[args.rank], args.slot: sum(args.counts)}
    elif isinstance(args, ExchangeParts):
        received = len(args.counts) * args.counts[args.rank]
        needed = {args.accumulator: args.first + sum(args.counts), args.received: received}
        needed = {slot: elements * args.element_bytes for slot, elements in needed.items()}
    elif isinstance(args, FoldParts):
        missing = [run for run in args.runs for parts in args.received if run.start + run.numel > parts.numel]
        if missing or args.rounds < 1:
            raise ProgramError(f"{command.label} adds {args.rounds} rounds' parts, of which some are too short")
    for slot, num_bytes in needed.items():
        if num_bytes > program.slots[slot].num_bytes:
            raise ProgramError(f"{command.label}: {num_bytes} bytes do not fit {program.slots[slot].name}")


def _check_pieces(program: Program, label: str, args: DecodeWeights) -> None:
    """Check that decoded pieces lie within both slots on the GPU, and that no two write the same element."""
    source, target = program.slots[args.source], program.slots[args.target]
    if (source.memory, target.memory) != ("gpu", "gpu"):
        raise ProgramError(f"{label} decodes from {source.name} to {target.name}, and both must be on the GPU")
    reached = 0
    for piece, source_offset, first_element in sorted(args.pieces, key=lambda place: place.first_element):
        if source_offset + piece.total_bytes > source.num_bytes:
            raise ProgramError(f"{label}: {piece.total_bytes} bytes do not fit {source.name}+{source_offset}")
        if first_element < reached:
            raise ProgramError(f"{label} writes elements {first_element}..{reached} of {target.name} twice")
        reached = first_element + piece.numel
    if reached * args.element_bytes > target.num_bytes:
        raise ProgramError(f"{label}: {reached} elements do not fit {target.name}")


def _check_direction(program: Program, command: Command) -> None:
    """Check that a copy goes the way its stream says, and leaves no gap in the host slot but padding."""
    if command.stream in DRIVE_STREAMS:
        check_drive_copy(program, command)
        return
    if not command.regions:
        return
    from_host = DIRECTIONS[command.stream] is Stream.H2D if command.stream in DIRECTIONS else None
    covered, filled = dict[int, list[tuple[int, int]]](), dict[int, int]()
    args = command.args
    if isinstance(args, ShareOfFetch) and command.regions != merge_regions(own_regions(args.regions, *args[:2])):
        raise ProgramError(f"{command.label} copies another share than that of rank {args.rank} of {args.size}")
    if isinstance(args, ShareOfRead) and not _is_share(command.regions, args):
        raise ProgramError(f"{command.label} copies another share than that of rank {args.rank} of {args.size}")
    for c in args.regions if isinstance(args, ShareOfFetch) else command.regions:
        ends = (program.slots[c.source].memory, program.slots[c.target].memory)
        if from_host is None or ends[not from_host] not in HOST_SIDE or ends[from_host] != "gpu":
            raise ProgramError(
                f"{command.label} copies from {program.slots[c.source].name} to {program.slots[c.target].name} on"
                f" stream {command.stream}"
            )
        slot, start = (c.source, c.source_offset) if from_host else (c.target, c.target_offset)
        covered.setdefault(slot, []).append((start, start + c.num_bytes))
        if program.slots[slot].key.role in ("hidden", "handed"):
            # A hidden state and its gradient take turns there; of the smaller one, the slot on the GPU has the size.
            filled[slot] = min(program.slots[c.source].num_bytes, program.slots[c.target].num_bytes)
    for slot, parts in covered.items():
        reached = 0
        for start, end in [*sorted(parts), (filled.get(slot, program.slots[slot].num_bytes), 0)]:
            if start - reached >= ALIGNMENT:
                raise ProgramError(f"{command.label} leaves bytes {reached}..{start} of {program.slots[slot].name} out")
            reached = max(reached, end)


def _is_share(regions: tuple[CopyRegion, ...], args: ShareOfRead) -> bool:
    """Whether copies go to all bytes of a rank's share, and to no others."""
    target = regions[0].target
    whole = [CopyRegion(0, first, target, first, num_bytes) for first, num_bytes in args.spans]
    found = [c._replace(source=0, source_offset=c.target_offset) for c in regions]
    return merge_regions(found) == merge_regions(own_regions(whole, args.rank, args.size))


def check_declarations(program: Program) -> None:
    """Check that commands touch only slots that they declare, and write only those declared as written.

    A layer's call must have a slot for every area that it uses.
    """
    for command in program.commands:
        if isinstance(command.args, LayerCall):
            call = command.args
            missing = call.program.stages(command.kind)[call.stage].areas - call.areas.keys()
            if missing:
                raise ProgramError(f"{command.label} uses {', '.join(sorted(missing))} without a slot for it")
        reads = {access.slot for access in command.reads}
        writes = {access.slot for access in command.writes}
        read, written = _touched(command)
        for slot in (read - reads - writes) | (written - writes):
            if not _covered(program, slot, writes if slot in written else reads | writes):
                raise ProgramError(f"{command.label} uses slot {program.slots[slot].name} without declaring it")


def check_operands(program: Program, overlaps: list[tuple[int, ...]]) -> None:
    """Check that no two operands of a layer's call share a byte."""
    for command in program.commands:
        if isinstance(command.args, LayerCall):
            call = command.args
            slots = {*call.areas.values(), *call.weights.values(), *call.accumulators.values()}
            for slot in slots:
                other = next((o for o in overlaps[slot] if o != slot and o in slots), None)
                if other is not None:
                    names = f"{program.slots[slot].name} and {program.slots[other].name}"
                    raise ProgramError(f"{command.label} uses {names}, which share bytes")


def _covered(program: Program, slot: int, pieces: set[int]) -> bool:
    """Whether the pieces that lie within a slot fill it, padding aside."""
    whole = program.slots[slot]
    parts = (program.slots[piece] for piece in pieces)
    within = sorted(
        (p.offset, p.end) for p in parts if p.memory == whole.memory and whole.offset <= p.offset and p.end <= whole.end
    )
    reached = whole.offset
    for start, end in within:
        if start - reached >= ALIGNMENT:
            return False
        reached = max(reached, end)
    return bool(within) and whole.end - reached < ALIGNMENT


def _touched(command: Command) -> tuple[set[int], set[int]]:
    """Slots that a command reads and writes by its copies and arguments."""
    read, written = {c.source for c in command.regions}, {c.target for c in command.regions}
    args = command.args
    if isinstance(args, LayerCall):
        read |= {*args.areas.values(), *args.weights.values()}
        own = ("output", "scratch", "carry")
        own += ("bounds",) if args.stage == 0 else ()
        written |= {args.areas[a] for a in own if a in args.areas} | {*args.accumulators.values()}
        if command.kind in ("forward", "forward_again"):
            written |= {args.areas[a] for a in ("save_gpu", "save_host") if a in args.areas}
    elif isinstance(args, DecodeWeights):
        bounds = () if args.touched is None else args.touched.bounds
        read, written = {args.source, *(place.slot for place in bounds)}, {args.target}
    elif isinstance(args, FinishGradient):
        read, written = read | {args.accumulator}, written | {run.slot for run in args.runs}
    elif isinstance(args, GatherShares | AddTables):
        read, written = {args.slot}, {args.slot}
    elif isinstance(args, GatherOwned):
        read, written = {args.source}, {args.slot}
    elif isinstance(args, ExchangeParts):
        read, written = {args.accumulator}, {args.received}
    elif isinstance(args, FoldParts):
        read = {parts.slot for parts in args.received} | {run.slot for run in args.runs if args.has_previous}
        read |= {args.own.slot} if args.own else set()
        written = {run.slot for run in args.runs}
    elif isinstance(args, ShareOfFetch):
        read |= {c.source for c in args.regions}
    elif isinstance(args, FetchExperts):
        read |= {place.slot for place in args.bounds}
    elif isinstance(args, UpdateTile):
        read |= {plane.slot for plane in args.planes.values()}
        places = args.targets or args.planes
        written |= {plane.slot for kind, plane in places.items() if kind != "grad"}
    return read, written


def _completed_before(program: Program, lanes: dict[int, int]) -> list[list[int]]:
    """Vector clocks: for every command, the last command of each lane that has surely ended when it starts.

    A lane runs its commands in order, and waits carry over what the awaited command knew. The CPU's commands may run
    in the order of the program, whatever their group, when what they wait for has ended.
    """
    clocks: list[list[int]] = []
    latest, ready = [[-1] * len(lanes) for _ in lanes], [-1] * len(lanes)
    for command in program.commands:
        own = lanes[host_lane(command)]
        known = [-1] * len(lanes)
        for wait in command.waits:
            if wait >= command.index:
                raise ProgramError(f"{command.label} waits for a later command, {program.commands[wait].label}")
            known = [max(a, b) for a, b in zip(known, clocks[wait], strict=True)]
        if command.stream is Stream.CPU:
            known = ready = [max(a, b) for a, b in zip(known, ready, strict=True)]
        clock = [max(a, b) for a, b in zip(known, latest[own], strict=True)]
        clock[own] = command.index
        clocks.append(clock)
        latest[own] = clock
    return clocks


def check_order(program: Program, overlaps: list[tuple[int, ...]]) -> None:
    """Check that streams and waits order every pair of conflicting commands."""
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(map(host_lane, program.commands)))}
    clocks = _completed_before(program, lanes)
    writers: dict[int, int] = {}
    readers: dict[int, dict[int, int]] = {}

    def require(earlier: int, command: Command, slot: int) -> None:
        before = program.commands[earlier]
        if clocks[command.index][lanes[host_lane(before)]] < earlier:
            raise ProgramError(_unordered(command, before, program.slots[slot].name))

    for command in program.commands:
        for access in (*command.reads, *command.writes):
            for slot in overlaps[access.slot]:
                if slot in writers:
                    require(writers[slot], command, slot)
        for access in command.writes:
            for slot in overlaps[access.slot]:
                for earlier in readers.get(slot, {}).values():
                    require(earlier, command, slot)
        for access in command.writes:
            writers[access.slot] = command.index
            readers[access.slot] = {}
        for access in command.reads:
            readers.setdefault(access.slot, {})[host_lane(command)] = command.index


def _unordered(command: Command, before: Command, slot: str) -> str:
    if command.stream is before.stream is Stream.CPU:
        return (
            f"{command.label} and {before.label} are of different groups, so that either may run first, and both touch"
            f" slot {slot}"
        )
    return (
        f"{command.label} ({command.stream}) does not wait for {before.label} ({before.stream}), and both touch slot"
        f" {slot}"
    )


def check_contents(program: Program, overlaps: list[tuple[int, ...]]) -> None:
    """Check that every read finds the content it names, walking the commands in issue order."""
    held = {access.slot: access.content for access in program.initial}
    for command in program.commands:
        for access in command.reads:
            found = held.get(access.slot, "nothing")
            if found != access.content:
                raise ProgramError(
                    f"{command.label} expects {access.content!r} in slot {program.slots[access.slot].name}, which holds"
                    f" {found!r}"
                )
        for access in command.writes:
            for slot in overlaps[access.slot]:
                held.pop(slot, None)
        for access in command.writes:
            held[access.slot] = access.content
