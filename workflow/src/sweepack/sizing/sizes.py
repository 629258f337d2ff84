"""Which share and batch each cell gets where the configuration leaves them open, and what has to be measured first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sweepack.config import Config, Resources
from sweepack.devices import load_nvml, visible_pool
from sweepack.errors import UserError
from sweepack.leases import WHOLE
from sweepack.records import Assessment, State
from sweepack.sizing.pins import FOLDER, SEED, Pin, Profile, read_pins, relevant
from sweepack.sizing.rule import Share, share_for
from sweepack.sweep import Cell, slug

# In these states a cell may have saved what it did with its batch, and goes on from there.
_BEGUN = (State.INTERRUPTED, State.LOST, State.RUNNING)
# Memory outside of what is measured: on a CPU nothing is.
_NOT_GPU = ("cpu", "sim")
# The name of a group where the sweep has no other.
ALL = "all cells"


@dataclass(frozen=True)
class Group:
    """The ``cells`` of one profile, those that will run (``to_run``), and the ``pins`` that count, by device model.

    ``missing`` are the models of devices at hand on which nothing was measured, ``""`` standing for one that the plan
    does not see. ``pin`` is the one that decides, and ``fit`` how many cells a device holds by it, where that is to be
    found (None before).
    """

    name: str
    profile: Profile
    resources: Resources
    cells: tuple[Cell, ...]
    to_run: tuple[Cell, ...]
    pins: Mapping[str, Pin]
    missing: tuple[str, ...]
    pin: Pin | None = None
    fit: Share | None = None

    @property
    def trouble(self) -> str | None:
        """Why the cells cannot run on a device on which they were measured."""
        found = next((pin for pin in self.pins.values() if pin.trouble), None)
        if found:
            return f"{found.trouble} (measured on {found.device})"
        return self.fit.trouble if self.fit else None


@dataclass(frozen=True)
class Sizes:
    """The cells whose share or batch is left open: ``shares`` in thousandths and ``batches`` by cell, as far as known.

    ``remarks`` are for the plan.
    """

    groups: list[Group] = field(default_factory=list)
    shares: Mapping[str, int] = field(default_factory=dict)
    batches: Mapping[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def unpinned(self) -> list[Group]:
        """What must be measured before its cells can run."""
        return [group for group in self.groups if group.to_run and group.missing]

    @property
    def refused(self) -> list[Group]:
        """What was measured, and does not fit."""
        return [group for group in self.groups if group.to_run and not group.missing and group.trouble]


def kept_batch(found: Assessment) -> int | None:
    """The batch with which a cell began that goes on where it was interrupted; None for all others."""
    return found.record.batch if found.record and found.state in _BEGUN else None


def batch_of(sizes: Sizes, found: Assessment, cell: Cell) -> int | None:
    """What ``cell.batch`` is to be of a cell that stands as ``found``: one that goes on keeps what it began with."""
    return kept_batch(found) or asked_batch(sizes, cell)


def asked_batch(sizes: Sizes, cell: Cell) -> int | None:
    """The batch by the configuration and its pins; None where it says nothing, or nothing was measured yet."""
    return sizes.batches.get(cell.id) if cell.resources.batch == "auto" else cell.resources.batch


def is_open(resources: Resources) -> bool:
    """Whether the share or the batch of a cell is to be found by measuring."""
    return "auto" in (resources.gpu, resources.batch)


def find_sizes(
    config: Config,
    task: str,
    code: str,
    cells: Sequence[Cell],
    varying: Sequence[str],
    states: Mapping[str, Assessment],
    sweep: Path,
    on_slurm: bool,
) -> Sizes:
    """The sizes of the ``cells``, by the pins in the folder ``sweep``; nothing is measured here.

    ``task`` is its reference, ``code`` the digest of its file, ``varying`` the parameters that vary. Raises UserError
    where what is left open cannot be measured, and when the visible devices cannot be told.
    """
    for position, entry in enumerate(config.resources):
        _check_open(config, f"resources[{position}]", entry)
    sought = [cell for cell in cells if is_open(cell.resources)]
    if not sought:
        return Sizes()
    pins = read_pins(sweep)
    at_hand = None if on_slurm else _models(config)
    matters = [name for name in varying if name not in {SEED, *config.sizing.ignore}]
    profiles: dict[str, Profile] = {}
    members: dict[str, list[Cell]] = {}
    for cell in sought:
        profile = profile_of(config, task, cell)
        profiles[profile.key] = profile
        members.setdefault(profile.key, []).append(cell)
    groups = [
        _group(config, profile, members[key], matters, states, pins.get(key, {}), at_hand, code)
        for key, profile in profiles.items()
    ]
    shares, batches, remarks = {}, {}, []
    for group in groups:
        for cell in group.cells:
            if group.fit and group.fit.share:
                shares[cell.id] = group.fit.share
            if group.profile.batch != "auto":
                continue
            if group.pin and group.pin.batch:
                batches[cell.id] = group.pin.batch
        if group.pin and group.to_run and group.pin.code != code:
            place = os.path.relpath(sweep / FOLDER)
            remarks.append(f"{group.name}: measured before the task's file was changed; to do it anew, remove {place}")
    return Sizes(groups, shares, batches, remarks)


def _check_open(config: Config, key: str, entry: Resources) -> None:
    """Raise UserError where what ``entry`` leaves open cannot be measured."""
    name, value = ("gpu", entry.gpu) if entry.gpu == "auto" else ("batch", entry.batch)
    if value != "auto":
        return
    if entry.gpu == entry.batch:
        raise UserError(
            f"{key}.gpu",
            "auto",
            "a share where the batch is `auto`: the share says how much memory the batch may fill",
            "give a share (`gpu: 0.25`) and leave `batch: auto`, or `gpu: auto` and a batch (`batch: 64`)",
        )
    if not isinstance(config.sweep.task, str):
        raise UserError(
            f"{key}.{name}",
            "auto",
            "a number: what a program allocates cannot be measured step by step",
            "write for example `gpu: 0.25`" if name == "gpu" else "write for example `batch: 64`",
        )
    if entry.gpus_per_node:
        raise UserError(
            f"{key}.{name}",
            "auto",
            "a number beside `nodes` or `gpus_per_node`: one device is measured, not several",
            "remove it: such a cell has its devices to itself" if name == "gpu" else "write for example `batch: 256`",
        )
    if name == "gpu" and config.jobs_per_gpu:
        raise UserError(
            f"{key}.gpu", "auto", "nothing beside `jobs_per_gpu`, which sets the shares", "remove one of the two"
        )


def profile_of(config: Config, task: str, cell: Cell) -> Profile:
    """What decides how much memory ``cell`` takes."""
    resources = cell.resources
    share = None if resources.gpu == "auto" else resources.gpu
    if config.jobs_per_gpu:
        share = WHOLE // config.jobs_per_gpu
    settings = config.memory.model_dump()
    params = relevant(cell.params, config.sizing.ignore)
    return Profile(task, params, share, resources.batch, resources.cpus, resources.mem or 0, settings)


def _group(
    config: Config,
    profile: Profile,
    cells: Sequence[Cell],
    matters: Sequence[str],
    states: Mapping[str, Assessment],
    pins: Mapping[str, Pin],
    at_hand: Sequence[str] | None,
    code: str,
) -> Group:
    usable = {model: pin for model, pin in pins.items() if pin.counts(code)}
    if at_hand is None:
        chosen = config.sizing.device
        at_hand = [chosen] if chosen else list(usable) or [""]
    counting = {model: usable[model] for model in at_hand if model in usable}
    missing = tuple(model for model in at_hand if model not in usable)
    to_run = tuple(cell for cell in cells if states[cell.id].state is not State.FINISHED)
    name = slug(cells[0].params, [*matters]) if matters else ALL
    fits = {}
    if profile.share is None:
        fits = {model: _fit(config, pin) for model, pin in counting.items() if not pin.trouble}

    def least(model: str) -> tuple[int, int]:
        return (counting[model].batch or 0, fits[model].cells if model in fits else 0)

    decides = min(counting, key=least, default=None)
    pin = counting[decides] if decides is not None else None
    fit = fits.get(decides) if decides is not None else None
    return Group(name, profile, cells[0].resources, tuple(cells), to_run, counting, missing, pin, fit)


def _fit(config: Config, pin: Pin) -> Share:
    settings = config.memory
    overhead = 0 if pin.device in _NOT_GPU else settings.overhead * 10**6
    return share_for(
        pin.peak or 0,
        pin.total,
        reserve=settings.reserve * 10**6,
        overhead=overhead,
        margin=config.sizing.margin,
        alone_above=config.sizing.alone_above,
    )


def _models(config: Config) -> list[str]:
    """The models of the devices that this machine's cells may use."""
    pool = visible_pool(os.environ, load_nvml())[: config.devices]
    return list(dict.fromkeys(device.model or device.kind for device in pool))
