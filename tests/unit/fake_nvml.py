"""An NVML in memory: the calls, handles and errors that sweepack meets, as the real library gives them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

GIB = 1 << 30


class NVMLError(Exception):
    """The root of NVML's errors; real ones print as their code's text."""


class NVMLError_NotSupported(NVMLError):
    def __str__(self) -> str:
        return "Not Supported"


class NVMLError_NotFound(NVMLError):
    def __str__(self) -> str:
        return "Not Found"


class NVMLError_InvalidArgument(NVMLError):
    def __str__(self) -> str:
        return "Invalid Argument"


class NVMLError_GpuIsLost(NVMLError):
    def __str__(self) -> str:
        return "GPU is lost"


class NVMLError_NoPermission(NVMLError):
    def __str__(self) -> str:
        return "Insufficient Permissions"


class NVMLError_Uninitialized(NVMLError):
    def __str__(self) -> str:
        return "Uninitialized"


class NVMLError_LibraryNotFound(NVMLError):
    def __str__(self) -> str:
        return "NVML Shared Library Not Found"


@dataclass(frozen=True)
class Process:
    """One that uses a device; ``memory`` in bytes is None where the driver does not tell, ``kind`` as in nvidia-smi."""

    pid: int
    memory: int | None = 0
    kind: str = "C"


@dataclass(frozen=True)
class Mig:
    """A MIG instance: one compute instance of a GPU instance."""

    uuid: str
    gpu_instance: int
    compute_instance: int = 0
    profile: str = "1g.18gb"
    memory: int = 16 * GIB
    used: int = 0
    processes: tuple[Process, ...] = ()
    lost: bool = False


@dataclass(frozen=True)
class Gpu:
    """A GPU; ``mig`` is None when it cannot do MIG, else the places of its instances, None where one is free.

    ``memory`` and ``used`` are in bytes, ``utilisation`` in percent and ``power`` in milliwatts, None where the GPU
    does not tell; ``private``: its processes may not be seen.
    """

    uuid: str
    name: str = "NVIDIA H200"
    memory: int | None = 141 * GIB
    mig: tuple[Mig | None, ...] | None = None
    mig_mode: bool = False
    lost: bool = False
    used: int = 0
    utilisation: int | None = 0
    power: int | None = 70_000
    processes: tuple[Process, ...] = ()
    private: bool = False


class FakeNvml:
    """Takes the place of the ``pynvml`` module, initialised, on a node with ``gpus`` in the order of the PCI bus."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_NoPermission = NVMLError_NoPermission
    NVMLError_Uninitialized = NVMLError_Uninitialized
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound
    NVMLError_GpuIsLost = NVMLError_GpuIsLost

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = gpus

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if not 0 <= index < len(self.gpus):
            raise NVMLError_InvalidArgument
        if self.gpus[index].lost:
            raise NVMLError_GpuIsLost
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu | Mig:
        handles: list[Gpu | Mig] = [
            *self.gpus,
            *(mig for gpu in self.gpus if gpu.mig_mode for mig in gpu.mig or () if mig),
        ]
        found = next((handle for handle in handles if handle.uuid == uuid), None)
        if found is None:
            raise NVMLError_NotFound
        if found.lost:
            raise NVMLError_GpuIsLost
        return found

    def nvmlDeviceGetUUID(self, handle: Gpu | Mig) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Gpu | Mig) -> str:
        if isinstance(handle, Gpu):
            return handle.name
        parent = next(gpu for gpu in self.gpus if handle in (gpu.mig or ()))
        return f"{parent.name} MIG {handle.profile}"

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu | Mig) -> SimpleNamespace:
        _require_present(handle)
        if handle.memory is None:
            raise NVMLError_NotSupported
        return SimpleNamespace(total=handle.memory, used=handle.used, free=handle.memory - handle.used)

    def nvmlDeviceGetUtilizationRates(self, handle: Gpu | Mig) -> SimpleNamespace:
        _require_present(handle)
        if isinstance(handle, Mig) or handle.mig_mode or handle.utilisation is None:
            raise NVMLError_NotSupported
        return SimpleNamespace(gpu=handle.utilisation, memory=0)

    def nvmlDeviceGetPowerUsage(self, handle: Gpu | Mig) -> int:
        _require_present(handle)
        if isinstance(handle, Mig) or handle.power is None:
            raise NVMLError_NotSupported
        return handle.power

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Gpu | Mig) -> list[SimpleNamespace]:
        return _processes(handle, "C")

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Gpu | Mig) -> list[SimpleNamespace]:
        return _processes(handle, "M")

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Gpu | Mig) -> list[SimpleNamespace]:
        return _processes(handle, "G")

    def nvmlDeviceGetMigMode(self, device: Gpu) -> list[int]:
        if device.mig is None:
            raise NVMLError_NotSupported
        return [int(device.mig_mode), int(device.mig_mode)]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Gpu) -> int:
        return len(device.mig or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Gpu, index: int) -> Mig:
        instance = (device.mig or ())[index] if device.mig_mode else None
        if instance is None:
            raise NVMLError_NotFound
        return instance

    def nvmlDeviceGetGpuInstanceId(self, device: Mig) -> int:
        return device.gpu_instance

    def nvmlDeviceGetComputeInstanceId(self, device: Mig) -> int:
        return device.compute_instance


def _require_present(handle: Gpu | Mig) -> None:
    if handle.lost:
        raise NVMLError_GpuIsLost


def _processes(handle: Gpu | Mig, kind: str) -> list[SimpleNamespace]:
    _require_present(handle)
    if isinstance(handle, Gpu) and handle.private:
        raise NVMLError_NoPermission
    return [
        SimpleNamespace(pid=process.pid, usedGpuMemory=process.memory, gpuInstanceId=None, computeInstanceId=None)
        for process in handle.processes
        if kind in process.kind
    ]
