"""What the tests of MPS share: the fake control program on the PATH, and a look at its daemons."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FAKES = Path(__file__).with_name("fakes")
PROGRAM = "nvidia-cuda-mps-control"
GPU = "GPU-11111111-2222-3333-4444-555555555555"


def daemons(leases: Path) -> list[int]:
    """The control daemons, running ones, of whoever leases devices in that folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            if b"-f" in arguments and any(word.endswith(PROGRAM.encode()) for word in arguments):
                variables = (process / "environ").read_bytes().split(b"\0")
                if any(word.startswith(f"CUDA_MPS_PIPE_DIRECTORY={leases}/".encode()) for word in variables):
                    found.append(int(process.name))
    return found


def path_with_fakes() -> str:
    return f"{FAKES}:{os.environ['PATH']}"
