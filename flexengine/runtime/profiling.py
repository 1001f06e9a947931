"""A range of steps for an external profiler: `nsys profile -c cudaProfilerApi` records from start to stop.

Inside the range every step and every command is an NVTX range, so that kernels and copies can be told apart by the
command that issued them. Outside of it nothing is called.
"""

from __future__ import annotations

import torch

from flexengine.runtime.execution.executor import Executor


class ProfiledSteps:
    """Starts the CUDA profiler before the first of `steps` and stops it after the last; for engines on CUDA."""

    def __init__(self, executor: Executor, steps: range) -> None:
        self._executor, self._steps, self._running = executor, steps, False

    def before_step(self, step: int) -> None:
        """Called before every step, counted from 1."""
        if step not in self._steps:
            return
        if not self._running:
            self._executor.synchronize()
            torch.cuda.profiler.start()
            self._executor.range_of, self._running = torch.cuda.nvtx.range, True
        torch.cuda.nvtx.range_push(f"step {step}")

    def after_step(self, step: int) -> None:
        """Called when a step has ended."""
        if step not in self._steps or not self._running:
            return
        torch.cuda.nvtx.range_pop()
        if step == self._steps[-1]:
            self.stop()

    def stop(self) -> None:
        """End the profile, also one whose last step never came; a second call does nothing."""
        if self._running:
            self._executor.synchronize()
            self._executor.range_of, self._running = None, False
            torch.cuda.profiler.stop()
