"""Objectives beyond learning answers: preferences and GRPO, which weights of tokens train, and distillation."""

from flexengine.objectives.distill import Distillation, TeacherRows, likeliest
from flexengine.objectives.grpo import (
    GRPO,
    GroupLoss,
    Groups,
    GroupUpdate,
    advantages,
    token_log_probs,
    update_groups,
    weighed_groups,
)
from flexengine.objectives.objective import Answers, Judged, Objective, Records
from flexengine.objectives.preferences import DPO, IPO, KTO, ORPO, Reward, SimPO
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
    "GRPO",
    "IPO",
    "KTO",
    "OBJECTIVES",
    "ORPO",
    "AnswerRows",
    "Answers",
    "Distillation",
    "Found",
    "GroupLoss",
    "GroupUpdate",
    "Groups",
    "Judged",
    "Objective",
    "Records",
    "Reward",
    "SimPO",
    "TeacherRows",
    "advantages",
    "evaluate",
    "likeliest",
    "reference_log_probs",
    "token_log_probs",
    "train_step",
    "update_groups",
    "weighed_groups",
    "weighted",
]
