"""Tasks whose memory is estimated, and traced while they really run.

Their data is NumPy's, which torch does not count.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 1024


class Transformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout, batch_first=True)
        self.embed, self.layers, self.head = nn.Linear(64, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 10)

    def forward(self, inputs):
        return self.head(self.layers(self.embed(inputs)).mean(1))


def build(model):
    """The model and the shape of a sample."""
    if model == "mlp":
        return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)), (64,)
    if model in ("transformer", "dropout"):
        return Transformer(0.1 if model == "dropout" else 0.0), (16, 64)
    narrow, wide = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False)
    layers = [narrow, nn.BatchNorm2d(16), nn.ReLU(inplace=True), wide, nn.BatchNorm2d(32), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), (3, 16, 16)


def data(shape):
    numbers = np.random.default_rng(0)
    inputs = numbers.random((SAMPLES, *shape), dtype=np.float32)
    return TensorDataset(torch.from_numpy(inputs), torch.from_numpy(numbers.integers(0, 10, SAMPLES)))


def optimizer(name, parameters):
    if name == "adamw":
        return torch.optim.AdamW(parameters, 1e-3, foreach=True)
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=True)


def loop(cell, *, model, optim="adamw", amp=False, accumulate=1):
    """A plain loop, which reads its loss."""
    net, shape = build(model)
    net = net.to(cell.device)
    stepper = optimizer(optim, net.parameters())
    total = 0.0
    for number, (inputs, labels) in enumerate(DataLoader(data(shape), cell.batch, shuffle=True)):
        with torch.autocast(cell.device, dtype=torch.bfloat16, enabled=amp):
            loss = functional.cross_entropy(net(inputs.to(cell.device)), labels.to(cell.device))
        loss.backward()
        if number % accumulate == accumulate - 1:
            stepper.step()
            stepper.zero_grad()
        total += loss.item()
    return {"loss": total}


class Module(pl.LightningModule):
    def __init__(self, net, optim):
        super().__init__()
        self.net, self.optim = net, optim

    def training_step(self, batch, _):
        inputs, labels = batch
        loss = functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return optimizer(self.optim, self.parameters())


def lightning(cell, *, model, optim="adamw", precision="32-true"):
    net, shape = build(model)
    trainer = cell.trainer(max_epochs=2, precision=precision)
    trainer.fit(Module(net, optim), DataLoader(data(shape), cell.batch, shuffle=True))
    return {"loss": trainer.callback_metrics["loss"]}


def chosen(cell):
    """The one that a test has chosen; all from one process that has imported this."""
    function, params = json.loads(Path("case.json").read_text())
    return globals()[function](cell, **params)
