"""Two threads at one engine: the second call is refused, and the first goes on as if it had not been made."""

import threading

import pytest
from engine_helpers import FLOAT32, build_engine, random_batch, random_weights, same_bits, streamed_plan, tiny_config

CONFIG = tiny_config()
BATCH = random_batch(0, (20, 7, 33), CONFIG["vocab_size"])


def new_engine():
    source = random_weights(CONFIG)
    return build_engine(source, streamed_plan(source.spec, numerics=FLOAT32, max_tokens=300))


CALLS = {
    "train_step": lambda engine, folder: engine.train_step(BATCH),
    "fwd_bwd": lambda engine, folder: engine.fwd_bwd(BATCH),
    "step": lambda engine, folder: engine.step(),
    "evaluate": lambda engine, folder: engine.evaluate(BATCH),
    "next_token_logits": lambda engine, folder: engine.next_token_logits([1, 2]),
    "adopt": lambda engine, folder: engine.adopt(engine.plan),
    "state_dict": lambda engine, folder: engine.state_dict(),
    "gradients": lambda engine, folder: engine.gradients(),
    "save_pretrained": lambda engine, folder: engine.save_pretrained(folder),
}


def test_a_second_thread_is_refused_at_once(tmp_path):
    engine, alone = new_engine(), new_engine()
    began, go_on = threading.Event(), threading.Event()
    forward_backward = engine.steps.forward_backward

    def slow(*arguments, **options):
        began.set()
        assert go_on.wait(60)
        return forward_backward(*arguments, **options)

    engine.steps.forward_backward = slow
    outputs = []
    first = threading.Thread(target=lambda: outputs.append(engine.train_step(BATCH)))
    first.start()
    assert began.wait(60)
    for name, call in CALLS.items():
        with pytest.raises(RuntimeError, match=rf"{name}\(\) while another call of this engine runs"):
            call(engine, tmp_path / "model")
    go_on.set()
    first.join(60)
    assert outputs[0][0] == alone.train_step(BATCH)[0]
    same_bits(engine.state_dict(), alone.state_dict())
    assert not (tmp_path / "model").exists()


def test_an_error_gives_the_engine_back():
    engine = new_engine()
    with pytest.raises(ValueError, match="target token"):
        engine.fwd_bwd([[1]])
    engine.train_step(BATCH)
