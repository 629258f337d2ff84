"""What the plan says of cells that were not measured yet: estimates without a GPU, each made once and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from sweepack.files import write_atomic
from sweepack.memory import MB
from sweepack.plan import Plan
from sweepack.sizing.measuring import Estimate, Meters
from sweepack.sizing.show import card, estimated, takes, verdict
from sweepack.sizing.sizes import Group

FOLDER = Path(".sweepack/estimates")
# Each takes some seconds the first time: `sweepack size --estimate` makes them all.
_MOST = 3


def preview(plan: Plan, root: Path) -> dict[str, str]:
    """Texts about the first few memory profiles that must be measured, by key. Raises UserError as a probe would."""
    with Meters() as meters:
        return {
            group.profile.key: _text(plan, group, _kept(plan, group, root, meters))
            for group in plan.sizes.unpinned[:_MOST]
        }


def _text(plan: Plan, group: Group, found: Estimate) -> str:
    if found.reason is not None:
        return f"no estimate: {found.reason.splitlines()[0]}"
    text = f"estimate {takes(found)}"
    if plan.slurm:
        return text
    here = card(None, None)
    if not here.is_gpu and group.profile.mem_mb:
        here = replace(here, total=group.profile.mem_mb * MB, cells=1)
    _, words = verdict(plan, group, found, here)
    return f"{text}; {words}" if words else text


def _kept(plan: Plan, group: Group, root: Path, meters: Meters) -> Estimate:
    """The estimate that an earlier plan has made for the same code, or one that is made now and kept."""
    path = root / FOLDER / f"{group.profile.key}-{plan.task.digest()}.json"
    try:
        peaks = {int(batch) if batch else None: int(peak) for batch, peak in json.loads(path.read_bytes()).items()}
        return Estimate(peaks)
    except (OSError, ValueError, AttributeError, TypeError):
        found = estimated(plan, group, root, meters)
    if found.peaks:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({batch or "": peak for batch, peak in found.peaks.items()}), durable=False)
    return found
