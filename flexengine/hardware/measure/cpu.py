"""Measures the CPU backend, where the "GPU" is an arena of ordinary memory and every link is a memory copy."""

import torch

from flexengine.hardware.curve import Curve
from flexengine.hardware.machine_rates import MachineRates
from flexengine.hardware.measure.attention import plain_rates
from flexengine.hardware.measure.gpu import Rates
from flexengine.hardware.measure.host import adamw_rates, copy_curve, host_copy_curve
from flexengine.hardware.measure.matmul import Buffers, affordable_tokens, block_rates, usual_layers
from flexengine.hardware.measure.timing import cpu_timer, each_alone
from flexengine.hardware.parts import AttentionProfile, HostProfile, LinkProfile, MatmulProfile
from flexengine.hardware.profile import ProbeShape
from flexengine.native import allocate_host

MIB = 2**20
TOKENS = (64, 128, 256, 512, 1024, 2048)
LENGTHS = (128, 512)
COPY_SIZES = (2**16, 2**18, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
OPERAND_BYTES, RESULT_BYTES = 64 * MIB, 32 * MIB
HEAD_DIM = 64
CALL_S = 0.02
LONGEST_BLOCK_S = 0.1  # token counts whose three passes through a block take longer are left out


def measure_cpu_machine(dtype: torch.dtype, scale: float = 1.0) -> MachineRates:
    """Measure what no model changes, in about half a second; `scale` stretches every measurement.

    Takes up to 256 MiB of memory and gives all of it back.
    """
    least_s = CALL_S * scale
    with torch.no_grad():
        peak = _cube_rate(dtype, 4 * least_s)
        copies, host_curve, adamw = _memory_rates(dtype, least_s)
        # Both arenas are ordinary memory: a launch is a call of torch, and the fixed part of a copy is one, too.
        counter, few = torch.zeros(1), torch.zeros(2, 64, dtype=torch.uint8)
        launch_s = cpu_timer(lambda: counter.add_(1), least_s / 4)
        copy_latency_s = cpu_timer(lambda: few[0].copy_(few[1]), least_s / 4)
    copy_rate = copies.points[-1][1]
    return MachineRates(
        # also beside the CPU, as commands run one after another
        LinkProfile(*[copy_rate] * 6, copy_latency_s=copy_latency_s),
        HostProfile(host_curve.points[-1][1], adamw, launch_s, issue_s=0.0),  # commands run as they are issued
        2 * copy_rate,
        peak,
        0.0,
        (copies, host_curve),
    )


def measure_cpu_model(dtype: torch.dtype, shape: ProbeShape, machine: MachineRates, scale: float = 1.0) -> Rates:
    """Measure a model's products and attention, in about half a second; `scale` stretches every measurement.

    machine: whose rates the result has, too. Heads are HEAD_DIM wide, whatever the model's.
    """
    least_s, peak, timer = CALL_S * scale, machine.peak_matmul_flops_per_s, each_alone(cpu_timer)
    with torch.no_grad():
        layers = usual_layers(shape[:2])
        counts = affordable_tokens(TOKENS, layers, peak, LONGEST_BLOCK_S * scale)
        block = block_rates(layers, counts, dtype, _buffers(dtype), timer, least_s / 10)
        fp8 = block  # the CPU multiplies what FP8 can hold in float32
        if dtype != torch.float32:
            fp8 = block_rates(layers, counts, torch.float32, _buffers(torch.float32), timer, least_s / 20)
        attention = plain_rates(LENGTHS, 4, HEAD_DIM, torch.device("cpu"), dtype, cpu_timer, least_s)
    return Rates(
        MatmulProfile(block.matmul_flops_per_s, fp8.matmul_flops_per_s, shape[:2], peak),
        AttentionProfile(attention.forward, attention.backward, HEAD_DIM, attention.kernels),
        machine.link,
        machine.host,
        machine.memory_bytes_per_s,
        (*block.curves, *machine.curves),
    )


def _cube_rate(dtype: torch.dtype, least_s: float) -> float:
    """Measure FLOP/s of 512^3 on random data."""
    a, b = (torch.randn(512, 512).to(dtype) for _ in range(2))
    return 2 * 512**3 / cpu_timer(lambda: torch.mm(a, b), least_s)


def _buffers(dtype: torch.dtype) -> Buffers:
    operands = torch.randn(OPERAND_BYTES // dtype.itemsize, dtype=dtype)
    return Buffers(operands, torch.empty(RESULT_BYTES, dtype=torch.uint8))


def _memory_rates(dtype: torch.dtype, least_s: float) -> tuple[Curve, Curve, tuple[tuple[str, float], ...]]:
    """Measure copies between the two arenas by size, host memory traffic by threads, and AdamW by state dtype."""
    with allocate_host(2 * COPY_SIZES[-1], page_locked=False) as memory:
        source, target = memory.tensor.chunk(2)
        points = []
        for size in COPY_SIZES:
            to, of = target[:size], source[:size]
            points.append((size, size / cpu_timer(lambda to=to, of=of: to.copy_(of), least_s / 4)))
        host_curve = host_copy_curve(copy_curve(target, source, least_s))
        adamw = adamw_rates(dtype, memory.tensor[: COPY_SIZES[-1]], least_s)
    return Curve("copy between arenas", "bytes", "bytes/s", tuple(points)), host_curve, adamw
