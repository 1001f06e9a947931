"""Profiles of known cards, to plan for a machine that is not at hand.

The shares below turn the published figures of `cards.py` into attained ones; the H200 is measured. A preset is a
starting point: on the machine itself `probe.probe` replaces it.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from flexengine.hardware.cards import (
    CARDS,
    CODES_PER_CORE,
    FLASH_ATTENTION_BACKWARD,
    FLASH_ATTENTION_FORWARD,
    FP8_GAIN,
    HOPPER_ATTENTION_BACKWARD,
    HOPPER_ATTENTION_FORWARD,
    Card,
    Host,
)
from flexengine.hardware.curve import Points
from flexengine.hardware.parts import (
    ADAMW_BYTES,
    AttentionProfile,
    HostProfile,
    LinkProfile,
    MatmulProfile,
    MemoryProfile,
)
from flexengine.hardware.profile import HardwareProfile, ProbeShape, read_profile
from flexengine.wording import did_you_mean

GIB = 2**30

# Shares of the attained matmul rate, at 2048 tokens. FlashAttention-2, causal, head_dim 128 on an A100 does 58% and 48%
# of the published rate, of which products attain 85%: https://arxiv.org/abs/2307.08691, figures 5 and 6.
ATTENTION_FORWARD_SHARE, ATTENTION_BACKWARD_SHARE = 0.58 / 0.85, 0.48 / 0.85
MEMORY_SHARE = 0.90  # of the published bandwidth; an H200 copies at 4.24 of 4.8 TB/s
# Shares of the link's rate beside AdamW on the CPU, which takes most of host memory's rate: the host of an H200 moves
# 22 and 31 of 55 GB/s then.
H2D_BESIDE_CPU_SHARE, D2H_BESIDE_CPU_SHARE = 0.40, 0.56
TRITON_BLOCKS = ((1, 0.6),)
# Share of the FP8 rate with scales for blocks where Triton multiplies, as cuBLAS does on Hopper alone: not measured.
LAUNCH_S, ISSUE_S, COPY_LATENCY_S = 4e-6, 30e-6, 3e-6

PROCESS_HOST_BYTES = 3 * GIB  # torch and CUDA libraries in RAM

CURVE_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SHAPE = ProbeShape(4096, 14336)


def matmul_curve(peak_flops_per_s: float, memory_bytes_per_s: float) -> Points:
    """Estimate (tokens, FLOP/s) of a large bf16 linear layer: time = FLOPs at the peak rate + one read of the weight.

    With T tokens that gives a rate of peak / (1 + peak / (T * memory rate)), as a weight costs 2*T FLOPs and 2 bytes
    per element.
    """
    return tuple(
        (tokens, peak_flops_per_s / (1 + peak_flops_per_s / (tokens * memory_bytes_per_s))) for tokens in CURVE_TOKENS
    )


def fp8_matmul_curve(peak_flops_per_s: float, memory_bytes_per_s: float) -> Points:
    """Estimate the curve of `matmul_curve` with FP8 operands, from a bf16 peak; weights have half the bytes."""
    return matmul_curve(FP8_GAIN * peak_flops_per_s, 2 * memory_bytes_per_s)


def _fp4_shares(card: Card, peak_flops_per_s: float, memory_bytes_per_s: float) -> Points:
    """Estimate rates with FP4 operands over those with FP8: by the published peaks, and weights have a quarter of the
    bytes of bf16."""
    fp4_peak = FP8_GAIN * peak_flops_per_s * card.fp4_flops_per_s / (2 * card.bf16_flops_per_s)
    fours, eights = (
        matmul_curve(fp4_peak, 4 * memory_bytes_per_s),
        fp8_matmul_curve(peak_flops_per_s, memory_bytes_per_s),
    )
    return tuple((tokens, four / eight) for (tokens, four), (_, eight) in zip(fours, eights, strict=True))


def attention_curve(flops_per_s: float, like: Points) -> Points:
    """Make a curve that starts at `flops_per_s` and rises with the length of sequences as `like` does."""
    return tuple((length, flops_per_s * rate / like[0][1]) for length, rate in like)


def _published(card: Card) -> HardwareProfile:
    """Make a preset from data-sheet peaks."""
    peak = card.bf16_flops_per_s * card.matmul_share
    memory = card.memory_bytes_per_s * MEMORY_SHARE
    forward = attention_curve(peak * ATTENTION_FORWARD_SHARE, FLASH_ATTENTION_FORWARD)
    backward = attention_curve(peak * ATTENTION_BACKWARD_SHARE, FLASH_ATTENTION_BACKWARD)
    if card.hopper_attention:
        forward, backward = HOPPER_ATTENTION_FORWARD, HOPPER_ATTENTION_BACKWARD
    link, back = card.link_bytes_per_s, card.back_bytes_per_s or card.link_bytes_per_s
    context, base, duplex = card.gpu_context_bytes, PROCESS_HOST_BYTES, card.duplex_share
    return HardwareProfile(
        card.name,
        "cuda",
        "preset",
        MatmulProfile(
            flops_per_s=matmul_curve(peak, memory),
            fp8_flops_per_s=fp8_matmul_curve(peak, memory) if card.multiplies_fp8 else (),
            shape=SHAPE[:2],
            peak_flops_per_s=peak,
            fp8_block_shares=TRITON_BLOCKS if card.multiplies_fp8 and not card.hopper_attention else (),
            mxfp8_shares=((1, 1.0),) if card.fp4_flops_per_s else (),
            nvfp4_shares=_fp4_shares(card, peak, memory) if card.fp4_flops_per_s else (),
        ),
        AttentionProfile(forward, backward, SHAPE.head_dim, "cudnn" if card.hopper_attention else "flash"),
        LinkProfile(
            *(link, back, link * duplex, back * duplex, link * H2D_BESIDE_CPU_SHARE, back * D2H_BESIDE_CPU_SHARE),
            copy_latency_s=COPY_LATENCY_S,
            peer_bytes_per_s=card.peer_bytes_per_s,
        ),
        HostProfile(card.host.bytes_per_s, _adamw_rates(card.host), LAUNCH_S, ISSUE_S),
        MemoryProfile(
            memory,
            card.gpu_total_bytes, card.gpu_total_bytes - context, context,
            card.host_total_bytes, card.host_total_bytes - base, base,
        ),
    )  # fmt: skip


def _adamw_rates(host: Host) -> tuple[tuple[str, float], ...]:
    """Give rates of updates by all cores but one: what memory allows, with 8-bit states what arithmetic does.

    Those of stochastic masters follow from split ones where memory bounds both.
    """
    rates = {name: host.bytes_per_s / ADAMW_BYTES[name] for name in ("float32", "bfloat16", *CODES_PER_CORE)}
    codes = {name: min(rates[name], (host.cores - 1) * rate) for name, rate in CODES_PER_CORE.items()}
    return tuple((rates | codes).items())


def _h200() -> HardwareProfile:
    """Make the preset of the H200 from rates measured on one (SXM, 700 W, PCIe 5 x16, 16 vCPU).

    Measured are products of Llama-3.1-8B at 8192 tokens and more (fewer follow a roofline), attention through cuDNN,
    256 MiB copies, and a host copy by 16 threads.
    """
    return _published(CARDS["h200"]).changed(
        matmul_flops_per_s=(*matmul_curve(670e12, 4.24e12)[:5], (8192, 675e12), (16384, 669e12), (32768, 671e12)),
        fp8_matmul_flops_per_s=fp8_matmul_curve(670e12, 4.24e12),
        peak_matmul_flops_per_s=670e12,
        memory_bytes_per_s=4.24e12,
        h2d_bytes_per_s=55.5e9,
        d2h_bytes_per_s=55.4e9,
        h2d_duplex_bytes_per_s=50.75e9,
        d2h_duplex_bytes_per_s=50.75e9,
        h2d_beside_cpu_bytes_per_s=22e9,
        d2h_beside_cpu_bytes_per_s=31e9,
        host_bytes_per_s=121e9,
        copy_latency_s=2.5e-6,  # 1 MiB moves at 49 GB/s where 256 MiB moves at 55.5
        host_total_bytes=126 * GIB,
        host_available_bytes=126 * GIB - PROCESS_HOST_BYTES,
    )


# Round numbers, the same on every machine, so that tests of the planner are deterministic.
_CPU_TEST = HardwareProfile(
    "cpu-test",
    "cpu",
    "synthetic",
    MatmulProfile(((16, 25e9), (256, 50e9)), ((16, 25e9), (256, 50e9)), (256, 256), 50e9),
    AttentionProfile(((256, 20e9),), ((256, 16e9),), 64, "flash"),
    LinkProfile(10e9, 10e9, 8e9, 8e9, 10e9, 10e9, copy_latency_s=1e-6),
    HostProfile(20e9, (("float32", 0.5e9), ("bfloat16", 0.5e9)), launch_s=1e-6, issue_s=0.0),
    MemoryProfile(20e9, 8 * GIB, 8 * GIB, 0, 16 * GIB, 15 * GIB, 1 * GIB),
)

PRESETS: dict[str, HardwareProfile] = {
    **{name: _published(card) for name, card in CARDS.items()},
    "h200": _h200(),
    "cpu-test": _CPU_TEST,
}


def named_profile(name: str | Path) -> HardwareProfile:
    """Find the profile that a person names: a JSON file of one, or a preset. Raises: ValueError."""
    path = Path(name)
    return read_profile(path) if path.suffix == ".json" else preset(str(name))


def preset(name: str) -> HardwareProfile:
    """Give the profile shipped under `name`, as people write it: "RTX 4090", "rtx4090", "NVIDIA A100 80GB".

    A name without its size, such as "H100", will do if one size is known. Raises: ValueError listing the names, or
    those that are meant by an ambiguous one.
    """
    return PRESETS[preset_name(name)]


def preset_name(name: str) -> str:
    """Find the key of PRESETS that `name` means. Raises: ValueError, as `preset`."""
    wanted = _letters_and_digits(name)
    for known in PRESETS:
        if _letters_and_digits(known) == wanted:
            return known
    meant = [known for known in PRESETS if wanted in _beginnings(known)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise ValueError(f"hardware preset {name!r} may mean {' or '.join(meant)}; name one of them")
    meant_text = did_you_mean(name, PRESETS)
    raise ValueError(f"no hardware preset is called {name!r}{meant_text}; there are {', '.join(PRESETS)}")


def preset_source(name: str) -> str:
    """Tell where the figures of a preset were published. Raises: ValueError, as `preset`."""
    known = preset_name(name)
    return CARDS[known].source if known in CARDS else "made up for tests"


def lacks_bfloat16(profile: HardwareProfile) -> bool:
    """Whether a preset is of a card that multiplies no bfloat16."""
    return any(card.name == profile.name and not card.multiplies_bf16 for card in CARDS.values())


def with_memory(
    profile: HardwareProfile, gpu_total_bytes: int | None = None, host_total_bytes: int | None = None
) -> HardwareProfile:
    """Put `profile` on a machine with other memory sizes and nothing else running; None keeps a size.

    Free bytes become the new total less what context and process take. Raises: ValueError if the total is less.
    """
    sizes: dict[str, int] = {}
    if gpu_total_bytes is not None:
        free_bytes = _remainder("gpu_total_bytes", gpu_total_bytes, "CUDA context", profile.memory.gpu_context_bytes)
        sizes |= {"gpu_total_bytes": gpu_total_bytes, "gpu_free_bytes": free_bytes}
    if host_total_bytes is not None:
        free_bytes = _remainder("host_total_bytes", host_total_bytes, "process itself", profile.memory.host_base_bytes)
        sizes |= {"host_total_bytes": host_total_bytes, "host_available_bytes": free_bytes}
    return profile.changed(**sizes)


def _remainder(name: str, total_bytes: int, taken_by: str, taken_bytes: int) -> int:
    if total_bytes < taken_bytes:
        raise ValueError(f"{name} is {total_bytes}, less than the {taken_bytes} bytes that the {taken_by} takes")
    return total_bytes - taken_bytes


def _letters_and_digits(name: str) -> str:
    """Strip a name of maker, family, unit and punctuation."""
    return re.sub(r"nvidia|geforce|gi?b$|[^a-z0-9]", "", name.lower())


def _beginnings(known: str) -> Iterable[str]:
    """List the first word of a preset's name, the first two, and so on, joined."""
    words = known.split("-")
    return ["".join(words[:count]) for count in range(1, len(words))]
