"""What a run does at its end, as commands: write the table, then the report that shows it.

What these import takes longer than what they do. A warm host has imported it by then, and forks them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sweepack.errors import tells_user_errors
from sweepack.manifest import Manifest


@tells_user_errors
def table(argv: Sequence[str] | None = None) -> int:
    """Write the tables of the sweep that ``argv`` names, and print what its cells advise; the exit status."""
    parser = _parser("Write a sweep's table, history and failures (Parquet and CSV) from what its cells have left.")
    parser.add_argument("--partial", action="store_true", help="allow for cells that have not ended yet")
    options = parser.parse_args(argv)

    from sweepack.advice import advise
    from sweepack.results import write_tables

    for line in advise(write_tables(Manifest.read(options.sweep_dir), options.sweep_dir, partial=options.partial)):
        print(f"advice: {line}")
    return 0


@tells_user_errors
def report(argv: Sequence[str] | None = None) -> int:
    """Write the report about the sweep that ``argv`` names, and print where it is; the exit status."""
    parser = _parser("Write a sweep's report.html, one self-contained page, from what its cells have left.")
    options = parser.parse_args(argv)

    from sweepack.report import write_report

    print(write_report(Manifest.read(options.sweep_dir), options.sweep_dir))
    return 0


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sweep-dir", type=Path, required=True, help="the sweep's folder, results/<sweep>")
    return parser
