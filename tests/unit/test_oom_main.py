"""Main memory that the kernel refuses or takes back, and the shares that a cell outgrows."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweepack import oom, supervise
from sweepack.oom import grown, next_share, retry_share
from sweepack.records import CellFiles, Record, State

MAIN = """
import json, resource, sys
from sweepack.job import Job
from sweepack.oom import tell
from sweepack.records import Record, State
resource.setrlimit(resource.RLIMIT_DATA, (2 * 10**9, 2 * 10**9))
job = Job("/cells/x", "cpu", "cpu", False, 1000, 1, 0, False, (), 2, mem_mb=int(sys.argv[2]),
          memory={"limit_main": sys.argv[3] == "on"})
try:
    exec(sys.argv[1])
except BaseException as error:
    record = tell(error, Record("x", State.FAILED, 1, error=repr(error)), job)
    print(record.to_json())
"""


def in_little_memory(code, mem=2000, limit="on"):
    command = [sys.executable, "-c", MAIN, code, str(mem), limit]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("code", "asked"),
    [
        ("import torch; torch.empty(10**10)", "asked for 37.25 GiB more"),
        ("import numpy; numpy.zeros(10**10)", "asked for 74.50 GiB more"),
        ("bytearray(10**10)", "asked for more main memory"),
        ("import mmap; mmap.mmap(-1, 10**10, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)", "asked for more"),
    ],
)
def test_main_memory_that_the_kernel_refuses_is_the_cells_own(code, asked):
    record = in_little_memory(code)
    assert (record["status"], record["failure"], record["outgrown"]) == ("failed", "oom_cap", None)
    first = record["error"].splitlines()[0]
    assert first.startswith(f"oom_cap: {asked}") and "`mem` holds it to 1.86 GiB" in first and "raise `mem`" in first


def test_it_is_no_cap_where_the_cell_has_none():
    assert in_little_memory("bytearray(10**10)", mem=0)["failure"] is None
    assert in_little_memory("bytearray(10**10)", limit="off")["failure"] is None
    assert in_little_memory(f"raise OSError({errno.ENOSPC}, 'disk')")["failure"] is None


def test_the_kernels_kills_are_read_from_either_kind_of_control_group(tmp_path):
    assert oom.kernel_kills(tmp_path) is None
    own = tmp_path / "proc/self/cgroup"
    own.parent.mkdir(parents=True)
    for line, file, text in (
        ("0::/a/b", "a/b/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ("0::/../outside", "memory.events", "oom_kill 5\n"),
        ("9:name=systemd:/\n4:memory:/job", "memory/job/memory.oom_control", "under_oom 0\noom_kill 7\n"),
    ):
        own.write_text(line + "\n")
        path: Path = tmp_path / "sys/fs/cgroup" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        assert oom.kernel_kills(tmp_path) == int(text.split("oom_kill ")[1].split()[0])
        path.unlink()


@pytest.mark.parametrize(
    ("signum", "before", "after", "claimed"),
    [
        (signal.SIGKILL, 3, 4, True),
        (signal.SIGKILL, 3, 3, False),
        (signal.SIGKILL, None, 4, False),
        (signal.SIGTERM, 3, 4, False),
    ],
)
def test_a_kill_by_the_kernel_is_told_where_it_can_be_known(tmp_path, monkeypatch, signum, before, after, claimed):
    files = CellFiles(tmp_path / "0123456789ab")
    files.directory.mkdir()
    files.meaning.write_text('{"slug": "x=1"}')
    files.status.write_text(Record("0123456789ab", State.RUNNING, 1).to_json())
    monkeypatch.setattr(supervise, "kernel_kills", lambda: after)
    with files.log.open("w") as log:
        supervise.settle(files, -signum, log.fileno(), accept=True, terminal=log.fileno(), kills=before)
    record = Record.from_json(files.status.read_bytes())
    assert record.status is State.INTERRUPTED and not files.result.exists()
    assert ("memory is the likely reason" in (record.error or "")) is claimed
    assert ("memory is the likely reason" in files.log.read_text()) is claimed


@given(st.integers(1, 1000))
def test_the_next_share_holds_half_as_many_cells_and_the_whole_device_is_the_last(share):
    larger = next_share(share)
    if share == 1000:
        assert larger is None
    else:
        assert larger is not None and share < larger <= 1000
        assert 1000 // larger == max(1, 1000 // share // 2)


def test_what_a_cell_has_outgrown_it_does_not_get_again():
    ended = Record("x", State.INTERRUPTED, 3, share=500, outgrown=250, batch=8)
    assert grown(250, 8, ended) == 500 and grown(125, 8, ended) == 500 and grown(1000, 8, ended) == 1000
    # Another batch takes other memory.
    assert grown(250, 4, ended) == 250 and grown(250, 8, None) == 250
    assert grown(250, None, Record("x", State.FAILED, 1, share=1000, outgrown=1000)) == 1000


def test_only_gpu_memory_at_the_cap_is_tried_again():
    assert retry_share(Record("x", State.FAILED, 1, share=250, failure="oom_cap", outgrown=250)) == 500
    assert retry_share(Record("x", State.FAILED, 1, share=1000, failure="oom_cap", outgrown=1000)) is None
    assert retry_share(Record("x", State.FAILED, 1, share=250, failure="oom_cap")) is None  # main memory
    assert retry_share(Record("x", State.FAILED, 2, share=500, outgrown=250)) is None  # of another kind, since
    assert retry_share(Record("x", State.INTERRUPTED, 2, share=500, failure="oom_neighbour", outgrown=250)) is None
    assert retry_share(None) is None
