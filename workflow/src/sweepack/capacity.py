"""Whether the shares of a plan hold a cell on the devices that it may use, and what the environment asks of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sweepack import allocator
from sweepack.config import Config
from sweepack.devices import Device
from sweepack.errors import UserError, Verbatim
from sweepack.leases import WHOLE
from sweepack.memory import GIB, MB, least_share
from sweepack.sweep import Cell


def check_memory(
    config: Config,
    cells: Sequence[Cell],
    share: Callable[[Cell], int],
    devices: Sequence[Device],
    environ: Mapping[str, str],
) -> None:
    """Raise UserError when a share of one of ``cells`` leaves torch nothing on one of ``devices``.

    Also when the reserve is larger than a device, and when ``environ`` has options that torch's allocator would not
    take. A MIG instance is a device with a memory of its own. What no driver tells the size of passes.
    """
    allocator.check(environ, config.memory.model_dump())
    # Entries of `resources` are few, cells may be many.
    smallest: dict[int, tuple[int, Cell]] = {}
    for cell in cells:
        known = smallest.get(id(cell.resources))
        if known is None or share(cell) < known[0]:
            smallest[id(cell.resources)] = share(cell), cell
    for device in devices:
        if device.memory is not None:
            _check(config, list(smallest.values()), device, device.memory)


def _check(config: Config, smallest: Sequence[tuple[int, Cell]], device: Device, total: int) -> None:
    reserve, overhead = config.memory.reserve * MB, config.memory.overhead * MB
    what = f"{device.label} ({total / GIB:.1f} GiB)"
    if reserve >= total:
        raise UserError(
            "memory.reserve",
            Verbatim(f"{config.memory.reserve} MB"),
            f"less than what {what} has",
            "lower it; the driver and a display take a few hundred MB",
        )
    least = least_share(total, reserve, overhead)
    for share, cell in smallest:
        if share >= WHOLE or (least is not None and share >= least):
            continue
        room = (total - reserve) * share // WHOLE // MB
        need = f"{room} MB a cell, of which a process takes {config.memory.overhead} MB before it has a tensor"
        if least is None or least >= WHOLE:
            advice = "set `gpu: 1`: no two such processes fit on it"
            bound = f"a share that holds a process (`memory.overhead`) on {what}"
        elif config.jobs_per_gpu:
            bound = f"at most {WHOLE // least} cells at once on {what}"
            advice = f"set `jobs_per_gpu: {WHOLE // least}` or less"
        else:
            bound = (
                f"a share of at least {least / WHOLE:g} on {what}, of which at most {WHOLE // least} cells fit at once"
            )
            advice = f"set `gpu: {least / WHOLE:g}` or more"
        raise UserError(_key(config, cell), Verbatim(_value(config, share, need)), bound, f"{advice}, or see `memory`")


def _key(config: Config, cell: Cell) -> str:
    if config.jobs_per_gpu:
        return "jobs_per_gpu"
    position = next((n for n, entry in enumerate(config.resources) if entry is cell.resources), None)
    return "resources" if position is None else f"resources[{position}].gpu"


def _value(config: Config, share: int, need: str) -> str:
    return f"{config.jobs_per_gpu or f'{share / WHOLE:g}'}: {need}"
