"""What a program's commands await and raise of a node's semaphores, as hooks of the executor."""

from __future__ import annotations

from collections.abc import Mapping

from flexengine.native.transfer_operations import WordValue
from flexengine.parallel.signals import Signals
from flexengine.runtime.execution.executor import CommandHooks
from flexengine.schedule.commands import Command, Signal

MOMENT_S = 0.05
"""How long the CPU's commands await a semaphore before they look whether they are still wanted."""


def semaphore_hooks(signals: Signals, clocks: Mapping[str, int], rows: Mapping[str, int | None]) -> CommandHooks:
    """Hooks for the run of a program. clocks: running numbers of its round and of its step's update. rows: by the name
    of a rank its row, None for all ranks. The CPU's commands may call them when later programs are issued."""

    def value(signal: Signal) -> int:
        return clocks[signal.clock] - signal.lag

    def row(signal: Signal) -> int | None:
        return signal.of if isinstance(signal.of, int) else rows[signal.of]

    def before(command: Command) -> None:
        for signal in command.awaits:
            if value(signal) > 0:  # semaphores begin at 0
                signals.wait(signal.semaphore, row(signal), value(signal))

    def arrived(command: Command) -> bool:
        for signal in command.awaits:
            if value(signal) > 0:
                try:
                    signals.wait(signal.semaphore, row(signal), value(signal), timeout_s=MOMENT_S)
                except TimeoutError:
                    return False
        return True

    def after(command: Command) -> None:
        for signal in command.signals:
            signals.signal(signal.semaphore, value(signal))

    def words(signal: Signal) -> list[WordValue]:
        reached = max(0, value(signal))  # semaphores begin at 0
        return [WordValue(address, reached) for address in signals.addresses(signal.semaphore, row(signal))]

    return CommandHooks(before, after, words, arrived)
