"""Huge pages under the memory of a process that forks often: copying its page tables is most of what a fork costs."""

from __future__ import annotations

import ctypes
from pathlib import Path

_HUGE = 2 << 20
_MADV_COLLAPSE = 25


def collapse() -> None:
    """Put this process's own memory on huge pages, where Linux (6.1 and later) does so on demand; else do nothing.

    Forking a process that has imported torch and Lightning then took 6 ms instead of 19, and its child's end as much
    less. It takes some 0.6 s.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, inode, *_ = line.split(None, 5)
        if rights == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in span.split("-"))
            start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if start < end:
                advise(start, end - start, _MADV_COLLAPSE)  # refused where nothing is to be gained
