"""Plans one model for several budgets, cards, or both, and compares the plans in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes, format_seconds
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Request
from flexengine.planner.feasibility.remedies import budget_notes
from flexengine.planner.feasibility.shortage import ShortageError
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.reports.plan_data import shortage_json
from flexengine.reports.text_format import align_columns, percent


class Case(NamedTuple):
    """One line of a comparison: its name, the machine, and the request to plan for it."""

    label: str
    profile: HardwareProfile
    request: Request


class Row(NamedTuple):
    """A case with its plan, or with the error that says why there is none."""

    case: Case
    plan: Plan | None
    error: ShortageError | None


def compare(model: ModelSpec, cases: Sequence[Case], network_bytes_per_s: float) -> list[Row]:
    """Plan every case; nodes have such a network. Raises PlanError for a request that no machine could carry out."""
    rows = []
    for case in cases:
        # A case that does not fit is an answer too; the others are still wanted.
        try:
            rows.append(Row(case, plan_for_ranks(model, case.request, case.profile, network_bytes_per_s), None))
        except ShortageError as error:
            rows.append(Row(case, None, error))
    return rows


def comparison_table(rows: Sequence[Row]) -> str:
    """Write the comparison as aligned columns; a case that does not fit says what it would need."""
    head = ("case", "fits", "step", "tokens/s", "of light", "GPU memory", "host memory", "rounds", "limit / fits with")
    notes = [f"{row.case.label}: {note}" for row in rows if row.plan is not None for note in _notes(row.case)]
    return "\n".join([*align_columns([head, *(_cells(row) for row in rows)], left=(0, 1, 8)), *notes])


def _notes(case: Case) -> list[str]:
    return budget_notes(case.request, case.profile)


def _cells(row: Row) -> tuple[str, ...]:
    request = row.case.request
    if row.plan is None:
        assert row.error is not None
        needs, remedies = row.error.needs, row.error.remedies
        advice = str(remedies[0]) if remedies else "no change that was tried"
        return (
            row.case.label,
            "no",
            "",
            "",
            "",
            _of(needs.gpu_bytes, request.max_gpu_bytes),
            _of(needs.host_bytes, request.max_host_bytes),
            "",
            advice,
        )
    p = row.plan.predicted
    return (
        row.case.label,
        "yes",
        format_seconds(p.step_s),
        f"{request.max_global_batch_tokens / p.step_s:.0f}",
        percent(p.speed_of_light_s / p.step_s) if p.speed_of_light_s else "",
        _of(p.gpu_bytes, request.max_gpu_bytes),
        _of(p.host_bytes, request.max_host_bytes),
        f"{row.plan.num_rounds} x {row.plan.chunks_per_round} x {row.plan.chunk_tokens}",
        p.limiter,
    )


def _of(used: int, budget: int) -> str:
    return f"{format_bytes(used)} of {format_bytes(budget)}"


def comparison_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Give the comparison as JSON values."""
    return {"cases": [{"case": row.case.label, "hardware": row.case.profile.name, **_values(row)} for row in rows]}


def _values(row: Row) -> dict[str, Any]:
    if row.plan is None:
        assert row.error is not None
        return shortage_json(row.error)
    p, request = row.plan.predicted, row.case.request
    return {
        "fits": True,
        "request": asdict(request),
        "notes": _notes(row.case),
        "step_s": p.step_s,
        "tokens_per_s": request.max_global_batch_tokens / p.step_s,
        "speed_of_light_s": p.speed_of_light_s or None,
        "gpu_bytes": p.gpu_bytes,
        "host_bytes": p.host_bytes,
        "rounds": row.plan.num_rounds,
        "chunks_per_round": row.plan.chunks_per_round,
        "chunk_tokens": row.plan.chunk_tokens,
        "recompute_share": p.recompute_share,
        "limited_by": p.limiter,
    }
