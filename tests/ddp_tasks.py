"""Tasks for cells on several devices, as text for a sandbox, and what they have left behind."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

# Each rank notes the samples that it has seen.
NET = '''
import json, os, signal, sys, time
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self, cell, dropout, trouble):
        super().__init__()
        self.cell, self.trouble = cell, trouble
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        self.seen = []

    def training_step(self, batch, index):
        inputs, numbers = batch
        self.seen += numbers.tolist()
        if self.trouble and self.current_epoch == 2 and not os.path.exists("once"):
            self.trouble(self.cell)
        loss = (self.net(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        with open(self.cell.dir / f"seen-{self.cell.rank}.jsonl", "a") as stream:
            stream.write(json.dumps(self.seen) + "\\n")
        self.seen = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

def once(what):
    """Something that only the first attempt does."""
    def happen(cell):
        if cell.rank == cell.world_size - 1:
            open("once", "w").close()
            what(cell)
    return happen

def fail(cell):
    raise RuntimeError("as asked")

def vanish(cell):
    os.kill(os.getpid(), signal.SIGKILL)

def hang(cell):
    time.sleep(600)

def slow(cell):
    open("begun", "w").close()
    time.sleep(1)

def wait(cell):
    """All ranks, until the file `go-on` is there; `waiting-<rank>` says that one does."""
    open(f"waiting-{cell.rank}", "w").close()
    while not os.path.exists("go-on"):
        time.sleep(0.1)

TROUBLES = {"": None, "slow": slow, "fail": once(fail), "vanish": once(vanish), "hang": once(hang),
            "exit": once(lambda cell: os._exit(3)), "wait": wait}

def train(cell, *, n: int = 0, batch: int = 16, epochs: int = 4, dropout: float = 0.0, shuffle: bool = True,
          trouble: str = "", seed: int = 0):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=generator)
    trainer = cell.trainer(max_epochs=epochs, checkpoint_seconds=0)
    model = Net(cell, dropout, TROUBLES[trouble])
    data = TensorDataset(inputs, torch.arange(64))
    trainer.fit(model, DataLoader(data, batch_size=cell.per_rank(batch), shuffle=shuffle))
    if cell.rank == 0:
        torch.save(model.state_dict(), cell.dir / "weights.pt")
    return {"loss": trainer.callback_metrics["loss"], "rank": cell.rank, "world": cell.world_size}
'''


def wide(sandbox, *entries, devices="sim:4", params=None, axes=None, **more):
    """A sweep of NET whose cells get ``entries`` of ``resources``."""
    sandbox.write("task.py", NET)
    sandbox.environment["SWEEPACK_DEVICES"] = devices
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": axes or {"n": [0]}, "params": params or {}},
        resources=list(entries),
        **more,
    )


def history(cell):
    rows = [json.loads(line) for line in (cell["dir"] / "history.jsonl").read_text().splitlines()]
    return [(row["epoch"], row["metrics"]["loss"]) for row in rows]


def samples(cell, world_size):
    """By epoch: what all ranks together have seen, sorted."""
    ranks = [
        [json.loads(line) for line in (cell["dir"] / f"seen-{rank}.jsonl").read_text().splitlines()]
        for rank in range(world_size)
    ]
    return [sorted(itertools.chain(*epoch)) for epoch in zip(*ranks, strict=True)]


def ranks_of(sandbox):
    """The ranks that run in the sandbox's folder, and the agents that start them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if entry.resolve() == sandbox.root.resolve():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return [pid for pid in found if b"sweepack.ddp." in Path(f"/proc/{pid}/cmdline").read_bytes()]
