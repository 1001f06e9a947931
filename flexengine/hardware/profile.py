"""The hardware profile: what one machine attains, as numbers. The planner knows nothing else about hardware.

This module is plain Python, so that plans can be made anywhere. `probe.py` measures a profile, `presets.py` ships a
few.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

from flexengine.hardware.curve import Curve, as_points, is_whole
from flexengine.hardware.drive_profile import DriveProfile
from flexengine.hardware.field_checks import check_choice, check_count
from flexengine.hardware.parts import (
    DRIVE_FIELDS,
    INTO_SECOND,
    ONE_RANK_FIELDS,
    POINT_FIELDS,
    SHARE_FIELDS,
    STOCHASTIC,
    AttentionProfile,
    HostProfile,
    LinkProfile,
    MatmulProfile,
    MemoryProfile,
    keys_of,
)
from flexengine.ops.attention.choice import KERNEL_NAMES, AttentionChoice, KernelName
from flexengine.ops.attention.style import AttentionShape
from flexengine.ops.experts.shape import ExpertShape
from flexengine.ops.linear_shape import HeadShape, LinearShape
from flexengine.wording import parse_json, shown

DeviceType = Literal["cuda", "cpu"]
ProfileSource = Literal["measured", "preset", "synthetic"]

_LATER_FIELDS = {
    "peer_bytes_per_s",
    "peer_way",
    "measured_ranks",
    "grouped_shares",
    "head_shares",
    "sm_clock_mhz",
    "fp8_row_shares",
    "fp8_block_shares",
    "fp8_block_weight_shares",
    "fp8_square_shares",
    "mxfp8_shares",
    "nvfp4_shares",
    "attention_slice_shares",
    *ONE_RANK_FIELDS,
    *DRIVE_FIELDS,
}
"""Keys that a file may lack, as those of earlier versions do."""
FORMAT = 6
"""Version of the JSON form; raised when fields appear or change their meaning."""
LEAST_LOSS = 0.01
"""Of its speed that the CPU is taken to lose beside copies, where it measured less."""


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
    deterministic: bool = False
    """Whether attention is measured by deterministic kernels alone, as --deterministic runs it."""


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
    matmul: MatmulProfile
    attention: AttentionProfile
    link: LinkProfile
    host: HostProfile
    memory: MemoryProfile
    drive: DriveProfile = DriveProfile()  # noqa: RUF009 (an immutable value)
    curves: tuple[Curve, ...] = ()
    """Everything that was measured by size, for people and the chart; empty in presets."""
    measured_ranks: int = 1
    """Ranks of a node that were busy at once while links and host memory were measured. Rates of links are those of
    the slowest then, those of host memory and of updates by the CPU those of all together."""

    def __post_init__(self) -> None:
        check_choice("device_type", self.device_type, get_args(DeviceType))
        check_choice("source", self.source, get_args(ProfileSource))
        check_count("measured_ranks", self.measured_ranks)
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"hardware profile: name is {shown(self.name)}, expected a non-empty string")
        if not isinstance(self.curves, tuple) or not all(isinstance(curve, Curve) for curve in self.curves):
            raise ValueError(f"hardware profile: curves is {shown(self.curves)}, expected a tuple of Curve")

    def host_rate(self, update: str) -> float:
        """Give bytes/s of host memory, of which copies over the link take shares from updates by the CPU.

        It follows from the share that the CPU keeps beside copies; where that is not known, it is the larger of what a
        plain copy and an update with split masters attain.
        """
        link = self.link
        if link.cpu_share_beside_link:
            beside = link.h2d_beside_cpu_bytes_per_s + link.d2h_beside_cpu_bytes_per_s
            return beside / max(LEAST_LOSS, 1 - link.cpu_share_beside_link)
        return max(self.host.bytes_per_s, self.host.adamw_bytes_per_s(update.removesuffix(STOCHASTIC)))

    def values(self) -> dict[str, Any]:
        """Its values by their keys in JSON files, those of all parts side by side."""
        own = {name: getattr(self, name) for name in _OWN_KEYS}
        return own | {key: value for part in PARTS for key, value in getattr(self, part).values().items()}

    def changed(self, **values: Any) -> Self:
        """Give the profile with other values of some keys."""
        own = {key: values.pop(key) for key in list(values) if key in _OWN_KEYS}
        for part, keys in _KEYS.items():
            if of_part := {keys[key]: values.pop(key) for key in list(values) if key in keys}:
                own[part] = replace(getattr(self, part), **of_part)
        return replace(self, **own, **values)

    def to_dict(self) -> dict[str, Any]:
        """Give values that JSON can hold by their keys, and "format"; `from_dict` is the inverse."""
        values = self.values()
        return {"format": FORMAT, **values, "curves": [asdict(curve) for curve in self.curves]}

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
        known = {*_OWN_KEYS, *(key for keys in _KEYS.values() for key in keys)}
        if missing := sorted(known - values.keys() - _LATER_FIELDS):
            raise ValueError(f"hardware profile: missing fields {', '.join(missing)}")
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"hardware profile: unknown fields {', '.join(unknown)}")
        if not isinstance(values["matmul_shape"], list | tuple) or not isinstance(values["curves"], list | tuple):
            raise ValueError("hardware profile: matmul_shape and curves must be lists")
        values |= {key: as_points(key, values[key]) for key in _PAIRS if key in values}
        values |= {
            "matmul_shape": tuple(values["matmul_shape"]),
            "curves": tuple(Curve.from_dict(curve) for curve in values["curves"]),
            "attention_choices": attention_choices(values["attention_choices"]),
        }
        parts = {
            part: PARTS[part](**{name: values[key] for key, name in keys.items() if key in values})
            for part, keys in _KEYS.items()
        }
        return cls(**parts, **{key: values[key] for key in _OWN_KEYS if key in values})

    def to_json(self) -> str:
        """Give JSON text; floats survive the round trip exactly."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "HardwareProfile":
        """The profile in `text`. Raises: ValueError if it is no JSON or no valid profile."""
        return cls.from_dict(parse_json(text, "hardware profile"))


PARTS = {
    "matmul": MatmulProfile,
    "attention": AttentionProfile,
    "link": LinkProfile,
    "host": HostProfile,
    "memory": MemoryProfile,
    "drive": DriveProfile,
}
_KEYS = {name: keys_of(part) for name, part in PARTS.items()}
_OWN_KEYS = tuple(own.name for own in fields(HardwareProfile) if own.name not in PARTS)
_PAIRS = (*POINT_FIELDS, *SHARE_FIELDS, "cpu_adamw_parameters_per_s")
"""Keys whose values are pairs."""


def read_profile(path: Path) -> HardwareProfile:
    """Read the profile in a JSON file. Raises: ValueError naming the file if it is absent or holds no valid profile."""
    try:
        return HardwareProfile.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read this profile: {error.strerror}") from None
    except ValueError as error:  # bad JSON, bad fields, or bytes that are no text
        raise ValueError(f"{path}: {error}") from None


def preferred_attention(profile: HardwareProfile, reproducible: bool) -> tuple[KernelName, tuple[AttentionChoice, ...]]:
    """Give the kernels that a run prefers, for shapes that were not measured and for those that were.

    reproducible: those of any machine, as what a probe finds fastest may differ from one machine to the next of its
    kind, and kernels differ in bits.
    """
    return ("flash", ()) if reproducible else (profile.attention.kernels, profile.attention.choices)


def attention_choices(values: Any) -> tuple[AttentionChoice, ...]:
    """Read what JSON holds of `AttentionProfile.choices`. Raises: ValueError."""
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


def masters_and_states(update: str) -> str:
    """Word the name of an update by the CPU: "bfloat16 states", or with "stochastic masters" and more after it."""
    in_place = update.removesuffix(INTO_SECOND)
    stochastic = ", stochastic masters" if in_place.endswith(STOCHASTIC) else ""
    into = "," + INTO_SECOND if update.endswith(INTO_SECOND) else ""
    return f"{in_place.removesuffix(STOCHASTIC)} states{stochastic}{into}"
