"""What a run has left behind: processes, sockets, leases, locks. Nothing, once it has ended."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from sweepack.files import is_locked


def processes(sandbox):
    """The living processes of a sandbox by pid: those that stand in its folder or were told to use its leases."""
    told = f"\0SWEEPACK_LEASES={sandbox.root.parent / 'leases'}\0".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            inside = (process / "cwd").readlink().is_relative_to(sandbox.root)
            if inside or told in b"\0" + (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def hosts(sandbox, results=False):
    """The warm hosts that use this sandbox's leases, by pid, with their sockets; those for cells or for ``results``.

    What is forked from them looks alike, but is their child.
    """
    found, parents = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().decode().split("\0")
            if "sweepack.warm" in command:
                request = json.loads(command[command.index("sweepack.warm") + 1])
                if Path(request["socket"]).is_relative_to(sandbox.root.parent / "leases"):
                    found[int(process.name)] = request
                    parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return {
        pid: Path(request["socket"])
        for pid, request in found.items()
        if parents[pid] not in found and request["task"]["reference"].startswith("sweepack.") == results
    }


def nothing_is_left(sandbox, eventually):
    """Wait for the host to notice that its run has ended, then see that all is gone."""
    eventually(lambda: not processes(sandbox), f"the end of {processes(sandbox)}", 30)
    leases = sandbox.root.parent / "leases"
    assert not [path for path in leases.rglob("*") if path.suffix in {".sock", ".new", ".lease", ".wait"}]
    assert not [path for path in sandbox.root.glob("results/*/cells/*/lock") if is_locked(path)]
