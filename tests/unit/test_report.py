from __future__ import annotations

import fcntl
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sweepack
from made_sweeps import ACC, end_cell, make_sweep
from sweepack.manifest import Manifest
from sweepack.records import State
from sweepack.report import write_report

GRID = [{"model": model, "lr": lr, "seed": seed} for model in ("mlp", "cnn") for lr in (0.1, 0.001) for seed in (0, 1)]
SCORES = [{"acc": 0.5 + number / 100} for number in range(len(GRID))]
CURVE = [{"epoch": epoch, "step": epoch, "metrics": {"acc": epoch / 10}} for epoch in range(4)]


def report(directory):
    return write_report(Manifest.read(directory), directory).read_text()


def sections(page):
    return re.findall("<h2>(.*?)</h2>", page)


def best_cell(page):
    return re.search(r"<tbody>\s*<tr><td><a [^>]*><code>(\w+)</code>", page)[1]


def figures(page):
    """The figures' texts by their label."""
    found = re.findall(r'<figure[^>]*aria-label="([^"]*)">(.*?)</figure>', page, re.DOTALL)
    return {name: re.findall(r"<text[^>]*>(.*?)</text>", svg) for name, svg in found}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep with an objective, a history and one failure."""
    directory = tmp_path_factory.mktemp("results") / "s"
    make_sweep(directory, GRID, SCORES, objective=ACC, history=CURVE)
    end_cell(directory, "0001", State.FAILED, error="ValueError: <script>alert(1)</script>")
    return directory, report(directory)


def test_a_sweep_with_an_objective_gets_every_section(swept):
    _, page = swept
    along = "acc along each axis"
    assert sections(page) == ["Best cells", "Mean over seeds", along, "Learning curves", "Schedule", "Failures"]
    axes = ["against model", "against lr", "against seed"]
    assert list(figures(page)) == [*axes, "learning curves of acc", "schedule"]
    assert '<li class="finished">7 finished</li><li class="failed">1 failed</li>' in page
    assert best_cell(page) == "0008"


def test_a_failure_is_shown_with_its_error_as_text_and_its_log(swept):
    _, page = swept
    assert "ValueError: &lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert '<a href="cells/0001/log.txt"' in page


def test_the_page_needs_nothing_from_elsewhere(swept):
    _, page = swept
    assert not re.search(r"""(src|href)=["'](https?:)?//|url\(["']?http|@import|<link|<script""", page)


def test_the_same_cells_give_the_same_page(swept):
    directory, page = swept
    assert report(directory) == page


def test_best_cells_follow_the_mode(tmp_path):
    make_sweep(tmp_path / "s", GRID, SCORES, objective={"metric": "acc", "mode": "min"})
    assert best_cell(report(tmp_path / "s")) == "0001"


def test_packing_is_cell_time_over_the_time_in_which_something_ran(tmp_path):
    make_sweep(tmp_path / "s", [{"a": number} for number in range(4)])
    for cell, start, end in [("0001", 0, 10), ("0002", 0, 10), ("0003", 5, 10), ("0004", 5000, 5010)]:
        end_cell(tmp_path / "s", cell, metrics={}, started=start, ended=end)
    page = report(tmp_path / "s")
    assert "35.0 s of cell time within 20.0 s of running time: <strong>1.8 cells at once</strong>" in page
    assert any("pauses cut" in text for text in figures(page)["schedule"])


ENDLESS = [{"epoch": None, "step": None, "metrics": {"acc": math.inf}}]


@pytest.mark.parametrize(
    ("metrics", "history", "found"),
    [
        ([], [], ["Best cells"]),
        ([None, {}], CURVE, ["Best cells", "Learning curves", "Schedule"]),
        ([{"acc": "high"}], ENDLESS, ["Best cells", "Learning curves", "Schedule"]),
        ([{"acc": math.nan}, {"acc": -math.inf}], [], ["Best cells", "acc along each axis", "Schedule"]),
    ],
)
def test_a_sweep_with_little_to_show_still_gets_its_page(tmp_path, metrics, history, found):
    make_sweep(tmp_path / "s", GRID, metrics, objective=ACC, history=history)
    page = report(tmp_path / "s")
    assert sections(page) == found
    assert ("No finished cell reports the number <code>acc</code>" in page) == ("acc along each axis" not in found)


def test_one_cell_and_failed_cells_only_get_their_page(tmp_path):
    make_sweep(tmp_path / "one", [{"a": 1}], [{"acc": 0.5}], objective=ACC, history=CURVE)
    assert sections(report(tmp_path / "one")) == ["Best cells", "Learning curves", "Schedule"]
    make_sweep(tmp_path / "failed", [{"a": 1}, {"a": 2}], objective=ACC)
    for cell in ("0001", "0002"):
        end_cell(tmp_path / "failed", cell, State.FAILED, error="MemoryError: no")
    assert sections(report(tmp_path / "failed")) == ["Best cells", "Schedule", "Failures"]


def test_without_an_objective_the_metrics_are_drawn_but_not_ranked(tmp_path):
    make_sweep(tmp_path / "s", GRID, SCORES, history=CURVE)
    assert sections(report(tmp_path / "s")) == ["acc along each axis", "Learning curves", "Schedule"]


def test_without_matplotlib_the_page_has_its_tables_and_says_why_there_are_no_figures(tmp_path, monkeypatch):
    make_sweep(tmp_path / "s", GRID, SCORES, objective=ACC)
    monkeypatch.delitem(sys.modules, "sweepack.figures", raising=False)
    monkeypatch.delattr(sweepack, "figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "sweepack.report")
    from sweepack.report import write_report

    page = write_report(Manifest.read(tmp_path / "s"), tmp_path / "s").read_text()
    assert sections(page) == ["Best cells", "Mean over seeds"]
    assert "no figures: " in page


def test_axes_over_decades_are_logarithmic_with_their_values_as_ticks(tmp_path):
    params = [
        {"lr": lr, "wd": wd, "width": width} for lr, wd, width in [(1e-4, 0, 32), (1e-3, 1e-4, 40), (0.1, 0.1, 48)]
    ]
    make_sweep(tmp_path / "s", params, SCORES[:3], objective=ACC)
    drawn = figures(report(tmp_path / "s"))
    assert drawn["against lr"][:3] == ["0.0001", "0.001", "0.1"]
    assert drawn["against wd"][:3] == ["0", "0.0001", "0.1"]
    assert drawn["against width"][:3] == ["32", "40", "48"]
    low, middle, high = tick_positions(tmp_path / "s/report.html", "against lr")
    assert high - middle == pytest.approx(2 * (middle - low), rel=0.01)


def tick_positions(path, figure):
    """Where the first three ticks of the figure stand from left to right."""
    svg = path.read_text().partition(f'aria-label="{figure}"')[2]
    return [float(x) for x in re.findall(r'<text[^>]* x="([\d.]+)"', svg)[:3]]


def test_values_appear_as_they_are_and_not_as_formulas_or_markup(tmp_path):
    params = [{"opt": "$a_1$"}, {"opt": "<b>&"}, {"opt": None}, {"opt": [0.9, 1]}]
    make_sweep(tmp_path / "s", params, SCORES[:4], objective=ACC)
    assert figures(report(tmp_path / "s"))["against opt"][:4] == ["$a_1$", "&lt;b&gt;&amp;", "null", "[0.9, 1]"]


def test_many_cells_and_devices_stay_legible_and_small(tmp_path):
    params = [{"lr": number / 1000, "kind": f"kind {number % 200}"} for number in range(1500)]
    make_sweep(tmp_path / "s", params, objective=ACC)
    for number in range(1, 1501):
        metrics = {"acc": math.sin(number)}
        end_cell(tmp_path / "s", f"{number:04x}", metrics=metrics, history=CURVE, device=f"GPU-{number % 60:02d}")
    page = report(tmp_path / "s")
    drawn = figures(page)
    assert sum(text.startswith("GPU-") for text in drawn["schedule"]) == 40
    assert any("the 40 busiest of 60 devices" in text for text in drawn["schedule"])
    assert sum(text.startswith("kind ") for text in drawn["against kind"]) <= 30
    assert len(page) < 400_000


def test_the_scripts_write_the_tables_and_the_page_or_say_what_is_wrong(tmp_path):
    def script(name, *arguments):
        path = Path(__file__).parents[2] / "scripts" / name
        return subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True)

    make_sweep(tmp_path / "s", [{"a": 1}, {"a": 2}], [{"acc": 1.0}])
    refused = script("table.py", "--sweep-dir", tmp_path / "s")
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (1, "sweepack: error in the cells of s")
    assert script("table.py", "--sweep-dir", tmp_path / "s", "--partial").returncode == 0
    assert (tmp_path / "s/table.parquet").exists()
    assert script("report.py", "--sweep-dir", tmp_path / "s").stdout == f"{tmp_path / 's/report.html'}\n"
    lost = script("report.py", "--sweep-dir", tmp_path / "none")
    assert (lost.returncode, lost.stderr.splitlines()[0]) == (1, "sweepack: error in the sweep's directory")


def test_a_running_cell_counts_until_now(tmp_path):
    make_sweep(tmp_path / "s", [{"a": 1}, {"a": 2}])
    start = time.time() - 600
    end_cell(tmp_path / "s", "0001", State.RUNNING, started=start, ended=None)
    end_cell(tmp_path / "s", "0002", metrics={}, started=start, ended=start + 60)
    lock = os.open(tmp_path / "s/cells/0001/lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    page = report(tmp_path / "s")
    os.close(lock)
    assert "running" in figures(page)["schedule"]
    assert re.search(r"11 min \d\d s of cell time within 10 min \d\d s of running time", page)
