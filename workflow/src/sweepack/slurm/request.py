"""What one Slurm job asks for, as the plan shows it and sbatch is given it."""

from __future__ import annotations

from dataclasses import dataclass

from sweepack.slurm.config import Request, Slurm


@dataclass(frozen=True)
class Allocation:
    """The size of a job: GPUs or shards of one, CPUs, memory in megabytes (None: the default), minutes."""

    request: Request
    cpus: int
    minutes: int
    gpus: int = 0
    shards: int = 0
    mem_mb: int | None = None

    def flags(self, settings: Slurm) -> list[str]:
        """As sbatch takes them."""
        flags = [*self.request.flags(), *self._devices(settings), f"--cpus-per-task={self.cpus}"]
        if self.mem_mb:
            flags.append(f"--mem={self.mem_mb}M")
        flags.append(f"--time={self.minutes}")
        flags.append(f"--signal=TERM@{settings.grace}")
        flags.append("--requeue" if settings.requeue else "--no-requeue")
        return flags

    def _devices(self, settings: Slurm) -> list[str]:
        model = f"{self.request.gpu_model}:" if self.request.gpu_model else ""
        # GPUs asked for by --gpus alone may be spread over nodes.
        if self.shards:
            return ["--nodes=1", f"--gres=shard:{model}{self.shards}"]
        if not self.gpus:
            return []
        asked = f"--gpus={model}{self.gpus}" if settings.gpu_flag == "gpus" else f"--gres=gpu:{model}{self.gpus}"
        return ["--nodes=1", asked]
