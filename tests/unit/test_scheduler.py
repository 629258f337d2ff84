"""The scheduler admits what can be placed: with jobs that are small and faithful stand-ins for Snakemake's."""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import asdict
from pathlib import Path

import pytest
from snakemake_scheduler_plugin_sweepack import Scheduler
from sweepack.admission import Queue
from sweepack.job import Launch
from sweepack.leases import LeasePool, lease_directory


class Job:
    def __init__(self, index, share=None, cores=1, priority=0, mem_mb=0, **launch):
        self.priority = priority
        self.name = f"c{index}"
        self.output = [f"results/s/cells/{self.name}/result.json"]
        self.scheduler_resources = {"_cores": cores, "_nodes": 1, "mem_mb": mem_mb, "tmpdir": "/tmp"}
        if share is not None:
            self.scheduler_resources["gpu_milli"] = share
            how = {"minutes": None, "devices": 0, "round_robin": False, **launch}
            start = Launch(share, cores, mem_mb, index=index, start="auto", timeout=60, rejected=0, **how)
            directory = Path(self.output[0]).parent
            directory.mkdir(parents=True, exist_ok=True)
            meaning = {"slug": self.name, "task": {}, "launch": asdict(start)}
            (directory / "cell.json").write_text(json.dumps(meaning))

    def __repr__(self):
        return self.name


class Dag:
    def __init__(self):
        self.done = set()

    def finished(self, job):
        return job in self.done


class Run:
    """A run as Snakemake drives it: keeps count of resources, asks again when jobs have ended."""

    def __init__(self, jobs, cores=8):
        self.dag = Dag()
        self.scheduler = Scheduler(self.dag, None, logging.getLogger("test"))
        self.ready, self.running, self.cores = list(jobs), [], cores

    def round(self):
        left = self.cores - sum(job.scheduler_resources["_cores"] for job in self.running)
        selected = list(self.scheduler.select_jobs(set(self.ready), self.ready, {"_cores": left}, {}))
        self.ready = [job for job in self.ready if job not in selected]
        self.running += selected
        return [job.name for job in selected]

    def end(self, *names, retry=False, fail=False):
        for job in [job for job in self.running if job.name in names]:
            self.running.remove(job)
            if retry:
                self.ready.append(job)
            elif not fail:
                self.dag.done.add(job)
        return self.round()


@pytest.fixture(autouse=True)
def node(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWEEPACK_LEASES", str(tmp_path / "leases"))
    monkeypatch.setenv("SWEEPACK_DEVICES", "sim:2")


def others(milli, device):
    return LeasePool(lease_directory(), ["sim:0", "sim:1"]).acquire(milli, label="other", device=device)


def test_cells_start_in_the_order_of_the_sweep_as_far_as_devices_hold_them():
    run = Run([Job(index, 600) for index in range(4)])
    assert run.round() == ["c0", "c1"]
    assert run.end("c1") == ["c2"]
    assert run.end("c0", "c2") == ["c3"]


def test_a_smaller_cell_starts_beside_larger_ones_that_wait():
    run = Run([Job(0, 600), Job(1, 600), Job(2, 600), Job(3, 400), Job(4, 400)])
    assert run.round() == ["c0", "c1", "c3", "c4"]


def test_cores_limit_what_starts():
    run = Run([Job(index, 100, cores=3) for index in range(4)], cores=8)
    assert run.round() == ["c0", "c1"]


def test_other_limited_resources_are_respected():
    run = Run([Job(index, 100, mem_mb=600) for index in range(3)])
    selected = run.scheduler.select_jobs(set(run.ready), run.ready, {"_cores": 8, "mem_mb": 1300}, {})
    assert [job.name for job in selected] == ["c0", "c1"]


def test_jobs_that_are_no_cells_need_no_device_and_priority_goes_first():
    run = Run([Job(0, 1000), Job(1, 1000), Job(2, 1000), Job(8), Job(9, 1000, priority=5)], cores=3)
    assert run.round() == ["c9", "c8", "c0"]


def test_the_longest_cell_starts_first_where_the_plan_knows_the_times():
    run = Run([Job(0, 500, minutes=10), Job(1, 500, minutes=20), Job(2, 500, minutes=40)], cores=2)
    assert run.round() == ["c2", "c1"]


def test_a_few_cells_start_in_the_order_that_ends_soonest():
    # Longest first, the last of the short ones would start when all else ends.
    minutes = [7, 7, 6, 6, 5, 5, 4, 4, 4]
    run = Run([Job(index, 500, minutes=time) for index, time in enumerate(minutes)])
    assert "c8" in run.round()


def test_a_cell_that_cannot_be_read_starts_all_the_same():
    run = Run([Job(0, 500)])
    Path("results/s/cells/c0/cell.json").unlink()
    assert run.round() == ["c0"]


def test_a_job_that_is_no_longer_offered_is_not_started():
    run = Run([Job(0, 1000), Job(1, 1000), Job(2, 1000), Job(3, 1000)])
    run.round()
    offered = [job for job in run.ready if job.name == "c3"]
    run.dag.done.update(run.running)
    assert run.scheduler.select_jobs(set(offered), offered, {"_cores": 8}, {}) == offered


def test_a_failed_cell_frees_its_place_whether_it_is_retried_or_not():
    run = Run([Job(index, 1000) for index in range(5)])
    run.round()
    assert run.end("c0", fail=True) == ["c2"]
    assert run.end("c1", retry=True) == ["c1"]
    assert run.end("c1", "c2") == ["c3", "c4"]


def test_what_other_runs_hold_is_not_counted_on_and_one_cell_waits_for_it():
    lease = others(700, "sim:0")
    run = Run([Job(index, 600) for index in range(4)])
    assert run.round() == ["c0"]
    # sim:1 is taken by c0, sim:0 by somebody of whose end Snakemake would not hear.
    label = str(Path("results/s/cells/c0").absolute())
    with LeasePool(lease_directory(), ["sim:0", "sim:1"]).acquire(600, label=label, device="sim:1"):
        assert run.round() == ["c1"]
        assert run.round() == []
    lease.release()


def test_a_cell_waits_even_when_others_hold_everything():
    with others(1000, "sim:0"), others(1000, "sim:1"):
        run = Run([Job(index, 600) for index in range(4)])
        assert run.round() == ["c0"]
        assert run.round() == []


def test_a_large_cell_is_passed_for_a_while_and_not_for_ever(monkeypatch):
    monkeypatch.setattr("snakemake_scheduler_plugin_sweepack.Queue", functools.partial(Queue, -1.0))
    run = Run([Job(index, 300) for index in range(100)])
    run.round()
    run.ready.append(Job(99, 1000))
    before = 0
    while run.running and "c99" not in run.end(run.running[0].name):
        before += 1
    assert 50 < before < 90, "passed by cells that fit, and started while others still wait"


def test_round_robin_goes_by_the_index():
    run = Run([Job(index, 500, round_robin=True) for index in (0, 2, 4, 1)])
    assert run.round() == ["c0", "c1", "c2"]


def test_a_limited_pool_uses_the_first_devices():
    run = Run([Job(index, 1000, devices=1) for index in range(3)])
    assert run.round() == ["c0"]


def test_devices_that_cannot_be_read_leave_the_choice_to_snakemake(monkeypatch):
    monkeypatch.setenv("SWEEPACK_DEVICES", "sim:0")
    run = Run([Job(0, 500)])
    assert run.scheduler.select_jobs({run.ready[0]}, run.ready, {"_cores": 1}, {}) is None
