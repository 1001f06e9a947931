"""Measures a model's products on a GPU, in an order that keeps the card at its sustained clock.

Random data throughout: zeros draw less power and make a power-capped card look faster than it is in training.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import torch

from flexengine.hardware.curve import Curve, Points
from flexengine.hardware.machine_rates import MachineRates
from flexengine.hardware.measure.attention import (
    AttentionRates,
    errors_of,
    fastest_first,
    fitting_rows,
    kernel_rates,
    mixed_rates,
    plain_rates,
    rates_of,
    serves,
    shape_of,
    slice_shares,
)
from flexengine.hardware.measure.experts import grouped_shares
from flexengine.hardware.measure.head import head_shares
from flexengine.hardware.measure.machine import (
    MEMORY_SHARE,
    SUSTAINED_S,
    free_bytes,
    run_engine_kernels,
    square_product,
)
from flexengine.hardware.measure.matmul import (
    WHOLE_FEATURES,
    Buffers,
    affordable_tokens,
    block_rates,
    scaling_shares,
    usual_layers,
)
from flexengine.hardware.measure.timing import HEAT_S, Spent, Timer, cuda_timer, each_alone, timed_in_turn, warmed_timer
from flexengine.hardware.parts import AttentionProfile, HostProfile, LinkProfile, MatmulProfile, MemoryProfile
from flexengine.hardware.profile import DeviceType, HardwareProfile, ProbeShape
from flexengine.ops.attention.choice import KERNEL_NAMES, AttentionChoice
from flexengine.ops.attention.kernels import runs_on
from flexengine.ops.attention.style import AttentionShape
from flexengine.ops.compiling import begin_compiling, without_memory
from flexengine.ops.determinism import deterministic_kernels
from flexengine.ops.experts.shape import ExpertShape
from flexengine.ops.fp8 import SCALINGS
from flexengine.ops.fp8_scaling import FORWARD_DTYPE, multiplies_fp8
from flexengine.ops.linear_shape import HeadShape, LinearShape

MIB = 2**20
CUDA_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
FP8_TOKENS = (512, 2048, 8192, 32768)
FP8_SHARE_TOKENS = (2048, 8192)
FP8_MODES = ("fp8-rowwise-gw-hp", "fp8-blockwise", "fp8-blockwise-gw-squares", "mxfp8", "nvfp4-gw-hp")
"""Schemes whose rate is measured beside that of FP8 with one scale."""
FP8_PIECE = 16 * MIB  # elements
KERNEL_LENGTHS, PLAIN_LENGTHS = (512, 2048, 8192, 32768), (512, 2048)
ATTENTION_ERROR = 0.02  # relative, of kernels in 16 bits; a few thousandths are usual
PRODUCT_S = 0.04  # per pass and direction, of all layers together: six of them make a point of the curve
REHEAT_S = 0.4  # a driver lowers the clock a few tenths of a second after power is drawn again
PART_S, PARTS = 0.003, 2
"""Of experts, the head and attention: so long, so many times, each behind HEAT_S of large products, at whose clock a
power-capped card takes the steps of a large model. What draws less power raises it after some milliseconds, as does
attention in steps of long sequences, which is timed once and for longer."""
WARMING_SIZE = 4096
LONGEST_BLOCK_S = 0.5  # token counts whose three passes through a block take longer are left out
OPERAND_BYTES, RESULT_BYTES = 832 * MIB, 576 * MIB

logger = logging.getLogger(__name__)


class Rates(NamedTuple):
    """What is measured of a `HardwareProfile`."""

    matmul: MatmulProfile
    attention: AttentionProfile
    link: LinkProfile
    host: HostProfile
    memory_bytes_per_s: float
    curves: tuple[Curve, ...]

    def profile(self, name: str, device_type: DeviceType, *sizes: int) -> HardwareProfile:
        """The profile of a machine with these rates; sizes: those of `MemoryProfile`, in their order."""
        memory = MemoryProfile(self.memory_bytes_per_s, *sizes)
        parts = (self.matmul, self.attention, self.link, self.host, memory)
        return HardwareProfile(name, device_type, "measured", *parts, curves=self.curves)


class ProbeKernels:
    """The project's own kernels that a model's probe times, compiled in other processes from `begin` to `wait`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, shape: ProbeShape) -> None:
        self._asked = device, launch_all, shape, str(dtype).removeprefix("torch.")
        self._begun, self.began = ExitStack(), False
        self.wait: Callable[[], bool] = lambda: False
        """Waits until all are compiled; whether there was anything to wait for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._begun.close()

    def begin(self) -> None:
        """Begin, unless that was done. Order: behind what needs all of the host's cores."""
        if not self.began:
            self.began = True
            compilation = begin_compiling(*self._asked, free_bytes(self._asked[0]))
            if compilation is not None:
                self.wait = self._begun.enter_context(compilation).wait


def measure_model(
    device: torch.device, dtype: torch.dtype, shape: ProbeShape, machine: MachineRates, kernels: ProbeKernels,
    scale: float = 1.0,
) -> Rates:  # fmt: skip
    """Measure a model's products and attention; `scale` stretches what is timed, not what heats the card up.

    machine: whose rates the result has, too. kernels: of this model; where they have begun, the large product of the
    machine has just run, and the card is heated up for a moment, else as long as for that. Takes up to 1.6 GiB of GPU
    memory, and gives it back.
    Order: as `measure_machine`.
    """
    spent, memory_rate, warm = Spent(), machine.memory_bytes_per_s, kernels.began
    kernels.begin()
    with torch.cuda.device(device), torch.no_grad():
        with spent.part("heating up"):
            run_engine_kernels(device, dtype)
            use_side_streams(device)
            products = _products(device, dtype)
            timer = warmed_timer(products, PART_S, PARTS)
            cuda_timer(products, (REHEAT_S if warm else SUSTAINED_S) * scale)
        layers = shape.linears or usual_layers(shape[:2])
        counts = affordable_tokens(CUDA_TOKENS, layers, machine.peak_matmul_flops_per_s, LONGEST_BLOCK_S)
        product_s = PRODUCT_S * scale / len(layers)
        # at once, while the card is still at its sustained clock
        with spent.part("linear layers"):
            block = block_rates(layers, counts, dtype, _cuda_buffers(device, dtype), timed_in_turn, product_s)
        with spent.part("FP8"):
            fp8, *fp8_shares = _fp8_rates(layers, counts, device, product_s)
        with spent.part("kernels"):
            if kernels.wait():
                cuda_timer(products, SUSTAINED_S * scale)  # the card has waited, too
        parts_s = PARTS * PART_S * scale
        with spent.part("experts and head"):
            experts, head = _shares(shape, block.matmul_flops_per_s, memory_rate, dtype, device, timer, parts_s)
        with spent.part("attention"), deterministic_kernels(shape.deterministic):
            attention, choices, shares = _cuda_attention(shape, device, dtype, timer, parts_s)
    logger.info("measured the model's products in %s", spent.describe())
    own = machine.peak_matmul_flops_per_s, experts, head, machine.sm_clock_mhz
    return Rates(
        MatmulProfile(block.matmul_flops_per_s, fp8, shape[:2], *own, *fp8_shares),
        AttentionProfile(attention.forward, attention.backward, shape.head_dim, attention.kernels, choices, shares),
        machine.link,
        machine.host,
        memory_rate,
        (*block.curves, *machine.curves),
    )


def use_side_streams(device: torch.device) -> None:
    """Copy a little each way on streams of their own, as every engine does, for what the driver then takes."""
    host, on_gpu = torch.zeros(2, 64, dtype=torch.uint8).pin_memory(), torch.zeros(2, 64, device=device).byte()
    for target, source in ((on_gpu[0], host[0]), (host[1], on_gpu[1])):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)


def _cuda_buffers(device: torch.device, dtype: torch.dtype) -> Buffers:
    """Allocate operands and results for products, within a share of the free memory."""
    share = min(1.0, MEMORY_SHARE * free_bytes(device) / (OPERAND_BYTES + RESULT_BYTES))
    operands = torch.randn(int(share * OPERAND_BYTES) // dtype.itemsize, device=device, dtype=dtype)
    return Buffers(operands, torch.empty(int(share * RESULT_BYTES), device=device, dtype=torch.uint8))


def _fp8_rates(
    layers: Sequence[LinearShape], counts: list[int], device: torch.device, least_s: float
) -> tuple[Points, ...]:
    """Measure linear layers with FP8 operands, at sizes that FP8 can have, and shares of that rate with scales of rows,
    of blocks, of blocks without gradients of weights, of blocks with squares in these, and with operands of Blackwell
    cards; none on cards without FP8, in the order of the profile's fields.
    """
    if not multiplies_fp8(device):
        return (), (), (), (), (), (), ()
    counts = [tokens for tokens in FP8_TOKENS if tokens <= max(counts)] or list(FP8_TOKENS[:1])
    buffers = _in_fp8(_cuda_buffers(device, torch.bfloat16))
    whole = [
        layer._replace(in_features=_whole(layer.in_features), out_features=_whole(layer.out_features))
        for layer in layers
    ]
    rates = block_rates(whole, counts, FORWARD_DTYPE, buffers, timed_in_turn, least_s).matmul_flops_per_s
    few = [tokens for tokens in counts if tokens in FP8_SHARE_TOKENS] or counts[:1]
    rows, blocks, squares, mxfp8, nvfp4 = (
        ((), ()) if SCALINGS[mode].refusal(device) else _fp8_shares(whole, few, mode, buffers, least_s)
        for mode in FP8_MODES
    )
    return rates, rows[1], *blocks, squares[0], mxfp8[0], nvfp4[1]


def _fp8_shares(
    layers: Sequence[LinearShape], counts: list[int], matmul: str, buffers: Buffers, least_s: float
) -> tuple[Points, Points]:
    """Measure shares of the FP8 rate with other scales, as `scaling_shares` does; none, and why, where the card takes
    none."""
    try:
        return scaling_shares(layers, counts, matmul, buffers, each_alone(cuda_timer), least_s)
    except RuntimeError as error:
        logger.warning("%s is not measured: this card's libraries refuse it: %s", matmul, error)
        return (), ()


def _whole(features: int) -> int:
    """Round features down to a multiple that FP8 operands may have."""
    return max(WHOLE_FEATURES, features // WHOLE_FEATURES * WHOLE_FEATURES)


def _shares(
    shape: ProbeShape, matmul: Points, memory_rate: float, dtype: torch.dtype, device: torch.device, timer: Timer,
    least_s: float,
) -> tuple[Points, Points]:  # fmt: skip
    """Measure products of experts and of the head within a share of the free memory."""
    most_bytes = min(OPERAND_BYTES + RESULT_BYTES, int(MEMORY_SHARE * free_bytes(device)))
    limits = (matmul, memory_rate, dtype, device, most_bytes, timer, least_s)
    experts = grouped_shares(shape.experts, *limits) if shape.experts else ()
    return experts, head_shares(shape.head, *limits) if shape.head else ()


def _in_fp8(buffers: Buffers) -> Buffers:
    """Round operands to FP8 in place, piece by piece from the front.

    FP8 takes fewer bytes, so a piece overwrites only operands that were read before, and no second buffer is needed.
    """
    target, start = buffers.operands.view(torch.uint8), 0
    for piece in buffers.operands.split(FP8_PIECE):
        target[start : start + len(piece)] = piece.to(FORWARD_DTYPE).view(torch.uint8)
        start += len(piece)
    return Buffers(target[:start].view(FORWARD_DTYPE), buffers.results)


def launch_all(shape: Sequence[Any], dtype_name: str, num_bytes: int) -> None:
    """Call once, on tensors without memory, all that is timed of the project's own kernels.

    shape: a `ProbeShape`, as it is or out of JSON. num_bytes: what is free on the card that measures.
    """

    def called(work: Callable[[], object], least_s: float) -> float:
        work()
        return 1.0

    asked, dtype, device = ProbeShape(*shape), getattr(torch, dtype_name), torch.device("cpu")
    most_bytes = min(OPERAND_BYTES + RESULT_BYTES, int(MEMORY_SHARE * num_bytes))
    limits = (((CUDA_TOKENS[-1], 1.0),), 1.0, dtype, device, most_bytes, called, 0.0)
    with without_memory():
        if asked.experts:
            grouped_shares(tuple(ExpertShape(*each) for each in asked.experts), *limits)
        if asked.head:
            head_shares(HeadShape(*asked.head), *limits)
        for each in [AttentionShape(*each) for each, _ in asked.attention] or [shape_of(asked.head_dim)]:
            if serves("triton", dtype, each, KERNEL_LENGTHS[0]):
                rows = fitting_rows(each.head_dim, int(MEMORY_SHARE * num_bytes))
                kernel_rates("triton", KERNEL_LENGTHS, each, device, dtype, called, 0.0, rows)


def _cuda_attention(
    shape: ProbeShape, device: torch.device, dtype: torch.dtype, timer: Timer, least_s: float
) -> tuple[AttentionRates, tuple[AttentionChoice, ...], Points]:
    """Measure attention of all shapes of a model: their rates together, the fastest kernels for each, and
    `slice_shares` of the first without a window."""
    shapes = shape.attention or ((shape_of(shape.head_dim), 1),)
    parts, choices = [], []
    slices: Points = ()
    for each, heads in shapes:
        found = _attention_rates(each, device, dtype, timer, least_s)
        if found:
            choice = fastest_first(each, found)
            parts.append((each, heads, rates_of(choice, found)))
            choices.append(choice)
            if not slices and not each.window:
                fastest = next(rates for rates in found if rates.kernels == choice.orders[-1][1][0])
                slices = slice_shares(each, fastest, device, dtype, timer, least_s)
    if parts:
        return mixed_rates(parts), tuple(choices), slices
    return plain_rates(PLAIN_LENGTHS, 16, shape.head_dim, device, dtype, timer, least_s), (), ()


def _attention_rates(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, timer: Timer, least_s: float
) -> list[AttentionRates]:
    """Measure all kernels that give the right answer for a shape; none where heads, dtype or card have no kernels."""
    found: list[AttentionRates] = []
    rows = fitting_rows(shape.head_dim, int(MEMORY_SHARE * free_bytes(device)))
    for kernels in KERNEL_NAMES if device.type == "cuda" else ():
        if not runs_on(kernels, device) or not serves(kernels, dtype, shape, KERNEL_LENGTHS[0]):
            continue
        try:
            error = max(error(kernels, shape, device, dtype) for error in errors_of(kernels))
            if error > ATTENTION_ERROR:
                raise RuntimeError(f"its results are off by {error:.2g} of their norm, more than {ATTENTION_ERROR:g}")
            found.append(kernel_rates(kernels, KERNEL_LENGTHS, shape, device, dtype, timer, least_s, rows))
        except (RuntimeError, NotImplementedError) as error:  # an older card, or a package that this torch does not fit
            logger.info("attention by %s is left out: %s", kernels, error)
        torch.cuda.empty_cache()
    return found


def _products(device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Make a function that issues large matrix products of random data for about HEAT_S seconds."""
    size = WARMING_SIZE if dtype.itemsize <= 2 else WARMING_SIZE // 2  # 96 MiB at most
    multiply = square_product(size, device, dtype)
    calls = math.ceil(HEAT_S / cuda_timer(multiply, HEAT_S))

    def products() -> None:
        for _ in range(calls):
            multiply()

    return products
