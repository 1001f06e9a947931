"""Options in a YAML file: one `option: value` a line, keys with dashes or underscores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml

from flexengine.options.option import Option
from flexengine.wording import did_you_mean, shown


def read_yaml(
    text: str,
    source: str,
    options: Mapping[str, Option],
    translate: Callable[[Mapping[str, Any], str], dict[str, Any]] = lambda given, _: dict(given),
) -> dict[str, Any]:
    """Read the options that a YAML text sets, of those that there are.

    translate: gives the options by other systems' names for them; it is told the source, too.

    Raises ValueError when it is not YAML, not a mapping, or has a key that is no option; `source` names the file.
    """
    try:
        raw = yaml.load(text, _StrictLoader)
    except RecursionError:
        raise ValueError(f"{source} is not valid YAML: values are nested too deep; write one option a line") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that cannot be
        raise ValueError(f"{source} is not valid YAML: {error}") from None
    if not isinstance(raw, Mapping):
        found = "nothing" if raw is None else type(raw).__name__
        raise ValueError(f"{source} must hold one `option: value` a line, found {found}")
    given = translate({str(key).replace("-", "_"): value for key, value in raw.items()}, source)
    unknown = sorted(set(given) - set(options))
    if unknown:
        named = "; ".join(f"{shown(key)[1:-1]}{did_you_mean(key, options)}" for key in unknown[:3])
        raise ValueError(f"{source} has unknown options: {named}\n  `flexengine train --help` lists what there is")
    return {key: _number_from_text(value, options[key]) for key, value in given.items()}


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML's readers would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for name in (str(key.value).replace("-", "_") for key, _ in node.value):
            if name in seen:
                raise yaml.YAMLError(f"{shown(name)} is given twice")
            seen.add(name)
        return super().construct_mapping(node, deep)


def _number_from_text(value: Any, option: Option) -> Any:
    """YAML 1.1 reads 3e-5 as text: a number needs a dot before the e."""
    if isinstance(value, str) and option.value_type is float:
        try:
            return float(value)
        except ValueError:
            return value  # the check on construction words the error
    return value
