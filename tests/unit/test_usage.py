"""What is said of a cell's use of its GPU: by NVML, of real processes, with the source or the reason of each number."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from fake_nvml import GIB, FakeNvml, Gpu, Mig, Process
from sweepack import usage
from sweepack.job import Job
from sweepack.records import CellFiles, Record, State
from sweepack.usage import Usage, is_below, number, on_gpu, read_device, read_usage, sampled

UUID = "GPU-11111111-2222-3333-4444-555555555555"
# A cell with a child in a session of its own, whose parent has ended; it writes its number down and waits.
CELL = """
import os, subprocess, sys
from sweepack import orphans
orphans.adopt()
grandchild = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True)"
subprocess.run([sys.executable, "-c", child])
sys.stdin.read()
"""


@pytest.fixture
def cell():
    """The process of a cell, and the one that it has left running."""
    process = subprocess.Popen([sys.executable, "-c", CELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    grandchild = int(process.stdout.readline())
    yield process.pid, grandchild
    subprocess.run(["kill", "-9", str(grandchild), str(process.pid)])
    process.communicate()


@pytest.fixture
def neighbour():
    process = subprocess.Popen(["sleep", "1000"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def node(monkeypatch):
    """Puts GPUs into this machine; samples are taken quickly."""
    monkeypatch.setattr(usage, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(usage, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(usage, "_readings", {})

    def have(*gpus):
        nvml = FakeNvml(*gpus) if gpus else None
        monkeypatch.setattr(usage, "load_nvml", lambda: nvml)
        return nvml

    return have


def job(folder, kind="cuda", share=500):
    return Job(str(folder), "label", kind, True, share, 1, 0, False, (), 2)


def seen(handle, pid, shared=True):
    """The summary of one reading."""
    found = Usage(pid, shared)
    found.add(read_device(FakeNvml(handle), handle))
    return found.summary()


def watch(folder, pid, device=UUID, until=None, **job_facts):
    """What is written of a cell that is watched until something has been read (or ``until`` holds)."""
    with sampled(job(folder, **job_facts), {"CUDA_VISIBLE_DEVICES": device}, pid):
        end = time.monotonic() + 20
        while time.monotonic() < end and not (until() if until else usage._readings):
            time.sleep(0.01)
    return json.loads((folder / "usage.json").read_text())


def test_memory_is_that_of_the_cells_processes_and_the_rest_is_the_devices(cell, neighbour):
    processes = (
        Process(cell[0], GIB),
        Process(cell[1], 2 * GIB, "C+G"),  # in two lists, counted once
        Process(neighbour, 8 * GIB),
        Process(4_000_000, 4 * GIB),  # of another machine's numbers
    )
    found = seen(Gpu(UUID, used=20 * GIB, utilisation=70, power=312_000, processes=processes), cell[0])
    assert found["cell_memory"] == {
        "mean": 3,
        "peak": 3,
        "unit": "GiB",
        "samples": 1,
        "source": "NVML, this cell's processes",
    }
    shared = {"samples": 1, "source": "NVML, whole device, shared with others"}
    assert found["device_memory"] == {"mean": 20, "peak": 20, "unit": "GiB", **shared}
    assert found["utilisation"] == {"mean": 70, "peak": 70, "unit": "%", **shared}
    assert found["power"] == {"mean": 312, "peak": 312, "unit": "W", **shared}


def test_a_client_of_mps_is_found_too(cell):
    gpu = Gpu(UUID, processes=(Process(cell[0], GIB, "M"), Process(1, GIB, "C")))
    assert seen(gpu, cell[0])["cell_memory"]["peak"] == 1


def test_means_and_peaks(cell):
    found = Usage(cell[0], shared=False)
    for memory, utilisation in ((1, 10), (4, 30), (None, 80)):
        processes = (Process(cell[0], memory * GIB),) if memory else ()
        gpu = Gpu(UUID, utilisation=utilisation, processes=processes)
        found.add(read_device(FakeNvml(gpu), gpu))
    summary = found.summary()
    # Where it was not on the device there is nothing to count.
    assert summary["cell_memory"] | {"mean": 2.5, "peak": 4, "samples": 2} == summary["cell_memory"]
    assert summary["utilisation"] | {"mean": 40, "peak": 80, "samples": 3} == summary["utilisation"]
    assert summary["utilisation"]["source"] == "NVML, whole device"


@pytest.mark.parametrize(
    ("gpu", "missing"),
    [
        (Gpu(UUID, utilisation=None, power=None), {"utilisation": "Not Supported", "power": "Not Supported"}),
        (Gpu(UUID, memory=None), {"device_memory": "Not Supported"}),
        (Gpu(UUID, private=True), {"cell_memory": "Insufficient Permissions"}),
        (Mig("MIG-1", 1), {"utilisation": "Not Supported", "power": "Not Supported"}),
        (Gpu(UUID, lost=True), dict.fromkeys(usage.UNITS, "GPU is lost")),
    ],
)
def test_what_nvml_cannot_tell_has_its_reason(gpu, missing, cell):
    if not getattr(gpu, "private", False):
        gpu = replace(gpu, processes=(Process(cell[0], GIB),))
    found = seen(gpu, cell[0])
    for name in usage.UNITS:
        if name in missing:
            assert found[name] == {"samples": 0, "why": f"NVML: {missing[name]}"}
        else:
            assert found[name]["samples"] == 1 and "source" in found[name]


def test_a_cell_that_nvml_does_not_show_has_its_reason(cell, neighbour, monkeypatch):
    assert "no process used the device" in seen(Gpu(UUID), cell[0])["cell_memory"]["why"]
    assert "does not tell" in seen(Gpu(UUID, processes=(Process(cell[0], None),)), cell[0])["cell_memory"]["why"]
    others = Gpu(UUID, processes=(Process(neighbour, GIB), Process(4_000_000, GIB)))
    monkeypatch.setattr(usage, "_sees_host", lambda: True)
    assert seen(others, cell[0])["cell_memory"]["why"] == "NVML named 2 processes on the device, none of this cell"
    monkeypatch.setattr(usage, "_sees_host", lambda: False)
    assert "this is a container" in seen(others, cell[0])["cell_memory"]["why"]


def test_the_tree_of_a_process(cell, neighbour):
    assert is_below(cell[0], cell[0]) and is_below(cell[1], cell[0])
    assert not is_below(cell[0], cell[1]) and not is_below(neighbour, cell[0]) and not is_below(4_000_000, cell[0])


def test_a_running_cell_is_sampled_to_its_end(node, cell, tmp_path, monkeypatch):
    nvml = node(Gpu(UUID, utilisation=10, processes=(Process(cell[0], GIB),)))
    samples = []

    def load():
        samples.append(0)
        if len(samples) == 3:
            nvml.gpus = (Gpu(UUID, utilisation=90, processes=(Process(cell[0], 5 * GIB), Process(cell[1], GIB))),)
        return nvml

    monkeypatch.setattr(usage, "load_nvml", load)
    before = threading.active_count()
    found = watch(tmp_path, cell[0], until=lambda: len(samples) > 6)
    assert threading.active_count() == before
    assert found["cell_memory"]["peak"] == 6 and 1 < found["cell_memory"]["mean"] < 6
    assert found["utilisation"]["samples"] >= 5


def test_a_mig_instance_is_read_by_its_own_name(node, cell, tmp_path):
    instance = Mig("MIG-a", 1, processes=(Process(cell[0], 3 * GIB),), used=4 * GIB)
    node(Gpu(UUID, mig=(None, instance), mig_mode=True))
    found = watch(tmp_path, cell[0], "MIG-a")
    assert (found["cell_memory"]["peak"], found["device_memory"]["peak"]) == (3, 4)
    assert found["power"]["why"] == "NVML: Not Supported"


@pytest.mark.parametrize(
    ("gpus", "device", "why"),
    [
        ((), UUID, "NVML does not answer here"),
        ((Gpu("GPU-2"),), UUID, "NVML: Not Found"),
        ((Gpu(UUID, lost=True),), UUID, "NVML: GPU is lost"),
        ((Gpu(UUID),), "0", "which of NVML's devices"),
    ],
)
def test_a_device_that_cannot_be_read_is_no_error(node, cell, tmp_path, gpus, device, why):
    node(*gpus)
    found = watch(tmp_path, cell[0], device)
    assert all(why in found[name]["why"] for name in usage.UNITS)


def test_an_nvml_that_breaks_or_hangs_neither_fails_nor_holds_a_cell(node, cell, tmp_path, monkeypatch):
    node()
    monkeypatch.setattr(usage, "load_nvml", lambda: 1 / 0)
    monkeypatch.setattr(usage, "_PATIENCE_SECONDS", 0.2)
    assert "ZeroDivisionError" in watch(tmp_path, cell[0], until=lambda: time.sleep(0.1) or True)["power"]["why"]
    stuck, release = threading.Event(), threading.Event()
    monkeypatch.setattr(usage, "load_nvml", lambda: stuck.set() or release.wait(60) or None)
    try:
        assert watch(tmp_path, cell[0], until=stuck.is_set)["power"]["why"] == "never sampled"
    finally:
        release.set()


def test_nothing_is_done_without_a_gpu_or_left_of_an_earlier_attempt(node, cell, tmp_path, monkeypatch):
    node(Gpu(UUID))
    with sampled(job(tmp_path, kind="cpu"), {}, cell[0]):
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("usage")]
    (tmp_path / "usage.json").write_text("{}")
    monkeypatch.setattr(usage, "FIRST_SECONDS", 1000)
    with sampled(job(tmp_path), {"CUDA_VISIBLE_DEVICES": UUID}, cell[0]):
        pass  # ends before the first sample
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_no_error(node, cell, tmp_path):
    node(Gpu(UUID))
    with sampled(job(tmp_path / "gone"), {"CUDA_VISIBLE_DEVICES": UUID}, cell[0]):
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("device", "world_size", "counts"),
    [("cuda:0 NVIDIA H200", None, True), ("cpu", None, False), ("sim:0", None, False), ("cuda:0, cuda:1", 2, False)],
)
def test_it_is_looked_for_with_cells_on_one_gpu_only(device, world_size, counts):
    assert on_gpu(Record("c", State.FINISHED, 1, device=device, world_size=world_size)) is counts


def test_a_broken_file_is_as_none(tmp_path):
    files = CellFiles(tmp_path)
    for text in (None, "", "[]", "{"):
        if text is not None:
            files.usage.write_text(text)
        assert read_usage(files) == {}
    files.usage.write_text('{"power": {"mean": 1, "peak": NaN}, "utilisation": 3}')
    found = read_usage(files)
    assert [number(found, *which) for which in (("power", "mean"), ("power", "peak"), ("utilisation", "mean"))] == [
        *(1, None, None),
    ]
