"""The executor's own duties: times of commands, what it forgets, and, on a GPU, native and torch issue alike."""

import contextlib
import time

import pytest
import torch
from engine_helpers import FLOAT32, build_engine, random_batch, random_weights, same_bits, streamed_plan, tiny_config

from flexengine.hardware.measure.timing import hold_stream
from flexengine.native import library
from flexengine.native.transfer_torch import TorchTransfers
from flexengine.runtime.arena import Arenas
from flexengine.runtime.execution.executor import Executor
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Stream
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.slots import Slot, SlotKey, overlapping_slots

SLOTS = (Slot(SlotKey("a", memory="gpu"), 0, 16, "test"), Slot(SlotKey("b", memory="host"), 0, 16, "test"))
CPU = torch.device("cpu")


def small_program(name="small"):
    """A copy to the GPU, a computation on it, a copy back."""
    builder = ProgramBuilder(name, SLOTS, overlapping_slots(SLOTS))
    builder.copy(CommandName("fetch"), Stream.H2D, "x", [CopyRegion(1, 0, 0, 0, 16)])
    builder.add("add", CommandName("add"), Stream.COMPUTE, [Access(0, "x")], [Access(0, "y")])
    builder.copy(CommandName("return"), Stream.D2H, "y", [CopyRegion(0, 0, 1, 0, 16)])
    return builder.build()


@pytest.fixture
def arenas():
    arenas = Arenas(CPU, 16, 16)
    yield arenas
    arenas.close()


def add_one(arenas):
    return lambda _: arenas.bytes_view("gpu", 0, 16).add_(1)


def test_times_on_the_cpu_follow_each_other(arenas):
    executor, program = Executor(CPU, arenas), small_program()
    executor.run(program, lambda _: time.sleep(0.02), timed=True)
    timings = executor.timings()
    assert len(timings) == 3
    flat = [moment for span in timings for moment in span]
    assert flat == sorted(flat)
    assert flat[0] >= 0
    assert timings[1][1] - timings[1][0] >= 0.02
    executor.run(program, add_one(arenas))
    assert executor.timings() == timings  # of the last timed run
    assert arenas.bytes_view("host", 0, 16).tolist() == [1] * 16


def test_timed_runs_begin_one_after_the_other(arenas):
    executor, program = Executor(CPU, arenas), small_program()
    executor.run(program, add_one(arenas), timed=True)
    with pytest.raises(ValueError, match="start_clock"):
        executor.began_s()
    executor.start_clock()
    time.sleep(0.01)
    end_s = 0.01
    for _ in range(2):
        executor.run(program, lambda _: time.sleep(0.005), timed=True)
        assert executor.began_s() >= end_s
        end_s = executor.began_s() + executor.timings()[-1][1]
    executor.forget(program)
    with pytest.raises(ValueError, match="timed=True"):
        executor.began_s()


def test_times_are_by_index_whatever_the_order(arenas):
    builder = ProgramBuilder("independent", SLOTS, overlapping_slots(SLOTS))
    for _ in range(3):
        builder.add("nothing", CommandName("nothing"), Stream.COMPUTE, [], [])
    seen = []
    executor = Executor(CPU, arenas, order=lambda _: [2, 0, 1])
    executor.run(builder.build(), lambda command: seen.append(command.index), timed=True)
    starts = [start for start, _ in executor.timings()]
    assert seen == sorted(range(3), key=starts.__getitem__) == [2, 0, 1]


def test_no_times_without_a_finished_timed_run(arenas):
    executor, program = Executor(CPU, arenas), small_program()
    executor.run(program, add_one(arenas))
    with pytest.raises(ValueError, match="timed=True"):
        executor.timings()
    executor.run(program, add_one(arenas), timed=True)
    with pytest.raises(ZeroDivisionError):
        executor.run(program, lambda _: 1 / 0, timed=True)
    with pytest.raises(ValueError, match="timed=True"):
        executor.timings()


def test_times_of_a_forgotten_program_are_gone(arenas):
    executor, timed, other = Executor(CPU, arenas), small_program("timed"), small_program("other")
    executor.run(timed, add_one(arenas), timed=True)
    executor.run(other, add_one(arenas))
    executor.forget(other)
    assert len(executor.timings()) == len(timed.commands)
    executor.forget(timed)
    with pytest.raises(ValueError, match="timed=True"):
        executor.timings()


def test_forgetting_and_waiting(arenas):
    executor, programs = Executor(CPU, arenas), [small_program("one"), small_program("two")]
    for program in programs:
        executor.run(program, add_one(arenas))
        executor.wait_for(program, 0)
    executor.forget(programs[0])
    executor.forget(programs[0])
    executor.run(programs[1], add_one(arenas))
    executor.run(programs[0], add_one(arenas))
    executor.synchronize()
    assert arenas.bytes_view("host", 0, 16).tolist() == [4] * 16


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_program_calls_finds_its_stream_and_the_caller_his_own(arenas, driven, monkeypatch, fails):
    executor = driven(Executor(CPU, arenas))
    current, seen = ["the caller's"], []

    @contextlib.contextmanager
    def on_stream(stream):
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    def handler(command):
        seen.append((command.stream, current[-1]))
        if fails and len(seen) == 3:
            raise ZeroDivisionError

    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    builder = ProgramBuilder("calls", SLOTS, overlapping_slots(SLOTS))
    for stream in (Stream.COMPUTE, Stream.H2D, Stream.D2H, Stream.COMPUTE):
        builder.add("call", CommandName("call"), stream, [], [])
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        executor.run(builder.build(), handler)
    assert len(seen) == (3 if fails else 4)
    assert all(stream is executor.streams[name] for name, stream in seen)
    assert current == ["the caller's"]
    executor.synchronize()


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def gpu_engine(**decisions):
    source = random_weights(tiny_config(num_hidden_layers=3, hidden_size=256, head_dim=64, intermediate_size=512))
    plan = streamed_plan(source.spec, numerics=FLOAT32, max_seq_len=64, **decisions)
    return build_engine(source, plan, device="cuda", deterministic=True)


def train(engine):
    batch = random_batch(0, [60, 33, 64, 12], engine.model.vocab_size)
    losses = []
    for _ in range(3):
        losses.append(engine.fwd_bwd(batch).loss)
        engine.step()
    return losses, engine.state_dict()


@pytest.mark.gpu
def test_gpu_native_and_torch_issue_give_the_same_bits(monkeypatch):
    native = gpu_engine()
    assert not isinstance(native.executor._transfers, TorchTransfers)
    losses, weights = train(native)
    native.close()
    monkeypatch.setenv(library.DISABLING_VARIABLE, "0")
    fallback = gpu_engine()
    assert isinstance(fallback.executor._transfers, TorchTransfers)
    fallback_losses, fallback_weights = train(fallback)
    fallback.close()
    assert losses == fallback_losses
    same_bits(weights, fallback_weights)


@pytest.mark.gpu
@pytest.mark.parametrize("native", ["1", "0"])
def test_gpu_rounds_keep_their_tokens_while_the_host_runs_ahead(monkeypatch, native):
    """The host writes a round's tokens where those of the round before are fetched from, which may not have begun."""
    monkeypatch.setenv(library.DISABLING_VARIABLE, native)
    losses, weights = train(gpu_engine(chunk_tokens=64, chunks_per_round=1))
    slow = gpu_engine(chunk_tokens=64, chunks_per_round=1)
    run = slow.executor.run

    def run_late(program, *rest, **options):
        hold_stream(0.02)  # longer than issuing a program takes
        run(program, *rest, **options)

    monkeypatch.setattr(slow.executor, "run", run_late)
    slow_losses, slow_weights = train(slow)
    assert losses == slow_losses
    same_bits(weights, slow_weights)


@pytest.mark.gpu
@pytest.mark.parametrize("native", ["1", "0"])
def test_gpu_times_respect_streams_and_waits(monkeypatch, native):
    monkeypatch.setenv(library.DISABLING_VARIABLE, native)
    engine = gpu_engine()
    batch = random_batch(0, [60, 33, 64, 12], engine.model.vocab_size)
    engine.fwd_bwd(batch)
    program = engine.runner.last_program
    engine.executor.run(program, engine.handlers.of_program(program, None), timed=True)
    timings = engine.executor.timings()
    engine.executor.wait_for(program, 0)
    assert len(timings) == len(program.commands)
    slack_s, ends = 2e-6, {}  # two ticks of the GPU's clock
    for command in program.commands:
        start, end = timings[command.index]
        assert -slack_s <= start <= end
        before = [ends.get(command.stream, 0.0), *(timings[wait][1] for wait in command.waits)]
        assert start >= max(before) - slack_s, command.label
        ends[command.stream] = end
    assert 0 < max(ends.values()) < 60
    engine.close()
    with pytest.raises(ValueError, match="timed=True"):
        engine.executor.timings()


@pytest.mark.gpu
@pytest.mark.parametrize("native", ["1", "0"])
def test_gpu_programs_of_a_measured_step_follow_each_other(monkeypatch, native):
    monkeypatch.setenv(library.DISABLING_VARIABLE, native)
    engine = gpu_engine()
    train(engine)
    engine.measure_next_step(keep_runs=True)
    engine.fwd_bwd(random_batch(0, [60, 33, 64, 12], engine.model.vocab_size))
    seconds = engine.step().seconds
    runs, end_s = engine.take_timed_runs(), 0.0
    assert [run.program.name for run in runs] == ["round"] * (len(runs) - 1) + ["update"]
    for run in runs:
        assert run.start_s >= end_s
        end_s = run.start_s + run.timing.total_s
    assert end_s <= seconds
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("native", ["1", "0"])
def test_gpu_engines_can_be_called_from_any_stream(monkeypatch, native):
    """Also while that stream has much to do, and the caller is on it again afterwards."""
    monkeypatch.setenv(library.DISABLING_VARIABLE, native)
    losses, weights = train(gpu_engine())
    engine, caller = gpu_engine(), torch.cuda.Stream()
    fwd_bwd = engine.fwd_bwd

    def fwd_bwd_while_busy(batch):
        hold_stream(0.05)  # on the caller's stream
        return fwd_bwd(batch)

    monkeypatch.setattr(engine, "fwd_bwd", fwd_bwd_while_busy)
    with torch.cuda.stream(caller):
        late_losses, late_weights = train(engine)
        engine.adopt(engine.plan)
        evaluated = engine.evaluate(random_batch(0, [60, 33, 64, 12], engine.model.vocab_size)).loss
        assert torch.cuda.current_stream() == caller
    assert late_losses == losses
    same_bits(late_weights, weights)
    assert evaluated == engine.evaluate(random_batch(0, [60, 33, 64, 12], engine.model.vocab_size)).loss
    engine.close()


@pytest.mark.gpu
def test_gpu_ranges_change_no_bits():
    plain, ranged, said = gpu_engine(), gpu_engine(), []

    @contextlib.contextmanager
    def range_of(label):
        said.append(label)
        with torch.cuda.nvtx.range(label):
            yield

    ranged.executor.range_of = range_of
    losses, weights = train(plain)
    ranged_losses, ranged_weights = train(ranged)
    assert losses == ranged_losses
    same_bits(weights, ranged_weights)
    assert {label.split()[0] for label in said} >= {"fetch", "forward", "backward", "update"}
    plain.close()
    ranged.close()


@pytest.mark.gpu
def test_gpu_memory_goes_back_when_an_engine_closes():
    engine = gpu_engine()
    train(engine)
    view = engine.arenas.bytes_view("gpu", 0, 16)
    before = torch.cuda.memory_allocated()
    engine.close()
    assert torch.cuda.memory_allocated() <= before - engine.layout.gpu_bytes, view.shape
