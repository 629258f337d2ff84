"""What sbatch is told about the nodes of a cell on several devices."""

from __future__ import annotations

import pytest
from sweepack.ddp.layout import Layout
from sweepack.slurm.config import Request, Slurm
from sweepack.slurm.request import Allocation


@pytest.mark.parametrize(
    ("least", "flags"),
    [
        (2, ["--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=3"]),
        (1, ["--nodes=1-2", "--gpus-per-node=4", "--cpus-per-task=12", "--no-kill"]),
    ],
)
def test_a_task_a_rank_but_of_an_elastic_cell_no_number_of_tasks(least: int, flags: list[str]) -> None:
    """With one, Slurm 22.05 gives as few nodes as the tasks fit on, and not as many as are free."""
    asked = Allocation(Request(), cpus=3, minutes=9, layout=Layout(2, 4, least, "torchrun")).flags(Slurm())
    assert asked[: asked.index("--time=9")] == flags
