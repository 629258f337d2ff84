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
from torch.utils.data import SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from sweepack import randomness
from sweepack.cell import plain_metrics, replace_durably
from sweepack.ddp.merge import merged
from sweepack.ddp.strategy import CellEnvironment, placement
from sweepack.ddp.world import gathered, rank_seed

if TYPE_CHECKING:
    from sweepack.cell import Cell

CHECKPOINT_SECONDS = 20.0
_OURS = ("devices", "num_nodes", "strategy", "default_root_dir")


class CellTrainer(Trainer):
    """A ``Trainer`` whose first ``fit`` continues from its last checkpoint unless it is given another."""

    resume_from: Path | None = None
    in_order = False

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
        self.in_order = type(getattr(train_dataloaders, "sampler", None)) is SequentialSampler
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, start, **others)


class HistoryRows(Callback):
    """One row of history an epoch: everything that the module has logged by its end."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rows = gathered(plain_metrics(trainer.callback_metrics))
        self._cell.log(merged(rows), epoch=trainer.current_epoch, step=trainer.global_step)


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
        self._random: list[dict[str, Any]] | None = None
        self._batch: int | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # By rank 0's clock: saving needs all ranks.
        if trainer.strategy.broadcast(time.monotonic() - self._saved >= self._seconds):
            trainer.save_checkpoint(self._path)
            self._saved = time.monotonic()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["sweepack"] = {
            "cell": self._cell.id,
            "history": self._cell.history.text,
            "random": gathered(randomness.capture()),
            "global_batch": _global_batch(self._cell, trainer),
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        ours = checkpoint.get("sweepack")
        if ours is None:
            return
        self._cell.require_own(ours["cell"], self._path)
        self._cell.history.rewind(ours["history"])
        self._random = ours["random"]
        self._batch = ours["global_batch"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sampler = getattr(trainer.train_dataloader, "sampler", None)
        if getattr(trainer, "in_order", False) and isinstance(sampler, DistributedSampler):
            sampler.shuffle = False  # Lightning shuffles what it divides among ranks, asked for or not
        if self._random is not None:
            self._require_same_batch(trainer, len(self._random))
        elif self._cell.world:
            randomness.seed_all(rank_seed(self._cell.seed, self._cell.rank))

    def _require_same_batch(self, trainer: Trainer, world_size: int) -> None:
        """Raise RuntimeError when the checkpoint was made with another number of ranks and another global batch."""
        if world_size == self._cell.world_size:
            return
        now = _global_batch(self._cell, trainer)
        if now is None or now != self._batch:
            raise RuntimeError(
                f"{self._path} was made by {world_size} ranks with a global batch of {self._batch or 'unknown size'}, "
                f"now {self._cell.world_size} ranks have {now or 'one of unknown size'}: divide the batch by "
                "`cell.per_rank(batch)` in the task, set `nodes` and `gpus_per_node` as they were, or start anew by "
                f"`sweepack rerun {self._cell.id}`"
            )
        print(f"resumed on {self._cell.world_size} ranks from a checkpoint of {world_size}: not bit for bit")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Here and not on loading: setting up models and loaders draws random numbers too. Lightning has already begun
        # to iterate over the training data, with the numbers of a fresh start: begin again, as every later epoch does.
        if self._random is not None:
            self._cell.restore_random(self._random)
            self._random = None
            iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints beside their target and renames them; Lightning's own goes through $TMPDIR."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        def write(temporary: Path) -> None:
            import torch

            torch.save(checkpoint, temporary)

        replace_durably(Path(path), write)


def _global_batch(cell: Cell, trainer: Trainer) -> int | None:
    """Samples of one optimizer step over all ranks; None when the loader does not tell."""
    size = getattr(trainer.train_dataloader, "batch_size", None)
    return size * cell.world_size * trainer.accumulate_grad_batches if isinstance(size, int) else None


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
    arguments["plugins"] += [
        DurableCheckpointIO(),
        CellEnvironment(cell.world) if cell.world else LightningEnvironment(),
    ]
    accelerator = "gpu" if cell.device.startswith("cuda") else "cpu"
    defaults = {
        "accelerator": accelerator,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    placed = placement(cell.world, accelerator) if cell.world else {"devices": 1}
    trainer = CellTrainer(default_root_dir=os.fspath(cell.dir), **{**defaults, **arguments, **placed})
    trainer.resume_from = cell.resumable(last)
    return trainer
