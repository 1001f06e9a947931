"""The hardware profile: what one machine attains, as numbers. The planner knows nothing else about hardware.

This module is plain Python, so that plans can be made anywhere. `probe.py` measures a profile, `presets.py` ships a
few.
"""

import json
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flexengine.hardware.curve import (
    MAX_WHOLE,
    Curve,
    Points,
    as_points,
    check_points,
    check_positive,
    check_rate,
    interpolate,
    is_finite,
    is_whole,
)
from flexengine.ops.attention.choice import KERNEL_NAMES, AttentionChoice, KernelName
from flexengine.ops.attention.style import AttentionShape
from flexengine.ops.experts.shape import ExpertShape
from flexengine.ops.linear_shape import HeadShape, LinearShape
from flexengine.wording import parse_json, shown

DeviceType = Literal["cuda", "cpu"]
ProfileSource = Literal["measured", "preset", "synthetic"]
PeerWay = Literal["copies", "nccl"]

ONLY_FIELDS = ("h2d_only_beside_cpu_bytes_per_s", "d2h_only_beside_cpu_bytes_per_s")
"""Rates of a direction of the link beside the CPU while the other is idle."""
ONE_RANK_FIELDS = (*ONLY_FIELDS, "cpu_share_beside_link")
"""Fields of the link that are measured of one rank alone."""
_LATER_FIELDS = {"peer_bytes_per_s", "peer_way", "measured_ranks", "grouped_shares", "head_shares", *ONE_RANK_FIELDS}
"""Fields that a file may lack, as those of earlier versions do."""
FORMAT = 6
"""Version of the JSON form; raised when fields appear or change their meaning."""
LEAST_LOSS = 0.01
"""Of its speed that the CPU is taken to lose beside copies, where it measured less."""
STOCHASTIC = " stochastic"
"""Ends the name of an update by the CPU whose bf16 masters are rounded stochastically; before it is the state dtype."""
INTO_SECOND = " into second planes"
"""Ends the name of an update by the CPU whose results go elsewhere than they were read, past the caches."""
ADAMW_BYTES = {
    "float32": 26,
    "bfloat16": 18,
    "int8": 14.0625,
    "float32 stochastic": 22,
    "bfloat16 stochastic": 14,
    "int8 stochastic": 10.0625,
}
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
POINT_FIELDS = {
    "matmul_flops_per_s": "tokens",
    "fp8_matmul_flops_per_s": "tokens",
    "attention_forward_flops_per_s": "tokens of a sequence",
    "attention_backward_flops_per_s": "tokens of a sequence",
}
"""Fields that are curves, which the planner reads, and the unit of their x."""
SHARE_FIELDS = ("grouped_shares", "head_shares")
"""Curves by tokens that say how fast other products are than linear layers."""
SECONDS_FIELDS = ("launch_s", "issue_s", "copy_latency_s")
MOST_SECONDS = 60.0
"""Of what passes before anything moves: real ones are microseconds, and planning with 1e300 would not end."""


class ProbeShape(NamedTuple):
    """Sizes of the transformer block that a machine is measured with."""

    hidden_size: int
    intermediate_size: int
    head_dim: int = 128
    attention: tuple[tuple[AttentionShape, int], ...] = ()
    """Shapes of the model's attention with the query heads that all its blocks have of each; none: one of `head_dim`
    with four query heads per key head."""
    experts: tuple[ExpertShape, ...] = ()
    """Matrices of the model's experts; none: it has no experts."""
    linears: tuple[LinearShape, ...] = ()
    """Linear layers of the model's blocks, each once with its share of their number; none: those of a gated block
    whose keys and values are a quarter as wide as its queries."""
    head: HeadShape | None = None
    """The LM head; None: it is taken to be as fast as linear layers."""


DEFAULT_SHAPE = ProbeShape(4096, 14336)
"""Shape to measure with when no model is named: that of an 8B model."""


@dataclass(frozen=True)
class HardwareProfile:
    """Rates and memory sizes of one GPU and its host. All times in seconds, sizes in bytes.

    With `device_type` "cpu" the "GPU" is an arena of ordinary memory and the links are memory copies.
    Rates are attained ones, not data-sheet peaks. Rates shape a plan, so they may change its speed, never its results.
    Raises: ValueError naming the field, its value and what is allowed.
    """

    name: str
    device_type: DeviceType
    source: ProfileSource

    matmul_flops_per_s: Points
    """(tokens, attained FLOP/s) of linear layers: forward, input and weight gradients together, weighted by time."""
    fp8_matmul_flops_per_s: Points
    """Rates of linear layers with operands that are FP8 already; empty if the device multiplies none."""
    matmul_shape: tuple[int, int]
    """(hidden_size, intermediate_size) of the model whose linear layers gave these curves."""
    peak_matmul_flops_per_s: float
    """Sustained rate of a large cube (8192^3 on a GPU) on random data: the unit that speeds are quoted in."""
    attention_forward_flops_per_s: Points
    """(tokens of a sequence, FLOP/s) of the model's attention: all shapes that its blocks have together, weighted by
    time, each by its fastest kernels. It counts 2 * (H + V) FLOPs per head and visible pair, for keys of width H and
    values of width V."""
    attention_backward_flops_per_s: Points
    """The same backward, counting 2 * (3 * H + 2 * V) FLOPs per head and visible pair: five products, not two."""
    attention_head_dim: int
    """Width of the heads that gave these curves, because kernels do less per second on narrow heads."""
    attention_kernels: KernelName
    """The library whose kernels are preferred on CUDA for shapes that were not measured."""
    memory_bytes_per_s: float
    """Device memory traffic of a large copy, bytes read plus bytes written."""

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
    host_bytes_per_s: float
    """Host memory traffic of a large copy by all threads, bytes read plus bytes written."""
    cpu_adamw_parameters_per_s: tuple[tuple[str, float], ...]
    """(name of an update as `Numerics.cpu_update` has it, perhaps with INTO_SECOND after it; parameters updated per
    second by all threads of the CPU)."""
    launch_s: float
    """Seconds from one small kernel to the next, issued back to back from Python."""
    issue_s: float
    """Host seconds to issue one command of the engine: bind views, wait, launch, record. 0 where it runs in place."""
    copy_latency_s: float
    """Fixed part of a copy over the link: a copy of n bytes takes copy_latency_s + n / rate."""

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

    curves: tuple[Curve, ...]
    """Everything that was measured by size, for people and the chart; empty in presets."""
    attention_choices: tuple[AttentionChoice, ...] = ()
    """Kernels for the shapes that were measured, fastest first, by tokens of a sequence; empty in presets."""
    grouped_shares: Points = ()
    """(tokens, rate of the products of the model's experts over that of its linear layers), the traffic of sums of
    weights' gradients left out; empty where there are no experts, and in presets."""
    head_shares: Points = ()
    """(tokens, rate of the LM head's products over that of linear layers), where what its declared memory traffic takes
    by itself is left out: much of it hides under the products, so that a share may be above 1. Empty in presets."""
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
    measured_ranks: int = 1
    """Ranks of a node that were busy at once while links and host memory were measured. Rates of links are those of
    the slowest then, `host_bytes_per_s` and `cpu_adamw_parameters_per_s` those of all together."""

    def __post_init__(self) -> None:
        _check_choice("device_type", self.device_type, get_args(DeviceType))
        _check_choice("source", self.source, get_args(ProfileSource))
        _check_choice("peer_way", self.peer_way, get_args(PeerWay))
        _check_choice("attention_kernels", self.attention_kernels, KERNEL_NAMES)
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"hardware profile: name is {shown(self.name)}, expected a non-empty string")
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name == "fp8_matmul_flops_per_s" and value == ():
                continue
            if name in POINT_FIELDS:
                check_points(name, value, POINT_FIELDS[name], "FLOP/s")
            elif name in ("issue_s", "peer_bytes_per_s", *ONLY_FIELDS):
                _check_not_negative(name, value)
            elif name == "cpu_adamw_parameters_per_s":
                _check_named_rates(name, value)
            elif name in ("attention_head_dim", "measured_ranks"):
                _check_count(name, value)
            elif name.endswith("_bytes"):
                _check_bytes(name, value)
            elif name.endswith("_per_s"):
                check_rate(name, value)
            elif name.endswith("_s"):
                check_positive(name, value)
            if name in SECONDS_FIELDS and value > MOST_SECONDS:
                raise ValueError(f"hardware profile: {name} is {shown(value)}, expected at most {MOST_SECONDS:g} s")
        _check_part("cpu_share_beside_link", self.cpu_share_beside_link)
        _check_shape("matmul_shape", self.matmul_shape)
        _check_shares({name: getattr(self, name) for name in SHARE_FIELDS})
        if not isinstance(self.curves, tuple) or not all(isinstance(curve, Curve) for curve in self.curves):
            raise ValueError(f"hardware profile: curves is {shown(self.curves)}, expected a tuple of Curve")
        _check_at_most("gpu_free_bytes", self.gpu_free_bytes, "gpu_total_bytes", self.gpu_total_bytes)
        _check_at_most("gpu_context_bytes", self.gpu_context_bytes, "gpu_total_bytes", self.gpu_total_bytes)
        _check_at_most("host_available_bytes", self.host_available_bytes, "host_total_bytes", self.host_total_bytes)

    def matmul_rate(self, tokens: int) -> float:
        """Give the attained FLOP/s of a linear layer over `tokens` tokens.

        It is linear in the logarithm of tokens between measured points, constant outside them.
        Raises: ValueError if tokens < 1.
        """
        return _rate("matmul_rate: tokens", self.matmul_flops_per_s, tokens)

    def fp8_matmul_rate(self, tokens: int) -> float:
        """Give the rate of `matmul_rate` with FP8 operands. Raises: ValueError also if the device multiplies none."""
        if not self.fp8_matmul_flops_per_s:
            raise ValueError(f"fp8_matmul_rate: {self.name} multiplies no FP8 operands")
        return _rate("fp8_matmul_rate: tokens", self.fp8_matmul_flops_per_s, tokens)

    def grouped_share(self, tokens: int, otherwise: float) -> float:
        """Give the rate of experts' products over `tokens` tokens, as a share of a linear layer's.

        otherwise: where nothing was measured.
        """
        return interpolate(self.grouped_shares, tokens) if self.grouped_shares else otherwise

    def head_share(self, tokens: int) -> float:
        """Give the rate of the LM head's products in chunks of `tokens` tokens, as a share of a linear layer's; 1 where
        nothing was measured."""
        return interpolate(self.head_shares, tokens) if self.head_shares else 1.0

    def attention_forward_rate(self, seq_len: int) -> float:
        """Give the attained FLOP/s of causal attention over sequences of `seq_len` tokens, as `matmul_rate`."""
        return _rate("attention_forward_rate: seq_len", self.attention_forward_flops_per_s, seq_len)

    def attention_backward_rate(self, seq_len: int) -> float:
        """Give the attained FLOP/s of attention's backward over sequences of `seq_len` tokens, as `matmul_rate`."""
        return _rate("attention_backward_rate: seq_len", self.attention_backward_flops_per_s, seq_len)

    def cpu_adamw_rate(self, update: str) -> float:
        """Give parameters/s of such an update in place by the CPU; the slowest rate for one not measured."""
        rates = self._rates_in_place()
        return rates.get(update, min(rates.values()))

    def cpu_adamw_bytes_per_s(self, update: str) -> float:
        """Give bytes/s of host memory that AdamW on the CPU moves while nothing else uses it.

        update: as `Numerics.cpu_update` names it; a state dtype alone means split masters.
        """
        rates = self._rates_in_place()
        if update not in rates and update == f"int8{STOCHASTIC}":  # arithmetic bounds it, as with split masters
            return self.cpu_adamw_rate("int8") * ADAMW_BYTES[update]
        if update not in rates and update.endswith(STOCHASTIC):
            return min(self.cpu_adamw_bytes_per_s(update.removesuffix(STOCHASTIC)), STOCHASTIC_BYTES_PER_S)
        if update not in rates and update in ADAMW_BYTES:  # measured before there were such states
            split = {name: rate for name, rate in rates.items() if not name.endswith(STOCHASTIC)}
            return min(rate * ADAMW_BYTES.get(name, max(ADAMW_BYTES.values())) for name, rate in split.items())
        return self.cpu_adamw_rate(update) * ADAMW_BYTES.get(update, max(ADAMW_BYTES.values()))

    def cpu_adamw_into_second_bytes_per_s(self, update: str) -> float:
        """Give the same for an update into second planes."""
        measured = dict(self.cpu_adamw_parameters_per_s).get(update + INTO_SECOND)
        if measured is None or update not in ADAMW_BYTES:
            return INTO_SECOND_SHARE * self.cpu_adamw_bytes_per_s(update)
        return measured * ADAMW_BYTES[update]

    def _rates_in_place(self) -> dict[str, float]:
        return {name: rate for name, rate in self.cpu_adamw_parameters_per_s if not name.endswith(INTO_SECOND)}

    @property
    def only_beside_cpu_bytes_per_s(self) -> tuple[float, float]:
        """Bytes per second to the device and to the host beside AdamW on the CPU, the other direction idle."""
        h2d, d2h = self.h2d_only_beside_cpu_bytes_per_s, self.d2h_only_beside_cpu_bytes_per_s
        return h2d or self.h2d_beside_cpu_bytes_per_s, d2h or self.d2h_beside_cpu_bytes_per_s

    def host_rate(self, update: str) -> float:
        """Give bytes/s of host memory, of which copies over the link take shares from updates by the CPU.

        It follows from the share that the CPU keeps beside copies; where that is not known, it is the larger of what a
        plain copy and an update with split masters attain.
        """
        if self.cpu_share_beside_link:
            beside = self.h2d_beside_cpu_bytes_per_s + self.d2h_beside_cpu_bytes_per_s
            return beside / max(LEAST_LOSS, 1 - self.cpu_share_beside_link)
        return max(self.host_bytes_per_s, self.cpu_adamw_bytes_per_s(update.removesuffix(STOCHASTIC)))

    def to_dict(self) -> dict[str, Any]:
        """Give values that JSON can hold, one key per field and "format"; `from_dict` is the inverse."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HardwareProfile":
        """Make the profile that `to_dict` described. Raises: ValueError on another format, missing or wrong fields."""
        if not isinstance(values, dict):
            raise ValueError(f"hardware profile: expected an object with one key per field, got {shown(values)}")
        if values.get("format") != FORMAT:
            raise ValueError(
                f"hardware profile: written in format {shown(values.get('format', 1))}, this version of flexengine "
                f"reads format {FORMAT}; measure again with `flexengine probe --json FILE`, or see "
                "docs/hardware_profiles.md"
            )
        values = {name: value for name, value in values.items() if name != "format"}
        known = {field.name for field in fields(cls)}
        if missing := sorted(known - values.keys() - _LATER_FIELDS):
            raise ValueError(f"hardware profile: missing fields {', '.join(missing)}")
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"hardware profile: unknown fields {', '.join(unknown)}")
        pairs = {name: as_points(name, values[name]) for name in (*POINT_FIELDS, "cpu_adamw_parameters_per_s")}
        pairs |= {name: as_points(name, values.get(name, ())) for name in SHARE_FIELDS}
        if not isinstance(values["matmul_shape"], list | tuple) or not isinstance(values["curves"], list | tuple):
            raise ValueError("hardware profile: matmul_shape and curves must be lists")
        shape, curves = tuple(values["matmul_shape"]), tuple(Curve.from_dict(curve) for curve in values["curves"])
        choices = attention_choices(values["attention_choices"])
        return cls(**{**values, **pairs, "matmul_shape": shape, "curves": curves, "attention_choices": choices})

    def to_json(self) -> str:
        """Give JSON text; floats survive the round trip exactly."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "HardwareProfile":
        """The profile in `text`. Raises: ValueError if it is no JSON or no valid profile."""
        return cls.from_dict(parse_json(text, "hardware profile"))


def read_profile(path: Path) -> HardwareProfile:
    """Read the profile in a JSON file. Raises: ValueError naming the file if it is absent or holds no valid profile."""
    try:
        return HardwareProfile.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read this profile: {error.strerror}") from None
    except ValueError as error:  # bad JSON, bad fields, or bytes that are no text
        raise ValueError(f"{path}: {error}") from None


def attention_choices(values: Any) -> tuple[AttentionChoice, ...]:
    """Read what JSON holds of `HardwareProfile.attention_choices`. Raises: ValueError."""
    try:
        return tuple(_attention_choice(*value) for value in values)
    except (TypeError, ValueError):
        raise ValueError(
            f"hardware profile: attention_choices is {shown(values)}, expected pairs of a shape (heads per key head, "
            "widths of keys and values, window, whether there is a soft cap) and (tokens, names of kernels) pairs"
        ) from None


def _attention_choice(shape: Any, orders: Any) -> AttentionChoice:
    members, head_dim, value_dim, window, capped = shape
    sizes = (members, head_dim, value_dim, window)
    orders = tuple((length, tuple(names)) for length, names in orders)
    whole = all(is_whole(size, least) for size, least in zip(sizes, (1, 1, 1, 0), strict=True))
    known = all(is_whole(length, 1) and names and set(names) <= set(KERNEL_NAMES) for length, names in orders)
    if not whole or not known or not orders or not isinstance(capped, bool):
        raise ValueError
    return AttentionChoice(AttentionShape(members, head_dim, value_dim, window, capped), orders)


def _rate(name: str, points: Points, x: int) -> float:
    if x < 1:
        raise ValueError(f"{name} is {x}, expected at least 1")
    return interpolate(points, x)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected one of {', '.join(choices)}")


def _check_shares(curves: dict[str, Any]) -> None:
    for name, value in curves.items():
        pairs = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
        if not pairs or not all(is_whole(tokens, 1) and is_finite(share) and share > 0 for tokens, share in value):
            raise ValueError(f"hardware profile: {name} is {shown(value)}, expected (tokens, share above 0) pairs")
        if any(before[0] >= after[0] for before, after in pairwise(value)):
            raise ValueError(f"hardware profile: {name} is {shown(value)}, expected ascending tokens")


def _check_not_negative(name: str, value: Any) -> None:
    if not is_finite(value) or value < 0:
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected a finite number, at least 0")


def _check_part(name: str, value: Any) -> None:
    if not is_finite(value) or not 0 <= value <= 1:
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected a number from 0 to 1")


def _check_count(name: str, value: Any) -> None:
    if not is_whole(value, 1):
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected a whole number from 1 to {MAX_WHOLE}")


def _check_bytes(name: str, value: Any) -> None:
    if not is_whole(value, 0):
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected whole bytes from 0 to {MAX_WHOLE}")


def _check_at_most(name: str, value: int, limit_name: str, limit: int) -> None:
    if value > limit:
        raise ValueError(f"hardware profile: {name} is {value}, more than {limit_name}, which is {limit}")


def _check_shape(name: str, value: Any) -> None:
    form = f"(hidden_size, intermediate_size), both from 1 to {MAX_WHOLE}"
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected {form}")
    if not all(is_whole(size, 1) for size in value):
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected {form}")


def _check_named_rates(name: str, value: Any) -> None:
    pairs = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    if not pairs or not value:
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected (dtype, rate) pairs")
    for dtype, rate in value:
        if not isinstance(dtype, str) or not dtype:
            raise ValueError(
                f"hardware profile: {name} names the dtype {shown(dtype)}, expected text such as 'float32'"
            )
        check_rate(f"{name} for {dtype}", rate)
    if len({dtype for dtype, _ in value}) < len(value):
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected each dtype once")


def masters_and_states(update: str) -> str:
    """Word the name of an update by the CPU: "bfloat16 states", or with "stochastic masters" and more after it."""
    in_place = update.removesuffix(INTO_SECOND)
    stochastic = ", stochastic masters" if in_place.endswith(STOCHASTIC) else ""
    into = "," + INTO_SECOND if update.endswith(INTO_SECOND) else ""
    return f"{in_place.removesuffix(STOCHASTIC)} states{stochastic}{into}"
