"""The benchmarks: right FLOP counts, operands within their buffers, products that are really computed."""

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
import torch

from flexengine.hardware.measure import host as measure_host
from flexengine.hardware.measure.attention import (
    KERNEL_ROWS,
    AttentionRates,
    _kernel_calls,
    _plain_calls,
    error_of,
    fastest_first,
    fitting_rows,
    mixed_rates,
    plain_rates,
    rates_of,
    serves,
    shape_of,
)
from flexengine.hardware.measure.host import (
    FIRST_PARAMETERS,
    adamw_rates,
    adamw_work,
    cache_bytes,
    copy_curve,
    steady_seconds,
    thread_counts,
    working_bytes,
)
from flexengine.hardware.measure.links import CURVE_NAMES, SIZES, _link_rates
from flexengine.hardware.measure.matmul import (
    PASSES,
    Buffers,
    _work,
    affordable_tokens,
    block_rates,
    fitting,
    operand_bytes,
    usual_layers,
)
from flexengine.hardware.measure.timing import cpu_timer, each_alone, timed_in_turn
from flexengine.ops.attention.choice import KERNEL_NAMES, AttentionChoice, KernelName, order_of
from flexengine.ops.attention.kernels import runs_on
from flexengine.ops.attention.packages import PACKAGES, installed
from flexengine.ops.attention.style import AttentionShape
from flexengine.ops.linear import accumulate_weight_grad
from flexengine.ops.linear_shape import LinearShape

MIB = 2**20
CPU = torch.device("cpu")


def buffers_of(for_operands: int, for_results: int, dtype: torch.dtype = torch.bfloat16) -> Buffers:
    """Buffers without memory behind them."""
    operands = torch.empty(for_operands // dtype.itemsize, dtype=dtype, device="meta")
    return Buffers(operands, torch.empty(for_results, dtype=torch.uint8, device="meta"))


def test_products_of_a_block_are_those_of_a_model_of_that_shape():
    by_name = {p.name: (p.in_features, p.out_features) for p in usual_layers((4096, 14336))}
    assert by_name == {  # Llama-3.1-8B: 32 query and 8 key/value heads of 128
        "qkv_proj": (4096, 4096 + 2 * 1024),
        "o_proj": (4096, 4096),
        "gate_up_proj": (4096, 2 * 14336),
        "down_proj": (14336, 4096),
    }


def test_token_counts_that_would_take_too_long_are_left_out():
    per_token = 3 * 2 * (2.5 * 4096**2 + 3 * 4096 * 14336)
    counts = (256, 512, 1024)
    assert affordable_tokens(counts, usual_layers((4096, 14336)), 512 * per_token, 1.0) == [256, 512]
    assert affordable_tokens(counts, usual_layers((4096, 14336)), per_token, 1.0) == [256]
    assert affordable_tokens(counts, usual_layers((4096, 14336)), 1e18, 1.0) == list(counts)


@pytest.mark.parametrize("shape", [(4096, 14336), (8192, 28672), (2048, 8192)], ids=str)
@pytest.mark.parametrize("tokens", [256, 8192, 32768])
def test_products_are_halved_until_they_fit(shape: tuple[int, int], tokens: int):
    buffers = buffers_of(832 * MIB, 576 * MIB)
    for product in usual_layers(shape):
        part = fitting(product, tokens, torch.bfloat16, buffers)
        assert part is not None
        read, written = operand_bytes(part, tokens, torch.bfloat16)
        assert read <= buffers.operands.nbytes
        assert written <= buffers.results.nbytes
        assert min(part.in_features, part.out_features) >= 2048
        whole_bytes = sum(operand_bytes(product, tokens, torch.bfloat16))
        assert (part == product) or whole_bytes > 576 * MIB


def test_an_8b_block_at_8192_tokens_is_measured_whole():
    buffers = buffers_of(832 * MIB, 576 * MIB)
    for product in usual_layers((4096, 14336)):
        assert fitting(product, 8192, torch.bfloat16, buffers) == product


def test_too_little_memory_leaves_counts_out():
    assert fitting(LinearShape("p", 4096, 4096), 32768, torch.bfloat16, buffers_of(8 * MIB, 8 * MIB)) is None
    with pytest.raises(ValueError, match="not enough free memory"):
        block_rates(usual_layers((4096, 4096)), [32768], torch.bfloat16, buffers_of(MIB, MIB), timed_in_turn, 0.1)


def test_rates_are_flops_over_time_of_all_products():
    """With a timer that reads 1 s for every pass, the rate is a third of the forward FLOPs per product."""
    shape, counts = (256, 512), [64, 128]
    buffers = Buffers(torch.randn(4 * MIB), torch.empty(16 * MIB, dtype=torch.uint8))
    calls = []

    def timer(work: Callable[[], object], least_s: float) -> float:
        calls.append(least_s)
        work()
        return 1.0

    products = usual_layers(shape)
    rates = block_rates(products, counts, torch.float32, buffers, each_alone(timer), 0.25)
    flops = [sum(p.flops(tokens) for p in products) for tokens in counts]
    assert rates.matmul_flops_per_s == tuple(zip(counts, [f / len(products) for f in flops], strict=True))
    assert calls == [0.25] * (2 * len(counts) * len(products) * len(PASSES))
    curve = next(c for c in rates.curves if c.name == "down_proj weight gradient")
    assert curve.points == ((64, 2 * 64 * 512 * 256.0), (128, 2 * 128 * 512 * 256.0))


def test_layers_that_a_model_has_more_of_weigh_more():
    buffers = Buffers(torch.randn(MIB), torch.empty(16 * MIB, dtype=torch.uint8))
    layers = (LinearShape("many", 64, 128, count=3), LinearShape("one", 128, 512))
    rates = block_rates(layers, [64], torch.float32, buffers, each_alone(lambda work, least_s: 1.0), 0.1)
    flops = 3 * layers[0].flops(64) + layers[1].flops(64)
    assert rates.matmul_flops_per_s == ((64, flops / 4),)


def test_a_longer_product_that_seemed_slower_counts_as_the_mean():
    """It could be run in parts, so the clock must have changed: of the two the better one is no truer."""
    buffers = Buffers(torch.randn(4 * MIB), torch.empty(16 * MIB, dtype=torch.uint8))
    layers, order = usual_layers((256, 256)), (128, 64, 64, 128)
    for_tokens = {64: 1.0, 128: 4.0}
    seconds = iter([for_tokens[tokens] for tokens in order for _ in range(12)])
    rates = block_rates(layers, [64, 128], torch.float32, buffers, each_alone(lambda work, least_s: next(seconds)), 0.1)
    flops = sum(layer.flops(64) for layer in layers) / len(layers)
    assert [rate for _, rate in rates.matmul_flops_per_s] == pytest.approx([(flops + 2 * flops / 4) / 2] * 2)


def test_a_measurement_that_was_held_up_does_not_count():
    buffers = Buffers(torch.randn(MIB), torch.empty(16 * MIB, dtype=torch.uint8))
    layer = LinearShape("p", 64, 128)
    seconds = iter([1.0, 1.0, 40.0, 1.0, 1.4, 1.0])  # both measurements of the three passes
    rates = block_rates([layer], [64], torch.float32, buffers, each_alone(lambda work, least_s: next(seconds)), 0.1)
    assert rates.matmul_flops_per_s[0][1] == pytest.approx(6 * layer.flops(64) / (2 + 2.4 + 2))


def test_part_of_a_product_counts_for_the_whole():
    """Buffers that hold half of the features: the time of the half counts twice."""
    product = LinearShape("p", 2048, 8192)
    whole, half = (operand_bytes(product._replace(out_features=f), 64, torch.float32) for f in (8192, 4096))
    operands = torch.randn(half[0] // 4)
    buffers = Buffers(operands, torch.empty(half[1], dtype=torch.uint8))
    part = fitting(product, 64, torch.float32, buffers)
    assert part == product._replace(out_features=4096)
    assert whole[0] > half[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_calls_compute_the_passes_of_a_linear_layer(dtype: torch.dtype, adds: bool, transposed: bool):
    tokens, part = 8, LinearShape("p", 48, 32, adds, transposed)
    buffers = Buffers(torch.randn(4096).to(dtype), torch.full((16384,), 255, dtype=torch.uint8))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lengths = {"x": 8 * 48, "y": 8 * 32, "weight": 48 * 32}

    def matrix(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(48, 32).t() if transposed else weight.view(32, 48)

    start = {"forward": 512, "input gradient": 256, "weight gradient": 256}  # of the second operand, aligned to 256
    for name in PASSES:
        _work(part, tokens, name, dtype, buffers)()
        second = buffers.operands[start[name] :]
        if name == "forward":
            x, weight = buffers.operands[: lengths["x"]].view(8, 48), matrix(second[: lengths["weight"]])
            expected, result_dtype = x.double() @ weight.double().t(), dtype
        elif name == "input gradient":
            grad_y, weight = buffers.operands[: lengths["y"]].view(8, 32), matrix(second[: lengths["weight"]])
            expected, result_dtype = grad_y.double() @ weight.double(), dtype
        elif transposed:
            x, grad_y = buffers.operands[: lengths["x"]].view(8, 48), buffers.operands[512:][: lengths["y"]].view(8, 32)
            expected, result_dtype = x.double().t() @ grad_y.double(), wide
        else:
            grad_y, x = buffers.operands[: lengths["y"]].view(8, 32), second[: lengths["x"]].view(8, 48)
            expected, result_dtype = grad_y.double().t() @ x.double(), wide
        result = buffers.results[: expected.numel() * result_dtype.itemsize].view(result_dtype).view(expected.shape)
        torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradients_are_added_as_the_engine_adds_them(dtype: torch.dtype):
    """Two calls add up: an accumulator that was overwritten would hold the second product alone."""
    buffers = Buffers(torch.randn(24 * 16 + 24 * 8 + 512).to(dtype), torch.empty(4096, dtype=torch.uint8))
    work = _work(LinearShape("p", 8, 16), 24, "weight gradient", dtype, buffers)
    work()
    work()
    engines, grad_y, x = torch.zeros(16, 8), buffers.operands[: 24 * 16], buffers.operands[512:][: 24 * 8]
    for _ in range(2):
        accumulate_weight_grad(engines, grad_y.view(24, 16), x.view(24, 8), first=False)
    ours = buffers.results[: 16 * 8 * 4].view(torch.float32).view(16, 8)
    assert torch.equal(ours, engines)


def test_consecutive_calls_read_other_operands():
    buffers = Buffers(torch.randn(64 * 1024), torch.empty(64 * 1024, dtype=torch.uint8))
    work = _work(LinearShape("p", 64, 64), 64, "forward", torch.float32, buffers)
    results = []
    for _ in range(5):
        work()
        results.append(buffers.results[: 4 * 64 * 64].clone())
    assert torch.equal(results[0], results[4])  # OPERAND_SETS apart
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("length", [96, 700])
def test_plain_attention_counts_causal_pairs(length: int):
    calls = _plain_calls(length, 4, 16, CPU, torch.float32)
    assert calls.pairs == 4 * length * (length + 1) / 2
    assert calls.rates(lambda work, least_s: 2.0, 0.1) == (4 * 16 * calls.pairs / 2, 10 * 16 * calls.pairs / 2)
    calls.forward()
    calls.backward()


def test_plain_rates_have_a_point_per_length():
    rates = plain_rates((32, 64), 2, 16, CPU, torch.float64, cpu_timer, 0.001)
    assert [length for length, _ in rates.forward] == [length for length, _ in rates.backward] == [32, 64]


def test_copies_by_threads_leave_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    points = copy_curve(torch.empty(MIB, dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8), 0.001)
    assert torch.get_num_threads() == before
    assert [threads for threads, _ in points] == thread_counts(before)


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])], ids=str
)
def test_thread_counts_are_powers_of_two_and_all(most: int, counts: list[int]):
    assert thread_counts(most) == counts


@pytest.mark.parametrize(
    ("dtype", "states"),
    [
        (
            torch.bfloat16,
            ["float32", "bfloat16", "int8", "float32 stochastic", "bfloat16 stochastic", "int8 stochastic"],
        ),
        (torch.float32, ["float32", "bfloat16", "int8"]),
        (torch.float64, ["float64"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("slow", [False, True])
def test_adamw_rates_cover_the_state_dtypes(
    dtype: torch.dtype, states: list[str], slow: bool, monkeypatch: pytest.MonkeyPatch
):
    """Where all updates are slow at first, none is measured on more parameters, nor into second planes."""
    monkeypatch.setattr(measure_host, "SLOW_PARAMETERS_PER_S", inf if slow else 0.0)
    rates = adamw_rates(dtype, torch.empty(MIB, dtype=torch.uint8), 0.001, rounds=2)
    fast = [] if slow else states
    floats = [f"{state} into second planes" for state in fast if not state.startswith(("int8", "float64"))]
    assert [state for state, _ in rates] == [*states, *floats]
    assert all(rate > 0 for _, rate in rates)


def test_times_of_a_host_that_stands_still_now_and_then():
    """Each kind takes its own time, but for one in five times, when everything takes twice as long."""
    own = {"fast": 2.0, "slow": 3.0, "slower": 4.0}
    times = {
        name: [seconds * (2 if turn == place else 1) for turn in range(5)]
        for place, (name, seconds) in enumerate(own.items())
    }
    assert steady_seconds(times) == pytest.approx({name: 1.2 * seconds for name, seconds in own.items()})
    assert steady_seconds({"alone": [5.0]}) == {"alone": 5.0}


def test_adamw_of_the_probe_updates_random_gradients_that_fill_the_memory():
    memory = torch.full((MIB,), 0xFF, dtype=torch.uint8)  # NaN in every dtype
    work = adamw_work(torch.bfloat16, memory, (("float32", 2e9), ("bfloat16", 1e9)))
    planes = memory.view(torch.bfloat16)
    count = MIB // 10 // 64 * 64
    assert planes[: 3 * count].count_nonzero() == 0  # states and weight
    grad = planes[3 * count : 4 * count].clone()
    assert grad.std() > 0.5
    assert (work.state, work.parameters) == ("bfloat16", count)
    work.call()
    assert torch.isfinite(planes[: 5 * count].float()).all()
    assert torch.equal(planes[3 * count : 4 * count], grad)
    assert planes[:count].float().std() > 0.01  # exp_avg took a share of the gradient


def test_slow_adamw_works_on_a_small_piece():
    memory = torch.empty(8 * MIB, dtype=torch.uint8)
    adamw_work(torch.float32, memory, (("float32", 1e6),)).call()
    few = 4 * FIRST_PARAMETERS
    assert memory[:few].count_nonzero() > 0
    assert memory[4 * few :].count_nonzero() == 0


@pytest.mark.parametrize(
    ("caches", "expected"),
    [
        ([("0-15", "300M")] * 2, 300 * MIB),
        ([("0-7", "32768K\n"), ("0-7", "32768K"), ("8-15", "32768K")], 64 * MIB),
        ([("0", "1G")], 2**30),
        ([("0", "lots")], 512 * MIB),
        ([], 512 * MIB),
    ],
)
def test_working_memory_exceeds_the_last_caches(
    caches: list[tuple[str, str]], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for i, (cores, size) in enumerate(caches):
        folder = tmp_path / f"cpu{i}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size)
        (folder / "shared_cpu_list").write_text(cores)
    monkeypatch.setattr(measure_host, "CPUS", tmp_path)
    assert cache_bytes() == expected
    assert working_bytes(0, 2**40) > 6 * expected
    assert working_bytes(2**35, 2**36) == 2**35
    assert working_bytes(0, MIB) == MIB


def test_attention_is_measured_on_what_fits():
    assert fitting_rows(128, 2**30) == KERNEL_ROWS
    assert fitting_rows(256, 2**30) == KERNEL_ROWS // 2
    assert fitting_rows(256, 0) == 4 * 16384


def test_link_rates_come_from_the_largest_copies_and_latency_from_one_mib():
    latency_s, rates = 3e-6, dict(zip(CURVE_NAMES, (50e9, 40e9, 45e9, 35e9), strict=True))
    seconds = {name: [latency_s + size / rate for size in SIZES] for name, rate in rates.items()}
    links = _link_rates(SIZES, seconds)
    assert links.h2d_bytes_per_s == pytest.approx(50e9, rel=2e-3)
    assert links.d2h_duplex_bytes_per_s == pytest.approx(35e9, rel=2e-3)
    assert links.copy_latency_s == pytest.approx(latency_s, rel=0.01)
    assert [curve.name for curve in links.curves] == list(CURVE_NAMES)
    assert [size for size, _ in links.curves[0].points] == list(SIZES)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", KERNEL_NAMES)
@pytest.mark.parametrize("length", [512, 32768])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_of_attention_run(length: int, kernels: KernelName, head_dim: int):
    if not runs_on(kernels, torch.device("cuda")) or (kernels in PACKAGES and not installed(kernels)):
        pytest.skip(f"{kernels} is not installed, or not for this card")
    shape = shape_of(head_dim)
    calls = _kernel_calls(kernels, length, shape, torch.device("cuda"), torch.bfloat16)
    out, lse, *_ = calls.forward()
    assert torch.isfinite(out.float()).all()
    assert torch.isfinite(lse).all()
    assert all(torch.isfinite(grad.float()).all() for grad in calls.backward())
    tokens = max(length, 16384)
    assert calls.pairs == 262144 // tokens * tokens * (length + 1) / 2
    assert error_of(kernels, shape, torch.device("cuda"), torch.bfloat16) < 0.01


SHAPES = [AttentionShape(8, 64, 64, 128), AttentionShape(2, 256, 256, capped=True), AttentionShape(1, 192, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_of_every_shape_are_right(shape: AttentionShape):
    for name in KERNEL_NAMES:
        if runs_on(name, torch.device("cuda")) and serves(name, torch.bfloat16, shape, 512):
            assert error_of(name, shape, torch.device("cuda"), torch.bfloat16) < 0.01


def test_kernels_serve_by_shape_and_by_length():
    def names(shape: AttentionShape, length: int) -> list[KernelName]:
        return [name for name in KERNEL_NAMES if serves(name, torch.bfloat16, shape, length)]

    assert names(SHAPES[0], 512) == ["flash", "triton"]
    assert names(SHAPES[0], 128) == ["flash", "cudnn", "triton"]  # the window hides nothing
    assert names(SHAPES[1], 512) == names(SHAPES[2], 512) == ["triton"]


def test_the_fastest_kernels_are_found_for_every_length():
    shape = AttentionShape(4, 64, 64)
    flash = AttentionRates(((512, 4e12), (2048, 4e12)), ((512, 4e12), (2048, 4e12)), "flash")
    cudnn = AttentionRates(((512, 9e12),), ((512, 8e12),), "cudnn")
    own = AttentionRates(((512, 9e12), (2048, 5e12)), ((512, 6e12), (2048, 6e12)), "triton")
    choice = fastest_first(shape, [flash, cudnn, own])
    assert choice == AttentionChoice(shape, ((512, ("cudnn", "triton", "flash")), (2048, ("triton", "flash"))))
    assert choice.order(600) == ("cudnn", "triton", "flash")
    assert choice.order(1100) == choice.order(10**6) == ("triton", "flash")
    assert rates_of(choice, [flash, cudnn, own])[:2] == (((512, 9e12), (2048, 5e12)), ((512, 8e12), (2048, 6e12)))
    assert order_of((choice,), shape, 1) == ("cudnn", "triton", "flash")
    assert order_of((choice,), shape._replace(window=9), 512) == ()


def test_shapes_share_the_time():
    """A window of 64 at 512 tokens costs an eighth of the FLOPs, less half of what its first queries lack."""
    whole, window = AttentionShape(4, 64, 64), AttentionShape(4, 64, 64, 64)
    rates = [AttentionRates(((512, rate), (2048, 1.0)), ((512, rate), (2048, 1.0))) for rate in (4e12, 1e12)]
    share = window.style.mean_keys(512) / 256
    mixed = mixed_rates([(whole, 8, rates[0]), (window, 16, rates[1])])
    wanted = (1 + 2 * share) / (1 / 4e12 + 2 * share / 1e12)
    assert [mixed.forward[0], mixed.backward[0]] == [(512, pytest.approx(wanted))] * 2
    assert mixed.forward[1] == (2048, pytest.approx(1.0))


def test_mean_rate_is_geometric():
    assert AttentionRates(((1, 2.0), (2, 8.0)), ((1, 4.0), (2, 4.0))).mean == pytest.approx(16.0)
