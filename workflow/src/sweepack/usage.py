"""What a cell does to its GPU: NVML is sampled while the cell runs, and a summary is kept in its ``usage.json``.

NVML counts utilisation and power of whole devices only; memory it tells by process. Those of a cell are found by going
up from each process that NVML names, parent by parent: what a cell starts stays below it, whatever session it is in.
Every number comes with its source, or with the reason why there is none. Standard library, and NVML only once a cell
has run for a moment: short ones cost nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweepack.devices import CUDA, Nvml, load_nvml, processes_on
from sweepack.files import write_atomic
from sweepack.job import Job
from sweepack.leases import WHOLE
from sweepack.records import CellFiles, Record

FIRST_SECONDS = 0.25
INTERVAL_SECONDS = 1.0
# A driver that hangs must not keep a cell's end from being told.
_PATIENCE_SECONDS = 1.0
_GIB = 2**30
_HOST_PROCESSES = "pid:[4026531836]"  # the kernel's fixed name for the namespace of the machine itself
USAGE_COLUMNS = {
    "gpu_memory_gib": ("cell_memory", "peak"),
    "gpu_util": ("utilisation", "mean"),
    "gpu_power_w": ("power", "mean"),
}
UNITS = {"cell_memory": "GiB", "device_memory": "GiB", "utilisation": "%", "power": "W"}


@dataclass(frozen=True)
class Reading:
    """A device at one moment: GiB, percent, watts, and bytes by process (None: not told). Text is why one is missing.

    NVML names processes by their numbers in the machine's own namespace.
    """

    device_memory: float | str
    utilisation: float | str
    power: float | str
    processes: dict[int, int | None] | str


@dataclass
class _Number:
    """The values of one number so far; ``why`` is the latest reason for a missing one."""

    total: float = 0.0
    peak: float = 0.0
    samples: int = 0
    why: str = ""

    def add(self, value: float | str) -> None:
        if isinstance(value, str):
            self.why = value
            return
        self.total += value
        self.peak = max(self.peak, value)
        self.samples += 1

    def summary(self, unit: str, source: str) -> dict[str, Any]:
        if not self.samples:
            return {"samples": 0, "why": self.why or "never sampled"}
        values = {"mean": self.total / self.samples, "peak": self.peak}
        rounded = {name: round(value, 4) for name, value in values.items()}
        return {**rounded, "unit": unit, "samples": self.samples, "source": source}


@dataclass
class Usage:
    """Gathers readings of the device of the cell whose process is ``pid``; ``shared``: others may run on it too."""

    pid: int
    shared: bool
    _numbers: dict[str, _Number] = field(default_factory=lambda: {name: _Number() for name in UNITS})

    def add(self, reading: Reading | str) -> None:
        """Count one reading, or the reason why there is none at all."""
        if isinstance(reading, str):
            reading = Reading(reading, reading, reading, reading)
        self._numbers["cell_memory"].add(_of_cell(reading.processes, self.pid))
        self._numbers["device_memory"].add(reading.device_memory)
        self._numbers["utilisation"].add(reading.utilisation)
        self._numbers["power"].add(reading.power)

    def summary(self) -> dict[str, Any]:
        """The content of ``usage.json``."""
        device = "NVML, whole device" + (", shared with others" if self.shared else "")
        return {
            "interval_s": INTERVAL_SECONDS,
            **{
                name: number.summary(UNITS[name], "NVML, this cell's processes" if name == "cell_memory" else device)
                for name, number in self._numbers.items()
            },
        }


@contextlib.contextmanager
def sampled(job: Job, environment: Mapping[str, str], pid: int) -> Iterator[None]:
    """Within the block sample the GPU of ``job``, whose process is ``pid``; then write ``usage.json``. Never raises.

    ``environment`` is the cell's. Nothing is done for a cell without a GPU, or written for one that ends before the
    first sample. No thread is left, unless the driver does not answer.
    """
    if job.kind != "cuda":
        yield
        return
    files = CellFiles(Path(job.directory))
    usage = Usage(pid, shared=job.share < WHOLE)
    stop, begun = threading.Event(), threading.Event()

    def sample() -> None:
        # They are for the main thread, which they are to wake.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pause = FIRST_SECONDS
        while not stop.wait(pause):
            begun.set()
            pause = INTERVAL_SECONDS
            try:
                usage.add(_current(environment.get(CUDA, "")))
            except Exception as error:
                usage.add(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=sample, name=f"usage of {pid}", daemon=True)
    with contextlib.suppress(OSError, RuntimeError):
        files.usage.unlink(missing_ok=True)
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join(_PATIENCE_SECONDS)
        if begun.is_set():
            with contextlib.suppress(OSError):
                write_atomic(files.usage, json.dumps(usage.summary(), indent=2) + "\n", durable=False)


def read_usage(files: CellFiles) -> dict[str, Any]:
    """What ``usage.json`` holds; {} when there is none."""
    try:
        found = json.loads(files.usage.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def on_gpu(record: Record) -> bool:
    """Whether the cell ran on a GPU, and on one only: others are not looked at."""
    device = record.device
    return device is not None and device != "cpu" and not device.startswith("sim:") and record.world_size is None


def number(usage: Mapping[str, Any], name: str, kind: str) -> float | None:
    """The ``kind`` (mean, peak) of the number ``name``, None where there is none."""
    entry = usage.get(name)
    value = entry.get(kind) if isinstance(entry, Mapping) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def usage_columns(usage: Mapping[str, Any]) -> dict[str, float | None]:
    """Its numbers in the table, under ``USAGE_COLUMNS``; {} where there is none."""
    return {column: number(usage, *which) for column, which in USAGE_COLUMNS.items()} if usage else {}


_lock = threading.Lock()
_readings: dict[str, tuple[float, Reading | str]] = {}


def _current(device: str) -> Reading | str:
    """NVML's reading of ``device``, a UUID; the cells of a pack share one. The reason when there is none."""
    with _lock:
        taken, reading = _readings.get(device, (-math.inf, ""))
        if time.monotonic() - taken > INTERVAL_SECONDS / 2:
            reading = _read_by_name(load_nvml(), device)
            _readings[device] = time.monotonic(), reading
    return reading


def _read_by_name(nvml: Nvml | None, device: str) -> Reading | str:
    if nvml is None:
        return "NVML does not answer here"
    if not device.startswith(("GPU-", "MIG-")):
        return "which of NVML's devices this one is cannot be told"
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device)
    except nvml.NVMLError as error:
        return f"NVML: {error}"
    return read_device(nvml, handle)


def read_device(nvml: Nvml, handle: Any) -> Reading:
    """What NVML says now; what it cannot say (on a MIG instance, without permission, of a lost device) is a reason."""

    def ask(call: Callable[[Any], Any]) -> Any:
        try:
            return call(handle)
        except nvml.NVMLError as error:
            return f"NVML: {error}"

    return Reading(
        device_memory=ask(lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB),
        utilisation=ask(lambda handle: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        power=ask(lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        processes=ask(lambda handle: processes_on(nvml, handle)),
    )


def _of_cell(processes: dict[int, int | None] | str, cell: int) -> float | str:
    """GiB of the processes that are ``cell`` or below it."""
    if isinstance(processes, str):
        return processes
    own = [memory for pid, memory in processes.items() if is_below(pid, cell)]
    if not own:
        others = f"NVML named {len(processes)} processes on the device, none of this cell" if processes else ""
        if others and not _sees_host():
            others += ": this is a container, and NVML numbers processes as the machine outside does"
        return others or "no process used the device when it was looked at"
    known = [memory for memory in own if memory is not None]
    return sum(known) / _GIB if len(known) == len(own) else "NVML does not tell memory by process here"


def is_below(pid: int, cell: int) -> bool:
    """Whether process ``pid`` is ``cell`` or descends from it; one whose parent has ended is adopted by the cell."""
    for _ in range(100):
        if pid == cell or pid <= 1:
            break
        try:
            status = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return False
        pid = int(status.rpartition(b")")[2].split()[1])
    return pid == cell


def _sees_host() -> bool:
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _HOST_PROCESSES
    except OSError:
        return True
