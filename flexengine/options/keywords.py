"""Python functions whose keywords are the fields of a dataclass, so that no option is listed twice."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import InitVar
from typing import Any, ParamSpec, TypeVar, get_type_hints

from flexengine.options.option import options_of
from flexengine.options.other_names import translated_keywords
from flexengine.wording import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_FLAG = re.compile(r"--([a-z][a-z-]*)")


def takes(arguments: Callable[P, Any]) -> Callable[[Callable[[Any], R]], Callable[P, R]]:
    """Have a function of one value be called with the arguments of the dataclass that the value is made of.

    Type checkers, editors, `inspect.signature` and `help` see the dataclass's constructor: names, types and defaults.
    The docstring gets a line for each option. Raises (when called): TypeError for arguments that are no fields.
    """
    signature = _plain_signature(arguments)

    make: Callable[..., Any] = arguments

    def decorate(function: Callable[[Any], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **keywords: P.kwargs) -> R:
            return function(make(*args, **_understood(function.__name__, signature, args, keywords)))

        result = get_type_hints(function).get("return", inspect.Signature.empty)
        vars(called)["__signature__"] = signature.replace(return_annotation=result)
        called.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n{_described(arguments)}"
        called.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()} | {"return": result}
        return called

    return decorate


def takes_other_names(declared: type[T]) -> type[T]:
    """Have a dataclass be made with the names that people bring from other systems, too.

    Raises (when it is made): TypeError for names that have no counterpart, with what to use, and for unknown ones.
    """
    make: Callable[..., None] = declared.__init__
    signature = inspect.signature(declared)

    @functools.wraps(make)
    def made(self: T, *args: Any, **keywords: Any) -> None:
        make(self, *args, **_understood(declared.__name__, signature, args, keywords))

    setattr(declared, "__init__", made)  # noqa: B010 - a type checker keeps to the dataclass's own
    return declared


def _understood(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """The keywords of a call of `name` by the names that it has. Raises: TypeError in the words of Python."""
    meant = dict(keywords)
    try:
        meant = translated_keywords(keywords, signature.parameters.keys())
        signature.bind(*args, **meant)
    except ValueError as error:
        raise TypeError(f"{name}(): {_FLAG.sub(_keyword, str(error))}") from None
    except TypeError as error:
        unknown = next((key for key in meant if key not in signature.parameters), None)
        guess = did_you_mean(unknown, signature.parameters) if unknown else ""
        raise TypeError(f"{name}() {error}{guess}") from None
    return meant


def _plain_signature(arguments: Callable[..., Any]) -> inspect.Signature:
    """The constructor's signature with types only: what an option means is told by the docstring."""
    hints = get_type_hints(arguments)
    signature = inspect.signature(arguments)
    named = [(p, hints.get(name, p.annotation)) for name, p in signature.parameters.items()]
    plain = [p.replace(annotation=hint.type if isinstance(hint, InitVar) else hint) for p, hint in named]
    return signature.replace(parameters=plain)


def _described(arguments: Any) -> str:
    """One line for each option, in the words of Python: keywords for flags, None for the 0 that stands for it."""
    lines = []
    for option in options_of(arguments).values():
        none = f"; None = {option.zero_means}" if option.zero_means else ""
        text = _FLAG.sub(_keyword, f"{option.help}{none}")
        lines.append(f"    {option.name}: {text}")
    return "\n".join(lines)


def _keyword(flag: re.Match[str]) -> str:
    return flag[1].replace("-", "_")
