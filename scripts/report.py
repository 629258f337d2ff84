"""Write a sweep's report.html, one self-contained page, from what its cells have left."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sweepack.errors import UserError
from sweepack.manifest import Manifest
from sweepack.report import write_report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep-dir", type=Path, required=True, help="the sweep's folder, results/<sweep>")
    arguments = parser.parse_args()
    try:
        print(write_report(Manifest.read(arguments.sweep_dir), arguments.sweep_dir))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
