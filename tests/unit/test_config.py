"""The configuration: what it accepts, and one helpful error for whatever it does not."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sweep_tools import OPEN, SOURCE, WHOLE, check_words, config_of, load, refused
from sweepack.config import Config, validate
from sweepack.errors import UserError
from sweepack.loading import load_config
from sweepack.sweep import expand


def checked(sweep: dict[str, Any] | None = None, **top: Any) -> Config:
    return validate(config_of(sweep or {}, **top), "config.yaml")


@pytest.mark.parametrize(
    ("key", "given", "held"),
    [
        *[("gpu", share, milli) for share, milli in ((1, 1000), (1.0, 1000), (0.25, 250), (0.001, 1), (0.3, 300))],
        *[("gpu", 1 / 3, 333), ("gpu", 1 - 0.9, 100), ("gpu", 0.29, 290), ("gpu", 0.57, 570), ("gpu", 0.9999, 999)],
        *[("mem", size, 2000) for size in ("2GB", "2 gb", "2000MB", 2000, "2000000 KB")],
        *[("mem", "2GiB", 2148), ("mem", "1.5GB", 1500), ("mem", None, None), ("mem", "1MB", 1)],
        *[("runtime", time, 90) for time in ("90m", "1.5h", "5400 s", 90, "90 minutes")],
        *[("runtime", "1d", 1440), ("runtime", "1s", 1), ("runtime", None, None), ("cpus", 4, 4)],
    ],
)
def test_resources_are_held_in_thousandths_megabytes_and_minutes(key: str, given: Any, held: Any) -> None:
    assert getattr(checked(resources=[{key: given}]).resources[0], key) == held


def test_what_is_not_stated_has_the_documented_default() -> None:
    config = checked()
    assert config.resources[0].model_dump() == {
        "match": {},
        "nodes": None,
        "gpus_per_node": None,
        "ddp": {"launcher": "auto", "strategy": "ddp", "restarts": 0, "start_seconds": 120},
        "gpu": 1000,
        "batch": None,
        "cpus": 1,
        "mem": None,
        "runtime": None,
        "slurm": None,
    }
    assert (config.on_error, config.placement, config.results) == ("raise", "packed", "results")
    assert (config.confirm_above, config.lease_timeout, config.import_timeout) == (10_000, 1440, 120.0)
    assert (config.devices, config.jobs_per_gpu, config.objective, config.sweep.sample) == (None, None, None, None)


SHARE = "a number above 0 and up to 1"
TIME = "a time as text with a unit, or minutes"
MEMORY = "main memory as text with a unit, or megabytes"
TASK_WORDS = ["`path/to/file.py:function`", "{command: [program", "examples/digits.py:train"]


@pytest.mark.parametrize(
    ("top", "key", "words"),
    [
        ({"resorces": []}, "resorces", ["did you mean `resources`?", "Known: cells_per_job, confirm_above"]),
        *[
            ({name: 1}, name, ["a key that exists", "Known: cells_per_job, confirm_above"])
            for name in ("str", "int", "none", "Command")
        ],
        ({"": 1}, '""', ["a key that exists"]),
        ({"on_eror": "nan"}, "on_eror", ["did you mean `on_error`?"]),
        ({"resources": [{"gpus": 1}]}, "resources[0].gpus", ["did you mean `gpu`?", "Known: batch, cpus, ddp, gpu"]),
        ({"resources": [{}, {"ram": 1}]}, "resources[1].ram", ["a key that exists", "mem"]),
        ({"objective": {"metrc": "a", "mode": "max"}}, "objective.metrc", ["did you mean `metric`?"]),
        ({"objective": {"metric": "a"}}, "objective.mode", ["required", "add `mode:`", "more or less of it is better"]),
        ({"objective": {"metric": "a", "mode": "maxx"}}, "objective.mode", ["maxx", "'max' or 'min'"]),
        ({"objective": "accuracy"}, "objective", ["a mapping", "rank by"]),
        *[
            ({"resources": [{"gpu": bad}]}, "resources[0].gpu", [SHARE, "smallest share"])
            for bad in (0, -0.5, -math.inf)
        ],
        *[
            ({"resources": [{"gpu": bad}]}, "resources[0].gpu", [SHARE, "one device"])
            for bad in (1.2, 2, math.inf, math.nan)
        ],
        *[
            ({"resources": [{"gpu": bad}]}, "resources[0].gpu", [SHARE, "unquoted"])
            for bad in ("0.3x", "0.5", True, None, [1])
        ],
        *[
            ({"resources": [{"mem": bad}]}, "resources[0].mem", [MEMORY, "mem: 2GB"])
            for bad in ("2000", "lots", 0, -1, 1.5, "1KB", True, "9" * 400 + "GB")
        ],
        *[
            ({"resources": [{"runtime": bad}]}, "resources[0].runtime", [TIME, "`30m`"])
            for bad in ("30", "1:30", "x", 0, "0m", "-5m", 1.5, True, "9" * 400 + "h")
        ],
        *[({"lease_timeout": bad}, "lease_timeout", [TIME, "`30m`"]) for bad in (None, "", 0)],
        *[({"resources": [{"cpus": bad}]}, "resources[0].cpus", ["threads"]) for bad in (0, "2", 1.5, True, None)],
        ({"resources": {"gpu": 1}}, "resources", ["a list (`- ` lines"]),
        ({"resources": [3]}, "resources[0]", ["a mapping"]),
        ({"resources": [{"match": ["lr"]}]}, "resources[0].match", ["a mapping"]),
        ({"resources": [{"match": {1: 2}}]}, "resources[0].match", ["text as the name of a key", 'quote it: "1"']),
        ({"on_error": "ignore"}, "on_error", ["'raise' or 'nan'"]),
        ({"on_error": math.nan}, "on_error", ["'raise' or 'nan'"]),
        ({"placement": "roundrobin"}, "placement", ["'packed' or 'round_robin'"]),
        ({"jobs_per_gpu": 0}, "jobs_per_gpu", ["1 or more"]),
        ({"jobs_per_gpu": 1001}, "jobs_per_gpu", ["1000 or less"]),
        ({"devices": 0}, "devices", ["1 or more"]),
        ({"devices": "all"}, "devices", ["a whole number"]),
        ({"confirm_above": "1e6"}, "confirm_above", ["a whole number"]),
        *[({"results": bad}, "results", ["a path without braces"]) for bad in ("", "a{b}", "a\0b", "a\nb")],
        *[({"mps": bad}, "mps", ["true, false or a mapping", "`mps: true`"]) for bad in ("on", 1, [True])],
        ({"mps": {"thread_percentage": 0}}, "mps.thread_percentage", ["1 or more"]),
        ({"mps": {"pinned_memory": "2G"}}, "mps.pinned_memory", ["true or false"]),
        ({"mps": {"threads": 50}}, "mps.threads", ["did you mean `thread_percentage`?"]),
        ({"slurm": {"gpu_model": "a 100"}}, "slurm.gpu_model", ["a name of letters, digits"]),
        ({"slurm": {"extra": "--mem=3G"}}, "slurm.extra", ["no `--mem`", "slurm.mem"]),
        ({"slurm": {"grace": "1s"}}, "slurm.grace", ["5 s or more"]),
        ({"results": 3}, "results", ["text", "Folder of all results"]),
        *[({"import_timeout": bad}, "import_timeout", ["Seconds"]) for bad in (0, -1, math.inf, math.nan, "2m", True)],
        ({1: 2}, "config.yaml", ["text as the name of a key", 'quote it: "1"']),
        *[
            ({"resources": [entry]}, f"resources[0].{key}", words)
            for entry, key, words in (
                ({"gpu": 0.5, "gpus_per_node": 2}, "gpu", ["no share beside `gpus_per_node`", "0.5", "remove `gpu`"]),
                ({"nodes": 2}, "gpus_per_node", ["beside `nodes: 2`", "add `gpus_per_node: 1`"]),
                ({"nodes": 0, "gpus_per_node": 2}, "nodes", ["1 or more", "write `nodes: 2`"]),
                ({"nodes": "2:1", "gpus_per_node": 2}, "nodes", ["1 or more", "a range"]),
                ({"gpus_per_node": 2.9}, "gpus_per_node", ["a whole number"]),
                ({"gpus_per_node": 0}, "gpus_per_node", ["1 or more"]),
                ({"nodes": 1, "gpus_per_node": 1}, "gpus_per_node", ["1 node × 1 GPU", "a cell like any other"]),
                *(
                    ({"gpus_per_node": 2, name: 2}, name, ["follows from others", words])
                    for name, words in (
                        ("tasks", "nodes × gpus_per_node"),
                        ("ntasks_per_node", "it is gpus_per_node"),
                        ("devices", "it is gpus_per_node"),
                        ("cpus_per_task", "write `cpus`"),
                    )
                ),
                ({"ddp": {"restarts": 2}}, "ddp", ["`gpus_per_node` beside it"]),
                ({"gpus_per_node": 2, "ddp": {"restarts": 2}}, "ddp.restarts", ["`launcher: torchrun`"]),
                ({"gpus_per_node": 2, "ddp": {"launcher": "mpirun"}}, "ddp.launcher", ["torchrun"]),
                ({"gpus_per_node": 2, "ddp": {"start_seconds": 1}}, "ddp.start_seconds", ["from 5 s"]),
            )
        ],
    ],
)
def test_a_bad_value_at_the_top_or_under_resources(top: dict[Any, Any], key: str, words: list[str]) -> None:
    check_words(refused(lambda: validate({**config_of({}), **top}, "config.yaml")), key, *words)


@pytest.mark.parametrize(
    ("sweep", "key", "words"),
    [
        ({"axis": {}}, "sweep.axis", ["did you mean `axes`?", "Known: axes, exclude, include"]),
        ({"sample": {"cout": 3}}, "sweep.sample.cout", ["did you mean `count`?", "Known: count, seed"]),
        ({"sample": {"seed": 3}}, "sweep.sample.count", ["required", "How many cells to keep"]),
        ({"sample": {"count": 0}}, "sweep.sample.count", ["1 or more"]),
        ({"sample": 10}, "sweep.sample", ["a mapping"]),
        *[
            ({"name": bad}, "sweep.name", ["letters, digits, `_` and `-`"])
            for bad in ("a/b", "", "..", "-x", "a b", "é", "a\n", "x" * 65)
        ],
        ({"name": 3}, "sweep.name", ["text", "Name of the sweep"]),
        *[
            ({"task": bad}, "sweep.task", TASK_WORDS)
            for bad in (None, 3, [], {}, {"command": []}, {"command": "ls -l"}, {"command": [1]})
        ],
        ({"task": {"comand": ["ls"]}}, "sweep.task.comand", ["did you mean `command`?"]),
        *[({key: bad}, f"sweep.{key}", ["a mapping"]) for key in ("params", "axes") for bad in (None, ["lr"], "lr", 3)],
        *[
            ({key: bad}, f"sweep.{key}", ["a list"])
            for key in ("zip", "include", "exclude")
            for bad in (None, {"lr": [1]}, 3)
        ],
        *[({key: ["lr"]}, f"sweep.{key}[0]", ["a mapping"]) for key in ("zip", "include", "exclude")],
        *[
            ({key: {1: 2}}, f"sweep.{key}", ["text as the name of a key", 'quote it: "1"'])
            for key in ("params", "axes")
        ],
    ],
)
def test_a_bad_value_under_sweep(sweep: dict[str, Any], key: str, words: list[str]) -> None:
    check_words(refused(lambda: checked(sweep)), key, *words)


@pytest.mark.parametrize("data", [None, [], "sweep", 3])
def test_a_file_that_is_no_mapping_is_refused_by_its_name(data: Any) -> None:
    check_words(refused(lambda: validate(data, "my.yaml")), "my.yaml", "a mapping", "start the file with `sweep:`")


def test_of_several_mistakes_the_misspelt_key_is_told_and_not_what_it_left_missing() -> None:
    check_words(refused(lambda: validate({"swep": {}, "devices": 0}, "f")), "swep", "did you mean `sweep`?")
    check_words(refused(lambda: validate({}, "f")), "sweep", "required", "add `sweep:`")


def test_an_error_shows_key_value_expectation_and_fix_on_four_lines(tmp_path: Path) -> None:
    error = refused(lambda: load(tmp_path, config_of({}, resources=[{"gpu": 1.2}])))
    lines = str(error).splitlines()
    assert lines[0] == "sweepack: error in resources[0].gpu"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["value", "expected", "fix"]
    assert "1.2" in lines[1]


@pytest.mark.parametrize("name", ["absent.yaml", "folder", "binary.yaml"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    error = refused(lambda: load_config(tmp_path / "config.yaml", [tmp_path / name], [], tmp_path))
    check_words(error, name, "a configuration in a text file", "--configfile")


def test_an_error_in_the_text_names_the_file_as_seen_from_the_project(tmp_path: Path) -> None:
    assert refused(lambda: load(tmp_path, "sweep: {name: s\n")).key.startswith("config.yaml, line 2")
    check_words(refused(lambda: load(tmp_path, "")), "config.yaml", "None", "start the file with `sweep:`")


def test_a_second_config_file_is_refused_and_one_replaces_the_default(tmp_path: Path) -> None:
    config, _ = load(tmp_path, config_of({"axes": {"lr": [1, 2], "width": [3]}}))
    other = tmp_path / "other.yaml"
    other.write_text("sweep: {name: other, task: task.py:train, axes: {width: [1]}}")
    replaced, _ = load_config(tmp_path / "config.yaml", [other], [], tmp_path)
    assert config.sweep.axes.keys() == {"lr", "width"} and replaced.sweep.axes == {"width": [1]}
    error = refused(lambda: load_config(tmp_path / "config.yaml", [other, other], [], tmp_path))
    check_words(error, "--configfile", "one file, which replaces the default", "join the files")


def paths_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths_in(value[key], (*at, key))


def with_value(path: tuple[Any, ...], value: Any, name: str | None = None) -> Any:
    """WHOLE with ``value`` at ``path``, or with the key there called ``name``."""
    if not path:
        return value
    config = inner = copy.deepcopy(WHOLE)
    for key in path[:-1]:
        inner = inner[key]
    if name is None or isinstance(inner, list):
        inner[path[-1]] = value
    else:
        inner[name] = inner.pop(path[-1])
    return config


TRICKY = ["optim.lr", "0.5", "2GB", "9" * 290 + "GB", ".iNf", "inf", "1e999", ">= 3", "> e", "< .", "x.py:f", "a.b:f"]
leaves = (
    st.none()
    | st.integers(-3, 12)
    | st.booleans()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from([*TRICKY, "a" * 300 + ".py:f", "٣", "\0", 10**290, 10**12, -math.inf])
)
keys = st.sampled_from(["lr", "optim", "optim.lr", "range", "linspace", "count", "command", "cell", ""]) | st.text(
    max_size=3
)
junk = st.recursive(leaves, lambda v: st.lists(v, max_size=4) | st.dictionaries(keys, v, max_size=3), max_leaves=6)
places = st.sampled_from(list(paths_in(WHOLE)))
spoilt = st.builds(with_value, places, junk) | st.builds(with_value, places, st.none(), keys)
names = places.map(lambda path: ".".join(map(str, path))) | places.map(lambda path: ".".join(map(str, path[1:]))) | keys


def dumped(value: Any) -> str:
    return json.dumps(value).replace("Infinity", ".inf").replace("NaN", ".nan").replace("\x7f", "?")


overrides = (
    st.builds(lambda name, value: f"{name}={dumped(value)}", names, junk)
    | st.dictionaries(names, junk, max_size=2).map(lambda entries: f"set={dumped(entries)}")
    | st.text(max_size=8)
)


def outcome(folder: Path, config: Any, given: list[str], source: str) -> str:
    try:
        expand(*load(folder, dumped(config), *given, source=source))
    except UserError as error:
        assert error.key and error.expected and error.fix
        return str(error)
    return ""


def test_the_configuration_with_every_key_works(tmp_path: Path) -> None:
    assert outcome(tmp_path, WHOLE, [], SOURCE) == ""


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=spoilt, given=st.lists(overrides, max_size=1), source=st.sampled_from([SOURCE, OPEN]))
def test_whatever_is_spoilt_ends_in_success_or_one_user_error(
    tmp_path: Path, config: Any, given: list[str], source: str
) -> None:
    outcome(tmp_path, config, given, source)  # any other exception fails the test
