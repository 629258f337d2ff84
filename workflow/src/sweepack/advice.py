"""What finished cells have shown about their shares of a GPU: room for more at once, or hardly any left."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field

from sweepack.aggregate import Aggregate
from sweepack.job import Launch
from sweepack.leases import WHOLE
from sweepack.manifest import cell_files
from sweepack.memory import GIB, cap
from sweepack.mps.config import MOST_CLIENTS
from sweepack.records import Record, State
from sweepack.sizing.config import Memory
from sweepack.usage import number, on_gpu

# A smaller share must hold this much more than what was seen.
MARGIN = 1.1
# Less is not worth a change: as many more cells at once, as a part of those now.
GAIN = 0.25
LITTLE = 0.9
BUSY = 80.0


@dataclass
class _Group:
    """Finished cells with the same share (thousandths) of devices of the same ``total``; memory in bytes.

    ``outgrown``: others were too large for the same share.
    """

    share: int
    total: int
    reserve: int
    overhead: int
    outgrown: bool = False
    cells: int = 0
    peak: int = 0
    used: list[tuple[float, int, int]] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def add(self, memory: dict[str, int | None], seen: float | None, utilisation: float | None) -> None:
        """Count a cell: its ``Record.memory``, the GiB that NVML saw of it, and the percent that the device worked."""
        self.cells += 1
        # What NVML sees beyond torch's own count and the overhead must have room as well.
        outside = round((seen or 0.0) * GIB) - self.overhead
        self.peak = max(self.peak, memory["reserved"] or 0, outside)
        if memory.get("cap"):
            limit, used = memory["cap"] or 0, memory.get("allocated") or memory["reserved"] or 0
            self.used.append((used / limit, used, limit))
        if utilisation is not None:
            self.busy.append(utilisation)

    def fits(self, share: int) -> bool:
        try:
            return cap(share, self.total, self.reserve, self.overhead) >= MARGIN * self.peak
        except ValueError:
            return False

    def advice(self) -> str | None:
        cells = f"{self.cells} cell{'s' * (self.cells != 1)} of {self.share / WHOLE:g} device used"
        part, used, limit = max(self.used, default=(0.0, 0, 0))
        if part >= LITTLE and self.share < WHOLE:
            return f"{cells} up to {100 * part:.0f} % of their cap ({_gib(used)} of {_gib(limit)} GiB): little is left"
        count = self._most_at_once()
        if self.outgrown or count < (WHOLE // self.share) * (1 + GAIN):
            return None
        need = self.peak + self.overhead
        text = f"{cells} at most {100 * need / self.total:.0f} % of it ({_gib(need)} of {_gib(self.total)} GiB with "
        text += f"{_gib(self.overhead)} GiB overhead): `gpu: {WHOLE // count / WHOLE:g}` would run {count} at once"
        busy = sum(self.busy) / len(self.busy) if self.busy else 0.0
        return text + (f", though the device was busy {busy:.0f} % of the time" if busy >= BUSY else "")

    def _most_at_once(self) -> int:
        """How many such cells a device would hold, each under a cap that leaves a margin."""
        for count in range(MOST_CLIENTS, 0, -1):
            if WHOLE // (WHOLE // count) == count and self.fits(WHOLE // count):
                return count
        return 0


def advise(aggregate: Aggregate) -> list[str]:
    """A line for each share of a GPU about which finished cells have shown something worth a change; often none."""
    groups: dict[tuple[int, int], list[tuple[str, Record]]] = defaultdict(list)
    outgrown = {seen.record.outgrown for seen in aggregate.states.values() if seen.record}
    for cell, seen in aggregate.states.items():
        record = seen.record
        if seen.state is not State.FINISHED or record is None or not record.memory or not on_gpu(record):
            continue
        total = record.memory.get("total")
        if record.share and total and record.memory.get("reserved"):
            groups[record.share, total].append((cell, record))
    lines = []
    for (share, total), members in sorted(groups.items(), reverse=True):
        group = _Group(share, total, *_settings(aggregate, members[0][0]), share in outgrown)
        for cell, record in members:
            usage = aggregate.usage(cell)
            group.add(record.memory or {}, number(usage, "cell_memory", "peak"), number(usage, "utilisation", "mean"))
        lines.append(group.advice())
    return [line for line in lines if line]


def _settings(aggregate: Aggregate, cell: str) -> tuple[int, int]:
    """Bytes of reserve and overhead that the cell was started with."""
    try:
        meaning = json.loads(cell_files(aggregate.directory, cell).meaning.read_bytes())
        memory = Memory(**Launch(**meaning["launch"]).memory)
    except (OSError, ValueError, KeyError, TypeError):
        memory = Memory()
    return memory.reserve * 10**6, memory.overhead * 10**6


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
