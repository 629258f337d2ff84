"""The script that tries the claims on a GPU: the section that it adds to the page, and what it does without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu/run"
MACHINE = {
    **{"gpu": "NVIDIA H200", "memory": 139 * 2**30, "count": 1},
    **{"driver": "570.1", "cuda": "12.8", "torch": "2.13.0+cu128"},
}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = SourceFileLoader("gpu_run", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_run", loader))
    loader.exec_module(module)
    return module


def told(test, outcome, reason="", **numbers):
    return {"test": f"tests/gpu/test_x.py::{test}", "outcome": outcome, "reason": reason, "numbers": numbers}


def test_a_section_says_where_what_held_and_with_which_numbers(script):
    lines = [
        *(told(test, "not reached", "the time was over") for test in ("test_a_cap_holds[fresh]", "test_b", "test_c")),
        told("test_d", "not reached", "the time was over"),
        told("test_a_cap_holds[fresh]", "passed", cap="34 GiB", told=1),
        told("test_b", "skipped", "no MPS | here"),
        told("test_c", "passed", gain=2),
        told("test_c", "failed", "teardown: a\nprocess is left"),
    ]
    text = script.section(MACHINE, lines, 77.7)
    assert "NVIDIA H200 of 139.0 GiB, driver 570.1, CUDA 12.8, torch 2.13.0+cu128" in text
    assert "1 passed, 1 failed, 1 skipped, 1 not reached in 78 s." in text
    assert text.splitlines()[-4:] == [
        "| a cap holds (fresh) | passed | cap: 34 GiB; told: 1 |",
        "| b | skipped | no MPS \\| here |",
        "| c | failed | gain: 2; teardown: a process is left |",
        "| d | not reached | the time was over |",
    ]


def test_each_run_adds_a_section(script, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"# Results\n\n{script.NONE_YET}")
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script, "DESCRIBE", f"import json; print(json.dumps({MACHINE}))")
    monkeypatch.setattr(sys, "argv", ["run"])

    def run_tests(arguments, results, begun):
        results.write_text('{"test": "test_a", "outcome": "failed", "reason": "no", "numbers": {}}\n')
        return 1

    monkeypatch.setattr(script, "run_tests", run_tests)
    assert script.main() == script.main() == 1
    text = page.read_text()
    assert text.startswith("# Results\n\n## 2") and text.count("\n\n## 2") == 2 == text.count("| a | failed | no |")
    assert script.NONE_YET not in text


def test_without_a_gpu_all_is_skipped_and_the_page_stays(tmp_path):
    page = tmp_path / "page.md"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SWEEPACK_GPU_PAGE": str(page)}
    command = [sys.executable, str(SCRIPT), "-k", "devices"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1 skipped" in done.stdout and "no GPU is at hand" in done.stdout
    assert not page.exists()


def test_the_time_is_kept(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SWEEPACK_GPU_SECONDS": "20.5"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the 20.5 seconds are over" in done.stderr
