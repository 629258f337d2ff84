"""mushin's sweep through its joblib launcher: two worker processes, used again for many cells."""

import mushin
from grid import axes, cells, save


@mushin.sweep
def experiment(lr: float, seed: int, steps: int) -> dict[str, float]:
    # Here and not above: only the workers need it.
    from tasks import run

    return run(lr, seed, steps)


if __name__ == "__main__":
    found = axes()
    table = experiment.run(
        launcher="joblib",
        launcher_config={"n_jobs": 2},
        lr=mushin.multirun(found["lr"]),
        seed=mushin.multirun(found["seed"]),
        steps=found["steps"],
    )
    for cell in cells():
        save(cell["lr"], cell["seed"], {"loss": float(table["loss"].sel(lr=cell["lr"], seed=cell["seed"]))})
