"""The running cell, as its task sees it: parameters, seed, history and state to resume from."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sweepack import randomness
from sweepack.ddp.world import World, gathered, joined, rank_seed
from sweepack.files import write_atomic
from sweepack.records import CellFiles

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Interrupted(SystemExit):
    """The cell was told to stop. It stays pending, and its exit status is 128 + the signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class Cell:
    """What a task gets as its first argument.

    ``params`` are all parameters, ``seed`` is the parameter of that name (0 without one), ``dir`` is the cell's own
    directory, ``device`` is ``"cuda"`` or ``"cpu"``, ``share`` the fraction of the device that is the cell's,
    ``batch`` is the batch size that the config gives or that was measured to fit (None: the config says nothing),
    ``attempt`` counts from 1.

    A cell on several devices is run by ``world_size`` processes, of which this is number ``rank``, ``local_rank`` on
    its node and on its device (``"cuda:1"``).
    """

    def __init__(self, id: str, params: Mapping[str, Any], seed: int, files: CellFiles, **facts: Any) -> None:
        self.id = id
        self.params: Mapping[str, Any] = MappingProxyType(dict(params))
        self.seed = seed
        self.dir = files.directory
        self.device: str = facts.get("device", "cpu")
        self.share: float = facts.get("share", 1.0)
        self.batch: int | None = facts.get("batch")
        self.attempt: int = facts.get("attempt", 1)
        self.threads: int = facts.get("threads", 1)
        self.world: World | None = facts.get("world")
        self.rank = self.world.rank if self.world else 0
        self.local_rank = self.world.local_rank if self.world else 0
        self.world_size = self.world.size if self.world else 1
        self.history = History(files.history, writes=self.rank == 0)
        self.checkpoints = files.checkpoints
        self.trainers: list[Trainer] = []
        self._joined = False

    def log(self, metrics: Mapping[str, Any], *, epoch: int | None = None, step: int | None = None) -> None:
        """Add one row to the cell's history. Values are numbers, or whatever has ``.item()``."""
        self.history.append({"epoch": epoch, "step": step, "metrics": plain_metrics(metrics)})

    def save(self, state: Any) -> None:
        """Keep ``state`` (tensors and plain containers) for a later attempt, with the random number generators.

        A kill at any moment leaves the old state or the new one, whole. Raises TypeError for what could not be loaded.
        """
        import torch

        _require_loadable(state, "state")
        drawn = gathered(randomness.capture())
        if self.rank == 0:
            content = {"cell": self.id, "history": self.history.text, "random": drawn, "state": state}
            replace_durably(self.checkpoints / "state.pt", lambda path: torch.save(content, path))

    def load(self) -> Any:
        """The state that an earlier attempt saved last, or None. Restores the generators and the history with it."""
        path = self.resumable(self.checkpoints / "state.pt")
        if path is None:
            return None
        import torch

        content = torch.load(path, map_location="cpu", weights_only=True)
        self.require_own(content["cell"], path)
        self.history.rewind(content["history"])
        self.restore_random(content["random"])
        return content["state"]

    def join(self, backend: str | None = None) -> None:
        """Join the other ranks in torch's process group, for loops without Lightning; nothing to do on one device.

        From here on each rank draws random numbers of its own: build the model before. Raises what
        ``torch.distributed.init_process_group`` does.
        """
        if self.world is None:
            return
        import torch.distributed

        chosen = backend or ("nccl" if self.device.startswith("cuda") else "gloo")
        torch.distributed.init_process_group(chosen)
        self._joined = True
        randomness.seed_all(rank_seed(self.seed, self.rank))

    def per_rank(self, batch: int) -> int:
        """A rank's part of a global ``batch``, which is so the same for any number of ranks.

        Raises ValueError when it cannot be divided evenly.
        """
        if batch % self.world_size:
            raise ValueError(
                f"a batch of {batch} cannot be divided evenly among {self.world_size} ranks: change it, or `nodes` and "
                "`gpus_per_node` under `resources`"
            )
        return batch // self.world_size

    def resumable(self, target: Path) -> Path | None:
        """The checkpoint at ``target``, or the one kept before it, that an earlier attempt has left whole, or None."""
        if self.world is None:
            return newest_readable(target)
        return next((path for path in (target, _previous(target)) if path.name in self.world.checkpoints), None)

    def restore_random(self, drawn: list[dict[str, Any]]) -> None:
        """Put this rank's generators back to where they were, by those of all ranks.

        Among another number of ranks there is no such state: each then draws anew.
        """
        if len(drawn) == self.world_size:
            randomness.restore(drawn[self.rank])
        else:
            randomness.seed_all(rank_seed(self.seed, self.rank))

    def require_joined(self) -> None:
        """Raise RuntimeError when the task has trained on one device though it was given several."""
        if self.world is None or self._joined or joined(self.world_size):
            return
        if any(trainer.world_size == self.world_size for trainer in self.trainers):
            return
        raise RuntimeError(
            f"the task ran on {self.world_size} ranks but each trained by itself: use `cell.trainer(...)`, which "
            "takes all devices, or `cell.join()` in a loop of your own"
        )

    def trainer(self, **arguments: Any) -> Trainer:
        """A Lightning ``Trainer`` for this cell: one device, durable checkpoints, history, resume.

        Takes what ``Trainer`` takes, except what would contradict the cell (``devices``, ``num_nodes``, ``strategy``).
        ``fit`` continues from the cell's own last checkpoint.
        """
        from sweepack.lightning import make_trainer

        trainer = make_trainer(self, **arguments)
        self.trainers.append(trainer)
        return trainer

    def require_own(self, owner: object, path: Path) -> None:
        """Raise RuntimeError when the checkpoint at ``path`` was made by another cell."""
        if owner != self.id:
            raise RuntimeError(f"{path} belongs to cell {owner}, not to {self.id}: remove it")


class History:
    """The rows of a cell, one JSON object a line, starting from nothing unless an attempt resumes."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self._path = path
        self._writes = writes  # of several ranks only one does
        self._begun = False

    @property
    def text(self) -> str:
        """All rows of this attempt and of those that it continues; kept in checkpoints."""
        return self._path.read_text() if self._begun and self._writes else ""

    def rewind(self, text: str) -> None:
        """Go back to the rows that a checkpoint holds."""
        if self._writes:
            write_atomic(self._path, text)
        self._begun = True

    def append(self, row: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        with self._path.open("a" if self._begun else "w") as stream:
            stream.write(json.dumps(row) + "\n")
        self._begun = True

    def close(self) -> None:
        """Drop what an earlier attempt left, also when this one wrote nothing."""
        if not self._begun and self._writes:
            self._path.unlink(missing_ok=True)


def plain_metrics(metrics: Any) -> dict[str, Any]:
    """``metrics`` with tensors and NumPy scalars as plain numbers. Raises TypeError, naming what cannot be one."""
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise TypeError(f"expected a mapping of metrics, such as {{'accuracy': 0.9}}, but got {kind}")
    plain = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"metric name {name!r} is {type(name).__name__}, not text")
        if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
            value = value.item()
        elif hasattr(value, "tolist"):
            value = value.tolist()
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            kind = type(value).__name__
            raise TypeError(f"metric `{name}` is a {kind}; expected a number, text, null or a list of these") from None
        plain[name] = value
    return plain


def _require_loadable(value: Any, place: str) -> None:
    """Raise TypeError, naming the place, for anything that ``torch.load(weights_only=True)`` would refuse."""
    import torch

    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.Tensor):
        if type(value).__module__ == "numpy":
            raise TypeError(f"{place} is a NumPy number: save `.item()` of it")
        return
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _require_loadable(name, f"a key of {place}")
            _require_loadable(inner, f"{place}[{name!r}]")
    elif isinstance(value, list | tuple | set):
        for index, inner in enumerate(value):
            _require_loadable(inner, f"{place}[{index}]")
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{place} is a {kind}: save tensors, numbers, text and lists or dicts of them")


def replace_durably(target: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file and put it in ``target``'s place, keeping the one before as ``<name>.previous``.

    The temporary stands beside the target and is synced first, so that no kill leaves a truncated checkpoint where a
    good one was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        if target.exists():
            target.replace(_previous(target))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def newest_readable(target: Path) -> Path | None:
    """``target`` if it is a whole checkpoint, else the one kept before it, else None."""
    for path in (target, _previous(target)):
        # torch writes zip files, whose directory is at the end: a truncated one has none.
        if path.is_file() and zipfile.is_zipfile(path):
            return path
    return None


def _previous(target: Path) -> Path:
    return target.with_name(f"{target.name}.previous")
