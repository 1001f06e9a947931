"""From a plan to programs: one for the shape of a round, forward only or with backward, and one for the update."""

from flexengine.schedule.lowering.round import lower_evaluation, lower_round
from flexengine.schedule.lowering.shape import ChunkShape, RoundShape
from flexengine.schedule.lowering.update import lower_update

__all__ = ["ChunkShape", "RoundShape", "lower_evaluation", "lower_round", "lower_update"]
