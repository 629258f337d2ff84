"""Packs for Slurm: balanced, within the time limit, no wider than their part of a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweepack.config import Resources
from sweepack.records import NEVER_RUN, Assessment, Record, State
from sweepack.slurm.cluster import Partition
from sweepack.slurm.config import Request, Slurm
from sweepack.slurm.gather import Lane, estimate, margin
from sweepack.sweep import Cell

NODE = Partition("gpu", True, 24 * 60, cpus=32, memory=64_000, gpus=4, shards=40, models=frozenset())


def cells(count: int, **resources: Any) -> list[Cell]:
    entry = Resources(slurm=None, **resources)
    return [Cell(f"{index:012x}", index, {}, f"c{index}", entry) for index in range(count)]


def lane(members: list[Cell], share: int = 250, partition: Partition = NODE) -> Lane:
    found = estimate(members, dict.fromkeys((cell.id for cell in members), NEVER_RUN))
    return Lane(Request(), partition, tuple(members), {cell.id: share for cell in members}, found)


def test_72_cells_in_6_packs_are_12_each_with_a_cpu_for_each_of_4_at_once() -> None:
    packs = lane(cells(72, runtime=10)).gather(Slurm.model_validate({"pack": {"count": 6}}), None)
    assert [len(members) for members, _ in packs] == [12] * 6
    for _, allocation in packs:
        assert (allocation.gpus, allocation.cpus, allocation.minutes) == (1, 4, 30 + margin(Slurm()))


def test_packs_last_about_as_long_as_they_should() -> None:
    # 96 quarter-GPU cells of 20 min are 480 GPU minutes: 8 packs of an hour.
    assert len(lane(cells(96, runtime=20)).gather(Slurm(), None)) == 8
    assert len(lane(cells(96, runtime=20)).gather(Slurm.model_validate({"pack": {"minutes": "2h"}}), None)) == 4
    assert len(lane(cells(96, runtime=20)).gather(Slurm.model_validate({"pack": {"gpus": 4}}), None)) == 2


def test_a_short_partition_cuts_packs() -> None:
    short = replace(NODE, minutes=50)
    packs = lane(cells(40, runtime=20), partition=short).gather(Slurm.model_validate({"pack": {"count": 1}}), None)
    assert len(packs) == 5  # 50 less 8 min: two rounds of four cells
    assert all(allocation.minutes <= 50 for _, allocation in packs)


def test_memory_that_lets_fewer_run_at_once_makes_packs_longer() -> None:
    members = cells(8, mem=16_000, runtime=10)  # a GPU's part of the node holds one of them
    ((_, allocation),) = lane(members, share=100).gather(Slurm.model_validate({"pack": {"count": 1}}), None)
    assert allocation.mem_mb == 16_000
    assert allocation.minutes == 80 + margin(Slurm())


def test_the_grace_is_added_to_what_cells_may_take() -> None:
    (cell,) = cells(1, runtime=30)
    longer = lane([cell]).single(cell, Slurm(mode="exclusive", grace=600)).minutes
    assert longer == lane([cell]).single(cell, Slurm(mode="exclusive")).minutes + 8


def test_no_pack_has_more_cells_than_asked() -> None:
    packs = lane(cells(50, runtime=1)).gather(Slurm(), 8)
    assert len(packs) == 7 and max(len(members) for members, _ in packs) <= 8


def test_a_pack_takes_no_more_cpus_and_memory_than_its_gpus_part_of_the_node() -> None:
    members = cells(100, cpus=2, mem=4000, runtime=1)
    ((_, one),) = lane(members, share=50).gather(Slurm(), None)
    assert one.cpus == 8 and one.mem_mb == 16_000  # a quarter of the node, though 20 cells fit on the GPU
    ((_, alone),) = lane(cells(1, cpus=12, runtime=1)).gather(Slurm(), None)
    assert alone.cpus == 12  # a cell gets what it needs


def test_cells_of_unknown_length_get_the_default_limit_and_learn_from_finished_ones() -> None:
    members = cells(9)
    _, allocation = lane(members).gather(Slurm(), None)[0]
    assert allocation.minutes == 240
    done = Assessment(State.FINISHED, Record("x", State.FINISHED, 1, started=0.0, ended=1800.0), True, 0)
    states = {cell.id: done if cell.index == 0 else NEVER_RUN for cell in members}
    assert estimate(members, states)[members[1].id].minutes == 30


def test_a_cell_without_runtime_does_not_shorten_the_jobs_of_those_with_one() -> None:
    long, unknown = cells(1, runtime=600)[0], replace(cells(2)[1], index=1)
    mixed = lane([long, unknown])
    assert mixed.single(long, Slurm(mode="exclusive")).minutes >= 600
    assert mixed.single(unknown, Slurm(mode="exclusive")).minutes == 240


def test_shards_and_exclusive_jobs() -> None:
    (cell,) = cells(1, runtime=10, cpus=3)
    shard = lane([cell]).single(cell, Slurm(mode="shard"))
    assert (shard.shards, shard.gpus, shard.cpus) == (3, 0, 3)  # a quarter of 10 shards, rounded up
    assert "--gres=shard:3" in shard.flags(Slurm(mode="shard"))
    whole = lane([cell]).single(cell, Slurm(mode="exclusive"))
    assert "--gpus=1" in whole.flags(Slurm()) and "--time=18" in whole.flags(Slurm())
    assert "--gres=gpu:1" in whole.flags(Slurm(gpu_flag="gres"))
    model = replace(whole, request=Request(gpu_model="a100", account="ml", extra=["--exclusive"]))
    assert {"--gpus=a100:1", "--account=ml", "--exclusive"} <= set(model.flags(Slurm()))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 12))
def test_every_cell_is_in_one_pack_and_loads_are_even(minutes: list[int], count: int) -> None:
    members = [Cell(f"{index:012x}", index, {}, "c", Resources(runtime=length)) for index, length in enumerate(minutes)]
    unlimited = replace(NODE, minutes=None)
    packs = lane(members, partition=unlimited).gather(Slurm.model_validate({"pack": {"count": count}}), None)
    assert sorted(cell.index for pack, _ in packs for cell in pack) == list(range(len(members)))
    loads = [sum(cell.resources.runtime or 0 for cell in pack) for pack, _ in packs]
    assert max(loads) - min(loads) <= max(minutes)


@pytest.mark.parametrize("minutes", [6, 30, None])
def test_no_job_asks_for_more_than_the_partition_allows(minutes: int | None) -> None:
    limited = replace(NODE, minutes=40)
    for _, allocation in lane(cells(30, runtime=minutes), partition=limited).gather(Slurm(), None):
        assert allocation.minutes <= 40
