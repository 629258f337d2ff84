"""A GPU as ``torch.cuda`` shows it, for a machine that has none: the allocator's cap, its peaks, and what came when.

What is not here is torch's own.
"""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import torch

BLOCK = 2 * 2**20  # the allocator asks CUDA for memory in multiples of this


class FakeCuda:
    """Takes the place of ``torch.cuda``: one device of ``total`` bytes, ``calls`` are the names of what was done to it.

    ``refuses``: no device can be had, for this reason. ``deaf``: it takes no cap, as if something else had replaced the
    allocator. ``option_read``: the allocator has read its environment already, as it may have in a warm host.
    """

    def __init__(
        self,
        total: int,
        *,
        initialised: bool = False,
        deaf: bool = False,
        option_read: bool = False,
        refuses: str | None = None,
    ) -> None:
        self._refuses = refuses
        self.calls: list[str] = []
        self._real = torch.cuda
        self._total = total
        self._initialised = initialised
        self._deaf = deaf
        found = re.search(r"per_process_memory_fraction:([0-9.]+)", "" if option_read else self._conf())
        self._fraction = float(found[1]) if found else 1.0
        self._reserved = 0
        self._allocated = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @staticmethod
    def _conf() -> str:
        return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))

    def _lazy_init(self, call: str) -> None:
        self._initialised = True
        self.calls.append(call)

    def is_available(self) -> bool:
        return self._refuses is None

    def init(self) -> None:
        if self._refuses:
            raise RuntimeError(self._refuses)
        self._lazy_init("init")

    def is_initialized(self) -> bool:
        return self._initialised

    def get_device_properties(self, device: int) -> SimpleNamespace:
        self._lazy_init("properties")
        return SimpleNamespace(total_memory=self._total)

    def set_per_process_memory_fraction(self, fraction: float, device: int | None = None) -> None:
        self._lazy_init("cap")
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if fraction < 0 or fraction > 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        if not self._deaf:
            self._fraction = int(fraction * self._total) / self._total

    def get_per_process_memory_fraction(self, device: int | None = None) -> float:
        self._lazy_init("verified")
        return self._fraction

    def caching_allocator_alloc(self, size: int) -> None:
        """Allocate, and never free."""
        self._lazy_init("alloc")
        blocks = -(-size // BLOCK) * BLOCK
        if self._reserved + blocks > self._fraction * self._total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB.")
        self._reserved += blocks
        self._allocated += size

    def max_memory_reserved(self, device: int | None = None) -> int:
        return self._reserved

    def max_memory_allocated(self, device: int | None = None) -> int:
        return self._allocated
