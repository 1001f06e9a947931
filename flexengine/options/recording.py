"""The options that say which steps of a run are recorded, which `TrainConfig` has among its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flexengine.options.option import Need, Option

NO_DRY_RUN = Need("dry_run", absent=True, why="contradict each other, as one observes a step and the other takes none")


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """A measured timeline of one step, and a profile of several."""

    trace: Annotated[
        bool | str,
        Option(
            "time every command of one step and write it to trace.json of the run folder, a Chrome trace like the"
            " simulated timeline.json (`flexengine report` draws both); with a file name also to that file",
            needs=(NO_DRY_RUN,),
        ),
    ] = False
    trace_step: Annotated[
        int | None,
        Option(
            "the step that --trace measures, counted from 1 (default: 2, which every run times anyway; 13 with"
            " --replan, when the plan has settled; a later one where that step is profiled)",
            above=0,
            needs=(Need("trace", why="says which step --trace measures"),),
        ),
    ] = None
    profile_start_step: Annotated[
        int | None,
        Option(
            "first step, counted from 1, of a profile by `nsys profile -c cudaProfilerApi`, with NVTX ranges around"
            " steps and commands; needs an NVIDIA GPU",
            above=0,
            needs=(NO_DRY_RUN,),
        ),
    ] = None
    profile_stop_step: Annotated[
        int | None,
        Option(
            "last step of the profile, itself included (default: that of --profile-start-step)",
            above=0,
            needs=(Need("profile_start_step"),),
        ),
    ] = None

    def check_recording(self) -> None:
        """Refuse a trace to nowhere and a profile backwards; what the number of steps decides comes later."""
        if self.trace == "":
            raise ValueError("--trace is given an empty file name; name a file, or leave the value out")
        start, stop = self.profile_start_step, self.profile_stop_step
        if start is not None and stop is not None and start > stop:
            raise ValueError(
                f"--profile-start-step {start} comes after --profile-stop-step {stop}; lower the first or raise the"
                " second"
            )

    @property
    def profiled_steps(self) -> range:
        """The steps that are profiled, counted from 1."""
        if self.profile_start_step is None:
            return range(0)
        return range(self.profile_start_step, (self.profile_stop_step or self.profile_start_step) + 1)
