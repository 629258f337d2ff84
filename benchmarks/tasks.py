"""The cell that every runner runs: a small network trained with Lightning, the same bits wherever it runs."""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# A line or two for each of some hundred cells, for every runner alike.
warnings.filterwarnings("ignore")
for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Net(pl.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def run(lr: float, seed: int, steps: int) -> dict[str, float]:
    """Train for ``steps`` steps on data made from ``seed``; the loss over all of it at the end."""
    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)
    inputs = torch.randn(512, 16)
    targets = inputs.sum(1, keepdim=True) + inputs[:, :1] * inputs[:, 1:2]
    net = Net(lr)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True))
    with torch.no_grad():
        return {"loss": nn.functional.mse_loss(net.net(inputs), targets).item()}


def train(cell: Any, *, lr: float, seed: int, steps: int) -> dict[str, float]:
    """The same as a sweepack task."""
    return run(lr, seed, steps)


if __name__ == "__main__":
    # One process a cell: `python tasks.py LR SEED STEPS RESULT`.
    lr, seed, steps, result = sys.argv[1:]
    Path(result).write_text(json.dumps(run(float(lr), int(seed), int(steps))))
