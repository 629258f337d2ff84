"""Ray: tasks that take half a GPU each (`gpu`), or plain tasks (`cpu`) whose workers Ray uses again.

Ray ends the worker of a GPU task with the task, so that its memory is freed: a process a cell.
"""

import sys

import ray
from grid import HERE, cells, save

needs = {"gpu": {"num_cpus": 1, "num_gpus": 0.5}, "cpu": {"num_cpus": 1}}[sys.argv[1]]


@ray.remote(**needs)
def train(cell: dict) -> dict[str, float]:
    from tasks import run

    return run(**cell)


ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, _temp_dir=str(HERE / "ray"))
for cell, metrics in zip(cells(), ray.get([train.remote(cell) for cell in cells()]), strict=True):
    save(cell["lr"], cell["seed"], metrics)
