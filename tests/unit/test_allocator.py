"""The options of torch's allocator in a cell's environment, and what of the user's own is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweepack.allocator import check, configure, without_cap
from sweepack.errors import UserError
from sweepack.hosts import host_socket

CUDA, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
ROUND = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"


def options(environment):
    return {name: value for name, value in environment.items() if name.startswith("PYTORCH")}


def test_nothing_is_set_where_there_is_nothing_to_say():
    assert configure({"HOME": "/"}, {}, None) == {"HOME": "/"}


def test_exactly_one_variable_is_set_with_what_the_user_had_in_either():
    users = {CUDA: "garbage_collection_threshold:0.8", NEW: f"backend:native, {ROUND},garbage_collection_threshold:0.5"}
    found = configure(users, {"expandable_segments": True}, 0.2250004)
    assert options(found) == {
        CUDA: f"backend:native,{ROUND},garbage_collection_threshold:0.8,expandable_segments:True,"
        "per_process_memory_fraction:0.225000"
    }


def test_ours_goes_before_the_users():
    users = {NEW: "per_process_memory_fraction:0.9,max_split_size_mb:64"}
    found = configure(users, {"max_split_size_mb": 128}, 0.25)
    assert options(found) == {CUDA: "per_process_memory_fraction:0.250000,max_split_size_mb:128"}
    assert options(configure(users, {}, None)) == {CUDA: users[NEW]}


@given(st.floats(0.001, 0.999))
def test_the_fraction_that_is_told_is_never_more_than_the_cap(fraction):
    told = float(configure({}, {}, fraction)[CUDA].partition(":")[2])
    assert fraction - 2e-6 < told <= fraction


def test_torch_reads_back_what_it_is_given():
    found = configure({NEW: ROUND}, {"max_split_size_mb": 64}, 0.25)
    program = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(os.environ) | found, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == found[CUDA] and not done.stderr


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("max_split_size_mb:5", "20 or more"),
        ("max_split_size_mb", "pairs"),
        ("max_split_size_mb=64", "pairs"),
        ("expandable_segments:true", "`True` or `False`"),
        ("expandable_segments:True,max_split_size_mb:64", "one of the two"),
        ("roundup_power2_divisions:[256:1", "pairs"),
        ("a:1,,b:2", "pairs"),
        ("expandable_segment:True", "did you mean `expandable_segments`"),
        ("per_process_memory_fraction:40", "from 0 to 1"),
    ],
)
@pytest.mark.parametrize("variable", [CUDA, NEW])
def test_what_torch_would_not_take_is_refused(variable, value, said):
    with pytest.raises(UserError) as caught:
        check({variable: value}, {})
    assert said in str(caught.value) and variable in caught.value.key


def test_the_users_option_and_a_setting_that_exclude_each_other_are_both_named():
    with pytest.raises(UserError) as caught:
        check({NEW: "expandable_segments:True"}, {"max_split_size_mb": 64})
    assert caught.value.key == NEW and "memory.max_split_size_mb" in str(caught.value)
    with pytest.raises(UserError) as caught:
        check({CUDA: "max_split_size_mb:64"}, {"expandable_segments": True})
    assert caught.value.key == CUDA
    check({CUDA: "expandable_segments:True"}, {"max_split_size_mb": 64, "expandable_segments": False})


def test_cells_of_different_shares_have_one_warm_host_and_other_options_another(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEPACK_LEASES", str(tmp_path / "leases"))
    (tmp_path / "leases").mkdir()
    task = {"file": "no-such.py", "reference": "module:function"}

    def socket(settings=None, fraction=None, **users):
        return host_socket(configure(users, settings or {}, fraction), task)

    assert socket() == socket(fraction=0.2) == socket(fraction=0.4)
    assert socket({"max_split_size_mb": 64}, 0.2) == socket({"max_split_size_mb": 64}) != socket()
    assert without_cap(configure({CUDA: ROUND}, {}, 0.2)) == {CUDA: ROUND}
