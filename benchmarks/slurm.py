"""300 trivial cells on a Slurm cluster: packs, a plain job array, and Snakemake's own executor with a job a cell.

The cluster must be up (`make slurm-up` starts one inside this machine). A program put first on the path counts what is
asked of the controller.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure import end_on_sigterm, measure
from report import newest
from run import circumstances, clean_environment
from sweepack.files import write_atomic
from venvs import ROOT

PROGRAMS = ("sbatch", "squeue", "sacct", "scontrol", "sacctmgr", "scancel", "srun")
SHIM = """#!/bin/sh
echo {name} >> {log}
exec {real} "$@"
"""
# As trivial as a cell can be: what is measured is all that is around it.
TASK = """
import json, sys

def train(cell, *, n: int):
    return {"value": n * 0.5}

if __name__ == "__main__":
    with open(f"out/{sys.argv[1]}.json", "w") as stream:
        json.dump(train(None, n=int(sys.argv[1])), stream)
"""
PLAIN = """
rule all:
    input: [f"out/{{n}}.json" for n in range({cells})]
rule cell:
    output: "out/{{n}}.json"
    resources: gpu=1, mem_mb=200, runtime=5
    shell: "{python} task.py {{wildcards.n}}"
"""


@dataclass(frozen=True)
class Contender:
    """A way to run the cells: ``command``, in a folder that `set_up` has laid out."""

    name: str
    title: str
    command: list[str]


def contenders(cells: int) -> list[Contender]:
    ours = ["snakemake", "--snakefile", f"{ROOT}/Snakefile", "--profile", f"{ROOT}/profiles/slurm"]
    array = ["sbatch", "--wait", f"--array=0-{cells - 1}", "--gpus=1", "--time=5", "--output=/dev/null"]
    plain = ["snakemake", "--snakefile", "plain.smk", "--executor", "slurm", "--jobs", "100", "--quiet", "all"]
    return [
        Contender("packs", "sweepack, packs", ours),
        Contender("array", "a plain job array", [*array, f"--wrap={sys.executable} task.py $SLURM_ARRAY_TASK_ID"]),
        Contender("plain", "Snakemake's Slurm executor, a job a cell", plain),
    ]


def set_up(folder: Path, cells: int, log: Path) -> None:
    """Lay out ``folder``; what is asked of Slurm is written to ``log``, a line a call."""
    (folder / "out").mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "plain.smk").write_text(PLAIN.format(cells=cells, python=sys.executable))
    sweep = {"name": "cells", "task": "task.py:train", "axes": {"n": {"range": [0, cells, 1]}}}
    (folder / "config").mkdir()
    config = {"sweep": sweep, "resources": [{"gpu": 0.25, "runtime": 1}], "report": False}
    (folder / "config" / "config.yaml").write_text(json.dumps(config))
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        real = shutil.which(name)
        if real:
            program = folder / "bin" / name
            program.write_text(SHIM.format(name=name, log=log, real=real))
            program.chmod(0o755)


def run_one(contender: Contender, cells: int, limit: float) -> dict[str, Any]:
    """Its entry in the raw file: wall and CPU seconds, and how often each of Slurm's programs was called."""
    with tempfile.TemporaryDirectory(prefix="swb-") as scratch:
        folder = Path(scratch)
        calls = folder / "calls.txt"
        set_up(folder, cells, calls)
        environment = clean_environment(folder, folder, Path(sys.prefix))
        for name in ("SWEEPACK_DEVICES", "SWEEPACK_LEASES"):
            del environment[name]
        environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
        log = folder / "log.txt"
        cost = measure(contender.command, folder, environment, log, limit)
        done = len(list(folder.glob("out/*.json"))) + len(list(folder.glob("results/*/cells/*/result.json")))
        asked = Counter(calls.read_text().split()) if calls.exists() else Counter()
        error = None
        if cost.status != 0 or done != cells:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            error = f"{done} of {cells} cells after {cost.wall:.0f} s, exit status {cost.status}\n{tail}"
    calls_text = " ".join(f"{name} {count}" for name, count in sorted(asked.items()))
    print(f"{contender.title:<42} {cost.wall:7.1f} s  {calls_text}  {error or ''}", file=sys.stderr, flush=True)
    about = {"contender": contender.name, "title": contender.title, "cells": cells}
    return {**about, **asdict(cost), "calls": dict(asked), "error": error}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--cells", type=int, default=300)
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="longest time for one of them")
    parser.add_argument("--into", type=Path, default=None, help="the raw file (default: the latest in benchmarks/raw)")
    options = parser.parse_args(argv)
    if shutil.which("sbatch") is None or os.system("sinfo >/dev/null 2>&1") != 0:
        sys.exit("no Slurm cluster answers: `make slurm-up` starts one inside this machine")
    end_on_sigterm()
    target: Path = options.into or newest()
    empty: dict[str, Any] = {**circumstances(), "runners": {}, "runs": []}
    raw = json.loads(target.read_text()) if target.exists() else empty
    raw["slurm"] = []
    for contender in contenders(options.cells):
        raw["slurm"].append(run_one(contender, options.cells, options.limit))
        write_atomic(target, json.dumps(raw, indent=1) + "\n")
    print(target)
    return 1 if any(entry["error"] for entry in raw["slurm"]) else 0


if __name__ == "__main__":
    sys.exit(main())
