"""A cell that is a program: parameters in a JSON file and the environment, metrics out of a JSON file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweepack.cell import Cell, Interrupted, plain_metrics
from sweepack.files import write_atomic
from sweepack.job import STOP_SIGNALS
from sweepack.values import canonical, dotted_items

GRACE_SECONDS = 30.0
_FROM_OUTSIDE = (*STOP_SIGNALS, signal.SIGKILL)


def run_command(cell: Cell, argv: Sequence[str], kept_open: Sequence[int]) -> dict[str, Any]:
    """Run the program and return the metrics it wrote.

    It is started without a shell. ``kept_open`` are the descriptors of the cell's lease and lock, which the program
    inherits: its share is not given away while it lives. A signal to the cell is passed on, and the program has
    ``GRACE_SECONDS`` to end. Raises RuntimeError when it fails or writes no metrics.
    """
    params, metrics = cell.dir / "params.json", cell.dir / "metrics.json"
    write_atomic(params, json.dumps(dict(cell.params), indent=2) + "\n")
    metrics.unlink(missing_ok=True)
    places = {
        "{params}": str(params.absolute()),
        "{metrics}": str(metrics.absolute()),
        "{dir}": str(cell.dir.absolute()),
    }
    words = [re.sub(r"\{(params|metrics|dir)\}", lambda found: places[found[0]], word) for word in argv]
    environment = {**os.environ, **variables(cell), "SWEEPACK_PARAMS": places["{params}"]}
    environment["SWEEPACK_METRICS"] = places["{metrics}"]
    if cell.batch is not None:
        environment["SWEEPACK_BATCH"] = str(cell.batch)
    try:
        # A session of its own, so that a signal reaches the program once and its own children with it.
        program = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=kept_open
        )
    except OSError as error:
        raise RuntimeError(f"`{words[0]}` cannot be started: {error.strerror}") from None
    try:
        status = program.wait()
    except Interrupted as stop:
        _end(program, stop.signum)
        raise
    stopped = -status if status < 0 else status - 128
    if stopped in _FROM_OUTSIDE:
        # The kernel out of memory, a scheduler, a person: no fault of the program, and no result.
        raise Interrupted(stopped)
    if status < 0:
        raise RuntimeError(f"`{words[0]}` was ended by signal {-status} ({signal.Signals(-status).name})")
    if status > 0:
        raise RuntimeError(f"`{words[0]}` ended with exit status {status}")
    return _read_metrics(metrics)


def variables(cell: Cell) -> dict[str, str]:
    """The cell as environment variables: ``optim.lr`` as ``SWEEPACK_PARAM_OPTIM_LR``, text bare, the rest as JSON."""
    named = {re.sub(r"[^A-Z0-9]", "_", name.upper()): value for name, value in dotted_items(cell.params)}
    texts = {
        f"SWEEPACK_PARAM_{name}": value if isinstance(value, str) else canonical(value) for name, value in named.items()
    }
    return {
        **texts,
        "SWEEPACK_CELL": cell.id,
        "SWEEPACK_CELL_DIR": str(cell.dir.absolute()),
        "SWEEPACK_SEED": str(cell.seed),
        "SWEEPACK_ATTEMPT": str(cell.attempt),
    }


def _end(program: subprocess.Popen[bytes], signum: int) -> None:
    """Pass ``signum`` on and wait; what is still there after the grace time, or at a second signal, is killed."""

    def send(step: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, step)

    for again in STOP_SIGNALS:
        signal.signal(again, lambda *_: send(signal.SIGKILL))
    send(signum)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(GRACE_SECONDS)
    send(signal.SIGKILL)
    program.wait(GRACE_SECONDS)


def _read_metrics(path: Path) -> dict[str, Any]:
    try:
        return plain_metrics(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise RuntimeError(
            "the program ended well but wrote no metrics: it must write a JSON object to the file that "
            "SWEEPACK_METRICS names"
        ) from None
    except ValueError as error:
        raise RuntimeError(f"the metrics file is not JSON: {error}") from None
    except TypeError as error:
        raise RuntimeError(f"the metrics file is not usable: {error}") from None
