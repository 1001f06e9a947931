"""Options as flags: one argparse flag per option, and layers of options of which the later is the stronger."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from flexengine.options.option import FlagWords, Option

METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_flag(
    parser: argparse._ActionsContainer,
    option: Option,
    default: Any = None,
    flag: str | None = None,
    read: Callable[[str], Any] | None = None,
    help_text: str | None = None,
    several: bool = False,
) -> None:
    """Add one flag; a value that is not given takes the parser's `argument_default`, unless that is None.

    default: what the help says of it, and the value where the parser has no other; flag: another spelling; read: turns
    the text into the value, instead of the option's type; help_text: replaces the option's; several: the flag takes any
    number of values, where it takes one of its own.
    """
    names = [flag or option.flag]
    keywords: dict[str, Any] = {"dest": option.name, "help": _help(help_text or option_help(option), default)}
    if parser.argument_default is None:
        keywords["default"] = default
    if option.is_switch_with_value:
        parser.add_argument(*names, nargs="?", const=True, metavar="FILE", **keywords)
        parser.add_argument(f"--no-{option.flag[2:]}", dest=option.name, action="store_false", help=argparse.SUPPRESS)
    elif option.is_list:
        parser.add_argument(*names, nargs="+", metavar="NAME", **keywords)
    elif option.value_type is bool:
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, **keywords)
    else:
        metavar = None if option.choices else METAVARS[option.value_type]
        reader = partial(_read_choice, option) if option.choices else option.value_type
        keywords |= {"nargs": "+"} if several else {}
        parser.add_argument(*names, type=read or reader, choices=option.choices, metavar=metavar, **keywords)


def _read_choice(option: Option, text: str) -> str:
    """Read one of the choices in any of its spellings."""
    return option.normalised(text)


def option_help(option: Option) -> str:
    """Word an option for the command line, which writes 0 where Python has None."""
    return f"{option.help}; 0 = {option.zero_means}" if option.zero_means else option.help


def _help(text: str, default: Any) -> str:
    """Add the default to a help text, where that is not told in words."""
    if default not in (None, "", ()):
        said = "no" if default is False else "yes" if default is True else default
        text = f"{text.partition(' (default:')[0]} (default: {said})"
    return text.replace("%", "%%")


def from_flags(options: Iterable[Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """Take the options that are among `values`, each as Python has it and checked for itself.

    Raises: ValueError in the words of flags.
    """
    found = {}
    for option in options:
        if option.name in values:
            value = option.normalised(option.from_flag(values[option.name]))
            option.check(value, FlagWords())
            found[option.name] = value
    return found


def positive_count(text: str) -> int:
    """Read a whole number above 0, for `add_flag`."""
    return int(_positive(text, int, "whole number"))


def positive_number(text: str) -> float:
    """Read a number above 0, for `add_flag`."""
    return _positive(text, float, "number")


def _positive(text: str, kind: type[int] | type[float], what: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):  # NaN too
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what} above 0")
    return value


def overlay(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers of options, the later the stronger, also where two options exclude each other.

    A layer that sets the length of the run in one unit replaces the other unit; synthetic data replaces a data set.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if "steps" in layer or "epochs" in layer:
            merged.pop("steps", None)
            merged.pop("epochs", None)
        if layer.get("data_source") == "synthetic":
            merged.pop("dataset", None)
        merged.update(layer)
    return merged
