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
    ``attempt`` counts from 1.
    """

    def __init__(self, id: str, params: Mapping[str, Any], seed: int, files: CellFiles, **facts: Any) -> None:
        self.id = id
        self.params: Mapping[str, Any] = MappingProxyType(dict(params))
        self.seed = seed
        self.dir = files.directory
        self.device: str = facts.get("device", "cpu")
        self.share: float = facts.get("share", 1.0)
        self.attempt: int = facts.get("attempt", 1)
        self.threads: int = facts.get("threads", 1)
        self.history = History(files.history)
        self.checkpoints = files.checkpoints
        self.trainers: list[Trainer] = []

    def log(self, metrics: Mapping[str, Any], *, epoch: int | None = None, step: int | None = None) -> None:
        """Add one row to the cell's history. Values are numbers, or whatever has ``.item()``."""
        self.history.append({"epoch": epoch, "step": step, "metrics": plain_metrics(metrics)})

    def save(self, state: Any) -> None:
        """Keep ``state`` (tensors and plain containers) for a later attempt, with the random number generators.

        A kill at any moment leaves the old state or the new one, whole. Raises TypeError for what could not be loaded.
        """
        import torch

        _require_loadable(state, "state")
        content = {"cell": self.id, "history": self.history.text, "random": randomness.capture(), "state": state}
        replace_durably(self.checkpoints / "state.pt", lambda path: torch.save(content, path))

    def load(self) -> Any:
        """The state that an earlier attempt saved last, or None. Restores the generators and the history with it."""
        path = newest_readable(self.checkpoints / "state.pt")
        if path is None:
            return None
        import torch

        content = torch.load(path, map_location="cpu", weights_only=True)
        self.require_own(content["cell"], path)
        self.history.rewind(content["history"])
        randomness.restore(content["random"])
        return content["state"]

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

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun = False

    @property
    def text(self) -> str:
        """All rows of this attempt and of those that it continues; kept in checkpoints."""
        return self._path.read_text() if self._begun else ""

    def rewind(self, text: str) -> None:
        """Go back to the rows that a checkpoint holds."""
        write_atomic(self._path, text)
        self._begun = True

    def append(self, row: Mapping[str, Any]) -> None:
        with self._path.open("a" if self._begun else "w") as stream:
            stream.write(json.dumps(row) + "\n")
        self._begun = True

    def close(self) -> None:
        """Drop what an earlier attempt left, also when this one wrote nothing."""
        if not self._begun:
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
