"""What a cell's process finds in its environment: one device, pinned threads, no other launcher's ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sweepack import allocator

# Lightning and torch read these when they are imported and would take the cell for a rank of some larger job:
# with a leftover SLURM_PROCID=2 a cell writes no metrics, with SLURM_NTASKS it resumes from foreign checkpoints.
FOREIGN = re.compile(
    r"(SLURM|SRUN|SBATCH|SALLOC|PMI|PMIX|PMI2|OMPI|JSM|LSB|TORCHELASTIC|HOROVOD)_.*"
    r"|(GLOBAL_|LOCAL_|GROUP_|NODE_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE"
    r"|MASTER_(ADDR|PORT)|PL_(GLOBAL_SEED|SEED_WORKERS)"
)

THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
)


def cell_environment(
    inherited: Mapping[str, str],
    *,
    visible: str,
    threads: int,
    memory: Mapping[str, Any] | None = None,
    fraction: float | None = None,
) -> dict[str, str]:
    """The environment of a cell's process.

    ``visible`` becomes its CUDA_VISIBLE_DEVICES (empty: no GPU), ``threads`` the size of every math library's pool:
    the number of threads changes the last bits of results, so it is never left to the machine. Scheduler and rank
    variables are removed; everything else (proxies, caches, NCCL settings, the user's own) passes. ``memory`` are the
    settings of torch's allocator and ``fraction`` is the part of the device that it may take (``allocator.configure``).
    Raises UserError for options of the allocator that torch would not take.
    """
    environment = {name: value for name, value in inherited.items() if not FOREIGN.fullmatch(name)}
    environment.update(dict.fromkeys(THREADS, str(threads)))
    environment["OMP_DYNAMIC"] = environment["MKL_DYNAMIC"] = "FALSE"
    environment["CUDA_VISIBLE_DEVICES"] = visible
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("PYTHONHASHSEED", "0")
    return allocator.configure(environment, memory or {}, fraction)
