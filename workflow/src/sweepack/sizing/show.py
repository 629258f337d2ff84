"""What ``sweepack size`` shows: the pins of a sweep, or what can be said without measuring."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import humanfriendly
from rich import box
from rich.table import Table
from rich.text import Text

from sweepack.devices import load_nvml, visible_pool
from sweepack.errors import UserError
from sweepack.leases import WHOLE
from sweepack.manifest import Manifest
from sweepack.memory import MB, cap
from sweepack.plan import DEFAULT_CONFIG, Plan, make_plan
from sweepack.sizing.jobs import request_of
from sweepack.sizing.measuring import AUTO, Estimate, Meters, estimate, place_of
from sweepack.sizing.pins import SEED, Pin, Profile, read_pins
from sweepack.sizing.rule import rule_of_thumb, share_for, whole
from sweepack.sizing.sizes import ALL, Group, profile_of
from sweepack.sizing.words import amount, findings, straight_line
from sweepack.sweep import Cell, slug

LONG = ("found", "estimate", "says", "on")


@dataclass(frozen=True)
class Card:
    """A device that is reckoned with: its memory in bytes, its ``name``, and how many cells are to share it (None: as
    the configuration says)."""

    name: str
    total: int
    cells: int | None = None
    is_gpu: bool = True


def plan_of(sweep: Path | None, config_files: Sequence[Path], overrides: Sequence[str], root: Path) -> Plan:
    """The plan of what is configured, or of what the last run of the ``sweep`` in that folder was. Raises UserError."""
    if sweep:
        config_files, overrides = _configuration(Manifest.read(sweep).configuration)
    return make_plan(root, root, config_files, overrides)


def has_configuration(root: Path) -> bool:
    return (root / DEFAULT_CONFIG).exists()


def card(memory: str | None, cells: int | None) -> Card:
    """A GPU with ``memory`` (``48GiB``), or else the first visible device, that so many ``cells`` share.

    Raises UserError for what is no amount of memory, and when the devices are unclear.
    """
    if memory is None:
        place = place_of(visible_pool(os.environ, load_nvml())[0], os.environ)
        return Card(place.device.label, place.total, cells, place.on_gpu)
    try:
        size = humanfriendly.parse_size(memory) if memory.strip()[-1:].isalpha() else 0
    except humanfriendly.InvalidSize:
        size = 0
    if size < MB:
        raise UserError("--gpu-memory", memory, "an amount of memory with its unit", "for example `--gpu-memory 48GiB`")
    return Card("a GPU", size, cells)


def about_estimates(plan: Plan, root: Path, card: Card) -> str:
    """What the table of estimates is about, and is not."""
    on = f"On {card.name} with {amount(card.total)}" + (f", {card.cells} cells on it" if card.cells else "")
    prepared = not plan.task.has_prepare or (root / plan.directory / "prepare.done").exists()
    unprepared = (
        "" if prepared else "\nThe task's prepare() has not run yet; `snakemake probe`, as any run, does it first."
    )
    other = "" if card.is_gpu else " Of a GPU: `--gpu-memory 48GiB`."
    return (
        f"{on}.{other}\nEstimates count tensors, not the libraries' workspaces nor what the allocator keeps: a first "
        f"guess, which nothing is run on. `snakemake probe` measures.{unprepared}"
    )


def pins_table(plan: Plan, root: Path) -> Table:
    """A row for each profile and model of device that was measured, and for each profile that was not."""
    pins = read_pins(root / plan.directory)
    table = _table("kind", "cells", "share", "batch", "found", "on", "when", numbers=("cells",))
    for group in plan.sizes.groups:
        name, count = group.name, str(len(group.cells))
        known = pins.get(group.profile.key, {})
        for pin in known.values():
            fits = "the task's" if pin.batch is None else str(pin.batch)
            batch = "none" if pin.trouble else fits
            when = time.strftime("%Y-%m-%d", time.localtime(pin.at)) if pin.at else ""
            table.add_row(*map(Text, [name, count, _share(group, pin), batch, findings(pin), pin.device, when]))
        if not known:
            table.add_row(*map(Text, [name, count, _share(group, None), "", "not measured"]))
    return table


def estimates_table(plan: Plan, root: Path, card: Card, meters: Meters, told: Callable[[str], object]) -> Table:
    """A row for each kind of cell: what it is estimated to take, and what that makes of ``card``.

    ``told`` is told of each before its turn comes: it takes some seconds. Raises UserError for a task that cannot be
    imported.
    """
    table = _table("kind", "cells", "share", "estimate", "for a cell", "says", numbers=("cells", "for a cell"))
    for group in _kinds(plan):
        told(f"estimating {group.name}")
        found = estimated(plan, group, root, meters)
        row = [group.name, str(len(group.cells)), _share(group, None), takes(found), *verdict(plan, group, found, card)]
        table.add_row(*map(Text, row))
    return table


def takes(found: Estimate) -> str:
    """What an estimate comes to: ``4.32 GiB + 40 MiB a sample``, or ``3 GiB at batch 64``; empty for none."""
    if found.line:
        return straight_line(*found.line)
    return ", ".join(
        amount(peak) + ("" if batch is None else f" at batch {batch}") for batch, peak in found.peaks.items()
    )


def estimated(plan: Plan, group: Group, root: Path, meters: Meters) -> Estimate:
    """What the cells of ``group`` would take, without a GPU."""
    request = request_of([group], plan.config, plan.task, root)
    with meters.open(request, request.profiles[0], None, root, Path(tempfile.gettempdir())) as meter:
        return estimate(meter, group.profile.batch)


def verdict(plan: Plan, group: Group, found: Estimate, card: Card) -> tuple[str, str]:
    """The memory that a cell may fill on ``card``, and what that makes of the estimate, in words."""
    if found.reason is not None:
        return "", f"no estimate: {found.reason.splitlines()[0]}"
    profile, sizing, memory = group.profile, plan.config.sizing, plan.config.memory
    reserve, overhead = memory.reserve * MB, memory.overhead * MB if card.is_gpu else 0
    cells = card.cells or WHOLE // (profile.share or WHOLE)
    if (line := found.line) is not None:
        rule = rule_of_thumb(card.total, cells, *line, fill=sizing.guess, start=sizing.start)
        if rule.largest is None or rule.start is None:
            return amount(rule.available), f"{rule.reason}"
        if rule.largest > sizing.largest_batch:
            start = max(1, whole(sizing.start * sizing.largest_batch))
            return amount(rule.available), f"first guess: {sizing.largest_batch} and more fit, start with {start}"
        return amount(rule.available), f"first guess: {rule.largest} fit, start with {rule.start}"
    (peak,) = found.peaks.values()
    if profile.share is None and card.cells is None:
        share = share_for(peak, card.total, reserve, overhead, sizing.margin, sizing.alone_above)
        if share.trouble or share.share is None:
            return "", share.trouble or ""
        return amount(card.total / share.cells), f"{share.cells} on a device (share {share.share / WHOLE:g})"
    try:
        room = cap(WHOLE // cells, card.total, reserve, overhead)
    except ValueError as error:
        return "", f"does not fit: {error}"
    return amount(room), "fits" if peak <= room else "does not fit"


def _kinds(plan: Plan) -> list[Group]:
    """The cells whose size is left open; where none is, all that have a device or a share of one."""
    if plan.sizes.groups:
        return plan.sizes.groups
    members: dict[str, list[Cell]] = {}
    profiles: dict[str, Profile] = {}
    for cell in plan.cells:
        if cell.id not in plan.layouts:
            profile = profile_of(plan.config, plan.task.reference, cell)
            profiles[profile.key] = profile
            members.setdefault(profile.key, []).append(cell)
    matters = [name for name in plan.expansion.varying if name not in {SEED, *plan.config.sizing.ignore}]
    return [
        Group(
            slug(cells[0].params, matters) if matters else ALL,
            profiles[key],
            cells[0].resources,
            tuple(cells),
            tuple(cells),
            {},
            (),
        )
        for key, cells in members.items()
    ]


def _configuration(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files and overrides among the arguments of snakemake that chose a configuration."""
    given: dict[str, list[str]] = {}
    option = ""
    for word in arguments:
        if word in ("--snakefile", "--configfile", "--config"):
            option = word
        else:
            given.setdefault(option, []).append(word)
    return [Path(name) for name in given.get("--configfile", [])], given.get("--config", [])


def _share(group: Group, pin: Pin | None) -> str:
    if group.profile.share is not None:
        return f"{group.profile.share / WHOLE:g}"
    if pin and group.pin == pin and group.fit and group.fit.share:
        return f"{group.fit.share / WHOLE:g} ({group.fit.cells} on a device)"
    return AUTO


def _table(*columns: str, numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        table.add_column(
            Text(name), justify="right" if name in numbers else "left", no_wrap=name not in LONG, overflow="fold"
        )
    return table
