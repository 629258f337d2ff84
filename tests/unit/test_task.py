"""Tasks are found, and what they take is read, without importing them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweep_tools import check_words, expanded, load, refused, task_of
from sweepack.task import Task, load_task

BOOBY_TRAP = "raise SystemExit('imported!')\n"
GOOD = "def train(cell, *, lr: float): ...\n"


def made(root: Path, source: str | bytes, name: str = "task.py") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source.encode() if isinstance(source, str) else source)
    return path


def defaults_of(task: Task) -> dict[str, Any]:
    return {parameter.name: parameter.default for parameter in task.signature.parameters.values()}


@pytest.mark.parametrize(
    ("reference", "place"),
    [
        ("task.py:train", "task.py"),
        ("deep/down/task.py:train", "deep/down/task.py"),
        ("task:train", "task.py"),
        ("package.inner.task:train", "package/inner/task.py"),
        ("package:train", "package/__init__.py"),
    ],
)
def test_a_task_is_found_by_file_or_module_without_importing_it(tmp_path: Path, reference: str, place: str) -> None:
    made(tmp_path, BOOBY_TRAP, "package/inner/__init__.py")
    file = made(tmp_path, BOOBY_TRAP + GOOD, place)
    task = load_task(reference, tmp_path)
    assert (task.reference, task.file, task.function) == (reference, file, "train")
    assert list(task.signature.parameters) == ["lr"]


def test_a_module_is_found_below_folders_without_init_files(tmp_path: Path) -> None:
    file = made(tmp_path, GOOD, "a/b/c/task.py")
    assert load_task("a.b.c.task:train", tmp_path).file == file


def test_a_module_of_the_environment_is_found() -> None:
    assert load_task("base64:encode", Path("/")).signature.parameters.keys() == {"output"}


def test_two_spellings_of_a_path_are_one_task(tmp_path: Path) -> None:
    made(tmp_path, GOOD)
    assert load_task("./task.py:train", tmp_path).reference == load_task("task.py:train", tmp_path).reference


def test_a_command_is_a_task_that_takes_any_parameter(tmp_path: Path) -> None:
    command = ["python", "x.py", "{params}"]
    config, task = load(tmp_path, {"sweep": {"name": "s", "task": {"command": command}, "axes": {"cell": [1, 2]}}})
    assert task.is_command and list(task.argv) == command
    assert [cell.params for cell in expanded(config.sweep.model_dump(exclude={"name", "task"}), task).cells] == [
        {"cell": 1},
        {"cell": 2},
    ]


@pytest.mark.parametrize(
    "source", [b"\xef\xbb\xbf" + GOOD.encode(), "# coding: latin-1\nX = 'é'\n".encode("latin-1") + GOOD.encode()]
)
def test_a_source_file_may_have_any_encoding_that_python_reads(tmp_path: Path, source: bytes) -> None:
    made(tmp_path, source)
    assert load_task("task.py:train", tmp_path).function == "train"


@pytest.mark.parametrize("source", ["def prepare(): ...\n", ""])
def test_prepare_is_noticed(tmp_path: Path, source: str) -> None:
    made(tmp_path, GOOD + source)
    assert load_task("task.py:train", tmp_path).has_prepare is ("prepare" in source)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("task.py", ["`path/to/file.py:function`", "examples/digits.py:train"]),
        *[(text, ["`module:function`"]) for text in (":train", "task.py:", "task.py:a b", "", "..:train", "a b:train")],
        ("tasc.py:train", ["a file tasc.py", "did you mean `task.py`"]),
        ("nowhere/task.py:train", ["nowhere", "no Python file"]),
        ("folder.py:train", ["a file folder.py"]),
        ("x" * 5000 + ".py:train", ["a file xxx"]),
        ("\0.py:train", ["a file"]),
        ("task.py:tain", ["task.py defines with `def`", "did you mean `train`"]),
        ("task.py:later", ["defines with `def`", "Known: bare, positional, train"]),
        ("task.py:CONSTANT", ["defines with `def`"]),
        ("task.py:bare", ["first argument takes the cell", "def bare(cell, *, lr: float"]),
        ("task.py:positional", ["given by name", "move `lr` behind the `/`"]),
        ("tsk:train", ["module `tsk`", "install it, or name the file"]),
        ("task.deeper:train", ["module `task.deeper`"]),
        ("folder:train", ["module `folder`"]),
        ("sys:exit", ["module `sys`"]),
        ("math:sqrt", ["module `math`"]),
    ],
)
def test_a_task_that_cannot_be_one_is_refused_with_a_hint(tmp_path: Path, reference: str, words: list[str]) -> None:
    made(
        tmp_path,
        GOOD + "async def later(cell): ...\nCONSTANT = 1\ndef bare(*, lr): ...\ndef positional(cell, lr, /): ...\n",
    )
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "folder").mkdir()
    error = refused(lambda: load_task(reference, tmp_path))
    check_words(error, "sweep.task", *words)
    assert error.value == reference


@pytest.mark.parametrize(
    ("source", "words"), [("def train(cell:\n", ["line 1"]), (b"\xff\xfe", ["mend"]), (b"a\0b", ["mend"])]
)
def test_a_file_that_is_not_python_is_refused_at_its_line(
    tmp_path: Path, source: str | bytes, words: list[str]
) -> None:
    made(tmp_path, source)
    check_words(refused(lambda: load_task("task.py:train", tmp_path)), "sweep.task", "valid Python", "task.py", *words)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("cell, lr, *, width=64", {"lr": None, "width": 64}),
        ("cell=None, lr=1e-3", {"lr": 0.001}),
        ("run, /, a=-1, *rest, b=None", {"a": -1, "b": None}),
        ("cell, a=(0.9, 0.99), b={'x': [1]}, c='é'", {"a": [0.9, 0.99], "b": {"x": [1]}, "c": "é"}),
        ("cell, a=WIDTH, b=RATE", {"a": 32, "b": 0.5}),
        ("cell, lr: float = 1, n: int = 2.0, t: list[float] = [1]", {"lr": 1.0, "n": 2, "t": [1.0]}),
        ("cell, depth: int = None", {"depth": None}),
    ],
)
def test_names_and_defaults_are_read_from_the_source(arguments: str, wanted: dict[str, Any]) -> None:
    task = task_of(f"WIDTH = 32\nRATE: float = 0.5\ndef train({arguments}): ...")
    assert repr(defaults_of(task)) == repr(wanted)
    assert not task.signature.open


@pytest.mark.parametrize(
    "default",
    [
        "x()",
        "[n for n in y]",
        "b'x'",
        "{1}",
        "{1: 2}",
        "...",
        "1j",
        "TWICE",
        "CHANGED",
        "COMPUTED",
        "os.sep",
        "UNKNOWN",
    ],
)
def test_a_default_that_is_no_literal_is_refused(default: str) -> None:
    source = f"""
TWICE = 1
COMPUTED = 1 + x
CHANGED = 1
def train(cell, *, lr={default}): ...
TWICE = 2
CHANGED += 1
"""
    error = refused(lambda: task_of(source))
    check_words(error, "the default of `lr` in task.py:train", default, "a literal", "state `lr` under `params`")


def test_a_parameter_without_a_default_needs_a_value() -> None:
    error = refused(lambda: expanded({"axes": {"a": [1]}}, "def train(cell, *, a, lr: float): ..."))
    check_words(error, "sweep.params.lr", "no default", "add `lr` here or under `axes`")
    error = refused(lambda: expanded({"params": {"a": 1}, "include": [{"a": 2}]}, "def train(cell, a, b): ..."))
    check_words(error, "sweep.include[0].b", "no default")


@pytest.mark.parametrize(
    "sweep", [{"params": {"with": 1}}, {"axes": {"with": [1]}}, {"zip": [{"with": [1]}]}, {"include": [{"with": 1}]}]
)
def test_an_unknown_parameter_is_refused_with_the_nearest_name_wherever_it_stands(sweep: dict[str, Any]) -> None:
    error = refused(lambda: expanded(sweep))
    (section,) = sweep
    assert error.key.startswith(f"sweep.{section}") and error.key.endswith(".with")
    check_words(error, error.key, "did you mean `width`?", "Known: amp", "`**params`")


def test_patterns_check_names_too() -> None:
    check_words(refused(lambda: expanded({"exclude": [{"lrr": 1}]})), "sweep.exclude[0].lrr", "did you mean `lr`")
    wrong = [{"match": {"lrr": 1}}]
    check_words(refused(lambda: expanded({}, resources=wrong)), "resources[0].match.lrr", "did you mean `lr`")


def test_an_open_task_takes_any_name_but_that_of_its_first_argument() -> None:
    assert expanded({"params": {"cell": 1}}, "def train(run, *, lr=1, **more): ...").cells[0].params == {
        "lr": 1,
        "cell": 1,
    }
    error = refused(lambda: expanded({"params": {"run": 1}}, "def train(run, **more): ..."))
    check_words(error, "sweep.params.run", "a name other than `run`", "rename it")
    assert expanded({"params": {"run": 1}}, "def train(run, /, **more): ...").cells[0].params == {"run": 1}


def test_a_nested_key_needs_a_parameter_that_takes_a_mapping() -> None:
    error = refused(lambda: expanded({"axes": {"lr.x": [1]}}))
    check_words(error, "sweep.axes.lr.x", "`lr` is `float`", "annotate it as `dict`")
    assert expanded({"axes": {"optim.lr": [2]}}).cells[0].params["optim"] == {"lr": 2}


@pytest.mark.parametrize("name", ["a b", "1x", "a..b", ".a", "a.", "a=b", "a/b", "é", ""])
def test_a_name_that_cannot_be_a_parameter_is_refused(name: str) -> None:
    for sweep in ({"params": {name: 1}}, {"axes": {name: [1]}}, {"include": [{name: 1}]}, {"exclude": [{name: 1}]}):
        error = refused(lambda sweep=sweep: expanded(sweep, "def train(cell, **params): ..."))
        check_words(error, error.key, "letters, digits", "rename it")


def test_the_digest_changes_with_the_source(tmp_path: Path) -> None:
    made(tmp_path, GOOD)
    before = load_task("task.py:train", tmp_path).digest()
    assert load_task("task.py:train", tmp_path).digest() == before
    made(tmp_path, GOOD + "# edited\n")
    assert load_task("task.py:train", tmp_path).digest() != before


def test_a_job_is_told_files_of_the_project_relative_to_it(tmp_path: Path) -> None:
    made(tmp_path, GOOD, "sub/task.py")
    assert load_task("sub/task.py:train", tmp_path).to_json(tmp_path) == {
        "reference": "sub/task.py:train",
        "file": "sub/task.py",
        "module": None,
        "function": "train",
        "argv": [],
    }
