"""Parameter values: one canonical form, coerced by the task's annotations, addressed by dotted names."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sweepack.errors import UserError, Verbatim

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)*")


@dataclass(frozen=True)
class Annotation:
    """What a task's annotation accepts: any of ``kinds``, and ``items`` for the entries of a list.

    ``kinds`` are names of JSON-like types (``bool int float str list dict None``); ``choices`` are the values of a
    ``Literal``. An annotation that says nothing about these (``Any``, a class) is represented by None instead.
    """

    kinds: frozenset[str] = frozenset()
    choices: tuple[Any, ...] = ()
    items: Annotation | None = None
    text: str = ""

    def accepts(self, kind: str) -> bool:
        return kind in self.kinds


def coerce(value: Any, annotation: Annotation | None, key: str) -> Any:
    """``value`` as the annotation wants it: for ``float``, ``"1e-3"`` and ``1`` become floats; for ``int``, ``8.0``
    and ``"8"`` are 8; for ``bool``, ``"true"`` is true.

    Nothing is bent beyond that: a bool is no number, a number no string. Raises UserError, naming ``key``.
    """
    value = plain(value, key)
    if annotation is None:
        return value
    choices = {canonical(choice): choice for choice in annotation.choices}
    for candidate in _candidates(value):
        if canonical(candidate) in choices:
            return choices[canonical(candidate)]
        if annotation.accepts(kind_of(candidate)):
            if isinstance(candidate, list):
                return [coerce(entry, annotation.items, f"{key}[{index}]") for index, entry in enumerate(candidate)]
            return candidate
    shown = annotation.text
    if isinstance(value, str):
        fix = f"give {_example(annotation)}"
    elif isinstance(value, list):
        fix = "under `params` a list is one value; list the values to try under `axes`"
    elif annotation.accepts("str"):
        fix = f'quote it to give text: "{canonical(value)}"'
    else:
        fix = f"give {_example(annotation)}, or change the annotation in the task"
    raise UserError(key, value, f"a value for `{shown}`", fix)


def _candidates(value: Any) -> Iterator[Any]:
    """The value itself, then what it may stand for, the exact one first."""
    yield value
    if isinstance(value, str):
        value = _meant(value)
        yield value
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield float(value)


def _meant(text: str) -> Any:
    """The boolean or number that ``text`` spells, else the text."""
    lower = text.lower()
    if lower in ("true", "false"):
        return lower == "true"
    if len(text) > 300:
        return text
    if re.fullmatch(r"[+-]?[0-9]+", lower):
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?\.?inf", lower):
        return float(lower.replace(".inf", "inf"))
    return text


def kind_of(value: Any) -> str:
    """The name of a plain value's type as annotations spell it."""
    return "None" if value is None else type(value).__name__


def plain(value: Any, key: str) -> Any:
    """``value`` checked to be made of null, booleans, numbers, strings, lists and mappings with string keys.

    Raises UserError for anything else, for NaN, which equals nothing and so can name no cell, and for whole numbers
    beyond what a float holds.
    """
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise UserError(key, Verbatim("(a huge number)"), "a number up to 1.8e308", "give it as text, in quotes")
    if isinstance(value, float) and math.isnan(value):
        raise UserError(key, value, "a number that equals itself", "use null for `not set`")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(entry, f"{key}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise UserError(key, name, "text as the name of a nested key", f'quote it: "{name}"')
        return {name: plain(entry, f"{key}.{name}") for name, entry in value.items()}
    raise UserError(key, value, "null, a boolean, a number, text, a list or a mapping", "write it as one of these")


def canonical(value: Any) -> str:
    """One text per value: keys sorted, ``0.001`` for every spelling of it, ``1``, ``1.0`` and ``true`` apart."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def check_name(name: object, key: str) -> str:
    """``name`` as a parameter's (dotted) name; raises UserError when it cannot be one."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(
            key,
            name,
            "a parameter's name: letters, digits, `_` and `-`, a dot before a nested key",
            "rename it, as in `lr` or `optim.lr`",
        )
    return name


def set_dotted(params: dict[str, Any], name: str, value: Any, key: str) -> None:
    """Set the nested key ``name`` (``optim.lr``) in ``params``; raises UserError when a part of it is no mapping."""
    *parents, last = name.split(".")
    inner = params
    for depth, part in enumerate(parents, start=1):
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(
                key,
                name,
                f"`{'.'.join(parents[:depth])}` to be a mapping, but it is {inner!r}",
                "give the nested key another parent, or remove the value of the parent",
            )
    inner[last] = copy.deepcopy(value)


def get_dotted(params: Mapping[str, Any], name: str) -> Any:
    """The nested value ``name``; raises KeyError when it is not there."""
    inner: Any = params
    for part in name.split("."):
        if not isinstance(inner, Mapping):
            raise KeyError(name)
        inner = inner[part]
    return inner


def dotted_items(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(dotted name, value)`` of every leaf; an empty mapping is a leaf."""
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from dotted_items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _example(annotation: Annotation) -> str:
    choices = ["one of " + ", ".join(json.dumps(choice) for choice in annotation.choices)] if annotation.choices else []
    examples = {
        "bool": "true or false",
        "int": "a whole number such as 64",
        "float": "a number such as 1e-3",
        "str": 'text such as "adam"',
        "list": "a list such as [0.9, 0.99]",
        "dict": "a mapping such as {lr: 1e-3}",
        "None": "null",
    }
    return " or ".join([*choices, *(text for kind, text in examples.items() if annotation.accepts(kind))])
