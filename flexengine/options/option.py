"""An option is one line: a field of a frozen dataclass with its type, default, help and limits.

    max_seq_len: Annotated[int, Option("longest sequence, in tokens", above=0, most=2**24)] = 2048

Flags, YAML keys, Python keywords, their help and their checks derive from that line. A message words the same limit for
the face that it answers: `FlagWords` for the command line and YAML, `KeywordWords` for Python.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from inspect import get_annotations
from numbers import Integral, Real
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol, get_args, get_origin, get_type_hints

from flexengine.options.other_names import spelled
from flexengine.wording import shown


class Words(Protocol):
    """How one face spells an option and words what is wrong with its value."""

    def spelled(self, name: str) -> str:
        """The option as this face writes it."""
        ...

    def setting(self, name: str, value: Any) -> str:
        """The option with its value, as this face writes it."""
        ...

    def unknown_choice(self, option: Option, value: Any) -> str:
        """Says that a value is none of the choices."""
        ...

    def outside(self, option: Option, value: Any) -> str:
        """Says which limit a number breaks."""
        ...


@dataclass(frozen=True)
class Need:
    """What another option must be for an option to mean anything; without it, a value that was given is refused.

    other: the option, or several of which one will do. values: those that it may have; without any it has to be given.
    of: values of the option itself that need it; without any all that are given do. absent: it must not be given. why:
    completes the sentence that begins with the option, or where `absent` with both.
    """

    other: str | tuple[str, ...]
    values: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    absent: bool = False
    why: str = ""

    @property
    def others(self) -> tuple[str, ...]:
        """The options of which one will do."""
        return (self.other,) if isinstance(self.other, str) else self.other

    def is_met(self, values: Mapping[str, Any], options: Mapping[str, Option]) -> bool:
        """Whether it is met by the values of all options."""
        given = [name for name in self.others if options[name].is_given(values[name])]
        if self.values:
            return any(values[name] in self.values for name in self.others)
        return not given if self.absent else bool(given)

    def describe(self, option: Option, values: Mapping[str, Any], words: Words) -> str:
        """Word that it is not met: what was asked, what was found, what to do."""
        asked, found = (_set(words, name, values[name]) for name in (option.name, self.others[0]))
        if self.absent:
            return f"{asked} and {found} {self.why}; give one"
        wanted = _or(map(words.spelled, self.others))
        if not self.values:
            return f"{asked} {self.why or f'needs {wanted}'}; give {wanted} too, or leave it out"
        wanted = words.setting(self.others[0], _or(self.values))
        return f"{asked} {self.why or f'needs {wanted}'}, got {found}; give {wanted}, or leave it out"


@dataclass(frozen=True)
class Option:
    """What one option means and which values it takes. `options_of` fills in the last three fields.

    above, least, most: limits of a number, the first excluded. zero_means: what None means where it is a choice of its
    own, which flags and YAML write as 0. decides_plan: False for what changes the run but not its plan. needs: what
    others must be for it to mean anything. Where every value has a need, the default is None, False or an empty list,
    so that a value that was given is known from one that was not; the help tells what is taken without one.
    """

    help: str
    above: float | None = None
    least: float | None = None
    most: float | None = None
    zero_means: str = ""
    decides_plan: bool = True
    needs: tuple[Need, ...] = ()
    name: str = ""
    kind: Any = str
    default: Any = None

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return flag_of(self.name)

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The values of a Literal, alone or with None; None for other types."""
        literal = next((part for part in (self.kind, *get_args(self.kind)) if get_origin(part) is Literal), None)
        return get_args(literal) if literal else None

    @property
    def value_type(self) -> type:
        """The plain type without its None; str for a Literal."""
        if self.choices:
            return str
        return next((part for part in get_args(self.kind) if part is not type(None)), self.kind)

    @property
    def is_switch_with_value(self) -> bool:
        """Whether this is a switch that may be given a text: --trace, or --trace FILE."""
        return set(get_args(self.kind)) == {bool, str}

    @property
    def is_list(self) -> bool:
        """Whether this takes any number of texts: --freeze NAME [NAME ...]."""
        return Sequence in (get_origin(self.kind), *map(get_origin, get_args(self.kind)))

    @property
    def is_optional(self) -> bool:
        """Whether None is a value."""
        return type(None) in get_args(self.kind)

    def is_given(self, value: Any) -> bool:
        """Whether a value says more than the option's absence; a switch that is off says nothing."""
        return not (value is None or value is False or value in ((), self.default))

    def normalised(self, value: Any) -> Any:
        """The value in the one form that it is kept in: lists become tuples, and other spellings ours."""
        return tuple(value) if self.is_list and isinstance(value, list) else spelled(self.name, value)

    def from_flag(self, value: Any) -> Any:
        """The value of what a flag or YAML says: None for the 0 that stands for it."""
        is_zero = isinstance(value, Real) and not isinstance(value, bool) and value == 0
        return None if self.zero_means and is_zero else value

    def to_flag(self, value: Any) -> Any:
        """The value as flags and YAML write it: 0 for the None that it stands for."""
        if self.zero_means and value is None:
            return self.value_type(0)
        return list(value) if isinstance(value, tuple) else value

    def check(self, value: Any, words: Words) -> None:
        """Raise ValueError, in the words of a face, for a value of another type or outside of the limits."""
        if value is None and self.is_optional:
            return
        if self.choices:
            if value not in self.choices:
                raise ValueError(words.unknown_choice(self, value))
            return
        problem = self._wrong_type(value)
        if problem:
            raise ValueError(f"{words.spelled(self.name)} must be {problem}, got {shown(value)}")
        if self._is_outside(value):
            raise ValueError(words.outside(self, value))

    def _wrong_type(self, value: Any) -> str:
        """What the value must be where it is something else; empty when its type is right."""
        if self.is_list:
            right = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
            return "" if right else "a list of names"
        if self.is_switch_with_value:
            return "" if isinstance(value, (bool, str)) else "true, false or a file name"
        wanted = self.value_type
        accepted: Any = {float: Real, int: Integral}.get(wanted, wanted)  # numpy's numbers are numbers too
        if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
            return f"of type {wanted.__name__}"
        if wanted in (int, float) and not abs(value) <= sys.float_info.max:  # NaN too
            return "a finite number"
        return ""

    def _is_outside(self, value: Any) -> bool:
        return (
            (self.above is not None and value <= self.above)
            or (self.least is not None and value < self.least)
            or (self.most is not None and value > self.most)
        )


@cache
def options_of(declared: type) -> Mapping[str, Option]:
    """Map names to the options of a dataclass, its own first; fields without an Option are left out.

    A default that only a factory makes is not told.
    """
    by_field = {field.name: field for field in fields(declared)}
    hints = get_type_hints(declared, include_extras=True)
    found: dict[str, Option] = {}
    for one in declared.__mro__:
        for name in get_annotations(one):
            option = _annotated(hints.get(name))
            if option is not None and name not in found:
                default = by_field[name].default
                kind = get_args(hints[name])[0]
                found[name] = replace(option, name=name, kind=kind, default=None if default is MISSING else default)
    return MappingProxyType(found)


def check_each_once(option: str, names: Iterable[str], remedy: str) -> None:
    """Raise ValueError for a name that is blank, or given twice to an option."""
    for name, count in Counter(names).items():
        if count > 1 or not name.strip():
            what = "is given twice" if name.strip() else "is blank"
            raise ValueError(f"{option}: {shown(name)} {what}; {remedy}")


def check_needs(declared: Any, words: Words) -> None:
    """Raise ValueError for an option of a dataclass that was given although it means nothing beside the others.

    A need of what the dataclass does not have is left to those that do.
    """
    options = options_of(type(declared))
    values = {name: getattr(declared, name) for name in options}
    for option in options.values():
        value = values[option.name]
        for need in option.needs if option.is_given(value) else ():
            applies = (not need.of or value in need.of) and options.keys() >= set(need.others)
            if applies and not need.is_met(values, options):
                raise ValueError(need.describe(option, values, words))


def _set(words: Words, name: str, value: Any) -> str:
    """An option with its value as a person would have written it."""
    if value is True:
        return words.spelled(name)
    return words.setting(name, " ".join(map(str, value)) if isinstance(value, tuple) else value)


def _or(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _annotated(hint: Any) -> Option | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((part for part in get_args(hint)[1:] if isinstance(part, Option)), None)


def flag_of(name: str) -> str:
    """Spell a field as a flag: max_seq_len becomes --max-seq-len."""
    return f"--{name.replace('_', '-')}"


class FlagWords:
    """Messages for flags and YAML: --max-seq-len must be more than 0, got 0."""

    def spelled(self, name: str) -> str:
        """The flag."""
        return flag_of(name)

    def setting(self, name: str, value: Any) -> str:
        """The flag and its value."""
        return f"{flag_of(name)} {value}"

    def unknown_choice(self, option: Option, value: Any) -> str:
        """Lists the choices."""
        return f"{option.flag} must be one of {', '.join(option.choices or ())}, got {shown(value)}"

    def outside(self, option: Option, value: Any) -> str:
        """Names the limit that is broken, or both where they make a fraction."""
        if (option.least, option.most) == (0, 1):
            return f"{option.flag} is a fraction from 0 to 1, got {value}"
        if option.most is not None and value > option.most:
            return f"{option.flag} is at most {option.most}, got {value}"
        if option.least == 0 or option.zero_means:
            return f"{option.flag} must not be negative, got {value}"
        return f"{option.flag} must be more than {option.above}, got {value}"


class KeywordWords:
    """Messages for Python callers: max_seq_len must be positive, got 0."""

    def spelled(self, name: str) -> str:
        """The keyword."""
        return name

    def setting(self, name: str, value: Any) -> str:
        """The keyword and its value."""
        return f"{name}={value}"

    def unknown_choice(self, option: Option, value: Any) -> str:
        """Lists the choices; dtypes are supported or not, words are chosen from."""
        if option.name.endswith("dtype"):
            return f"{option.name}={value!r} is not supported; choose {', '.join(option.choices or ())}"
        return f"{option.name}={value!r}; choose {_or(option.choices or ('nothing',))}"

    def outside(self, option: Option, value: Any) -> str:
        """Names the limits."""
        if option.least is not None and option.most is not None:
            return f"{option.name} must be from {option.least} to {option.most}, got {value}"
        if option.most is not None and value > option.most:
            return f"{option.name} must be at most {option.most}, got {value}"
        none = f", or None for {option.zero_means}," if option.zero_means else ","
        return f"{option.name} must be positive{none} got {value}"
