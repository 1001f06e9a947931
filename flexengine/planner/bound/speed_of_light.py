"""Speed of light: no exact synchronous step in chunks and rounds of the sizes considered is faster than this.

A linear relaxation of the planner's problem. Where a plan decides (this block keeps that on the GPU), the relaxation
takes any fraction; where a program waits, it does not: all streams work side by side, but for the order of a step's
parts. A step is cut where a round turns from its head to its last block's backward, and where a round ends, into

    V  from the last gradient of a step, which gives the norm that every update needs, to the next step's first turn
    F  from the end of a round to the turn of the next, where no update comes between
    B  from a turn to the end of its round

For every chunk and round size the planner may choose, with R rounds a step, it minimises T over

    x_S      share of the blocks that keep the outputs S from forward to backward, the rest being recomputed
    k        bytes of kept activations, of a whole step, that are on the host alone when a last block's backward begins
    w, g, s  bytes of weights, gradients and optimizer states at home on the GPU, per kind of group (totals W, G, S)
    c        bytes of host-homed weights (gradients) that nevertheless stay on the GPU from one use to the next:
             over the turn from forward to backward, between rounds, and at the end of the step
    p, q     bytes of host-homed states that are on the GPU when the last gradient is known; that are there, updated,
             when the next head begins
    u        share of each kind of group that the CPU updates, of those at home on the host altogether

subject to, per step and with what every order of the work must do,

    compute  first forward and head + (1 - u) update                                              <= V
             forwards and heads of the other rounds                                               <= F
             backward + sum_S x_S recompute_S + rounding of gradients                             <= B
                                                                                         V + F + B <= T
    CPU      u * update of all parameters by the CPU with an idle link                            <= V - head
    H2D      R (W' - w' - c_turn) + (R-1) (W - w - c_between) + (W - w - c_end)
             + (R-1) (G - g) + (G - g - c_grads) + (S - s) - u (G + S) + k                        <= rate
    D2H      R (G - g) - c_grads + (W - w) + (S - s) - u (W + S) + k                              <= rate
    H2D      (W - w - c_end) + (G - g - c_grads) + (S - s - p) - u (G + S)            <= rate in V - head
    H2D      (R-1) (W - w - c_between)                                                            <= rate in F
    H2D      R (W' - w' - c_turn) + k                                                             <= rate in B
    D2H      (S - s - q) - u S                                                        <= rate in V - head
    D2H      k of the first round; k of the others                                                <= rate in V; in F
    host     what updates by the CPU touch, and what both rows of V - head move       <= rate of host memory in V - head
    GPU      w + g + s + what must be there, at the turn, between rounds and at the end           <= budget
    host     (W - w) + (G - g) + (S - s) + a round's share of k                                   <= budget

Without clipping no update needs the norm: the CPU may begin inside the last backward pass, of which the programme knows
that it is a part of B, so the rows of the CPU and of host memory have V + B - head on the right, and no row counts on
the link being slow beside the CPU in V.

W' counts the groups that a layer reads both forward and backward: none of blocks below all that is trained. What is
frozen has weights alone, which come back in no D2H row, and no u. A link is alone for some seconds and shared for
others, at the rates of the profile, in V also beside the CPU; copies have no latency. At the turn the GPU holds all
kept activations of a round that are not on the host, and the operands of the command that runs: the head's, or the last
block's.

Why it is a lower bound. Take any plan, and any program that runs it. Its homes and save sets, as fractions, are one
choice of x, k, w, g, s, and the bytes it really held over a turn are one choice of c. Each stream's busy seconds are
at least the left sides above: every byte and every piece of work there is moved or done by every program of the plan.
(Weights may come out of the GPU's update right into the next forward, so that is not counted twice; those that the
CPU updates are fetched for it. Padding, latencies, slots, waits, and reading kept activations twice are left out.)
The parts follow each other, and what a part's rows count can happen in no other: what is on the GPU at neither end of
a part but used in it must be fetched in it, and no update begins before the last gradient (with clipping), or ends
after the head has begun. Slots in use at one moment do not overlap, so the bytes on the left of the memory rows are
part of what the plan takes. Hence the plan satisfies all rows with T = its time, and the least T of the relaxation is
not above it.
Left out is that rounds of few tokens may fetch only the experts that they touch (Plan.touched_only), which depends on
the routing: a plan that does may be faster.
The bound is the least over the sizes; a size with the same chunks and number of rounds as a smaller one asks for the
same rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.in_parts import in_parts, may_be_in_parts
from flexengine.models.spec import ModelSpec
from flexengine.plan import Request
from flexengine.planner.bound.relaxation import TOLERANCE, Bound, Relaxation
from flexengine.planner.bound.unavoidable import SizeWork, Unavoidable
from flexengine.planner.sizes import chunk_sizes


def speed_of_light(model: ModelSpec, request: Request, profile: HardwareProfile) -> Bound | None:
    """The bound over all chunk and round sizes of a request, with experts whole or in parts; None when not even the
    relaxation fits its budgets.

    Raises PlanError when pinned sizes contradict each other.
    """
    models = [model, in_parts(model)] if may_be_in_parts(model) else [model]
    found = [_least(Unavoidable(one, request, profile)) for one in models]
    return min((bound for bound in found if bound is not None), key=lambda bound: bound.seconds, default=None)


def _least(step: Unavoidable) -> Bound | None:
    best: Bound | None = None
    for size in sorted(_sizes(step), key=lambda s: s.compute_s):
        least_s = size.compute_s - size.update_s
        if best is not None and least_s * (1 - TOLERANCE) >= best.seconds:
            break  # sizes with even more compute cannot lower it
        found = Relaxation(step, size).bound()
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best


def speed_of_light_s(model: ModelSpec, request: Request, profile: HardwareProfile) -> float:
    """Seconds of the bound; 0 where not even the relaxation fits."""
    bound = speed_of_light(model, request, profile)
    return 0.0 if bound is None else bound.seconds


def _sizes(step: Unavoidable) -> Iterator[SizeWork]:
    """One of the sizes that share a chunk size and a number of rounds: their rows are the same."""
    seen: set[tuple[int, int]] = set()
    for chunk, chunks in sorted(chunk_sizes(step.request)):
        size = SizeWork(step, chunk, chunks)
        if (chunk, size.rounds) not in seen:
            seen.add((chunk, size.rounds))
            yield size
