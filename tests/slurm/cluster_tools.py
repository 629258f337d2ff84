"""What tests ask of the Slurm cluster, by Slurm's own commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from .testbed.services import Services
from .testbed.state import NODES, State

T = TypeVar("T")

COMMAND = Path(__file__).with_name("cluster")
COMMAND_SECONDS = 60.0
# A cluster that comes up from nothing and installs a database first, on a busy machine.
UP_SECONDS = 240.0
# A node that was killed holds its cancelled jobs until Slurm counts it as dead.
EMPTY_SECONDS = 90.0
# Field → how `squeue` is asked for it.
FIELDS = {
    "id": "%i",
    "name": "%j",
    "state": "%T",
    "partition": "%P",
    "account": "%a",
    "node": "%N",
    "reason": "%r",
    "gres": "%b",
    "cpus": "%C",
    "memory": "%m",
    "limit": "%l",
    "elapsed": "%M",
    "comment": "%k",
    "folder": "%Z",
    "command": "%o",
}
SEPARATOR = "\x1f"


def run_cluster(*arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `tests/slurm/cluster`; unless ``check`` is false, it must end well."""
    done = subprocess.run(
        [sys.executable, str(COMMAND), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=UP_SECONDS,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def pids() -> dict[str, int]:
    """Daemon → its pid; a daemon that does not run is left out."""
    services = Services(State.from_environment())
    return {daemon.name: pid for daemon in services.daemons if (pid := daemon.pid())}


class Cluster:
    """The cluster that is up. Job ids are texts, as Slurm prints them."""

    nodes = NODES

    def call(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm's printed, errors included; unless ``check`` is false, it must end well."""
        done = subprocess.run(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        assert not check or done.returncode == 0, f"{shlex.join(command)}: {done.stdout}"
        return done.stdout

    def submit(self, *options: str, command: str = "sleep 600", output: Path | str = "/dev/null") -> str:
        """Submit a job that runs ``command`` by a shell; its id."""
        return self.call("sbatch", "--parsable", f"--output={output}", *options, f"--wrap={command}").strip()

    def jobs(self) -> list[dict[str, str]]:
        """Every job that the controller remembers (ended ones for five minutes), with the fields of ``FIELDS``."""
        lines = self.call("squeue", "--noheader", "--states=all", f"--format={SEPARATOR.join(FIELDS.values())}")
        return [dict(zip(FIELDS, line.split(SEPARATOR), strict=True)) for line in lines.splitlines()]

    def state(self, job: str) -> str:
        """The job's state as the controller knows it, ``PENDING`` for instance; empty when it knows no such job."""
        return next((row["state"] for row in self.jobs() if row["id"] == job), "")

    def node_of(self, job: str) -> str:
        """Where the job runs or has run; empty when it has not started."""
        return next((row["node"] for row in self.jobs() if row["id"] == job), "")

    def accounted(self, job: str) -> list[str]:
        """The job's states in accounting (`sacct`), oldest first: one for each time that it was started."""
        lines = self.call("sacct", "-n", "-P", "-X", "-D", "--format=State", "-j", job)
        return lines.splitlines()

    def cancel(self, *jobs: str, signal: str | None = None) -> None:
        """Cancel jobs, or send their processes a signal."""
        self.call("scancel", *([f"--signal={signal}", "--full"] if signal else []), *jobs)

    def requeue(self, job: str) -> None:
        self.call("scontrol", "requeue", job)

    def wait_for(self, predicate: Callable[[], T], what: str, seconds: float = 60) -> T:
        """Wait until the predicate holds; its value. Fail with ``what`` and all jobs if it does not in time."""
        end = time.monotonic() + seconds
        while not (value := predicate()):
            if time.monotonic() > end:
                raise AssertionError(f"waited {seconds:g} s in vain for {what}\n{self.picture()}")
            time.sleep(0.1)
        return value

    def wait_for_state(self, jobs: str | Iterable[str], *states: str, seconds: float = 60) -> None:
        """Wait until each of the jobs is in one of these states."""
        wanted = [jobs] if isinstance(jobs, str) else list(jobs)
        what = f"jobs {', '.join(wanted)} to be {' or '.join(states)}"
        self.wait_for(lambda: all(self.state(job) in states for job in wanted), what, seconds)

    def picture(self) -> str:
        """Jobs and nodes as a person would look at them."""
        return self.call("squeue", "--states=all", check=False) + self.call("sinfo", "--Node", check=False)

    def empty(self) -> None:
        """Cancel every job and wait until none is left."""

        def active() -> list[str]:
            return self.call("squeue", "--noheader", "--format=%A").split()

        if jobs := active():
            self.cancel(*jobs)
        self.wait_for(lambda: not active(), "cancelled jobs to end", EMPTY_SECONDS)

    def node_state(self, name: str) -> str:
        """As `sinfo` tells it: ``idle``, ``mixed``, ``down*`` …"""
        return self.call("sinfo", "--noheader", "--partition=gpu", f"--nodes={name}", "--format=%T").strip()

    def kill_node(self, name: str) -> None:
        """Its slurmd and all its jobs are killed at once, unannounced. Slurm notices within half a minute."""
        run_cluster("kill-node", name)

    def start_node(self, name: str) -> None:
        """Bring a node back; it is ready for jobs."""
        run_cluster("start-node", name)

    def stop_controller(self) -> None:
        """Stop slurmctld: nothing that is asked of Slurm is answered; jobs live on."""
        Services(State.from_environment()).slurmctld.stop(15)

    def start_controller(self) -> None:
        """Start it again; it answers."""
        run_cluster("up")

    def restart_controller(self) -> None:
        """Stop and start slurmctld; it answers again."""
        run_cluster("restart-controller")


def environment() -> dict[str, str]:
    """This process's, without what Slurm's commands would take options from."""
    ours = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
