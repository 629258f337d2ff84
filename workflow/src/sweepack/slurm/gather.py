"""Which cells share a Slurm job: alike in what they ask for, about equally long, within the time limit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sweepack.admission import Ask
from sweepack.forecast import play
from sweepack.leases import WHOLE
from sweepack.records import Assessment, State
from sweepack.slurm.cluster import Partition
from sweepack.slurm.config import Request, Slurm
from sweepack.slurm.request import Allocation
from sweepack.sweep import Cell

# For cells that say nothing and have no finished like.
GUESSED_MINUTES = 10.0
DEFAULT_LIMIT = 4 * 60
# Python, torch and the task are imported, on a shared file system, before the first cell starts.
START_MINUTES = 5
# To find one batch size: some fifteen short trainings.
PROBE_MINUTES = 15


def margin(settings: Slurm) -> int:
    """Minutes of a job in which no cell gets on: those of its start, and from the signal to stop to the time limit.

    Slurm sends the signal up to a minute early.
    """
    return START_MINUTES + math.ceil(settings.grace / 60) + 1


@dataclass(frozen=True)
class Estimate:
    """How long a cell will take, in minutes.

    ``bound``: no longer, as its config says (``runtime``). ``known``: by that, or by finished cells; else a guess.
    """

    minutes: float
    bound: bool
    known: bool = True


def estimate(cells: Sequence[Cell], states: Mapping[str, Assessment]) -> dict[str, Estimate]:
    """By cell: its ``runtime``; else what finished cells of the same entry of ``resources`` took on average."""
    taken: dict[int, list[float]] = {}
    for cell in cells:
        record = states[cell.id].record
        if record and record.status is State.FINISHED and record.started is not None and record.ended is not None:
            taken.setdefault(id(cell.resources), []).append((record.ended - record.started) / 60)
    found = {}
    for cell in cells:
        if states[cell.id].state is State.FINISHED:
            found[cell.id] = Estimate(0.0, True)  # only its result is to be handed over
        elif cell.resources.runtime is not None:
            found[cell.id] = Estimate(float(cell.resources.runtime), True)
        else:
            known = taken.get(id(cell.resources))
            found[cell.id] = Estimate(fmean(known) if known else GUESSED_MINUTES, False, bool(known))
    return found


@dataclass(frozen=True)
class Lane:
    """Cells whose jobs ask for the same: ``request`` in ``partition``; ``shares`` in thousandths, by cell."""

    request: Request
    partition: Partition
    cells: tuple[Cell, ...]
    shares: Mapping[str, int]
    estimates: Mapping[str, Estimate]

    def gather(self, settings: Slurm, largest: int | None) -> list[tuple[tuple[Cell, ...], Allocation]]:
        """Packs with what each asks for; none has more than ``largest`` cells, where that is given."""
        count = self._count(settings)
        if largest:
            count = max(count, math.ceil(len(self.cells) / largest))
        room = self._room(settings)
        while True:
            packs = self._balanced(min(count, len(self.cells)), largest)
            allocations = [self.pack(pack, settings) for pack in packs]
            longest = max(allocation.expected for allocation in allocations)
            if longest <= room or count >= len(self.cells):
                return list(zip(packs, allocations, strict=True))
            count = max(count + 1, math.ceil(count * longest / room))

    def single(self, cell: Cell, settings: Slurm) -> Allocation:
        """What the job of one cell asks for."""
        expected = self.estimates[cell.id].minutes
        sized = Allocation(
            self.request,
            settings.cpus or cell.resources.cpus,
            self._minutes([cell], expected, settings),
            mem_mb=settings.mem or cell.resources.mem,
            expected=expected,
        )
        if layout := cell.resources.layout():
            return replace(sized, cpus=cell.resources.cpus, gpus=layout.world_size, layout=layout)
        if settings.mode != "shard":
            return replace(sized, gpus=1)
        of_a_gpu = settings.shards_per_gpu or max(1, self.partition.shards // max(1, self.partition.gpus))
        return replace(sized, shards=max(1, math.ceil(self.shares[cell.id] * of_a_gpu / WHOLE)))

    def probe(self, settings: Slurm) -> Allocation:
        """What the job that measures something of each cell of this lane asks for."""
        limit = self.partition.minutes or math.inf
        minutes = min(limit, settings.time or START_MINUTES + PROBE_MINUTES * len(self.cells))
        cpus = settings.cpus or max(cell.resources.cpus for cell in self.cells)
        memory = settings.mem or max(cell.resources.mem or 0 for cell in self.cells) or None
        return Allocation(self.request, cpus, int(minutes), gpus=1, mem_mb=memory)

    def pack(self, cells: Sequence[Cell], settings: Slurm) -> Allocation:
        """What the job of a pack of ``cells`` asks for, and how long they will take side by side."""
        gpus = settings.pack.gpus
        cpus, memory = self._cpus(cells, gpus, settings), self._memory(cells, gpus, settings)
        left = {"cores": cpus, "mem_mb": memory or self.partition.memory}
        asks = [self._ask(cell, left) for cell in cells]
        expected = max(play(asks, [str(device) for device in range(gpus)], left)[1], default=0.0)
        minutes = self._minutes(cells, expected, settings)
        return Allocation(self.request, cpus, minutes, gpus, mem_mb=memory, expected=expected)

    def _ask(self, cell: Cell, left: Mapping[str, int]) -> Ask:
        wanted = {"cores": cell.resources.cpus, "mem_mb": cell.resources.mem or 0}
        needs = {name: min(amount, left[name]) for name, amount in wanted.items()}
        return Ask(self.shares[cell.id], needs, (), self.estimates[cell.id].minutes, cell.index)

    def _work(self, cell: Cell) -> float:
        """GPU minutes, at least a little: those that take no time must not all come to lie in one pack."""
        return self.shares[cell.id] * max(self.estimates[cell.id].minutes, 1e-3) / WHOLE

    def _count(self, settings: Slurm) -> int:
        if settings.pack.count != "auto":
            return int(settings.pack.count)
        work = sum(self._work(cell) for cell in self.cells)
        target = min(settings.pack.minutes, self._room(settings))
        return max(1, math.ceil(work / (settings.pack.gpus * target)))

    def _balanced(self, count: int, largest: int | None) -> list[tuple[Cell, ...]]:
        """``count`` packs of about equal work: each cell, the largest first, goes to the pack that has least.

        Graham's LPT rule (1969): at most 4/3 of the best possible.
        """
        heap: list[tuple[float, int, int]] = [(0.0, 0, number) for number in range(count)]
        packs: list[list[Cell]] = [[] for _ in range(count)]
        for cell in sorted(self.cells, key=self._work, reverse=True):
            load, size, number = heapq.heappop(heap)
            packs[number].append(cell)
            if largest is None or size + 1 < largest:
                heapq.heappush(heap, (load + self._work(cell), size + 1, number))
        return [tuple(sorted(pack, key=lambda cell: cell.index)) for pack in packs if pack]

    def _limit(self, cells: Sequence[Cell], settings: Slurm) -> float:
        """Minutes that a job of ``cells`` may ask for: the partition's, or fewer where some do not say how long."""
        longest = math.inf if self.partition.minutes is None else self.partition.minutes
        if all(self.estimates[cell.id].bound for cell in cells):
            return longest
        needed = max(self.estimates[cell.id].minutes for cell in cells) + margin(settings)
        return min(longest, settings.time or max(DEFAULT_LIMIT, math.ceil(needed)))

    def _room(self, settings: Slurm) -> float:
        """Minutes that a pack may last. On a guess nothing is cut: what is not done in time goes on in another job."""
        if not all(self.estimates[cell.id].known for cell in self.cells):
            return math.inf
        return max(1.0, self._limit(self.cells, settings) - margin(settings))

    def _minutes(self, cells: Sequence[Cell], expected: float, settings: Slurm) -> int:
        """The time limit of a job: by what its cells may take at most, or else the longest that is allowed."""
        limit = self._limit(cells, settings)
        if all(self.estimates[cell.id].bound for cell in cells):
            limit = min(limit, math.ceil(expected) + margin(settings))
        return int(limit)

    def _at_once(self, cell: Cell, cells: Sequence[Cell], gpus: int) -> int:
        return min(len(cells), WHOLE // self.shares[cell.id] * gpus)

    def _cpus(self, cells: Sequence[Cell], gpus: int, settings: Slurm) -> int:
        """What the cells can use at once, but no more than the GPUs' part of a node: the rest is for its others."""
        if settings.cpus:
            return settings.cpus
        wanted = max(self._at_once(cell, cells, gpus) * cell.resources.cpus for cell in cells)
        part = self.partition.cpus * gpus // max(1, self.partition.gpus)
        return max(min(wanted, part), *(cell.resources.cpus for cell in cells), 1)

    def _memory(self, cells: Sequence[Cell], gpus: int, settings: Slurm) -> int | None:
        if settings.mem:
            return settings.mem
        needs = [cell.resources.mem for cell in cells]
        if not all(needs):
            return None
        wanted = max(self._at_once(cell, cells, gpus) * (cell.resources.mem or 0) for cell in cells)
        part = self.partition.memory * gpus // max(1, self.partition.gpus)
        return max(min(wanted, part), *(need for need in needs if need))
