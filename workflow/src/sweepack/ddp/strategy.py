"""Lightning on several devices: its ranks, its strategy, as the cell's layout has them."""

from __future__ import annotations

import os
from typing import Any

from pytorch_lightning.plugins.environments import ClusterEnvironment
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy

from sweepack.ddp.world import World


class CellEnvironment(ClusterEnvironment):
    """What a rank was told, whoever has started it.

    Not Lightning's SLURMEnvironment: that resumes from other cells' checkpoints, requeues the whole job when it is
    signalled, and derives one port from the job's id, on which two cells of a job would meet.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """It is what it is."""

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """It is what it is."""

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return self._world.rank // self._world.layout.gpus_per_node


def placement(world: World, accelerator: str) -> dict[str, Any]:
    """The arguments of ``Trainer`` that follow from the layout."""
    backend = "nccl" if accelerator == "gpu" else "gloo"
    if world.layout.strategy == "fsdp":
        # One whole file, which a run on another number of ranks can read.
        strategy: Any = FSDPStrategy(process_group_backend=backend, state_dict_type="full")
    else:
        unused = world.layout.strategy != "ddp"
        strategy = DDPStrategy(process_group_backend=backend, find_unused_parameters=unused)
    return {"devices": world.layout.gpus_per_node, "num_nodes": world.nodes, "strategy": strategy}
