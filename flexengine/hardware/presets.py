"""Profiles of known cards, to plan for a machine that is not at hand.

Figures are published ones with their source beside them, turned into attained ones by the fractions below; the H200
is measured. A preset is a starting point: on the machine itself `probe.probe` replaces it.
"""

import re
from dataclasses import replace

from flexengine.hardware.profile import HardwareProfile

GIB = 2**30

# Attained over published dense bf16 rate (fp32 accumulation), sustained on random data.
# Hopper at 700 W is power capped: an H200 holds 670 of 989 TFLOP/s. A100 and GeForce cards stay near their rated clock,
# and GeForce data sheets quote a boost clock that good cooling exceeds.
HOPPER_MATMUL_SHARE = 0.68
AMPERE_MATMUL_SHARE = 0.85
GEFORCE_MATMUL_SHARE = 0.90
# FlashAttention-2, causal, head_dim 128, 2048 tokens: https://arxiv.org/abs/2307.08691, figures 5 and 6 (A100).
ATTENTION_FORWARD_SHARE = 0.58
ATTENTION_BACKWARD_SHARE = 0.48
MEMORY_SHARE = 0.90  # of the published bandwidth; an H200 copies at 4.24 of 4.8 TB/s
DUPLEX_SHARE = 0.92  # per direction with both busy; an H200 moves 50.8 of 55.4 GB/s

PCIE_4_BYTES_PER_S = 25e9  # x16, attained with page-locked memory; 31.5 GB/s raw
PCIE_5_BYTES_PER_S = 50e9  # x16; 63 GB/s raw; 55 on good boards

# Sizes of a CUDA process before it allocates: context, kernels and cuBLAS workspace; torch and CUDA libraries in RAM.
DATA_CENTRE_CONTEXT_BYTES = int(0.75 * GIB)
GEFORCE_CONTEXT_BYTES = int(0.5 * GIB)
PROCESS_HOST_BYTES = 3 * GIB

CURVE_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def matmul_curve(peak_flops_per_s: float, memory_bytes_per_s: float) -> tuple[tuple[int, float], ...]:
    """(tokens, FLOP/s) of a large bf16 linear layer: time = FLOPs at the peak rate + one read of the weight.

    With T tokens that is peak / (1 + peak / (T * memory rate)), as a weight costs 2*T FLOPs and 2 bytes per element.
    """
    return tuple(
        (tokens, peak_flops_per_s / (1 + peak_flops_per_s / (tokens * memory_bytes_per_s))) for tokens in CURVE_TOKENS
    )


def _published(
    name: str,
    *,
    bf16_flops_per_s: float,
    matmul_share: float,
    memory_bytes_per_s: float,
    link_bytes_per_s: float,
    host_bytes_per_s: float,
    gpu_total_bytes: int,
    gpu_context_bytes: int,
) -> HardwareProfile:
    """A preset from data-sheet peaks, with 128 GiB of RAM; see the shares atop this file."""
    peak = bf16_flops_per_s * matmul_share
    memory = memory_bytes_per_s * MEMORY_SHARE
    return HardwareProfile(
        name=name,
        device_type="cuda",
        source="preset",
        matmul_flops_per_s=matmul_curve(peak, memory),
        peak_matmul_flops_per_s=peak,
        attention_forward_flops_per_s=bf16_flops_per_s * ATTENTION_FORWARD_SHARE,
        attention_backward_flops_per_s=bf16_flops_per_s * ATTENTION_BACKWARD_SHARE,
        memory_bytes_per_s=memory,
        h2d_bytes_per_s=link_bytes_per_s,
        d2h_bytes_per_s=link_bytes_per_s,
        h2d_duplex_bytes_per_s=link_bytes_per_s * DUPLEX_SHARE,
        d2h_duplex_bytes_per_s=link_bytes_per_s * DUPLEX_SHARE,
        host_bytes_per_s=host_bytes_per_s,
        launch_s=4e-6,
        copy_latency_s=3e-6,
        gpu_total_bytes=gpu_total_bytes,
        gpu_free_bytes=gpu_total_bytes - gpu_context_bytes,
        gpu_context_bytes=gpu_context_bytes,
        host_total_bytes=128 * GIB,
        host_available_bytes=128 * GIB - PROCESS_HOST_BYTES,
        host_base_bytes=PROCESS_HOST_BYTES,
    )


# Measured on an H200 (SXM, 700 W, PCIe 5 x16, 16 vCPU): products of Llama-3.1-8B at 8192 tokens and more, a roofline
# below; FlashAttention-2 at 2048 tokens; 256 MiB copies; host copy by 16 threads.
_H200 = HardwareProfile(
    name="NVIDIA H200",
    device_type="cuda",
    source="preset",
    matmul_flops_per_s=(*matmul_curve(670e12, 4.24e12)[:5], (8192, 675e12), (16384, 669e12), (32768, 671e12)),
    peak_matmul_flops_per_s=670e12,
    attention_forward_flops_per_s=301e12,
    attention_backward_flops_per_s=248e12,
    memory_bytes_per_s=4.24e12,
    h2d_bytes_per_s=55.5e9,
    d2h_bytes_per_s=55.4e9,
    h2d_duplex_bytes_per_s=50.75e9,
    d2h_duplex_bytes_per_s=50.75e9,
    host_bytes_per_s=121e9,
    launch_s=4e-6,
    copy_latency_s=2.5e-6,  # 1 MiB moves at 49 GB/s where 256 MiB moves at 55.5
    gpu_total_bytes=int(139.8 * GIB),
    gpu_free_bytes=int(139.8 * GIB) - DATA_CENTRE_CONTEXT_BYTES,
    gpu_context_bytes=DATA_CENTRE_CONTEXT_BYTES,
    host_total_bytes=126 * GIB,
    host_available_bytes=126 * GIB - PROCESS_HOST_BYTES,
    host_base_bytes=PROCESS_HOST_BYTES,
)

# https://www.nvidia.com/en-us/data-center/h100/ (SXM): 989 TFLOP/s bf16 dense, 3.35 TB/s, PCIe 5.
# Attention as measured on the H200, which has the same compute units.
_H100_80 = replace(
    _published(
        "NVIDIA H100 80GB",
        bf16_flops_per_s=989e12,
        matmul_share=HOPPER_MATMUL_SHARE,
        memory_bytes_per_s=3.35e12,
        link_bytes_per_s=PCIE_5_BYTES_PER_S,
        host_bytes_per_s=120e9,
        gpu_total_bytes=int(79.1 * GIB),
        gpu_context_bytes=DATA_CENTRE_CONTEXT_BYTES,
    ),
    attention_forward_flops_per_s=301e12,
    attention_backward_flops_per_s=248e12,
)

# https://www.nvidia.com/en-us/data-center/a100/ (SXM): 312 TFLOP/s bf16 dense, 2039 GB/s, PCIe 4.
_A100_80 = _published(
    "NVIDIA A100 80GB",
    bf16_flops_per_s=312e12,
    matmul_share=AMPERE_MATMUL_SHARE,
    memory_bytes_per_s=2.039e12,
    link_bytes_per_s=PCIE_4_BYTES_PER_S,
    host_bytes_per_s=120e9,
    gpu_total_bytes=int(79.1 * GIB),
    gpu_context_bytes=DATA_CENTRE_CONTEXT_BYTES,
)

# NVIDIA GA102 architecture whitepaper, appendix A: 71 TFLOP/s bf16 dense with fp32 accumulation, 936 GB/s, PCIe 4.
_RTX_3090 = _published(
    "NVIDIA GeForce RTX 3090",
    bf16_flops_per_s=71e12,
    matmul_share=GEFORCE_MATMUL_SHARE,
    memory_bytes_per_s=936e9,
    link_bytes_per_s=PCIE_4_BYTES_PER_S,
    host_bytes_per_s=60e9,  # two channels of DDR5-5600: 89.6 GB/s raw
    gpu_total_bytes=int(23.6 * GIB),
    gpu_context_bytes=GEFORCE_CONTEXT_BYTES,
)

# NVIDIA Ada GPU architecture whitepaper, appendix A: 165.2 TFLOP/s bf16 dense with fp32 accumulation, 1008 GB/s,
# PCIe 4.
_RTX_4090 = _published(
    "NVIDIA GeForce RTX 4090",
    bf16_flops_per_s=165.2e12,
    matmul_share=GEFORCE_MATMUL_SHARE,
    memory_bytes_per_s=1008e9,
    link_bytes_per_s=PCIE_4_BYTES_PER_S,
    host_bytes_per_s=60e9,
    gpu_total_bytes=int(23.5 * GIB),
    gpu_context_bytes=GEFORCE_CONTEXT_BYTES,
)

# NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A: 209.5 TFLOP/s bf16 dense with fp32 accumulation,
# 1792 GB/s, PCIe 5.
_RTX_5090 = _published(
    "NVIDIA GeForce RTX 5090",
    bf16_flops_per_s=209.5e12,
    matmul_share=GEFORCE_MATMUL_SHARE,
    memory_bytes_per_s=1792e9,
    link_bytes_per_s=PCIE_5_BYTES_PER_S,
    host_bytes_per_s=75e9,  # two channels of DDR5-6400: 102 GB/s raw
    gpu_total_bytes=int(31.3 * GIB),
    gpu_context_bytes=GEFORCE_CONTEXT_BYTES,
)

# Round numbers, the same on every machine, so that tests of the planner are deterministic.
_CPU_TEST = HardwareProfile(
    name="cpu-test",
    device_type="cpu",
    source="synthetic",
    matmul_flops_per_s=((16, 25e9), (256, 50e9)),
    peak_matmul_flops_per_s=50e9,
    attention_forward_flops_per_s=20e9,
    attention_backward_flops_per_s=16e9,
    memory_bytes_per_s=20e9,
    h2d_bytes_per_s=10e9,
    d2h_bytes_per_s=10e9,
    h2d_duplex_bytes_per_s=8e9,
    d2h_duplex_bytes_per_s=8e9,
    host_bytes_per_s=20e9,
    launch_s=1e-6,
    copy_latency_s=1e-6,
    gpu_total_bytes=8 * GIB,
    gpu_free_bytes=8 * GIB,
    gpu_context_bytes=0,
    host_total_bytes=16 * GIB,
    host_available_bytes=15 * GIB,
    host_base_bytes=1 * GIB,
)

PRESETS: dict[str, HardwareProfile] = {
    "h200": _H200,
    "h100-80": _H100_80,
    "a100-80": _A100_80,
    "rtx-3090": _RTX_3090,
    "rtx-4090": _RTX_4090,
    "rtx-5090": _RTX_5090,
    "cpu-test": _CPU_TEST,
}


def preset(name: str) -> HardwareProfile:
    """The profile shipped under `name`; case, spaces and dashes do not matter ("RTX 4090", "rtx4090").

    Raises: ValueError listing the names.
    """
    wanted = _letters_and_digits(name)
    for known, profile in PRESETS.items():
        if _letters_and_digits(known) == wanted:
            return profile
    raise ValueError(f"no hardware preset is called {name!r}; there are {', '.join(PRESETS)}")


def with_memory(
    profile: HardwareProfile, gpu_total_bytes: int | None = None, host_total_bytes: int | None = None
) -> HardwareProfile:
    """`profile` on a machine with other memory sizes and nothing else running; None keeps a size.

    Free bytes become the new total less what context and process take. Raises: ValueError if less than those is given.
    """
    sizes: dict[str, int] = {}
    if gpu_total_bytes is not None:
        free_bytes = _remainder("gpu_total_bytes", gpu_total_bytes, "CUDA context", profile.gpu_context_bytes)
        sizes |= {"gpu_total_bytes": gpu_total_bytes, "gpu_free_bytes": free_bytes}
    if host_total_bytes is not None:
        free_bytes = _remainder("host_total_bytes", host_total_bytes, "process itself", profile.host_base_bytes)
        sizes |= {"host_total_bytes": host_total_bytes, "host_available_bytes": free_bytes}
    return replace(profile, **sizes)


def _remainder(name: str, total_bytes: int, taken_by: str, taken_bytes: int) -> int:
    if total_bytes < taken_bytes:
        raise ValueError(f"{name} is {total_bytes}, less than the {taken_bytes} bytes that the {taken_by} takes")
    return total_bytes - taken_bytes


def _letters_and_digits(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
