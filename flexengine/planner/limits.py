"""How far the planner searches: every number that trades planning time for the speed of plans, on one page.

All are counts or shares, never clocks, so that a request has one answer. What doubling a number costs and gains stands
with it: planning time, and seconds of a step, on the mean of the sample that `python -m bench.search_limits` plans
(bench/results/search_limits.json). "Nothing" is less than 0.01% of a step, or less than a twentieth of the time.

When another kind of plan is tried, and what it must gain, stands with each kind in `variants.py`. Numbers of machines
and formats stay where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Race(NamedTuple):
    """A round of the race: the most sizes that run it, within which factor of the best, and how far each goes.

    seeds: whether all seeds are tried first.
    """

    num_sizes: int
    near: float
    blocks: int
    steps: int
    seeds: bool = False


@dataclass(frozen=True)
class SearchLimits:
    """What the search may try. Larger numbers never make a plan invalid; they take longer."""

    # -- sizes -------------------------------------------------------------------------------------------------------

    chunk_layers: int = 1024
    """Largest chunks of a round times blocks, where sizes allow a choice: programs grow with it. Of sizes beside the
    best that are tried with speculation a quarter."""
    patience: int = 8
    """Sizes in a row with seeds above `far`, after which no more are started."""
    far: float = 1.05
    """Above this factor of the best a size's seeds are far from it, and a plan that speculates is given up."""
    race: tuple[Race, ...] = (
        Race(8, 1.1, 1, 1),
        Race(4, 1.1, 1, 1, seeds=True),
        Race(3, 1.03, 80_000, 16),
        Race(2, 1.02, 200_000, 16),
    )
    """Blocks times chunks that local search simulates of a size, in at most so many steps, for ever fewer sizes."""

    # -- seeds -------------------------------------------------------------------------------------------------------

    splits: int = 4
    """Even shares of a save set, of which any may stay on the GPU while the rest goes to the host."""
    sets: int = 12
    """Save sets that are considered together, where blocks are of several kinds."""
    points: int = 48
    """Points that the dynamic programme keeps between merges, which take time with their square."""
    link_price: float = 0.2
    """Least price of a second of the link, in seconds of compute: copies that the relaxation hides still make something
    wait. Lower prices give seeds that wait for the link, higher ones seeds that recompute."""
    hidden_share: float = 0.7
    """Share of a phase in which the relaxation hides updates by the CPU, as the link takes host memory's rate, too.
    Lower shares move updates to the GPU in the seeds."""

    # -- local search ------------------------------------------------------------------------------------------------

    expansion_blocks: int = 30_000
    """Blocks times chunks that the changes of one candidate may take to simulate, which limits the options tried;
    those of the best candidates always are. Small models try every option."""
    count_ratio: int = 4
    """Changes are made to 1, so many, its square, ... blocks, and to all that are alike."""
    elite: int = 64
    """Best candidates whose options are tried first."""
    pairs: int = 96
    """Changes over a budget that are paired with others, and pairs that are simulated."""
    slots: int = 4
    """Most slots of a kind."""
    swaps: int = 8
    """Borders between unlike blocks at which two are swapped."""
    near: float = 1.005
    """Candidates within this factor of the best are expanded as well, so that the search leaves local optima."""
    remembered: int = 2000
    """Candidates that are remembered of a size."""

    # -- simulation --------------------------------------------------------------------------------------------------

    finalists: int = 12
    """Candidates of a size that may be simulated as real programs."""
    finalist_near: float = 1.025
    """Finalists are within this factor of the best by the surrogate's estimate."""
    finalist_difference: int = 6
    """Finalists differ from each other in one of so many blocks, or in edges: the surrogate errs alike on like ones."""
    commands: int = 6_000
    """Commands after which no more finalists are simulated; a second has about 20,000."""

    # -- other kinds of plans ----------------------------------------------------------------------------------------

    speculated_commands: int = 8_000
    """The same of the plans that are tried with speculation at a time. Short steps, which gain most, are tried in all
    sizes."""
    other_sizes: int = 4
    """Sizes beside the fastest plan's that are tried with speculation, each by two simulations."""
    alike: int = 2
    """Next best plans of the fastest one's size that are tried with it: less that is kept leaves more host memory."""
    inside: int = 8
    """Plans of a search for updates inside backward that are tried with it."""
    searches: int = 5
    """Searches for a plan whose layout for several ranks fits, each with what the one before lacked, and `spare_bytes`,
    taken from its budgets."""
    spare_bytes: int = 128 * 2**20
    """Left free beside what a layout lacked, since another plan has other slots."""


LIMITS = SearchLimits()
"""What requests are planned with."""
