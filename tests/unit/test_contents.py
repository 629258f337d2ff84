"""The digest that tells whether a sweep's tables are current."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from made_sweeps import end_cell, make_sweep
from sweepack.contents import contents, read_stamp, remove_stamp, write_stamp
from sweepack.manifest import Manifest, cell_files
from sweepack.records import State, assess, hand_over

DIGEST = """
import sys
from pathlib import Path
from sweepack.contents import contents
from sweepack.manifest import Manifest, cell_files
from sweepack.records import assess
directory = Path(sys.argv[1])
manifest = Manifest.read(directory)
states = {cell.id: assess(cell_files(directory, cell.id).directory, cell.id) for cell in manifest.cells}
print(contents(manifest, states))
assert not {"pandas", "pyarrow", "torch", "pydantic"} & sys.modules.keys()
"""


@pytest.fixture
def directory(tmp_path):
    params = [{"lr": 0.1, "seed": 0, "s": "\ud800é"}, {"lr": 0.2, "seed": None, "s": {}}]
    make_sweep(tmp_path / "s", params, [{"acc": 1}], objective={"metric": "acc", "mode": "max"})
    return tmp_path / "s"


def assessed(directory):
    cells = Manifest.read(directory).cells
    return {cell.id: assess(cell_files(directory, cell.id).directory, cell.id) for cell in cells}


def digest(directory, **changes):
    return contents(replace(Manifest.read(directory), **changes), assessed(directory))


def test_unchanged_directories_give_the_same_digest_in_every_process_without_heavy_imports(directory):
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", DIGEST, str(directory)]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        assert done.stdout.strip() == digest(directory)


def test_whatever_the_manifest_lets_the_tables_show_counts_and_how_it_was_chosen_does_not(directory):
    first, second = Manifest.read(directory).cells
    changes = [
        {},
        {"sweep": "t"},
        {"task": "other.py:train"},
        {"axes": ["seed", "lr"]},
        {"objective": {"metric": "acc", "mode": "min"}},
        {"objective": None},
        {"cells": [first]},
        {"cells": [second, first]},
        {"cells": [first, replace(second, slug="renamed")]},
        {"cells": [first, replace(second, params={**second.params, "seed": 0})]},
        {"cells": [first, replace(second, params={**second.params, "seed": 0.0})]},
        {"cells": [first, replace(second, params=dict(reversed(second.params.items())))]},
    ]
    assert len({digest(directory, **change) for change in changes}) == len(changes)
    assert digest(directory, configuration=["--config", "devices=1"]) == digest(directory)


@pytest.mark.parametrize(
    "facts",
    [
        {"attempt": 2},
        {"ended": 1003.0},
        {"rejected": 1},
        {"status": State.FAILED},
        {"status": State.INTERRUPTED},
        {"cell": "someone else's"},
    ],
)
def test_each_fact_of_how_a_cell_stands_counts(directory, facts):
    before = digest(directory)
    record = assessed(directory)["0001"].record
    files = cell_files(directory, "0001")
    files.status.write_text(replace(record, **facts).to_json())
    hand_over(files)
    assert digest(directory) != before


def test_what_is_wrong_with_a_cell_counts(directory):
    files = cell_files(directory, "0001")
    files.result.unlink()
    digests = set()
    for status in ("{", assessed(directory)["0001"].record.to_json().replace("0001", "0002")):
        files.status.write_text(status)
        digests.add(digest(directory))
    assert len(digests) == 2


def test_a_cell_that_runs_for_the_first_time_counts_and_a_result_that_is_handed_over_again_does_not(directory):
    before = digest(directory)
    cell_files(directory, "0001").result.unlink()
    assert digest(directory) == before
    end_cell(directory, "0002", metrics={"acc": 2})
    assert digest(directory) != before


def test_a_stamp_is_read_back_until_it_is_removed(tmp_path):
    assert read_stamp(tmp_path / "nowhere") is None
    assert read_stamp(tmp_path) is None
    remove_stamp(tmp_path)
    write_stamp(tmp_path, "abc")
    assert read_stamp(tmp_path) == "abc"
    remove_stamp(tmp_path)
    assert read_stamp(tmp_path) is None


def test_a_damaged_stamp_is_none_or_matches_nothing(directory):
    for damage in (b"", b"\xff\xfe", b"not a digest"):
        (directory / "table.stamp").write_bytes(damage)
        assert read_stamp(directory) != digest(directory)
