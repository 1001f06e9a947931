"""The GPU benchmarks on a stand-in for CUDA that computes on the CPU: which calls are made, what becomes of them."""

import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from attention_helpers import PlainKernels
from torch import Tensor

from flexengine.hardware.machine_rates import MachineRates
from flexengine.hardware.measure import attention as measure_attention
from flexengine.hardware.measure import experts as measure_experts
from flexengine.hardware.measure import gpu as measure
from flexengine.hardware.measure import head as measure_head
from flexengine.hardware.measure import links as measure_links
from flexengine.hardware.measure import machine as measure_machine
from flexengine.hardware.measure import matmul as measure_matmul
from flexengine.hardware.measure import node as measure_node
from flexengine.hardware.measure import timing
from flexengine.hardware.measure.attention import AttentionRates
from flexengine.hardware.node_rates import RankRates
from flexengine.hardware.profile import ProbeShape
from flexengine.models.registry import open_model
from flexengine.native import allocate_host
from flexengine.ops.attention.style import AttentionShape
from flexengine.ops.cross_entropy import LogitsBlocks
from flexengine.ops.experts.shape import ExpertShape
from flexengine.ops.linear_shape import HeadShape, LinearShape
from flexengine.options.job import Job
from flexengine.request import probe_shape

MIB = 2**20
CPU = torch.device("cpu")


class FakeEvent:
    """Knows when it was recorded; everything has run by then."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self, stream: object = None) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1e3 * (end.at_s - self.at_s)


class FakeStream:
    """Counts the events it waited for."""

    def __init__(self, device: object = None) -> None:
        self.waits = 0

    def wait_event(self, event: FakeEvent) -> None:
        self.waits += 1


def measured(shape: ProbeShape) -> measure.Rates:
    """The rates of the stand-in and of a model on it."""
    machine = measure_machine.measure_machine(CPU, torch.bfloat16, host_free_bytes=8 * MIB, scale=0.01)
    return of_model(shape, machine)


def of_model(shape: ProbeShape, machine: MachineRates) -> measure.Rates:
    """The rates of a model on a machine."""
    with measure.ProbeKernels(CPU, torch.bfloat16, shape) as kernels:
        return measure.measure_model(CPU, torch.bfloat16, shape, machine, kernels, scale=0.01)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda computing on the CPU; sizes of the benchmarks cut down. `held_cycles`: every sleep of a stream."""
    seen = SimpleNamespace(held_cycles=[], stream=FakeStream(), fraction=1.0)

    @contextmanager
    def inside(stream: FakeStream):
        yield stream

    replacements = {
        "device": lambda device: nullcontext(),
        "Event": FakeEvent,
        "Stream": FakeStream,
        "stream": inside,
        "current_stream": lambda device=None: seen.stream,
        "set_stream": lambda stream: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (3 * MIB, 64 * MIB),
        "memory_reserved": lambda device: 0,
        "get_per_process_memory_fraction": lambda device: seen.fraction,
        "_sleep": seen.held_cycles.append,
    }
    for name, value in replacements.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    for module in (measure_machine, measure_links, measure_node):
        monkeypatch.setattr(module, "allocate_host", lambda num_bytes, page_locked: allocate_host(num_bytes, False))
    for name, value in {
        "CUDA_TOKENS": (8, 16, 32),
        "PLAIN_LENGTHS": (16, 32),
        "WARMING_SIZE": 32,
        "OPERAND_BYTES": MIB,
        "RESULT_BYTES": MIB,
    }.items():
        monkeypatch.setattr(measure, name, value)
    for name, value in {"LEAST_HOST_BYTES": MIB, "MOST_HOST_BYTES": MIB, "NUM_ISSUED": 20}.items():
        monkeypatch.setattr(measure_machine, name, value)
    monkeypatch.setattr(measure_machine, "cube_rate", lambda device, dtype, sustained_s: 1e12)
    monkeypatch.setattr(measure, "use_side_streams", lambda device: None)
    monkeypatch.setattr(measure_links, "SIZES", (2**16, MIB))
    return seen


def test_every_field_is_measured_and_the_profile_accepts_it(fake_cuda: SimpleNamespace):
    rates = measured(ProbeShape(64, 96, 24))
    profile = rates.profile("fake", "cuda", 2**40, 2**40, 1, 2**40, 2**40, 1)
    assert profile.matmul.shape == (64, 96)
    assert profile.attention.head_dim == 24
    assert min(profile.link.h2d_beside_cpu_bytes_per_s, profile.link.d2h_beside_cpu_bytes_per_s) > 0
    assert min(profile.link.only_beside_cpu_bytes_per_s) > 0
    assert 0 < profile.link.cpu_share_beside_link <= 1
    assert [tokens for tokens, _ in profile.matmul.flops_per_s] == [8, 16, 32]
    assert [length for length, _ in profile.attention.backward_flops_per_s] == [16, 32]
    assert profile.host.issue_s > 0
    assert [curve.x_unit for curve in profile.curves] == ["tokens"] * 12 + ["bytes"] * 4 + ["threads"]
    assert profile.curves[-5].points[-1] == (MIB, profile.link.h2d_bytes_per_s)
    assert profile.host.bytes_per_s == profile.curves[-1].points[-1][1]
    assert fake_cuda.stream.waits > 20  # the commands whose issue was timed


def test_attention_is_measured_as_the_job_runs_it(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []
    rates = AttentionRates(((16, 1e12),), ((16, 1e12),))

    def noted(*_: object) -> tuple[AttentionRates, tuple[()], tuple[()]]:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return rates, (), ()

    monkeypatch.setattr(measure, "_cuda_attention", noted)
    monkeypatch.setattr(measure, "block_rates", lambda *_: measure_matmul.BlockRates(((8, 1e12),), ()))
    spec = open_model("preset:qwen3-0.6b", needs_weights=False).spec
    for job in (None, Job(), Job(deterministic=True)):
        shape = probe_shape(spec, job)
        machine = measure_machine.measure_machine(CPU, torch.bfloat16, host_free_bytes=8 * MIB, scale=0.01)
        of_model(shape._replace(experts=(), head=None), machine)
    assert seen == [False, False, True]


def test_slices_are_measured_beside_whole_sequences(monkeypatch: pytest.MonkeyPatch):
    """Calls of every kind take a second here, so that shares are those of the pairs that they make visible."""
    monkeypatch.setattr(measure_attention, "KERNELS", {"flash": PlainKernels()})
    monkeypatch.setattr(measure_attention, "SLICE_TOKENS", (8, 16, 64))
    monkeypatch.setattr(measure_attention, "SLICE_KEYS", 32)
    monkeypatch.setattr(measure_attention, "KERNEL_ROWS", measure_attention.KERNEL_TOKENS * 4)
    shape = AttentionShape(2, 8, 8)
    pairs = 4 * 16 * 32
    whole = AttentionRates(((512, 4 * 8 * pairs),), ((512, 10 * 8 * pairs),))
    monkeypatch.setattr(measure_attention, "SHORT_TOKENS", 16)
    asked = []

    def timer(call: Callable[[], object], least_s: float) -> float:
        asked.append(least_s)
        return 1.0 if call() else 0.0

    shares = measure_attention.slice_shares(shape, whole, CPU, torch.float32, timer, 0.1)
    assert asked == [0.2] * 6  # twice as long as short sequences
    assert shares == ((8, 0.5), (16, 1.0), (64, 1.0))


def test_attention_of_long_sequences_is_timed_for_longer(monkeypatch: pytest.MonkeyPatch):
    """It takes more of their steps, in which a power-capped card raises its clock for it."""
    monkeypatch.setattr(measure_attention, "SHORT_TOKENS", 16)
    asked = []
    lengths = (8, 16, 64)
    measure_attention.plain_rates(lengths, 4, 8, CPU, torch.float32, lambda call, s: asked.append(s) or 1.0, 0.1)
    assert asked == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.4, 0.4])  # forward and backward of each


def test_experts_are_measured_beside_linear_layers(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure_experts, "EXPERT_TOKENS", (16, 32, 64))
    shapes = (ExpertShape(4, 2, 64, 96), ExpertShape(4, 2, 48, 64))
    shape = ProbeShape(64, 96, 24, experts=shapes)
    rates = measured(shape)
    assert [tokens for tokens, _ in rates.matmul.grouped_shares] == [
        16,
        32,
    ]  # linear layers were measured with up to 32
    assert all(share > 0 for _, share in rates.matmul.grouped_shares)
    most = measure_experts.Buffers.num_bytes(shapes[0], 16, 2, torch.bfloat16)
    fewer = measure_experts.Buffers(shapes[0], 16, torch.bfloat16, CPU, most)
    assert (fewer.shape.experts, fewer.rows, fewer.bounds[-1]) == (2, 16, 16)
    with pytest.raises(ValueError, match="one expert of"):
        measure_experts.Buffers(shapes[0], 16, torch.bfloat16, CPU, 1000)


def test_a_models_own_layers_and_head_are_measured(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure_head, "logits_blocks", lambda *_: LogitsBlocks(16, 16))
    layers = (LinearShape("fc", 64, 200, transposed=True, count=2), LinearShape("proj", 200, 64, adds=True))
    shape = ProbeShape(64, 200, 24, linears=layers, head=HeadShape(64, 300))
    rates = measured(shape)
    names = [curve.name for curve in rates.curves if curve.x_unit == "tokens"]
    assert names == [f"{layer} {name}" for layer in ("fc", "proj") for name in measure_matmul.PASSES]
    assert [tokens for tokens, _ in rates.matmul.head_shares] == [16, 32]  # a block of logits, and the longest chunk
    assert all(share > 0 for _, share in rates.matmul.head_shares)


def test_short_calls_are_issued_behind_a_gate(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def elapsed_ms(start: FakeEvent, end: FakeEvent) -> float:
        return 0.01 if len(calls) < 3 else 1.0  # a single call takes 10 us

    monkeypatch.setattr(FakeEvent, "elapsed_time", elapsed_ms)
    seconds = timing.cuda_timer(lambda: calls.append(1), least_s=2.0)
    assert len(calls) == 1 + 1 + timing.MOST_SHORT_CALLS  # to warm up, to see how long one takes, and the timed ones
    assert seconds == pytest.approx(1e-3 / timing.MOST_SHORT_CALLS)
    assert fake_cuda.held_cycles == [int(timing.MOST_SHORT_CALLS * timing.ISSUE_S * timing.MOST_CYCLES_PER_S)]


def test_a_call_that_takes_long_to_issue_is_short_and_held_for_as_long(
    fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    """A call of 50 us of which the host takes 40 to issue it; one that takes longer than any is held for the most."""
    for host_s, held_s in ((40e-6, 40e-6), (10e-6, None), (1.0, timing.MOST_ISSUE_S)):
        calls, clock = [], SimpleNamespace(s=0.0)

        def work(seconds: float = host_s, calls: list = calls, clock: SimpleNamespace = clock) -> None:
            calls.append(1)
            clock.s += seconds

        fake_cuda.held_cycles.clear()
        monkeypatch.setattr(timing.time, "perf_counter", lambda clock=clock: clock.s)
        monkeypatch.setattr(FakeEvent, "elapsed_time", lambda start, end: 0.05)
        timing.cuda_timer(work, least_s=50e-6 * 10)
        assert len(calls) == 1 + 1 + 10
        held = [] if held_s is None else [int(10 * held_s * timing.MOST_CYCLES_PER_S)]
        assert fake_cuda.held_cycles == held


def test_a_part_in_which_the_card_was_held_up_does_not_count(
    fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    seconds = iter([0.004, 0.005, 0.9, 0.006])
    monkeypatch.setattr(timing, "cuda_timer", lambda work, least_s: next(seconds))
    monkeypatch.setattr(timing, "timed_calls", lambda work, calls: next(seconds))
    assert timing.warmed_timer(lambda: None, 0.004, 3)(lambda: None, 0.012) == 0.006


def test_long_calls_are_timed_once_and_held_by_nothing(fake_cuda: SimpleNamespace):
    calls = []
    seconds = timing.cuda_timer(lambda: (calls.append(1), time.sleep(0.002)), least_s=0.001)
    assert len(calls) == 2
    assert seconds >= 0.002
    assert fake_cuda.held_cycles == []


def test_parts_of_work_follow_what_warms_the_card_and_count_alone(fake_cuda: SimpleNamespace):
    order, clock = [], SimpleNamespace(ms=0.0)

    def call(name: str, milliseconds: float) -> None:
        order.append(name)
        clock.ms += milliseconds

    class Event(FakeEvent):
        def record(self, stream: object = None) -> None:
            self.at_s = clock.ms / 1e3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        timer = timing.warmed_timer(lambda: call("warm", 50.0), 0.01, 2)
        seconds = timer(lambda: call("work", 4.0), 0.02)
        assert seconds == pytest.approx(0.004)
        assert order == ["work"] * 2 + (["warm"] + ["work"] * 3) * 2
        order.clear()
        assert timer(lambda: call("work", 4.0), 0.04) == pytest.approx(0.004)
        assert order == ["work"] * 2 + ["warm"] + ["work"] * 10  # one long part


def test_works_that_take_turns_are_timed_each(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    """A long work has a call a round, a shorter one as many as fill a turn, and what comes first counts for none."""
    order, clock = [], SimpleNamespace(ms=0.0)

    class Event(FakeEvent):
        def record(self, stream: object = None) -> None:
            self.at_s = clock.ms / 1e3

    def work(name: str, milliseconds: float) -> Callable[[], None]:
        def call() -> None:
            order.append(name)
            clock.ms += milliseconds * (2.0 if len(order) < 44 else 1.0)  # until the card is hot

        return call

    once_s = iter([0.004, 0.0004])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "cuda_timer", lambda work, least_s: next(once_s))
    monkeypatch.setattr(timing, "HEAT_S", 0.052)
    assert timing.timed_in_turn([work("long", 4.0), work("short", 0.4)], 0.026) == pytest.approx([0.004, 0.0004])
    assert order == (["long"] + ["short"] * 3) * (1 + 10 + 10)


@pytest.mark.parametrize(
    ("once_s", "issue_s", "calls", "held_s"),
    [
        (2e-6, 20e-6, 166, 20e-6),  # as many as the launch queue takes
        (15e-6, 1e-6, 67, timing.ISSUE_S),
        (30e-6, 1e-6, 34, None),
        (30e-6, 20e-6, 34, 20e-6),
        (2e-6, 9.0, 166, timing.MOST_ISSUE_S),  # the host stood still
    ],
)
def test_short_turns_are_issued_behind_a_gate(
    fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch,
    once_s: float, issue_s: float, calls: int, held_s: float | None,
):  # fmt: skip
    made = []
    moments = iter([0.0, 3 * calls * issue_s])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    monkeypatch.setattr(timing, "cuda_timer", lambda work, least_s: once_s)
    monkeypatch.setattr(FakeEvent, "record", lambda event: None)
    rounds, heated = 2, 3
    monkeypatch.setattr(timing, "HEAT_S", (heated - 0.5) * 3 * calls * once_s)
    timing.timed_in_turn([lambda: made.append(1)] * 3, (rounds - 0.5) * calls * once_s)
    assert len(made) == 3 * calls * (1 + heated + rounds)
    held = [] if held_s is None else [int(3 * calls * held_s * timing.MOST_CYCLES_PER_S)] * rounds
    assert fake_cuda.held_cycles == pytest.approx(held, abs=1)


def test_layers_of_a_model_take_turns(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    """All passes of a number of tokens are timed together, twice: of three numbers in bf16, of one in FP8."""
    found = []

    def noted(works: Iterable[Callable[[], object]], least_s: float) -> list[float]:
        found.append(len(list(works)))
        return [1.0] * found[-1]

    monkeypatch.setattr(measure, "timed_in_turn", noted)
    measured(ProbeShape(64, 96, 24))
    assert found == [12] * (2 * 3 + 2 * 1)


def test_parts_of_short_calls_fit_the_launch_queue(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(timing, "cuda_timer", lambda work, least_s: 2e-6)
    monkeypatch.setattr(timing, "timed_calls", lambda work, calls: asked.append(calls) or 1e-6)
    assert timing.warmed_timer(lambda: None, 0.01, 3)(lambda: None, 0.03) == 1e-6
    assert asked == [timing.MOST_SHORT_CALLS] * 3


def test_a_moment_in_which_the_host_is_busy_counts_little(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    seconds = iter([9.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 8.0, 4.0, 2.0])
    monkeypatch.setattr(measure_machine, "timed_calls", lambda work, calls: next(seconds))
    assert measure_machine._launch_seconds(CPU) == 3.0
    clock = iter(range(1000))
    monkeypatch.setattr(measure_machine, "time", SimpleNamespace(perf_counter=lambda: float(next(clock)) ** 2))
    monkeypatch.setattr(measure_machine, "NUM_ISSUED", 10)
    # pairs of readings from the third on, as the first two belong to commands that warm up: 5, 9, 13, ... 37
    assert measure_machine._issue_seconds(CPU) == pytest.approx(21.0 / 10)


def test_a_rank_measures_its_host_and_link_with_the_others(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    for name, num_bytes in {"LINK_BYTES": MIB, "LEAST_HOST_BYTES": MIB, "MOST_HOST_BYTES": 4 * MIB}.items():
        monkeypatch.setattr(measure_node, name, num_bytes)
    filled, downward = set[int](), measure_links.SweptLink.downward

    def noted(link: measure_links.SweptLink, num_bytes: int) -> Callable[[], Tensor]:
        copy = downward(link, num_bytes)

        def call() -> Tensor:
            piece = copy()
            filled.add(piece.data_ptr())
            return piece

        return call

    monkeypatch.setattr(measure_links.SweptLink, "downward", noted)
    for name in ("LINK_S", "HOST_S"):
        monkeypatch.setattr(measure_node, name, 0.001)
    monkeypatch.setattr(measure_node, "cube_rate", lambda device, dtype, sustained_s: 1e12)
    begun = []

    def at_once(call):
        begun.append(call)
        return call()

    slow = (("float32", 1e3), ("bfloat16", 2e3))
    found = measure_node.measure_at_work(CPU, torch.bfloat16, slow, 2**40, at_once)
    assert found.adamw_state == "bfloat16"
    rates = RankRates(**found.rates, peer_bytes_per_s=1.0)
    assert min(rates) > 0
    assert found.rates["matmul_flops_per_s"] == 1e12
    assert len(begun) == 4 + 4 * 2  # links: how many copies, then all at once
    assert len(filled) == 4, "copies go through all of the memory"


def test_a_rank_goes_on_copying_while_others_time_theirs(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    order, clock = [], SimpleNamespace(ms=0.0)

    def copy(name: str, milliseconds: float) -> None:
        order.append(name)
        clock.ms += milliseconds

    class Event(FakeEvent):
        def record(self, stream: object = None) -> None:
            self.at_s = clock.ms / 1e3

        def query(self) -> bool:
            return len(order) > 12

    monkeypatch.setattr(torch.cuda, "Event", Event)
    ways = [lambda: copy("up", 4.0), lambda: copy("down", 8.0)]
    seconds = measure_node._busy_seconds(ways, [3, 2], lambda: order.append("update"))
    assert seconds == pytest.approx([0.004, 0.008])
    assert order == ["up"] * 6 + ["down"] * 4 + ["update"] * 3


def test_opposite_copies_surround_the_measured_ones(fake_cuda: SimpleNamespace):
    order = []
    streams = FakeStream(), FakeStream()
    measure_links._copy_seconds(streams, MIB, lambda: order.append("copy"), lambda: order.append("opposite"))
    assert order == ["copy"] + ["opposite"] * (3 * 64 + 1) + ["copy"] * 64
    assert streams[1].waits == 1  # the opposite direction starts with the gate
    assert len(fake_cuda.held_cycles) == 1


def test_buffers_outlive_copies_that_a_failure_leaves(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)

    def fail(buffers: measure_links.LinkBuffers) -> None:
        buffers.upward(MIB)()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), measure_links.link_buffers(MIB, CPU) as buffers:
        fail(buffers)
    assert waited == [CPU]


def test_free_memory_bounds_the_buffers(fake_cuda: SimpleNamespace):
    buffers = measure._cuda_buffers(CPU, torch.float32)
    assert buffers.operands.nbytes + buffers.results.nbytes <= 2 * MIB
    fake_cuda.fraction = 1 / 64  # a cap of 1 MiB on this process
    assert measure_machine.free_bytes(CPU) == MIB
    buffers = measure._cuda_buffers(CPU, torch.float32)
    assert buffers.operands.nbytes + buffers.results.nbytes == pytest.approx(0.8 * MIB, abs=8)
    assert measure_machine._copy_bytes(8 * MIB) == int(3.2 * MIB)
    assert measure_machine._copy_bytes(2**40) == 256 * MIB


def test_a_swept_link_copies_one_piece_after_another():
    host = torch.arange(1, 12, dtype=torch.uint8)
    link = measure_links.SweptLink(host, 3, CPU)
    up, down = link.upward(3), link.downward(2)
    found = []
    for _ in range(4):
        up()
        found.append(link._on_gpu[0].tolist())
    assert found == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3]]
    down()
    assert host.tolist() == [1, 2, 3, 0, 0, 6, 7, 8, 9, 10, 11], "half-way through, so that both directions are apart"
