"""The import check: once per state of the sources, in a subprocess, within a time limit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from sweep_tools import check_words, refused
from sweepack.importing import check_import
from sweepack.task import load_task

# Each import leaves a mark, so that the tests see how often it happened.
MARK = "open('imports', 'a').write('x')\n"
TRAIN = "def train(cell): ...\n"


def check(root: Path, source: str | None = None, reference: str = "task.py:train", limit: float = 60) -> None:
    if source is not None:
        (root / "task.py").write_text(source)
    check_import(load_task(reference, root), root, root / "cache", limit)


def imports(root: Path) -> int:
    return (root / "imports").stat().st_size


def test_a_task_is_imported_again_only_when_it_or_what_it_imports_has_changed(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 1\n")
    (tmp_path / "unrelated.py").write_text("VALUE = 1\n")
    check(tmp_path, MARK + "import helper\n" + TRAIN)
    (tmp_path / "unrelated.py").write_text("VALUE = 2\n")
    check(tmp_path)
    assert imports(tmp_path) == 1
    (tmp_path / "helper.py").write_text("VALUE = 2\n")
    check(tmp_path)
    assert imports(tmp_path) == 2
    check(tmp_path, MARK + "import helper\n# edited\n" + TRAIN)
    assert imports(tmp_path) == 3
    (tmp_path / "helper.py").unlink()
    check_words(refused(lambda: check(tmp_path)), "sweep.task", "No module named 'helper'")


def test_a_task_in_a_package_is_imported_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "helper.py").write_text("VALUE = 1\n")
    (tmp_path / "package" / "task.py").write_text(
        f"from .helper import VALUE\nfrom package import helper\n{MARK}{TRAIN}"
    )
    check(tmp_path, reference="package.task:train")
    (tmp_path / "package" / "helper.py").write_text("VALUE = 2\n")
    check(tmp_path, reference="package.task:train")
    assert imports(tmp_path) == 2


def test_a_file_sees_its_neighbours_and_the_project_and_is_registered_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "neighbour.py").write_text("")
    (tmp_path / "common.py").write_text("")
    lines = "import os, sys, neighbour, common\nassert sys.modules[__name__].sys is sys\nassert __name__ == 'task'\n"
    (tmp_path / "sub" / "task.py").write_text(f"{lines}assert os.getcwd() == {str(tmp_path)!r}\n{TRAIN}")
    check(tmp_path, reference="sub/task.py:train")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("\n\n1 / 0\n" + TRAIN, ["ZeroDivisionError", "task.py", "line 3", "mend what the import raised"]),
        ("import broken\n" + TRAIN, ["ValueError: deep inside", "broken.py", "line 2"]),
        ("import nowhere_to_be_found\n" + TRAIN, ["No module named 'nowhere_to_be_found'"]),
        ("import sys\n" + TRAIN + "sys.exit()\n", ["SystemExit"]),
        (TRAIN + "train = 3\n", ["`train` is int, not a function", "a function that takes the cell"]),
        (TRAIN + "del train\n", ["train", "AttributeError"]),
        ("import os\nos.write(2, b'dying \\xff words')\nos._exit(3)\n" + TRAIN, ["exit status 3", "dying", "words"]),
        ("import os\nos.kill(os.getpid(), 9)\n" + TRAIN, ["exit status -9"]),
    ],
)
def test_an_import_that_fails_is_one_error_with_its_cause(tmp_path: Path, source: str, words: list[str]) -> None:
    (tmp_path / "broken.py").write_text("\nraise ValueError('deep inside')\n")
    error = refused(lambda: check(tmp_path, MARK + source if source.startswith("import nowhere") else source))
    check_words(error, "sweep.task", "task.py:train", *words)
    assert "importing.py" not in str(error)
    assert not (tmp_path / "cache").exists()


def test_a_failure_is_not_remembered(tmp_path: Path) -> None:
    for _ in range(2):
        refused(lambda: check(tmp_path, MARK + "1 / 0\n" + TRAIN))
    assert imports(tmp_path) == 2


def test_an_import_that_takes_too_long_is_ended_with_the_hint_to_prepare(tmp_path: Path) -> None:
    error = refused(lambda: check(tmp_path, "import time\ntime.sleep(600)\n" + TRAIN, limit=0.5))
    check_words(error, "sweep.task", "within 0.5 s", "`prepare()`", "`import_timeout`")


def test_what_the_module_leaves_running_keeps_nobody_waiting(tmp_path: Path) -> None:
    source = """
import subprocess, threading, time
child = subprocess.Popen(["sleep", "600"])
open("pid", "w").write(str(child.pid))
threading.Thread(target=time.sleep, args=[600]).start()
"""
    try:
        check(tmp_path, source + TRAIN)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_cache_that_cannot_be_written_only_means_checking_again(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    for _ in range(2):
        check(tmp_path, MARK + TRAIN)
    assert imports(tmp_path) == 2


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"/nowhere": "x"}'])
def test_a_broken_cache_only_means_checking_again(tmp_path: Path, content: str) -> None:
    (tmp_path / "task.py").write_text(MARK + TRAIN)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{load_task('task.py:train', tmp_path).digest()}.json").write_text(content)
    check(tmp_path)
    check(tmp_path)
    assert imports(tmp_path) == 1
