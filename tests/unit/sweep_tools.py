"""Make small sweeps in memory or in a folder, and catch the one error that a bad one gives."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from sweepack.config import Config, validate
from sweepack.errors import UserError
from sweepack.loading import load_config
from sweepack.sweep import Expansion, expand
from sweepack.task import Task, read_signature

# One parameter of every kind, so that one task serves most tests.
SOURCE = """
def train(cell, *, lr: float = 0.1, width: int = 64, tag: str = "a", amp: bool = False, seed: int = 0,
          betas: list[float] = [0.9, 0.99], depth: int | None = None, size: float | str = 1, optim: dict = {"lr": 1},
          free=None): ...
"""
OPEN = "def train(cell, **params): ..."

# Every key that a configuration can have, each with a value that works.
WHOLE: dict[str, Any] = {
    "sweep": {
        "name": "s",
        "task": "task.py:train",
        "params": {"tag": "b", "optim": {"lr": 1}},
        "axes": {
            "lr": [0.1, 0.2],
            "width": {"range": [1, 4, 1]},
            "depth": {"linspace": [1, 3, 3]},
            "optim.lr": {"geomspace": [1, 100, 3]},
            "free": {"logspace": [0, 2, 3]},
        },
        "zip": [{"size": [1, 2], "seed": [1, 2]}],
        "include": [{"lr": 3, "optim": {"lr": 9}}],
        "exclude": [{"lr": 0.1, "width": "> 2"}],
        "sample": {"count": 3, "seed": 1},
    },
    "resources": [
        {"match": {"lr": [0.1, 0.2]}, "gpu": 0.5, "cpus": 2, "mem": "2GB", "runtime": "30m", "slurm": {"qos": "q"}},
        {"gpu": 1},
    ],
    "objective": {"metric": "accuracy", "mode": "max"},
    "on_error": "nan",
    "placement": "packed",
    "jobs_per_gpu": 2,
    "devices": 1,
    "results": "results",
    "confirm_above": 1000,
    "lease_timeout": "1h",
    "import_timeout": 3,
}


def task_of(source: str = SOURCE) -> Task:
    signature = read_signature(ast.parse(source), "train", Path("task.py"), "task.py:train")
    return Task("task.py:train", signature)


TASK = task_of()


def config_of(sweep: Mapping[str, Any], **top: Any) -> dict[str, Any]:
    return {"sweep": {"name": "s", "task": "task.py:train", **sweep}, **top}


def expanded(sweep: Mapping[str, Any], task: Task | str = TASK, **top: Any) -> Expansion:
    config = validate(config_of(sweep, **top), "config.yaml")
    return expand(config, task if isinstance(task, Task) else task_of(task))


def params_of(sweep: Mapping[str, Any], *names: str, task: Task | str = TASK, **top: Any) -> list[Any]:
    """The named parameters of every cell in order, a tuple a cell (the bare value when there is one name)."""
    cells = [cell.params for cell in expanded(sweep, task, **top).cells]
    return [params[names[0]] if len(names) == 1 else tuple(params[name] for name in names) for params in cells]


def ids_of(sweep: Mapping[str, Any], task: Task | str = TASK, **top: Any) -> list[str]:
    return [cell.id for cell in expanded(sweep, task, **top).cells]


def load(root: Path, config: str | Mapping[str, Any], *overrides: str, source: str = SOURCE) -> tuple[Config, Task]:
    """Write the task and the configuration (YAML text, or a mapping) into ``root`` and load them."""
    (root / "task.py").write_text(source)
    path = root / "config.yaml"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return load_config(path, [], overrides, root)


def refused(call: Callable[[], object]) -> UserError:
    with pytest.raises(UserError) as caught:
        call()
    return caught.value


def check_words(error: UserError, key: str, *words: str) -> None:
    """``key`` is the error's key, each of the ``words`` stands somewhere in the message that people read."""
    assert error.key == key, str(error)
    assert error.expected and error.fix
    assert [word for word in words if word not in str(error)] == [], str(error)
