"""NVIDIA's MPS control program: where it is, which folders a daemon has, and what one answers.

What NVIDIA documents (docs.nvidia.com/deploy/mps) and this rests on:

- ``nvidia-cuda-mps-control -f`` is the control daemon in the foreground. It serves the devices in its
  CUDA_VISIBLE_DEVICES, best given by UUID (clients see indices renumbered), for clients with the same
  CUDA_MPS_PIPE_DIRECTORY, and starts one server for the user's clients when the first of them comes. An ordinary user
  can run one for himself. Called without options the program reads commands from its input: ``get_server_list``,
  ``get_server_status PID``, ``get_client_list PID``, ``quit``.
- A server is INITIALIZING, ACTIVE, or, from a fatal GPU fault until all clients that it struck have gone, FAULT. In
  that state it refuses new clients with error 807.
- A program that finds no daemon in its pipe directory runs without MPS and does not say so.

That a program without a daemon answers "Cannot find MPS control daemon process", with exit status 1, and that a
path too long for a socket leads to the same, is not documented but reported by many.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sweepack import orphans

PROGRAM = "nvidia-cuda-mps-control"
ANSWER_SECONDS = 10.0
VARIABLES = "CUDA_MPS_"


class NoAnswer(Exception):
    """The daemon did not answer; the message says what happened instead."""


@dataclass(frozen=True)
class Place:
    """The folder of one device's daemon."""

    folder: Path

    @property
    def pipe(self) -> Path:
        return self.folder / "pipe"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def old_log(self) -> Path:
        """The log of the daemon before."""
        return self.folder / "log.old"

    @property
    def output(self) -> Path:
        """What the daemon prints, and its keeper: with ``-f`` the control log is there."""
        return self.log / "daemon.log"

    @property
    def nobody(self) -> Path:
        """A pipe directory in which there is never a daemon."""
        return self.folder / "none"

    @property
    def users(self) -> Path:
        """Locked, shared, by every cell that uses the daemon, and by what watches the cell."""
        return self.folder / "users"

    @property
    def keeper(self) -> Path:
        """Locked by the daemon's keeper as long as its daemon serves."""
        return self.folder / "keeper"

    @property
    def mutex(self) -> Path:
        """Locked by whoever starts a keeper."""
        return self.folder / "mutex"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which daemon and clients find each other."""
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}


def find_program(environ: Mapping[str, str] = os.environ) -> str | None:
    return shutil.which(PROGRAM, path=environ.get("PATH"))


def without_mps(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what it says about another daemon."""
    return {name: value for name, value in environ.items() if not name.startswith(VARIABLES)}


def ask(place: Place, command: str, seconds: float = ANSWER_SECONDS) -> list[str]:
    """The lines that the daemon of ``place`` answers to ``command``; raises NoAnswer after ``seconds`` at most."""
    try:
        child = orphans.spawn(
            [find_program() or PROGRAM],
            env={**without_mps(os.environ), **place.variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise NoAnswer(f"{PROGRAM}: {error.strerror}") from None
    try:
        output, _ = child.communicate(f"{command}\n".encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer to `{command}` within {seconds:g} s") from None
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
        orphans.forget(child.pid)
    text = output.decode(errors="replace").strip()
    if child.returncode or "Cannot find MPS control daemon" in text:
        raise NoAnswer(text or f"{PROGRAM} ended with exit status {child.returncode}")
    return text.splitlines()


def servers(place: Place, seconds: float = ANSWER_SECONDS) -> list[int]:
    """The pids of the daemon's servers: none before its first client. Raises NoAnswer."""
    return _numbers(ask(place, "get_server_list", seconds))


def in_fault(place: Place) -> bool:
    """Whether a server waits for the clients that a fatal fault has struck. Raises NoAnswer."""
    return any("FAULT" in " ".join(ask(place, f"get_server_status {server}")) for server in servers(place))


def is_client(place: Place, pid: int) -> bool | None:
    """Whether process ``pid`` is a client of the daemon; None when it does not say."""
    with contextlib.suppress(NoAnswer):
        return any(pid in _numbers(ask(place, f"get_client_list {server}")) for server in servers(place))
    return None


def _numbers(lines: list[str]) -> list[int]:
    return [int(line) for line in map(str.strip, lines) if line.isdigit()]
