"""Updates by the CPU go on while the next step begins, and nobody sees what is half updated."""

import contextlib
import os
import threading
import time
from dataclasses import replace

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    before_cpu_updates,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    tiny_config,
)

from flexengine.plan import GroupPlan
from flexengine.runtime.arena import Arenas
from flexengine.runtime.execution.bound_program import NO_FENCE
from flexengine.runtime.execution.cpu_work import CpuWork
from flexengine.runtime.execution.executor import Executor
from flexengine.schedule.commands import Signal, Stream
from flexengine.schedule.layout import Layout
from flexengine.schedule.programs import lower_update

CPU = torch.device("cpu")
PATIENCE_S = 60.0
SOURCE = random_weights(tiny_config(num_hidden_layers=3))
BATCH = random_batch(0, [30, 11], SOURCE.spec.vocab_size)
OPTIONS = {"chunk_tokens": 64, "chunks_per_round": 2, "max_seq_len": 40, "numerics": FLOAT32}


def engine_of(update: str):
    groups = [GroupPlan(update=update)] * len(SOURCE.spec.groups)
    return build_engine(SOURCE, make_plan(SOURCE.spec, **OPTIONS, groups=groups))


def trained(engine, steps=3):
    losses = []
    for _ in range(steps):
        losses.append(engine.fwd_bwd(BATCH).loss)
        losses.append(engine.step().grad_norm)
    weights = engine.state_dict()
    engine.close()
    return losses, weights


def slow_updates(monkeypatch, before=lambda: time.sleep(0.02)):
    """Every update by the CPU begins with something that takes its time."""
    before_cpu_updates(monkeypatch, before)


def test_slow_updates_give_the_same_bits(monkeypatch):
    expected = trained(engine_of("gpu"))
    slow_updates(monkeypatch)
    losses, weights = trained(engine_of("cpu"))
    assert losses == expected[0]
    same_bits(weights, expected[1])


def test_without_waiting_they_would_not(monkeypatch):
    """The test above can fail."""
    expected = trained(engine_of("gpu"))
    slow_updates(monkeypatch)
    monkeypatch.setattr(Executor, "_fence", lambda self, program: NO_FENCE)
    assert trained(engine_of("cpu"))[0] != expected[0]


def test_a_step_returns_before_its_updates_have_ended(monkeypatch):
    go_on, waited = threading.Event(), []
    slow_updates(monkeypatch, lambda: waited.append(go_on.wait(PATIENCE_S)))
    engine = engine_of("cpu")
    engine.fwd_bwd(BATCH)
    assert engine.step().grad_norm > 0
    assert False not in waited
    go_on.set()
    engine.fwd_bwd(BATCH)
    engine.close()
    assert waited
    assert all(waited)


def test_a_failure_is_raised_by_what_comes_next(monkeypatch):
    def fail():
        raise RuntimeError("the update broke")

    slow_updates(monkeypatch, fail)
    engine = engine_of("cpu")
    engine.fwd_bwd(BATCH)
    engine.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the update broke"):
            engine.fwd_bwd(BATCH)
    with pytest.raises(RuntimeError, match="the update broke"):
        engine.close()


def test_a_measured_step_has_times_of_the_cpu(monkeypatch):
    slow_updates(monkeypatch)
    engine = engine_of("cpu")
    engine.measure_next_step(keep_runs=True)
    engine.fwd_bwd(BATCH)
    engine.step()
    update = engine.take_timed_runs()[-1]
    assert update.program.name == "update"
    assert update.timing.busy_s[Stream.CPU] > 0.02
    engine.close()


def test_commands_run_in_order_and_are_waited_for_one_by_one():
    plan = make_plan(SOURCE.spec, **OPTIONS, groups=[GroupPlan(update="cpu")] * len(SOURCE.spec.groups))
    engine = build_engine(SOURCE, plan)
    program = lower_update(engine.layout)
    commands = [c for c in program.commands if c.stream is Stream.CPU]
    gates = {c.index: threading.Event() for c in commands}
    seen = []

    def call(command):
        assert gates[command.index].wait(PATIENCE_S)
        seen.append(command.index)

    work = CpuWork(program, commands, call, num_threads=1)
    work.join()  # not started: nothing to wait for
    work.start()
    for command in commands:
        gates[command.index].set()
        work.wait([command.index])
        assert seen[-1] == command.index
    work.join()
    assert seen == [c.index for c in commands]
    assert all(start <= end for start, end in work.spans.values())
    engine.close()


def test_threads_of_the_caller_stay():
    before = torch.get_num_threads()
    engine = engine_of("cpu")
    engine.fwd_bwd(BATCH)
    engine.step()
    engine.close()
    assert torch.get_num_threads() == before


def test_programs_of_evaluation_wait_too(monkeypatch):
    expected, engine = engine_of("gpu"), None
    expected.fwd_bwd(BATCH)
    expected.step()
    loss = expected.evaluate(BATCH).loss
    slow_updates(monkeypatch)
    engine = engine_of("cpu")
    engine.fwd_bwd(BATCH)
    engine.step()
    assert engine.evaluate(BATCH).loss == loss
    for either in (engine, expected):
        either.close()


def test_the_device_is_waited_for_even_if_work_failed(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    engine = engine_of("cpu")
    work = CpuWork(lower_update(engine.layout), [], lambda command: None, num_threads=1)
    work._failure = MemoryError("none left")
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "on_cuda", True)
        patch.setattr(engine.executor, "_cpu_work", work)
        with pytest.raises(RuntimeError, match="none left"):
            engine.executor.synchronize()
    assert waited == [engine.device]
    engine.close()


def test_two_interrupts_leave_no_half_gradients(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    engine = engine_of("cpu")
    engine.fwd_bwd(BATCH)
    with monkeypatch.context() as patch:
        patch.setattr(engine.handlers, "run", interrupt)
        patch.setattr(engine.executor, "synchronize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.fwd_bwd(BATCH)
    with pytest.raises(ValueError, match="call fwd_bwd"):
        engine.step()
    engine.close()


def test_every_update_has_as_many_threads(monkeypatch):
    counts = []
    slow_updates(monkeypatch, lambda: counts.append(torch.get_num_threads()))
    engine = engine_of("cpu")
    engine.executor._cpu_threads = 3

    def step():
        engine.fwd_bwd(BATCH)
        engine.step()
        engine.executor.finish_cpu_work()

    for _ in range(3):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    engine.close()
    assert set(counts) == {3}


def commands_of(engine):
    program = lower_update(engine.layout)
    return program, [c for c in program.commands if c.stream is Stream.CPU]


def test_of_what_is_ready_lower_groups_come_first():
    """The first is at work while the others become ready, last group first, as in a backward pass."""
    engine = engine_of("cpu")
    program, forward = commands_of(engine)
    backward = sorted(forward, key=lambda c: (-c.args.group, c.index))
    began, go_on, seen, asked = threading.Event(), threading.Event(), [], []

    def call(command):
        began.set()
        assert go_on.wait(PATIENCE_S)
        seen.append(command)

    def ready(command):
        assert command is backward[0] or began.wait(PATIENCE_S)
        asked.append(command)
        if command is backward[-1]:
            go_on.set()

    work = CpuWork(program, backward, call, 1, ready)
    work.start()
    work.issued(len(program.commands))
    work.join()
    assert asked == backward
    assert seen[0] is backward[0]
    groups = [c.args.group for c in seen[1:] if c is not backward[-1]]  # which is ready when the first ends, or later
    assert groups == sorted(groups)
    assert len(seen) == len(forward)
    engine.close()


def test_nothing_runs_before_what_it_waits_for_is_issued():
    engine = engine_of("cpu")
    program, commands = commands_of(engine)
    [needed] = commands[0].waits
    asked, work = [], None
    work = CpuWork(program, commands, lambda command: None, 1, asked.append)
    work.start()
    work.issued(needed - 1)
    time.sleep(0.02)
    assert not asked
    work.issued(needed)
    work.wait([commands[-1].index])
    assert asked == commands
    work.join()
    engine.close()


def test_work_waits_for_other_ranks_unless_nobody_wants_it():
    engine = engine_of("cpu")
    program, commands = commands_of(engine)
    awaited = [replace(command, awaits=(Signal(0, "all", "update"),)) for command in commands]
    for end, wanted in ((CpuWork.join, awaited), (CpuWork.drop, awaited[:1])):
        come, seen = threading.Event(), []

        def arrived(command, come=come, first=awaited[0]):
            return command is first or come.wait(0.001)

        work = CpuWork(program, awaited, seen.append, 1, arrived=arrived)
        work.start()
        work.wait([awaited[0].index])
        assert seen == awaited[:1]
        if end is CpuWork.join:
            come.set()
        end(work)
        assert len(seen) == len(wanted)
    engine.close()


def test_abandoned_work_ends_and_later_work_waits_for_earlier():
    engine = engine_of("cpu")
    program, commands = commands_of(engine)
    go_on, seen = threading.Event(), []

    def call(command):
        assert go_on.wait(PATIENCE_S)
        seen.append(command)

    first = CpuWork(program, commands, call, 1)
    second = CpuWork(program, commands, seen.append, 1, before=first)
    third = CpuWork(program, commands, seen.append, 1, lambda command: None, before=first)
    for work in (first, second, third):
        work.start()
    go_on.set()
    third.abandon()  # nothing of it was issued
    second.join()
    assert seen == commands * 2
    with pytest.raises(RuntimeError, match="it was interrupted"):
        third.join()
    engine.close()


@pytest.mark.parametrize("refused", ["second thread", "stream"])
def test_work_that_could_not_begin_is_waited_for_by_nobody(driven, monkeypatch, refused):
    """Its commands' own wait for what the host would have issued would never end."""
    plan = make_plan(SOURCE.spec, **OPTIONS, groups=[GroupPlan(update="cpu")] * len(SOURCE.spec.groups))
    layout = Layout(SOURCE.spec, plan)
    executor = driven(Executor(CPU, Arenas(CPU, layout.gpu_bytes, layout.host_bytes)))
    start, started = threading.Thread.start, []

    def start_first(thread):
        started.append(thread)
        if refused == "second thread" and len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    @contextlib.contextmanager
    def on_stream(_):
        if refused == "stream":
            raise RuntimeError("can't set the stream")
        yield

    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    program = lower_update(layout)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_first)
        with pytest.raises(RuntimeError, match="can't"):
            executor.run(program, lambda command: None)
    waiting = threading.Thread(target=executor.synchronize, daemon=True)
    waiting.start()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert not any(thread.is_alive() for thread in started)
