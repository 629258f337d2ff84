"""GPU memory: the cap that keeps a cell inside its share."""

from __future__ import annotations

from sweepack.leases import WHOLE

GIB = 2**30
# Memory of the device that torch's allocator does not count: kept free for the device as a whole (driver, display),
# and per process for the CUDA context and kernel images.
RESERVE = GIB // 4
OVERHEAD = GIB // 2


def cap(share: int, total: int, reserve: int = RESERVE, overhead: int = OVERHEAD) -> int:
    """Bytes that torch may reserve for a cell with ``share`` thousandths of a device of ``total`` bytes.

    With N = 1000 / share cells on the device, each gets (total - reserve - N * overhead) / N. Raises ValueError when
    nothing is left, since a share so small holds not even the cell's CUDA context.
    """
    bytes_left = (total - reserve) * share // WHOLE - overhead
    if bytes_left <= 0:
        least = overhead / (total - reserve)
        raise ValueError(
            f"a share of {share / WHOLE} of {total / GIB:.1f} GiB is below the {least:.3f} that CUDA needs"
        )
    return bytes_left


def apply_cap(share: int) -> int | None:
    """Cap this process's CUDA memory and return the cap in bytes; None for a whole device, which stays uncapped.

    Must run before anything has used CUDA: what was allocated by then would not be counted. Raises RuntimeError if
    CUDA is already initialised, ValueError if the share is too small.
    """
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA was initialised before the cell's memory cap was in force; look for GPU work in sitecustomize, "
            "in usercustomize or in a .pth file of this environment"
        )
    if share >= WHOLE:
        return None
    total = torch.cuda.get_device_properties(0).total_memory
    limit = cap(share, total)
    torch.cuda.set_per_process_memory_fraction(limit / total, 0)
    return limit
