"""Cells that share a GPU under MPS: one daemon for them, neighbours of a fault run again, a plan that says so."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from mps_tools import FAKES, GPU, daemons, path_with_fakes

TASK = """
import os, time
from pathlib import Path
from fake_cuda import Gpu

def train(cell, *, x: int, how: str = "", crash: bool = False):
    gpu = Gpu()
    Path(f"started-{x}").touch()
    with open("trained.txt", "a") as file:
        file.write(f"{x}{'m' if gpu.daemon else '-'}\\n")
    others = 2 if how in ("fault", "wait") else 1
    while how and gpu.daemon and len(list(Path().glob("started-*"))) < others:
        time.sleep(0.02)
    while how == "one waits" and x == 1 and not Path("go").exists():
        time.sleep(0.02)
    if how in ("fault", "alone") and x == 0:
        gpu.fault()
    while how == "wait" or (how == "fault" and gpu.daemon):
        try:
            gpu.synchronize()
        except RuntimeError:
            if crash:
                os.abort()
            raise
        time.sleep(0.02)
    seen = {name: value for name, value in os.environ.items() if name.startswith("CUDA_MPS_")}
    return {"score": x, "seen": [f"{name}={value}" for name, value in sorted(seen.items())]}
"""


@pytest.fixture
def gpu(sandbox, eventually):
    """The sandbox with a GPU of which only the UUID is known, the fake control program, and a short path of leases."""
    leases = Path(tempfile.mkdtemp(prefix="mps-"))
    del sandbox.environment["SWEEPACK_DEVICES"]
    sandbox.environment |= {"CUDA_VISIBLE_DEVICES": GPU, "SWEEPACK_LEASES": str(leases), "PYTHONPATH": pythonpath()}
    sandbox.environment["PATH"] = f"{FAKES}:{sandbox.environment['PATH']}"
    sandbox.leases = leases
    yield sandbox
    eventually(lambda: not daemons(leases), "the end of every daemon")
    shutil.rmtree(leases)


def pythonpath() -> str:
    return os.pathsep.join(filter(None, [str(FAKES), os.environ.get("PYTHONPATH")]))


def sweep(sandbox, count=2, how="", crash=False, **config):
    sandbox.write("task.py", TASK)
    sandbox.config(
        sweep={
            "name": "test",
            "task": "task.py:train",
            "params": {"how": how, "crash": crash},
            "axes": {"x": {"range": count}},
        },
        **{"mps": True, "resources": [{"gpu": 0.5}], **config},
    )


def by_x(sandbox):
    return {record["params"]["x"]: record for record in sandbox.cells().values()}


def provenance(record):
    return json.loads((record["dir"] / "provenance.json").read_text())


@pytest.mark.parametrize("settings", [{"cells_per_job": 4}, {"cells_per_job": 1}, {"start": "fresh"}])
def test_cells_on_a_device_are_clients_of_its_daemon(gpu, settings):
    sweep(gpu, 4, mps={"thread_percentage": 40}, **settings)
    plan = gpu.snakemake("-n", "--cores", "2")
    assert "mps      one daemon a device, for 4 cells that share one" in plan
    assert "40 % of the threads each, which can change numbers" in plan
    gpu.snakemake("--cores", "2")
    assert sorted(gpu.trained()) == ["0m", "1m", "2m", "3m"]
    for record in by_x(gpu).values():
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40" in record["metrics"]["seen"]
        facts = provenance(record)["mps"]
        assert facts["client"] is True and facts["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
        log = (record["dir"] / "log.txt").read_text()
        assert "under MPS" in log
        assert "started fresh" not in log


def test_it_is_switched_half_way_and_names_no_cell_anew(gpu):
    sweep(gpu, 2, mps=False)
    gpu.environment |= {"CUDA_MPS_PIPE_DIRECTORY": "/the/site's", "CUDA_MPS_CLIENT_PRIORITY": "1"}
    gpu.snakemake("--cores", "2")
    before = set(gpu.cells())
    # What a site has set stays where sweepack has no daemon of its own.
    assert by_x(gpu)[0]["metrics"]["seen"] == ["CUDA_MPS_CLIENT_PRIORITY=1", "CUDA_MPS_PIPE_DIRECTORY=/the/site's"]
    sweep(gpu, 3)
    gpu.snakemake("--cores", "2")
    assert before < set(gpu.cells())
    assert sorted(gpu.trained()) == ["0-", "1-", "2m"]
    assert not any("PRIORITY" in variable for variable in by_x(gpu)[2]["metrics"]["seen"])


def test_the_daemon_outlives_the_cell_that_started_it(gpu, eventually):
    sweep(gpu, 4, how="one waits", cells_per_job=1)
    run = gpu.start("--cores", "2")
    ended = gpu.root / "results/test/cells"
    eventually(lambda: len(list(ended.glob("*/result.json"))) == 3, "all cells but the one that waits")
    (pid,) = daemons(gpu.leases)
    assert [path.read_text() for path in gpu.leases.glob("mps/*/pipe/*.pid")] == [f"{pid}\n"]
    (gpu.root / "go").touch()
    run.communicate()
    assert run.returncode == 0 and sorted(gpu.trained()) == ["0m", "1m", "2m", "3m"]
    assert all(provenance(record)["mps"]["client"] for record in gpu.cells().values())


def test_a_cell_with_a_device_to_itself_needs_no_daemon(gpu):
    sweep(gpu, 1, resources=[{"gpu": 1}])
    assert "not used: no cell shares a device" in gpu.snakemake("-n")
    gpu.snakemake("--cores", "2")
    assert gpu.trained() == ["0-"]


@pytest.mark.parametrize(("size", "crash"), [(1, False), (2, False), (2, True)])
def test_neighbours_of_a_fault_finish_and_the_guilty_cell_fails(gpu, size, crash):
    sweep(gpu, how="fault", crash=crash, cells_per_job=size)
    output = gpu.snakemake("--cores", "2", status=1)
    guilty, neighbour = by_x(gpu)[0], by_x(gpu)[1]
    assert (guilty["status"], neighbour["status"]) == ("failed", "finished")
    assert "illegal memory access" in guilty["error"] and "struck" not in guilty["error"]
    # Each once under MPS, where nobody could say whose fault it was, and once outside.
    assert sorted(gpu.trained()) == ["0-", "0m", "1-", "1m"]
    told = output + "".join(path.read_text() for path in gpu.root.glob("results/test/packs/*.log"))
    assert "interrupted" in told and "struck by a fault under MPS: the server of 2 cells" in told
    assert "outside MPS after a fault" in (neighbour["dir"] / "log.txt").read_text()


def test_the_only_client_that_faults_has_failed_at_once(gpu):
    sweep(gpu, 1, how="alone")
    gpu.snakemake("--cores", "2", status=1)
    assert by_x(gpu)[0]["status"] == "failed"
    assert gpu.trained() == ["0m"]


def test_nothing_is_left_when_all_is_killed(gpu, eventually):
    sweep(gpu, how="wait", cells_per_job=2)
    run = gpu.start("--cores", "2")
    eventually(lambda: len(list(gpu.root.glob("started-*"))) == 2, "both cells")
    assert len(daemons(gpu.leases)) == 1
    os.killpg(run.pid, signal.SIGKILL)
    for process in Path("/proc").glob("[0-9]*"):
        if process_of(process, gpu.root):
            os.kill(int(process.name), signal.SIGKILL)
    run.communicate()
    eventually(lambda: not daemons(gpu.leases), "the end of the daemon")


def process_of(process: Path, root: Path) -> bool:
    """Whether it is one of the run in ``root``, and not what keeps the daemon."""
    try:
        return (process / "cwd").readlink() == root and b"mps" not in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_the_plan_refuses_where_it_cannot_run(gpu):
    sweep(gpu)
    gpu.environment["PATH"] = gpu.environment["PATH"].replace(f"{FAKES}:", "")
    for environment in ({}, {"SWEEPACK_DEVICES": "cpu"}):
        output = gpu.snakemake("-n", status=1, **environment)
        assert "error in mps" in output and "set `mps: false`" in output
    gpu.environment["PATH"] = path_with_fakes()
    sweep(gpu, resources=[{"gpu": 0.01}])
    assert "at most 48 cells on a device" in gpu.snakemake("-n", status=1)


def test_a_daemon_that_does_not_start_leaves_cells_pending_and_is_told(gpu):
    sweep(gpu)
    output = gpu.snakemake("--cores", "2", status=1, FAKE_MPS="fail")
    assert "SM 3.5 or higher" in output and gpu.trained() == []
    assert {record["status"] for record in gpu.cells().values()} == {"pending"}
    gpu.snakemake("--cores", "2")
    assert sorted(gpu.trained()) == ["0m", "1m"]
