"""What the simulation of several ranks counts with: the work of commands, clocks, and copies that share a link.

Copies count in bytes, and their clock runs slower while the node's host memory is their limit; what the CPU updates
counts in seconds of a clock that runs slower beside copies.
"""

from __future__ import annotations

from itertools import accumulate
from math import inf
from typing import NamedTuple

from flexengine.schedule.commands import DRIVE_STREAMS, DRIVE_WRITES, Command, Program, Stream
from flexengine.schedule.ranks.node_exchange import NodeSum, NodeWeights
from flexengine.schedule.simulator import Rates

WAYS = (Stream.H2D, Stream.D2H)
"""Directions of a rank's link; numbers of commands' kinds begin with them."""
FROM_DRIVE, TO_DRIVE = range(len(WAYS), len(WAYS) + 2)
"""Numbers of a rank's copies from and to the drive of its node, which follow."""
NUM_WAYS = len(WAYS) + 2
COMPUTE, CPU, NETWORK = range(NUM_WAYS, NUM_WAYS + 3)
"""Numbers of the other kinds of commands."""


class CommandWork(NamedTuple):
    """What the commands of a program take, by index, and when the host has issued them since the program's begin.

    kinds: a number of WAYS, FROM_DRIVE, TO_DRIVE, COMPUTE, CPU or NETWORK. amounts: bytes of copies, latency of the
    link counted as bytes, else seconds.
    """

    kinds: list[int]
    amounts: list[float]
    issued_s: list[float]

    @staticmethod
    def of(program: Program, rates: Rates) -> CommandWork:
        """The work of a program."""
        found = [_kind_and_amount(command, program, rates) for command in program.commands]
        issued = accumulate(map(rates.issue_s, program.commands))
        return CommandWork([kind for kind, _ in found], [amount for _, amount in found], list(issued))


def _kind_and_amount(command: Command, program: Program, rates: Rates) -> tuple[int, float]:
    if isinstance(command.args, NodeSum | NodeWeights):
        return NETWORK, command.args.network_bytes / (rates.network_bytes_per_s or inf)
    if command.stream is Stream.CPU:
        return CPU, rates.cpu_s(command)
    if command.stream is Stream.COMM and command.peer_bytes and rates.peers_by_host:
        latency = rates.copy_latency_s * rates.alone_bytes_per_s[Stream.H2D]
        return WAYS.index(Stream.H2D), 2 * command.peer_bytes + latency  # out of a GPU, then into another
    if command.stream is Stream.COMM:
        return COMPUTE, rates.comm_s(command)  # as of kernels, nothing changes its speed
    if not command.regions:
        return COMPUTE, rates.compute_s(command)
    return _way_and_bytes(command, program, rates)


def _way_and_bytes(command: Command, program: Program, rates: Rates) -> tuple[int, float]:
    if command.stream in DRIVE_STREAMS:
        return TO_DRIVE if command.stream in DRIVE_WRITES else FROM_DRIVE, float(command.copy_bytes)
    way = int(program.slots[command.regions[0].source].memory == "gpu")
    latency = rates.copy_latency_s * len(command.regions)
    return way, command.copy_bytes + latency * rates.alone_bytes_per_s[WAYS[way]]


class Clock:
    """A clock that runs as fast as what it times: 1 where nothing slows that down."""

    def __init__(self) -> None:
        self.now, self.speed = 0.0, 1.0

    def seconds_to(self, at: float) -> float:
        """Seconds until it shows a time."""
        return (at - self.now) / self.speed

    @property
    def due(self) -> float:
        """What it has reached, as far as its digits tell."""
        return self.now + 1e-12 * max(1.0, self.now)


class Way:
    """Copies of a rank at work in a direction of its link, or of the drive, which share a rate.

    Times are of the clock of copies.
    speed: bytes per second of each copy. since: when what is left of them was counted.
    """

    __slots__ = ("events", "left", "since", "speed")

    def __init__(self) -> None:
        self.events: list[int] = []
        self.left: list[float] = []
        self.speed = self.since = 0.0

    def count_down(self, now: float) -> None:
        """Count what is left of the copies."""
        done, self.since = (now - self.since) * self.speed, now
        if done and self.left:
            self.left = [left - done for left in self.left]

    def set_rate(self, rate: float) -> float:
        """Share another rate among the copies, what is left of which has been counted; returns when the first ends."""
        if not self.events:
            return inf
        self.speed = rate / len(self.events)
        return self.since + min(self.left) / self.speed

    def take_ended(self, due: float) -> list[int]:
        """Remove the copies that have ended."""
        self.count_down(due)
        events, left = self.events, self.left
        if max(left) <= 0:
            self.events, self.left = [], []
            return events
        going_on = [place for place, amount in enumerate(left) if amount > 0]
        self.events, self.left = [events[place] for place in going_on], [left[place] for place in going_on]
        return [event for event, amount in zip(events, left, strict=True) if amount <= 0]
