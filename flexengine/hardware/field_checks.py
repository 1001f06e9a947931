"""Checks of single values of a hardware profile, which name the key and what is expected."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from flexengine.hardware.curve import MAX_WHOLE, check_rate, is_finite, is_whole
from flexengine.wording import shown


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises: ValueError unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected one of {', '.join(choices)}")


def check_shares(name: str, value: Any) -> None:
    """Raises: ValueError unless `value` is (tokens, share above 0) pairs of ascending tokens."""
    pairs = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    if not pairs or not all(is_whole(tokens, 1) and is_finite(share) and share > 0 for tokens, share in value):
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected (tokens, share above 0) pairs")
    if any(before[0] >= after[0] for before, after in pairwise(value)):
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected ascending tokens")


def check_not_negative(name: str, value: Any) -> None:
    """Raises: ValueError unless `value` is a finite number, at least 0."""
    if not is_finite(value) or value < 0:
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected a finite number, at least 0")


def check_part(name: str, value: Any) -> None:
    """Raises: ValueError unless `value` is a number from 0 to 1."""
    if not is_finite(value) or not 0 <= value <= 1:
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected a number from 0 to 1")


def check_count(name: str, value: Any) -> None:
    """Raises: ValueError unless `value` is a whole number above 0."""
    if not is_whole(value, 1):
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected a whole number from 1 to {MAX_WHOLE}")


def check_bytes(name: str, value: Any) -> None:
    """Raises: ValueError unless `value` is whole bytes, at least 0."""
    if not is_whole(value, 0):
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected whole bytes from 0 to {MAX_WHOLE}")


def check_at_most(name: str, value: int, limit_name: str, limit: int) -> None:
    """Raises: ValueError if `value` is above the value of another key."""
    if value > limit:
        raise ValueError(f"hardware profile: {name} is {value}, more than {limit_name}, which is {limit}")


def check_shape(name: str, value: Any) -> None:
    """Raises: ValueError unless `value` is two whole numbers above 0."""
    if not isinstance(value, tuple) or len(value) != 2 or not all(is_whole(size, 1) for size in value):
        form = f"(hidden_size, intermediate_size), both from 1 to {MAX_WHOLE}"
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected {form}")


def check_named_rates(name: str, value: Any) -> None:
    """Raises: ValueError unless `value` is (dtype, rate above 0) pairs, each dtype once."""
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
