"""Prices a program: when every command would start and end on a machine, as the streams and the link allow.

Event-driven: each stream runs its commands in order, the CPU by priority. A command starts when its stream is free, its
waits have ended and the host has issued it; the host issues one command after another, and before one that waits for
work of the CPU it waits itself, as no stream knows of that. A copy slows down while the other direction of the link is
busy, as measured (`h2d_duplex_bytes_per_s`), and again while the CPU works; copies of two streams in one direction
share its rate. Work of the CPU slows down by what copies take of the host memory's rate. A drive that is read and
written at once gives each the rate that it has then; what is read for the CPU and for the GPU shares a rate.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from operator import attrgetter
from typing import NamedTuple

from flexengine.schedule.commands import (
    DIRECTIONS,
    DRIVE_READS,
    DRIVE_STREAMS,
    DRIVE_WRITES,
    STREAM_INDEX,
    STREAMS,
    THREAD_STREAMS,
    Command,
    Program,
    Stream,
    cpu_priority,
    streams_of,
)


class Rates(NamedTuple):
    """How long commands take on a machine.

    compute_s: seconds of a compute command. Copies take latency + bytes / rate, alone or beside a copy the other way.
    issue_s: seconds of the host to issue a command. cpu_s: seconds of a command of the CPU while the link is idle.
    host_bytes_per_s: rate of host memory, which copies take a part of. beside_cpu_bytes_per_s: most that a direction of
    the link moves while the CPU works, as the CPU has the better of host memory; only_beside_cpu_bytes_per_s: the same
    while the other direction is idle, None = as that. comm_s: seconds of a collective, or of work on the stream of
    collectives. peers_by_host: GPUs reach each other through the host's memory alone, each byte over a link twice.
    batch_s: seconds of the host to read, pack and write a step's batch. settle_s: seconds of the host from the end of a
    step's last round, whose loss it reads, to the update's first command. drive_bytes_per_s: of a drive's streams,
    alone and while the other is at work. copy_bytes: that a command moves across the link. network_bytes_per_s: of a
    rank's share of its node's network, each way; 0 = it takes no time.
    """

    compute_s: Callable[[Command], float]
    alone_bytes_per_s: dict[Stream, float]
    duplex_bytes_per_s: dict[Stream, float]
    copy_latency_s: float
    issue_s: Callable[[Command], float] = lambda command: 0.0
    cpu_s: Callable[[Command], float] = lambda command: 0.0
    host_bytes_per_s: float = inf
    beside_cpu_bytes_per_s: dict[Stream, float] | None = None
    only_beside_cpu_bytes_per_s: dict[Stream, float] | None = None
    comm_s: Callable[[Command], float] = lambda command: 0.0
    peers_by_host: bool = False
    batch_s: float = 0.0
    settle_s: float = 0.0
    drive_bytes_per_s: dict[Stream, tuple[float, float]] | None = None
    copy_bytes: Callable[[Command], float] = attrgetter("copy_bytes")
    network_bytes_per_s: float = 0.0


CPU = STREAM_INDEX[Stream.CPU]
READS, WRITES = (tuple(STREAM_INDEX[stream] for stream in ways) for ways in (DRIVE_READS, DRIVE_WRITES))
OTHER_DIRECTION = {Stream.H2D: Stream.D2H, Stream.D2H: Stream.H2D}
LEAST_CPU_SHARE = 0.2
"""The CPU keeps at least this share of its speed, however busy the link is."""


def cpu_share(copied_bytes_per_s: float, host_bytes_per_s: float) -> float:
    """The share of its speed that the CPU keeps while copies take `copied_bytes_per_s` of the host memory's rate."""
    return max(LEAST_CPU_SHARE, 1 - copied_bytes_per_s / host_bytes_per_s)


class Timing(NamedTuple):
    """Start and end of every command in seconds, the makespan and the busy seconds per stream."""

    start_s: list[float]
    end_s: list[float]
    total_s: float
    busy_s: dict[Stream, float]


class _Running(NamedTuple):
    command: Command
    started: float


def simulate(program: Program, rates: Rates) -> Timing:
    """Run a program on the model of a machine; returns when every command would start and end."""
    return _Simulation(program, rates).run()


class _Simulation:
    def __init__(self, program: Program, rates: Rates) -> None:
        self.program, self.rates = program, rates
        count = len(program.commands)
        self.start, self.end = [0.0] * count, [-1.0] * count
        self.queues: list[list[Command]] = [[] for _ in STREAMS]
        for command in program.commands:
            self.queues[STREAM_INDEX[command.stream]].append(command)
        self.used = [i for i, queue in enumerate(self.queues) if queue]
        self.unended = [len(command.waits) for command in program.commands]  # the first so many may not have ended
        self.threaded = frozenset(c.index for c in program.commands if c.stream in THREAD_STREAMS)
        self.heads = [0] * len(STREAMS)
        self.cpu_ready: list[Command] = []
        self.running: list[_Running | None] = [None] * len(STREAMS)
        self.remaining = [0.0] * len(STREAMS)
        self.copying = dict.fromkeys(OTHER_DIRECTION, 0)  # how many copies run in each direction
        self.busy = dict.fromkeys(streams_of(program), 0.0)
        self.issued = [inf] * count  # when the host has issued each command
        self.num_issued, self.host_s = 0, 0.0
        self._issue(0.0)

    def run(self) -> Timing:
        now = 0.0
        while True:
            due = self._start_ready(now)
            active = [i for i in self.used if self.running[i] is not None]
            if not active and due == inf:
                break
            speeds = {i: self._speed(i) for i in active}
            step = min((self.remaining[i] / speeds[i] for i in active), default=inf)
            if due <= now + step:
                step = due - now
            now += step
            for i in active:
                self.remaining[i] -= step * speeds[i]
                if self.remaining[i] <= 1e-12 * max(1.0, speeds[i]):
                    self._finish(i, now)
        unfinished = [c.label for c in self.program.commands if self.end[c.index] < 0]
        assert not unfinished, f"program never finishes: {unfinished[:3]}"
        return Timing(self.start, self.end, now, self.busy)

    def _issue(self, now: float) -> None:
        """Have the host issue commands from now on, up to one that waits for work of the CPU which has not ended."""
        self.host_s = max(self.host_s, now)
        while self.num_issued < len(self.issued):
            command = self.program.commands[self.num_issued]
            if command.index not in self.threaded and any(map(self._works, command.waits)):
                return
            self.host_s += self.rates.issue_s(command)
            self.issued[command.index] = self.host_s
            self.num_issued += 1

    def _works(self, index: int) -> bool:
        """Whether a command is one of the host's threads that has not ended."""
        return index in self.threaded and self.end[index] < 0

    def _start_ready(self, now: float) -> float:
        """Start what can start. Returns when the host issues the next command that waits for nothing but that."""
        due = inf
        for i in self.used:
            if i == CPU:
                due = min(due, self._start_cpu(i, now))
            elif self.running[i] is None and self.heads[i] < len(self.queues[i]):
                command = self.queues[i][self.heads[i]]
                ready_s = self._ready_s(command)
                if ready_s > now:
                    due = min(due, ready_s)
                    continue
                self.heads[i] += 1
                self._start(i, command, now)
        return due

    def _ready_s(self, command: Command) -> float:
        """When the host has issued a command whose waits have ended; infinite while one has not."""
        end, waits, unended = self.end, command.waits, self.unended[command.index]
        while unended and end[waits[unended - 1]] >= 0:  # the latest mostly ends last, and there may be thousands
            unended -= 1
        self.unended[command.index] = unended
        return inf if unended else self.issued[command.index]

    def _start_cpu(self, i: int, now: float) -> float:
        """`_start_ready` for the CPU, whose commands become ready in order and run by priority."""
        queue = self.queues[i]
        while self.heads[i] < len(queue) and self._ready_s(queue[self.heads[i]]) <= now:
            self.cpu_ready.append(queue[self.heads[i]])
            self.heads[i] += 1
        if self.running[i] is None and self.cpu_ready:
            command = min(self.cpu_ready, key=cpu_priority)
            self.cpu_ready.remove(command)
            self._start(i, command, now)
        return self._ready_s(queue[self.heads[i]]) if self.heads[i] < len(queue) else inf

    def _start(self, i: int, command: Command, now: float) -> None:
        self.running[i] = _Running(command, now)
        self.start[command.index] = now
        self.remaining[i] = self._amount(i, command)
        if STREAMS[i] in DIRECTIONS:
            self.copying[DIRECTIONS[STREAMS[i]]] += 1

    def _amount(self, i: int, command: Command) -> float:
        """The work of a command: seconds for compute and the CPU; bytes for copies, latency counted as bytes."""
        if STREAMS[i] is Stream.COMPUTE:
            return self.rates.compute_s(command)
        if STREAMS[i] is Stream.CPU:
            return self.rates.cpu_s(command)
        if STREAMS[i] is Stream.COMM:
            return self.rates.comm_s(command)
        if STREAMS[i] in DRIVE_STREAMS:
            return float(command.copy_bytes)
        latency = self.rates.copy_latency_s * max(1, len(command.regions))
        return self.rates.copy_bytes(command) + latency * self.rates.alone_bytes_per_s[DIRECTIONS[STREAMS[i]]]

    def _speed(self, i: int) -> float:
        stream = STREAMS[i]
        if stream in (Stream.COMPUTE, Stream.COMM):
            return 1.0
        if stream is Stream.CPU:
            links = sum(self._rate(direction) for direction, count in self.copying.items() if count)
            return cpu_share(links, self.rates.host_bytes_per_s)
        if stream in DRIVE_STREAMS:
            return self._drive_rate(stream)
        direction = DIRECTIONS[stream]
        return self._rate(direction) / self.copying[direction]

    def _rate(self, direction: Stream) -> float:
        """Bytes per second that all copies in a direction move together now."""
        both = self.copying[OTHER_DIRECTION[direction]] > 0
        rate = (self.rates.duplex_bytes_per_s if both else self.rates.alone_bytes_per_s)[direction]
        beside, only = self.rates.beside_cpu_bytes_per_s, self.rates.only_beside_cpu_bytes_per_s
        beside = beside if both or only is None else only
        if beside is None or self.running[CPU] is None:
            return rate
        return min(rate, beside[direction])

    def _drive_rate(self, stream: Stream) -> float:
        assert self.rates.drive_bytes_per_s is not None, "a plan with planes on a drive has its rates"
        alone, beside = self.rates.drive_bytes_per_s[stream]
        writes, reads = (sum(self.running[i] is not None for i in ways) for ways in (WRITES, READS))
        rate = beside if writes and reads else alone
        return rate / (writes if stream in DRIVE_WRITES else reads)

    def _finish(self, i: int, now: float) -> None:
        run = self.running[i]
        assert run is not None
        self.end[run.command.index] = now
        self.busy[STREAMS[i]] += now - run.started
        if STREAMS[i] in DIRECTIONS:
            self.copying[DIRECTIONS[STREAMS[i]]] -= 1
        if run.command.stream in THREAD_STREAMS:
            self._issue(now)
        self.running[i] = None
