"""Every decision as a frozen value, what is asked, and how the planner says no; imports nothing else of the package."""

from flexengine.plan.plan import MOST_ROUNDED, GroupPlan, Home, LayerPlan, Plan, rounds_of_step
from flexengine.plan.prediction import CACHES, CacheBytes, Prediction
from flexengine.plan.request import DeltaDtype, KeepDtype, MatmulDtype, Numerics, PlanError, PlanReason, Request

__all__ = [
    "CACHES",
    "MOST_ROUNDED",
    "CacheBytes",
    "DeltaDtype",
    "GroupPlan",
    "Home",
    "KeepDtype",
    "LayerPlan",
    "MatmulDtype",
    "Numerics",
    "Plan",
    "PlanError",
    "PlanReason",
    "Prediction",
    "Request",
    "rounds_of_step",
]
