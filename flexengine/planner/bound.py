"""Speed of light: no exact synchronous step in chunks and rounds of the sizes considered is faster than this.

A linear relaxation of the planner's problem. Where a plan decides (this block keeps that on the GPU), the relaxation
takes any fraction; where a program waits, it does not: all streams work side by side from the first second to the last.

For every chunk and round size the planner may choose, with R rounds a step, it minimises T over

    x_S      share of the blocks that keep the outputs S from forward to backward, the rest being recomputed
    k        bytes of kept activations that wait in host memory, of a whole step
    w, g, s  bytes of weights, gradients and optimizer states at home on the GPU, per kind of group (totals W, G, S)
    c        bytes of host-homed weights (gradients) that nevertheless stay on the GPU from one use to the next:
             over the turn from forward to backward, between rounds, and at the end of the step
    u        share of each kind of group that the CPU updates, of those at home on the host altogether

subject to, per step and with what every order of the work must do,

    compute  forward + backward + sum_S x_S recompute_S + rounding of gradients + (1 - u) update  <= T
    CPU      u * update of all parameters by the CPU with an idle link                            <= T
    H2D      R (W' - w' - c_turn) + (R-1) (W - w - c_between) + (W - w - c_end)
             + (R-1) (G - g) + (G - g - c_grads) + (S - s) - u (G + S) + k                        <= rate
    D2H      R (G - g) - c_grads + (W - w) + (S - s) - u (W + S) + k                              <= rate
    GPU      w + g + s + what must be there, at the turn, between rounds and at the end           <= budget
    host     (W - w) + (G - g) + (S - s) + a round's share of k                                   <= budget

W' counts the groups that a layer reads both forward and backward. A link is alone for some seconds and shared for
others, at the rates of the profile; copies have no latency. At the turn the GPU holds all kept activations of a round
that are not on the host, and the operands of the command that runs: the head's, or the last block's.

Why it is a lower bound. Take any plan, and any program that runs it. Its homes and save sets, as fractions, are one
choice of x, k, w, g, s, and the bytes it really held over a turn are one choice of c. Each stream's busy seconds are at
least the left sides above: every byte and every piece of work there is moved or done by every program of the plan.
(Weights may come out of the GPU's update right into the next forward, so that is not counted twice; those that the CPU
updates are fetched for it. Padding, latencies,
slots, waits, and reading kept activations twice are left out.) Slots in use at one moment do not overlap, so the bytes
on the left of the memory rows are part of what the plan takes. Hence the plan satisfies all rows with T = its time, and
the least T of the relaxation is not above it. The bound is the least over the sizes; a size with the same chunks and
number of rounds as a smaller one asks for the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Request
from flexengine.planner.linear_program import LinearProgram, Optimum
from flexengine.planner.memory import host_overhead_bytes
from flexengine.planner.sizes import chunk_sizes
from flexengine.planner.unavoidable import SizeWork, Unavoidable

TOLERANCE = 1e-6
"""Share by which the solver's answer may be above the true least; the bound is lowered by it."""
LINK_PRICE = 1e-5
"""Of all steps of the least time, the one with the least link seconds is reported: they are added at this price."""
LEAST_PRICE = 1e-3
"""Rows whose relaxation by one unit would save a smaller share of the step are not named as limits."""
ROW_WORDS = {
    "compute": "compute",
    "cpu": "the CPU",
    "h2d": "the host-to-device link",
    "d2h": "the device-to-host link",
    "gpu head": "GPU memory",
    "gpu block": "GPU memory",
    "gpu between": "GPU memory",
    "gpu end": "GPU memory",
    "host turn": "host memory",
    "host end": "host memory",
}
"""What a row of the relaxation stands for."""


@dataclass(frozen=True)
class Bound:
    """The least seconds of a step, and the relaxed plan that takes them.

    compute_s, h2d_s, d2h_s: busy seconds of its streams; recompute_s: the part of compute_s that recomputes. limits:
    what holds it back, the costliest first: more of it would lower the bound.
    """

    seconds: float
    chunk_tokens: int
    rounds: int
    compute_s: float
    recompute_s: float
    h2d_s: float
    d2h_s: float
    limits: tuple[str, ...]


def speed_of_light(model: ModelSpec, request: Request, profile: HardwareProfile) -> Bound | None:
    """The bound over all chunk and round sizes of a request; None when not even the relaxation fits its budgets.

    Raises PlanError when pinned sizes contradict each other.
    """
    step = Unavoidable(model, request, profile)
    best: Bound | None = None
    for size in sorted(_sizes(step), key=lambda s: s.compute_s):
        least_s = size.compute_s - size.update_s
        if best is not None and least_s * (1 - TOLERANCE) >= best.seconds:
            break  # sizes with even more compute cannot lower it
        found = _Relaxation(step, size).bound()
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


class _Relaxation:
    """The linear programme of one size. Bytes are in units of `unit_bytes`, seconds in units of `unit_s`."""

    def __init__(self, step: Unavoidable, size: SizeWork) -> None:
        self.step, self.size, self.rounds = step, size, size.rounds
        self.unit_bytes = float(sum(p.weights + p.grads + p.states for p in step.parameters))
        self.unit_s = size.compute_s
        self.lp = LinearProgram()

    def bound(self) -> Bound | None:
        """Its least step; None when it cannot fit."""
        self._variables()
        self._stream_rows()
        self._gpu_rows()
        self._host_rows()
        links = ("link h2d", "link d2h", "link both")
        found = self.lp.minimise({"T": 1.0, **dict.fromkeys(links, LINK_PRICE)})
        return None if found is None else self._bound_of(found)

    def _bound_of(self, found: Optimum) -> Bound:
        values = found.values
        both = values["link both"]
        recompute_s = sum(coefficient * values[name] for name, coefficient in self.recompute.items())
        spared_s = sum(values[f"u {p.name}"] * self.size.update_s_of(p) for p in self.step.parameters)
        prices = sorted(found.prices.items(), key=lambda item: -item[1])
        limits = dict.fromkeys(ROW_WORDS[row] for row, price in prices if price > LEAST_PRICE and row in ROW_WORDS)
        return Bound(
            # the link's seconds are at most T, so that the least T is at least this
            seconds=found.least / (1 + LINK_PRICE) * self.unit_s * (1 - TOLERANCE),
            chunk_tokens=self.size.chunk_tokens,
            rounds=self.rounds,
            compute_s=self.size.compute_s - spared_s + recompute_s * self.unit_s,
            recompute_s=recompute_s * self.unit_s,
            h2d_s=(values["link h2d"] + both) * self.unit_s,
            d2h_s=(values["link d2h"] + both) * self.unit_s,
            limits=tuple(limits),
        )

    # -- variables ---------------------------------------------------------------------------------------------------

    def _variables(self) -> None:
        """Homes by kind of group, what is held from one use to the next, what blocks keep, and seconds."""
        add = self.lp.variable
        for p in self.step.parameters:
            for kind, num_bytes in (("w", p.weights), ("g", p.grads), ("s", p.states)):
                add(f"{kind} {p.name}", num_bytes / self.unit_bytes)
        for name in ("turn", "between", "end", "grads"):
            add(f"hold {name}")
        self.kept: dict[str, float] = {}
        self.recompute: dict[str, float] = {}
        for i, kind in enumerate(self.size.blocks):
            shares = [add(f"keep {i}.{j}") for j in range(len(kind.keeps))]
            for name, keep in zip(shares, kind.keeps, strict=True):
                self.kept[name] = kind.count * (kind.input_bytes + keep.num_bytes) / self.unit_bytes
                self.recompute[name] = kind.count * keep.recompute_s / self.unit_s
            self.lp.equals(dict.fromkeys(shares, 1.0), 1.0)
        for name in ("on host", "T", "link h2d", "link d2h", "link both"):
            add(name)
        self.lp.at_most("kept on host", {"on host": 1.0, **{k: -v for k, v in self.kept.items()}}, 0.0)
        self._hold_rows()
        for p in self.step.parameters:
            by_cpu = add(f"u {p.name}", None if self.step.profile.device_type == "cuda" else 0.0)
            for kind in "wgs":
                total = self._total(kind, [p])
                self.lp.at_most(f"{kind} by cpu {p.name}", {by_cpu: total, **self._at_home(kind, [p])}, total)

    def _hold_rows(self) -> None:
        """Only what is at home on the host can be held in between."""
        twice = [p for p in self.step.parameters if p.twice]
        everything = self.step.parameters
        for name, members, kind in (
            ("turn", twice, "w"),
            ("between", everything, "w"),
            ("end", everything, "w"),
            ("grads", everything, "g"),
        ):
            total = self._total(kind, members)
            self.lp.at_most(f"hold {name}", {f"hold {name}": 1.0, **self._at_home(kind, members)}, total)

    def _at_home(self, kinds: str, members=None, factor: float = 1.0) -> dict[str, float]:
        """Terms of the bytes at home on the GPU; kinds: letters of w, g, s."""
        members = self.step.parameters if members is None else members
        return {f"{kind} {p.name}": factor for kind in kinds for p in members}

    def _by_cpu(self, kinds: str) -> dict[str, float]:
        """Terms of the bytes that an update by the CPU spares the link."""
        return {f"u {p.name}": -sum(self._total(kind, [p]) for kind in kinds) for p in self.step.parameters}

    def _total(self, kind: str, members=None) -> float:
        members = self.step.parameters if members is None else members
        field = {"w": "weights", "g": "grads", "s": "states"}[kind]
        return sum(getattr(p, field) for p in members) / self.unit_bytes

    # -- rows --------------------------------------------------------------------------------------------------------

    def _stream_rows(self) -> None:
        spared = {f"u {p.name}": -self.size.update_s_of(p) / self.unit_s for p in self.step.parameters}
        by_cpu = {f"u {p.name}": self.size.cpu_update_s_of(p) / self.unit_s for p in self.step.parameters}
        self.lp.at_most("compute", {"T": -1.0, **self.recompute, **spared}, -1.0)
        self.lp.at_most("cpu", {"T": -1.0, **by_cpu}, 0.0)
        self.lp.at_most("link", {"link h2d": 1.0, "link d2h": 1.0, "link both": 1.0, "T": -1.0}, 0.0)
        p, scale = self.step.profile, self.unit_s / self.unit_bytes
        self._copy_row("h2d", self._h2d(), p.h2d_bytes_per_s * scale, p.h2d_duplex_bytes_per_s * scale)
        self._copy_row("d2h", self._d2h(), p.d2h_bytes_per_s * scale, p.d2h_duplex_bytes_per_s * scale)

    def _copy_row(self, name: str, moved: tuple[dict[str, float], float], alone: float, both: float) -> None:
        """moved bytes <= rate alone * seconds alone + rate with both directions busy * those seconds, over `alone`."""
        terms, constant = moved
        row = {key: value / alone for key, value in terms.items()}
        self.lp.at_most(name, {**row, f"link {name}": -1.0, "link both": -both / alone}, -constant / alone)

    def _h2d(self) -> tuple[dict[str, float], float]:
        """Bytes to the device, as (terms, constant): weights per use, gradients, states, kept activations."""
        r, twice = self.rounds, [p for p in self.step.parameters if p.twice]
        terms = {**self._at_home("w", factor=-float(r)), **self._at_home("g", factor=-float(r))}
        for name in self._at_home("w", twice):
            terms[name] -= r
        terms |= self._at_home("s", factor=-1.0)
        terms |= {"hold turn": -float(r), "hold between": 1.0 - r, "hold end": -1.0, "hold grads": -1.0, "on host": 1.0}
        terms |= self._by_cpu("gs")
        constant = r * (self._total("w") + self._total("w", twice) + self._total("g")) + self._total("s")
        return terms, constant

    def _d2h(self) -> tuple[dict[str, float], float]:
        """Bytes to the host: gradients of every round, updated weights and states, kept activations."""
        r = self.rounds
        terms = {**self._at_home("ws", factor=-1.0), **self._at_home("g", factor=-float(r))}
        terms |= {"hold grads": -1.0, "on host": 1.0, **self._by_cpu("ws")}
        return terms, r * self._total("g") + self._total("w") + self._total("s")

    def _gpu_rows(self) -> None:
        """At the turn under the head's command and under the last block's, between rounds, and before the update."""
        size, unit, params = self.size, self.unit_bytes, self.step.parameters
        budget = (self.step.request.max_gpu_bytes - size.gpu_overhead_bytes) / unit
        earlier = "sg" if self.rounds > 1 else "s"  # with one round no gradient exists yet at its turn
        share = size.round_share
        kept = {"hold turn": 1.0, "on host": -share, **{k: v * share for k, v in self.kept.items()}}
        turn = {**self._at_home(earlier), **kept}
        head = {**turn, **self._at_home("w", [p for p in params if not p.head])}
        head_weights = self._total("w", [p for p in params if p.head])
        self.lp.at_most("gpu head", head, budget - head_weights - size.head_bytes / unit)
        self.lp.at_most("gpu block", {**turn, **self._at_home("w")}, budget - size.block_bytes / unit)
        home = self._at_home("wgs")
        if self.rounds > 1:
            self.lp.at_most("gpu between", {**home, "hold between": 1.0}, budget)
        self.lp.at_most("gpu end", {**home, "hold end": 1.0, "hold grads": 1.0}, budget)

    def _host_rows(self) -> None:
        """Everything that is not at home on the GPU, and a round's kept activations."""
        budget = (self.step.request.max_host_bytes - host_overhead_bytes(self.step.profile)) / self.unit_bytes
        states, grads = self._total("w") + self._total("s"), self._total("g")
        away, kept = self._at_home("ws", factor=-1.0), {"on host": self.size.round_share}
        if self.rounds > 1:
            self.lp.at_most("host turn", {**away, **self._at_home("g", factor=-1.0), **kept}, budget - states - grads)
        else:
            self.lp.at_most("host turn", {**away, **kept}, budget - states)
            last = {**away, **self._at_home("g", factor=-1.0), "hold grads": -1.0}
            self.lp.at_most("host end", last, budget - states - grads)
