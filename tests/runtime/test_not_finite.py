"""Values that are not finite: where they began is named, and no export holds them."""

import pytest
from engine_helpers import FLOAT32, build_engine, random_batch, random_weights, streamed_plan, tiny_config

from flexengine.run.health import where_not_finite
from flexengine.runtime.not_finite import NotFiniteError, first_bad_gradient, first_bad_weight
from flexengine.runtime.weights import weight_store

CONFIG = tiny_config()
BATCH = random_batch(0, (20, 7, 33), CONFIG["vocab_size"])
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


def new_engine(**changes):
    source = random_weights(tiny_config(**changes))
    return build_engine(source, streamed_plan(source.spec, numerics=FLOAT32, max_tokens=300))


@pytest.fixture
def engine():
    return new_engine()


def poison(engine, name=UP_PROJ):
    engine.weights.plane("weights", engine.weights.runs[name])[3] = float("inf")


def test_a_bad_weight_is_named(engine):
    assert where_not_finite(engine) == ("", "")
    poison(engine)
    engine.train_step(BATCH)
    assert where_not_finite(engine) == (UP_PROJ, "head")


def test_a_good_step_forgets_the_bad_one(engine):
    kept = engine.weights.plane("weights", engine.weights.runs[UP_PROJ])[3].clone()
    poison(engine)
    engine.train_step(BATCH)
    assert engine.state.bad_layer
    engine.weights.plane("weights", engine.weights.runs[UP_PROJ])[3] = kept
    engine.train_step(BATCH)
    assert engine.state.bad_layer == ""


@pytest.mark.parametrize(
    ("tied", "bad", "named"),
    [
        (False, (0, 1, 2), "block.1"),
        (False, (0,), "embed"),
        (False, (1, 3), "head"),
        (True, (0, 2), "block.1"),  # the embedding that the head reads is bad whichever of the two is
        (True, (0,), "embed"),
        (False, (), ""),
    ],
)
def test_backward_goes_from_the_head_to_the_embedding(tied, bad, named):
    model = random_weights(tiny_config(tie_word_embeddings=tied)).spec
    assert first_bad_gradient(model, bad) == named


def test_weights_are_checked_before_an_export(engine, tmp_path):
    engine.save_pretrained(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    poison(engine)
    with pytest.raises(NotFiniteError, match=f"{UP_PROJ} holds values that are not finite in torch.float32"):
        engine.save_pretrained(tmp_path / "model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    with pytest.raises(NotFiniteError):
        engine.save_pretrained(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_export_in_small_pieces_has_the_same_bytes(engine, tmp_path, monkeypatch):
    engine.save_pretrained(tmp_path / "whole")
    monkeypatch.setattr(weight_store, "PIECE_ELEMENTS", 7)
    engine.save_pretrained(tmp_path / "pieces")
    poison(engine)
    assert first_bad_weight(engine.weights) == UP_PROJ
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "pieces"))
    assert one == other
