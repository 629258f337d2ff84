"""The table's values as text for people, the same on a terminal and in the report."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from sweepack.results import values


def readable(value: Any) -> str:
    """A value as a person writes it, exact and on one line; None is empty."""
    if value is None:
        return ""
    if isinstance(value, str) and value.isprintable():
        return value
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def label(column: str) -> str:
    """``params.optim.lr`` as ``optim.lr``."""
    return column.removeprefix("params.").removeprefix("metrics.")


def is_number(table: pd.DataFrame, column: str) -> bool:
    """Whether the column holds integers or floats (no booleans)."""
    return table[column].dtype in ("float64", "Int64", "int64")


def texts(table: pd.DataFrame, column: str) -> list[str]:
    """The column for people: floats rounded, a metric that a finished cell lacks as nan."""
    found = values(table, column)
    if column == "error":
        return [(value or "").strip().partition("\n")[0][:100] for value in found]
    if column == "wall_s":
        return ["" if value is None else f"{value:.1f}" for value in found]
    if column.endswith("_gib") and "." not in column:
        return ["" if value is None else f"{value:.3f}" for value in found]
    if table[column].dtype != "float64":
        return [readable(value) for value in found]
    if column.startswith("params."):
        return ["" if value is None else f"{value:.6g}" for value in found]
    rounded = ["nan" if value is None else f"{value:#.5g}".rstrip(".") for value in found]
    if not column.startswith("metrics."):
        return ["" if text == "nan" else text for text in rounded]
    return [text if state == "finished" else "" for text, state in zip(rounded, table["status"], strict=True)]
