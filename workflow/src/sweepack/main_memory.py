"""Main memory of a cell's processes: a limit that the kernel holds them to, and the most that one of them had."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
# Memory that is mapped and never used: 90 MB of libraries' data with torch and Lightning, and a stack for each thread.
UNUSED = 128 * 10**6
# For writing down the end of a cell that has used up all it had.
_LAST_WORDS = 64 * 10**6


def obstacle(mem_mb: int, settings: Mapping[str, Any]) -> str | None:
    """Why there is to be no limit, by the cell's ``mem`` in megabytes (0: none) and ``settings``; None if there is."""
    if not settings.get("limit_main", False):
        return "`memory.limit_main` is off"
    return None if mem_mb else "the cell has no `mem`, or ranks that share it"


def limit(mem: int) -> str | None:
    """Hold this process to ``mem`` bytes from here on, and each one that it starts; why that cannot be, else None.

    The limit is on private writable memory (RLIMIT_DATA), which is what fills a machine: heaps, arrays, tensors. One on
    the address space (RLIMIT_AS) would also count libraries, shared memory and what allocators only set aside: more
    than twice as much with torch and Lightning, other on each machine, and no measure of what a cell takes. One on
    resident memory (RLIMIT_RSS) Linux ignores. Mapped memory counts before it is touched, so what is mapped and unused
    now comes on top of ``mem``, and ``UNUSED`` for what will be. What is used already counts: for a process forked from
    a warm host this is what a fresh one has had to import. Children inherit the limit, each has all of it: workers of a
    data loader hand over batches in shared memory, which is not counted.

    The soft limit is the one that holds, the hard one is a little higher for ``lift``; the cell cannot go beyond it.
    """
    try:
        status = _status()
        soft = mem + max(0, status["VmData"] - status["RssAnon"]) + UNUSED
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        hard = soft + _LAST_WORDS
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    except (OSError, ValueError, KeyError) as error:
        return f"the system takes no limit: {error}"
    return None


def lift() -> None:
    """Let this process have what ``limit`` has kept back."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def peak() -> int | None:
    """The most main memory in bytes that this process, or one that it has started and waited for, had at a time.

    None where the system doesn't say. Of this process by VmHWM, which starts anew in a fork (with what it shares with
    its parent) and with a program; ru_maxrss has what the program before it had.
    """
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    try:
        return max(_status()["VmHWM"], children)
    except (OSError, ValueError, KeyError):
        return None


def _status() -> dict[str, int]:
    """The amounts in this process's status, in bytes."""
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
