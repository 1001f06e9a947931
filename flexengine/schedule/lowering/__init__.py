"""From a plan to programs of one rank: of a round, forward only or with backward, and of the update."""

from flexengine.schedule.lowering.shape import ChunkShape, RoundShape

__all__ = ["ChunkShape", "RoundShape"]
