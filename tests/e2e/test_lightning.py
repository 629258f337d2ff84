"""Lightning cells: a killed one goes on from its own checkpoint and ends with the numbers of an unbroken one."""

from __future__ import annotations

import json

import pytest

TASK = """
import os, signal
from pathlib import Path
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_train_batch_start(self, batch, index):
        with open("batches.txt", "a") as file:
            file.write(f"{self.current_epoch} ")
        killed = Path(f"killed-{self.lr}")
        if self.current_epoch == 3 and index == 2 and os.environ.get("KILL") and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), getattr(signal, os.environ["KILL"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(cell, *, lr: float, seed: int = 0):
    data = torch.randn(64, 4)
    rows = TensorDataset(data, data.sum(1, keepdim=True))
    trainer = cell.trainer(max_epochs=5, checkpoint_seconds=0)
    trainer.fit(Net(lr), DataLoader(rows, batch_size=16, shuffle=True), DataLoader(rows, batch_size=64))
    return trainer.callback_metrics
"""


def lightning(sandbox, name, **axes):
    sandbox.write("task.py", TASK)
    sandbox.config(sweep={"name": name, "task": "task.py:train", "axes": axes}, resources=[{"gpu": 0.5}])


@pytest.mark.parametrize("killer", ["SIGKILL", "SIGTERM"])
def test_a_killed_cell_resumes_and_ends_with_the_same_numbers(sandbox, killer):
    lightning(sandbox, "unbroken", lr=[0.01])
    sandbox.snakemake()
    (sandbox.root / "batches.txt").unlink()

    lightning(sandbox, "broken", lr=[0.01])
    sandbox.snakemake(status=1, KILL=killer)
    (record,) = sandbox.cells("broken").values()
    assert record["status"] == "interrupted"
    assert not (record["dir"] / "result.json").exists()
    (sandbox.root / "batches.txt").write_text("")
    sandbox.snakemake()
    # Epochs 0 to 2 were in the checkpoint: only the one that was cut short and the last are trained.
    assert set((sandbox.root / "batches.txt").read_text().split()) == {"3", "4"}
    (record,) = sandbox.cells("broken").values()
    assert record["attempt"] == 2
    assert "are equal bit for bit" in sandbox.sweepack("diff", "--exact", "unbroken", "broken")
    rows = [json.loads(line) for line in (record["dir"] / "history.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3, 4] and rows[-1]["metrics"].keys() == {"loss", "val"}


def test_packed_and_one_at_a_time_give_the_same_table(sandbox):
    lightning(sandbox, "packed", lr=[0.01, 0.1], seed=[0, 1])
    sandbox.snakemake("--cores", "4", SWEEPACK_DEVICES="sim:2")
    lightning(sandbox, "alone", lr=[0.01, 0.1], seed=[0, 1])
    sandbox.snakemake("--cores", "1")
    assert "are equal bit for bit" in sandbox.sweepack("diff", "--exact", "packed", "alone")
    results = sandbox.root / "results"
    cell = next(iter(sandbox.cells("alone")))
    status = results / "alone/cells" / cell / "status.json"
    record = json.loads(status.read_text())
    record["metrics"]["loss"] += 1e-12
    status.write_text(json.dumps(record) + "\n")
    (status.parent / "result.json").write_text(status.read_text())
    assert cell in sandbox.sweepack("diff", "--exact", "packed", "alone", status=1)


def test_a_checkpoint_of_another_cell_is_refused(sandbox):
    lightning(sandbox, "test", lr=[0.01, 0.02])
    sandbox.snakemake(status=1, KILL="SIGKILL")
    first, second = (record["dir"] / "checkpoints" for record in sandbox.cells().values())
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)
    output = sandbox.snakemake(status=1)
    assert f"belongs to cell {second.parent.name}, not to {first.parent.name}" in output
    assert {record["status"] for record in sandbox.cells().values()} == {"failed"}
