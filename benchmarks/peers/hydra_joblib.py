"""Hydra's multirun with its joblib launcher: two worker processes, used again for many cells."""

import sys
from dataclasses import dataclass

import hydra
from grid import axes, save
from hydra.core.config_store import ConfigStore


@dataclass
class Cell:
    lr: float = 0.01
    seed: int = 0
    steps: int = 1


ConfigStore.instance().store(name="cell", node=Cell)


@hydra.main(version_base="1.3", config_path=None, config_name="cell")
def main(cell: Cell) -> None:
    # Here and not above: only the workers need it.
    from tasks import run

    save(cell.lr, cell.seed, run(cell.lr, cell.seed, cell.steps))


if __name__ == "__main__":
    swept = [f"{name}={','.join(map(str, axes()[name]))}" for name in ("lr", "seed")]
    sys.argv += ["--multirun", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *swept, f"steps={axes()['steps']}"]
    main()
