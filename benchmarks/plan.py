"""Measure what planning costs: `snakemake -n` for large sweeps, beside the same workflow written bare by hand.

Adds to a raw file that run.py wrote, or makes one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure import end_on_sigterm, measure
from report import newest
from run import circumstances, clean_environment
from sweepack.files import write_atomic
from sweepack.listing import write_listing
from sweepack.manifest import cell_files
from sweepack.plan import make_plan
from sweepack.records import Record, State, hand_over
from venvs import ROOT

QUIET = ["--quiet", "host", "reason", "rules", "progress", "--rerun-triggers", "mtime", "params"]  # as profiles/default
OURS = ["snakemake", "--snakefile", f"{ROOT}/Snakefile"]
RUN = ["--profile", f"{ROOT}/profiles/local", "--cores", "2"]

# Without an import: that of torch, once for every edit of a task, is not the plan's cost.
TASK = """
def train(cell, *, lr: float, seed: int):
    return {"loss": lr * seed}
"""

BARE = """
import hashlib

CELLS = [hashlib.sha256(str(number).encode()).hexdigest()[:12] for number in range(int(config["cells"]))]


rule all:
    input:
        expand("results/cells/{cell}/result.json", cell=CELLS),


rule cell:
    output:
        "results/cells/{cell}/result.json",
    shell:
        "exec python cell.py {wildcards.cell}"
"""


@dataclass(frozen=True)
class Case:
    """A command on a sweep of ``cells`` cells. ``name`` is what `summary.py` knows it by."""

    name: str
    title: str
    cells: int
    command: list[str]


def cases(counts: Sequence[int], large: int) -> Iterator[Case]:
    """The dry runs, bare and ours in turn."""

    def bare(cells: int) -> Case:
        command = ["snakemake", "--snakefile", "bare.smk", "--config", f"cells={cells}", "-n", *QUIET]
        return Case("bare", "`-n`, bare", cells, command)

    for cells in counts:
        yield bare(cells)
        yield Case("jobs", "`-n`, a job a cell", cells, [*OURS, "-n", "--config", "cells_per_job=1"])
    if large:
        yield bare(large)
        yield Case("packs", "`-n`, `cells_per_job: auto`", large, [*OURS, "-n"])


def set_up(folder: Path, cells: int) -> None:
    """A project with a sweep of ``cells`` cells, and the bare workflow."""
    axes = {"lr": [0.01, 0.1], "seed": {"range": cells // 2}}
    config = {
        "sweep": {"name": "cells", "task": "task.py:train", "axes": axes},
        "resources": [{"gpu": 0.5, "cpus": 1}],
        "confirm_above": cells,
    }
    (folder / "config").mkdir()
    (folder / "config" / "config.yaml").write_text(json.dumps(config))
    (folder / "task.py").write_text(TASK)
    (folder / "bare.smk").write_text(BARE)


def finish(folder: Path) -> None:
    """Give every cell of the sweep in ``folder`` the result that it would have."""
    plan = make_plan(folder, ROOT, [], [])
    write_listing(plan, folder)
    for cell in plan.cells:
        files = cell_files(folder / plan.directory, cell.id)
        files.directory.mkdir(exist_ok=True)
        metrics = {"loss": cell.params["lr"] * cell.params["seed"]}
        record = Record(cell.id, State.FINISHED, attempt=1, started=0.0, ended=1.0, device="cpu", metrics=metrics)
        write_atomic(files.status, record.to_json())
        hand_over(files)


def run_case(case: Case, folder: Path, limit: float) -> dict[str, Any]:
    """The case's entry in the raw file."""
    log = folder / "log.txt"
    load = os.getloadavg()[0]
    cost = measure(case.command, folder, clean_environment(folder, folder, Path(sys.prefix)), log, limit)
    error = None
    if cost.status != 0:
        error = f"not done after {limit:g} s" if cost.status is None else f"exit status {cost.status}"
        error += "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    print(f"{case.cells:>7} {case.title:<34} {cost.wall:7.2f} s  {error or ''}", file=sys.stderr, flush=True)
    about = {"case": case.name, "title": case.title, "cells": case.cells, "load": round(load, 2)}
    return {**about, **asdict(cost), "error": error}


def finished_cases(cells: int, folder: Path, limit: float) -> Iterator[dict[str, Any]]:
    """A sweep whose cells are all finished: the first run gathers them, the second finds nothing to do."""
    set_up(folder, cells)
    finish(folder)
    yield run_case(Case("gather", "run, table of finished cells", cells, [*OURS, *RUN]), folder, limit)
    yield run_case(Case("nothing", "run again, nothing to do", cells, [*OURS, *RUN]), folder, limit)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    counts = parser.add_argument("--cells", default="1000,10000", help="numbers of cells, a job each")
    parser.add_argument("--large", type=int, default=100_000, help="number of cells planned as packs, 0 for none")
    parser.add_argument("--finished", type=int, default=10_000, help="cells of the finished sweep, 0 for none")
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="longest time for one command")
    parser.add_argument("--into", type=Path, default=None, help="the raw file (default: the latest in benchmarks/raw)")
    options = parser.parse_args(argv)
    end_on_sigterm()
    try:
        numbers = [int(part) for part in options.cells.split(",")]
    except ValueError:
        parser.error(f"argument {counts.option_strings[0]}: {options.cells!r} is not a list such as 1000,10000")
    target: Path = options.into or newest()
    empty: dict[str, Any] = {**circumstances(), "runners": {}, "runs": []}
    raw = json.loads(target.read_text()) if target.exists() else empty
    raw["plan"] = []

    def add(entry: dict[str, Any]) -> None:
        raw["plan"].append(entry)
        write_atomic(target, json.dumps(raw, indent=1) + "\n")

    for case in cases(numbers, options.large):
        with tempfile.TemporaryDirectory(prefix="swb-") as scratch:
            set_up(Path(scratch), case.cells)
            add(run_case(case, Path(scratch), options.limit))
    if options.finished:
        with tempfile.TemporaryDirectory(prefix="swb-") as scratch:
            for entry in finished_cases(options.finished, Path(scratch), options.limit):
                add(entry)
    print(target)
    return 1 if any(entry["error"] for entry in raw["plan"]) else 0


if __name__ == "__main__":
    sys.exit(main())
