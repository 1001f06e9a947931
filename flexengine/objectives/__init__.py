"""Objectives of training on preferences, a file for each, and the two passes in which the engine trains any of them."""

from flexengine.objectives.dpo import DPO
from flexengine.objectives.ipo import IPO
from flexengine.objectives.kto import KTO
from flexengine.objectives.objective import Answers, Judged, Objective, Records
from flexengine.objectives.orpo import ORPO
from flexengine.objectives.reward import Reward
from flexengine.objectives.simpo import SimPO
from flexengine.objectives.two_passes import AnswerRows, Found, evaluate, reference_log_probs, train_step, weighted

OBJECTIVES: dict[str, type[Objective]] = {
    "dpo": DPO,
    "ipo": IPO,
    "kto": KTO,
    "orpo": ORPO,
    "simpo": SimPO,
    "reward": Reward,
}
"""Objectives by the names that options have for them."""

__all__ = [
    "DPO",
    "IPO",
    "KTO",
    "OBJECTIVES",
    "ORPO",
    "AnswerRows",
    "Answers",
    "Found",
    "Judged",
    "Objective",
    "Records",
    "Reward",
    "SimPO",
    "evaluate",
    "reference_log_probs",
    "train_step",
    "weighted",
]
