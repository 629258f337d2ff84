"""The ``sweepack`` command: look at a sweep's results, also while it runs.

Another module adds its commands with ``@app.command()``. Whatever costs time to import (pandas, rich's tables) is
imported inside a command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from sweepack.errors import UserError, Verbatim, did_you_mean
from sweepack.manifest import Manifest

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

UNBOUNDED = 100_000
COLOURS = {"finished": "green", "failed": "red", "running": "blue", "interrupted": "yellow", "lost": "magenta"}


class Commands(typer.core.TyperGroup):
    """A group that tells a UserError in its own words, on standard error, with exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(error, err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Look at the results of a sweep, also while it runs.",
)

Sweep = Annotated[
    str | None,
    typer.Argument(metavar="[SWEEP]", help="A sweep's name or its directory; the most recently changed by default."),
]
Results = Annotated[
    Path, typer.Option("--results", envvar="SWEEPACK_RESULTS", help="The folder that holds the sweeps.")
]
AllParams = Annotated[bool, typer.Option("--all-params", help="Show the parameters that don't vary, too.")]


@app.command()
def show(
    sweep: Sweep = None,
    status: Annotated[list[str] | None, typer.Option(help="Only the cells in this state; may be repeated.")] = None,
    sort: Annotated[str | None, typer.Option(help="A column: a metric, a parameter, wall_s, …")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="The largest first.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="At most this many cells; 0 for all.")] = 20,
    all_params: AllParams = False,
    results: Results = Path("results"),
) -> None:
    """The cells: their status, parameters and metrics."""
    from sweepack.advice import advise
    from sweepack.aggregate import Aggregate
    from sweepack.records import State
    from sweepack.results import find_column, summary, table_of

    for state in status or ():
        if state not in list(State):
            raise UserError("--status", state, "the state of a cell", did_you_mean(state, map(str, State)))
    directory = find_sweep(sweep, results)
    aggregate = Aggregate(Manifest.read(directory), directory)
    table = table_of(aggregate)
    rows = table[table["status"].isin(status)] if status else table
    if sort is not None:
        column = find_column("--sort", sort, list(table.columns))
        rows = rows.sort_values(column, ascending=not reverse, kind="stable", key=_sortable)
    shown = rows.head(limit) if limit else rows
    base = ["cell", "status", *(["attempt"] if (shown["attempt"] > 1).any() else [])]
    metrics = [name for name in table.columns if name.startswith("metrics.")]
    tail = [*_memory(shown), "device", "wall_s", *(["error"] if shown["error"].notna().any() else [])]
    console = terminal()
    _print_table(console, shown, [*base, *_shown_params(table, all_params), *metrics, *tail])
    left = len(rows) - len(shown)
    more = f" ({left} more not shown: --limit 0 shows all)" if left else ""
    console.print(summary(table) + more, markup=False, highlight=False)
    for line in advise(aggregate):
        console.print(f"advice: {line}", markup=False, highlight=False)


@app.command()
def best(
    sweep: Sweep = None,
    metric: Annotated[str | None, typer.Option(help="The metric; by default the sweep's objective.")] = None,
    mode: Annotated[str | None, typer.Option(help="max or min; by default the objective's.")] = None,
    over: Annotated[str | None, typer.Option(help="Take mean and deviation over this parameter, e.g. seed.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    all_params: AllParams = False,
    results: Results = Path("results"),
) -> None:
    """The best finished cells, or the best groups of cells that differ in one parameter only."""
    from sweepack import results as tables

    directory = find_sweep(sweep, results)
    manifest = Manifest.read(directory)
    table = tables.build_table(manifest, directory)
    console = terminal()
    if (table["status"] != "finished").all():
        console.print(f"No cell has finished yet. {tables.summary(table)}", markup=False, highlight=False)
        return
    column, mode = _objective(manifest, table, metric, mode)
    rows = tables.best(table, column, mode, over, top)
    params = [name for name in _shown_params(table, all_params) if name in rows.columns]
    if over is None:
        others = [name for name in table.columns if name.startswith("metrics.") and name != column]
        columns = ["cell", *params, column, *others, "wall_s"]
    else:
        columns = [*params, "mean", "std", "n"]
    _print_table(console, rows, columns)
    what = f"{column.removeprefix('metrics.')}, {mode}" + (f", mean over {over}" if over else "")
    console.print(f"{what}; {tables.summary(table)}", markup=False, highlight=False)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A sweep's name or its directory.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    exact: Annotated[bool, typer.Option("--exact", help="Bit for bit, not within a relative 1e-6.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="At most this many lines; 0 for all.")] = 20,
    results: Results = Path("results"),
) -> None:
    """Compare two sweeps: ids, parameters, metrics, statuses, history. Exit code 1 when they differ."""
    from sweepack.comparison import difference

    left, right = find_sweep(a, results), find_sweep(b, results)
    lines = difference(left, right, exact)
    for line in lines[: limit or None]:
        typer.echo(line)
    if lines:
        hidden = f", {limit} shown (--limit 0 shows all)" if limit and len(lines) > limit else ""
        typer.echo(f"{len(lines)} difference{'s' * (len(lines) != 1)} between {left} and {right}{hidden}")
        raise typer.Exit(1)
    how = "bit for bit" if exact else "within a relative 1e-6"
    cells = len(Manifest.read(left).cells)
    typer.echo(f"{left} and {right} are equal {how}: ids, parameters, metrics, statuses and history of {cells} cells")


def find_sweep(name: str | None, results: Path) -> Path:
    """The directory of the sweep called ``name`` (or at that path), else of the most recently changed one.

    The choice among several is told on standard error. Raises UserError when there is no such sweep.
    """
    known = {path.parent.name: path.parent for path in sorted(results.glob("*/sweep.json"))}
    if name is not None:
        for directory in (results / name, Path(name)):
            if (directory / "sweep.json").is_file():
                return directory
        expected = f"a sweep below {results}/ or a directory that holds sweep.json"
        raise UserError("SWEEP", name, expected, did_you_mean(name, known))
    if not known:
        raise UserError(
            "--results",
            Verbatim(results),
            "a folder with the results of at least one sweep",
            "run a sweep first (`snakemake --profile profiles/local`), or type `--results FOLDER`",
        )
    directory = max(known.values(), key=_last_change)
    among = f", the most recently changed of {len(known)}" if len(known) > 1 else ""
    typer.echo(f"sweep {directory.name} ({directory}{among})", err=True)
    return directory


def _last_change(directory: Path) -> float:
    """When something in the sweep or in one of its cells' folders was last written, in Unix seconds."""
    folders = [directory, *(directory / "cells").glob("*")]
    return max(folder.stat().st_mtime for folder in folders)


def _objective(manifest: Manifest, table: pd.DataFrame, metric: str | None, mode: str | None) -> tuple[str, str]:
    """The column to rank by and its mode: the options, completed by the sweep's objective where it speaks of them."""
    from sweepack.results import find_column, numeric_metrics

    objective = manifest.objective or {}
    known = numeric_metrics(table)
    metric = metric or objective.get("metric")
    if metric is None:
        names = ", ".join(name.removeprefix("metrics.") for name in known) or "none"
        fix = f"type `--metric NAME --mode max` (or min). Known: {names}."
        raise UserError("--metric", Verbatim("not given"), "a metric to rank by, as the sweep has no objective", fix)
    column = find_column("--metric", metric, known)
    if mode is None and column == f"metrics.{objective.get('metric')}":
        mode = objective["mode"]
    if mode is None:
        fix = f"type `--metric {metric} --mode max`, or min when less is better"
        raise UserError("--mode", Verbatim("not given"), f"max or min, as {metric} is not the sweep's objective", fix)
    return column, mode


def _shown_params(table: pd.DataFrame, everything: bool) -> list[str]:
    from sweepack.results import parameters, varying

    return parameters(table) if everything else varying(table)


def _memory(table: pd.DataFrame) -> list[str]:
    """The columns about memory that say something: a peak where it was held to something, failures of a known kind."""
    some = [name for name in ("batch", "peak_reserved_gib", "failure") if table[name].notna().any()]
    if "peak_reserved_gib" in some and table["share"].nunique() > 1:
        some.insert(0, "share")
    capped = table["memory_cap_gib"].notna().any()
    return some if "peak_reserved_gib" in some or not capped else [*some, "peak_rss_gib"]


def _sortable(column: pd.Series) -> pd.Series:
    """The column itself, or its text where its values (lists) have no order."""
    import pandas as pd

    return column.astype("string") if isinstance(column.dtype, pd.ArrowDtype) else column


def terminal() -> Console:
    """Standard output; as wide as a line needs when it is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNBOUNDED)


def _print_table(console: Console, table: pd.DataFrame, columns: Sequence[str]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from sweepack.display import is_number, label, texts

    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    written = []
    for name in columns:
        number = is_number(table, name)
        rigid = number or name in ("cell", "status")
        grid.add_column(Text(label(name)), justify="right" if number else "left", no_wrap=rigid)
        colours = COLOURS if name == "status" else {}
        written.append([Text(text, colours.get(text, "")) for text in texts(table, name)])
    for row in zip(*written, strict=True):
        grid.add_row(*row)
    console.print(grid)
