"""What one machine can do, as numbers: the only thing the planner knows about hardware.

Plain Python, so that plans can be made anywhere. `probe.py` measures a profile, `presets.py` ships a few.
"""

import json
import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Literal, get_args

DeviceType = Literal["cuda", "cpu"]
ProfileSource = Literal["measured", "preset", "synthetic"]


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

    matmul_flops_per_s: tuple[tuple[int, float], ...]
    """(tokens, attained FLOP/s) of linear layers in the compute dtype, tokens strictly ascending."""
    peak_matmul_flops_per_s: float
    """Sustained rate of a large cube (8192^3 on a GPU) on random data: the unit that speeds are quoted in."""
    attention_forward_flops_per_s: float
    """Causal attention, counting 4 * head_dim FLOPs per head and visible (query, key) pair."""
    attention_backward_flops_per_s: float
    """Its backward, counting 10 * head_dim FLOPs per head and visible pair (five products instead of two)."""
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
    host_bytes_per_s: float
    """Host memory traffic of a large copy by all threads, bytes read plus bytes written."""
    launch_s: float
    """From one small kernel to the next, issued back to back from Python."""
    copy_latency_s: float
    """Fixed part of a copy over the link: a copy of n bytes takes copy_latency_s + n / rate."""

    gpu_total_bytes: int
    gpu_free_bytes: int
    """What the device can still give to this process, on top of its context: the largest possible arena."""
    gpu_context_bytes: int
    """What NVML shows for CUDA context, loaded kernels, libraries and cuBLAS workspace before any arena."""
    host_total_bytes: int
    """RAM, or the container's or process's limit where that is smaller."""
    host_available_bytes: int
    """What this process can still take on top of its resident set without swapping or breaking a limit."""
    host_base_bytes: int
    """Resident set of a process that has imported torch and initialised the device."""

    def __post_init__(self) -> None:
        _check_choice("device_type", self.device_type, get_args(DeviceType))
        _check_choice("source", self.source, get_args(ProfileSource))
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"hardware profile: name is {self.name!r}, expected a non-empty string")
        for field in fields(self):
            if field.name.endswith("_bytes"):
                _check_bytes(field.name, getattr(self, field.name))
            elif field.name.endswith("_s") and field.name != "matmul_flops_per_s":
                _check_positive(field.name, getattr(self, field.name))
        _check_curve(self.matmul_flops_per_s)
        _check_at_most("gpu_free_bytes", self.gpu_free_bytes, "gpu_total_bytes", self.gpu_total_bytes)
        _check_at_most("gpu_context_bytes", self.gpu_context_bytes, "gpu_total_bytes", self.gpu_total_bytes)
        _check_at_most("host_available_bytes", self.host_available_bytes, "host_total_bytes", self.host_total_bytes)

    def matmul_rate(self, tokens: int) -> float:
        """Attained FLOP/s of a linear layer over `tokens` tokens.

        Linear in the logarithm of tokens between measured points, constant outside them.
        Raises: ValueError if tokens < 1.
        """
        if tokens < 1:
            raise ValueError(f"matmul_rate: tokens is {tokens}, expected at least 1")
        curve = self.matmul_flops_per_s
        right = bisect_right(curve, tokens, key=lambda point: point[0])
        if right == 0:
            return curve[0][1]
        if right == len(curve):
            return curve[-1][1]
        (low_tokens, low_rate), (high_tokens, high_rate) = curve[right - 1], curve[right]
        share = math.log(tokens / low_tokens) / math.log(high_tokens / low_tokens)
        return low_rate + share * (high_rate - low_rate)

    def to_dict(self) -> dict[str, Any]:
        """Values JSON can hold, one key per field; `from_dict` is the inverse."""
        values = asdict(self)
        values["matmul_flops_per_s"] = [list(point) for point in self.matmul_flops_per_s]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HardwareProfile":
        """The profile that `to_dict` described. Raises: ValueError on missing, unknown or invalid fields."""
        if not isinstance(values, dict):
            raise ValueError(f"hardware profile: expected an object with one key per field, got {values!r:.80}")
        known = {field.name for field in fields(cls)}
        if missing := sorted(known - values.keys()):
            raise ValueError(f"hardware profile: missing fields {', '.join(missing)}")
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"hardware profile: unknown fields {', '.join(unknown)}")
        curve = values["matmul_flops_per_s"]
        if not isinstance(curve, list | tuple) or not all(isinstance(point, list | tuple) for point in curve):
            raise ValueError("hardware profile: matmul_flops_per_s is not a list of [tokens, FLOP/s] pairs")
        return cls(**{**values, "matmul_flops_per_s": tuple(tuple(point) for point in curve)})

    def to_json(self) -> str:
        """JSON text; floats survive the round trip exactly."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "HardwareProfile":
        """The profile in `text`. Raises: ValueError if it is no JSON or no valid profile."""
        return cls.from_dict(json.loads(text))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"hardware profile: {name} is {value!r}, expected one of {', '.join(choices)}")


def _check_positive(name: str, value: Any) -> None:
    if not _is_number(value) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"hardware profile: {name} is {value!r}, expected a finite number above 0")


def _check_bytes(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"hardware profile: {name} is {value!r}, expected a whole number of bytes, at least 0")


def _check_at_most(name: str, value: int, limit_name: str, limit: int) -> None:
    if value > limit:
        raise ValueError(f"hardware profile: {name} is {value}, more than {limit_name}, which is {limit}")


def _check_curve(curve: Any) -> None:
    name = "matmul_flops_per_s"
    if not isinstance(curve, tuple) or not curve:
        raise ValueError(f"hardware profile: {name} is {curve!r}, expected at least one (tokens, FLOP/s) pair")
    if any(not isinstance(point, tuple) or len(point) != 2 for point in curve):
        raise ValueError(f"hardware profile: {name} is {curve!r}, expected (tokens, FLOP/s) pairs")
    for tokens, rate in curve:
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise ValueError(f"hardware profile: {name} has a point at {tokens!r} tokens, expected at least 1")
        _check_positive(f"{name} at {tokens} tokens", rate)
    counts = [tokens for tokens, _ in curve]
    if any(later <= earlier for earlier, later in pairwise(counts)):
        raise ValueError(f"hardware profile: {name} has token counts {counts}, expected strictly ascending ones")
