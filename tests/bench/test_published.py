"""No preset is slower than what others have measured on such a card, as far as the card answers for it."""

import pytest

from bench.published import ROWS, Published, Row

TIGHT = [run for run in ROWS if run.engine == "llmq" and ("fp8" not in run.flags) == ("qwen2.5-7b" not in run.flags)]
"""Those that ask most of each card: small models with products in bf16, 7B in FP8."""
SEVENS = [run for run in ROWS if run.engine == "llmq" and "7b" in run.flags and "fp8" not in run.flags]


def name(run: Published) -> str:
    return " ".join(part for part in run.flags.split() if part in ("fp8", *CARDS) or part.startswith("preset:"))


CARDS = {run.flags.split()[run.flags.split().index("--gpu") + 1] for run in ROWS}


@pytest.mark.parametrize("run", [*TIGHT, *(pytest.param(run, marks=pytest.mark.thorough) for run in SEVENS)], ids=name)
def test_no_published_measurement_beats_the_rates_of_a_preset(run: Published):
    row = Row.of(run)
    assert row.card_tokens_per_s() >= run.tokens_per_s
    assert row.card_tokens_per_s() >= row.bound_tokens_per_s()


def test_every_row_names_its_source_and_a_request_of_its_own():
    assert all(run.source.startswith("https://") for run in ROWS)
    assert len({(run.engine, run.flags) for run in ROWS}) == len(ROWS)
    assert {"llmq", "surogate", "Soup", "NeMo AutoModel", "KTransformers", "Horizon-LM"} <= {run.engine for run in ROWS}
    assert {"rtx-pro-6000", "h100-80", "rtx-4090", "l40s", "rtx-5090"} == CARDS


def test_other_work_is_named_where_a_figure_is_above_our_bound():
    """Float16 sums have twice the rate on a GeForce card, which no preset promises."""
    run = next(run for run in ROWS if run.engine == "RoundPipe" and "8b" in run.flags)
    assert "float16" in run.other
    assert Row.of(run).card_tokens_per_s() < run.tokens_per_s
