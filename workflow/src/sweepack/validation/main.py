"""Try what must hold on the cluster, in a folder made anew, and tell what came of it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from sweepack.ddp.layout import Layout
from sweepack.errors import UserError, tells_user_errors
from sweepack.files import try_lock
from sweepack.slurm.cluster import read_partitions
from sweepack.validation.checks import FAIL, PASS, SKIP
from sweepack.validation.runbook import ENDING, PATIENCE, Validation, say
from sweepack.validation.trial import cancel_left


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Try on the Slurm cluster what must hold there. `snakemake validate_cluster` does this with the "
        "settings of its profile and configuration."
    )
    parser.add_argument("--folder", type=Path, required=True, help="where to try it, on the shared file system")
    parser.add_argument("--snakefile", type=Path, required=True)
    parser.add_argument("--slurm", type=json.loads, required=True, help="the configuration's `slurm`, as JSON")
    parser.add_argument("--setup", type=json.loads, required=True, help="the shell lines that jobs run first, as JSON")
    parser.add_argument("--partition", default=None, help="where jobs run; without it the cluster's default")
    parser.add_argument("options", nargs="*", help="of snakemake")
    return parser


@tells_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Try it all; the exit status: 0 when nothing failed."""
    options = parser().parse_args(argv)
    minutes = _patience()
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = try_lock(options.folder.with_name(f"{options.folder.name}.lock"))
    if lock is None:
        raise UserError(
            "validate_cluster", str(options.folder), "no other call of it in this folder", "wait for that to end"
        )
    for signum in ENDING:
        signal.signal(signum, _stop)
    cancel_left(options.folder, say)
    try:
        if options.folder.exists():
            shutil.rmtree(options.folder)
        options.folder.mkdir()
    except OSError as error:
        raise UserError(
            "validate_cluster", str(error), "a folder that can be made anew", f"remove {options.folder} by hand"
        ) from None
    snakemake = [sys.executable, "-m", "snakemake", "--snakefile", str(options.snakefile), *options.options]
    layout = _layout(options.partition)
    validation = Validation(options.folder, snakemake, options.slurm, options.setup, layout, minutes * 60)
    lines = validation.run()
    counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in (PASS, FAIL, SKIP)}
    told = f"{counts[PASS]} passed, {counts[FAIL]} failed" + (f", {counts[SKIP]} not tried" if counts[SKIP] else "")
    say(f"validate_cluster: {told}; all logs are in {options.folder}")
    return 1 if counts[FAIL] else 0


def _layout(name: str | None) -> Layout | None:
    """The smallest cell on several devices that tells something; None where no two devices can be had.

    Two nodes if there are two, and two GPUs on each if they have them.
    """
    partitions = read_partitions()
    partition = next((found for found in partitions if found.name == name or (name is None and found.default)), None)
    nodes = min(2, partition.nodes) if partition else 2
    gpus = min(2, partition.gpus) if partition else 1
    return Layout(nodes, gpus, nodes) if nodes * gpus > 1 else None


def _patience() -> float:
    given = os.environ.get(PATIENCE, "30")
    try:
        minutes = float(given)
    except ValueError:
        minutes = 0
    if not 0 < minutes < float("inf"):
        raise UserError(PATIENCE, given, "a number of minutes", f"for example {PATIENCE}=120")
    return minutes


def _stop(signum: int, _: FrameType | None) -> NoReturn:
    # Not by print, which may be just at work.
    os.write(1, f"validate_cluster: stopped by {signal.Signals(signum).name}; its jobs are cancelled\n".encode())
    sys.exit(128 + signum)
