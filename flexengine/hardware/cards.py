"""Published figures of cards that people own, each with its source, and the share of them that is attained.

Rates are dense bf16 with float32 accumulation, which on GeForce cards runs at half the rate of float16 accumulation;
those of cards before 2020, which multiply no bf16, are of float16 likewise.
Cards since 2022 (compute capability 8.9) multiply dense FP8 at twice that rate. Data sheets of Blackwell cards tell FP4
beside it, and no rate of MXFP8, which is taken to be that of FP8: on an RTX 5090 instructions for it ran twice as fast
(https://main-horse.github.io/posts/5090-mm-perf).

Shares of cards that were not at hand follow from products of 8192^3 that their owners measured, in TFLOP/s: "database"
is https://github.com/zzc0721/torch-performance-test-data (database.md), a number behind it an issue there. Such runs of
a second on a cold card are faster than hours at a power limit: the H100 does 784 to 789 there and holds 671 here.
"""

from typing import NamedTuple

from flexengine.hardware.curve import Points

GIB = 2**30

# Attained over published dense bf16 rate, sustained on random data.
HOPPER_SHARE = 0.68  # 700 W cap: an H200 holds 670 of 989 TFLOP/s
A100_SHARE = 0.85
GEFORCE_SHARE = 0.90  # data sheets quote a boost clock that good cooling reaches
GEFORCE_BLACKWELL_SHARE = 1.00  # the 5090 clocks well above the 2.41 GHz that its data sheet counts with
L40S_SHARE = 0.70  # full-rate tensor cores behind a limit of 350 W; database: 269 of 362
PRO_6000_SHARE = 0.83  # database: 418 of 504 (Workstation), 409 and 417 (Server, 162); 350 once (160)
A6000_SHARE = 0.72  # 300 W; database: 123 of 155, and 111 to 122 on an A40 with the same chip (185)
A10_SHARE = 0.50  # 150 W; an A10G of the same chip and 300 W: 67 of 125 (126)
L4_SHARE = 0.47  # 72 W; 59 of 121 (120)
B200_SHARE = 0.64  # database: 1696 of 2250, of which as much is taken to last as on the H100
GH200_SHARE = 0.70  # 829 of 989 (https://github.com/stas00/ml-engineering, compute/accelerator), likewise
SPARK_SHARE = 0.72  # 92 of 125 (https://github.com/huggingface/kernels/pull/283)
GEFORCE_AMPERE_SHARE = 1.00  # clocks above the data sheet's: 64 of 59.5 on an RTX 3080 (114)
T4_SHARE = 0.40  # 70 W; an estimate: 42 of 65 for a second on a cold card, and the L4 of 72 W keeps less for hours
V100_SHARE = 0.75  # an estimate, between what an A100 and an H100 keep
GEFORCE_TURING_SHARE = 0.90  # an estimate: as the next generations do
FP8_GAIN = 1.8  # attained FP8 over attained bf16 rate: products of a Llama-3.1-8B block on an H200 (bench.kernels)

PCIE_3_BYTES_PER_S = 12.5e9  # x16, attained with page-locked memory; 15.8 GB/s raw
PCIE_4_BYTES_PER_S = 25e9  # x16, attained with page-locked memory; 31.5 GB/s raw
PCIE_5_BYTES_PER_S = 50e9  # x16; 63 GB/s raw; 55 on good boards

# One way over NVLink between any two cards of a board, as their engines for copies attain it: 351 GB/s in gathers and
# 265 in exchanges of 256 MiB between two H100 (bench/results/h100x2_ranks_copies.json), and the same share of the data
# sheet's rate on older cards.
NVLINK_4_BYTES_PER_S = 300e9  # 900 GB/s both ways raw
NVLINK_3_BYTES_PER_S = 200e9  # 600 GB/s both ways raw


C2C_BYTES_PER_S, C2C_BACK_BYTES_PER_S = 346e9, 295e9
"""NVLink-C2C of a GH200, 450 GB/s each way raw: to the GPU by its copy engines, and 15% less from it
(https://github.com/NVIDIA/nvbandwidth/issues/23)."""
ONE_WAY_SHARE = 0.5
"""Per direction with both busy, where these share one rate: https://github.com/NVIDIA/nvbandwidth/issues/41."""
DUPLEX_SHARE = 0.92  # the same of PCIe; an H200 moves 50.8 of 55.4 GB/s


class Host(NamedTuple):
    """The usual host of a card: bytes per second of its memory that a copy attains, and cores."""

    bytes_per_s: float
    cores: int


SERVER = Host(120e9, 16)  # 16 cores of a current server
NOTEBOOK = Host(20e9, 4)  # a free machine on the web with a T4: an estimate
DDR4_DESKTOP = Host(40e9, 8)  # two channels of DDR4-3600: 57.6 GB/s raw
DDR5_DESKTOP = Host(60e9, 8)  # two channels of DDR5-5600: 89.6 GB/s raw
FAST_DDR5_DESKTOP = Host(75e9, 8)  # two channels of DDR5-6400: 102 GB/s raw
GRACE = Host(360e9, 72)  # 384 GB/s raw with 480 GB; copies to the GPU alone read 346
SPARK = Host(110e9, 20)  # a copy reads and writes the one memory, which attains 231 GB/s of 273

CODES_PER_CORE = {"int8": 0.33e9, "int8 stochastic": 0.28e9}
"""Parameters per second that a core updates with 8-bit states, whose decoding and encoding bound it, not memory: 15
threads on Xeon hosts of H100 and H200 attain 4.4 to 5.5 and 3.7 to 4.6 G/s (rates of `h200_plan_accuracy*.json` and
`h100_speeds.json`), a core of an AMD EPYC (Zen 4) 0.40 and 0.36 with AVX-512, 0.28 and 0.27 with AVX2."""

# What a CUDA process takes before it allocates: context, kernels and cuBLAS workspace.
DATA_CENTRE_CONTEXT_BYTES = int(0.75 * GIB)
GEFORCE_CONTEXT_BYTES = int(0.5 * GIB)

# FlashAttention-2 on an H200, causal, grouped queries 32/8, head_dim 128: (tokens of a sequence, FLOP/s).
FLASH_ATTENTION_FORWARD: Points = ((2048, 301e12), (8192, 336e12), (32768, 338e12))
FLASH_ATTENTION_BACKWARD: Points = ((2048, 248e12), (8192, 300e12), (32768, 321e12))
# The same through cuDNN 9.19.
HOPPER_ATTENTION_FORWARD: Points = ((2048, 488e12), (8192, 549e12), (32768, 569e12))
HOPPER_ATTENTION_BACKWARD: Points = ((2048, 387e12), (8192, 487e12), (32768, 530e12))


class Card(NamedTuple):
    """A card and the usual host around it.

    gpu_total_bytes: what CUDA reports, a little less than the label says. matmul_share: attained over published rate.
    hopper_attention: cuDNN's attention kernels for Hopper run on it. multiplies_fp8: compute capability 8.9 or more;
    multiplies_bf16: 8.0 or more. fp4_flops_per_s: published dense rate of Blackwell cards, which take MXFP8, too.
    peer_bytes_per_s: one way between cards of a board; 0 for cards that are joined by PCIe alone. back_bytes_per_s: of
    the link from the card to the host; 0 = as fast as to the card. duplex_share: of the link's rate per direction, with
    both busy. host_total_bytes: RAM that plans count with where --host-mem-gib says nothing.
    """

    name: str
    bf16_flops_per_s: float
    matmul_share: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host: Host
    gpu_total_bytes: int
    gpu_context_bytes: int
    source: str
    hopper_attention: bool = False
    multiplies_fp8: bool = False
    fp4_flops_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    back_bytes_per_s: float = 0.0
    duplex_share: float = DUPLEX_SHARE
    host_total_bytes: int = 128 * GIB
    multiplies_bf16: bool = True


def _v100(label_gb: int, total_gib: float) -> Card:
    return Card(
        f"NVIDIA V100 {label_gb}GB",
        125e12,
        V100_SHARE,
        900e9,
        PCIE_3_BYTES_PER_S,
        SERVER,
        int(total_gib * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf "
        "(SXM2, float16)",
        multiplies_bf16=False,
    )


CARDS: dict[str, Card] = {
    "h200": Card(
        "NVIDIA H200",
        989e12,
        HOPPER_SHARE,
        4.8e12,
        PCIE_5_BYTES_PER_S,
        SERVER,
        int(139.8 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/en-us/data-center/h200/ (SXM, 141 GB; rates measured)",
        hopper_attention=True,
        multiplies_fp8=True,
        peer_bytes_per_s=NVLINK_4_BYTES_PER_S,
    ),
    "h100-80": Card(
        "NVIDIA H100 80GB",
        989e12,
        HOPPER_SHARE,
        3.35e12,
        PCIE_5_BYTES_PER_S,
        SERVER,
        int(79.1 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/en-us/data-center/h100/ (SXM)",
        hopper_attention=True,
        multiplies_fp8=True,
        peer_bytes_per_s=NVLINK_4_BYTES_PER_S,
    ),
    "a100-80": Card(
        "NVIDIA A100 80GB",
        312e12,
        A100_SHARE,
        2.039e12,
        PCIE_4_BYTES_PER_S,
        SERVER,
        int(79.1 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf (SXM)",
        peer_bytes_per_s=NVLINK_3_BYTES_PER_S,
    ),
    "a100-40": Card(
        "NVIDIA A100 40GB",
        312e12,
        A100_SHARE,
        1.555e12,
        PCIE_4_BYTES_PER_S,
        SERVER,
        int(39.4 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf (SXM)",
        peer_bytes_per_s=NVLINK_3_BYTES_PER_S,
    ),
    "l40s": Card(
        "NVIDIA L40S",
        362e12,
        L40S_SHARE,
        864e9,
        PCIE_4_BYTES_PER_S,
        SERVER,
        int(44.4 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/en-us/data-center/l40s/",
        multiplies_fp8=True,
    ),
    "rtx-pro-6000": Card(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        503.8e12,  # an eighth of the published 4030 TFLOP/s of sparse FP4
        PRO_6000_SHARE,
        1792e9,
        PCIE_5_BYTES_PER_S,
        FAST_DDR5_DESKTOP,
        int(94.9 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/en-us/products/workstations/professional-desktop-gpus/rtx-pro-6000/ (600 W)",
        multiplies_fp8=True,
        fp4_flops_per_s=2015e12,  # half of the published sparse rate
    ),
    "rtx-5090": Card(
        "NVIDIA GeForce RTX 5090",
        209.5e12,
        GEFORCE_BLACKWELL_SHARE,
        1792e9,
        PCIE_5_BYTES_PER_S,
        FAST_DDR5_DESKTOP,
        int(31.3 * GIB),
        GEFORCE_CONTEXT_BYTES,
        "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf "
        "(appendix A)",
        multiplies_fp8=True,
        fp4_flops_per_s=1676e12,
    ),
    "rtx-4090": Card(
        "NVIDIA GeForce RTX 4090",
        165.2e12,
        GEFORCE_SHARE,
        1008e9,
        PCIE_4_BYTES_PER_S,
        DDR5_DESKTOP,
        int(23.5 * GIB),
        GEFORCE_CONTEXT_BYTES,
        "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf (appendix A)",
        multiplies_fp8=True,
    ),
    "rtx-3090": Card(
        "NVIDIA GeForce RTX 3090",
        71e12,
        GEFORCE_SHARE,
        936e9,
        PCIE_4_BYTES_PER_S,
        DDR4_DESKTOP,
        int(23.6 * GIB),
        GEFORCE_CONTEXT_BYTES,
        "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf (appendix A)",
    ),
    "rtx-3080": Card(
        "NVIDIA GeForce RTX 3080",
        59.5e12,
        GEFORCE_AMPERE_SHARE,
        760e9,
        PCIE_4_BYTES_PER_S,
        DDR4_DESKTOP,
        int(9.7 * GIB),
        GEFORCE_CONTEXT_BYTES,
        "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf "
        "(appendix A, 10 GB)",
    ),
    "rtx-3060": Card(
        "NVIDIA GeForce RTX 3060",
        25.5e12,  # 28 multiprocessors of 512 FLOP a cycle at 1.777 GHz
        GEFORCE_AMPERE_SHARE,
        360e9,
        PCIE_4_BYTES_PER_S,
        DDR4_DESKTOP,
        int(11.6 * GIB),
        GEFORCE_CONTEXT_BYTES,
        "https://www.nvidia.com/en-us/geforce/graphics-cards/30-series/rtx-3060-3060ti/ (12 GB)",
    ),
    "rtx-a6000": Card(
        "NVIDIA RTX A6000",
        154.8e12,
        A6000_SHARE,
        768e9,
        PCIE_4_BYTES_PER_S,
        SERVER,
        int(47.4 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf (appendix C)",
    ),
    "a10": Card(
        "NVIDIA A10",
        125e12,
        A10_SHARE,
        600e9,
        PCIE_4_BYTES_PER_S,
        SERVER,
        int(22.1 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf",
    ),
    "l4": Card(
        "NVIDIA L4",
        121e12,
        L4_SHARE,
        300e9,
        PCIE_4_BYTES_PER_S,
        SERVER,
        int(22.0 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/en-us/data-center/l4/",
        multiplies_fp8=True,
    ),
    "b200": Card(
        "NVIDIA B200",
        2250e12,
        B200_SHARE,
        8e12,
        PCIE_5_BYTES_PER_S,
        SERVER,
        int(178.3 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/en-us/data-center/dgx-b200/ (an eighth, 180 GB)",
        multiplies_fp8=True,
        fp4_flops_per_s=9000e12,  # half of the published sparse rate
        peer_bytes_per_s=2 * NVLINK_4_BYTES_PER_S,
    ),
    "gh200": Card(
        "NVIDIA GH200",
        989e12,
        GH200_SHARE,
        4.0e12,
        C2C_BYTES_PER_S,
        GRACE,
        int(95.0 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/ (96 GB of HBM3, 480 GB of LPDDR5X)",
        hopper_attention=True,
        multiplies_fp8=True,
        back_bytes_per_s=C2C_BACK_BYTES_PER_S,
        duplex_share=ONE_WAY_SHARE,
        host_total_bytes=446 * GIB,
    ),
    "t4": Card(
        "NVIDIA T4",
        65e12,
        T4_SHARE,
        320e9,
        PCIE_3_BYTES_PER_S,
        NOTEBOOK,
        int(14.7 * GIB),
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/en-us/data-center/tesla-t4/ (float16, 70 W)",
        host_total_bytes=29 * GIB,
        multiplies_bf16=False,
    ),
    "v100-16": _v100(16, 15.7),
    "v100-32": _v100(32, 31.7),
    "rtx-2080-ti": Card(
        "NVIDIA GeForce RTX 2080 Ti",
        53.8e12,
        GEFORCE_TURING_SHARE,
        616e9,
        PCIE_3_BYTES_PER_S,
        DDR4_DESKTOP,
        int(10.7 * GIB),
        GEFORCE_CONTEXT_BYTES,
        "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
        "NVIDIA-Turing-Architecture-Whitepaper.pdf (float16, appendix A)",
        multiplies_bf16=False,
    ),
    "dgx-spark": Card(
        "NVIDIA DGX Spark",
        125e12,  # an eighth of the published 1 PFLOP/s of sparse FP4
        SPARK_SHARE,
        273e9,
        100e9,  # an estimate: a copy reads and writes the one memory
        SPARK,
        60 * GIB,  # half of the one memory of 121 GiB, and the other half is the host's
        DATA_CENTRE_CONTEXT_BYTES,
        "https://www.nvidia.com/en-us/products/workstations/dgx-spark/ (GB10, 128 GB for CPU and GPU together)",
        multiplies_fp8=True,
        fp4_flops_per_s=500e12,  # half of the published sparse rate
        duplex_share=ONE_WAY_SHARE,
        host_total_bytes=60 * GIB,
    ),
}
