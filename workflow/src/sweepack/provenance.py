"""What ran where, with which code and libraries. No environment variables: they hold secrets."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from sweepack.files import write_atomic

_PACKAGES = ("sweepack", "snakemake", "torch", "pytorch-lightning", "numpy", "scikit-learn")


def describe(task: dict[str, Any], root: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The provenance of one attempt; ``facts`` are those that the launcher knows (device, share, threads, …)."""
    source = root / task["file"] if task["file"] else None
    return {
        "task": task["reference"],
        "source_sha256": hashlib.sha256(source.read_bytes()).hexdigest() if source else None,
        "commit": _commit(root),
        **machine(),
        "pid": os.getpid(),
        "command": sys.orig_argv[:4],
        **facts,
    }


def amend(path: Path, facts: dict[str, Any]) -> None:
    """Add ``facts`` to the provenance that this process has written to ``path``, if it has come to that."""
    with contextlib.suppress(OSError, ValueError):
        described = json.loads(path.read_bytes())
        if described["pid"] == os.getpid():
            write_atomic(path, json.dumps(described | facts, indent=2) + "\n", durable=False)


@functools.cache
def machine() -> dict[str, Any]:
    """The part that is the same for all cells of a process and those forked from it: reading it takes a while."""
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "host": platform.node(),
        "system": platform.platform(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(root: Path) -> str | None:
    """The commit that ``root`` is at, read from its files: asking git would start a process for every cell."""
    git = next((folder / ".git" for folder in (root, *root.parents) if (folder / ".git").exists()), None)
    try:
        if git is None or git.is_file():
            return None
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except OSError:
        return None
