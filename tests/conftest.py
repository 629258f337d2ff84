"""A sandbox to run real sweeps in: its own project folder, its own leases, the repository's Snakefile and profiles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parent.parent
LONGEST_WAIT = 300.0


@dataclass
class Sandbox:
    """A folder that holds a task and a config, and the ways a user has to run them."""

    root: Path
    environment: dict[str, str]

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def config(self, **config: Any) -> None:
        """Write config/config.yaml; JSON is YAML. Without the report, unless asked for: it takes long to draw."""
        self.write("config/config.yaml", json.dumps({"report": False, **config}))

    def start(self, *arguments: str, profile: str | None = "local", **environment: str) -> subprocess.Popen[str]:
        """Start `snakemake`; `profile` is None for a bare call."""
        command = ["snakemake", "--snakefile", str(REPOSITORY / "Snakefile"), *arguments]
        if profile:
            command += ["--profile", str(REPOSITORY / "profiles" / profile)]
        return subprocess.Popen(
            command,
            cwd=self.root,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A shell that runs the tests in the background has it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def snakemake(
        self, *arguments: str, profile: str | None = "local", status: int | None = 0, **environment: str
    ) -> str:
        """Run `snakemake` to its end; what it printed. Its exit status must be `status`, unless that is None."""
        process = self.start(*arguments, profile=profile, **environment)
        try:
            output, _ = process.communicate(timeout=LONGEST_WAIT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert status is None or process.returncode == status, output
        return output

    def sweepack(self, *arguments: str, status: int = 0) -> str:
        """Run the `sweepack` command."""
        done = subprocess.run(
            ["sweepack", *arguments],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_WAIT,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def cells(self, sweep: str = "test") -> dict[str, dict[str, Any]]:
        """The status record of every cell by id, with its parameters under `params` and its directory under `dir`."""
        found = {}
        for meaning in sorted((self.root / "results" / sweep / "cells").glob("*/cell.json")):
            status = meaning.with_name("status.json")
            record = json.loads(status.read_text()) if status.exists() else {"status": "pending"}
            cell = json.loads(meaning.read_text())
            found[cell["id"]] = {**record, "params": cell["params"], "dir": meaning.parent}
        return found

    def trained(self) -> list[str]:
        """What the tasks of this file's tests note in `trained.txt` whenever they really run, one line a time."""
        path = self.root / "trained.txt"
        return path.read_text().split() if path.exists() else []


def make_sandbox(folder: Path) -> Sandbox:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SWEEPACK_", "CUDA_", "SNAKEMAKE_"))
    }
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["SWEEPACK_LEASES"] = str(folder / "leases")
    environment["SWEEPACK_DEVICES"] = "cpu"
    root = folder / "project"
    root.mkdir()
    return Sandbox(root, environment)


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return make_sandbox(tmp_path)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds; fail, saying for what, when it does not in time."""

    def wait(condition: Callable[[], object], what: str, limit: float = LONGEST_WAIT) -> None:
        end = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < end, f"waited {limit:g} s in vain for {what}"
            time.sleep(0.05)

    return wait
