"""Sizes that the configuration leaves open: refused, measured on real processes, pinned, gone by."""

from __future__ import annotations

import json
import re

from sweepack.sizing.pins import FOLDER, Pin

# A sample takes 1 MB, and as much again where it is multiplied.
TASK = """
import torch
def train(cell, *, width: int = 1, lr: float = 0.1, seed: int = 0):
    weight = torch.nn.Parameter(torch.zeros(250_000))
    optimizer = torch.optim.SGD([weight], lr=lr)
    rows = (cell.batch or 8) * width
    for step in range(3):
        loss = (torch.ones(rows, 250_000) * weight).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"batch": cell.batch, "loss": loss.item()}
"""


def sized(sandbox, resources, axes=None, **more):
    sandbox.write("task.py", TASK)
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": axes or {"seed": [0, 1]}}, resources=resources, **more
    )


def pins(sandbox):
    folder = sandbox.root / "results" / "test" / FOLDER
    return [Pin(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def test_a_sweep_that_needs_a_measurement_says_how_to_make_it_and_then_goes_by_it(sandbox):
    sized(sandbox, [{"gpu": 0.25, "batch": "auto", "mem": "600MB"}])
    refused = sandbox.snakemake("-n", profile=None, status=1)
    assert "2 cells: not measured on cpu yet; estimate" in refused
    assert "error in resources[0].batch" in refused and "snakemake probe --profile profiles/local" in refused
    assert not (sandbox.root / "results" / "test" / FOLDER).exists()

    measured = sandbox.snakemake("probe")
    [pin] = pins(sandbox)
    assert pin.device == "cpu" and pin.batch and pin.largest and pin.peak and pin.cap
    assert pin.peak <= pin.cap == 600 * 10**6
    assert f"batch {pin.batch}" in measured and "Run the same command again" in measured
    assert sandbox.cells() == {}

    assert f"2 cells: batch {pin.batch}, largest {pin.largest} (limited by memory)" in sandbox.snakemake(
        "-n", profile=None
    )
    sandbox.snakemake()
    assert [cell["metrics"]["batch"] for cell in sandbox.cells().values()] == [pin.batch] * 2
    assert [cell["batch"] for cell in sandbox.cells().values()] == [pin.batch] * 2
    assert "Nothing to be done" in sandbox.snakemake()


def test_a_run_measures_by_itself_where_it_is_told_to_and_stops_for_a_new_plan(sandbox):
    sized(sandbox, [{"gpu": 0.25, "batch": "auto", "mem": "600MB"}], {"width": [1, 4]}, sizing={"unpinned": "probe"})
    first = sandbox.snakemake()
    assert "measured first" in first and "Run the same command again" in first
    assert sandbox.cells() == {}
    sandbox.snakemake()
    batches = {cell["params"]["width"]: cell["batch"] for cell in sandbox.cells().values()}
    assert batches[1] > 2 * batches[4] > 0


def test_the_share_that_is_left_open_follows_from_what_was_measured(sandbox):
    sized(sandbox, [{"gpu": "auto", "batch": 16, "mem": "2GB"}])
    assert "gpu: 0.25" in sandbox.snakemake("-n", profile=None, status=1)
    sandbox.snakemake("probe")
    plan = sandbox.snakemake("-n", profile=None)
    cells = int(re.search(r"2 cells: (\d+) on a device", plan)[1])
    assert cells > 1 and f"2 cells of {1000 // cells / 1000:g} device" in plan
    sandbox.snakemake()
    assert [cell["share"] for cell in sandbox.cells().values()] == [1000 // cells] * 2


def test_what_does_not_fit_is_refused_before_anything_runs(sandbox):
    sized(sandbox, [{"gpu": 0.25, "batch": "auto", "mem": "600MB"}], {"width": [1, 2000]})
    sandbox.snakemake("probe")
    refused = sandbox.snakemake(status=1)
    assert "1 cell of width=2000: does not fit" in refused
    assert "error in resources[0].batch" in refused and "a larger share than `gpu: 0.25`" in refused
    assert sandbox.cells() == {}


def test_a_number_takes_the_place_of_what_was_measured(sandbox):
    sized(sandbox, [{"gpu": 0.25, "batch": "auto", "mem": "600MB"}])
    sandbox.snakemake("-n", profile=None, status=1)
    sandbox.snakemake("--config", "set={resources: [{gpu: 0.25, batch: 24}]}")
    assert [cell["batch"] for cell in sandbox.cells().values()] == [24, 24]


def test_a_cell_that_failed_with_one_batch_starts_anew_with_another(sandbox):
    sandbox.write(
        "task.py",
        """
import torch
def train(cell, *, seed: int = 0):
    began = cell.load()
    cell.save({"batch": cell.batch})
    if cell.batch > 32:
        raise RuntimeError("too many")
    return {"began": began["batch"] if began else None}
""",
    )
    sandbox.config(sweep={"name": "test", "task": "task.py:train"}, resources=[{"batch": 64}])
    sandbox.snakemake(status=1)
    sandbox.config(sweep={"name": "test", "task": "task.py:train"}, resources=[{"batch": 32}])
    output = sandbox.snakemake()
    assert "its batch is 32, and was 64" in output
    [cell] = sandbox.cells().values()
    assert cell["metrics"] == {"began": None} and cell["attempt"] == 2
