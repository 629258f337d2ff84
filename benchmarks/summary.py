"""What the raw file comes to: medians, ratios and the targets. Nothing is measured here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Raw = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One runner on one workload. ``wall`` and ``cpu`` are medians in seconds, ``rate`` is in cells a second, ``ratio``
    is the wall over the bound's of the same raw file, ``added`` the CPU milliseconds that a cell costs beyond the
    bound's, ``agrees`` says whether all its losses equal the bound's bit for bit.
    """

    runner: str
    wall: float
    cpu: float
    rate: float
    ratio: float
    added: float
    runs: int
    agrees: bool


@dataclass(frozen=True)
class Target:
    """``value`` is what was measured; it should be ``sign`` (`≤` or `≥`) ``limit``. None: not measured."""

    text: str
    sign: str
    limit: float
    value: float | None
    unit: str = " ×"

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value <= self.limit if self.sign == "≤" else self.value >= self.limit


def workloads(raw: Raw) -> list[tuple[str, int]]:
    """Kind and number of cells of every workload, in the order they were run."""
    return list(dict.fromkeys((run["kind"], run["cells"]) for run in raw["runs"]))


def rows(raw: Raw, kind: str, cells: int) -> list[Row]:
    """The runners that did this workload without an error, fastest first."""
    done: dict[str, list[dict[str, Any]]] = {}
    for run in raw["runs"]:
        if (run["kind"], run["cells"]) == (kind, cells) and not run["error"]:
            done.setdefault(run["runner"], []).append(run)

    def median(runner: str, key: str) -> float:
        return statistics.median(run[key] for run in done[runner])

    if "bound" not in done:
        return []
    found = [
        Row(
            runner,
            wall=median(runner, "wall"),
            cpu=median(runner, "cpu"),
            rate=cells / median(runner, "wall"),
            ratio=median(runner, "wall") / median("bound", "wall"),
            added=1000 * (median(runner, "cpu") - median("bound", "cpu")) / cells,
            runs=len(runs),
            agrees=all(run["difference"] == 0 for run in runs),
        )
        for runner, runs in done.items()
    ]
    return sorted(found, key=lambda row: row.wall)


def troubles(raw: Raw) -> Iterator[tuple[str, str]]:
    """Runners that could not run, runs that failed, losses that differ: the runner and what was wrong."""
    for name, runner in raw["runners"].items():
        if runner["error"]:
            yield name, _brief(runner["error"])
    for run in raw["runs"]:
        if run["error"]:
            yield run["runner"], f"{run['cells']} {run['kind']} cells: {_brief(run['error'])}"
        elif run["difference"] != 0:
            yield (
                run["runner"],
                f"{run['cells']} {run['kind']} cells: losses differ from the bound's ({run['difference']})",
            )


def _brief(error: str) -> str:
    first, *log = error.splitlines()
    return f"{first} ({log[-1].strip()})" if log else first


def targets(raw: Raw) -> list[Target]:
    """The project's targets for speed, with what this raw file says of each."""
    tiny = [cells for kind, cells in workloads(raw) if kind == "tiny"]
    many = max(tiny, default=0)
    found = [
        Target(f"{many} tiny cells in packs: wall over the bound", "≤", 1.3, _ratio(raw, many, "sweepack_packs")),
        Target(f"{many} tiny cells, a job a cell: wall over the bound", "≤", 1.6, _ratio(raw, many, "sweepack")),
        Target(f"{many} tiny cells in packs: added CPU per cell", "≤", 60, _added(raw, many, "sweepack_packs"), " ms"),
        Target(f"{many} tiny cells, a job a cell: added CPU per cell", "≤", 60, _added(raw, many, "sweepack"), " ms"),
        Target(
            "cells a second in packs, over the best peer that starts a process a cell",
            "≥",
            10,
            _over_fresh(raw, many, "sweepack_packs"),
        ),
        Target("cells a second with a job a cell, over the same peer", "≥", 10, _over_fresh(raw, many, "sweepack")),
    ]
    for kind, cells in workloads(raw):
        limit, peers = (1.0, "the best peer that reuses workers") if kind == "tiny" else (1.05, "the best of all")
        for mode, words in (("sweepack_packs", "in packs"), ("sweepack", "a job a cell")):
            value = _over_reused(raw, kind, cells, mode)
            found.append(Target(f"{cells} {kind} cells, {words}: wall over {peers}", "≤", limit, value))
    return found + plan_targets(raw.get("plan", [])) + packing_targets(raw)


def plan_targets(entries: list[dict[str, Any]]) -> list[Target]:
    """The targets for the cost of a plan, from the entries that `plan.py` has added."""
    wall = {(entry["case"], entry["cells"]): entry["wall"] for entry in entries if not entry["error"]}

    def over(case: str, cells: int) -> float | None:
        ours, bare = wall.get((case, cells)), wall.get(("bare", cells))
        return ours / bare if ours and bare else None

    return [
        Target("`snakemake -n`, 10,000 cells, a job a cell: wall over bare rules", "≤", 1.2, over("jobs", 10_000)),
        Target("`snakemake -n`, 100,000 cells in packs: wall over bare rules", "≤", 0.125, over("packs", 100_000)),
    ]


def packing_targets(raw: Raw) -> list[Target]:
    """The targets for leases and for the quality of packing."""
    leases = [entry["median"] for entry in raw.get("leases", [])]
    table = packing(raw)
    means = worst = None
    if table and "sweepack" in table["policies"]:
        column = table["policies"].index("sweepack")
        means, worst = table["rows"][-1][1][column]
    return [
        Target("a lease, beside up to 128 others", "≤", 5, max(leases, default=None), " ms"),
        Target("makespan over the lower bound, run times known: mean of all mixes", "≤", 1.05, means),
        Target("makespan over the lower bound, run times known: worst", "≤", 1.25, worst),
    ]


def packing(raw: Raw) -> dict[str, Any]:
    """Policies, and for each mix, and then for all of them, mean and worst ratio under each; empty if not measured."""
    by_mix: dict[str, dict[str, list[float]]] = raw.get("packing", {}).get("ratios", {})
    if not by_mix:
        return {}
    policies = list(next(iter(by_mix.values())))
    rows = [
        (mix, [(statistics.mean(found[policy]), max(found[policy])) for policy in policies])
        for mix, found in by_mix.items()
    ]
    overall = [
        (statistics.mean(cells[column][0] for _, cells in rows), max(cells[column][1] for _, cells in rows))
        for column in range(len(policies))
    ]
    return {"policies": policies, "rows": [*rows, ("**all mixes**", overall)]}


def _find(raw: Raw, kind: str, cells: int, runner: str) -> Row | None:
    return next((row for row in rows(raw, kind, cells) if row.runner == runner), None)


def _ratio(raw: Raw, cells: int, runner: str) -> float | None:
    row = _find(raw, "tiny", cells, runner)
    return row.ratio if row else None


def _added(raw: Raw, cells: int, runner: str) -> float | None:
    row = _find(raw, "tiny", cells, runner)
    return row.added if row else None


def _peers(raw: Raw, keep: Callable[[dict[str, Any]], bool]) -> set[str]:
    about = raw["runners"].items()
    return {name for name, runner in about if name != "bound" and not runner["ours"] and keep(runner)}


def _over_fresh(raw: Raw, cells: int, runner: str) -> float | None:
    """Against the best rate that any of them reached on any number of tiny cells."""
    ours = _find(raw, "tiny", cells, runner)
    peers = _peers(raw, lambda peer: peer["fresh"])
    sizes = [size for kind, size in workloads(raw) if kind == "tiny"]
    rates = [row.rate for size in sizes for row in rows(raw, "tiny", size) if row.runner in peers]
    return ours.rate / max(rates) if ours and rates else None


def _over_reused(raw: Raw, kind: str, cells: int, runner: str) -> float | None:
    """Against the best peer that reuses workers; for longer cells against all, the bound included."""
    ours = _find(raw, kind, cells, runner)
    peers = _peers(raw, lambda peer: not peer["fresh"]) if kind == "tiny" else {*raw["runners"]} - {runner}
    walls = [row.wall for row in rows(raw, kind, cells) if row.runner in peers]
    return ours.wall / min(walls) if ours and walls else None
