"""Write a sweep's table, history and failures (Parquet and CSV) from what its cells have left."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sweepack.errors import UserError
from sweepack.manifest import Manifest
from sweepack.results import write_tables


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep-dir", type=Path, required=True, help="the sweep's folder, results/<sweep>")
    parser.add_argument("--partial", action="store_true", help="allow for cells that have not ended yet")
    arguments = parser.parse_args()
    try:
        write_tables(Manifest.read(arguments.sweep_dir), arguments.sweep_dir, partial=arguments.partial)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
