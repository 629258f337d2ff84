"""Write a sweep's report.html, one self-contained page, from what its cells have left."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sweepack.errors import tells_user_errors
from sweepack.manifest import Manifest
from sweepack.report import write_report


@tells_user_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep-dir", type=Path, required=True, help="the sweep's folder, results/<sweep>")
    arguments = parser.parse_args()
    print(write_report(Manifest.read(arguments.sweep_dir), arguments.sweep_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
