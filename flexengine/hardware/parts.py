"""The parts of a hardware profile: what was measured of matrix products, attention, the link, the host, and memory.

A field has the name of its key in JSON files, but where that would repeat the part's; a wrong value is told by the key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from flexengine.hardware.curve import Points, check_points, check_positive, check_rate, interpolate
from flexengine.hardware.field_checks import (
    check_at_most,
    check_bytes,
    check_choice,
    check_count,
    check_named_rates,
    check_not_negative,
    check_part,
    check_shape,
    check_shares,
)
from flexengine.ops.attention.choice import KERNEL_NAMES, AttentionChoice, KernelName
from flexengine.wording import shown

PeerWay = Literal["copies", "nccl"]

DRIVE_FIELDS = tuple(f"drive_{way}_bytes_per_s" for way in ("read", "write", "read_beside", "write_beside"))
STOCHASTIC = " stochastic"
"""Ends the name of an update by the CPU whose bf16 masters are rounded stochastically; before it is the state dtype."""
INTO_SECOND = " into second planes"
"""Ends the name of an update by the CPU whose results go elsewhere than they were read, past the caches."""
ADAMW_BYTES = {"float32": 26, "bfloat16": 18, "int8": 14.0625}
ADAMW_BYTES |= {"float32 stochastic": 22, "bfloat16 stochastic": 14, "int8 stochastic": 10.0625}
"""Bytes that AdamW moves per parameter with bf16 gradients, by state dtype, and by masters: split, or bf16 that is
rounded stochastically. Memory bounds it; random bits do, where memory is fast."""
STOCHASTIC_BYTES_PER_S = 125e9
"""What AdamW with stochastic rounding moves at most where nobody has measured it: 16 threads of a server do
(bench/results/h200_cpu_adamw.json), where split masters move 176 GB/s. 1 to 16 threads there have 0.64 to 0.72 of the
rate of split masters."""
INTO_SECOND_SHARE = 0.87
"""Rate of an update into second planes where nobody has measured it, by that of the same one in place. It moves the
same bytes, but two threads of an AMD EPYC have 0.84 to 0.97 of the rate, least with float32 states
(bench/results/cpu_adamw_elsewhere.json)."""
UNMEASURED_ROWS, UNMEASURED_BLOCKS, UNMEASURED_SQUARES = ((1, 0.95),), ((1, 0.8),), ((1, 0.9),)
UNMEASURED_BLOCK_WEIGHTS = ((1, 0.89),)
"""Shares of the rate with one scale that are taken where nobody measured scales of rows and blocks: our estimate. An
H200's cuBLAS has 0.89 of it where one operand has squares, as weights have, and 0.72 where both have rows."""
MOST_SECONDS = 60.0
"""Of what passes before anything moves: real ones are microseconds, and planning with 1e300 would not end."""


class Part:
    """A frozen dataclass of values by key, checked one by one as it is made.

    KEYS: of fields whose key in JSON files has another name.
    """

    KEYS: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        for name, value in self.values().items():
            _check(name, value)

    def values(self) -> dict[str, Any]:
        """Its values by their keys."""
        return {key: getattr(self, name) for key, name in keys_of(type(self)).items()}


def keys_of(part: type[Part]) -> dict[str, str]:
    """The keys of a part in JSON files, and the names of its fields."""
    return {part.KEYS.get(own.name, own.name): own.name for own in fields(part)}  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class MatmulProfile(Part):
    """FLOP/s of matrix products."""

    KEYS: ClassVar[dict[str, str]] = {
        "flops_per_s": "matmul_flops_per_s",
        "fp8_flops_per_s": "fp8_matmul_flops_per_s",
        "shape": "matmul_shape",
        "peak_flops_per_s": "peak_matmul_flops_per_s",
    }

    flops_per_s: Points
    """(tokens, attained FLOP/s) of linear layers: forward, input and weight gradients together, weighted by time."""
    fp8_flops_per_s: Points
    """Rates of linear layers with operands that are FP8 already; empty if the device multiplies none."""
    shape: tuple[int, int]
    """(hidden_size, intermediate_size) of the model whose linear layers gave these curves."""
    peak_flops_per_s: float
    """Sustained rate of a large cube (8192^3 on a GPU) on random data: the unit that speeds are quoted in."""
    grouped_shares: Points = ()
    """(tokens, rate of the products of the model's experts over that of its linear layers), the traffic of sums of
    weights' gradients left out; empty where there are no experts, and in presets."""
    head_shares: Points = ()
    """(tokens, rate of the LM head's products over that of linear layers), where what its declared memory traffic takes
    by itself is left out: much of it hides under the products, so that a share may be above 1. Empty in presets."""
    sm_clock_mhz: float = 0.0
    """Clock of the GPU's multiprocessors while the cube was multiplied; 0 where the driver does not tell it."""
    fp8_row_shares: Points = ()
    fp8_block_shares: Points = ()
    """(tokens, rate of linear layers with FP8 operands scaled by rows, and by blocks, over that with one scale)."""
    fp8_block_weight_shares: Points = ()
    """That by blocks of the products by weights alone: forward and the gradient of x."""
    fp8_square_shares: Points = ()
    """That by blocks with activations per 128 x 128 in gradients of weights."""
    mxfp8_shares: Points = ()
    """(tokens, rate of linear layers with MXFP8 operands over that with FP8 operands with one scale); empty where the
    card takes none, and on the CPU, which multiplies all of these in float32."""
    nvfp4_shares: Points = ()
    """The same with NVFP4 operands, of products by weights alone."""

    def rate(self, tokens: int) -> float:
        """Give the attained FLOP/s of a linear layer over `tokens` tokens.

        It is linear in the logarithm of tokens between measured points, constant outside them.
        Raises: ValueError if tokens < 1.
        """
        return _rate("tokens", self.flops_per_s, tokens)

    def fp8_rate(self, tokens: int, scaling: str = "fp8", by_weights: bool = False) -> float:
        """Give `rate` with FP8 operands, scaled as this value of --matmul-dtype says, or that of products by weights
        alone. Raises: ValueError also if the device multiplies none."""
        if not self.fp8_flops_per_s:
            raise ValueError("the device multiplies no FP8 operands")
        shares = {"fp8": ((1, 1.0),), "fp8-rowwise-gw-hp": self.fp8_row_shares or UNMEASURED_ROWS}
        shares |= {name: own or ((1, 1.0),) for name, own in self.blackwell_shares.items()}
        blocks, measured = UNMEASURED_BLOCKS, self.fp8_block_shares
        if by_weights:
            blocks, measured = UNMEASURED_BLOCK_WEIGHTS, self.fp8_block_weight_shares or measured
        elif scaling.endswith("-gw-squares"):
            blocks, measured = UNMEASURED_SQUARES, self.fp8_square_shares or measured
        share = interpolate(shares.get(scaling, measured or blocks), tokens)
        return share * _rate("tokens", self.fp8_flops_per_s, tokens)

    @property
    def blackwell_shares(self) -> dict[str, Points]:
        """Shares of schemes that only Blackwell cards multiply, by the values of --matmul-dtype."""
        return {"mxfp8": self.mxfp8_shares, "nvfp4-gw-hp": self.nvfp4_shares}

    def grouped_share(self, tokens: int, otherwise: float) -> float:
        """Give the rate of experts' products over `tokens` tokens, as a share of a linear layer's.

        otherwise: where nothing was measured.
        """
        return interpolate(self.grouped_shares, tokens) if self.grouped_shares else otherwise

    def head_share(self, tokens: int) -> float:
        """Give the rate of the LM head's products in chunks of `tokens` tokens, as a share of a linear layer's; 1 where
        nothing was measured."""
        return interpolate(self.head_shares, tokens) if self.head_shares else 1.0


@dataclass(frozen=True)
class AttentionProfile(Part):
    """FLOP/s of causal attention, and by which kernels."""

    KEYS: ClassVar[dict[str, str]] = {
        "forward_flops_per_s": "attention_forward_flops_per_s",
        "backward_flops_per_s": "attention_backward_flops_per_s",
        "head_dim": "attention_head_dim",
        "kernels": "attention_kernels",
        "choices": "attention_choices",
        "slice_shares": "attention_slice_shares",
    }

    forward_flops_per_s: Points
    """(tokens of a sequence, FLOP/s) of the model's attention: all shapes that its blocks have together, weighted by
    time, each by its fastest kernels. It counts 2 * (H + V) FLOPs per head and visible pair, for keys of width H and
    values of width V."""
    backward_flops_per_s: Points
    """The same backward, counting 2 * (3 * H + 2 * V) FLOPs per head and visible pair: five products, not two."""
    head_dim: int
    """Width of the heads that gave these curves, because kernels do less per second on narrow heads."""
    kernels: KernelName
    """The library whose kernels are preferred on CUDA for shapes that were not measured."""
    choices: tuple[AttentionChoice, ...] = ()
    """Kernels for the shapes that were measured, fastest first, by tokens of a sequence; empty in presets."""
    slice_shares: Points = ()
    """(tokens of a slice, share): rate of both directions over a slice of a long sequence, which sees many earlier
    keys, over that of whole ones; empty where nobody measured: then 1."""

    def slice_share(self, tokens: int) -> float:
        """Give the rate over slices of `tokens` tokens as a share of that over whole sequences."""
        return interpolate(self.slice_shares, tokens) if self.slice_shares else 1.0

    def forward_rate(self, seq_len: int) -> float:
        """Give the attained FLOP/s over sequences of `seq_len` tokens, as `MatmulProfile.rate`."""
        return _rate("seq_len", self.forward_flops_per_s, seq_len)

    def backward_rate(self, seq_len: int) -> float:
        """The same backward."""
        return _rate("seq_len", self.backward_flops_per_s, seq_len)


@dataclass(frozen=True)
class LinkProfile(Part):
    """What copies between host and device attain, alone and beside others, and copies between devices."""

    h2d_bytes_per_s: float
    """Page-locked host to device, large copies, other direction idle."""
    d2h_bytes_per_s: float
    """Device to page-locked host, large copies, other direction idle."""
    h2d_duplex_bytes_per_s: float
    """Host to device while the other direction is busy."""
    d2h_duplex_bytes_per_s: float
    """Device to host while the other direction is busy."""
    h2d_beside_cpu_bytes_per_s: float
    """Host to device while the other direction is busy and AdamW on the CPU takes what it can of host memory."""
    d2h_beside_cpu_bytes_per_s: float
    """Device to host under the same conditions."""
    copy_latency_s: float
    """Fixed part of a copy over the link: a copy of n bytes takes copy_latency_s + n / rate."""
    h2d_only_beside_cpu_bytes_per_s: float = 0.0
    """As `h2d_beside_cpu_bytes_per_s` while the other direction is idle; 0 where it is not known: as that."""
    d2h_only_beside_cpu_bytes_per_s: float = 0.0
    """The same to the host."""
    cpu_share_beside_link: float = 0.0
    """Share of its speed that AdamW on the CPU keeps while both directions move those bytes; 0 where it is not known:
    then they take as much of host memory's rate as they move."""
    peer_bytes_per_s: float = 0.0
    """One way between GPUs of a machine, each sending to all others at once; 0 where it is not known."""
    peer_way: PeerWay = "copies"
    """What moves bytes between GPUs of a machine: they copy to each other, or NCCL does."""

    @property
    def only_beside_cpu_bytes_per_s(self) -> tuple[float, float]:
        """Bytes per second to the device and to the host beside AdamW on the CPU, the other direction idle."""
        h2d, d2h = self.h2d_only_beside_cpu_bytes_per_s, self.d2h_only_beside_cpu_bytes_per_s
        return h2d or self.h2d_beside_cpu_bytes_per_s, d2h or self.d2h_beside_cpu_bytes_per_s


ONLY_FIELDS = ("h2d_only_beside_cpu_bytes_per_s", "d2h_only_beside_cpu_bytes_per_s")
"""Rates of a direction of the link beside the CPU while the other is idle."""
ONE_RANK_FIELDS = (*ONLY_FIELDS, "cpu_share_beside_link")
"""Fields of the link that are measured of one rank alone."""


@dataclass(frozen=True)
class HostProfile(Part):
    """What the host attains: its memory, updates by its CPU, and the process that issues work."""

    KEYS: ClassVar[dict[str, str]] = {
        "bytes_per_s": "host_bytes_per_s",
        "adamw_parameters_per_s": "cpu_adamw_parameters_per_s",
    }

    bytes_per_s: float
    """Host memory traffic of a large copy by all threads, bytes read plus bytes written."""
    adamw_parameters_per_s: tuple[tuple[str, float], ...]
    """(name of an update as `Numerics.cpu_update` has it, perhaps with INTO_SECOND after it; parameters updated per
    second by all threads of the CPU)."""
    launch_s: float
    """Seconds from one small kernel to the next, issued back to back from Python."""
    issue_s: float
    """Host seconds to issue one command of the engine: bind views, wait, launch, record. 0 where it runs in place."""

    def adamw_rate(self, update: str) -> float:
        """Give parameters/s of such an update in place by the CPU; the slowest rate for one not measured."""
        rates = self._rates_in_place()
        return rates.get(update, min(rates.values()))

    def adamw_bytes_per_s(self, update: str) -> float:
        """Give bytes/s of host memory that AdamW on the CPU moves while nothing else uses it.

        update: as `Numerics.cpu_update` names it; a state dtype alone means split masters.
        """
        rates = self._rates_in_place()
        if update not in rates and update == f"int8{STOCHASTIC}":  # arithmetic bounds it, as with split masters
            return self.adamw_rate("int8") * ADAMW_BYTES[update]
        if update not in rates and update.endswith(STOCHASTIC):
            return min(self.adamw_bytes_per_s(update.removesuffix(STOCHASTIC)), STOCHASTIC_BYTES_PER_S)
        if update not in rates and update in ADAMW_BYTES:  # measured before there were such states
            split = {name: rate for name, rate in rates.items() if not name.endswith(STOCHASTIC)}
            return min(rate * ADAMW_BYTES.get(name, max(ADAMW_BYTES.values())) for name, rate in split.items())
        return self.adamw_rate(update) * ADAMW_BYTES.get(update, max(ADAMW_BYTES.values()))

    def adamw_into_second_bytes_per_s(self, update: str) -> float:
        """Give the same for an update into second planes."""
        measured = dict(self.adamw_parameters_per_s).get(update + INTO_SECOND)
        if measured is None or update not in ADAMW_BYTES:
            return INTO_SECOND_SHARE * self.adamw_bytes_per_s(update)
        return measured * ADAMW_BYTES[update]

    def _rates_in_place(self) -> dict[str, float]:
        return {name: rate for name, rate in self.adamw_parameters_per_s if not name.endswith(INTO_SECOND)}

    def faster(self, factor: float) -> tuple[tuple[str, float], ...]:
        """Rates of updates by the CPU, times a factor."""
        return tuple((name, rate * factor) for name, rate in self.adamw_parameters_per_s)


@dataclass(frozen=True)
class MemoryProfile(Part):
    """Sizes of both memories, and the rate of the device's."""

    KEYS: ClassVar[dict[str, str]] = {"bytes_per_s": "memory_bytes_per_s"}

    bytes_per_s: float
    """Device memory traffic of a large copy, bytes read plus bytes written."""
    gpu_total_bytes: int
    gpu_free_bytes: int
    """Bytes that the device can still give to this process, on top of its context: the largest possible arena."""
    gpu_context_bytes: int
    """Bytes that NVML shows for CUDA context, loaded kernels, libraries and cuBLAS workspace before any arena."""
    host_total_bytes: int
    """RAM, or the container's or process's limit where that is smaller."""
    host_available_bytes: int
    """Bytes that this process can still take on top of its resident set without swapping or breaking a limit."""
    host_base_bytes: int
    """Resident set of a process that has imported torch, initialised the device and loaded its kernels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most("gpu_free_bytes", self.gpu_free_bytes, "gpu_total_bytes", self.gpu_total_bytes)
        check_at_most("gpu_context_bytes", self.gpu_context_bytes, "gpu_total_bytes", self.gpu_total_bytes)
        check_at_most("host_available_bytes", self.host_available_bytes, "host_total_bytes", self.host_total_bytes)


# -- checks ------------------------------------------------------------------------------------------------------------

POINT_FIELDS = {
    "matmul_flops_per_s": "tokens",
    "fp8_matmul_flops_per_s": "tokens",
    "attention_forward_flops_per_s": "tokens of a sequence",
    "attention_backward_flops_per_s": "tokens of a sequence",
}
"""Keys of curves, which the planner reads, and the unit of their x."""
SHARE_FIELDS = (
    "grouped_shares",
    "head_shares",
    "fp8_row_shares",
    "fp8_block_shares",
    "fp8_block_weight_shares",
    "fp8_square_shares",
    "mxfp8_shares",
    "nvfp4_shares",
    "attention_slice_shares",
)
"""Curves by tokens that say how fast products are beside those of another curve."""
SECONDS_FIELDS = ("launch_s", "issue_s", "copy_latency_s")


def _check(name: str, value: Any) -> None:
    """Check the value of a key, by its name or by its unit."""
    if name == "fp8_matmul_flops_per_s" and value == ():
        return
    check = _CHECKS.get(name) or next((check for unit, check in _BY_UNIT.items() if name.endswith(unit)), None)
    if check is not None:
        check(name, value)
    if name in SECONDS_FIELDS and value > MOST_SECONDS:
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected at most {MOST_SECONDS:g} s")


def _rate(name: str, points: Points, x: int) -> float:
    if x < 1:
        raise ValueError(f"{name} is {x}, expected at least 1")
    return interpolate(points, x)


def _check_curve(name: str, value: Any) -> None:
    check_points(name, value, POINT_FIELDS[name], "FLOP/s")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    **dict.fromkeys(POINT_FIELDS, _check_curve),
    **dict.fromkeys(SHARE_FIELDS, check_shares),
    **dict.fromkeys(("issue_s", "peer_bytes_per_s", "sm_clock_mhz", *ONLY_FIELDS, *DRIVE_FIELDS), check_not_negative),
    "cpu_adamw_parameters_per_s": check_named_rates,
    "attention_head_dim": check_count,
    "attention_kernels": lambda name, value: check_choice(name, value, KERNEL_NAMES),
    "peer_way": lambda name, value: check_choice(name, value, get_args(PeerWay)),
    "matmul_shape": check_shape,
    "cpu_share_beside_link": check_part,
}
_BY_UNIT = {"_bytes": check_bytes, "_per_s": check_rate, "_s": check_positive}
