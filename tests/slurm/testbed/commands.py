"""The command line of the test cluster."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .daemons import wait_until
from .packages import check_packages, install
from .services import GOOD_STATES, Services
from .state import NODES, ClusterError, State

# Ports and the link in /etc/slurm are the machine's, so whatever the folder, one command works at a time.
_LOCK = Path("/run/sweepack-slurm.lock")
_LONGEST_COMMAND = 300


def main() -> int:
    arguments = _parser().parse_args()
    try:
        if arguments.command == "install":
            install()
            return 0
        services = Services(State.from_environment())
        if arguments.command == "status":
            return 0 if status(services) else 1
        _change(services, arguments)
    except ClusterError as problem:
        print(f"cluster: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _change(services: Services, arguments: argparse.Namespace) -> None:
    if os.geteuid() != 0:
        raise ClusterError("the test cluster needs root: its nodes are namespaces, its GPUs device files")
    with _alone():
        match arguments.command:
            case "up":
                up(services)
            case "down":
                down(services, wipe=arguments.wipe)
            case "kill-node":
                services.kill_node(arguments.node)
            case "start-node":
                start_node(services, arguments.node)
            case "restart-controller":
                restart_controller(services)


def up(services: Services) -> None:
    """Start what is not running, and mend what is. Raises ClusterError where that does not work."""
    begin = time.monotonic()
    check_packages()
    state = services.state
    state.check_link()
    state.prepare()
    if not state.is_configured() and any(daemon.pid() for daemon in services.daemons):
        print("the configuration has changed: starting anew", flush=True)
        services.cancel_jobs()
        services.stop()
    state.configure()
    state.link()
    absent = [daemon.name for daemon in services.daemons if daemon.pid() is None]
    services.start_munged()
    services.start_mariadbd()
    services.start_slurmdbd()
    services.start_slurmctld()
    for name in NODES:
        services.start_node(name)
    services.wait_for_nodes(*NODES)
    done = f"started {', '.join(absent)}" if absent else "was up already"
    print(f"test cluster: {done} ({time.monotonic() - begin:.1f} s), in {state.root}")


def down(services: Services, *, wipe: bool) -> None:
    """Cancel all jobs and end every process; `wipe` removes the folder as well, if it is a test cluster's."""
    services.cancel_jobs()
    services.stop()
    services.state.unlink()
    wiped = wipe and services.state.is_ours()
    if wiped:
        shutil.rmtree(services.state.root, ignore_errors=True)
    print(f"test cluster: down{', its folder removed' if wiped else ''}")


def start_node(services: Services, name: str) -> None:
    _check_up(services)
    services.start_node(name)
    services.wait_for_nodes(name)


def restart_controller(services: Services) -> None:
    """Stop slurmctld and start it again; jobs and nodes live on."""
    _check_up(services)
    services.slurmctld.stop(15)
    services.start_slurmctld()
    services.wait_for_nodes(*(name for name, node in services.nodes.items() if node.pid()))


def status(services: Services) -> bool:
    """Print a line for each daemon; whether all run and Slurm uses all nodes."""
    states = services.node_states() if services.slurmctld.pid() else {}
    for daemon in services.daemons:
        pid = daemon.pid()
        process = f"process {pid}" if pid else "not running"
        print(f"{daemon.name:10} {process:15} {states.get(daemon.name[5:], '')}".rstrip())
    return all(daemon.pid() for daemon in services.daemons) and all(states.get(name) in GOOD_STATES for name in NODES)


def _check_up(services: Services) -> None:
    if services.slurmctld.pid() is None:
        raise ClusterError("the test cluster is not up: `tests/slurm/cluster up` starts it")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    def locked() -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    with open(_LOCK, "w") as lock:
        wait_until(locked, f"another tests/slurm/cluster to finish ({_LOCK})", _LONGEST_COMMAND)
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests/slurm/cluster",
        description="A real Slurm cluster of two nodes with 4 GPUs each, inside this machine, for tests. "
        "Its folder is SWEEPACK_SLURM_STATE or sweepack-slurm in the temporary directory. Needs root.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("install", help="install Debian's packages of Slurm, munge and MariaDB that are missing")
    commands.add_parser("up", help="start what is not running")
    off = commands.add_parser("down", help="cancel all jobs, end all processes")
    off.add_argument("--wipe", action="store_true", help="remove the folder too, with logs and accounting")
    commands.add_parser("status", help="what runs; exit status 0 if all is up")
    for name, help_text in (
        ("kill-node", "end every process of a node at once, as a failure of its power would"),
        ("start-node", "start a node that was killed, and wait until Slurm uses it"),
    ):
        commands.add_parser(name, help=help_text).add_argument("node", choices=NODES)
    commands.add_parser("restart-controller", help="stop and start slurmctld; jobs live on")
    return parser
