"""Lightning, wired for a cell: one device, history, checkpoints that survive a kill, resume without a seam."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.plugins.environments import LightningEnvironment

from sweepack import randomness
from sweepack.cell import newest_readable, replace_durably

if TYPE_CHECKING:
    from sweepack.cell import Cell

CHECKPOINT_SECONDS = 20.0
_OURS = ("devices", "num_nodes", "strategy", "default_root_dir")


class CellTrainer(Trainer):
    """A ``Trainer`` whose first ``fit`` continues from its last checkpoint unless it is given another."""

    resume_from: Path | None = None

    def fit(  # type: ignore[override]
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        **others: Any,
    ) -> None:
        start, self.resume_from = ckpt_path or self.resume_from, None
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, start, **others)


class HistoryRows(Callback):
    """One row of history an epoch: everything that the module has logged by its end."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._cell.log(trainer.callback_metrics, epoch=trainer.current_epoch, step=trainer.global_step)


class LastCheckpoint(Checkpoint):
    """Keeps a checkpoint of epoch ends, from which a resumed run gives the numbers of an unbroken one.

    Not in the middle of an epoch: Lightning would go on with batches in another order. At most once in ``seconds``, so
    that cells with short epochs do not spend their time on writing.
    """

    def __init__(self, cell: Cell, path: Path, seconds: float) -> None:
        self._cell = cell
        self._path = path
        self._seconds = seconds
        self._saved = time.monotonic()
        self._random: dict[str, Any] | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if time.monotonic() - self._saved >= self._seconds:
            trainer.save_checkpoint(self._path)
            self._saved = time.monotonic()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["sweepack"] = {
            "cell": self._cell.id,
            "history": self._cell.history.text,
            "random": randomness.capture(),
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        ours = checkpoint.get("sweepack")
        if ours is None:
            return
        self._cell.require_own(ours["cell"], self._path)
        self._cell.history.rewind(ours["history"])
        self._random = ours["random"]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Here and not on loading: setting up models and loaders draws random numbers too. Lightning has already begun
        # to iterate over the training data, with the numbers of a fresh start: begin again, as every later epoch does.
        if self._random is not None:
            randomness.restore(self._random)
            self._random = None
            iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints beside their target and renames them; Lightning's own goes through $TMPDIR."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        def write(temporary: Path) -> None:
            import torch

            torch.save(checkpoint, temporary)

        replace_durably(Path(path), write)


def make_trainer(cell: Cell, *, checkpoint_seconds: float = CHECKPOINT_SECONDS, **arguments: Any) -> CellTrainer:
    """The trainer behind ``Cell.trainer``. Raises TypeError for arguments that would contradict the cell."""
    clash = [name for name in _OURS if name in arguments]
    if clash:
        raise TypeError(f"`{clash[0]}` of a cell's trainer follows from the cell's resources: remove the argument")
    for name in ("callbacks", "plugins"):
        given = arguments.get(name) or []
        arguments[name] = list(given) if isinstance(given, list | tuple) else [given]
    # A task may fit several trainers one after another, and each goes on from its own checkpoint.
    number = len(cell.trainers)
    last = cell.checkpoints / ("last.ckpt" if number == 0 else f"last-{number + 1}.ckpt")
    arguments["callbacks"] += [HistoryRows(cell), LastCheckpoint(cell, last, checkpoint_seconds)]
    arguments["plugins"] += [DurableCheckpointIO(), LightningEnvironment()]
    defaults = {
        "accelerator": "gpu" if cell.device == "cuda" else "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    trainer = CellTrainer(devices=1, default_root_dir=os.fspath(cell.dir), **{**defaults, **arguments})
    trainer.resume_from = newest_readable(last)
    return trainer
