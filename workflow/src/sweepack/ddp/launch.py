"""Start a cell on several devices: its lock and its devices, its ranks, and what is written down when they have ended.

One process a cell, on this machine or in the first node of a Slurm job. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sweepack import orphans
from sweepack.cell import newest_readable
from sweepack.ddp.follow import Follower, Outcome
from sweepack.ddp.layout import Layout
from sweepack.ddp.meeting import Meeting
from sweepack.ddp.ports import Port
from sweepack.ddp.rounds import RoundFollower
from sweepack.ddp.starters import addresses, node_names, start
from sweepack.devices import Device, load_nvml, visible_pool
from sweepack.environment import cell_environment
from sweepack.errors import UserError, tells_user_errors
from sweepack.files import write_atomic
from sweepack.job import report
from sweepack.launch import TEMPORARY_FAILURE, lock_cell, watch_driver
from sweepack.leases import WHOLE, LeaseAbandoned, LeasePool, LeaseTimeout, lease_directory
from sweepack.records import Record, State, assess
from sweepack.start import Startable, launcher_options, must_run, read_cell
from sweepack.supervise import Relay


def parser() -> argparse.ArgumentParser:
    return launcher_options(
        "Run one cell on several devices: start its ranks, by srun in a Slurm job, and follow them. To be "
        "started once; `snakemake` does this for every pending cell with `gpus_per_node`.",
        "cell",
    )


@tells_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the cell that ``argv`` names; the exit status."""
    options = parser().parse_args(argv)
    _require_alone(os.environ)
    try:
        cell = read_cell(options.sweep_dir, options.cell)
        if cell.launch.layout is None:
            raise UserError("--cell", cell.id, "a cell with `gpus_per_node`", "run it by scripts/cell.py")
        give_up = watch_driver()
        lock = lock_cell(cell, cell.launch.timeout * 60, give_up)
        if not must_run(cell):
            return 0
        return _on_devices(cell, Layout(**cell.launch.layout), lock, give_up, bool(options.accept_failure))
    except (LeaseTimeout, LeaseAbandoned) as error:
        print(f"cell {options.cell} did not start: {error}", file=sys.stderr)
        return TEMPORARY_FAILURE
    except OSError as error:
        print(f"cell {options.cell}: {error}", file=sys.stderr)
        return 1


def _require_alone(environ: Mapping[str, str]) -> None:
    """Raises UserError when this process is one of several: each would start all ranks."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    for name, value in (("SLURM_STEP_NUM_TASKS", tasks), ("WORLD_SIZE", environ.get("WORLD_SIZE", "1"))):
        if value not in ("", "1") and (name != "WORLD_SIZE" or "RANK" in environ):
            raise UserError(
                name,
                value,
                "one process, which starts the ranks itself",
                "start scripts/ddp.py once, not by srun or torchrun with several tasks",
            )


def _on_devices(cell: Startable, layout: Layout, lock: int, give_up: Callable[[], str | None], accept: bool) -> int:
    if layout.launcher == "srun" or (layout.launcher == "torchrun" and "SLURM_JOB_ID" in os.environ):
        granted = int(os.environ.get("SLURM_JOB_NUM_NODES", "0") or 0)
        if not granted:
            raise UserError(
                "--cell", cell.id, "a Slurm job, as `snakemake --profile profiles/slurm` submits it", "run that"
            )
        names = node_names()
        where = f"{granted * layout.gpus_per_node} GPUs of {', '.join(names) or f'{granted} nodes'}"
        fitted = layout.on(granted) if layout.least_nodes <= granted <= layout.nodes else layout
        return _Attempt(cell, fitted, accept, where, names, lock).run(None, (lock,))
    pool = visible_pool(os.environ, load_nvml())[: cell.launch.devices or None]
    count = layout.devices_of(on_cpu=pool[0].kind == "cpu")
    with LeasePool(lease_directory(), [device.key for device in pool]).acquire(
        WHOLE,
        count=count,
        label=cell.label,
        timeout=cell.launch.timeout * 60,
        on_wait=lambda text: print(text, file=sys.stderr),
        give_up=give_up,
    ) as lease:
        devices = [device for device in pool if device.key in lease.devices]
        where = ", ".join(device.label for device in devices)
        return _Attempt(cell, layout, accept, where, [], lock).run(devices, (lease.fd, lock))


class _Attempt:
    """One attempt at ``cell``; ``where`` is for people."""

    def __init__(self, cell: Startable, layout: Layout, accept: bool, where: str, nodes: list[str], lock: int) -> None:
        self._cell = cell
        self._layout = layout
        self._accept = accept
        self._where = where
        self._nodes = nodes
        before = assess(cell.files.directory, cell.id).record
        self._record = Record(
            cell.id,
            State.RUNNING,
            attempt=(before.attempt if before else 0) + 1,
            rejected=cell.launch.rejected,
            started=time.time(),
            host=",".join(nodes) or os.uname().nodename,
            device=where,
            share=WHOLE,
            threads=cell.launch.threads,
            batch=cell.launch.batch,
            world_size=layout.world_size,
        )

    def run(self, devices: list[Device] | None, kept: Sequence[int]) -> int:
        """Run the ranks on ``devices`` (None: on those of the Slurm job); the exit status."""
        relay = Relay()
        orphans.adopt()
        files = self._cell.files
        files.result.unlink(missing_ok=True)
        write_atomic(files.status, self._record.to_json())
        log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

        def note(text: str) -> None:
            os.write(log, f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())

        note(f"on {self._where}: {self._layout} by {self._layout.launcher}")
        ports = [Port(near=os.getpid() * 7), Port(near=os.getpid() * 7 + 1)]
        meeting = Meeting()
        try:
            setup = {
                "addresses": addresses(),
                "port": meeting.port,
                "token": meeting.token,
                "rendezvous": ports[1].number,
                "directory": self._cell.label,
                "layout": self._layout.to_dict(),
                "device": self._where,
                "kind": devices[0].kind if devices else None,
                "checked": bool(devices and devices[0].model),
                "threads": self._cell.launch.threads,
                "batch": self._cell.launch.batch,
                "memory": self._cell.launch.memory,
                "attempt": self._record.attempt,
                "rejected": self._record.rejected,
                "parent": os.getpid(),
            }
            environment = self._environment(devices)
            started = start(
                self._layout,
                setup,
                environment,
                log,
                [*kept, *(port.fd for port in ports)],
                self._cell.launch.threads,
            )
            follower = RoundFollower if self._layout.launcher == "torchrun" else Follower
            outcome = follower(
                self._layout,
                meeting,
                started,
                lambda: relay.caught,
                lambda: {"port": ports[0].number, "checkpoints": self._checkpoints()},
                note,
                self._nodes,
            ).run()
        finally:
            meeting.close()
            for port in ports:
                port.release()
            orphans.kill_strays()
        return self._conclude(outcome, note, relay)

    def _environment(self, devices: list[Device] | None) -> dict[str, str]:
        threads = self._cell.launch.threads
        visible = ",".join(device.entry for device in devices or [])
        clean = cell_environment(os.environ, visible=visible, threads=threads)
        if devices is None:
            # srun reads these, and each rank drops them before torch is imported; devices are those of the node.
            del clean["CUDA_VISIBLE_DEVICES"]
            kept = ("SLURM_", "SLURMD_", "CUDA_VISIBLE_DEVICES")
            clean |= {name: value for name, value in os.environ.items() if name.startswith(kept)}
        return clean

    def _checkpoints(self) -> list[str]:
        """What there is to resume from, told to all ranks alike: a slow file system may show each another state."""
        folder = self._cell.files.checkpoints
        names = {path.name.removesuffix(".previous") for path in folder.glob("[!.]*")} if folder.exists() else set()
        return sorted(found.name for name in names if (found := newest_readable(folder / name)))

    def _conclude(self, outcome: Outcome, note: Callable[[str], None], relay: Relay) -> int:
        files = self._cell.files
        record = replace(
            self._record,
            status=outcome.state,
            ended=time.time(),
            metrics=outcome.metrics,
            error=outcome.error,
            world_size=outcome.world_size,
            memory=outcome.memory,
            failure=outcome.failure,
        )
        if outcome.error:
            note(outcome.error)
        write_atomic(files.status, record.to_json())
        accepted = record.status is State.FAILED and self._accept
        if record.status is State.FINISHED or accepted:
            write_atomic(files.result, record.to_json())
        report(record, self._cell.slug, files, sys.stderr.fileno())
        if record.status is State.FINISHED or accepted:
            return 0
        return 128 + (relay.caught or signal.SIGTERM) if record.status is State.INTERRUPTED else 1


if __name__ == "__main__":
    sys.exit(main())
