"""Errors of torch, CUDA and the C library as people have met them, and what they mean for a cell by the numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import FakeNvml, Gpu, NVMLError
from sweepack import neighbours, oom
from sweepack.job import Job
from sweepack.neighbours import Others, Process
from sweepack.oom import about_gpu, tell
from sweepack.records import Record, State

GIB = 2**30
GPU = "GPU-11111111-2222-3333-4444-555555555555"
MEMORY = {"reserve": 300, "overhead": 600, "limit_main": True}
FULL = (
    "CUDA out of memory. Tried to allocate {request}. GPU 0 has a total capacity of 139.72 GiB of which {free} is "
    "free. Including non-PyTorch memory, this process has {used} memory in use. {allowed}Of the allocated memory "
    "{allocated} is allocated by PyTorch, and {idle} is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
    "See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
DSA = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)


class OutOfMemoryError(RuntimeError):
    pass


class AcceleratorError(RuntimeError):
    pass


def job(share=250, kind="cuda", **more):
    facts: dict[str, Any] = {"mem_mb": 0, "memory": MEMORY, **more}
    return Job("/cells/0123456789ab", "cuda:0 NVIDIA H200", kind, True, share, 1, 0, False, (), 2, **facts)


def failed(error):
    return Record("0123456789ab", State.FAILED, 1, share=250, error=f"{type(error).__name__}: {error}")


@pytest.fixture
def device(monkeypatch):
    """Sets what torch's allocator has on its books of a device of 139.7 GiB, and which cap is in force."""

    def set_up(reserved=12.9, allocated=12.5, cap=13.6, total=139.72, index=0):
        stats = {
            "reserved_bytes.all.current": round(reserved * GIB),
            "allocated_bytes.all.current": round(allocated * GIB),
        }
        properties = SimpleNamespace(total_memory=round(total * GIB), name="NVIDIA H200")
        cuda = SimpleNamespace(get_device_properties=lambda index: properties, memory_stats=lambda index: stats)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(oom, "_watch", oom._Watch(cap and round(cap * GIB), index))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPU)
        monkeypatch.setattr(neighbours, "load_nvml", lambda: None)
        return stats

    return set_up


def full(request="2.00 GiB", allocated="12.50 GiB", idle="409.60 MiB", free="99.00 GiB", allowed="13.60 GiB allowed; "):
    text = FULL.format(request=request, allocated=allocated, idle=idle, free=free, used="13.40 GiB", allowed=allowed)
    return OutOfMemoryError(text)


def test_at_its_cap_the_line_has_the_numbers_and_what_helps(device):
    device()
    record = tell(full(), failed(full()), job())
    assert (record.status, record.failure, record.outgrown) == (State.FAILED, "oom_cap", 250)
    first, second, *_ = (record.error or "").splitlines()
    assert first == (
        "oom_cap: asked for 2.00 GiB beside 12.90 GiB reserved, but the cell's cap is 13.60 GiB (0.25 of NVIDIA H200); "
        "what helps: a smaller batch, activation checkpointing, or a larger share (`gpu: 0.5`, or "
        "`retry: {oom: next_share}`)"
    )
    assert second.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("allowed", ["", "13.60 GiB allowed; "])
def test_the_word_allowed_proves_nothing(device, allowed):
    # The reserved and the request are what decide: 6 + 2 GiB is far below the cap.
    device(reserved=6, allocated=6)
    error = full(allocated="6.00 GiB", idle="0 bytes", free="1.00 GiB", allowed=allowed)
    record = tell(error, failed(error), job())
    assert (record.status, record.failure, record.outgrown) == (State.INTERRUPTED, "oom_neighbour", None)
    device(reserved=12.9)
    assert tell(full(allowed=allowed), failed(full()), job()).failure == "oom_cap"


def test_a_request_that_just_fits_the_cap_is_not_the_cells_doing(device):
    device(reserved=11.5, allocated=11.5)
    for request, kind in (("2.09 GiB", "oom_neighbour"), ("2.10 GiB", "oom_cap"), ("2.12 GiB", "oom_cap")):
        error = full(request=request, allocated="11.50 GiB", idle="0 bytes")
        assert tell(error, failed(error), job()).failure == kind


def test_what_the_allocator_told_at_the_failure_counts_and_not_what_is_left_after(device):
    stats = device(reserved=12.9)
    oom._note(0, 2 * GIB, round(13.6 * GIB), 5 * GIB)
    # Lightning moves the model to the CPU and empties the cache before the error gets here.
    stats.update({"reserved_bytes.all.current": 0, "allocated_bytes.all.current": 0})
    error = OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")
    record = tell(error, failed(error), job())
    assert record.failure == "oom_cap" and "beside 12.90 GiB reserved" in (record.error or "")
    # Of another, earlier failure that the task has got over.
    other = full(request="3.00 GiB", allocated="2.00 GiB", idle="0 bytes")
    assert tell(other, failed(other), job()).failure == "oom_neighbour"


def test_without_its_word_the_texts_own_numbers_outlive_an_emptied_cache(device):
    device(reserved=0, allocated=0)
    assert "beside 12.90 GiB reserved" in (tell(full(), failed(full()), job()).error or "")


def test_memory_that_lies_idle_in_fragments_is_told(device):
    device(reserved=12.9, allocated=8.0)
    error = full(allocated="8.00 GiB", idle="4.90 GiB")
    text = tell(error, failed(error), job()).error or ""
    assert "4.90 GiB of what is reserved lies idle in fragments: try `memory: {expandable_segments: true}`" in text
    set_already = tell(error, failed(error), job(memory={**MEMORY, "expandable_segments": True})).error or ""
    assert "fragments" in set_already and "try `memory" not in set_already


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 31.75 GiB total capacity; 612.33 MiB already "
        "allocated; 14.75 MiB free; 622.00 MiB reserved in total by PyTorch)",
        "CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of which 0 bytes is "
        "free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but "
        "unallocated.",
        "CUDA out of memory. Tried to allocate 900.00 MiB. GPU 0 has a total capacity of 79.19 GiB of which 679.38 MiB "
        "is free. Process 42728 has 3.66 GiB memory in use. Of the allocated memory 5.60 GiB is allocated by PyTorch, "
        "with 2.98 GiB allocated in private pools (e.g., CUDA Graphs), and 1.35 GiB is reserved by PyTorch but "
        "unallocated.",
        "HIP out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 63.98 GiB of which 0 bytes is "
        "free.",
        f"CUDA error: out of memory{DSA}",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "Allocation on device 0 would exceed allowed memory. (out of memory)",
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled cuda error, NCCL version 2.21.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        "Caught OutOfMemoryError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of …",
    ],
)
def test_below_its_cap_it_is_somebody_elses_doing(device, text):
    device(reserved=2, allocated=2)
    error = AcceleratorError(text) if "CUDA error" in text else OutOfMemoryError(text)
    record = tell(error, failed(error), job())
    assert (record.status, record.failure) == (State.INTERRUPTED, "oom_neighbour")
    assert "below the cell's cap of 13.60 GiB" in (record.error or "").splitlines()[0]


def test_with_a_device_to_itself_it_is_short_by_its_own_doing(device):
    for reserved, kind in ((138.5, "oom_cap"), (60.0, "oom_neighbour")):
        device(reserved=reserved, allocated=reserved, cap=None)
        error = full(allocated=f"{reserved:.2f} GiB", idle="0 bytes", allowed="")
        record = tell(error, failed(error), job(share=1000))
        assert record.failure == kind
        library = AcceleratorError(f"CUDA error: out of memory{DSA}")
        assert tell(library, failed(library), job(share=1000)).failure == ("oom_neighbour" if reserved == 60 else kind)
        if kind == "oom_cap":
            assert "there is no more than 138.88 GiB" in (record.error or "") and "gpus_per_node" in record.error


@pytest.mark.parametrize(
    "text",
    [
        f"CUDA error: uncorrectable ECC error encountered{DSA}",
        f"CUDA error: CUDA-capable device(s) is/are busy or unavailable{DSA}",
        f"CUDA error: uncorrectable NVLink error detected during the execution{DSA}",
        "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
        "CUDA error: no CUDA-capable device is detected",
        "CUDA error: system not yet initialized",
        "cuda runtime error (39) : uncorrectable ECC error encountered at /pytorch/aten/src/THC/THCGeneral.cpp:265",
        "cudaErrorECCUncorrectable: uncorrectable ECC error encountered",
        "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the system to recover it",
        "NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.",
    ],
)
def test_a_device_that_is_gone_is_not_the_cells_doing(device, text):
    device()
    record = tell(RuntimeError(text), failed(RuntimeError(text)), job())
    assert (record.status, record.failure) == (State.INTERRUPTED, "device_lost")
    first, *rest = (record.error or "").splitlines()
    assert first.startswith("device_lost: cuda:0 NVIDIA H200 has failed or cannot be had (") and rest
    # Said by a cell that has no GPU it is about something else.
    on_cpu = failed(RuntimeError(text))
    assert tell(RuntimeError(text), on_cpu, job(kind="cpu")) is on_cpu


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such luck"),
        RuntimeError("CUDA error: an illegal memory access was encountered" + DSA),
        RuntimeError("CUDA error: device-side assert triggered" + DSA),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: …"),
    ],
)
def test_an_unknown_error_is_left_as_it_is(device, error):
    device()
    record = failed(error)
    assert tell(error, record, job()) is record


def test_an_interruption_stays_one(device):
    device()
    record = Record("0123456789ab", State.INTERRUPTED, 1, error="stopped by SIGTERM")
    assert tell(full(), record, job()) is record


def test_a_wrapped_error_counts_and_one_that_was_dealt_with_does_not(device):
    device()

    def raised(inner, how):
        try:
            try:
                raise inner
            except RuntimeError as error:
                if how == "cause":
                    raise TypeError("the trainer failed") from error
                if how == "none":
                    raise TypeError("the trainer failed") from None
                raise TypeError("the trainer failed")  # noqa: B904 (so it happens)
        except TypeError as error:
            return error

    group = ExceptionGroup("several", [ValueError("x"), full()])
    for error in (raised(full(), "cause"), raised(full(), "context"), group):
        record = tell(error, failed(error), job())
        # The line about memory, then the error as it was.
        assert record.failure == "oom_cap" and (record.error or "").partition("\n")[2] == failed(error).error
    error = raised(full(), "none")
    assert tell(error, failed(error), job()).failure is None
    error.__cause__ = error  # a circle
    assert tell(error, failed(error), job()).failure is None


def test_telling_never_fails_the_cell(device, monkeypatch, capsys):
    device()
    monkeypatch.setattr(sys.modules["torch"].cuda, "memory_stats", lambda index: 1 / 0)
    record = failed(full())
    assert tell(full(), record, job()) is record
    assert "ZeroDivisionError" in capsys.readouterr().err
    oom._note(0, 1, 2, 3)


class Crowded(FakeNvml):
    """With processes on its one GPU, and ways of not telling them."""

    def __init__(self, processes=(), free=0, trouble=None, lost=False):
        super().__init__(Gpu(GPU))
        self.processes, self.free, self.trouble, self.lost = processes, free, trouble, lost

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if self.lost:
            raise type("NVMLError_GpuIsLost", (NVMLError,), {"__str__": lambda self: "GPU is lost"})
        assert uuid == GPU
        return self.gpus[0]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=handle.memory, free=self.free)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        if self.trouble:
            raise self.trouble
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle):
        raise self.NVMLError_NotSupported

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        return []

    def nvmlSystemGetProcessName(self, pid):
        return "/usr/bin/blender"


def neighbour_line(device, monkeypatch, nvml, job=job):
    device(reserved=6, allocated=6)
    monkeypatch.setattr(neighbours, "load_nvml", lambda: nvml)
    error = full(allocated="6.00 GiB", idle="0 bytes", free="1.00 GiB")
    return (tell(error, failed(error), job()).error or "").splitlines()[0]


def test_the_processes_that_nvml_sees_are_named(device, monkeypatch, tmp_path):
    lock = tmp_path / "cells" / "00000000000a" / "lock"
    lock.parent.mkdir(parents=True)
    # A process of a cell holds its lock.
    with lock.open("w") as held, subprocess.Popen(["sleep", "60"], stdout=held) as cell:
        seen = [(os.getpid(), 6 * GIB), (2**22 + 1, 60 * GIB), (cell.pid, 3 * GIB)]
        line = neighbour_line(device, monkeypatch, Crowded(seen, free=GIB))
        cell.kill()
    assert line.startswith(
        "oom_neighbour: asked for 2.00 GiB beside 6.00 GiB reserved, below the cell's cap of 13.60 GiB"
    )
    assert f"pid {2**22 + 1} (blender, 60.00 GiB), pid {cell.pid} (cell 00000000000a, 3.00 GiB)" in line
    assert f"pid {os.getpid()}" not in line and "1.00 GiB left" in line and "stays pending" in line


@pytest.mark.parametrize(
    ("nvml", "said"),
    [
        (None, "who has the rest is not known (NVML is not there or does not answer)"),
        (Crowded(trouble=FakeNvml.NVMLError_NotSupported()), "who has the rest is not known (NVML: Not Supported)"),
        (Crowded([(os.getpid(), GIB)]), "NVML sees no other process on it"),
        (Crowded([(1, None), (os.getpid(), None)]), "NVML tells no sizes in containers"),
        (Crowded([(2**22 + 1, GIB)]), "pids as the host counts them, this cell's among them"),
    ],
)
def test_what_nvml_does_not_tell_is_said(device, monkeypatch, nvml, said):
    assert said in neighbour_line(device, monkeypatch, nvml)


def test_an_nvml_that_hangs_is_not_waited_for(device, monkeypatch):
    import threading

    monkeypatch.setattr(neighbours, "ANSWER_SECONDS", 0.05)
    never = threading.Event()
    device(reserved=6, allocated=6)
    monkeypatch.setattr(neighbours, "load_nvml", never.wait)
    error = full(allocated="6.00 GiB", idle="0 bytes")
    assert "NVML did not answer" in (tell(error, failed(error), job()).error or "")
    never.set()


def test_what_nvml_says_is_lost_is_lost_whatever_the_error(device, monkeypatch):
    device()
    monkeypatch.setattr(neighbours, "load_nvml", lambda: Crowded(lost=True))
    for text in ("CUDA error: unspecified launch failure", "CUDA error: out of memory", "CUDA error: unknown error"):
        error = AcceleratorError(text + DSA)
        record = tell(error, failed(error), job())
        assert record.failure == "device_lost" and "GPU is lost" in (record.error or "").splitlines()[0]


def test_held_by_mps_to_its_share_it_is_the_cells_doing():
    usage = oom.Usage(6 * GIB, 6 * GIB, None, 13 * GIB, 139 * GIB, free=20 * GIB)
    told = {"variables": {oom.MPS_LIMIT: "0=14000M"}}
    assert about_gpu(usage, job(mps=told), Others(free=20 * GIB))[0] == "oom_cap"
    assert about_gpu(usage, job(mps=told), Others(free=0))[0] == "oom_neighbour"
    assert about_gpu(usage, job(mps=told), Others(trouble="no NVML"))[0] == "oom_neighbour"
    assert about_gpu(usage, job(), Others(free=20 * GIB))[0] == "oom_neighbour"


def test_many_processes_are_counted_beyond_the_largest():
    text = str(Others([Process(pid, "python", pid * GIB) for pid in range(1, 12)]))
    assert text.startswith("on it are pid 11 (python, 11.00 GiB)") and text.endswith("and 3 more")
