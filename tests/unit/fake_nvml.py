"""An NVML in memory: the calls, handles and errors that ``sweepack.devices`` meets, as the real library gives them."""

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


@dataclass(frozen=True)
class Mig:
    """A MIG instance: one compute instance of a GPU instance."""

    uuid: str
    gpu_instance: int
    compute_instance: int = 0
    profile: str = "1g.18gb"
    memory: int = 16 * GIB


@dataclass(frozen=True)
class Gpu:
    """A GPU; ``mig`` is None when it cannot do MIG, else the places of its instances, None where one is free."""

    uuid: str
    name: str = "NVIDIA H200"
    memory: int | None = 141 * GIB
    mig: tuple[Mig | None, ...] | None = None
    mig_mode: bool = False
    lost: bool = False


class FakeNvml:
    """Takes the place of the ``pynvml`` module, initialised, on a node with ``gpus`` in the order of the PCI bus."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported

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

    def nvmlDeviceGetUUID(self, handle: Gpu | Mig) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Gpu | Mig) -> str:
        if isinstance(handle, Gpu):
            return handle.name
        parent = next(gpu for gpu in self.gpus if handle in (gpu.mig or ()))
        return f"{parent.name} MIG {handle.profile}"

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu | Mig) -> SimpleNamespace:
        if handle.memory is None:
            raise NVMLError_NotSupported
        return SimpleNamespace(total=handle.memory)

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
