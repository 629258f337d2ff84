"""In place of nvidia-ml-py, first on PYTHONPATH: an NVML whose GPUs are files in the folder FAKE_NVML.

``<UUID>.json`` has a GPU's fields (``fake_nvml.Gpu``), ``<UUID>.<pid>`` the bytes that a process uses of it, as long as
it lives. Without any GPU there is no driver.
"""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "unit"))

from fake_nvml import FakeNvml, Gpu, NVMLError, NVMLError_LibraryNotFound, NVMLError_Uninitialized, Process

__all__ = ["NVMLError", "install", "nvmlInit", "nvmlShutdown", "use"]

_initialised = 0


def install(uuid, **fields):
    """Put a GPU, and with it the driver, into the machine."""
    # By rename: it may be looked for just now.
    path = Path(os.environ["FAKE_NVML"], uuid)
    path.with_suffix(f".{os.getpid()}-new").write_text(json.dumps(fields))
    path.with_suffix(f".{os.getpid()}-new").rename(f"{path}.json")


def use(uuid, memory):
    """Let this process take so many bytes."""
    Path(os.environ["FAKE_NVML"], f"{uuid}.{os.getpid()}").write_text(str(memory))


def nvmlInit():
    global _initialised
    if not _gpus():
        raise NVMLError_LibraryNotFound
    _initialised += 1


def nvmlShutdown():
    global _initialised
    if not _initialised:
        raise NVMLError_Uninitialized
    _initialised -= 1


def __getattr__(name):
    if name.startswith("nvmlDevice") and not _initialised:
        raise NVMLError_Uninitialized
    return getattr(FakeNvml(*_gpus()), name)


def _gpus():
    folder = os.environ.get("FAKE_NVML")
    return [_gpu(path) for path in sorted(Path(folder).glob("*.json"))] if folder else []


def _gpu(path):
    users = [int(user.suffix[1:]) for user in path.parent.glob(f"{path.stem}.*") if user.suffix[1:].isdigit()]
    alive = [pid for pid in users if Path(f"/proc/{pid}").exists()]
    processes = tuple(Process(pid, int(path.with_suffix(f".{pid}").read_text())) for pid in alive)
    return Gpu(path.stem, processes=processes, **json.loads(path.read_text()))
