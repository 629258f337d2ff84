"""What every launcher does with a cell: read how it is to be started, settle whether it must run, run it on its lease.

Standard library only: a finished cell is handed over in milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sweepack import memory
from sweepack.devices import Device
from sweepack.environment import cell_environment
from sweepack.errors import UserError, Verbatim
from sweepack.files import try_lock
from sweepack.job import Job, Launch
from sweepack.leases import WHOLE, Lease
from sweepack.manifest import cell_files
from sweepack.mps import daemon
from sweepack.mps.control import without_mps
from sweepack.mps.faults import was_struck
from sweepack.oom import grown, retry_share
from sweepack.records import CellFiles, Record, State, archive_attempt, assess, hand_over
from sweepack.supervise import Relay, run_cell, settle


@dataclass(frozen=True)
class Startable:
    """A cell as ``cell.json`` has it."""

    id: str
    slug: str
    files: CellFiles
    launch: Launch
    task: dict[str, Any]

    @property
    def label(self) -> str:
        """The name under which it leases its share."""
        return str(self.files.directory.absolute())

    @property
    def mps(self) -> dict[str, Any] | None:
        """How it uses MPS; None when it does not, as one with a device to itself has nothing from it."""
        return self.launch.mps if self.launch.share < WHOLE else None

    def reach(self, pool: Sequence[Device]) -> list[Device]:
        """The devices that it may use."""
        pool = pool[: self.launch.devices or None]
        alone = self.launch.round_robin and not self.launch.layout
        return [pool[self.launch.index % len(pool)]] if alone else list(pool)


def launcher_options(description: str, what: Literal["cell", "pack"]) -> argparse.ArgumentParser:
    """The options that all launchers have; ``what`` is what this one runs."""
    named = {"cell": "the cell's id, as in cells.tsv", "pack": "the pack's name, as in packs/<name>.json"}
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sweep-dir", type=Path, required=True, help="the sweep's directory, results/<sweep>")
    parser.add_argument(f"--{what}", required=True, help=named[what])
    parser.add_argument("--accept-failure", type=int, default=0, help="1: a failure of the task is a result too")
    return parser


def read_cell(sweep: Path, cell: str) -> Startable:
    """The cell of the sweep in the folder ``sweep``; raises UserError when there is none, or it cannot be read."""
    files = cell_files(sweep, cell)
    try:
        meaning = json.loads(files.meaning.read_bytes())
        return Startable(cell, meaning["slug"], files, Launch(**meaning["launch"]), meaning["task"])
    except FileNotFoundError:
        raise UserError("--cell", cell, f"a cell of {sweep}", "run `snakemake` once, or see its cells.tsv") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            str(files.meaning), "unreadable", "the file that a run writes when it starts", "run `snakemake` again"
        ) from None


def take_lock(cell: Startable) -> int | None:
    """Become the only process that runs the cell; the lock's descriptor, or None while another has it."""
    lock = try_lock(cell.files.lock)
    if lock is not None:
        write_holder(lock)
    return lock


def write_holder(lock: int, cell: int | None = None) -> None:
    """Say in a cell's lock file that this process holds it, and which is the ``cell``'s own process."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "cell": cell}).encode(), 0)


def lock_holder(files: CellFiles) -> str:
    """Who holds the cell's lock, for people."""
    try:
        holder = json.loads(files.lock.read_bytes())
        return f"pid {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError):
        return "holder unknown"


def must_run(cell: Startable) -> bool:
    """Whether the cell, whose lock the caller holds, is still to run; if it has finished, hand its result over."""
    found = assess(cell.files.directory, cell.id)
    refused = found.state is State.FINISHED and cell.launch.rejected > found.rejected
    batch = found.record.batch if found.record else None
    if found.state is State.FINISHED and not refused:
        hand_over(cell.files)
        return False
    if found.trouble or refused:
        _start_over(cell, found.trouble or "its result.json is broken")
    elif batch != cell.launch.batch and cell.files.checkpoints.exists():
        _start_over(cell, f"its batch is {cell.launch.batch or 'its own'}, and was {batch or 'its own'}")
    return True


def _start_over(cell: Startable, reason: str) -> None:
    """Take away what must not be continued from: the state behind a broken result, or that of another batch."""
    archive = archive_attempt(cell.files)
    print(f"cell {cell.id} runs again: {reason}; kept in {archive}", file=sys.stderr)


def share_of(cell: Startable, record: Record | None) -> int:
    """The thousandths of a device that the cell needs, which stands as in ``record``: more where it has run out."""
    return grown(cell.launch.share, cell.launch.batch, record) if cell.launch.retry_oom else cell.launch.share


def with_share(cell: Startable) -> Startable:
    """The cell, to be started with the share that it needs by now (`share_of`)."""
    if not cell.launch.retry_oom:
        return cell
    return _enlarged(cell, share_of(cell, assess(cell.files.directory, cell.id).record))


def next_try(cell: Startable, terminals: Sequence[int]) -> Startable | None:
    """The cell, to be started again with a larger share, if it has just run out of its own; None if it has not.

    Its log and the descriptors ``terminals`` are told.
    """
    share = retry_share(assess(cell.files.directory, cell.id).record) if cell.launch.retry_oom else None
    if share is None:
        return None
    was, now = (f"{each / WHOLE:g} of a device" for each in (cell.launch.share, share))
    text = f"cell {cell.id} ({cell.slug}) runs again with {now}: the memory of {was} was too small\n".encode()
    with contextlib.suppress(OSError), cell.files.log.open("ab") as log:
        log.write(text)
    for terminal in terminals:
        with contextlib.suppress(OSError):
            os.write(terminal, text)
    return _enlarged(cell, share)


def _enlarged(cell: Startable, share: int) -> Startable:
    return replace(cell, launch=replace(cell.launch, share=share))


def run_leased(
    cell: Startable, device: Device, lease: Lease, lock: int, relay: Relay, *, accept: bool, terminal: int
) -> int:
    """Run the cell in a process of its own, in its own environment, with its own log; its exit status.

    ``accept``: a failure of the task is a result too. ``terminal`` is the descriptor that its end is reported to. A
    cell that a fault under MPS has struck is run once more, outside it. Raises UserError when MPS cannot be had.
    """

    def run(mps: daemon.Membership | None) -> int:
        return _run(cell, device, lease, lock, relay, mps, accept=accept, terminal=terminal)

    def struck() -> bool:
        return was_struck(assess(cell.files.directory, cell.id).record)

    if cell.mps is None or struck():
        return run(None)
    with daemon.join(device, cell.mps, cell.launch.share, cell.launch.memory["reserve"]) as membership:
        status = run(membership)
    return run(None) if status and struck() and not relay.caught else status


def _run(
    cell: Startable,
    device: Device,
    lease: Lease,
    lock: int,
    relay: Relay,
    mps: daemon.Membership | None,
    *,
    accept: bool,
    terminal: int,
) -> int:
    job = Job(
        directory=cell.label,  # a task may change its folder
        device=device.label,
        kind=device.kind,
        checked=device.model is not None,
        share=cell.launch.share,
        threads=cell.launch.threads,
        rejected=cell.launch.rejected,
        accept=accept,
        kept_open=(lease.fd, lock, *([mps.fd] if mps else [])),
        terminal=terminal,
        mps=mps.told if mps else None,
        batch=cell.launch.batch,
        memory=cell.launch.memory,
        mem_mb=cell.launch.mem_mb,
        device_memory=device.memory,
        retry_oom=cell.launch.retry_oom,
    )
    log = os.open(cell.files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        how = "" if cell.mps is None else ", under MPS" if mps else ", outside MPS after a fault"
        os.write(log, f"--- {stamp} on {os.uname().nodename}, {device.label}{how}\n".encode())
        environment = cell_environment(
            os.environ,
            visible=device.entry,
            threads=cell.launch.threads,
            memory=cell.launch.memory,
            fraction=_fraction(cell, device),
        )
        if cell.mps is not None:
            environment = without_mps(environment) | (mps.variables if mps else daemon.apart(device))
        warm = cell.launch.start == "auto" and not cell.task["argv"]
        return run_cell(job, environment, log, cell.task, warm, relay)
    finally:
        os.close(log)


def _fraction(cell: Startable, device: Device) -> float | None:
    """The part of ``device`` that torch may take in the cell; raises UserError when the cell's share is too small."""
    if device.kind != "cuda":
        return None
    try:
        return memory.fraction(cell.launch.share, device.memory, cell.launch.memory)
    except ValueError as error:
        raise UserError(
            f"the share of cell {cell.id}",
            Verbatim(f"{error}, on {device.label} of {os.uname().nodename}"),
            "a share that holds a cell",
            "give it more under `resources`",
        ) from None


def write_down_kill(cell: Startable) -> int:
    """Write down that the cell was killed with all that watched it; the exit status of a cell that was."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        # Its process has gone with its parent, but not what it had started.
        os.killpg(json.loads(cell.files.lock.read_bytes())["cell"], signal.SIGKILL)
    if try_lock(cell.files.lock) is not None:  # held to this process's end
        log = os.open(cell.files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        settle(CellFiles(Path(cell.label)), -signal.SIGKILL, log, accept=False, terminal=2)
    return 128 + signal.SIGKILL
