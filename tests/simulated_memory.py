"""A device's memory as a function of the batch: convex, with jumps and noise, cached as torch's allocator does.

Measures as a ``Meter`` does, with the outcomes that a real one has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from sweepack.sizing.meter import Measurement

MIB = 2**20
GIB = 2**30


def reserved(size: float) -> int:
    """Bytes that torch's caching allocator reserves for so many in use: in steps of 2 MiB, and of 20 above 20."""
    step = 2 * MIB if size < 20 * MIB else 20 * MIB
    return math.ceil(size / step) * step


@dataclass
class SimulatedMemory:
    """A task on a device of ``device`` bytes, of which a cell may have ``cap`` (None: all).

    The peak is the larger of two phases: the optimiser's step (``step``, whatever the batch) and forward and backward
    (``static`` + ``sample`` a sample, + ``curve`` a sample squared), + a workspace of ``jumps[batch]`` from that batch
    on. ``noise`` is the part by which it differs each time. ``data`` is how many samples there are, ``ignores`` the
    batch that the task takes whatever it is told. ``fails`` are batches with an error of their own. With ``enforced``
    False (a CPU) more than the cap is measured, not refused.
    """

    device: int = 80 * GIB
    cap: int | None = None
    static: float = GIB
    sample: float = 10 * MIB
    curve: float = 0.0
    step: float = 0.0
    jumps: Mapping[int, float] = field(default_factory=dict)
    noise: float = 0.0
    data: int | None = None
    ignores: int | None = None
    tells_rows: bool = True
    fails: Mapping[int, str] = field(default_factory=dict)
    enforced: bool = True
    seed: int = 0
    asked: list[int] = field(default_factory=list)

    def peak(self, batch: int) -> int:
        """What a step takes without noise."""
        batch = self.rows(batch)
        phases = max(self.step, self.static + self.sample * batch + self.curve * batch**2)
        return reserved(phases + sum(size for start, size in self.jumps.items() if batch >= start))

    def rows(self, batch: int) -> int:
        batch = self.ignores or batch
        return min(batch, self.data or batch)

    def __call__(self, batch: int) -> Measurement:
        assert batch not in self.asked, f"batch {batch} was measured before"
        assert batch >= 1
        self.asked.append(batch)
        if error := self.fails.get(batch):
            return _measurement(batch, "failed", error=error)
        noise = random.Random(f"{self.seed} {batch}").uniform(-self.noise, self.noise)
        peak = reserved(self.peak(batch) * (1 + noise))
        limit = self.device if self.cap is None else self.cap
        if peak > (limit if self.enforced else self.device):
            return _measurement(batch, "oom", error="CUDA out of memory")
        return _measurement(batch, "measured", peak, self.rows(batch) if self.tells_rows else None)


def _measurement(
    batch: int, outcome: str, peak: int | None = None, rows: int | None = None, error: str | None = None
) -> Measurement:
    return Measurement(
        batch=batch,
        outcome=outcome,  # type: ignore[arg-type]
        peak=peak,
        source="simulated",
        allocated=peak,
        rows=rows,
        error=error,
        seconds=0.0,
    )
