"""What one Slurm job asks for, as the plan shows it and sbatch is given it."""

from __future__ import annotations

from dataclasses import dataclass

from sweepack.slurm.config import Request, Slurm


@dataclass(frozen=True)
class Allocation:
    """The size of a job: CPUs, time limit in minutes, GPUs or shards of one, memory in megabytes (None: the default).

    ``expected`` is how many minutes its cells will take.
    """

    request: Request
    cpus: int
    minutes: int
    gpus: int = 0
    shards: int = 0
    mem_mb: int | None = None
    expected: float = 0.0

    def flags(self, settings: Slurm) -> list[str]:
        """As sbatch takes them."""
        # One node: GPUs asked for by --gpus alone may be spread over several.
        flags = [*self.request.flags(), "--nodes=1", self._devices(settings), f"--cpus-per-task={self.cpus}"]
        if self.mem_mb:
            flags.append(f"--mem={self.mem_mb}M")
        flags.append(f"--time={self.minutes}")
        flags.append(f"--signal=TERM@{settings.grace}")
        flags.append("--requeue" if settings.requeue else "--no-requeue")
        return flags

    def _devices(self, settings: Slurm) -> str:
        model = f"{self.request.gpu_model}:" if self.request.gpu_model else ""
        if self.shards:
            return f"--gres=shard:{model}{self.shards}"
        return f"--gpus={model}{self.gpus}" if settings.gpu_flag == "gpus" else f"--gres=gpu:{model}{self.gpus}"
