"""Updates of the CPU inside backward, before the norm is known, change no bit, whichever way the norm falls."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from flexengine.plan import GroupPlan, LayerPlan, Numerics
from flexengine.runtime.execution.cpu_work import CpuWork
from flexengine.runtime.step_runner import StepRunner
from flexengine.schedule.following import cpu_commands
from flexengine.schedule.layout import Layout
from flexengine.schedule.programs import lower_update
from tests.engine_helpers import (
    FLOAT32,
    FLOAT64,
    before_cpu_updates,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    tiny_config,
)
from tests.thorough import cases

NUMERICS = {
    "float32": FLOAT32,
    "float64": FLOAT64,
    "split": Numerics(),
    "stochastic": Numerics(master="stochastic", state="bfloat16"),
}
BY_CPU, SPECULATIVE = GroupPlan(update="cpu"), GroupPlan(update="cpu", speculative=True)
ON_DRIVE = GroupPlan("drive", "drive", "drive", "cpu", speculative=True)
LENGTHS = (48, 20, 7, 33, 48, 48)  # several rounds


def plans(spec, numerics, which, home=SPECULATIVE):
    """A plan that updates some groups speculatively, and the same without speculation."""
    others = [GroupPlan("gpu", "host", "gpu"), BY_CPU, GroupPlan("gpu", "gpu", "gpu")]
    groups = [home if which(i) else others[i % 3] for i in range(len(spec.groups))]
    plan = make_plan(spec, numerics=numerics, groups=groups, blocks=[LayerPlan()] * len(spec.blocks))
    return plan, plan.after_clipping()


class Steps:
    """Counts the steps whose speculation held, and which did not."""

    def __init__(self, monkeypatch):
        self.kept, self.dropped = 0, 0
        settle = StepRunner._settle

        def counted(runner, settings):
            part = settle(runner, settings)
            self.kept, self.dropped = self.kept + (part == "committed"), self.dropped + (part == "rolled_back")
            return part

        monkeypatch.setattr(StepRunner, "_settle", counted)


def limited(engine, max_grad_norm):
    """The engine with another limit of the norm from here on."""
    engine.settings = replace(engine.settings, max_grad_norm=max_grad_norm)
    return engine


def norm_of_step(engine, seed):
    return engine.train_step(random_batch(seed, LENGTHS, engine.model.vocab_size))[1].grad_norm


@pytest.mark.parametrize(
    ("numerics", "tied", "every", "home"),
    cases(
        [
            ("float32", False, 1, SPECULATIVE),
            ("float64", True, 2, SPECULATIVE),
            ("split", False, 2, SPECULATIVE),
            ("split", False, 2, ON_DRIVE),
            ("stochastic", True, 1, SPECULATIVE),
        ],
        [("split", False, 2, ON_DRIVE), ("stochastic", True, 1, SPECULATIVE)],
    ),
)
def test_bits_of_a_run_without_speculation(monkeypatch, tmp_path, numerics, tied, every, home):
    source = random_weights(tiny_config(num_hidden_layers=2, tie_word_embeddings=tied))
    plan, plain = plans(source.spec, NUMERICS[numerics], lambda i: i % every == 0, home)
    steps = Steps(monkeypatch)
    bold, cautious = build_engine(source, plan), build_engine(source, plain)
    for seed, limit in enumerate((1e9, 1e9, 1e-3, 1e9, 1e9)):
        batch = random_batch(seed, LENGTHS[: 6 - seed], source.spec.vocab_size)
        outs = [limited(engine, limit).train_step(batch) for engine in (bold, cautious)]
        assert outs[0][0].loss == outs[1][0].loss
        assert outs[0][1].grad_norm == outs[1][1].grad_norm
        if seed == 0:  # after one swap
            same_bits(bold.state_dict(), cautious.state_dict())
            bold.save_checkpoint(tmp_path / "saved")
    same_bits(bold.state_dict(), cautious.state_dict())
    assert (steps.kept, steps.dropped) == (3, 1)  # the fourth does not speculate, as the third was clipped
    prompt = [[1, 2, 3]]
    assert bold.generate(prompt, max_new_tokens=4) == cautious.generate(prompt, max_new_tokens=4)
    again = build_engine(source, plain)
    for engine in (bold, again):
        engine.load_checkpoint(tmp_path / "saved")
    assert norm_of_step(limited(bold, 1e9), 1) == norm_of_step(limited(again, 1e9), 1)
    bold.adopt(plain)
    assert norm_of_step(bold, 2) == norm_of_step(again, 2)
    same_bits(bold.state_dict(), again.state_dict())


def test_a_clipped_step_is_updated_again_and_the_next_one_does_not_speculate(monkeypatch):
    source = random_weights(tiny_config())
    plan, plain = plans(source.spec, Numerics(), lambda i: True)
    steps = Steps(monkeypatch)
    bold, cautious = (build_engine(source, p, max_grad_norm=1e-3) for p in (plan, plain))
    for seed in range(3):
        assert norm_of_step(bold, seed) == norm_of_step(cautious, seed)
    same_bits(bold.state_dict(), cautious.state_dict())
    assert (steps.kept, steps.dropped) == (0, 1)


def test_a_norm_that_is_not_finite_leaves_everything(monkeypatch):
    source = random_weights(tiny_config())
    plan, plain = plans(source.spec, FLOAT32, lambda i: i != 1)
    steps = Steps(monkeypatch)
    bold, cautious = (build_engine(source, p, max_grad_norm=1e9) for p in (plan, plain))
    for scale in (1.0, 1e38, 1.0, 1.0):
        batch = random_batch(3, LENGTHS, source.spec.vocab_size)
        weights = [[scale] * len(row) for row in batch]
        outs = [e.train_step({"input_ids": batch, "weights": weights}, divisor=7.0)[1] for e in (bold, cautious)]
        assert [out.skipped for out in outs] == [scale != 1.0] * 2
        same_bits(bold.state_dict(), cautious.state_dict())
    assert (steps.kept, steps.dropped) == (2, 1)
    assert torch.isfinite(bold.state_dict()["model.norm.weight"]).all()


def test_slow_updates_are_waited_for_and_dropped(monkeypatch):
    source = random_weights(tiny_config(num_hidden_layers=2))
    plan, plain = plans(source.spec, Numerics(), lambda i: i > 1)
    bold, cautious = build_engine(source, plan), build_engine(source, plain)
    limits = (1e9, 1e9, 1e-3, 1e9, 1e9)
    expected = [norm_of_step(limited(cautious, limit), seed) for seed, limit in enumerate(limits)]
    before_cpu_updates(monkeypatch, lambda: time.sleep(0.01))
    steps = Steps(monkeypatch)
    for seed, limit in enumerate(limits):
        assert norm_of_step(limited(bold, limit), seed) == expected[seed]
    assert (steps.kept, steps.dropped) == (3, 1)
    same_bits(bold.state_dict(), cautious.state_dict())


def test_an_interrupt_before_the_norm_leaves_the_old_values(monkeypatch):
    source = random_weights(tiny_config())
    plan, plain = plans(source.spec, FLOAT32, lambda i: True)
    bold, cautious = build_engine(source, plan), build_engine(source, plain)

    def interrupted(*args, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StepRunner, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            norm_of_step(bold, 5)
    for seed in (0, 1):
        assert norm_of_step(bold, seed) == norm_of_step(cautious, seed)
    same_bits(bold.state_dict(), cautious.state_dict())


def test_dropped_work_counts_as_ended():
    plan, _ = plans(random_weights(tiny_config()).spec, FLOAT32, lambda i: True)
    program = lower_update(Layout(random_weights(tiny_config()).spec, plan))
    ran, begun, goes_on = [], threading.Event(), threading.Event()

    def call(command):
        ran.append(command.index)
        begun.set()
        goes_on.wait(60)

    work = CpuWork(program, cpu_commands(program), call, num_threads=1)
    work.start()
    assert begun.wait(60)
    dropping = threading.Thread(target=work.drop)
    dropping.start()
    while not work._over():
        time.sleep(0.001)
    goes_on.set()
    dropping.join()
    work.wait([command.index for command in cpu_commands(program)])
    assert ran == [cpu_commands(program)[0].index]


@pytest.mark.gpu
@pytest.mark.parametrize("every", [1, 2])
def test_cuda_gives_the_bits_of_a_run_without_speculation(monkeypatch, every):
    widths = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 700}
    source = random_weights(tiny_config(**widths, num_hidden_layers=4, vocab_size=2003, initializer_range=0.05))
    groups = [SPECULATIVE if i % every == 0 else BY_CPU for i in range(len(source.spec.groups))]
    waiting = [replace(group, speculative=False) for group in groups]
    sizes = {"chunk_tokens": 1024, "chunks_per_round": 2, "max_seq_len": 1000, "numerics": Numerics()}
    plans_of_both = (make_plan(source.spec, **sizes, groups=chosen) for chosen in (groups, waiting))
    bold, cautious = (build_engine(source, plan, device="cuda", deterministic=True) for plan in plans_of_both)
    steps = Steps(monkeypatch)
    for seed, limit in enumerate((1e9, 1e9, 1e-3, 1e9, 1e9, 1e9)):
        batch = random_batch(seed, (700, 130, 1000, 65, 900), 2003)
        outs = [limited(engine, limit).train_step(batch) for engine in (bold, cautious)]
        assert outs[0][0].loss == outs[1][0].loss
        assert outs[0][1].grad_norm == outs[1][1].grad_norm
    same_bits(bold.state_dict(), cautious.state_dict())
    assert (steps.kept, steps.dropped) == (4, 1)
