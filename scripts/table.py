"""Write a sweep's table, history and failures (Parquet and CSV) from what its cells have left."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sweepack.errors import tells_user_errors
from sweepack.manifest import Manifest
from sweepack.results import write_tables


@tells_user_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep-dir", type=Path, required=True, help="the sweep's folder, results/<sweep>")
    parser.add_argument("--partial", action="store_true", help="allow for cells that have not ended yet")
    arguments = parser.parse_args()
    write_tables(Manifest.read(arguments.sweep_dir), arguments.sweep_dir, partial=arguments.partial)
    return 0


if __name__ == "__main__":
    sys.exit(main())
