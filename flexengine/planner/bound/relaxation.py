"""The linear programme of the speed of light for one chunk and round size; `bound.py` lists its variables and rows."""

from __future__ import annotations

from dataclasses import dataclass

from flexengine.planner.bound.drive_rows import DriveRows
from flexengine.planner.bound.linear_program import LinearProgram, Optimum
from flexengine.planner.bound.unavoidable import SizeWork, Unavoidable
from flexengine.planner.cost.memory import host_overhead_bytes
from flexengine.schedule.simulator import LEAST_CPU_SHARE, cpu_share

TOLERANCE = 1e-6
"""Share by which the solver's answer may be above the true least; the bound is lowered by it."""
MARGIN = 1e-4
"""Share by which `least_compute_s` is lowered: more than a bound loses to TOLERANCE, LINK_PRICE and the solver."""
LINK_PRICE = 1e-5
"""Of all steps of the least time, the one with the least link seconds is reported: they are added at this price."""
LEAST_PRICE = 1e-3
"""Rows whose relaxation by one unit would save a smaller share of the step are not named as limits."""
LIMIT_WORDS = {
    "compute": "compute",
    "cpu": "the CPU",
    "h2d": "the host-to-device link",
    "d2h": "the device-to-host link",
    "rate": "the rate of host memory",
    "gpu": "GPU memory",
    "host": "host memory",
    "drive": "the drive",
}
"""What a row of the relaxation stands for, by the last word of its name."""


@dataclass(frozen=True)
class Bound:
    """The least seconds of a step, and the relaxed plan that takes them.

    compute_s, h2d_s, d2h_s: busy seconds of its streams; recompute_s: the part of compute_s that recomputes. limits:
    what holds it back, the costliest first: more of it would lower the bound. again: the share of one kind of blocks at
    most whose input is made again.
    """

    seconds: float
    chunk_tokens: int
    rounds: int
    compute_s: float
    recompute_s: float
    h2d_s: float
    d2h_s: float
    limits: tuple[str, ...]
    again: float = 0.0


class Relaxation:
    """The linear programme of one size. Bytes are in units of `unit_bytes`, seconds in units of `unit_s`."""

    def __init__(self, step: Unavoidable, size: SizeWork) -> None:
        self.step, self.size, self.rounds, self.ranks = step, size, size.rounds, step.request.ranks
        self.trained = [p for p in step.parameters if p.trained]
        self.in_round = step.request.updates_in_round
        self.unit_bytes = float(sum(p.weights + p.grads + p.states for p in step.parameters))
        self.unit_s = size.compute_s
        self.lp = LinearProgram()

    def bound(self) -> Bound | None:
        """Its least step; None when it cannot fit."""
        self._variables()
        self._stream_rows()
        self._part_rows()
        self._gpu_rows()
        self.drive = DriveRows(self.lp, self.step, self.size, (self.unit_bytes, self.unit_s), self._earlier())
        self._host_rows()
        links = ("link h2d", "link d2h", "link both")
        found = self.lp.minimise({"T": 1.0, **dict.fromkeys(links, LINK_PRICE)})
        return None if found is None else self._bound_of(found)

    def _bound_of(self, found: Optimum) -> Bound:
        values = found.values
        both = values["link both"]
        recompute_s = sum(coefficient * values[name] for name, coefficient in self.recompute.items())
        spared_s = sum(values[f"u {p.name}"] * self.size.update_s_of(p) for p in self.trained)
        prices = sorted(found.prices.items(), key=lambda item: -item[1])
        costly = (LIMIT_WORDS.get(row.split()[-1]) for row, price in prices if price > LEAST_PRICE)
        limits = dict.fromkeys(words for words in costly if words)
        return Bound(
            # the link's seconds are at most T, so that the least T is at least this
            seconds=found.least / (1 + LINK_PRICE) * self.unit_s * (1 - TOLERANCE) + self.size.norm_s,
            chunk_tokens=self.size.chunk_tokens,
            rounds=self.rounds,
            compute_s=self.size.compute_s - spared_s + recompute_s * self.unit_s + self.size.norm_s,
            recompute_s=recompute_s * self.unit_s,
            h2d_s=(values["link h2d"] + both) * self.unit_s,
            d2h_s=(values["link d2h"] + both) * self.unit_s,
            limits=tuple(limits),
            again=max((share for name, share in values.items() if name.startswith("again ")), default=0.0),
        )

    # -- variables ---------------------------------------------------------------------------------------------------

    def _variables(self) -> None:
        """Homes by kind of group, what is held from one use to the next, what blocks keep, and seconds."""
        add = self.lp.variable
        for p in self.step.parameters:
            for kind, num_bytes in (("w", p.weights), ("g", p.grads), ("s", p.states)):
                add(f"{kind} {p.name}", num_bytes / self.unit_bytes)
        for name in ("turn", "between", "end", "grads", "states", "unsent"):
            add(f"hold {name}")
        self.kept: dict[str, float] = {}
        self.recompute: dict[str, float] = {}
        for i, kind in enumerate(self.size.blocks):
            shares = [add(f"keep {i}.{j}") for j in range(len(kind.keeps))]
            for name, keep in zip(shares, kind.keeps, strict=True):
                self.kept[name] = kind.count * (kind.input_bytes + keep.num_bytes) / self.unit_bytes
                self.recompute[name] = kind.count * keep.recompute_s / self.unit_s
            if kind.again_s is not None:
                shares.append(add(f"again {i}"))
                self.recompute[shares[-1]] = kind.count * kind.again_s / self.unit_s
            self.lp.equals(dict.fromkeys(shares, 1.0), 1.0)
        for name in ("on host", "T", "V", "F", "B", "link h2d", "link d2h", "link both"):
            add(name)
        self.lp.at_most("host share", {"on host": 1.0, **{k: -v for k, v in self.kept.items()}}, 0.0)
        self._hold_rows()
        for p in self.trained:
            by_cpu = add(f"u {p.name}")
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
            ("states", everything, "s"),
            ("unsent", everything, "s"),
        ):
            total = self._total(kind, members)
            self.lp.at_most(f"hold {name}", {f"hold {name}": 1.0, **self._at_home(kind, members)}, total)

    def _at_home(self, kinds: str, members=None, factor: float = 1.0) -> dict[str, float]:
        """Terms of the bytes at home on the GPU; kinds: letters of w, g, s."""
        members = self.step.parameters if members is None else members
        return {f"{kind} {p.name}": factor for kind in kinds for p in members}

    def _by_cpu(self, kinds: str) -> dict[str, float]:
        """Terms of the bytes that an update by the CPU spares the link."""
        return {f"u {p.name}": -sum(self._total(kind, [p]) for kind in kinds) for p in self.trained}

    def _total(self, kind: str, members=None) -> float:
        members = self.step.parameters if members is None else members
        field = {"w": "weights", "g": "grads", "s": "states"}[kind]
        return sum(getattr(p, field) for p in members) / self.unit_bytes

    # -- rows --------------------------------------------------------------------------------------------------------

    def _stream_rows(self) -> None:
        size, first = self.size, self.size.first_share
        spared = {f"u {p.name}": -size.update_s_of(p) / self.unit_s for p in self.trained}
        forward_s = size.forward_s + size.head_s
        update_s, other_s = first * forward_s + size.update_s, (size.full_rounds - first) * forward_s
        self.lp.at_most("update compute", {"V": -1.0, **spared}, -update_s / self.unit_s)
        self.lp.at_most("forward compute", {"F": -1.0}, -other_s / self.unit_s)
        backward_s = size.compute_s - update_s - other_s
        self.lp.at_most("backward compute", {"B": -1.0, **self.recompute}, -backward_s / self.unit_s)
        self.lp.at_most("parts", {"T": -1.0, "V": 1.0, "F": 1.0, "B": 1.0}, 0.0)
        self.lp.at_most("link", {"link h2d": 1.0, "link d2h": 1.0, "link both": 1.0, "T": -1.0}, 0.0)
        p, scale = self.step.profile, self.unit_s / self.unit_bytes
        self._copy_row("h2d", self._h2d(), p.link.h2d_bytes_per_s * scale, p.link.h2d_duplex_bytes_per_s * scale)
        self._copy_row("d2h", self._d2h(), p.link.d2h_bytes_per_s * scale, p.link.d2h_duplex_bytes_per_s * scale)

    def _part_rows(self) -> None:
        """What must cross the link, or be done by the CPU, within a part of the step."""
        size, r = self.size, self.rounds
        up, down = self._link_rates()
        head_s, total = size.first_share * size.head_s / self.unit_s, self._total
        cpu_s = {f"u {q.name}": size.cpu_update_s_of(q) / self.unit_s for q in self.trained}
        updating, slowing = ("V", cpu_s) if self.step.request.waits_for_norm else ("VB", {})
        self.lp.at_most("cpu", {**dict.fromkeys(updating, -1.0), **cpu_s}, -head_s)

        touched = {f"u {q.name}": q.touched / self.unit_bytes for q in self.trained}
        homes = self._at_home("wgs", factor=-1.0)
        fetched = {**homes, **self._by_cpu("gs"), "hold end": -1.0, "hold grads": -1.0, "hold states": -1.0}
        moved = (fetched, total("w") + (0.0 if self.in_round else total("g") / self.ranks) + total("s"))
        up_beside, down_beside = self._beside_rates()
        part = "VB" if self.in_round else "V"  # where the GPU updates
        self._part_row("update h2d", part, moved, up, (up_beside, slowing), head_s)
        beside = (down_beside, slowing)
        returned = {**self._at_home("s", factor=-1.0), **self._by_cpu("s"), "hold unsent": -1.0}
        self._part_row("update d2h", part, (returned, total("s")), down, beside, head_s)
        both = (_added(fetched, returned, touched), moved[1] + total("s"))
        self._part_row("update rate", updating, both, self._host_rate(), left_s=head_s)
        self._part_row("first d2h", "V", ({"on host": size.round_share}, 0.0), down, beside)

        others = 1 - min(1.0, 1 / size.full_rounds)
        self._part_row("forward d2h", "F", ({"on host": others}, 0.0), down)
        fetched = {**self._at_home("w", factor=1.0 - r), "hold between": 1.0 - r}
        self._part_row("forward h2d", "F", (fetched, (r - 1) * total("w")), up)
        twice = [q for q in self.step.parameters if q.twice]
        fetched = {**self._at_home("w", twice, factor=-float(r)), "hold turn": -float(r), "on host": 1.0}
        self._part_row("backward h2d", "B", (fetched, r * total("w", twice)), up)

    def _part_row(
        self, name: str, parts: str, moved: tuple[dict[str, float], float], rate: float,
        beside: tuple[float, dict[str, float]] | None = None, left_s: float = 0.0,
    ) -> None:  # fmt: skip
        """moved bytes <= rate * (parts - left_s), less what is lost in the CPU's seconds, at the rate beside it."""
        (terms, constant), unit = moved, rate * self.unit_s / self.unit_bytes
        slow, cpu_s = beside if beside is not None else (rate, {})
        lost = {key: max(0.0, 1 - slow / rate) * seconds for key, seconds in cpu_s.items()}
        row = _added({key: value / unit for key, value in terms.items()}, lost, dict.fromkeys(parts, -1.0))
        self.lp.at_most(name, row, -constant / unit - left_s)

    def _link_rates(self) -> tuple[float, float]:
        """Most bytes per second to the device and to the host, whatever the other direction does."""
        p = self.step.profile
        up = max(p.link.h2d_bytes_per_s, p.link.h2d_duplex_bytes_per_s)
        return up, max(p.link.d2h_bytes_per_s, p.link.d2h_duplex_bytes_per_s)

    def _beside_rates(self) -> tuple[float, float]:
        """The same while the CPU works."""
        p = self.step.profile
        up, down = p.link.only_beside_cpu_bytes_per_s
        return max(up, p.link.h2d_beside_cpu_bytes_per_s), max(down, p.link.d2h_beside_cpu_bytes_per_s)

    def _host_rate(self) -> float:
        """Most bytes per second that the CPU's updates and the link move together."""
        p, state = self.step.profile, self.step.request.numerics.cpu_update
        cpu, host = p.host.adamw_bytes_per_s(state), p.host_rate(state)
        beside = sum(self._beside_rates())
        links = (0.0, min(beside, (1 - LEAST_CPU_SHARE) * host), beside)
        together = (cpu * cpu_share(link, host) + link for link in links)
        return max(sum(self._link_rates()), *together)

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
        # a rank updates from its share of gradients, and inside a round from one that is there
        return terms, constant - (1 - 1 / self.ranks + self.in_round) * self._total("g")

    def _d2h(self) -> tuple[dict[str, float], float]:
        """Bytes to the host: gradients of every round, updated weights and states, kept activations."""
        r = self.rounds
        terms = {**self._at_home("ws", self.trained, factor=-1.0), **self._at_home("g", factor=-float(r))}
        terms |= {"hold grads": -1.0, "on host": 1.0, **self._by_cpu("ws")}
        stored = r - self.in_round
        return terms, stored * self._total("g") + self._total("w", self.trained) / self.ranks + self._total("s")

    def _earlier(self) -> tuple[dict[str, float], float]:
        """Terms and seconds, in units, of all backward passes of a step but the last."""
        size, others = self.size, 1 - min(1.0, 1 / self.size.full_rounds)
        backward_s = size.compute_s - size.update_s - size.full_rounds * (size.forward_s + size.head_s)
        return {name: others * seconds for name, seconds in self.recompute.items()}, others * backward_s / self.unit_s

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
        head_room = budget - head_weights - size.head_bytes / unit
        self.lp.at_most("head gpu", head, head_room)
        begin = {name: factor for name, factor in head.items() if name != "hold turn"}
        self.lp.at_most("begin gpu", {**begin, "hold unsent": 1.0}, head_room)
        self.lp.at_most("block gpu", {**turn, **self._at_home("w")}, budget - size.block_bytes / unit)
        home = self._at_home("wgs")
        if self.rounds > 1:
            self.lp.at_most("between gpu", {**home, "hold between": 1.0}, budget)
        self.lp.at_most("end gpu", {**home, "hold end": 1.0, "hold grads": 1.0, "hold states": 1.0}, budget)

    def _host_rows(self) -> None:
        """Everything that is not at home on the GPU, and a round's kept activations."""
        budget = (self.step.request.max_host_bytes - host_overhead_bytes(self.step.profile)) / self.unit_bytes
        states, grads = self._total("w") / self.ranks + self._total("s"), self._total("g") / self.ranks
        away, share = self._at_home("ws", factor=-1.0), self.size.round_share
        kept = {"on host": share, **dict.fromkeys(self.drive.kept, -share)}
        away |= self.drive.there("ws", -1.0)
        stored = {**self._at_home("g", factor=-1.0), **self.drive.there("g", -1.0)}
        if self.rounds > 1:
            self.lp.at_most("turn host", {**away, **stored, **kept}, budget - states - grads)
        else:
            self.lp.at_most("turn host", {**away, **kept}, budget - states)
            self.lp.at_most("end host", {**away, **stored, "hold grads": -1.0}, budget - states - grads)


def least_compute_s(step: Unavoidable, size: SizeWork) -> float:
    """Seconds that every point of a size's relaxation computes, all updates left to the CPU: below its bound."""
    spared_s = sum(size.update_s_of(p) for p in step.parameters if p.trained)
    return (size.compute_s - spared_s) * (1 - MARGIN) + size.norm_s


def _added(*terms: dict[str, float]) -> dict[str, float]:
    """The sum of rows, variable by variable."""
    total: dict[str, float] = {}
    for row in terms:
        for name, factor in row.items():
            total[name] = total.get(name, 0.0) + factor
    return total
