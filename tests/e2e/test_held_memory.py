"""Main memory of real cells on a CPU: one that goes over its `mem` fails alone, and the table has everyone's peak."""

from __future__ import annotations

import json
import sys
from typing import Any

import pandas as pd
import pytest
from conftest import Sandbox

MB = 10**6
TASK = """
import numpy, torch

def train(cell, *, how: str):
    if how == "array":
        numpy.ones(2 * 10**9 // 8)
    if how == "tensor":
        torch.ones(2 * 10**9 // 4)
    if how == "bytes":
        bytearray(2 * 10**9)
    if how == "pieces":
        kept = []
        while True:
            kept.append(str(len(kept)) * 10)
    if how == "child":
        import subprocess, sys
        program = "try: bytearray(2 * 10**9)\\nexcept MemoryError: print('none left')"
        return {"said": subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip()}
    held = torch.ones(300 * 10**6 // 4) if how == "within" else torch.ones(1)
    return {"size": len(held)}
"""
LIGHTNING = """
import os
import torch
from pytorch_lightning import LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

def train(cell, *, workers: int):
    data = TensorDataset(torch.randn(2000, 64), torch.randint(0, 10, (2000,)))
    trainer = cell.trainer(max_epochs=2)
    trainer.fit(Net(), DataLoader(data, batch_size=100, num_workers=workers))
    return {"loss": 1.0}
"""
PROGRAM = """
import json, os, sys
import torch
params = json.load(open(os.environ["SWEEPACK_PARAMS"]))
held = torch.ones(params["size"] * 10**6 // 4)
json.dump({"sum": held.sum().item()}, open(os.environ["SWEEPACK_METRICS"], "w"))
"""
OVER = ["array", "tensor", "bytes", "pieces"]


def rows(sandbox: Sandbox, axis: str) -> Any:
    return pd.read_parquet(sandbox.root / "results/test/table.parquet").set_index(f"params.{axis}")


@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_cells_that_go_over_fail_alone_and_peaks_are_plausible(sandbox: Sandbox, start: str) -> None:
    sandbox.write("task.py", TASK)
    ways = [*OVER, "child", "within", "little"]
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"how": ways}},
        resources=[{"gpu": 0.25, "mem": "700MB"}],
        start=start,
        on_error="nan",
    )
    sandbox.snakemake("--cores", "2")
    table = rows(sandbox, "how")
    assert dict(table["status"]) == {how: "failed" if how in OVER else "finished" for how in ways}
    assert all("emory" in table["error"][how] for how in OVER), table["error"].to_dict()
    assert table["metrics.said"]["child"] == "none left"
    assert set(table["memory_cap_gib"]) == {700 * MB / 2**30}
    # Those that failed have theirs too; what was mapped and never touched is not part of it.
    assert table["peak_rss_gib"].notna().all() and (table["peak_rss_gib"] < 1.0).all()
    assert table["peak_rss_gib"]["within"] - table["peak_rss_gib"]["little"] >= 299 * MB / 2**30
    assert table["peak_rss_gib"]["pieces"] > 600 * MB / 2**30
    for record in sandbox.cells().values():
        facts = json.loads((record["dir"] / "provenance.json").read_text())
        assert facts["memory_cap"] == 700 * MB and facts["memory"] == record["memory"]


@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_lightning_with_and_without_workers_trains_within_an_honest_mem(sandbox: Sandbox, start: str) -> None:
    sandbox.write("task.py", LIGHTNING)
    sweep = {"name": "test", "task": "task.py:train", "axes": {"workers": [0, 2]}}
    sandbox.config(sweep=sweep, resources=[{"gpu": 0.5, "mem": "600MB", "cpus": 2}], start=start)
    sandbox.snakemake("--cores", "4")
    table = rows(sandbox, "workers")
    assert set(table["status"]) == {"finished"} and (table["peak_rss_gib"] < 600 * MB / 2**30).all()


def test_programs_are_held_too_and_their_own_peak_is_in_the_table(sandbox: Sandbox) -> None:
    sandbox.write("program.py", PROGRAM)
    sweep = {"name": "test", "task": {"command": [sys.executable, "program.py"]}, "axes": {"size": [4, 300, 2000]}}
    sandbox.config(sweep=sweep, resources=[{"gpu": 0.5, "mem": "700MB"}], on_error="nan")
    sandbox.snakemake("--cores", "2")
    table = rows(sandbox, "size")
    assert dict(table["status"]) == {4: "finished", 300: "finished", 2000: "failed"}
    assert table["peak_rss_gib"][300] - table["peak_rss_gib"][4] >= 280 * MB / 2**30
    assert "can't allocate memory" in next(
        (record["dir"] / "log.txt").read_text() for record in sandbox.cells().values() if record["status"] == "failed"
    )


def test_no_limit_when_it_is_off_or_no_mem_is_given(sandbox: Sandbox) -> None:
    sandbox.write("task.py", TASK)
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"how": ["array", "child"]}},
        resources=[{"match": {"how": "array"}, "gpu": 0.5, "mem": "500MB"}, {"gpu": 0.5}],
        memory={"limit_main": False},
    )
    sandbox.snakemake("--cores", "2")
    table = rows(sandbox, "how")
    assert set(table["status"]) == {"finished"} and table["memory_cap_gib"].isna().all()
    assert table["peak_rss_gib"]["array"] > 2 * 10**9 / 2**30
    reasons = [
        json.loads((record["dir"] / "provenance.json").read_text())["memory_cap_reason"]
        for record in sandbox.cells().values()
    ]
    assert set(reasons) == {"`memory.limit_main` is off"}
