"""The comparison of types with transformers, of a few of them, and the tables that are made of what is known."""

import pytest
from thorough import cases

from bench.architecture_tables import DOC, rows, with_tables
from bench.coverage import BOUND, compared, row_of

TEXTS = (
    "qwen2_vl", "mistral3", "smolvlm", "kimi_k25", "qwen2_5_omni_thinker", "glm4v_moe", "paddleocr_vl", "hunyuan_vl",
    "hyperclovax_vision_v2", "aya_vision", "gemma4",
)  # fmt: skip
"""Types with images: one for each way in which their text is named, typed or scaled."""


@pytest.mark.parametrize("kind", cases(TEXTS, ("qwen2_vl", "mistral3", "smolvlm", "kimi_k25", "gemma4")))
def test_the_text_beside_images(kind):
    """Loss and gradients are those of the whole model of transformers on text."""
    assert max(compared(kind).values()) <= BOUND


def test_linear_attention_in_float64():
    """In float32 both sides round a gradient of this model by some 1e-4, more than BOUND; in float64 they agree."""
    assert max(compared("qwen3_next", "float64").values()) <= 1e-5


def test_a_refused_type_names_what_is_missing():
    assert row_of("cpmant") == {
        "state": "refused", "missing": ["positions or embeddings of another kind beside LayerNorm"],
    }  # fmt: skip


@pytest.mark.parametrize("kind", cases(["electra", "pegasus", "bart", "qwen4_exp"], ["pegasus"]))
def test_a_type_without_ops_of_its_own_runs_as_opaque_blocks(kind):
    """Rows narrower than layers, a table that is not trained, a head without parameters, writes that none reads."""
    assert row_of(kind)["state"] == "opaque"


def test_the_docs_have_these_tables():
    """`python -m bench.architecture_tables` writes them."""
    text = DOC.read_text(encoding="utf-8")
    assert with_tables(text) == text
    assert all(int(row[-1]) <= 150 for row in rows("families"))
