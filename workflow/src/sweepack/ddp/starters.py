"""How the processes of a cell's ranks are started: by this process, by srun, or by torchrun's agents."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweepack import orphans
from sweepack.ddp.layout import Layout
from sweepack.slurm.cluster import SlurmError, run

SETUP = "SWEEPACK_DDP"  # what the ranks are told, as JSON
RANK = "sweepack.ddp.rank"
_AGENT = "sweepack.ddp.agent"


@dataclass
class Started:
    """A process that was started, and the rank that it is (None: it starts ranks itself)."""

    process: subprocess.Popen[bytes]
    rank: int | None

    def status(self) -> int | None:
        """The exit status, a signal being negative; None while it runs."""
        return self.process.poll()

    def kill(self) -> None:
        """Kill it, and what it leads; srun is told to end its step first."""
        if self.rank is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        orphans.forget(self.process.pid)


def start(
    layout: Layout, setup: Mapping[str, Any], environment: Mapping[str, str], log: int, kept: Sequence[int], cpus: int
) -> list[Started]:
    """Start the ranks of ``layout``, all their output going to ``log``; ``cpus`` is the threads of each.

    ``setup`` is what each is told. Raises OSError when a program cannot be started.
    """
    told = {**environment, SETUP: json.dumps(setup)}
    if layout.launcher == "local":
        return [
            _spawn(_python(RANK), {**told, **_rank_variables(layout, rank)}, log, kept, rank)
            for rank in range(layout.world_size)
        ]
    in_slurm = "SLURM_JOB_ID" in os.environ
    if layout.launcher == "torchrun":
        agents = srun(layout, 1, cpus * layout.gpus_per_node, keep_going=layout.elastic) if in_slurm else []
        return [_spawn([*agents, *_python(_AGENT)], told, log, kept, None)]
    return [_spawn([*srun(layout, layout.gpus_per_node, cpus), *_python(RANK)], told, log, kept, None)]


def srun(layout: Layout, tasks_per_node: int, cpus: int, keep_going: bool = False) -> list[str]:
    """srun with every flag explicit: what it would take from the environment may be another step's."""
    return [
        *("srun", f"--nodes={layout.nodes}", f"--ntasks={layout.nodes * tasks_per_node}"),
        *(f"--ntasks-per-node={tasks_per_node}", f"--cpus-per-task={cpus}", "--distribution=block"),
        *("--cpu-bind=none", "--export=ALL", "--unbuffered", "--input=none", "--mpi=none"),
        *(f"--kill-on-bad-exit={0 if keep_going else 1}", "--wait=0", *(["--no-kill"] if keep_going else [])),
    ]


def node_names() -> list[str]:
    """The nodes of this Slurm job, whatever way their list is compressed; empty where there is no telling."""
    names = os.environ.get("SLURM_JOB_NODELIST")
    if names:
        with contextlib.suppress(SlurmError, OSError):
            return run(["scontrol", "show", "hostnames", names]).split()
    return []


def addresses() -> list[str]:
    """Under which other nodes may reach this one, the likeliest first."""
    found = []
    node = os.environ.get("SLURMD_NODENAME")
    if node:
        with contextlib.suppress(SlurmError, OSError):
            words = run(["scontrol", "--oneliner", "show", "node", node]).split()
            found += [word.partition("=")[2] for word in words if word.startswith("NodeAddr=")]
    found += [os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""), os.uname().nodename]
    if not node:
        found.insert(0, "127.0.0.1")
    return list(dict.fromkeys(filter(None, found)))


def wait_for_end(started: Sequence[Started], seconds: float) -> None:
    """Give them so long to end by themselves."""
    end = time.monotonic() + seconds
    while any(each.status() is None for each in started) and time.monotonic() < end:
        time.sleep(0.05)


def _python(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", module]


def _rank_variables(layout: Layout, rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_WORLD_SIZE": str(layout.gpus_per_node),
    }


def _spawn(
    command: list[str], environment: Mapping[str, str], log: int, kept: Sequence[int], rank: int | None
) -> Started:
    child = orphans.spawn(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=tuple(kept),
        # A session of its own: a signal reaches the ranks once, from the launcher, and what they leave is killed.
        start_new_session=True,
    )
    return Started(child, rank)
