"""The simulator against timelines worked on paper."""

import json

import pytest

from flexengine.ops.base import Work
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Stream, UpdateTile
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.simulator import LEAST_CPU_SHARE, Rates, simulate
from flexengine.schedule.slots import Slot, SlotKey, overlapping_slots
from flexengine.schedule.timeline import command_events, trace_json, track_events


def rates(latency_s: float = 0.0) -> Rates:
    """1 FLOP a second; 10 bytes a second one way, 5 when both directions are busy."""
    alone, both = ({Stream.H2D: v, Stream.D2H: v} for v in (10.0, 5.0))
    return Rates(lambda command: command.work.matmul_flops, alone, both, latency_s)


def builder() -> ProgramBuilder:
    slots = tuple(Slot(SlotKey(f"{m}{i}", memory=m), 100 * i, 100, "") for m in ("gpu", "host") for i in range(3))
    return ProgramBuilder("paper", slots, overlapping_slots(slots))


def copy(b: ProgramBuilder, stream: Stream, source: int, target: int, num_bytes: int = 100) -> None:
    b.copy(CommandName("copy"), stream, "c", [CopyRegion(source, 0, target, 0, num_bytes)])


def compute(b: ProgramBuilder, seconds: float, reads: int, writes: int) -> None:
    b.add(
        "op", CommandName("op"), Stream.COMPUTE, [Access(reads, "c")], [Access(writes, "c")], Work(matmul_flops=seconds)
    )


def test_one_slot_serialises_fetch_and_compute():
    b = builder()
    for _ in range(2):
        copy(b, Stream.H2D, 3, 0)
        compute(b, 4.0, 0, 1)
    timing = simulate(b.build(), rates())
    assert timing.start_s == pytest.approx([0, 10, 14, 24])
    assert timing.total_s == pytest.approx(28)


def test_two_slots_overlap_fetch_and_compute():
    b = builder()
    for slot in (0, 1):
        copy(b, Stream.H2D, 3, slot)
        compute(b, 4.0, slot, 2)
    timing = simulate(b.build(), rates())
    assert timing.start_s == pytest.approx([0, 10, 10, 20])
    assert timing.total_s == pytest.approx(24)
    assert timing.busy_s[Stream.H2D] == pytest.approx(20)


def test_both_directions_slow_each_other_down():
    b = builder()
    copy(b, Stream.H2D, 3, 0, 100)
    copy(b, Stream.D2H, 1, 4, 50)
    timing = simulate(b.build(), rates())
    # both at 5 bytes/s until the shorter one ends at 10 s, then 50 bytes at 10 bytes/s
    assert timing.end_s == pytest.approx([15, 10])


def test_latency_counts_per_region():
    b = builder()
    b.copy(CommandName("c"), Stream.H2D, "c", [CopyRegion(3, 0, 0, 50, 10), CopyRegion(3, 50, 0, 0, 10)])
    assert simulate(b.build(), rates(latency_s=1.0)).total_s == pytest.approx(4.0)


def test_trace_has_one_event_per_command():
    b = builder()
    copy(b, Stream.H2D, 3, 0)
    compute(b, 4.0, 0, 1)
    program = b.build()
    trace = trace_json([*track_events(), *command_events(program, simulate(program, rates()))])
    events = json.loads(trace)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in spans] == [(0, pytest.approx(10e6)), (pytest.approx(10e6), pytest.approx(4e6))]


def test_nothing_starts_before_the_host_has_issued_it():
    b = builder()
    for slot in (0, 1):
        copy(b, Stream.H2D, 3, slot, 10)
        compute(b, 4.0, slot, 2)
    timing = simulate(b.build(), rates()._replace(issue_s=lambda command: 3.0))
    # issued at 3, 6, 9 and 12; the second op waits for the first, which ends at 10, and for its own issue
    assert timing.start_s == pytest.approx([3, 6, 9, 12])
    assert timing.total_s == pytest.approx(16)
    assert timing.busy_s[Stream.COMPUTE] == pytest.approx(8)


def test_the_host_waits_for_the_cpu_before_it_issues_more():
    b = builder()
    b.add("update", CommandName("update"), Stream.CPU, [], [Access(4, "y")])
    b.copy(CommandName("fetch"), Stream.H2D, "y", [CopyRegion(4, 0, 0, 0, 10)])
    compute(b, 4.0, 2, 1)  # needs nothing of the CPU's
    timing = simulate(b.build(), rates()._replace(issue_s=lambda command: 3.0, cpu_s=lambda command: 5.0))
    # the update is issued at 3 and ends at 8; then the host issues the fetch until 11, the op until 14
    assert timing.start_s == pytest.approx([3, 11, 14])


def test_copies_slow_the_cpu_by_what_they_take_of_host_memory():
    b = builder()
    copy(b, Stream.H2D, 3, 0, 60)
    b.add("update", CommandName("update"), Stream.CPU, [], [Access(4, "y")])
    timing = simulate(b.build(), rates()._replace(cpu_s=lambda command: 8.0, host_bytes_per_s=40.0))
    alone = rates().alone_bytes_per_s[Stream.H2D]
    copied_s = 60 / alone
    share = 1 - alone / 40
    assert timing.end_s[0] == pytest.approx(copied_s)
    assert timing.total_s == pytest.approx(copied_s + 8 - share * copied_s)
    assert timing.busy_s[Stream.CPU] == pytest.approx(timing.total_s)


def test_the_cpu_slows_copies_down_while_it_works():
    b = builder()
    copy(b, Stream.H2D, 3, 0, 60)
    b.add("update", CommandName("update"), Stream.CPU, [], [Access(4, "y")])
    alone = rates().alone_bytes_per_s[Stream.H2D]
    beside = {Stream.H2D: alone / 4, Stream.D2H: 2 * alone}
    timing = simulate(b.build(), rates()._replace(cpu_s=lambda command: 2.0, beside_cpu_bytes_per_s=beside))
    assert timing.end_s[1] == pytest.approx(2.0)
    assert timing.end_s[0] == pytest.approx(2.0 + (60 - 2.0 * alone / 4) / alone)

    b = builder()
    copy(b, Stream.D2H, 3, 0, 60)
    b.add("update", CommandName("update"), Stream.CPU, [], [Access(4, "y")])
    never_faster = simulate(b.build(), rates()._replace(cpu_s=lambda command: 99.0, beside_cpu_bytes_per_s=beside))
    assert never_faster.end_s[0] == pytest.approx(60 / rates().alone_bytes_per_s[Stream.D2H])


def test_copies_beside_the_cpu_are_faster_while_the_other_direction_is_idle():
    b = builder()
    copy(b, Stream.H2D, 3, 0, 60)
    copy(b, Stream.D2H, 5, 1, 10)
    b.add("update", CommandName("update"), Stream.CPU, [], [Access(4, "y")])
    both, only = {Stream.H2D: 1.0, Stream.D2H: 2.0}, {Stream.H2D: 4.0, Stream.D2H: 3.0}
    beside = {"beside_cpu_bytes_per_s": both, "only_beside_cpu_bytes_per_s": only}
    timing = simulate(b.build(), rates()._replace(cpu_s=lambda command: 1e3, copy_latency_s=0.0, **beside))
    assert timing.end_s[1] == pytest.approx(10 / 2)
    assert timing.end_s[0] == pytest.approx(5 + (60 - 5) / 4)


def test_the_cpu_never_stands_still():
    b = builder()
    copy(b, Stream.H2D, 3, 0, 60)
    b.add("update", CommandName("update"), Stream.CPU, [], [Access(4, "y")])
    timing = simulate(b.build(), rates()._replace(cpu_s=lambda command: 0.2, host_bytes_per_s=1.0))
    assert timing.end_s[1] == pytest.approx(0.2 / LEAST_CPU_SHARE)


def test_the_cpu_takes_what_is_ready_by_turn():
    """Groups 3, 2, 1, 0 become ready one second after another; each takes 1.5 s."""
    slots = tuple(
        Slot(SlotKey(f"{memory}{i}", memory=memory), 16 * i, 16, "") for memory in ("gpu", "host") for i in range(4)
    )
    b = ProgramBuilder("turns", slots, overlapping_slots(slots))
    for group in (3, 2, 1, 0):
        b.copy(CommandName(f"send {group}"), Stream.D2H, "x", [CopyRegion(group, 0, 4 + group, 0, 16)])
        args = UpdateTile(group, "matrix", 0, 1, {})
        b.add(
            "update",
            CommandName(f"update {group}"),
            Stream.CPU,
            [Access(4 + group, "x")],
            [Access(4 + group, "y")],
            args=args,
        )
    rate = {Stream.H2D: 16.0, Stream.D2H: 16.0}
    program = b.build()
    timing = simulate(program, Rates(lambda c: 0.0, rate, rate, 0.0, cpu_s=lambda c: 1.5))
    starts = {c.args.group: timing.start_s[c.index] for c in program.commands if c.stream is Stream.CPU}
    assert starts == pytest.approx({3: 1.0, 2: 2.5, 0: 4.0, 1: 5.5})
