"""Who runs the cells: this project in its modes, its peers, and the bound."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from venvs import HERE, ROOT

SLOTS = 2
Losses = dict[tuple[float, int], float]


@dataclass(frozen=True)
class Runner:
    """``command`` is run in a folder that holds `tasks.py`, `grid.py` and `axes.json`.

    ``peer`` names its virtual environment, ``package`` what its version is the version of, ``fresh`` says that every
    cell starts and imports anew, ``config`` holds what this project's configuration has beyond the sweep.
    """

    title: str
    command: list[str]
    peer: str | None = None
    package: str | None = None
    fresh: bool = False
    config: Mapping[str, Any] | None = field(default=None)

    @property
    def is_ours(self) -> bool:
        return self.config is not None

    def set_up(self, folder: Path, axes: dict[str, Any]) -> None:
        """Lay out ``folder``."""
        for name in ("tasks.py", "grid.py"):
            shutil.copy(HERE / name, folder)
        (folder / "axes.json").write_text(json.dumps(axes))
        (folder / "out").mkdir()
        if self.config is not None:
            swept = {name: axes[name] for name in ("lr", "seed")}
            sweep = {"name": "cells", "task": "tasks.py:train", "axes": swept, "params": {"steps": axes["steps"]}}
            config = {"sweep": sweep, "resources": [{"gpu": 1 / SLOTS, "cpus": 1}], **self.config}
            (folder / "config").mkdir()
            (folder / "config" / "config.yaml").write_text(json.dumps(config))  # JSON is YAML

    def losses(self, folder: Path) -> Losses:
        """What the cells have come to, by learning rate and seed."""
        if self.is_ours:
            with (folder / "results" / "cells" / "table.csv").open(newline="") as stream:
                return {
                    (float(row["params.lr"]), int(row["params.seed"])): float(row["metrics.loss"])
                    for row in csv.DictReader(stream)
                    if row["metrics.loss"]
                }
        found = {}
        for file in (folder / "out").glob("*.json"):
            lr, _, seed = file.stem.rpartition("-")
            found[float(lr), int(seed)] = json.loads(file.read_text())["loss"]
        return found


def _python(script: str, *arguments: str) -> list[str]:
    return ["python", str(HERE / "peers" / script), *arguments]


_OURS = ["snakemake", "--snakefile", f"{ROOT}/Snakefile", "--profile", f"{ROOT}/profiles/local", "--cores", str(SLOTS)]
_PLAIN = ["snakemake", "--snakefile", f"{HERE}/peers/plain.smk", "--cores", str(SLOTS)]

RUNNERS = {
    "bound": Runner("the bound: two loops", _python("bound.py")),
    "sweepack_packs": Runner("sweepack, packs", _OURS, config={"cells_per_job": 1000}),
    "sweepack": Runner("sweepack, a job a cell", _OURS, config={"cells_per_job": 1}),
    "hydra_joblib": Runner(
        "Hydra + joblib", _python("hydra_joblib.py"), peer="hydra_joblib", package="hydra-joblib-launcher"
    ),
    "mushin": Runner("mushin + joblib", _python("mushin_joblib.py"), peer="mushin", package="mushin-py"),
    "ray_reused": Runner("Ray, CPU tasks", _python("ray_tasks.py", "cpu"), peer="ray", package="ray"),
    "ray": Runner("Ray, half a GPU a task", _python("ray_tasks.py", "gpu"), peer="ray", package="ray", fresh=True),
    "xargs": Runner("xargs -P 2", ["sh", f"{HERE}/peers/xargs.sh"], fresh=True),
    "hyperqueue": Runner(
        "HyperQueue", _python("hyperqueue_programs.py"), peer="hyperqueue", package="hyperqueue", fresh=True
    ),
    "snakemake_plain": Runner("plain Snakemake", _PLAIN, package="snakemake", fresh=True),
    "sweepack_fresh": Runner(
        "sweepack, start: fresh", _OURS, fresh=True, config={"cells_per_job": 1, "start": "fresh"}
    ),
}
