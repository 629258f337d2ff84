"""The GPU of this machine for the tests here, and what `tests/gpu/run` gets to know of each of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Sandbox
from sweepack.devices import Device, load_nvml, visible_pool
from sweepack.errors import UserError
from sweepack.mps.daemon import require_usable

RESULTS = "SWEEPACK_GPU_RESULTS"
HERE = Path(__file__).parent


@pytest.fixture
def device() -> Device:
    """The first GPU that may be used, which torch sees too."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    environ = {name: value for name, value in os.environ.items() if name != "SWEEPACK_DEVICES"}
    found = visible_pool(environ, load_nvml())[0]
    if found.kind != "cuda" or found.model is None:
        pytest.skip("NVML tells of no GPU")
    return found


@pytest.fixture
def gpu(device: Device, sandbox: Sandbox) -> Iterator[Sandbox]:
    """The sandbox with that GPU, and leases in a folder with a short path. What a test leaves running is killed."""
    leases = tempfile.mkdtemp(prefix="gpu-")
    del sandbox.environment["SWEEPACK_DEVICES"]
    sandbox.environment |= {"CUDA_VISIBLE_DEVICES": device.entry, "SWEEPACK_LEASES": leases}
    yield sandbox
    for pid in processes_of(sandbox):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(leases, ignore_errors=True)


@pytest.fixture
def mps_gpu(gpu: Sandbox, device: Device) -> Sandbox:
    """The same where MPS can be used."""
    try:
        require_usable([device], os.environ)
    except UserError as error:
        pytest.skip(str(error.value))
    return gpu


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Keeps numbers for the page of results: ``measured(cap="34.3 GiB")``."""

    def keep(**numbers: object) -> None:
        for name, value in numbers.items():
            record_property(name.replace("_", " "), value)

    return keep


def processes_of(sandbox: Sandbox) -> list[int]:
    """The processes that work in the sandbox's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(sandbox.root):
                found.append(int(process.name))
    return found


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """All of them first: of those that the time does not suffice for nothing more is heard."""
    for item in items:
        if item.path.parent == HERE:
            _tell(item.nodeid, "not reached", "the time was over", 0.0, [])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = ""
        if isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            reason = report.longreprtext.strip().splitlines()[-1]
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message.splitlines()[0] if crash else reason
        _tell(report.nodeid, report.outcome, reason, report.duration, report.user_properties)


def _tell(test: str, outcome: str, reason: str, seconds: float, numbers: Sequence[tuple[str, object]]) -> None:
    if path := os.environ.get(RESULTS):
        line: dict[str, Any] = {"test": test, "outcome": outcome, "reason": reason, "seconds": seconds}
        with open(path, "a") as stream:
            stream.write(json.dumps({**line, "numbers": dict(numbers)}, default=str) + "\n")
