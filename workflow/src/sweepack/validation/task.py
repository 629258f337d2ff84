"""The task of the sweeps that are tried: a net of a few parameters, which notes where it ran and what it saw."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from sweepack.cell import Cell
from sweepack.validation.notes import BATCH, SAMPLES, file_of


class _Net(pl.LightningModule):
    def __init__(self, cell: Cell, seconds: float) -> None:
        super().__init__()
        self._cell = cell
        self._seconds = seconds
        self._layer = torch.nn.Linear(4, 1)
        self._seen: list[int] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, numbers = batch
        self._seen += numbers.tolist()
        loss = (self._layer(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        _note(self._cell, epoch=self.current_epoch, samples=self._seen)
        self._seen = []
        time.sleep(self._seconds)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def train(cell: Cell, *, n: int, epochs: int, seconds: float) -> dict[str, Any]:
    """Train for ``epochs``, pausing ``seconds`` after each of them, but not in a second attempt, which makes haste."""
    first = cell.attempt == 1
    _note(
        cell,
        start=time.time(),
        host=os.uname().nodename,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        gpu=cell.device != "cpu",
    )
    generator = torch.Generator().manual_seed(n)
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=generator), torch.arange(SAMPLES))
    trainer = cell.trainer(max_epochs=epochs, **({"checkpoint_seconds": 0} if first else {}))
    trainer.fit(_Net(cell, seconds if first else 0.0), DataLoader(data, cell.per_rank(BATCH), shuffle=True))
    _note(cell, end=time.time())
    return {"loss": trainer.callback_metrics["loss"], "world_size": cell.world_size}


def _note(cell: Cell, **facts: Any) -> None:
    with file_of(cell.dir, cell.rank).open("a") as stream:
        stream.write(json.dumps({"attempt": cell.attempt, **facts}) + "\n")
