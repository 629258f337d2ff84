"""What the plan says about sizes: what was measured, what is missing, what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sweepack.errors import UserError, Verbatim
from sweepack.leases import WHOLE
from sweepack.plan import Plan
from sweepack.sizing.pins import read_pins
from sweepack.sizing.sizes import ALL, Group
from sweepack.sizing.words import amount, found

_SHOWN = 8


def describe_sizes(plan: Plan, estimates: Mapping[str, str]) -> list[str]:
    """A text for each memory profile of the cells that will run; ``estimates`` are those of the unmeasured, by key."""
    groups = [group for group in plan.sizes.groups if group.to_run]
    lines = [f"{_cells(group)}: {_found(group, estimates)}" for group in groups[:_SHOWN]]
    if len(groups) > _SHOWN:
        lines.append(f"and {len(groups) - _SHOWN} more: `sweepack size` shows all")
    if plan.probes and plan.config.sizing.unpinned == "probe":
        lines.append("these are measured first; the same command then makes a new plan and runs the cells")
    return lines


def _found(group: Group, estimates: Mapping[str, str]) -> str:
    if group.missing:
        where = " and ".join(group.missing) if any(group.missing) else "a GPU"
        guess = estimates.get(group.profile.key)
        return f"not measured on {where} yet" + (f"; {guess}" if guess else "")
    pin, fit = group.pin, group.fit
    if group.trouble or pin is None or pin.peak is None:
        return f"{group.trouble}"
    if fit is None:
        return found(pin)
    peak = f"expected peak {amount(pin.peak)} of {amount(pin.total)}"
    if fit.limited_by == "alone":
        return f"a device each: {peak} is more than may be shared (`sizing.alone_above`), on {pin.device}"
    return f"{fit.cells} on a device, limited by its memory: {peak} each, on {pin.device}"


def require_sizes(plan: Plan, asked: bool) -> None:
    """Raise UserError when cells cannot run for want of a measurement, or by what one said.

    ``asked``: to measure is what this run is for.
    """
    if plan.probes:
        if asked or plan.config.sizing.unpinned == "probe":
            return
        groups = plan.sizes.unpinned
        names = ", ".join(group.name for group in groups[:_SHOWN]) + (", …" if len(groups) > _SHOWN else "")
        profile = "profiles/slurm" if plan.slurm else "profiles/local"
        raise UserError(
            _key(plan, groups[0]),
            "auto",
            f"a measurement first, of {len(groups)} kinds of cells ({names})"
            if len(groups) > 1
            else f"a measurement first ({names})",
            f"`snakemake probe --profile {profile}` makes it, then run this again. Or set `sizing: "
            f"{{unpinned: probe}}` to have runs measure by themselves, or a number: `{_number(groups[0])}`",
        )
    for group in plan.sizes.refused:
        if group.profile.share is None:
            fix = "a smaller `batch`, or a larger device"
        else:
            fix = f"a larger share than `gpu: {group.profile.share / WHOLE:g}`, or a smaller model"
        raise UserError(
            _key(plan, group), Verbatim(f"auto ({group.name})"), f"cells that fit: {group.trouble}", f"give {fix}"
        )


def pinned(plan: Plan, root: Path) -> str:
    """What a run that has measured says at its end."""
    pins = read_pins(root / plan.directory)
    lines = ["sweepack: measured"]
    for group in plan.sizes.unpinned:
        for pin in pins.get(group.profile.key, {}).values():
            lines.append(f"  {group.name}: {found(pin)}")
    return "\n".join([*lines, "Run the same command again (without the target `probe`): its plan goes by this."])


def _key(plan: Plan, group: Group) -> str:
    position = next(number for number, entry in enumerate(plan.config.resources) if entry is group.resources)
    return f"resources[{position}].{'gpu' if group.profile.share is None else 'batch'}"


def _number(group: Group) -> str:
    return "gpu: 0.25" if group.profile.share is None else "batch: 64"


def _cells(group: Group) -> str:
    count = f"{len(group.to_run)} cell{'s' * (len(group.to_run) != 1)}"
    return count if group.name == ALL else f"{count} of {group.name}"
