"""The report's figures as SVG text: a metric against an axis, learning curves, the schedule."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from sweepack.display import label, readable
from sweepack.records import State
from sweepack.results import values

PALETTE = ["#3b6fb6", "#d9822b", "#3a9a6b", "#a8518a", "#7a6bc2", "#5b7f95"]
STATES = {"failed": "#c8403a", "interrupted": "#d8b13c", "lost": "#8a5fb0", "running": "#7fb2dd", "pending": "#c9ced6"}
FAINT, INK, MUTED = "#cfd4dc", "#2b2f36", "#6b7280"
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#b8bec8",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 8.5,
    "grid.color": "#eceff3",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "text.color": INK,
    # A parameter's value may hold a dollar sign, which is no formula.
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}
FEW, MOST_LABELS, MOST_LANES, MANY = 12, 30, 40, 1000


def _drawing(
    name: str, size: tuple[float, float], draw: Callable[[Axes], None], legend: Sequence[tuple[str, str]]
) -> str:
    """What ``draw`` puts on the axes, as one SVG element of ``size`` inches; the same input gives the same text."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs missing here are there in the browser
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        draw(figure.add_subplot())
        if legend:
            handles = [Patch(color=colour, label=_short(name, 80)) for name, colour in legend]
            columns = int(size[0] * 13 / (max(len(name) for name, _ in legend) + 5))
            figure.legend(handles=handles, loc="outside upper right", ncols=max(1, min(len(legend), columns)))
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    text = stream.getvalue()
    return text[text.index("<svg") :]


@dataclass(frozen=True)
class Hue:
    """The parameter that colours the figures, and the colour of each of its values."""

    column: str
    colours: dict[str, str]

    @classmethod
    def of(cls, table: pd.DataFrame, column: str) -> Hue:
        """The colours for the few values of ``column``, in index order; the same in every figure."""
        return cls(column, dict(zip(dict.fromkeys(_names(table, column)), PALETTE, strict=False)))


def against_axis(table: pd.DataFrame, axis: str, metric: str, hue: Hue | None = None) -> str:
    """``metric`` of every finished cell against the parameter ``axis``, with the mean at each value."""
    table = table[np.isfinite(table[metric].to_numpy(dtype=float, na_value=np.nan))]
    scores = table[metric].to_numpy(dtype=float)
    found = values(table, axis)
    hues = np.array(_names(table, hue.column), dtype=object) if hue else None

    def draw(axes: Axes) -> None:
        numeric = bool(found) and all(type(value) in (int, float) and abs(value) < 1e300 for value in found)
        if numeric:
            where = np.array(found, dtype=float)
            _scale(axes, where)
        else:
            codes, names = pd.factorize(np.array(_names(table, axis), dtype=object))
            where = codes.astype(float)
            _name_ticks(axes, list(names))
        jitter = np.zeros(len(where)) if numeric else np.random.default_rng(0).uniform(-0.12, 0.12, len(where))
        few, many = len(np.unique(where)) <= FEW, len(where) > MANY
        for name, colour in (hue.colours if hue else {"": PALETTE[0]}).items():
            part = np.full(len(where), True) if hues is None else hues == name
            x, y = where[part], scores[part]
            size = 5 if many else 16
            axes.scatter(x + jitter[part], y, size, color=colour, alpha=0.35, linewidth=0, rasterized=many)
            means = pd.Series(y).groupby(x).mean()
            if few or len(means) <= len(y) / 2:
                line = "o-" if numeric else "o"
                axes.plot(means.index, means, line, markersize=4, linewidth=1.5, color=colour)
        if len(scores) and scores.min() > 0 and scores.max() / scores.min() > 1e3:
            axes.set_yscale("log")
            _plain_ticks(axes.yaxis)
        axes.set(xlabel=label(axis), ylabel=label(metric))

    return _drawing(f"{axis} {metric}", (4.4, 3.1), draw, [*hue.colours.items()] if hue else [])


def learning_curves(history: pd.DataFrame, metric: str, highlighted: dict[str, str]) -> str:
    """``metric`` over epochs, else steps, else rows; ``highlighted`` cells (id: name) in colour, the others faint."""
    history = history.assign(row=history.groupby("cell").cumcount())
    index = next((name for name in ("epoch", "step") if history[name].nunique() > 1), "row")
    rows = history[[index, metric, "cell"]].dropna()
    rows = rows[np.isfinite(rows[metric].astype(float))]
    codes, cells = pd.factorize(rows["cell"])
    order = np.argsort(codes, kind="stable")
    points = rows[[index, metric]].to_numpy(dtype=float)[order]
    curves = dict(zip(cells, np.split(points, np.flatnonzero(np.diff(codes[order])) + 1), strict=False))

    def draw(axes: Axes) -> None:
        others = [curve for cell, curve in curves.items() if cell not in highlighted]
        alpha = max(0.15, min(0.9, 30 / (len(others) or 1)))
        colour = FAINT if highlighted else PALETTE[0]
        axes.add_collection(
            LineCollection(others, colors=colour, linewidths=0.9, alpha=alpha, rasterized=len(others) > MANY / 3)
        )
        for cell, colour in zip(highlighted, PALETTE, strict=False):
            if cell in curves:
                line = "." if len(curves[cell]) < 2 else "-"
                axes.plot(*curves[cell].T, line, color=colour, linewidth=1.6)
        axes.autoscale()
        if len(points) and points[:, 1].min() > 0 and points[:, 1].max() / points[:, 1].min() > 100:
            axes.set_yscale("log")
            _plain_ticks(axes.yaxis)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel=index, ylabel=label(metric))

    return _drawing(f"curves {metric}", (9.4, 3.8), draw, [*zip(highlighted.values(), PALETTE, strict=False)])


def schedule(table: pd.DataFrame, pauses: Sequence[tuple[float, float]], hue: Hue | None = None) -> str:
    """Every cell's latest attempt as a bar on its device's lane, over time.

    ``table`` holds ``lane`` and Unix times ``from`` and ``to`` in seconds; ``pauses`` are spans in which nothing ran,
    cut short on the time axis.
    """
    origin = table["from"].min()
    squeezed = _squeeze(origin, pauses, table["to"].max())
    lanes = table["lane"].value_counts().index[:MOST_LANES].sort_values()
    rows = table[table["lane"].isin(lanes)].sort_values("from", kind="stable")
    free: dict[str, list[float]] = {lane: [] for lane in lanes}
    slots = []
    for lane, start, end in zip(rows["lane"], rows["from"], rows["to"], strict=True):
        ends = free[lane]
        slot = next((number for number, until in enumerate(ends) if until <= start), len(ends))
        ends[slot : slot + 1] = [end]
        slots.append(slot)
    base = dict(zip(lanes, np.cumsum([0, *(len(free[lane]) + 0.5 for lane in lanes)]), strict=False))
    heights = sum(len(ends) + 0.5 for ends in free.values())
    named = hue.colours if hue else {State.FINISHED.value: PALETTE[0]}
    hues = _names(rows, hue.column) if hue else [State.FINISHED.value] * len(rows)
    colours = [STATES.get(state) or named[name] for state, name in zip(rows["status"], hues, strict=True)]
    unit, seconds = _time_unit(squeezed(table["to"].max()))

    def draw(axes: Axes) -> None:
        many = len(rows) > MANY
        left, right = squeezed(rows["from"]) / seconds, squeezed(rows["to"]) / seconds
        low = np.array([base[lane] + slot for lane, slot in zip(rows["lane"], slots, strict=True)])
        corners = [(left, low), (right, low), (right, low + 0.86), (left, low + 0.86)]
        bars = list(np.stack([np.column_stack(corner) for corner in corners], axis=1))
        edge = 0 if many else 0.5
        axes.add_collection(
            PolyCollection(bars, facecolors=colours, edgecolors="white", linewidths=edge, rasterized=many)
        )
        for start, _ in pauses:
            axes.axvline(squeezed(start) / seconds, color=MUTED, lw=0.9, ls=":")
        axes.set_yticks([base[lane] + len(free[lane]) / 2 for lane in lanes], [_short(str(lane), 26) for lane in lanes])
        axes.set_ylim(heights, -0.5)
        axes.set_xlim(0, right.max() * 1.01 or 1)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        cut = ", pauses cut at the dotted lines" if pauses else ""
        most = f"; the {MOST_LANES} busiest of {table['lane'].nunique()} devices" if len(rows) < len(table) else ""
        axes.set_xlabel(f"{unit} since the first start{cut}{most}")

    states = {state: STATES[state] for state in dict.fromkeys(rows["status"]) if state in STATES}
    plain = {name for name, state in zip(hues, rows["status"], strict=True) if state not in STATES}
    legend = [(name, colour) for name, colour in named.items() if name in plain and (hue or states)]
    legend += states.items()
    return _drawing("schedule", (9.4, min(9.0, 1.1 + 0.24 * heights)), draw, legend)


def _names(table: pd.DataFrame, column: str) -> list[str]:
    return ["null" if value is None else readable(value) for value in values(table, column)]


def _plain_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis as plain text; the default is a formula."""
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _scale(axes: Axes, where: np.ndarray) -> None:
    """A logarithmic scale for values over decades; the values themselves as ticks while they have room."""
    distinct = np.unique(where)
    positive = distinct[distinct > 0]
    placed = distinct
    if len(positive) > 1 and distinct[0] >= 0 and positive[-1] / positive[0] >= 20:
        if distinct[0] == 0:
            axes.set_xscale("symlog", linthresh=positive[0])
        else:
            axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
        placed = np.log(np.maximum(distinct, positive[0] / 10))
    span = placed[-1] - placed[0]
    if len(distinct) == 1 or (len(distinct) <= FEW and np.diff(placed).min() > 0.07 * span):
        axes.set_xticks(distinct, [f"{value:g}" for value in distinct])


def _name_ticks(axes: Axes, names: Sequence[str]) -> None:
    step = max(1, math.ceil(len(names) / MOST_LABELS))
    shown = [_short(name, 18) for name in names[::step]]
    axes.set_xticks(range(0, len(names), step), shown)
    axes.set_xlim(-0.5, max(len(names), 1) - 0.5)
    axes.grid(axis="x", visible=False)
    if sum(len(name) + 3 for name in shown) > 44:
        axes.tick_params(axis="x", rotation=35 if len(shown) < 10 else 90)


def _squeeze(origin: float, pauses: Sequence[tuple[float, float]], end: float) -> Callable[[Any], Any]:
    """Unix seconds to seconds since ``origin``, each pause shrunk to a fiftieth of the time in which something ran."""
    busy = end - origin - sum(to - start for start, to in pauses)
    real, drawn = [origin], [0.0]
    for start, to in pauses:
        drawn += [drawn[-1] + start - real[-1], drawn[-1] + start - real[-1] + busy / 50]
        real += [start, to]
    real.append(end)
    drawn.append(drawn[-1] + end - real[-2])
    return lambda moments: np.interp(moments, real, drawn)


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
