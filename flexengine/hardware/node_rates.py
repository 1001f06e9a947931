"""What the ranks of a node reach when all of them are at work, and a profile that has these rates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple, get_args

from flexengine.hardware.curve import check_rate
from flexengine.hardware.parts import ONE_RANK_FIELDS, POINT_FIELDS, PeerWay
from flexengine.hardware.profile import HardwareProfile
from flexengine.wording import parse_json, shown


class RankRates(NamedTuple):
    """What one rank reaches while all do the same: bytes per second of its link, of copies by its share of the cores
    (read plus written) and between GPUs one way, parameters per second that it updates, and FLOP/s of a large product
    of matrices.
    """

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_duplex_bytes_per_s: float
    d2h_duplex_bytes_per_s: float
    h2d_beside_cpu_bytes_per_s: float
    d2h_beside_cpu_bytes_per_s: float
    host_copy_bytes_per_s: float
    adamw_parameters_per_s: float
    matmul_flops_per_s: float
    peer_bytes_per_s: float


LINK_FIELDS = RankRates._fields[:6]
"""Those that `HardwareProfile` has under the same name, of one rank too."""


class NodeRates(NamedTuple):
    """The rates of the slowest of so many ranks on each node.

    adamw_state: of the parameters that were updated. peer_way: what moved bytes between GPUs.
    """

    ranks: int
    adamw_state: str
    slowest: RankRates
    peer_way: PeerWay = "copies"

    def to_json(self) -> str:
        """JSON text; `from_json` is the inverse."""
        named = {"ranks": self.ranks, "adamw_state": self.adamw_state, "peer_way": self.peer_way}
        values = {**named, **self.slowest._asdict()}
        return json.dumps(values, indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> NodeRates:
        """The rates in `text`. Raises: ValueError if it is no JSON, or holds anything else."""
        values = parse_json(text, "rates of ranks")
        if not isinstance(values, dict) or values.keys() != {
            "ranks",
            "adamw_state",
            "peer_way",
            *RankRates._fields,
        }:
            raise ValueError(f"rates of ranks: expected one key per rate, got {shown(values)}")
        for name in RankRates._fields:
            check_rate(name, values[name])
        ranks = values["ranks"]
        if not isinstance(ranks, int) or ranks < 2:
            raise ValueError(f"rates of ranks: ranks is {shown(ranks)}, expected at least 2")
        if values["peer_way"] not in get_args(PeerWay):
            raise ValueError(f"rates of ranks: peer_way is {shown(values['peer_way'])}, expected copies or nccl")
        rates = RankRates(**{name: values[name] for name in RankRates._fields})
        return NodeRates(ranks, str(values["adamw_state"]), rates, values["peer_way"])


def slowest_of(rates: Sequence[RankRates]) -> RankRates:
    """Each rate of the rank that has least of it: ranks wait for each other."""
    return RankRates(*map(min, zip(*rates, strict=True)))


def with_node_rates(profile: HardwareProfile, found: NodeRates) -> HardwareProfile:
    """The profile of one GPU and its host with what all ranks of a node reach at once.

    Host memory has the rate at which all of them copy within it, or at which all links together move more. What a card
    computes has the share of its rate that a large product keeps while all cards multiply.
    """
    rates, ranks = found.slowest, found.ranks
    duplex = rates.h2d_duplex_bytes_per_s + rates.d2h_duplex_bytes_per_s
    most = max(rates.host_copy_bytes_per_s, duplex, rates.h2d_bytes_per_s, rates.d2h_bytes_per_s)
    kept = min(1.0, rates.matmul_flops_per_s / profile.matmul.peak_flops_per_s)
    values = profile.values()
    computed = {key: tuple((x, kept * rate) for x, rate in values[key]) for key in POINT_FIELDS}
    faster = ranks * rates.adamw_parameters_per_s / profile.host.adamw_rate(found.adamw_state)
    return profile.changed(
        **{name: getattr(rates, name) for name in LINK_FIELDS},
        **dict.fromkeys(ONE_RANK_FIELDS, 0.0),
        **computed,
        peak_matmul_flops_per_s=kept * profile.matmul.peak_flops_per_s,
        host_bytes_per_s=ranks * most,
        cpu_adamw_parameters_per_s=profile.host.faster(faster),
        peer_bytes_per_s=rates.peer_bytes_per_s,
        peer_way=found.peer_way,
        measured_ranks=ranks,
    )
