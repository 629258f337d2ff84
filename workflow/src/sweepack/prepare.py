"""Run ``prepare()`` of the task's module, once per sweep, before any cell: downloads, caches, preprocessing."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from sweepack.errors import tells_user_errors
from sweepack.files import write_atomic
from sweepack.importing import import_task
from sweepack.manifest import Manifest
from sweepack.task import load_task


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run prepare() of a sweep's task.")
    parser.add_argument("--sweep-dir", type=Path, required=True, help="the sweep's directory, results/<sweep>")
    parser.add_argument("--stamp", type=Path, required=True, help="file to write once it has succeeded")
    return parser


@tells_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run it and write the stamp; the exit status."""
    options = parser().parse_args(argv)
    root = Path.cwd()
    task = load_task(Manifest.read(options.sweep_dir).task, root)
    try:
        module, _ = import_task(task.to_json(root), root)
        print(f"sweepack: prepare() of {task.reference}", file=sys.stderr)
        module.prepare()
    except (Exception, SystemExit):
        traceback.print_exc()
        return 1
    write_atomic(options.stamp, "")
    return 0
