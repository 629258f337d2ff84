"""A project to run on the cluster: a task that notes what it saw, and the ways to look at that."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from conftest import Sandbox

# So that a test does not wait for what has happened.
FAST = ("--sweepack-slurm-poll-seconds", "1", "--latency-wait", "5")

# Uneven cells: `seconds` by number. What a cell saw goes into its folder; what it computes depends on its number only.
TASK = """
import json, os, time

def train(cell, *, n: int, seconds: float = 0.0, epochs: int = 1):
    seen = {"start": time.time(), "host": os.uname().nodename, "visible": os.environ["CUDA_VISIBLE_DEVICES"]}
    seen["setup"] = os.environ.get("FROM_SETUP")
    trouble = f"trouble-{n}"
    if os.path.exists(trouble):
        what = open(trouble).read()
        os.unlink(trouble)
        if what == "fail":
            raise RuntimeError("as asked")
        os.kill(os.getpid(), 9)
    state = cell.load() or {"epoch": 0, "total": 0.0}
    for epoch in range(state["epoch"], epochs):
        time.sleep(seconds / epochs)
        state = {"epoch": epoch + 1, "total": state["total"] + n * 0.1}
        cell.log({"total": state["total"]}, epoch=epoch)
        cell.save(state)
    with open(cell.dir / "seen.jsonl", "a") as stream:
        stream.write(json.dumps({**seen, "end": time.time()}) + "\\n")
    return {"total": state["total"]}
"""


def make_project(
    sandbox: Sandbox, cells: int, *, share: float = 0.25, runtime: int | None = 5, slurm: dict[str, Any], **config: Any
) -> None:
    """``cells`` cells of a ``share``, with further keys of the sweep's parameters in ``params``."""
    sandbox.write("task.py", TASK)
    params = config.pop("params", {})
    axes = config.pop("axes", {"n": list(range(cells))})
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": axes, "params": params},
        resources=[{"gpu": share, "cpus": 1, "runtime": runtime}],
        slurm={"grace": 10, **slurm},
        **config,
    )


def seen(sandbox: Sandbox) -> list[dict[str, Any]]:
    """What each cell's last attempt saw, with its ``id``, in the order of the starts."""
    found = []
    for path in (sandbox.root / "results/test/cells").glob("*/seen.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found.append({**rows[-1], "id": path.parent.name, "times": len(rows)})
    return sorted(found, key=lambda row: row["start"])


def table(sandbox: Sandbox) -> list[dict[str, str]]:
    """The rows of the table, without what may differ from run to run."""
    with (sandbox.root / "results/test/table.csv").open(newline="") as stream:
        return [
            {name: value for name, value in row.items() if name.startswith(("params.", "metrics.", "cell", "status"))}
            for row in csv.DictReader(stream)
        ]


def attempts(sandbox: Sandbox) -> dict[int, int]:
    """By the cells' numbers: how often each was started."""
    return {record["params"]["n"]: record.get("attempt", 0) for record in sandbox.cells().values()}


def packs(sandbox: Sandbox) -> dict[str, list[str]]:
    """The cells of each pack."""
    folder: Path = sandbox.root / "results/test/packs"
    return {path.stem: json.loads(path.read_text())["cells"] for path in folder.glob("*.json")}
