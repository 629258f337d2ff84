"""What a runner finds in its folder: the axes of the sweep, in `axes.json`, and where a cell's result goes.

`python grid.py` prints a line for each cell: the arguments of `python tasks.py`.
"""

import itertools
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def axes() -> dict[str, Any]:
    """``{"lr": [...], "seed": [...], "steps": 25}``."""
    return json.loads((HERE / "axes.json").read_text())


def cells() -> list[dict[str, Any]]:
    """The arguments of `tasks.run`, a dictionary a cell."""
    found = axes()
    return [
        {"lr": lr, "seed": seed, "steps": found["steps"]} for lr, seed in itertools.product(found["lr"], found["seed"])
    ]


def result(lr: float, seed: int) -> Path:
    """The file that holds ``{"loss": ...}`` of a cell in the end."""
    return HERE / "out" / f"{lr}-{seed}.json"


def save(lr: float, seed: int, metrics: dict[str, float]) -> None:
    """Write a cell's result."""
    result(lr, seed).write_text(json.dumps(metrics))


if __name__ == "__main__":
    for cell in cells():
        print(*cell.values(), result(cell["lr"], cell["seed"]))
