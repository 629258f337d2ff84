from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_sweeps import ACC, end_cell, make_sweep
from sweepack.cli import app
from sweepack.records import State
from typer.testing import CliRunner

GRID = [{"lr": lr, "seed": seed, "width": 64} for lr in (0.1, 0.001) for seed in (0, 1)]
SCORES = [{"acc": score, "loss": 1 - score} for score in (0.5, 0.7, 0.9123456, 0.8)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWEEPACK_RESULTS", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)


def sweepack(*arguments, code=0, **environment):
    """What the command prints, on standard output and on standard error."""
    done = CliRunner().invoke(app, arguments, env=environment)
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.stdout, done.stderr


def table(text):
    """The printed table as rows of words, head first."""
    head, _, *rows = text.splitlines()
    return [row.split() for row in (head, *rows)]


def test_show_lists_the_cells_with_the_parameters_that_vary():
    make_sweep(Path("results/s"), GRID, SCORES, objective=ACC)
    head, first, _, third, _, *summary = table(sweepack("show", "s")[0])
    assert head == ["cell", "status", "lr", "seed", "acc", "loss", "device", "wall_s"]
    assert first == ["0001", "finished", "0.1", "0", "0.50000", "0.50000", "cpu", "2.5"]
    assert third[2:5] == ["0.001", "0", "0.91235"]
    assert summary == [["4", "cells:", "4", "finished"]]
    assert "width" in table(sweepack("show", "s", "--all-params")[0])[0]


def test_show_has_the_peak_of_what_was_capped_and_no_more():
    make_sweep(Path("results/s"), GRID, SCORES, memory={"cap": None, "reserved": None, "rss": 2**28})
    assert "peak" not in sweepack("show", "s")[0]
    end_cell(Path("results/s"), "0001", metrics={}, memory={"cap": 2**30, "reserved": None, "rss": 2**28})
    head, first, *_ = table(sweepack("show", "s")[0])
    assert "peak_reserved_gib" not in head and first[head.index("peak_rss_gib")] == "0.250"
    end_cell(
        Path("results/s"), "0002", State.FAILED, memory={"reserved": 2**29, "rss": 1}, failure="oom_cap", error="e"
    )
    head = table(sweepack("show", "s")[0])[0]
    assert {"peak_reserved_gib", "failure"} <= set(head) and "peak_rss_gib" not in head and "share" not in head
    # One that went on with more than the others.
    end_cell(Path("results/s"), "0001", metrics={}, memory={"reserved": 2**29, "rss": 1}, share=250)
    end_cell(Path("results/s"), "0002", metrics={}, memory={"reserved": 2**29, "rss": 1}, share=500)
    head, first, *_ = table(sweepack("show", "s")[0])
    assert first[head.index("share")] == "0.25000"


def test_show_picks_and_sorts_cells_and_says_how_many_it_leaves_out():
    make_sweep(Path("results/s"), GRID, SCORES)
    end_cell(Path("results/s"), "0002", State.FAILED, error="ValueError: too much\nand more")
    output, _ = sweepack("show", "s", "--status", "failed")
    assert [row[0] for row in table(output)] == ["cell", "0002", "4"]
    assert "ValueError: too much" in output
    assert "and more" not in output
    output, _ = sweepack("show", "s", "--sort", "acc", "--reverse", "--limit", "2")
    assert [row[0] for row in table(output)][1:3] == ["0003", "0004"]
    assert "2 more not shown: --limit 0 shows all" in output
    assert "more" not in sweepack("show", "s", "--limit", "0")[0]


def test_show_works_while_the_sweep_runs():
    make_sweep(Path("results/s"), GRID, SCORES[:1])
    end_cell(Path("results/s"), "0002", State.RUNNING, ended=None)
    lock = os.open("results/s/cells/0002/lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "4 cells: 1 finished, 1 running, 2 pending" in sweepack("show", "s")[0]
    os.close(lock)
    assert "4 cells: 1 finished, 1 lost, 2 pending" in sweepack("show", "s")[0]


def test_a_metric_of_a_finished_cell_that_is_no_number_shows_as_nan():
    make_sweep(Path("results/s"), GRID, [{"acc": float("nan")}, {"acc": 0.5}])
    rows = table(sweepack("show", "s")[0])
    assert rows[1][4] == "nan"
    assert rows[3] == ["0003", "pending", "0.001", "0"]


def test_piped_output_is_neither_cut_nor_wrapped():
    names = [f"parameter_with_a_long_name_{number}" for number in range(12)]
    make_sweep(Path("results/s"), [{name: f"{side}-{name}" * 3 for name in names} for side in "ab"])
    rows = table(sweepack("show", "s")[0])
    assert rows[1][2:14] == [f"a-{name}" * 3 for name in names]


def test_markup_in_a_value_is_printed_as_it_is():
    make_sweep(Path("results/s"), [{"a": "[red]x[/red]"}, {"a": "[/]"}], [{"acc": 1.0}])
    assert [row[2] for row in table(sweepack("show", "s")[0])[1:3]] == ["[red]x[/red]", "[/]"]


def test_the_most_recently_changed_sweep_is_the_default_and_is_named_once_on_standard_error():
    for name in ("old", "new"):
        make_sweep(Path("results", name), [{name: 1}, {name: 2}], [{"acc": 1.0}])
    for number, path in enumerate(sorted(Path("results").rglob("*"), key=lambda path: "old" in path.parts)):
        os.utime(path, (number, number))
    output, note = sweepack("show")
    assert output.splitlines()[0].split()[2] == "old"
    assert note == "sweep old (results/old, the most recently changed of 2)\n"
    os.utime("results/new/cells/0001", (10**9, 10**9))
    assert sweepack("show")[1].startswith("sweep new ")


def test_a_sweep_is_named_or_given_as_a_directory_and_results_lie_where_told():
    make_sweep(Path("elsewhere/s"), GRID, SCORES)
    for arguments, environment in [
        (["elsewhere/s"], {}),
        (["s", "--results", "elsewhere"], {}),
        ([], {"SWEEPACK_RESULTS": "elsewhere"}),
    ]:
        assert "4 finished" in sweepack("show", *arguments, **environment)[0]


@pytest.mark.parametrize(
    ("arguments", "key", "fix"),
    [
        (["show", "digit"], "SWEEP", "did you mean `digits`? Known: digits, other."),
        (["show", "--results", "nowhere"], "--results", "run a sweep first"),
        (["show", "digits", "--status", "fail"], "--status", "did you mean `failed`"),
        (["show", "digits", "--sort", "acccuracy"], "--sort", "did you mean `acc`"),
        (["best", "digits", "--metric", "losss"], "--metric", "did you mean `loss`"),
        (["best", "digits", "--metric", "loss"], "--mode", "--metric loss --mode max"),
        (["best", "digits", "--mode", "most"], "--mode", "--mode max"),
        (["best", "digits", "--over", "sed"], "--over", "did you mean `seed`"),
        (["best", "other"], "--metric", "Known: acc, loss."),
        (["diff", "digits", "nothing"], "SWEEP", "Known: digits, other."),
    ],
)
def test_bad_input_gives_one_error_with_its_fix_and_no_traceback(arguments, key, fix):
    make_sweep(Path("results/digits"), GRID, SCORES, objective=ACC)
    make_sweep(Path("results/other"), GRID, SCORES)
    output, error = sweepack(*arguments, code=1)
    message = error[error.index("sweepack: error") :]
    assert message.startswith(f"sweepack: error in {key}\n")
    assert fix in message
    assert output == ""


def test_best_ranks_by_the_objective_and_by_another_metric_when_asked():
    make_sweep(Path("results/s"), GRID, SCORES, objective=ACC)
    output, _ = sweepack("best", "s", "--top", "2")
    assert [row[0] for row in table(output)][:3] == ["cell", "0003", "0004"]
    assert table(output)[0] == ["cell", "lr", "seed", "acc", "loss", "wall_s"]
    output, _ = sweepack("best", "s", "--metric", "loss", "--mode", "max", "--top", "1")
    assert table(output)[1][0] == "0001"


def test_best_over_seeds_shows_the_groups():
    make_sweep(Path("results/s"), GRID, SCORES, objective=ACC)
    rows = table(sweepack("best", "s", "--over", "seed")[0])
    assert rows[:3] == [
        ["lr", "mean", "std", "n"],
        ["0.001", "0.85617", "0.079440", "2"],
        ["0.1", "0.60000", "0.14142", "2"],
    ]


def test_best_before_any_cell_has_finished_says_so():
    make_sweep(Path("results/s"), GRID, objective=ACC)
    assert sweepack("best", "s")[0] == "No cell has finished yet. 4 cells: 4 pending\n"


def test_diff_tells_equal_sweeps_from_different_ones_by_its_exit_code():
    make_sweep(Path("results/a"), GRID, SCORES)
    make_sweep(Path("results/b"), GRID, [{**scores, "loss": scores["loss"] * (1 + 1e-9)} for scores in SCORES])
    output, _ = sweepack("diff", "a", "b")
    assert output.startswith("results/a and results/b are equal within a relative 1e-6: ids, parameters, ")
    assert "of 4 cells" in output
    output, _ = sweepack("diff", "a", "b", "--exact", "--limit", "3", code=1)
    assert output.splitlines()[0] == "0001 cell-1: metrics.loss: 0.5 | 0.5000000005"
    assert output.splitlines()[3:] == [
        "4 differences between results/a and results/b, 3 shown (--limit 0 shows all)",
    ]
    assert "bit for bit" in sweepack("diff", "a", "results/a", "--exact")[0]


def test_help_answers_without_loading_the_heavy_libraries():
    program = (
        "import sys; from typer.testing import CliRunner; from sweepack.cli import app\n"
        "assert 'show' in CliRunner().invoke(app, ['--help']).stdout\n"
        "print(sorted({'pandas', 'pyarrow', 'torch', 'matplotlib', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
