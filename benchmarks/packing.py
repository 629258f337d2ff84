"""How well cells are packed: the time from first start to last end, over a bound that no schedule can beat.

Virtual time, seeded mixes of shares, times and CPU threads, in several orders, on 1 to 8 devices; the code that chooses
is sweepack's own (`sweepack.admission`, `sweepack.forecast`), beside simple policies. Half a minute to run:

    python benchmarks/packing.py --out packing.json
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweepack.admission import Ask, Queue
from sweepack.files import write_atomic
from sweepack.forecast import rehearsed
from sweepack.leases import WHOLE, best_fit

MINUTE = 60.0
CORES_PER_DEVICE = 16


@dataclass(frozen=True)
class Cell:
    """``share`` in thousandths of a device; ``minutes`` is what it takes, ``told`` what the policy was told."""

    share: int
    minutes: float
    cores: int = 1
    told: float | None = None


def mixes(rng: random.Random, devices: int) -> dict[str, list[Cell]]:
    """The sweeps, about 10 minutes a cell, in the order in which a user might well write them."""

    def times(count: int, spread: float) -> Iterator[float]:
        return (10 * rng.lognormvariate(0, spread) for _ in range(count))

    def lpt_worst(share: int, slots: int) -> list[Cell]:
        # Graham 1969: longest first takes (4 - 1/slots)/3 of the least time.
        pairs = [time for time in range(slots + 1, 2 * slots) for _ in range(2)]
        return [Cell(share, 10 * time / slots) for time in [slots] * 3 + pairs]

    n = 24 * devices
    return {
        "identical": [Cell(250, 10)] * (16 * devices + 1),
        "uneven times": [Cell(300, time) for time in times(n, 1.0)],
        "one long cell, last": [Cell(250, rng.uniform(2, 6)) for _ in range(n)] + [Cell(250, 40)],
        "worst of longest first, halves": lpt_worst(500, 2 * devices),
        "worst of longest first, whole": lpt_worst(1000, max(devices, 2)),
        "0.6 then 0.4, identical": [Cell(600, 10)] * (n // 4) + [Cell(400, 10)] * (n // 4),
        "0.3 then 0.7": [Cell(share, rng.uniform(5, 15)) for share in [300] * (n // 2) + [700] * (n // 2)],
        "0.6 0.4 0.5 0.3 in turn": [
            Cell(s, t) for s, t in zip(itertools.cycle([600, 400, 500, 300]), times(n, 0.3), strict=False)
        ],
        "0.6 0.4 0.5 0.3 at random": [Cell(rng.choice([600, 400, 500, 300]), time) for time in times(n, 0.6)],
        "just over a third and a half": [Cell(rng.choice([334, 340, 500, 510, 1000]), time) for time in times(n, 0.5)],
        "any share": [Cell(rng.randint(50, 1000), time) for time in times(n, 0.8)],
        "large cells take longer": [
            Cell(s, s / 40 * rng.uniform(0.7, 1.3)) for s in rng.choices([100, 200, 400, 1000], k=n)
        ],
        "2 to 8 CPU threads": [Cell(rng.choice([100, 250, 500]), t, rng.choice([2, 2, 4, 8])) for t in times(n, 0.6)],
        "many tiny, few whole": [Cell(100, rng.uniform(0.2, 2)) for _ in range(100 * devices)]
        + [Cell(1000, rng.uniform(10, 20)) for _ in range(3 * devices)],
    }


def orders(rng: random.Random, cells: list[Cell]) -> dict[str, list[Cell]]:
    return {
        "as written": cells,
        "shuffled": rng.sample(cells, len(cells)),
        "shortest first": sorted(cells, key=lambda cell: cell.minutes),
    }


def lower_bound(cells: Sequence[Cell], devices: int, cores: int) -> float:
    """Minutes that every schedule takes: the longest cell, and what the devices and the cores must do."""
    sizes = ([cell.share for cell in cells], WHOLE, devices), ([cell.cores for cell in cells], cores, 1)
    times = [cell.minutes for cell in cells]
    return max(*times, *(bound for given in sizes for bound in _bounds(times, *given)))


def _bounds(times: Sequence[float], sizes: Sequence[int], capacity: int, bins: int) -> Iterator[float]:
    """For cells of ``sizes`` on ``bins`` of ``capacity``.

    A dual feasible function maps what fits into a bin to at most 1, at any moment, so the time-weighted sum over the
    bins is a bound: the area itself, and those of Fekete and Schepers (2001), which see that 0.6 and 0.6 share nothing.
    And of cells larger than 1/(q+1) at most c = q * bins run at once: of the c * k + 1 longest, one after another run
    at least k + 1, the shortest of them at best.
    """
    cells = list(zip(sizes, times, strict=True))
    for least in {size for size in sizes if 2 * size <= capacity} | {1}:
        work = ((1.0 if size > capacity - least else size / capacity if size >= least else 0.0, t) for size, t in cells)
        yield sum(part * time for part, time in work) / bins
    for q in range(1, 9):
        parts = (
            (size / capacity if (q + 1) * size % capacity == 0 else (q + 1) * size // capacity / q) for size in sizes
        )
        yield sum(part * time for part, time in zip(parts, times, strict=True)) / bins
        longest = sorted((time for size, time in cells if size * (q + 1) > capacity), reverse=True)
        for k in range(1, (len(longest) - 1) // (q * bins) + 1):
            yield sum(longest[q * bins * k - k : q * bins * k + 1])


class Policy(ABC):
    """What runs where."""

    def __init__(self, cells: Sequence[Cell], devices: int, cores: int) -> None:
        self.cells = cells
        self.free = {str(device): WHOLE for device in range(devices)}
        self.left = cores
        self.waiting = list(range(len(cells)))

    @abstractmethod
    def start(self, now: float) -> list[tuple[int, str]]:
        """Start what is to start now: the cells, each with its device."""

    def take(self, index: int, device: str) -> tuple[int, str]:
        self.free[device] -= self.cells[index].share
        self.left -= self.cells[index].cores
        return index, device

    def end(self, index: int, device: str) -> None:
        self.free[device] += self.cells[index].share
        self.left += self.cells[index].cores


class Sweepack(Policy):
    """The queue that scheduler, packs and forecast share."""

    def __init__(self, cells: Sequence[Cell], devices: int, cores: int) -> None:
        super().__init__(cells, devices, cores)
        asks = [Ask(c.share, {"cores": c.cores}, minutes=c.told, index=index) for index, c in enumerate(cells)]
        self.queue: Queue[int] = Queue()
        for index, ask in enumerate(rehearsed(asks, list(self.free), {"cores": cores})):
            self.queue.add(index, ask)

    def start(self, now: float) -> list[tuple[int, str]]:
        left = {"cores": self.left}
        started = [(index, place[0]) for index, place in self.queue.admit(self.free, left, now).started]
        self.left = left["cores"]
        return started


class FirstFit(Policy):
    """In order: the next cell starts on the first device that has room, and nothing passes it."""

    def start(self, now: float) -> list[tuple[int, str]]:
        started = []
        while self.waiting:
            cell = self.cells[self.waiting[0]]
            place = next((device for device, free in self.free.items() if free >= cell.share), None)
            if place is None or cell.cores > self.left:
                break
            started.append(self.take(self.waiting.pop(0), place))
        return started


class RoundRobin(Policy):
    """Device by index; on each as many at once as the largest share allows, in order."""

    def start(self, now: float) -> list[tuple[int, str]]:
        slots = WHOLE // max(cell.share for cell in self.cells)
        keys = list(self.free)
        started = []
        for index in list(self.waiting):
            device = keys[index % len(keys)]
            if self.running[device] < slots and self.cells[index].cores <= self.left:
                self.waiting.remove(index)
                self.running[device] += 1
                started.append(self.take(index, device))
        return started

    def __init__(self, cells: Sequence[Cell], devices: int, cores: int) -> None:
        super().__init__(cells, devices, cores)
        self.running = dict.fromkeys(self.free, 0)

    def take(self, index: int, device: str) -> tuple[int, str]:
        self.left -= self.cells[index].cores
        return index, device

    def end(self, index: int, device: str) -> None:
        self.running[device] -= 1
        self.left += self.cells[index].cores


class Counter(Policy):
    """Snakemake's own way: a job starts when the sum of shares and the cores allow, and then waits for a device."""

    def __init__(self, cells: Sequence[Cell], devices: int, cores: int) -> None:
        super().__init__(cells, devices, cores)
        self.sum = WHOLE * devices
        self.begun: list[int] = []

    def start(self, now: float) -> list[tuple[int, str]]:
        for index in list(self.waiting):
            cell = self.cells[index]
            if cell.share <= self.sum and cell.cores <= self.left:
                self.waiting.remove(index)
                self.begun.append(index)
                self.sum -= cell.share
                self.left -= cell.cores
        started = []
        for index in list(self.begun):
            if place := best_fit(self.free, self.cells[index].share):
                self.begun.remove(index)
                self.free[place[0]] -= self.cells[index].share
                started.append((index, place[0]))
        return started

    def end(self, index: int, device: str) -> None:
        super().end(index, device)
        self.sum += self.cells[index].share


def makespan(policy: Policy) -> float:
    """Minutes until all cells have ended."""
    running: list[tuple[float, int, str]] = []
    now, ended = 0.0, 0
    while ended < len(policy.cells):
        for index, device in policy.start(now * MINUTE):
            heapq.heappush(running, (now + policy.cells[index].minutes, index, device))
        now = running[0][0]
        while running and running[0][0] == now:
            policy.end(*heapq.heappop(running)[1:])
            ended += 1
    return now


POLICIES: dict[str, tuple[type[Policy], str]] = {
    "sweepack": (Sweepack, "exact"),
    "times up to 2x off": (Sweepack, "rough"),
    "times unknown": (Sweepack, "unknown"),
    "first fit": (FirstFit, "unknown"),
    "round robin": (RoundRobin, "unknown"),
    "sum of shares": (Counter, "unknown"),
}


def measure(counts: Sequence[int], seeds: int, policies: Sequence[str] = tuple(POLICIES)) -> list[dict[str, Any]]:
    """Every mix in every order on every count of devices under every policy, one record each."""
    records = []
    for devices, seed in itertools.product(counts, range(seeds)):
        rng = random.Random(f"{devices} {seed}")
        cores = CORES_PER_DEVICE * devices
        for mix, written in mixes(rng, devices).items():
            for order, cells in orders(rng, written).items():
                told = {
                    "exact": [replace(cell, told=cell.minutes) for cell in cells],
                    "rough": [replace(cell, told=cell.minutes * rng.uniform(1, 2)) for cell in cells],
                    "unknown": cells,
                }
                case = {"mix": mix, "order": order, "devices": devices, "seed": seed, "cells": len(cells)}
                case["bound"] = lower_bound(cells, devices, cores)
                for name in policies:
                    kind, knowledge = POLICIES[name]
                    minutes = makespan(kind(told[knowledge], devices, cores))
                    records.append({**case, "policy": name, "minutes": minutes})
    return records


def ratios(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """The makespans over their bounds, by mix and policy."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        found[str(record["mix"])][str(record["policy"])].append(round(record["minutes"] / record["bound"], 4))
    return found


def table(records: Sequence[dict[str, Any]]) -> str:
    """Mean and worst ratio to the bound, a line for each mix, a column for each policy."""
    by_mix = ratios(records)
    policies = list(next(iter(by_mix.values())))
    lines = [f"{'mean / worst over the bound':32}" + "".join(f"{name:>20}" for name in policies)]
    for mix, found in by_mix.items():
        cells = (f"{statistics.mean(found[name]):.3f} / {max(found[name]):.3f}" for name in policies)
        lines.append(f"{mix:32}" + "".join(f"{cell:>20}" for cell in cells))
    means = {name: statistics.mean(statistics.mean(found[name]) for found in by_mix.values()) for name in policies}
    worst = {name: max(max(found[name]) for found in by_mix.values()) for name in policies}
    return "\n".join(
        [*lines, f"{'all mixes':32}" + "".join(f"{f'{means[n]:.3f} / {worst[n]:.3f}':>20}" for n in policies)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8], help="counts of devices")
    parser.add_argument("--seeds", type=int, default=1, help="how many random mixes of each kind")
    parser.add_argument("--into", type=Path, help="a raw file that run.py wrote, to add to (`latest`: the newest)")
    options = parser.parse_args()
    records = measure(options.devices, options.seeds)
    print(table(records))
    if options.into:
        latest = max((Path(__file__).parent / "raw").glob("*.json"), default=options.into)
        target = latest if options.into == Path("latest") else options.into
        raw = json.loads(target.read_text())
        raw["packing"] = {"devices": options.devices, "seeds": options.seeds, "ratios": ratios(records)}
        write_atomic(target, json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
