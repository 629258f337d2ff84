"""What a run says of its cells' use of a GPU, which NVML's stand-in tells it."""

from __future__ import annotations

import json
import os
import sys

import pandas as pd
import pytest
from mps_tools import FAKES, GPU

# The driver comes while the first cells run: of a GPU that it tells torch would have to know too.
TASK = """
import time
from pathlib import Path
import pynvml

def train(cell, *, x: int):
    pynvml.use(cell_gpu, (x + 1) * 2**30)
    pynvml.install(cell_gpu, used=10 * 2**30, utilisation=60, power=250_000)
    Path(f"started-{x}").touch()
    end = time.monotonic() + 60
    while time.monotonic() < end and len(list(Path().glob("started-*"))) < cells:
        time.sleep(0.02)
    time.sleep(2.5)
    return {"score": x}
"""
PROGRAM = """
import json, subprocess, sys, time
child = "import pynvml, sys, time; pynvml.use(sys.argv[1], 3 * 2**30); time.sleep(2.5)"
subprocess.run([sys.executable, "-c", child, sys.argv[2]], check=True)
json.dump({"score": 1}, open(sys.argv[1], "w"))
"""


@pytest.fixture
def gpu(sandbox):
    """The sandbox with a GPU of which only the UUID is known, and a folder that says what NVML knows."""
    folder = sandbox.root.parent / "nvml"
    folder.mkdir()
    del sandbox.environment["SWEEPACK_DEVICES"]
    path = os.pathsep.join(filter(None, [str(FAKES / "nvml"), os.environ.get("PYTHONPATH")]))
    sandbox.environment |= {"CUDA_VISIBLE_DEVICES": GPU, "PYTHONPATH": path, "FAKE_NVML": str(folder)}
    sandbox.nvml = folder
    return sandbox


def usage(record):
    return json.loads((record["dir"] / "usage.json").read_text())


@pytest.mark.parametrize(
    ("count", "settings"),
    [(2, {"cells_per_job": 2}), (1, {"cells_per_job": 1}), (1, {"start": "fresh"})],
)
def test_each_cell_has_its_own_memory_and_the_device_its_utilisation(gpu, count, settings):
    gpu.write("task.py", f"cell_gpu, cells = {GPU!r}, {count}\n{TASK}")
    axes = {"x": {"range": count}}
    gpu.config(sweep={"name": "test", "task": "task.py:train", "axes": axes}, resources=[{"gpu": 0.5}], **settings)
    gpu.snakemake("--cores", "2")
    table = pd.read_parquet(gpu.root / "results/test/table.parquet").sort_values("params.x")
    assert table["gpu_memory_gib"].tolist() == [x + 1 for x in range(count)]
    assert set(table["gpu_util"]) == {60} and set(table["gpu_power_w"]) == {250}
    for record in gpu.cells().values():
        found = usage(record)
        assert found["cell_memory"]["source"] == "NVML, this cell's processes"
        assert found["power"]["source"] == "NVML, whole device, shared with others"
        log = (record["dir"] / "log.txt").read_text()
        assert ("started fresh" not in log) or "start" in settings
    assert gpu.sweepack("rerun", "--no-run", next(iter(gpu.cells())))
    assert len(list(gpu.root.glob("results/test/cells/*/attempts/1/usage.json"))) == 1


def test_what_a_program_starts_counts_as_its_own(gpu):
    (gpu.nvml / f"{GPU}.json").write_text('{"used": 5368709120}')
    gpu.write("program.py", PROGRAM)
    command = [sys.executable, "program.py", "{metrics}", GPU]
    gpu.config(sweep={"name": "test", "task": {"command": command}}, resources=[{"gpu": 1}])
    gpu.snakemake("--cores", "1")
    (record,) = gpu.cells().values()
    assert usage(record)["cell_memory"]["peak"] == 3
    assert usage(record)["device_memory"]["source"] == "NVML, whole device"


def test_a_run_without_nvml_or_a_gpu_is_as_ever(gpu):
    gpu.write("task.py", "import time\n\ndef train(cell, *, x: int):\n    time.sleep(0.6)\n    return {'score': x}\n")
    gpu.config(sweep={"name": "test", "task": "task.py:train", "axes": {"x": [0]}})
    gpu.snakemake("--cores", "1")
    (record,) = gpu.cells().values()
    assert usage(record)["power"] == {"samples": 0, "why": "NVML does not answer here"}
    gpu.config(sweep={"name": "test", "task": "task.py:train", "axes": {"x": [1]}})
    gpu.snakemake("--cores", "1", SWEEPACK_DEVICES="cpu")
    assert len(list(gpu.root.glob("results/test/cells/*/usage.json"))) == 1
    table = pd.read_parquet(gpu.root / "results/test/table.parquet")
    assert table["gpu_util"].isna().all() and table["status"].tolist() == ["finished"]


def test_a_cell_is_not_forked_from_a_process_that_has_nvml_open(gpu):
    # Of two models only CUDA knows which is which, so that the cell runs, though NVML was asked.
    (gpu.nvml / f"{GPU}.json").write_text("{}")
    (gpu.nvml / "GPU-2.json").write_text('{"name": "NVIDIA T4"}')
    task = "import pynvml, time\n\ndef train(cell):\n    time.sleep(0.6)\n    return {'open': pynvml._initialised}\n"
    gpu.write("task.py", task)
    gpu.config(sweep={"name": "test", "task": "task.py:train"})
    gpu.snakemake("--cores", "1", CUDA_VISIBLE_DEVICES="0")
    (record,) = gpu.cells().values()
    assert record["metrics"] == {"open": 0}
    assert "started fresh" not in (record["dir"] / "log.txt").read_text()
    assert "cannot be told" in usage(record)["power"]["why"]
