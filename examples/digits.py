"""The default sweep's task: classify scikit-learn's handwritten digits with a small MLP or CNN, in Lightning."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DATA = Path("data/digits.npz")
TRAINING = 1437  # the first four fifths, as scikit-learn orders them


def prepare():
    """Called once per sweep, before any cell: unpack the data set where reading it is cheap."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    DATA.parent.mkdir(exist_ok=True)
    np.savez(DATA, images=digits.images.astype(np.float32) / 16, labels=digits.target)


def train(
    cell, *, model: Literal["mlp", "cnn"], lr: float, seed: int = 0, width: int = 16, epochs: int = 10, batch: int = 64
):
    """One cell of the sweep; returns its final metrics. `cell` carries what is not a hyperparameter."""
    data = np.load(DATA)
    images, labels = torch.from_numpy(data["images"]).unsqueeze(1), torch.from_numpy(data["labels"])
    training = TensorDataset(images[:TRAINING], labels[:TRAINING])
    validation = TensorDataset(images[TRAINING:], labels[TRAINING:])

    trainer = cell.trainer(max_epochs=epochs)
    trainer.fit(
        Classifier(model, width, lr),
        DataLoader(training, batch_size=cell.per_rank(batch), shuffle=True),
        DataLoader(validation, batch_size=512),
    )
    return {name: trainer.callback_metrics[name] for name in ("val_accuracy", "val_loss", "train_loss")}


class Classifier(pl.LightningModule):
    def __init__(self, model: str, width: int, lr: float):
        super().__init__()
        self.save_hyperparameters()
        self.net = mlp(width) if model == "mlp" else cnn(width)

    def training_step(self, batch, _):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        images, labels = batch
        scores = self.net(images)
        self.log("val_loss", nn.functional.cross_entropy(scores, labels))
        self.log("val_accuracy", (scores.argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8 * width, 10))


def cnn(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )
