"""The commands of ``sweepack`` that do something, beside those of ``cli`` that look at results."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from sweepack.cli import Results, Sweep, app, find_sweep, terminal
from sweepack.errors import UserError, Verbatim, did_you_mean
from sweepack.files import try_lock
from sweepack.manifest import Manifest, cell_files
from sweepack.records import archive_attempt


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def rerun(
    context: typer.Context,
    cells: Annotated[list[str], typer.Argument(help="Ids of cells, or their first characters.")],
    sweep: Annotated[str | None, typer.Option(help="The sweep; the most recently changed by default.")] = None,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Start snakemake afterwards.")] = True,
    results: Results = Path("results"),
) -> None:
    """Archive the latest attempt of cells and run them again, from nothing.

    Snakemake is called with the configuration of the sweep's last run and `--profile profiles/local`, or with what
    follows `--`.
    """
    directory = find_sweep(sweep, results)
    manifest = Manifest.read(directory)
    # Click hands over what stands behind `--` among the arguments.
    own, passed = _split(sys.argv, cells)
    names = {cell.id: cell.slug for cell in manifest.cells}
    home = Path(manifest.configuration[1]).parent if "--snakefile" in manifest.configuration else Path()
    profile = home / "profiles/local"
    if run and not passed and not profile.is_dir():
        fix = "name the folder of one behind `--`: `sweepack rerun CELL -- --profile path/to/profile`"
        raise UserError("profile", str(profile), "the profile to run with", fix)
    for cell in [_find(prefix, names) for prefix in own]:
        files = cell_files(directory, cell)
        if files.directory.is_dir():
            lock = try_lock(files.lock)
            if lock is None:
                raise UserError("CELL", cell, "a cell that is not running", "stop its run first, or wait for its end")
            archive = archive_attempt(files)
            os.close(lock)
            kept = f"; the earlier attempt is kept in {archive}" if archive else ""
            typer.echo(f"cell {cell} ({names[cell]}) will run again{kept}", err=True)
    if run:
        command = ["snakemake", *(passed or ["--profile", str(profile)]), *manifest.configuration]
        typer.echo("+ " + " ".join(command), err=True)
        os.execvp(command[0], command)


@app.command()
def leases() -> None:
    """Who holds and who waits for which share of this machine's devices, over all runs."""
    from sweepack.devices import load_nvml, visible_pool
    from sweepack.leases import WHOLE, LeasePool, lease_directory

    pool = visible_pool(os.environ, load_nvml())
    node = LeasePool(lease_directory(), [device.key for device in pool])
    free = node.free()
    for device in pool:
        typer.echo(f"{device.label}: {free[device.key] / WHOLE:g} free")
    for holder in node.holders():
        what = "waits for" if holder.waiting else "holds"
        where = ", ".join(holder.devices)
        typer.echo(f"  pid {holder.pid}: cell {holder.label} {what} {holder.milli / WHOLE:g} of {where}")


@app.command()
def size(
    sweep: Sweep = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say what can be said without a GPU.")] = False,
    gpu_memory: Annotated[
        str | None, typer.Option(help="With --estimate: memory of the GPU, `48GiB`; by default the one here.")
    ] = None,
    cells: Annotated[
        int | None, typer.Option(min=1, max=1000, help="With --estimate: cells on the GPU; by default by their share.")
    ] = None,
    configfile: Annotated[
        list[Path] | None, typer.Option(help="As for snakemake; by default config/config.yaml.")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(help="As for snakemake, `name=value`; may be repeated.")] = None,
    results: Results = Path("results"),
) -> None:
    """How much memory cells take, and which batches and shares fit: measured, or estimated without a GPU.

    Of the sweep that is configured, or of an earlier one.
    """
    from sweepack.sizing import show
    from sweepack.sizing.measuring import Meters

    root = Path.cwd()
    chosen = bool(configfile or config)
    if sweep and chosen:
        raise UserError("SWEEP", sweep, "a sweep or a configuration, not both", "leave out one of the two")
    earlier = find_sweep(sweep, results) if sweep or not (chosen or show.has_configuration(root)) else None
    plan = show.plan_of(earlier, configfile or [], config or [], root)
    if estimate:
        card = show.card(gpu_memory, cells)
        with Meters() as meters:
            tell = functools.partial(typer.echo, err=True)
            terminal().print(show.estimates_table(plan, root, card, meters, tell))
        typer.echo(show.about_estimates(plan, root, card))
        return
    if not plan.sizes.groups:
        typer.echo("No size is left open: no cell has `batch: auto` or `gpu: auto`. `--estimate` shows all the same.")
        return
    terminal().print(show.pins_table(plan, root))
    if plan.sizes.unpinned:
        typer.echo("Measure what is missing: `snakemake probe --profile profiles/local` (or profiles/slurm).")


@app.command()
def docs(folder: Annotated[Path, typer.Argument(help="Where to write.")] = Path("config")) -> None:
    """Write the reference of the configuration and its JSON schema from the models."""
    from sweepack.documentation import write

    for path in write(folder):
        typer.echo(path)


def _split(argv: list[str], cells: list[str]) -> tuple[list[str], list[str]]:
    """The cells, and what follows ``--`` on the command line."""
    passed = argv[argv.index("--") + 1 :] if "--" in argv else []
    return cells[: len(cells) - len(passed)], passed


def _find(prefix: str, names: dict[str, str]) -> str:
    """The one cell whose id starts with ``prefix`` or whose name it is."""
    found = [cell for cell, name in names.items() if cell.startswith(prefix) or name == prefix]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError("CELL", prefix, f"one cell; {len(found)} ids start so", "give more characters of the id")
    shown = dict(list(names.items())[:10])
    listing = "\n".join(f"{cell}  {name}" for cell, name in shown.items())
    more = f"\nand {len(names) - 10} more: see cells.tsv" if len(names) > 10 else ""
    guess = did_you_mean(prefix, names.values()).split(" Known")[0] if names else ""
    hint = f"{guess}\n" if guess.startswith("did") else ""
    raise UserError(
        "CELL", Verbatim(prefix), "the id of a cell, or its first characters", f"{hint}Known:\n{listing}{more}"
    )
