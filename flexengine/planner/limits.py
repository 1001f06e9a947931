"""How far the planner searches: every number that trades planning time for the speed of plans, on one page.

All are counts or shares, never clocks, so that a request has one answer. With those of
sizes, seeds and local search stands what doubling costs and gains: planning time, and seconds of steps on the mean of
four requests (`python -m bench.search_limits`, bench/results/search_limits.json; of factors what is above 1 is
doubled). Times were taken on a busy machine, so that only large differences tell.

When another kind of plan is tried, and what it must gain, stands with each kind in `variants.py`. Numbers of machines
and formats stay where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    best that are tried with speculation a quarter.
    Doubling takes 0.97 times as long and gains nothing."""
    patience: int = 8
    """Sizes in a row with seeds above `far`, after which no more are started.
    Doubling takes 0.97 times as long and gains nothing."""
    far: float = 1.05
    """Above this factor of the best a size's seeds are far from it, and a plan that speculates is given up.
    Doubling takes 1.05 times as long and gains nothing."""
    race: tuple[Race, ...] = (
        Race(8, 1.1, 1, 1),
        Race(4, 1.1, 1, 1, seeds=True),
        Race(3, 1.03, 80_000, 16),
        Race(2, 1.02, 200_000, 16),
    )
    """Blocks times chunks that local search simulates of a size, in at most so many steps, for ever fewer sizes.
    Doubling takes 1.34 times as long and gains nothing."""

    # -- seeds -------------------------------------------------------------------------------------------------------

    splits: int = 4
    """Even shares of a save set, of which any may stay on the GPU while the rest goes to the host.
    Doubling takes 1.15 times as long and loses 0.38% (+0.0% to +1.4%)."""
    sets: int = 12
    """Save sets that are considered together, where blocks are of several kinds.
    Doubling takes 1.10 times as long and gains nothing."""
    points: int = 48
    """Points that the dynamic programme keeps between merges, which take time with their square.
    Doubling takes 1.51 times as long and gains 0.36% (-1.5% to +0.0%)."""
    link_price: float = 0.2
    """Least price of a second of the link, in seconds of compute: copies that the relaxation hides still make something
    wait. Lower prices give seeds that wait for the link, higher ones seeds that recompute.
    Doubling takes 2.34 times as long and gains nothing."""
    hidden_share: float = 0.7
    """Share of a phase in which the relaxation hides updates by the CPU, as the link takes host memory's rate, too.
    Lower shares move updates to the GPU in the seeds.
    Doubling takes 1.04 times as long and gains 0.20% (-1.0% to +0.8%)."""

    # -- local search ------------------------------------------------------------------------------------------------

    expansion_blocks: int = 30_000
    """Blocks times chunks that the changes of one candidate may take to simulate, which limits the options tried;
    those of the best candidates always are. Small models try every option.
    Doubling takes 1.23 times as long and loses 0.06% (-0.0% to +0.3%)."""
    count_ratio: int = 4
    """Changes are made to 1, so many, its square, ... blocks, and to all that are alike.
    Doubling takes 1.10 times as long and loses 0.18% (+0.0% to +0.7%)."""
    elite: int = 64
    """Best candidates whose options are tried first.
    Doubling takes 1.05 times as long and loses 0.06% (+0.0% to +0.2%)."""
    pairs: int = 96
    """Changes over a budget that are paired with others, and pairs that are simulated.
    Doubling takes 1.13 times as long and gains 0.08% (-0.3% to +0.0%)."""
    slots: int = 4
    """Most slots of a kind.
    Doubling takes 1.09 times as long and gains nothing."""
    swaps: int = 8
    """Borders between unlike blocks at which two are swapped.
    Doubling takes 1.13 times as long and gains nothing."""
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

    @property
    def quick(self) -> SearchLimits:
        """Limits of a search that only tells which kind of plans is worth one in full: it takes a third of the time,
        and steps are up to 1% longer."""
        return replace(
            self, race=(Race(2, 1.1, 10_000, 2, seeds=True),), patience=4, finalists=2, commands=1_500,
            speculated_commands=1_500, other_sizes=2, alike=0,
        )  # fmt: skip


LIMITS = SearchLimits()
"""What requests are planned with."""
