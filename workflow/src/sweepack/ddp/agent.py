"""torchrun's agent of one node: this process becomes it."""

from __future__ import annotations

import json
import os
import sys
from typing import NoReturn

from sweepack.ddp.layout import Layout
from sweepack.ddp.meeting import Line
from sweepack.ddp.starters import SETUP, torchrun


def main() -> NoReturn:
    """Find the launcher's node, where the rendezvous is held, and go on as torchrun."""
    setup = json.loads(os.environ[SETUP])
    layout = Layout(**setup["layout"])
    try:
        line = Line(setup["addresses"], setup["port"], layout.start_seconds)
    except ConnectionError as error:
        sys.exit(str(error))
    host = os.environ.get("SLURM_NODEID", "0") == "0"
    command = torchrun(layout, line.address, setup["rendezvous"], setup["token"], host)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
