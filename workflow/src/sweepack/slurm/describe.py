"""What the plan says about Slurm: the jobs, what each asks for, and what it costs."""

from __future__ import annotations

import shlex
from collections import Counter

from sweepack.slurm.plan import SlurmPlan

_SHOWN = 8


def describe_jobs(plan: SlurmPlan) -> list[str]:
    """Lines of a label and a text each, for the plan."""
    lines = [f"  jobs     {_jobs(plan)}"]
    flags = Counter(shlex.join(plan.flags(name)) for name in plan.to_submit)
    for number, (text, count) in enumerate(flags.most_common(_SHOWN)):
        lines.append(f"  {'asks' if not number else '':<8} {count} × sbatch {text}")
    if len(flags) > _SHOWN:
        lines.append(f"           and {len(flags) - _SHOWN} other kinds")
    lines += _live(plan)
    if plan.to_submit and not plan.probes:
        lines += _cost(plan)
    return lines


def _jobs(plan: SlurmPlan) -> str:
    if plan.probes:
        return f"{len(plan.probes)} to measure on a GPU" + (" each" if len(plan.probes) > 1 else "")
    names = set(plan.to_submit)
    new = [pack for pack in plan.packs if pack.name in names]
    parts = []
    if new:
        sizes = [len(pack.cells) for pack in new]
        size = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
        gpus = plan.settings.pack.gpus
        on = "a GPU" if gpus == 1 else f"{gpus} GPUs of one node"
        each = f"s of {size} cells, each on" if len(new) > 1 else f" of {size} cell{'s' * (sizes[0] > 1)} on"
        parts.append(f"{len(new)} pack{each} {on}")
    layouts = {name: plan.allocations[name].layout for name in plan.singles if name in names}
    for layout, count in Counter(str(layout) for layout in layouts.values() if layout).items():
        parts.append(f"{count} cell{'s' * (count > 1)} on {layout}")
    single = [name for name, layout in layouts.items() if not layout]
    if single:
        what = "shards of a GPU" if plan.settings.mode == "shard" else "a whole GPU"
        parts.append(f"{len(single)} cell{'s' * (len(single) > 1)} with a job and {what} each")
    return ", ".join(parts) or "none to submit"


def _live(plan: SlurmPlan) -> list[str]:
    if not plan.live:
        return []
    ids = ", ".join(job.id for job in list(plan.live.values())[:_SHOWN])
    more = f" and {len(plan.live) - _SHOWN} more" if len(plan.live) > _SHOWN else ""
    what = "cancelled first" if plan.settings.live == "cancel" else "adopted"
    return [f"  queue    Slurm has jobs of an earlier run: {ids}{more}: {what} (`slurm.live: {plan.settings.live}`)"]


def _cost(plan: SlurmPlan) -> list[str]:
    expected, alone = _hours(plan.expected), _hours(plan.alone)
    basis = "by `runtime` or by finished cells"
    if plan.guessed:
        basis = "if a cell takes 10 min, which is a guess: give `runtime`"
    lines = [f"  cost     {expected} GPU-hours expected, {basis}; {alone} at one cell a GPU"]
    if plan.settings.mode != "shard":
        asked = sum(plan.allocations[name].gpus * plan.allocations[name].minutes for name in plan.to_submit)
        lines.append(f"           {_hours(asked)} GPU-hours asked for, by the time limits of the jobs")
    return lines


def _hours(minutes: float) -> str:
    hours = minutes / 60
    if hours >= 100:
        return f"{hours:,.0f}"
    return f"{hours:.3g}" if hours >= 0.01 else "under 0.01"
