"""What the plan says, in a few lines for people."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sweepack.devices import Device
from sweepack.forecast import Demand, forecast
from sweepack.leases import WHOLE
from sweepack.memory import cap_by
from sweepack.mps.config import describe as describe_mps
from sweepack.plan import Plan
from sweepack.records import State
from sweepack.sizing.describe import describe_sizes
from sweepack.sizing.sizes import asked_batch
from sweepack.sizing.words import amount
from sweepack.slurm.describe import describe_jobs


def describe(
    plan: Plan, pool: Sequence[Device] = (), cores: int | None = None, estimates: Mapping[str, str] | None = None
) -> str:
    """The plan in a few lines; ``cores`` is what ``--cores`` allows, None standing for what profiles/local takes.

    ``pool`` are the devices of this machine, where the cells run on it. ``estimates`` are texts about memory profiles
    that were not measured, by key.
    """
    lines = [f"sweepack: {plan.config.sweep.name}, task {plan.task.reference}", f"  cells    {_product(plan)}"]
    lines.append(f"           {_standing(plan)}")
    if not plan.slurm:
        lines.append(f"  devices  {_devices(pool)}")
    if plan.pending and not plan.probes:
        lines += _labelled("shares", _shares(plan, pool))
        lines += [] if plan.slurm else _forecast(plan, pool, cores)
    lines += _labelled("sizes", describe_sizes(plan, estimates or {}))
    if plan.config.mps and plan.pending:
        lines.append(
            f"  mps      {describe_mps(plan.config.mps, sum(plan.share(cell) < WHOLE for cell in plan.pending))}"
        )
    if plan.slurm:
        lines += describe_jobs(plan.slurm)
    elif plan.packs and not plan.probes:
        lines.append(f"  jobs     {_jobs(plan)}")
    lines.append(f"  results  {plan.directory}")
    notes = [*plan.expansion.remarks, *plan.sizes.remarks, *([] if plan.slurm else _threads(plan)), *_troubles(plan)]
    lines += [f"  note     {note}" for note in notes]
    return "\n".join(lines)


def _labelled(label: str, texts: Sequence[str]) -> list[str]:
    return [f"  {'' if number else label:<8} {text}" for number, text in enumerate(texts)]


def _product(plan: Plan) -> str:
    sweep = plan.config.sweep
    factors = " × ".join(f"{count} {name}" for name, count in plan.expansion.factors)
    changes = ["some excluded"] if sweep.exclude else []
    changes += [f"a sample of {sweep.sample.count}"] if sweep.sample else []
    changes += [f"{len(sweep.include)} included"] if sweep.include else []
    if changes:
        return f"{len(plan.cells)} from {factors or 'nothing'} ({', '.join(changes)})"
    return f"{len(plan.cells)} = {factors}" if factors else f"{len(plan.cells)}"


def _standing(plan: Plan) -> str:
    counts = Counter(assessment.state for assessment in plan.states.values())
    text = f"{counts[State.FINISHED]} finished, {len(plan.pending)} to run"
    before = {
        State.FAILED: "failed before",
        State.INTERRUPTED: "interrupted before",
        State.LOST: "killed before",
        State.RUNNING: "still running from an earlier call",
    }
    parts = [f"{counts[state]} {words}" for state, words in before.items() if counts[state]]
    return text + (f" (of these {', '.join(parts)})" if parts else "")


def _devices(pool: Sequence[Device]) -> str:
    shown = ", ".join(device.label for device in pool[:4])
    return f"{len(pool)}: {shown}" + (f" and {len(pool) - 4} more" if len(pool) > 4 else "")


def _shares(plan: Plan, pool: Sequence[Device]) -> list[str]:
    packed = [cell for cell in plan.pending if cell.id not in plan.layouts]
    groups = Counter((plan.share(cell), cell.resources.cpus) for cell in packed)
    wide = Counter((str(plan.layouts[c.id]), c.resources.cpus) for c in plan.pending if c.id in plan.layouts)
    return [
        f"{_many(count, 'cell')} on {layout}, {_many(cpus, 'CPU thread')} a rank"
        for (layout, cpus), count in wide.items()
    ] + [
        f"{_many(count, 'cell')} of {share / WHOLE:g} device{_cap(plan, share, pool)}, {_many(cpus, 'CPU thread')}"
        for (share, cpus), count in sorted(groups.items(), reverse=True)
    ]


def _cap(plan: Plan, share: int, pool: Sequence[Device]) -> str:
    """What a cell with the share may allocate on the smallest of the GPUs; empty where nothing limits it."""
    totals = [device.memory for device in pool if device.kind == "cuda" and device.memory]
    if share >= WHOLE or not totals:
        return ""
    return f" (capped at {amount(cap_by(plan.config.memory.model_dump(), share, min(totals)))})"


def _jobs(plan: Plan) -> str:
    text = _many(len(plan.packs), "pack")
    text += f" of up to {max(len(pack.cells) for pack in plan.packs)} cells side by side"
    setting = plan.config.cells_per_job
    why = "for many small cells; 1: a job a cell" if setting == "auto" else "as asked"
    return f"{text} (`cells_per_job: {setting}`, {why})"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _forecast(plan: Plan, pool: Sequence[Device], cores: int | None) -> list[str]:
    fixed = plan.config.placement == "round_robin"
    demands = [
        Demand(
            plan.share(cell),
            plan.threads(cell),
            cell.resources.runtime,
            cell.index if fixed and cell.id not in plan.layouts else None,
            plan.devices(cell, pool),
        )
        for cell in plan.pending
    ]
    usable = cores or len(os.sched_getaffinity(0))
    # How many the devices would hold does not depend on how long each takes, and is quicker to tell without.
    held = forecast([replace(demand, minutes=None) for demand in demands], len(pool))
    allowed = forecast(demands, len(pool), usable)
    text = f"  at once  up to {allowed.at_once}"
    if allowed.at_once < held.at_once:
        limit = f"--cores {usable} allows" if cores else f"this machine's {usable} cores allow"
        text += f", as {limit} (the devices would hold {held.at_once})"
    if allowed.minutes is None:
        return [text]
    hours, minutes = divmod(allowed.minutes, 60)
    return [text, f"  time     {hours} h {minutes} min, if every cell takes its whole `runtime`"]


def _threads(plan: Plan) -> list[str]:
    widest = max((cell.resources.cpus for cell in plan.pending), default=0)
    cores = os.cpu_count() or 1
    return [f"`cpus: {widest}` pins more threads than the {cores} cores of this machine"] if widest > cores else []


def _troubles(plan: Plan) -> list[str]:
    found = [
        f"cell {cell.id} goes on with batch {plan.batch(cell)}, with which it began, and not with "
        f"{asked_batch(plan.sizes, cell)}: `sweepack rerun {cell.id}` begins anew"
        for cell in plan.pending
        if plan.batch(cell) != asked_batch(plan.sizes, cell)
    ]
    found += [f"cell {cell} runs again: {state.trouble}" for cell, state in plan.states.items() if state.trouble]
    return found[:10] + ([f"and {len(found) - 10} more such cells"] if len(found) > 10 else [])
