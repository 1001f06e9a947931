"""Where the planes of a parameter group live: one of the plan's decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class GroupPlan:
    """Where one parameter group's weights, stored gradients and optimizer states live, and which processor updates it.

    The CPU updates only what lives on the host altogether, where it is. What is frozen is updated by none: it has no
    gradients and no states. Several ranks may divide the optimizer rule's states ("dealt"): each keeps on its GPU those
    of the elements that it updates, and the rest, masters' lower halves too, stays on the host. speculative: with
    clipping the CPU updates the group inside the last backward pass, as if nothing were clipped, into second planes,
    which take the place of the first ones where nothing is; on a drive where weights and states lie there. grads
    "none": in a step of one round the GPU updates from the gradient as backward leaves it, so that it has no home; with
    clipping once an earlier run has found the norm. states "drive": masters' lower halves and the rule's states lie on
    a drive, from which the CPU's update brings them. weights "drive": they are read from a drive whenever the GPU uses
    them. grads "drive": by way of the host what a round leaves goes there. Of what is trained both need states on the
    drive, too, as the update brings and writes all. "shard": each of several ranks keeps its share of weights,
    gradients and states on its GPU, which updates it there; of what is frozen, of the weights. states "nodes": each of
    several nodes keeps the rule's states of the elements whose gradients it adds up, and its CPU updates these.
    """

    weights: Literal["gpu", "host", "drive", "shard"] = "host"
    grads: Literal["gpu", "host", "none", "drive", "shard"] = "host"
    states: Literal["gpu", "host", "nodes", "dealt", "drive", "shard"] = "host"
    update: Literal["gpu", "cpu", "none"] = "gpu"
    speculative: bool = False

    def __post_init__(self) -> None:
        if self.speculative and self.update != "cpu":
            raise ValueError("only the CPU updates speculatively")
        if self.update == "none" and "gpu" in (self.grads, self.states):
            raise ValueError("what is not updated has no gradients and no optimizer states, so none on the GPU")
        if self.grads == "none" and self.update != "gpu":
            raise ValueError("only the GPU updates from a gradient that is not stored")
        if self.update == "cpu" and "gpu" in (self.weights, self.grads, self.states):
            raise ValueError("an update on the CPU needs weights, gradients and optimizer states on the host")
        if self.states == "gpu" and self.weights != "gpu":
            raise ValueError("optimizer states on the GPU need the weights there too")
        if self.states == "drive" and self.update != "cpu":
            raise ValueError("optimizer states on a drive need an update on the CPU")
        if self.speculative and "drive" in (self.weights, self.states) and self.weights != self.states:
            raise ValueError("what is updated speculatively has weights and optimizer states on one memory")
        if self.trained and "drive" in (self.weights, self.grads) and self.states != "drive":
            raise ValueError("weights and gradients of what is trained lie on a drive only beside its optimizer states")
        if self.grads == "drive" and not self.trained:
            raise ValueError("what is not updated has no gradients, so none on a drive")
        if self.states == "dealt" and (self.update != "gpu" or "gpu" in (self.weights, self.grads)):
            raise ValueError("dealt optimizer states need an update on the GPU, and weights and gradients on the host")
        if self.states == "nodes" and (self.update != "cpu" or self.speculative or self.uses_drive):
            raise ValueError("nodes divide optimizer states that the CPU updates once the norm is known, on no drive")
        sharded = [place == "shard" for place in (self.weights, self.grads, self.states)]
        frozen = self.update == "none" and not any(sharded[1:])
        if any(sharded) and not frozen and not (all(sharded) and self.update == "gpu"):
            raise ValueError("shards are of weights, gradients and states alike, and need an update on the GPU")

    @property
    def trained(self) -> bool:
        """Whether there are gradients, optimizer states and an update."""
        return self.update != "none"

    @property
    def streams_grads(self) -> bool:
        """Whether gradients leave for the host."""
        return self.trained and self.grads in ("host", "drive")

    @property
    def stages_grads(self) -> bool:
        """Whether gradients pass through slots on the GPU."""
        return self.trained and self.grads != "gpu"

    @property
    def uses_tiles(self) -> bool:
        """Whether the GPU updates what does not live there altogether, and so passes through tile slots."""
        return self.update == "gpu" and "host" in (self.grads, self.states)

    @property
    def sharded(self) -> bool:
        """Whether each rank keeps its share on its GPU."""
        return self.weights == "shard"

    @property
    def uses_drive(self) -> bool:
        """Whether some plane lies on a drive."""
        return "drive" in (self.weights, self.grads, self.states)

    def off_the_drive(self, kinds: tuple[str, ...] = ("weights", "grads", "states")) -> GroupPlan:
        """The same home with the host's memory in place of a drive, for planes of these kinds."""
        return replace(self, **{kind: "host" for kind in kinds if getattr(self, kind) == "drive"})

    def home_of(self, kind: str) -> str:
        """The memory that a plane lies in, by its kind."""
        if kind == "weights":
            return self.weights
        if kind == "grad":
            return self.grads
        if self.states == "dealt":  # masters stay whole on the host, so that weights are loaded and exported as ever
            return "host" if kind == "remainder" else "gpu"
        return "host" if self.states == "nodes" else self.states

    def of_frozen(self) -> GroupPlan:
        """The same home for weights that are not trained."""
        return GroupPlan(weights=self.weights, update="none")
