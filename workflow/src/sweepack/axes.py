"""The values of an axis: a list as it stands, or one of four ways to write many numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from sweepack.errors import UserError, did_you_mean

# Twelve significant digits: enough to tell any two values that a person means apart, few enough that
# `linspace: [0, 1, 11]` gives 0.3 and not 0.30000000000000004, so that it names the same cell as a list does.
DIGITS = 12
MOST = 1_000_000


def axis_values(spec: Any, key: str) -> list[Any]:
    """The values that ``spec`` stands for, in order. Raises UserError, naming ``key``, when there are none."""
    if isinstance(spec, list):
        if not spec:
            raise UserError(key, spec, "at least one value", "list the values to try, or remove the axis")
        return spec
    if not isinstance(spec, Mapping):
        raise UserError(
            key, spec, "the list of values to try", f"write `[{spec!r}]`, or move it to `params` if it does not vary"
        )
    if len(spec) != 1 or next(iter(spec)) not in _FORMS:
        name = next(iter(spec), "")
        raise UserError(
            key,
            dict(spec),
            "a list, or a mapping with exactly one of range, linspace, logspace, geomspace",
            did_you_mean(str(name), _FORMS) + " A mapping as a value goes into a list: `[{a: 1}, {a: 2}]`.",
        )
    ((form, arguments),) = spec.items()
    return _FORMS[form](arguments, f"{key}.{form}")


def _range(arguments: Any, key: str) -> list[Any]:
    numbers = arguments if isinstance(arguments, list) else [arguments]
    if not 1 <= len(numbers) <= 3 or not all(_is_int(number) for number in numbers):
        raise UserError(key, arguments, "whole numbers: stop, [start, stop] or [start, stop, step]", "write `range: 5`")
    if len(numbers) == 3 and numbers[2] == 0:
        raise UserError(key, arguments, "a step other than 0", "drop the step, or give `1`")
    values = range(*numbers)
    _gate(values, arguments, key)
    if not values:
        raise UserError(key, arguments, "at least one value", "the stop is not included: `range: [0, 5]` is 0 … 4")
    return list(values)


def _linspace(arguments: Any, key: str) -> list[Any]:
    start, stop, count = _ends(arguments, key)
    return [_rounded(value) for value in _evenly(start, stop, count)]


def _logspace(arguments: Any, key: str) -> list[Any]:
    start, stop, count = _ends(arguments, key)
    if (0 < start < 1 and 0 < stop < 1) or max(abs(start), abs(stop)) > 300:
        raise UserError(
            key,
            arguments,
            "exponents of ten, as in NumPy: `[-4, -1, 4]` is 1e-4, 1e-3, 1e-2, 1e-1",
            f"for the end points themselves write `geomspace: {arguments}`",
        )
    return [_rounded(10.0**exponent) for exponent in _evenly(start, stop, count)]


def _geomspace(arguments: Any, key: str) -> list[Any]:
    start, stop, count = _ends(arguments, key)
    if start <= 0 or stop <= 0:
        raise UserError(
            key,
            arguments,
            "end points above 0",
            f"write `geomspace: [1e-4, 1e-1, 4]`, or `logspace: {arguments}` if these are exponents of ten",
        )
    return [_rounded(start ** (1 - part) * stop**part) for part in _evenly(0.0, 1.0, count)]


def _evenly(start: float, stop: float, count: int) -> list[float]:
    # In decimal, as the ends were written: a zero in the middle is 0 and not 2.8e-17, huge ends do not overflow.
    low, high, last = Decimal(repr(start)), Decimal(repr(stop)), max(count - 1, 1)
    return [float((low * (last - index) + high * index) / last) for index in range(count)]


def _ends(arguments: Any, key: str) -> tuple[float, float, int]:
    numbers = arguments if isinstance(arguments, list) else []
    if len(numbers) != 3 or not all(_is_int(number) or isinstance(number, float) for number in numbers):
        raise UserError(key, arguments, "[start, stop, count]", "for example `linspace: [0, 1, 11]`")
    start, stop, count = numbers
    if not _is_int(count) or count < 1:
        raise UserError(key, arguments, "a whole count of at least 1 at the end", "write `[start, stop, count]`")
    if not all(abs(end) <= sys.float_info.max for end in (start, stop)):
        raise UserError(key, arguments, "finite ends", "write numbers that a float holds, up to 1.8e308")
    _gate(range(count), arguments, key)
    return float(start), float(stop), count


def _gate(places: range, arguments: Any, key: str) -> None:
    """Refuse what would not even fit into memory, before it is laid out; ``confirm_above`` guards the rest."""
    if places[MOST:]:
        raise UserError(key, arguments, f"at most {MOST:,} values on an axis", "shorten it")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


_FORMS: dict[str, Callable[[Any, str], list[Any]]] = {
    "range": _range,
    "linspace": _linspace,
    "logspace": _logspace,
    "geomspace": _geomspace,
}
