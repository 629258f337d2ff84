"""What a run asks to have measured: ``pins/<job>.request`` in the sweep's folder, written when the run starts.

Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sweepack.errors import UserError, Verbatim
from sweepack.files import write_atomic
from sweepack.sizing.pins import FOLDER, Profile


def request_file(sweep: Path, job: str) -> Path:
    """What the job of that name is told to measure, in the sweep's folder."""
    return sweep / FOLDER / f"{job}.request"


@dataclass(frozen=True)
class Wanted:
    """A profile to measure, by the example of one ``cell`` (its id) with its ``seed`` and all its ``params``.

    ``count`` cells have the profile; ``name`` is for people.
    """

    profile: Profile
    cell: str
    seed: int
    params: dict[str, Any]
    count: int
    name: str


@dataclass(frozen=True)
class Request:
    """``task`` is ``Task.to_json``, ``code`` the digest of its file; ``sizing`` and ``memory`` are those sections of
    the configuration. ``lease_timeout``: minutes to wait for a device. ``devices``: only the first so many (0: all).
    """

    task: dict[str, Any]
    code: str
    sizing: dict[str, Any]
    memory: dict[str, Any]
    profiles: list[Wanted] = field(default_factory=list)
    lease_timeout: int = 24 * 60
    devices: int = 0

    def write(self, sweep: Path, job: str) -> Path:
        """Write down what the ``job`` is to measure in the sweep's folder; the file."""
        path = request_file(sweep, job)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(self), indent=2) + "\n")
        return path

    @classmethod
    def read(cls, sweep: Path, job: str) -> Request:
        """What the ``job`` is to measure; raises UserError when there is no such request, or it cannot be read."""
        path = request_file(sweep, job)
        run = "run `snakemake probe` with a profile: it writes it when it starts"
        try:
            data = json.loads(path.read_bytes())
            wanted = [Wanted(**{**entry, "profile": Profile(**entry["profile"])}) for entry in data["profiles"]]
            return cls(**{**data, "profiles": wanted})
        except FileNotFoundError:
            raise UserError("--request", job, f"the name of a request in {sweep / FOLDER}", run) from None
        except (OSError, ValueError, TypeError, KeyError):
            raise UserError(str(path), Verbatim("unreadable"), "what a run has written", run) from None
