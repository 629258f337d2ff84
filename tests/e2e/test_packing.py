"""Packing: never more on a device than it holds, no room left idle, cores only for cells that work."""

from __future__ import annotations

from collections import defaultdict

import pytest

SLEEPER = """
import os, time
from pathlib import Path
def train(cell, *, x: int, crowd: int = 0, seconds: float = 0.5):
    here = Path("running")
    here.mkdir(exist_ok=True)
    (here / cell.id).touch()
    end = time.monotonic() + 100
    reached = Path("reached")
    while crowd and not reached.exists() and time.monotonic() < end:
        if len(list(here.iterdir())) >= crowd:
            reached.touch()
        time.sleep(0.2)
    time.sleep(seconds)
    (here / cell.id).unlink(missing_ok=True)
    return {"visible": os.environ["CUDA_VISIBLE_DEVICES"]}
"""


def sleepers(sandbox, resources, axes, params=None, **more):
    sandbox.write("task.py", SLEEPER)
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": axes, "params": params or {}},
        resources=resources,
        **more,
    )


def peaks(records):
    """The largest sum of shares on each device, and the most cells at once, recomputed from the cells' own records."""
    changes = defaultdict(list)
    for record in records:
        for place in (record["device"], "all"):
            changes[place].append((record["started"], 1, record["share"]))
            changes[place].append((record["ended"], 0, -record["share"]))
    highest, most = {}, 0
    for place, events in changes.items():
        total = count = 0
        for _, starts, share in sorted(events):
            total += share
            count += 1 if starts else -1
            highest[place] = max(highest.get(place, 0), total)
            most = max(most, count) if place == "all" else most
    del highest["all"]
    return highest, most


def test_shares_of_0_6_get_a_device_each_and_both_devices_are_used(sandbox):
    sleepers(sandbox, [{"gpu": 0.6}], {"x": {"range": 6}}, {"crowd": 2})
    output = sandbox.snakemake("--cores", "8", SWEEPACK_DEVICES="sim:2")
    assert "at once  up to 2" in output and "2: sim:0, sim:1" in output
    highest, most = peaks(sandbox.cells().values())
    assert highest == {"sim:0": 600, "sim:1": 600} and most == 2


def test_forty_eight_cells_of_0_15_run_at_once_on_eight_devices(sandbox):
    sleepers(sandbox, [{"gpu": 0.15}], {"x": {"range": 56}}, {"crowd": 48, "seconds": 3.0})
    output = sandbox.snakemake("--cores", "64", SWEEPACK_DEVICES="sim:8")
    assert "at once  up to 48" in output
    highest, most = peaks(sandbox.cells().values())
    assert most == 48 and len(highest) == 8 and set(highest.values()) == {900}


@pytest.mark.parametrize("scheduler", ["sweepack", "greedy"])
def test_mixed_shares_never_overfill_a_device(sandbox, scheduler):
    shares = [{"match": {"x": "<5"}, "gpu": 0.6}, {"match": {"x": "<9"}, "gpu": 0.4}, {"gpu": 0.3}]
    sleepers(sandbox, shares, {"x": {"range": 14}}, {"seconds": 0.1})
    sandbox.snakemake("--cores", "6", "--scheduler", scheduler, SWEEPACK_DEVICES="sim:2")
    highest, _ = peaks(sandbox.cells().values())
    assert max(highest.values()) <= 1000


def test_a_cell_that_does_not_fit_yet_keeps_neither_cores_nor_others_from_work(sandbox):
    # Two of the three large ones fill the devices to 0.6; a core spent on the third one's waiting would be missing.
    sleepers(
        sandbox,
        [{"match": {"x": "<3"}, "gpu": 0.6}, {"gpu": 0.4}],
        {"x": {"range": 5}},
        {"crowd": 4, "seconds": 0.2},
    )
    for name in ("one", "two", "three"):
        sandbox.snakemake("--cores", "4", "--config", f"set={{name: {name}}}", SWEEPACK_DEVICES="sim:2")
        _, most = peaks(sandbox.cells(name).values())
        if most == 4:
            break
        # On a busy machine the small ones may be first at their leases, both on one device: then a large one waits.
    assert most == 4 and (sandbox.root / "reached").exists()


def test_two_runs_share_the_devices_of_the_node(sandbox):
    sleepers(sandbox, [{"gpu": 0.5}], {"x": {"range": 4}}, {"seconds": 1.0})
    first = sandbox.start("--cores", "4", SWEEPACK_DEVICES="sim:1")
    other = ["--config", "set={name: other}", "--nolock"]
    second = sandbox.start("--cores", "4", *other, SWEEPACK_DEVICES="sim:1")
    outputs = [first.communicate(timeout=300)[0], second.communicate(timeout=120)[0]]
    assert first.returncode == second.returncode == 0, outputs
    both = [*sandbox.cells().values(), *sandbox.cells("other").values()]
    highest, _ = peaks(both)
    assert len(both) == 8 and highest == {"sim:0": 1000}


def test_round_robin_places_by_index(sandbox):
    sleepers(
        sandbox,
        [{"gpu": 1}],
        {"x": {"range": 6}},
        {"seconds": 0.2},
        placement="round_robin",
        jobs_per_gpu=2,
    )
    sandbox.snakemake("--cores", "8", SWEEPACK_DEVICES="sim:3")
    records = sandbox.cells().values()
    assert {record["params"]["x"]: record["device"] for record in records} == {x: f"sim:{x % 3}" for x in range(6)}
    assert {record["share"] for record in records} == {500} and max(peaks(records)[0].values()) <= 1000


def test_devices_limits_the_pool(sandbox):
    sleepers(sandbox, [{"gpu": 1}], {"x": {"range": 4}}, {"seconds": 0.1}, devices=2)
    sandbox.snakemake("--cores", "8", SWEEPACK_DEVICES="sim:4")
    assert {record["device"] for record in sandbox.cells().values()} == {"sim:0", "sim:1"}
