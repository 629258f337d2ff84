"""A cell's memory: the arithmetic of caps, the cap in force before the task and verified, and the peaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_torch_cuda import FakeCuda
from hypothesis import given
from hypothesis import strategies as st
from sweepack import main_memory, memory
from sweepack.environment import cell_environment
from sweepack.job import Job
from sweepack.records import Record

GIB = 2**30
MB = 10**6
SETTINGS = {
    "reserve": 300,
    "overhead": 600,
    "max_split_size_mb": None,
    "expandable_segments": None,
    "limit_main": True,
}
JOB = Job("", "cuda:0", "cuda", True, 250, 1, 0, False, (), 2, memory=SETTINGS, device_memory=80 * GIB)
TOTAL = 80 * GIB

RUN = """
import json, os, sys
import torch
from fake_torch_cuda import FakeCuda
torch.cuda = FakeCuda({total}, **{how})
from sweepack import run
from sweepack.job import Job
code = run.main(Job.from_json(sys.argv[1]))
with open("calls.json", "w") as file:
    json.dump(torch.cuda.calls, file)
os._exit(code)
"""
TASK = """
import torch
torch.cuda.caching_allocator_alloc(2**20)
def train(cell, *, size: int):
    torch.cuda.caching_allocator_alloc(size)
    return {"device": cell.device}
"""


def run_cell(folder: Path, job: Job, *, size: int = 2**30, **how: object) -> tuple[list[str], dict[str, Any]]:
    """Run a cell on a fake GPU, in a process with the environment that it would have; the calls and its record."""
    cell = folder / "cell"
    cell.mkdir()
    (folder / "task.py").write_text(TASK)
    task = {"reference": "task.py:train", "file": "task.py", "module": None, "function": "train", "argv": []}
    meaning = {"id": "cell", "slug": "size=1", "params": {"size": size}, "seed": 1, "task": task}
    (cell / "cell.json").write_text(json.dumps(meaning))
    fraction = memory.fraction(job.share, job.device_memory, job.memory)
    environment = cell_environment(os.environ, visible="0", threads=1, memory=job.memory, fraction=fraction)
    places = [str(Path(__file__).parent), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(places)
    program = RUN.format(total=TOTAL, how=how)
    command = [sys.executable, "-c", program, replace(job, directory=str(cell)).to_json()]
    subprocess.run(command, cwd=folder, env=environment, timeout=120)
    return json.loads((folder / "calls.json").read_text()), json.loads((cell / "status.json").read_text())


@given(
    shares=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    total=st.integers(4 * GIB, 200 * GIB),
    reserve=st.integers(1, 3000),
    overhead=st.integers(1, 2000),
)
def test_all_caps_with_the_overhead_of_each_process_and_the_reserve_fit_the_device(shares, total, reserve, overhead):
    reserve, overhead = reserve * MB, overhead * MB
    together = []
    for share in shares:
        least = memory.least_share(total, reserve, overhead)
        if sum(together) + share <= 1000 and least is not None and share >= least:
            together.append(share)
    caps = [memory.cap(share, total, reserve, overhead) for share in together]
    assert all(limit > 0 for limit in caps)
    assert sum(caps) + len(caps) * overhead + reserve <= total


@given(total=st.integers(GIB // 2, 200 * GIB), reserve=st.integers(1, 3 * GIB), overhead=st.integers(1, 2 * GIB))
def test_the_least_share_is_the_smallest_that_has_a_cap(total, reserve, overhead):
    least = memory.least_share(total, reserve, overhead)
    if least is not None:
        assert memory.cap(least, total, reserve, overhead) > 0
    for share in {1, 1000, (least or 1001) - 1} - {0}:
        if least is None or share < least:
            with pytest.raises(ValueError, match=r"memory\.reserve"):
                memory.cap(share, total, reserve, overhead)


def test_the_formula_of_the_readme():
    # Four cells on 80 GB, 300 MB for the device, 600 MB a process.
    assert memory.cap(250, 80_000 * MB, 300 * MB, 600 * MB) == (80_000 - 300 - 4 * 600) * MB // 4


def test_the_cap_is_in_force_and_verified_before_the_task_is_even_imported(tmp_path):
    calls, record = run_cell(tmp_path, JOB)
    limit = memory.cap_by(SETTINGS, 250, TOTAL)
    assert record["status"] == "finished", record["error"]
    assert calls.index("cap") < calls.index("verified") < calls.index("alloc")
    assert record["memory"] | {"rss": 0} == {
        "total": TOTAL,
        "cap": limit,
        "reserved": 2 * 2**20 + 2**30,
        "allocated": 2**20 + 2**30,
        "rss": 0,
    }
    facts = json.loads((tmp_path / "cell/provenance.json").read_text())
    assert facts["memory_cap"] == limit and facts["memory"] == record["memory"]


@pytest.mark.parametrize("forked", [False, True], ids=["fresh", "forked"])
def test_a_cell_that_goes_over_its_cap_fails_and_its_record_has_the_peak(tmp_path, forked):
    limit = memory.cap_by(SETTINGS, 250, TOTAL)
    _, record = run_cell(tmp_path, JOB, size=limit, option_read=forked)
    assert record["status"] == "failed" and "out of memory" in record["error"]
    assert record["memory"]["cap"] == limit and record["memory"]["reserved"] == 2 * 2**20
    assert record["memory"]["rss"] > 50 * MB


def test_a_cap_that_torch_does_not_take_is_an_error_of_the_cell(tmp_path):
    calls, record = run_cell(tmp_path, JOB, option_read=True, deaf=True)
    assert record["status"] == "failed" and "alloc" not in calls
    assert "memory cap is not in force" in record["error"] and "keeps to 1.000000" in record["error"]


@pytest.mark.parametrize(
    ("reason", "status", "failure"),
    [
        ("No CUDA GPUs are available", "interrupted", "device_lost"),
        (
            "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
            "interrupted",
            "device_lost",
        ),
        ("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it", "failed", None),
    ],
)
def test_a_gpu_that_cuda_does_not_have_is_told_with_its_reason(tmp_path, reason, status, failure):
    _, record = run_cell(tmp_path, JOB, refuses=reason)
    assert (record["status"], record.get("failure")) == (status, failure), record
    assert f"torch sees no GPU, though the cell was given cuda:0 ({reason.splitlines()[0]})" in record["error"]


def test_a_process_that_has_used_cuda_before_its_cap_is_refused(tmp_path):
    calls, record = run_cell(tmp_path, JOB, initialised=True)
    assert "CUDA was initialised before the cell's memory cap" in record["error"] and "alloc" not in calls


def test_a_whole_device_is_not_capped_and_provenance_says_so(tmp_path):
    calls, record = run_cell(tmp_path, replace(JOB, share=1000), size=70 * GIB)
    assert record["status"] == "finished" and "cap" not in calls
    assert record["memory"]["cap"] is None and record["memory"]["reserved"] > 70 * GIB
    facts = json.loads((tmp_path / "cell/provenance.json").read_text())
    assert facts["memory_cap"] is None and "whole device" in facts["memory_cap_reason"]


def test_the_environment_alone_holds_a_program_that_knows_nothing_of_us(monkeypatch):
    limit = memory.cap_by(SETTINGS, 250, TOTAL)
    fraction = memory.fraction(250, TOTAL, SETTINGS)
    environment = cell_environment({}, visible="0", threads=1, memory=SETTINGS, fraction=fraction)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", environment["PYTORCH_CUDA_ALLOC_CONF"])
    program = FakeCuda(TOTAL)
    program.caching_allocator_alloc(limit - 4 * 2**20)
    with pytest.raises(Exception, match="out of memory"):
        program.caching_allocator_alloc(5 * 2**20)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"share": 1000}, "whole device"),
        ({"device_memory": None}, "not known"),
        ({"kind": "cpu", "mem_mb": 0}, "has no `mem`"),
        ({"kind": "sim", "mem_mb": 500, "memory": {**SETTINGS, "limit_main": False}}, "limit_main"),
    ],
)
def test_where_there_is_no_cap_the_reason_is_said(more: dict[str, Any], reason: str):
    held = memory.Held(replace(JOB, **more))
    held.take(program=True, on_gpu=False)
    assert held.facts()["memory_cap"] is None and reason in held.facts()["memory_cap_reason"]


def test_a_program_on_a_gpu_has_its_cap_in_the_record_without_this_process_using_the_gpu():
    held = memory.Held(JOB)
    held.take(program=True, on_gpu=False)
    assert held.facts() == {"memory_cap": memory.cap_by(SETTINGS, 250, TOTAL)}
    assert held.read()["reserved"] is None


def test_a_torch_that_reads_no_cap_is_not_given_one(monkeypatch):
    monkeypatch.setattr("sweepack.allocator.torch_version", lambda: (2, 9))
    environment = cell_environment({}, visible="0", threads=1, memory=SETTINGS, fraction=0.25)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    held = memory.Held(JOB)
    held.take(program=True, on_gpu=False)
    assert "2.10" in held.facts()["memory_cap_reason"]


def test_a_limit_that_the_system_does_not_take_is_said(monkeypatch):
    def refuse(*_: Any) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(main_memory.resource, "setrlimit", refuse)
    held = memory.Held(replace(JOB, kind="cpu", mem_mb=500))
    held.take(program=False, on_gpu=False)
    held.take_main()
    assert held.read()["cap"] is None and "not allowed" in held.facts()["memory_cap_reason"]


def test_of_several_ranks_the_largest_numbers_are_kept():
    readings = [{"rss": 5, "reserved": None, "cap": None}, {"rss": 7, "reserved": 2, "cap": None}]
    assert memory.largest(readings) == {"rss": 7, "reserved": 2, "cap": None}
    assert memory.largest([]) is None


@pytest.mark.parametrize("memory", ["much", {"rss": "5 GB"}, [1]])
def test_a_record_with_memory_that_is_no_numbers_is_broken(memory):
    text = Record("c", "finished", 1).to_json()
    with pytest.raises(ValueError, match="memory"):
        Record.from_json(json.dumps(json.loads(text) | {"memory": memory}))
