"""What one Slurm job asks for, as the plan shows it and sbatch is given it."""

from __future__ import annotations

from dataclasses import dataclass

from sweepack.ddp.layout import Layout
from sweepack.slurm.config import Request, Slurm


@dataclass(frozen=True)
class Allocation:
    """The size of a job: CPUs, time limit in minutes, GPUs or shards of one, memory in megabytes (None: the default).

    ``expected`` is how many minutes its cells will take. With a ``layout`` the CPUs are those of a rank, the GPUs those
    of all nodes, the memory that of each.
    """

    request: Request
    cpus: int
    minutes: int
    gpus: int = 0
    shards: int = 0
    mem_mb: int | None = None
    expected: float = 0.0
    layout: Layout | None = None

    def flags(self, settings: Slurm) -> list[str]:
        """As sbatch takes them."""
        flags = [*self.request.flags(), *self._size(settings)]
        if self.mem_mb:
            flags.append(f"--mem={self.mem_mb}M")
        flags.append(f"--time={self.minutes}")
        flags.append(f"--signal=TERM@{settings.grace}")
        flags.append("--requeue" if settings.requeue else "--no-requeue")
        return flags

    def _size(self, settings: Slurm) -> list[str]:
        if self.layout is None:
            # One node: GPUs asked for by --gpus alone may be spread over several.
            return ["--ntasks=1", "--nodes=1", self._devices(settings), f"--cpus-per-task={self.cpus}"]
        layout = self.layout
        model = f"{self.request.gpu_model}:" if self.request.gpu_model else ""
        kind = "--gpus-per-node=" if settings.gpu_flag == "gpus" else "--gres=gpu:"
        gpus = f"{kind}{model}{layout.gpus_per_node}"
        if layout.elastic:
            # A number of tasks, also one a node, would let Slurm give the least nodes only, though more are free.
            nodes = f"--nodes={layout.least_nodes}-{layout.nodes}"
            return [nodes, gpus, f"--cpus-per-task={self.cpus * layout.gpus_per_node}", "--no-kill"]
        tasks = f"--ntasks-per-node={layout.gpus_per_node}"
        return [f"--nodes={layout.nodes}", tasks, gpus, f"--cpus-per-task={self.cpus}"]

    def _devices(self, settings: Slurm) -> str:
        model = f"{self.request.gpu_model}:" if self.request.gpu_model else ""
        if self.shards:
            return f"--gres=shard:{model}{self.shards}"
        return f"--gpus={model}{self.gpus}" if settings.gpu_flag == "gpus" else f"--gres=gpu:{model}{self.gpus}"
