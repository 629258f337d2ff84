"""Pins: what was measured of a memory profile on a model of device, kept in files that the plan reads.

Standard library only. A profile is what decides how much memory a cell takes: its task and the parameters that matter,
its share (which is its cap) and what is to be found. The model of device is part of a pin, not of a cell.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sweepack.files import write_atomic

FOLDER = "pins"
SEED = "seed"


@dataclass(frozen=True)
class Profile:
    """What is measured once for all cells that have it.

    ``params`` are those that matter, ``share`` is in thousandths of a device or None where the share is to be found,
    ``batch`` is a number, None (the task's own) or ``"auto"`` where it is to be found. ``threads`` and ``mem_mb`` are
    what a cell gets; ``settings`` are those of torch's allocator and of the cap.
    """

    task: str
    params: dict[str, Any]
    share: int | None
    batch: int | str | None
    threads: int = 1
    mem_mb: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that stand for the whole profile."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Pin:
    """What was measured of the profile ``key`` on the device model ``device`` of ``total`` bytes.

    ``batch`` is what cells get (None: the task's own, or none fits), ``largest`` the largest that was measured to fit,
    ``peak`` the bytes at ``batch``, by ``source``. ``static`` and ``sample`` are intercept and slope (M_static and
    M_sample, bytes and bytes a sample) between the two largest batches that fit, None where only one was measured.
    ``cap`` is the limit in bytes under which it was measured, ``limited_by`` what kept the batch from being larger,
    ``trouble`` why nothing fits (then ``batch`` and ``peak`` are None). ``measured`` has a mapping for each batch.
    ``code`` is the digest of the task's file, ``at`` the Unix time in seconds.
    """

    key: str
    device: str
    total: int
    batch: int | None
    largest: int | None
    peak: int | None
    source: str
    static: float | None = None
    sample: float | None = None
    cap: int | None = None
    limited_by: str | None = None
    trouble: str | None = None
    measured: list[dict[str, Any]] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)
    code: str | None = None
    at: float | None = None

    def counts(self, code: str) -> bool:
        """Whether it counts for a task whose file has the digest ``code``: once changed, what did not fit may."""
        return not self.trouble or self.code == code

    def write(self, sweep: Path) -> Path:
        """Keep it among the sweep's pins, in place of an earlier one of the same profile and model; its file."""
        folder = sweep / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        model = re.sub(r"[^A-Za-z0-9]+", "-", self.device).strip("-").lower() or "device"
        path = folder / f"{self.key}-{model}.json"
        write_atomic(path, json.dumps(asdict(self), indent=2) + "\n")
        return path


def read_pins(sweep: Path) -> dict[str, dict[str, Pin]]:
    """The pins of the sweep in the folder ``sweep``, by profile key and model; unreadable files count as none."""
    found: dict[str, dict[str, Pin]] = {}
    for path in sorted((sweep / FOLDER).glob("*.json")):
        if pin := _read(path):
            found.setdefault(pin.key, {})[pin.device] = pin
    return found


def _read(path: Path) -> Pin | None:
    names = {entry.name for entry in fields(Pin)}
    try:
        data = json.loads(path.read_bytes())
        return Pin(**{name: value for name, value in data.items() if name in names})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def relevant(params: Mapping[str, Any], ignore: Iterable[str]) -> dict[str, Any]:
    """``params`` without ``seed`` and those that ``ignore`` names (dotted names reach into mappings)."""
    dropped = {SEED, *ignore}

    def kept(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        return {
            name: kept(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
            for name, value in values.items()
            if f"{prefix}{name}" not in dropped
        }

    return kept(params, "")
