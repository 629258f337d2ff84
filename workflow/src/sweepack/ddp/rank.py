"""The process of one rank: compare what started it with the layout, meet the others, run the task, tell how it ended.

Until the others are there nothing heavy is imported, so that a wrong start fails in a second on every rank.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweepack import memory, oom, orphans, provenance, run
from sweepack.ddp.layout import Layout, Place, find_place
from sweepack.ddp.meeting import Line
from sweepack.ddp.starters import SETUP
from sweepack.ddp.world import World
from sweepack.devices import load_nvml, visible_pool
from sweepack.environment import THREADS, cell_environment
from sweepack.errors import UserError
from sweepack.job import Job
from sweepack.leases import WHOLE
from sweepack.records import CellFiles, Record, State

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run this rank; its exit status."""
    if SETUP not in os.environ:
        print(
            "sweepack: this process was not started by scripts/ddp.py, which gives its ranks a rendezvous: start that, "
            "once, instead of srun or torchrun",
            file=sys.stderr,
        )
        return 1
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    orphans.adopt()
    setup = json.loads(os.environ.pop(SETUP))
    layout = Layout(**setup["layout"])
    place, problems = find_place(layout, os.environ)
    try:
        devices, trouble = _devices(layout, setup, os.environ)
        line = Line(setup["addresses"], setup["port"], layout.start_seconds)
        line.say(**_hello(setup, place, [*problems, *trouble]))
        told = line.hear(2 * layout.start_seconds)
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return 1
    if place is None or told is None or "go" not in told:
        return 1  # the launcher says why
    go = told["go"]
    world = World(
        place.rank,
        place.local_rank,
        place.world_size,
        place.world_size // layout.gpus_per_node,
        layout,
        frozenset(go["checkpoints"]),
    )
    kind, label = devices
    _enter(layout, place, setup, line.address, go["port"])
    if place.rank:
        sys.stdout = sys.stderr = _Labelled(f"[rank {place.rank}] ")
    run.catch_signals()
    threading.Thread(target=listen, args=(line,), daemon=True).start()
    end, code = _run(setup, world, kind, label)
    run.ignore_signals()
    try:
        line.say(end=end)
    except OSError:
        return 1
    return code


def _hello(setup: Mapping[str, Any], place: Place | None, problems: list[str]) -> dict[str, Any]:
    return {
        "token": setup["token"],
        "rank": place.rank if place else -1,
        "local_rank": place.local_rank if place else -1,
        "world_size": place.world_size if place else 0,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        # torchrun has the ranks meet at another place whenever it starts them anew.
        "round": f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
        "problems": problems,
    }


def _devices(layout: Layout, setup: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[tuple[str, str], list[str]]:
    """The kind of this node's devices and a label for people, and what is wrong with their number."""
    if setup["kind"] in ("cpu", "sim"):
        return (setup["kind"], setup["device"]), []
    pool = visible_pool(environ, load_nvml())
    seen = 0 if pool[0].kind == "cpu" else len(pool)
    if layout.world_size > 1 and any(device.is_instance for device in pool):
        return ("cuda", setup["device"]), [
            f"was given MIG instances (CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')}), which NCCL "
            "cannot join: ask for whole GPUs (`slurm.gpu_model`, `slurm.partition`), or remove `gpus_per_node`"
        ]
    if seen == layout.gpus_per_node:
        return ("cuda", setup["device"]), []
    return ("cuda", setup["device"]), [
        f"sees {seen} devices (CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')}), but `gpus_per_node` is "
        f"{layout.gpus_per_node}: each rank must see all devices of its node's part (no --gpus-per-task, no --gpu-bind)"
    ]


def _enter(layout: Layout, place: Place, setup: Mapping[str, Any], address: str, port: int) -> None:
    """Leave in the environment what a rank is to find there, and nothing of what started it."""
    threads = setup["threads"]
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if layout.launcher == "torchrun":
        meeting = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    clean = cell_environment(os.environ, visible=visible, threads=threads, memory=setup["memory"])
    os.environ.clear()
    os.environ.update(clean)
    os.environ.update(meeting)
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.local_rank),
        GROUP_RANK=str(place.node),
        WORLD_SIZE=str(place.world_size),
        LOCAL_WORLD_SIZE=str(layout.gpus_per_node),
        **dict.fromkeys(THREADS, str(threads)),
    )


def listen(line: Line) -> None:
    """Do what the launcher says, and end with it: a rank that nobody follows must not go on."""
    while (told := line.hear()) is not None:
        if "stop" in told:
            os.kill(os.getpid(), told["stop"])
    orphans.kill_strays()
    os._exit(1)


def _run(setup: Mapping[str, Any], world: World, kind: str, label: str) -> tuple[dict[str, Any], int]:
    """What to tell of the end, and the exit status."""
    files = CellFiles(Path(setup["directory"]))
    meaning = json.loads(files.meaning.read_bytes())
    record = Record(meaning["id"], State.RUNNING, attempt=setup["attempt"], rejected=setup["rejected"])
    job = Job(
        directory=setup["directory"],
        device=label,
        kind=kind,
        checked=setup["checked"],
        share=WHOLE,
        threads=setup["threads"],
        rejected=setup["rejected"],
        accept=False,
        kept_open=(),
        terminal=2,
        batch=setup["batch"],
        memory=setup["memory"],
    )
    held = memory.Held(job, world.local_rank)
    os.environ["PL_GLOBAL_SEED"] = str(meaning["seed"] % 2**32)  # of samplers: the same on every rank
    end: dict[str, Any]
    try:
        metrics = run.run_task(job, files, meaning, record, held, world)
        end, code = {"state": State.FINISHED, "metrics": metrics}, 0
    except BaseException as error:
        record, code = run.judge(error, record)
        record = oom.tell(error, record, job)
        end = {"state": record.status, "error": record.error, "failure": record.failure}
    end["memory"] = held.read()
    if world.rank == 0:
        provenance.amend(files.provenance, {"memory": end["memory"]})
    return end, code


class _Labelled:
    """A stream to standard error that says at the beginning of each line which rank speaks."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._begun = False
        self.encoding = "utf-8"

    def write(self, text: str) -> int:
        lines = text.splitlines(keepends=True)
        shown = "".join(("" if self._begun and not n else self._label) + line for n, line in enumerate(lines))
        if lines:
            self._begun = not lines[-1].endswith("\n")
        os.write(2, shown.encode())
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 2


if __name__ == "__main__":
    code = main()
    run.spare_libraries()
    run.leave(code)
