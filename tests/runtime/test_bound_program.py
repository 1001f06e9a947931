"""Programs issued through the transfer engine give what their commands, one after the other, would give.

The device is fake (csrc/tests/fake_cuda.cpp). In turn one stream lags: it goes on only when no other can, so that the
others run ahead as far as their waits allow. Compute commands are copies inside the GPU arena.
"""

import contextlib
import dataclasses
import random
import threading
import time
from functools import partial

import pytest
import torch
from fake_driver import FakeDriver, PlainStream, fake_driver

from flexengine.native.transfer_operations import Record
from flexengine.runtime.arena import Arenas
from flexengine.runtime.execution.bound_program import NO_FENCE, BoundProgram, HostFence, holding
from flexengine.runtime.execution.cpu_work import CpuWork
from flexengine.runtime.execution.notifier import CompletionNotifier
from flexengine.schedule.commands import Access, Command, CommandName, CopyRegion, Program, Signal, Stream
from flexengine.schedule.following import cpu_waits
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.slots import Slot, SlotKey, overlapping_slots

GPU_STREAMS = (Stream.COMPUTE, Stream.H2D, Stream.D2H)
SLOT_BYTES, SLOTS_PER_SIDE = 48, 4
ARENA_BYTES = SLOT_BYTES * SLOTS_PER_SIDE
CPU = torch.device("cpu")
SLOTS = tuple(
    Slot(SlotKey(f"{memory}{i}", memory=memory), i * SLOT_BYTES, SLOT_BYTES, "test")
    for memory in ("gpu", "host")
    for i in range(SLOTS_PER_SIDE)
)


def random_program(seed: int, num_commands: int = 40) -> Program:
    """Copies in both directions, whole or in two regions, and moves inside the GPU arena, in random order."""
    rng = random.Random(seed)
    builder = ProgramBuilder("random", SLOTS, overlapping_slots(SLOTS))
    for index in range(num_commands):
        stream = rng.choice(GPU_STREAMS)
        gpu, other, host = rng.randrange(4), rng.randrange(4), 4 + rng.randrange(4)
        source, target = {Stream.H2D: (host, gpu), Stream.D2H: (gpu, host), Stream.COMPUTE: (gpu, other)}[stream]
        cut = rng.randrange(SLOT_BYTES)
        regions = (CopyRegion(source, 0, target, cut, SLOT_BYTES - cut), CopyRegion(source, 9, target, 0, cut // 2))
        reads, writes = [Access(source, "any")], [Access(target, "any")]
        if stream is Stream.COMPUTE:
            builder.add("move", CommandName(f"move {index}"), stream, reads, writes, args=regions)
        else:
            builder.add_copy(CommandName(f"copy {index}"), stream, reads, writes, regions[: 1 + (cut > 1)])
    return builder.build()


class Bench:
    """Arenas, fake streams and one program bound to them."""

    def __init__(self, driver: FakeDriver, program: Program, timed: bool = False) -> None:
        self.driver, self.program = driver, program
        self.arenas = Arenas(CPU, ARENA_BYTES, ARENA_BYTES)
        self.streams = {stream: driver.stream() for stream in GPU_STREAMS}
        self.transfers = driver.open(piece_bytes=7)
        self.bound = BoundProgram(program, self.arenas, self.streams, self.transfers, timed)

    def memory(self) -> torch.Tensor:
        return torch.cat([self.arenas.bytes_view(m, 0, ARENA_BYTES) for m in ("gpu", "host")])

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for memory in ("gpu", "host"):
            view = self.arenas.bytes_view(memory, 0, ARENA_BYTES)
            view.copy_(torch.randint(256, (ARENA_BYTES,), dtype=torch.uint8, generator=generator))

    def run(self, lagging: Stream | None, num_runs: int = 1) -> None:
        """Issue everything while the device stands still, then let it run."""
        for name, stream in self.streams.items():
            self.driver.lag(stream, name is lagging)
        self.driver.pause(True)
        for _ in range(num_runs):
            self.bound.run(self._launch)
        self.driver.pause(False)
        self.driver.settle()

    def _launch(self, command: Command) -> None:
        """A "kernel": on the compute stream, when its turn comes."""
        assert command.stream is Stream.COMPUTE
        for region in command.args:
            if region.num_bytes:
                operands = (
                    self.address(region.target, region.target_offset),
                    self.address(region.source, region.source_offset),
                )
                handle = self.streams[Stream.COMPUTE].cuda_stream
                status = self.driver.memcpy_async(*operands, region.num_bytes, PlainStream(handle))
                assert status == 0

    def address(self, slot: int, offset: int) -> int:
        place = self.program.slots[slot]
        return self.arenas.bytes_view(place.memory, place.offset + offset, 1).data_ptr()

    def close(self) -> None:
        self.bound.close()
        self.transfers.close()
        self.arenas.close()


def one_by_one(program: Program, memory: torch.Tensor) -> torch.Tensor:
    """What the commands in issue order make of the two arenas, GPU first."""
    memory = memory.clone()
    base = {"gpu": 0, "host": ARENA_BYTES}
    for command in program.commands:
        for region in command.copies or command.args:
            source, target = program.slots[region.source], program.slots[region.target]
            start = base[source.memory] + source.offset + region.source_offset
            to = base[target.memory] + target.offset + region.target_offset
            memory[to : to + region.num_bytes] = memory[start : start + region.num_bytes].clone()
    return memory


def results(driver: FakeDriver, program: Program, fills: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(memory, expected) of runs of one program, none and every stream lagging in turn, from different contents."""
    bench, found = Bench(driver, program), []
    for fill in fills:
        for lagging in (None, *GPU_STREAMS):
            bench.fill(fill)
            expected = one_by_one(program, bench.memory())
            bench.run(lagging)
            found.append((bench.memory(), expected))
    bench.close()
    return found


@pytest.mark.parametrize("seed", range(8))
def test_any_stream_may_lag_in_any_run(seed: int):
    for actual, expected in results(fake_driver(), random_program(seed), range(2)):
        assert torch.equal(actual, expected)


def test_missing_waits_are_noticed():
    """The test above can fail: most of the same programs without their waits give other bytes."""
    driver, noticed = fake_driver(), 0
    for seed in range(8):
        program = random_program(seed)
        loose = dataclasses.replace(program, commands=tuple(dataclasses.replace(c, waits=()) for c in program.commands))
        noticed += not all(torch.equal(actual, expected) for actual, expected in results(driver, loose, range(1)))
    assert noticed >= 6


@pytest.mark.parametrize("lagging", GPU_STREAMS)
def test_a_run_starts_when_all_of_the_run_before_has_ended(lagging: Stream):
    """Streams join at the ends: nothing of the second run passes a lagging stream of the first."""
    driver = fake_driver()
    for seed in range(4):
        program = random_program(seed)
        bench = Bench(driver, program)
        bench.fill(0)
        expected = one_by_one(program, one_by_one(program, bench.memory()))
        bench.run(lagging, num_runs=2)
        assert torch.equal(bench.memory(), expected)
        bench.close()


@pytest.mark.parametrize("lagging", GPU_STREAMS)
def test_what_follows_on_the_compute_stream_comes_after_all_of_the_run(lagging: Stream):
    driver = fake_driver()
    bench = Bench(driver, random_program(5))
    probe = torch.zeros(2, dtype=torch.uint8)
    bench.driver.lag(bench.streams[lagging], True)
    bench.driver.pause(True)
    bench.bound.run(bench._launch)
    driver.memcpy_async(probe.data_ptr(), probe.data_ptr() + 1, 1, bench.streams[Stream.COMPUTE])
    bench.driver.pause(False)
    bench.driver.settle()
    assert driver.log()[-1].target == probe.data_ptr()
    bench.close()


def test_calls_are_as_many_as_compute_commands():
    """Consecutive copies, waits and records go over together."""
    program = random_program(0)
    bench = Bench(fake_driver(), program)
    submitted = []
    submit = bench.transfers.submit
    bench.transfers.submit = lambda *segment: (submitted.append(segment), submit(*segment))[0]
    called = []
    bench.bound.run(lambda command: called.append(command.index))
    assert called == [c.index for c in program.commands if c.stream is Stream.COMPUTE]
    assert len(submitted) == len(called) + 1
    bench.close()


@pytest.mark.parametrize("timed", [False, True], ids=["plain", "timed"])
def test_in_ranges_every_command_is_issued_inside_its_own(timed: bool):
    """The same operations in the same order: only the calls are cut at the commands."""
    driver, program = fake_driver(), random_program(3)
    bench, said, submitted, called = Bench(driver, program, timed), [], [], []
    bench.fill(0)
    expected = one_by_one(program, bench.memory())
    submit = bench.transfers.submit

    def noted(batch, first, last):
        submitted.append((first, last, said[-1]))
        submit(batch, first, last)

    @contextlib.contextmanager
    def range_of(label):
        said.append(label)
        yield
        said.append("")

    def call(command):
        called.append((command.label, said[-1]))
        bench._launch(command)

    said.append("")
    bench.transfers.submit = noted
    bench.bound.run_in_ranges(call, range_of)
    driver.settle()
    assert torch.equal(bench.memory(), expected)
    assert [label for label in said if label] == [c.label for c in program.commands]
    assert called == [(c.label, c.label) for c in program.commands if c.stream is Stream.COMPUTE]
    assert [first for first, _, _ in submitted] == [0, *(last for _, last, _ in submitted[:-1])]
    assert submitted[-1][1] == bench.bound._prepared.num_operations
    assert [label for _, _, label in submitted] == ["", *(c.label for c in program.commands for _ in range(2)), ""]
    bench.close()


def wait_beside(bench: Bench, index: int) -> None:
    """`wait_for` a command of a program that is issued while the command's stream stands still."""
    stream = bench.streams[bench.program.commands[index].stream]
    bench.driver.hold(stream)
    bench.bound.run(bench._launch)
    waiting = threading.Thread(target=bench.bound.wait_for, args=(index,))
    waiting.start()
    assert bench.driver.await_calls("cuEventSynchronize", 1)
    assert waiting.is_alive()
    bench.driver.release(stream)
    waiting.join()


@pytest.mark.parametrize("seed", range(3))
def test_waiting_for_a_command(seed: int):
    program = random_program(seed, num_commands=15)
    for command in program.commands:
        bench = Bench(fake_driver(), program)
        bench.fill(0)
        wait_beside(bench, command.index)
        earlier = [c for c in program.commands[: command.index + 1] if c.stream is command.stream]
        wanted = sum(region.num_bytes for c in earlier for region in c.copies or c.args)
        handle = bench.streams[command.stream].cuda_stream
        assert sum(copy.num_bytes for copy in bench.driver.log() if copy.stream == handle) >= wanted
        bench.driver.settle()
        bench.close()


def test_waiting_for_a_command_that_only_a_later_one_implies():
    """What a host slot holds may change when its copy has ended, also where the copy after it is what others wait for.

    The tokens of a round were overwritten by those of the next while their copy waited for the round before.
    """
    builder = ProgramBuilder("batch and weights", SLOTS, overlapping_slots(SLOTS))
    for name, host, gpu in (("batch", 4, 0), ("weights", 5, 1)):
        regions = (CopyRegion(host, 0, gpu, 0, SLOT_BYTES),)
        builder.add_copy(CommandName(name), Stream.H2D, [Access(host, name)], [Access(gpu, name)], regions)
    reads, moved = [Access(0, "batch"), Access(1, "weights")], (CopyRegion(0, 0, 2, 0, SLOT_BYTES),)
    forward = builder.add("move", CommandName("forward"), Stream.COMPUTE, reads, [Access(2, "hidden")], args=moved)
    assert forward.waits == (1,)
    bench = Bench(fake_driver(), builder.build())
    bench.fill(0)
    host, hidden = (bench.arenas.bytes_view(memory, at, SLOT_BYTES) for memory, at in (("host", 0), ("gpu", 96)))
    batch = host.clone()
    wait_beside(bench, 0)
    host.fill_(0)
    bench.driver.settle()
    assert torch.equal(hidden, batch)
    bench.close()


@pytest.mark.parametrize("lagging", [None, *GPU_STREAMS])
def test_times_of_every_command(lagging: Stream | None):
    """The fake device's clock moves 1 ms with every operation: commands last at least their pieces, in order."""
    driver, program = fake_driver(), random_program(2)
    bench = Bench(driver, program, timed=True)
    for fill in range(2):
        bench.fill(fill)
        expected = one_by_one(program, bench.memory())
        bench.run(lagging)
        assert torch.equal(bench.memory(), expected)
        timings = bench.bound.timings()
        assert len(timings) == len(program.commands)
        ends = dict.fromkeys(GPU_STREAMS, 0.0)
        for command in program.commands:
            start, end = timings[command.index]
            pieces = sum(-(-c.num_bytes // 7) for c in command.copies)
            assert end - start > pieces * 0.999e-3
            assert start >= max([ends[command.stream], *(timings[w][1] for w in command.waits)])
            ends[command.stream] = end
    bench.close()


def program_with_cpu() -> Program:
    """A copy to the host that the CPU waits for, and a copy of something else that comes later."""
    builder = ProgramBuilder("cpu", SLOTS, overlapping_slots(SLOTS))
    builder.copy(CommandName("send"), Stream.D2H, "x", [CopyRegion(0, 0, 4, 0, SLOT_BYTES)])
    builder.add("work", CommandName("first"), Stream.CPU, [Access(4, "x")], [Access(5, "y")])
    builder.add("work", CommandName("second"), Stream.CPU, [Access(5, "y")], [Access(4, "z")])
    builder.copy(CommandName("fetch"), Stream.H2D, "w", [CopyRegion(6, 0, 1, 0, SLOT_BYTES)])
    return builder.build()


@pytest.mark.parametrize("timed", [False, True])
def test_the_cpu_works_when_what_it_waits_for_is_issued_and_has_ended(timed: bool):
    driver, program = fake_driver(), program_with_cpu()
    bench = Bench(driver, program, timed)
    bench.fill(0)
    expected = bench.memory()[:SLOT_BYTES]
    seen = []

    def call(command: Command) -> None:
        copies = {entry.target for entry in driver.log()}
        seen.append((command.label, bench.address(4, 0) in copies))
        assert torch.equal(bench.memory()[ARENA_BYTES : ARENA_BYTES + SLOT_BYTES], expected)

    work = bench.bound.cpu_work(call, num_threads=1, before=None)
    work.start()
    assert not seen
    bench.bound.run(call)
    work.join()
    driver.settle()
    assert seen == [("first", True), ("second", True)]
    assert driver.calls("cuEventSynchronize, sleeping") == 1  # the thread leaves its core to the update's threads
    bench.bound.wait_for(program.commands[-1].index)  # the host's own wait does not
    assert driver.calls("cuEventSynchronize, sleeping") == 1 < driver.calls("cuEventSynchronize")
    if timed:
        send, first, second, _ = bench.bound.timings()
        assert send[1] == first[0] < first[1] == second[0] < second[1]
    bench.close()


def test_the_cpu_of_a_run_goes_on_under_the_next_and_sees_its_own_data():
    """The same program again and again, as with steps of one round: its events are recorded anew for every run, but no
    sooner than who waits for them has gone on."""
    builder = ProgramBuilder("steps", SLOTS, overlapping_slots(SLOTS))
    builder.add("make", CommandName("make"), Stream.COMPUTE, [], [Access(0, "x")], args=())
    builder.copy(CommandName("send"), Stream.D2H, "x", [CopyRegion(0, 0, 4, 0, SLOT_BYTES)])
    builder.add("work", CommandName("work"), Stream.CPU, [Access(4, "x")], [Access(5, "y")])
    builder.add("make", CommandName("make more"), Stream.COMPUTE, [], [Access(1, "z")], args=())
    program, driver = builder.build(), fake_driver()
    bench, waits = Bench(driver, program), cpu_waits(program, program)
    made = [torch.full((SLOT_BYTES,), run, dtype=torch.uint8) for run in range(30)]
    seen, before = [], None

    def work(command: Command) -> None:
        time.sleep(0.002 * (len(seen) % 3))
        seen.append(bench.memory()[ARENA_BYTES : ARENA_BYTES + SLOT_BYTES].tolist())

    for run in range(len(made)):

        def launch(command: Command, run: int = run) -> None:
            slot = command.writes[0].slot
            stream = PlainStream(bench.streams[Stream.COMPUTE].cuda_stream)
            operands = bench.address(slot, 0), made[run].data_ptr()
            assert driver.memcpy_async(*operands, SLOT_BYTES, stream) == 0

        def wait(command: Command, before: CpuWork | None = before) -> None:
            if before is not None:
                before.wait(waits[command.index])

        current = bench.bound.cpu_work(work, num_threads=1, before=before)
        current.start()
        bench.bound.run(launch, HostFence(wait, waits))
        before = current
    assert before is not None
    before.join()
    driver.settle()
    assert seen == [[run] * SLOT_BYTES for run in range(len(made))]
    bench.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_gate_stands_before_its_commands_alone(seed: int):
    """As much has been issued there as where the host stops before every command, and the rest comes after."""
    driver, program = fake_driver(), random_program(seed)
    bench = Bench(driver, program)
    issued: dict[int, tuple[int, int]] = {}

    def note(command: Command) -> None:
        issued[command.index] = driver.calls("cuMemcpyAsync"), driver.calls("cuStreamWaitEvent")

    indices = set(random.Random(seed).sample(range(len(program.commands)), 10)) | {0, len(program.commands) - 1}
    counts = []
    for fence in (HostFence(note), HostFence(note, indices)):
        issued.clear()
        driver.reset()
        bench.fill(seed)
        expected = one_by_one(program, bench.memory())
        bench.bound.run(bench._launch, fence)
        driver.settle()
        assert torch.equal(bench.memory(), expected)
        counts.append(dict(issued))
    assert counts[1] == {index: counts[0][index] for index in sorted(indices)}
    bench.close()


def test_no_stream_waits_for_the_cpu_within_a_program():
    builder = ProgramBuilder("cpu", SLOTS, overlapping_slots(SLOTS))
    builder.copy(CommandName("send"), Stream.D2H, "x", [CopyRegion(0, 0, 4, 0, SLOT_BYTES)])
    builder.add("work", CommandName("work"), Stream.CPU, [Access(4, "x")], [Access(5, "y")])
    builder.copy(CommandName("fetch"), Stream.H2D, "y", [CopyRegion(5, 0, 1, 0, SLOT_BYTES)])
    with pytest.raises(AssertionError, match="fetch waits for the CPU"):
        Bench(fake_driver(), builder.build())


@pytest.mark.parametrize("lagging", [None, *GPU_STREAMS])
def test_copies_wait_for_what_a_drive_brings(lagging: Stream | None):
    """One slot of the host is read into again and again, for copies to two of the GPU, run after run: every kernel
    finds what was read for it, however slow the drive or a stream is."""
    builder = ProgramBuilder("weights", SLOTS, overlapping_slots(SLOTS))
    builder.copy(CommandName("fetch", "batch"), Stream.H2D, "batch", [CopyRegion(5, 0, 0, 0, SLOT_BYTES)])
    for k in range(5):
        reads = [Access(0, "batch")] if k == 0 else []
        builder.add("read", CommandName("read", "weights", str(k)), Stream.DRIVE_FETCH, reads, [Access(4, str(k))])
        builder.copy(CommandName("fetch"), Stream.H2D, str(k), [CopyRegion(4, 0, 1 + k % 2, 0, SLOT_BYTES)])
        builder.add("use", CommandName("use", owner=str(k)), Stream.COMPUTE, [Access(1 + k % 2, str(k))], [])
    program, driver = builder.build(), fake_driver()
    bench, numbers = Bench(driver, program), iter(range(1, 256))
    driver.lag(bench.streams[lagging or Stream.COMPUTE], lagging is not None)
    used = torch.zeros(20, SLOT_BYTES, dtype=torch.uint8)
    rows = iter(used)

    def read(command: Command) -> None:
        time.sleep(0.002 * (command.index % 3))
        bench.arenas.bytes_view("host", 0, SLOT_BYTES).fill_(next(numbers))

    def launch(command: Command) -> None:
        stream = PlainStream(bench.streams[Stream.COMPUTE].cuda_stream)
        source = bench.address(command.reads[0].slot, 0)
        assert driver.memcpy_async(next(rows).data_ptr(), source, SLOT_BYTES, stream) == 0

    before = None
    for _ in range(4):
        work = before = bench.bound.cpu_work(read, num_threads=1, before=before)
        work.start()
        bench.bound.run(launch, holding(program, NO_FENCE, work))
    work.join()
    driver.settle()
    assert used.tolist() == [[1 + row] * SLOT_BYTES for row in range(20)]
    bench.close()


@pytest.mark.parametrize("lagging", [None, *GPU_STREAMS])
def test_copies_wait_until_a_drive_has_what_lay_there(lagging: Stream | None):
    """What kernels leave goes to the drive through one slot of the host, run after run: every write finds what was sent
    for it, however slow the drive or a stream is."""
    builder = ProgramBuilder("gradients", SLOTS, overlapping_slots(SLOTS))
    for k in range(5):
        builder.add("leave", CommandName("leave", owner=str(k)), Stream.COMPUTE, [], [Access(1 + k % 2, str(k))])
        builder.copy(CommandName("send"), Stream.D2H, str(k), [CopyRegion(1 + k % 2, 0, 4, 0, SLOT_BYTES)])
        builder.add("write", CommandName("write", "grad", str(k)), Stream.DRIVE_STORE, [Access(4, str(k))], [])
    program, driver = builder.build(), fake_driver()
    bench, numbers, found = Bench(driver, program), iter(range(1, 256)), []
    driver.lag(bench.streams[lagging or Stream.COMPUTE], lagging is not None)
    left = torch.arange(1, 21, dtype=torch.uint8)[:, None].expand(20, SLOT_BYTES).contiguous()

    def write(command: Command) -> None:
        time.sleep(0.002 * (command.index % 3))
        found.append(bench.arenas.bytes_view("host", 0, SLOT_BYTES).tolist())

    def launch(command: Command) -> None:
        stream = PlainStream(bench.streams[Stream.COMPUTE].cuda_stream)
        target = bench.address(command.writes[0].slot, 0)
        assert driver.memcpy_async(target, left[next(numbers) - 1].data_ptr(), SLOT_BYTES, stream) == 0

    before, waits = None, cpu_waits(program, program)
    for _ in range(4):
        work = bench.bound.cpu_work(write, num_threads=1, before=before, earlier=waits)
        work.start()
        fence = NO_FENCE if before is None else HostFence(partial(_wait_for, before, waits), waits)
        bench.bound.run(launch, holding(program, fence, work))
        before = work
    work.join()
    driver.settle()
    assert found == left.tolist()
    bench.close()


def _wait_for(work: CpuWork, waits: dict[int, frozenset[int]], command: Command) -> None:
    work.wait(waits.get(command.index, ()))


def test_runs_begin_after_the_clock():
    """An event before the runs is what they count from."""
    driver = fake_driver()
    bench = Bench(driver, random_program(2), timed=True)
    [zero] = bench.transfers.create_events(1, timing=True)
    bench.transfers.submit(bench.transfers.prepare([Record(bench.streams[Stream.COMPUTE], zero)]))
    beginnings, ends = [], [0.0]
    for _ in range(2):
        bench.run(None)
        beginnings.append(bench.bound.began_s(zero))
        assert beginnings[-1] > ends[-1]
        ends.append(beginnings[-1] + max(end for _, end in bench.bound.timings()))
    bench.close()


def test_events_are_given_back():
    driver = fake_driver()
    bench = Bench(driver, random_program(4), timed=True)
    assert driver.calls("cuEventCreate") > 2 * len(bench.program.commands)
    bench.bound.close()
    assert driver.calls("cuEventCreate") == driver.calls("cuEventDestroy_v2")


def test_what_ended_is_told_while_the_host_issues():
    """Each run tells its commands with signals in order: those before a fence that waits for them, too."""
    driver, program = fake_driver(), random_program(3)
    told_of = [c for c in program.commands if c.stream is Stream.D2H][1::3]
    indices = {c.index for c in told_of}
    commands = [
        dataclasses.replace(c, signals=(Signal(0, "own", "round"),) * (c.index in indices)) for c in program.commands
    ]
    bench = Bench(driver, dataclasses.replace(program, commands=tuple(commands)))
    for _ in range(2):
        told: list[int] = []
        come = threading.Event()

        def tell(command: Command, told: list[int] = told, come: threading.Event = come) -> None:
            told.append(command.index)
            come.set()

        def fence(command: Command, come: threading.Event = come) -> None:
            if command.index > told_of[0].index:
                assert come.wait(60)

        notifier = bench.bound.notifier(tell)
        notifier.start()
        bench.bound.run(bench._launch, HostFence(fence))
        notifier.join()
        assert told == [c.index for c in told_of]
    driver.settle()
    bench.close()


def test_an_abandoned_notifier_tells_no_more():
    told: list[Command] = []
    command = Command(0, "copy", CommandName("copy"), Stream.D2H, (), (), (), signals=(Signal(0, "own", "round"),))
    notifier = CompletionNotifier([command], lambda index: None, told.append)
    notifier.start()
    notifier.abandon()
    notifier.join()
    assert told == []


def test_a_device_that_fails_is_told_of():
    command = Command(0, "copy", CommandName("copy"), Stream.D2H, (), (), ())

    def fail(index: int) -> None:
        raise OSError("device lost")

    notifier = CompletionNotifier([command], fail, print)
    notifier.start()
    notifier.issued(0)
    with pytest.raises(RuntimeError, match="device lost"):
        notifier.join()
