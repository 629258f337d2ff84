"""Shares that no cell fits into on the devices that there are: refused in the plan, with the number that would do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fake_nvml import GIB, FakeNvml, Gpu, Mig
from sweep_tools import check_words, refused
from sweepack.describe import describe
from sweepack.devices import Device
from sweepack.errors import UserError
from sweepack.memory import cap
from sweepack.plan import check_pool, make_plan

CARD = Gpu("GPU-1", "NVIDIA A100", 40 * GIB)
SMALL = Gpu("GPU-2", "NVIDIA T4", 15 * GIB)
SLICED = Gpu("GPU-3", "NVIDIA H200", 141 * GIB, (Mig("MIG-a", 1), Mig("MIG-b", 2, memory=4 * GIB)), True)
Check = Callable[..., list[Device]]


@pytest.fixture
def pool(tmp_path, monkeypatch) -> Check:
    """The devices of a plan for two cells on these GPUs, ``x=0`` and ``x=1``."""

    def check(*gpus: Gpu, environ: dict[str, str] | None = None, **config: Any) -> list[Device]:
        (tmp_path / "config").mkdir(exist_ok=True)
        (tmp_path / "task.py").write_text("def train(cell, *, x: int): ...\n")
        whole = {"sweep": {"name": "s", "task": "task.py:train", "axes": {"x": [0, 1]}}, **config}
        (tmp_path / "config/config.yaml").write_text(json.dumps(whole))
        monkeypatch.setattr("sweepack.plan.load_nvml", lambda: FakeNvml(*gpus))
        return check_pool(make_plan(tmp_path, tmp_path, [], []), environ or {})

    return check


def test_a_share_too_small_is_refused_with_the_least_that_does_and_how_many_fit(pool):
    error = refused(lambda: pool(CARD, resources=[{"match": {"x": 0}, "gpu": 0.5}, {"gpu": 0.01}]))
    # 600 MB of 40 GiB less 300 MB.
    check_words(error, "resources[1].gpu", "0.01: 426 MB a cell", "0.015", "at most 66 cells", "40.0 GiB", "A100")
    assert len(pool(CARD, resources=[{"match": {"x": 0}, "gpu": 0.5}, {"gpu": 0.015}])) == 1


def test_the_smallest_device_decides(pool):
    pool(CARD, resources=[{"gpu": 0.02}])
    error = refused(lambda: pool(CARD, SMALL, resources=[{"gpu": 0.02}]))
    check_words(error, "resources[0].gpu", "T4", "15.0 GiB")
    pool(CARD, SMALL, resources=[{"gpu": 0.02}], devices=1)


def test_the_plan_says_how_much_a_cell_may_take(pool, tmp_path):
    devices = pool(CARD, SMALL, resources=[{"match": {"x": 0}, "gpu": 0.25}, {"gpu": 1}])
    plan = describe(make_plan(tmp_path, tmp_path, [], []), devices)
    least = cap(250, 15 * GIB, 300 * 10**6, 600 * 10**6) / GIB
    assert f"1 cell of 0.25 device (capped at {least:.3g} GiB), " in plan and "1 cell of 1 device, " in plan


def test_a_share_of_an_instance_is_one_of_its_own_memory(pool):
    error = refused(lambda: pool(SLICED, resources=[{"gpu": 0.125}]))
    check_words(error, "resources[0].gpu", "MIG", "4.0 GiB", "0.151")
    pool(SLICED, resources=[{"gpu": 0.125}], devices=1)  # the one with 16 GiB


def test_too_many_jobs_on_a_gpu_are_refused_by_their_own_key(pool):
    how = {"placement": "round_robin"}
    error = refused(lambda: pool(SMALL, jobs_per_gpu=30, **how))
    check_words(error, "jobs_per_gpu", "30: ", "at most 26 cells", "`jobs_per_gpu: 26`")
    pool(SMALL, jobs_per_gpu=26, **how)


@pytest.mark.parametrize("share", [0.5, 1])
def test_a_reserve_larger_than_the_card_is_refused(pool, share):
    error = refused(lambda: pool(SMALL, resources=[{"gpu": share}], memory={"reserve": "20GB"}))
    check_words(error, "memory.reserve", "20000 MB", "15.0 GiB")


def test_a_process_larger_than_what_the_reserve_leaves_gets_the_whole_device(pool):
    error = refused(lambda: pool(SMALL, resources=[{"gpu": 0.9}], memory={"reserve": "10GB", "overhead": "8GB"}))
    check_words(error, "resources[0].gpu", "`gpu: 1`")
    pool(SMALL, resources=[{"gpu": 1}], memory={"reserve": "10GB", "overhead": "8GB"})


def test_a_card_that_does_not_tell_its_memory_passes(pool):
    pool(Gpu("GPU-4", "NVIDIA GB10", None), resources=[{"gpu": 0.001}])


def test_options_that_torch_would_not_take_are_refused_before_anything_runs(pool):
    with pytest.raises(UserError, match="PYTORCH_CUDA_ALLOC_CONF"):
        pool(CARD, environ={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:5"})
    with pytest.raises(UserError, match=r"memory\.max_split_size_mb"):
        pool(CARD, environ={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, memory={"max_split_size_mb": 64})
