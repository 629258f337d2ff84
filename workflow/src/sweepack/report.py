"""One self-contained page about a sweep: what came out, how it was learnt, how the devices were used."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from sweepack.advice import advise
from sweepack.aggregate import Aggregate
from sweepack.display import is_number, label, texts
from sweepack.files import write_atomic
from sweepack.manifest import Manifest, cell_files
from sweepack.records import State
from sweepack.results import ENDED_BADLY, REPORTED, best, history_of, numeric_metrics, table_of, values, varying

NO_FIGURES: str | None = None
try:
    from sweepack import figures
except ImportError as error:
    NO_FIGURES = f"no figures: {error}"

TOP, MOST_FAILURES, MOST_AXES, MOST_CURVES, MOST_HUES = 5, 50, 8, 4, 6
FAILURE = ("cell", "name", "status", "attempt", "error")
FILES = ("table.csv", "table.parquet", "history.csv", "history.parquet", "failures.csv")


def write_report(manifest: Manifest, directory: Path) -> Path:
    """Write ``report.html`` about the cells as they stand in ``directory`` (``results/<sweep>``); its path.

    The page needs no network: styles and figures are part of it. Where matplotlib cannot be imported it has no
    figures, and says so.
    """
    aggregate = Aggregate(manifest, directory)
    table, history = table_of(aggregate), history_of(aggregate)
    objective = manifest.objective
    metrics = numeric_metrics(table)
    wanted = f"metrics.{objective['metric']}" if objective else None
    metric = wanted if wanted in metrics else None
    mode = objective["mode"] if objective else ""
    leaders = best(table, metric, mode, top=TOP) if metric else table.head(0)
    states = table["status"].value_counts()
    runs, pauses, use = _use(table)
    page = {
        "sweep": manifest.sweep,
        "task": manifest.task,
        "objective": objective,
        "metric": metric,
        "counts": [(state, states[state]) for state in REPORTED if state in states],
        "cells": len(table),
        "use": use,
        "advice": advise(aggregate),
        "best": _grid(leaders, ["cell", *varying(table), *_first(metric, metrics), "wall_s"]),
        "seeds": _over_seed(table, metric, mode),
        "failures": _failures(table, directory),
        "most_failures": MOST_FAILURES,
        "files": [name for name in FILES if (directory / name).exists()],
        **_figures(table, history, metric or next(iter(metrics), None), leaders, runs, pauses),
    }
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = (files("sweepack") / "report.html.jinja").read_text(encoding="utf-8")
    path = directory / "report.html"
    write_atomic(path, environment.from_string(source).render(page))
    return path


def _use(table: pd.DataFrame) -> tuple[pd.DataFrame, list[tuple[float, float]], dict[str, Any] | None]:
    """The latest attempts as spans of Unix seconds, the pauses between them, and what these add up to."""
    runs = table[table["started"].notna()].copy()
    for column, name in (("started", "from"), ("ended", "to")):
        runs[name] = (runs[column] - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
    runs["to"] = runs["to"].mask((runs["status"] == State.RUNNING) & runs["to"].isna(), time.time())
    runs = runs[runs["to"].notna()]
    if not len(runs):
        return runs, [], None
    several = runs["host"].nunique() > 1
    device = runs["device"].fillna("device unknown")
    runs["lane"] = runs["host"].fillna("?") + " " + device if several else device
    idle, until = [], runs["from"].min()
    for start, end in sorted(zip(runs["from"], runs["to"], strict=True)):
        idle += [(until, start)] if start > until else []
        until = max(until, end)
    busy = until - runs["from"].min() - sum(end - start for start, end in idle)
    cell_time = (runs["to"] - runs["from"]).sum()
    use = {
        "first": datetime.fromtimestamp(runs["from"].min(), UTC),
        "last": datetime.fromtimestamp(until, UTC),
        "busy": duration(busy),
        "cell_time": duration(cell_time),
        "factor": cell_time / busy if busy else 1.0,
        "devices": runs["lane"].nunique(),
    }
    return runs, [(start, end) for start, end in idle if end - start > busy / 10], use


def duration(seconds: float) -> str:
    """``42.1 s``, ``3 min 07 s`` or ``2 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _first(metric: str | None, metrics: list[str]) -> list[str]:
    return sorted(metrics, key=lambda name: name != metric)


def _grid(table: pd.DataFrame, columns: list[str]) -> dict[str, Any]:
    """A table for the template: the head with its alignment, and rows of texts."""
    head = [("wall, s" if name == "wall_s" else label(name), is_number(table, name)) for name in columns]
    return {"head": head, "rows": list(zip(*(texts(table, name) for name in columns), strict=True))}


def _over_seed(table: pd.DataFrame, metric: str | None, mode: str) -> dict[str, Any] | None:
    seeds = [name for name in varying(table) if name.rpartition(".")[2] == "seed"]
    if metric is None or len(seeds) != 1:
        return None
    groups = best(table, metric, mode, over=seeds[0], top=2 * TOP)
    return _grid(groups, list(groups.columns)) if (groups["n"] > 1).any() else None


def _failures(table: pd.DataFrame, directory: Path) -> list[dict[str, str]]:
    bad = table[table["status"].isin([str(state) for state in ENDED_BADLY])]
    columns = {name: ["" if value is None else str(value) for value in values(bad, name)] for name in FAILURE}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [row | {"log": cell_files(Path(), row["cell"]).log.as_posix()} for row in rows]


def _figures(
    table: pd.DataFrame,
    history: pd.DataFrame,
    metric: str | None,
    leaders: pd.DataFrame,
    runs: pd.DataFrame,
    pauses: list[tuple[float, float]],
) -> dict[str, Any]:
    """The drawings by section; ``trouble`` says why there are none."""
    page: dict[str, Any] = {"plotted": metric, "against": [], "curves": [], "schedule": None, "trouble": NO_FIGURES}
    if NO_FIGURES:
        return page
    varied = varying(table)
    kinds = {name: {type(value) for value in values(table, name)} for name in varied}
    few = [name for name in varied if kinds[name] <= {str, bool} and 1 < table[name].nunique() <= MOST_HUES]
    hue = figures.Hue.of(table, few[0]) if few else None
    if metric is not None and table[metric].notna().any():
        page["against"] = [
            (label(axis), figures.against_axis(table, axis, metric, hue if hue and hue.column != axis else None))
            for axis in varied[:MOST_AXES]
        ]
    logged = [name for name in numeric_metrics(history) if history[name].notna().any()]
    names = dict(zip(leaders["cell"], _names(leaders), strict=True))
    page["curves"] = [
        (label(name), figures.learning_curves(history, name, names))
        for name in ([metric] if metric in logged else logged[:MOST_CURVES])
    ]
    if len(runs):
        page["schedule"] = figures.schedule(runs, pauses, hue)
    return page


def _names(table: pd.DataFrame) -> list[str]:
    """What tells these cells from one another, for a legend."""
    parts = [[f"{label(name)}={text or 'null'}" for text in texts(table, name)] for name in varying(table)]
    return [", ".join(row) for row in zip(*parts, strict=True)] if parts else list(table["name"])
