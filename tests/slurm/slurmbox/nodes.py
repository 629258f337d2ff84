"""The nodes: each a slurmd with a host name and an /etc/hosts of its own, by namespaces of the kernel."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from slurmbox.box import Box
from slurmbox.processes import ClusterError, Daemon, run, wait_until

NODES = ("n1", "n2")
READY = {"idle", "mixed", "allocated", "completing", "planned"}
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && exec slurmd -N "$2"'


def slurmd(box: Box, name: str) -> Daemon:
    """The daemon of node ``name``; ClusterError if there is no such node."""
    if name not in NODES:
        raise ClusterError(f"no node is called {name!r}: there are {', '.join(NODES)}")
    isolate = ("unshare", "--uts", "--mount", "--propagation", "private")
    command = (*isolate, "sh", "-c", ENTER, "slurmd", str(box.state / "etc" / "hosts"), name)
    pid_file = box.state / "run" / f"slurmd-{name}.pid"
    return Daemon(f"slurmd-{name}", "slurmd", command, box.environment, box.state, pid_file.exists)


def start_node(box: Box, name: str) -> None:
    """Start the node's slurmd unless it runs. Whether Slurm counts on it: ``wait_for_nodes``."""
    daemon = slurmd(box, name)
    if daemon.ensure():
        wait_until(daemon.pid, f"the pid file of {daemon.name}", 10, daemon.logs)
        _namespace_file(box, name).write_text(_uts_namespace(daemon.pid()))


def stop_node(box: Box, name: str) -> None:
    """Stop slurmd, then whatever jobs still run there: they outlive it by Slurm's design."""
    daemon = slurmd(box, name)
    namespace = _namespace(box, name)
    daemon.stop()
    _kill_all(namespace, name)


def kill_node(box: Box, name: str) -> None:
    """The node is gone from one moment to the next, its slurmd, its jobs and all."""
    daemon = slurmd(box, name)
    _kill_all(_namespace(box, name), name)
    daemon.pid_file.unlink(missing_ok=True)


def node_states(box: Box) -> dict[str, str]:
    """Name → state as `sinfo` tells it, for instance ``idle`` or ``down*``."""
    lines = run(["sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T"], box.environment).splitlines()
    return dict(line.split() for line in lines)


def is_ready(state: str) -> bool:
    """Whether a node in this state runs jobs. ``-``: planned by the backfill; ``+``: an older job is ending there."""
    return state.rstrip("-+") in READY


def wait_for_nodes(box: Box, names: Sequence[str], seconds: float = 60) -> None:
    """Wait until Slurm counts on these nodes; one that somebody, or a failure, took out is put back."""

    def all_ready() -> bool:
        states = node_states(box)
        for name in names:
            # With a star, Slurm has not heard from the node yet, and there is nothing to put back.
            if states[name] in ("down", "drained", "draining", "drng", "drain", "fail"):
                run(["scontrol", "update", f"NodeName={name}", "State=RESUME"], box.environment)
        return all(is_ready(states[name]) for name in names)

    logs = [log for name in names for log in slurmd(box, name).logs]
    wait_until(all_ready, f"the nodes {', '.join(names)} to be ready", seconds, logs)


def _uts_namespace(pid: int | str | None) -> str:
    """The kernel's name for the host name that the process sees; OSError when it has ended."""
    return str(Path(f"/proc/{pid}/ns/uts").readlink())


def _namespace_file(box: Box, name: str) -> Path:
    return box.state / "run" / f"{name}.uts"


def _namespace(box: Box, name: str) -> str | None:
    """The UTS namespace that all processes of the node share; None when there is none."""
    pid = slurmd(box, name).pid()
    if pid is not None:
        return _uts_namespace(pid)
    with contextlib.suppress(OSError):
        remembered = _namespace_file(box, name).read_text()
        # The kernel gives numbers anew: what has this one now counts only if its host name is the node's.
        members = _members(remembered)
        if (
            members
            and run(["nsenter", "--target", str(members[0]), "--uts", "hostname"], box.environment).strip() == name
        ):
            return remembered
    return None


def _members(namespace: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _uts_namespace(folder.name) == namespace:
                found.append(int(folder.name))
    return found


def _kill_all(namespace: str | None, name: str) -> None:
    """SIGKILL every process of the namespace, again and again until no new one appears."""
    if namespace is None or namespace == _uts_namespace("self"):
        return

    def none_left() -> bool:
        members = _members(namespace)
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not members

    wait_until(none_left, f"the end of all processes of node {name}", 20)
