"""The rule of thumb for batch sizes, and the share of a device that follows from a measured peak.

    available = M_gpu / N * F
    B_max     = floor((available - M_static) / M_sample)
    start     = floor(0.8 * B_max)

with M_gpu the memory of the device, N the cells on it, F the part of it that is to be filled, M_static what a cell
takes whatever its batch, and M_sample what each sample adds. It is a first guess and nothing is run on its word,
because memory is no straight line: a peak is the largest of several phases, and the optimiser's step, which does not
grow with the batch, is often the largest at small ones (for wide layers M_sample then comes out as nothing, or below);
the optimiser's state appears at the first step only; the libraries' workspaces jump. Beside that, each process takes
memory that torch does not count. So the batch that cells get is always one that was measured (``sizing.search``).

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sweepack.leases import WHOLE

START = 0.8
FILL = 0.85
_MANY = 1e9  # nobody has more samples


@dataclass(frozen=True)
class Guess:
    """What the rule of thumb says: ``available`` as it was given, ``largest`` (B_max) and ``start``, or the ``reason``
    why there is no such batch."""

    available: float
    largest: int | None = None
    start: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Share:
    """What ``gpu: auto`` comes to: thousandths of a device, and how many such ``cells`` it holds.

    ``need`` is the part of a device that one takes, 1 being all of it. ``limited_by``: ``memory`` (no more fit) or
    ``alone`` (it needs more than may be shared). ``trouble``: why it fits nowhere; then there is no share.
    """

    share: int | None
    cells: int
    need: float
    limited_by: str
    trouble: str | None = None


def whole(value: float) -> int:
    """``floor``, for what is 240 and comes out as 239.99999999999997: decimal fractions are not exact."""
    return math.floor(value * (1 + 1e-12))


def rule_of_thumb(
    device: float, cells: int, static: float, sample: float, fill: float = FILL, start: float = START
) -> Guess:
    """The first guess for ``cells`` on a ``device``; all memory in one unit, whichever.

    It does not fit when nothing is left beside what is static, and has no largest batch when the peak does not grow
    with the batch: both are answers, with their reason.
    """
    available = device / cells * fill
    if sample <= 0:
        return Guess(available, reason="the peak does not grow with the batch, so the rule has no largest one")
    if available - static < sample * (1 - 1e-12):
        return Guess(available, reason="does not fit: nothing is left for a sample beside what is static")
    largest = whole(min((available - static) / sample, _MANY))
    return Guess(available, largest, max(1, whole(start * largest)))


def static_and_sample(peaks: Mapping[int, float]) -> tuple[float, float] | None:
    """M_static and M_sample: intercept and slope between the two largest batches of ``peaks``; None for less than two.

    Between the largest ones, because there the phase that grows with the batch is most likely the one at the peak.
    """
    if len(peaks) < 2:
        return None
    low, high = sorted(peaks)[-2:]
    slope = (peaks[high] - peaks[low]) / (high - low)
    return peaks[high] - high * slope, slope


def share_for(peak: int, total: int, reserve: int, overhead: int, margin: float, alone_above: float) -> Share:
    """The share for cells with a measured ``peak`` on a device of ``total`` bytes, so that a whole number fits it.

    A cell needs its peak, ``margin`` (a part of it) more, and the ``overhead`` of a process; the ``reserve`` is left
    free. ``memory.cap`` of the share is never below peak and margin. What needs more than the part ``alone_above`` of
    a device gets one to itself, which has no cap. All in bytes.
    """
    need = math.ceil(peak * (1 + margin)) + overhead
    part = need / total
    if peak + overhead > total:
        return Share(None, 0, part, "memory", f"does not fit: it takes {part:.2f} of a device")
    usable = total - reserve
    # A thousandth is the smallest step: rounded up first, or the cap of the share would be below what is needed.
    least = -(-need * WHOLE // usable) if usable > 0 else WHOLE + 1
    if part > alone_above or least > WHOLE // 2:
        return Share(WHOLE, 1, part, "alone" if least <= WHOLE // 2 else "memory")
    cells = WHOLE // least
    return Share(WHOLE // cells, cells, part, "memory")
