"""The peak in bytes of what a task really allocates on this CPU up to its second step, as torch's profiler saw it.

Dropout is done as on a GPU.
Arguments: the task's file, and a list of ``[function, params, batch]`` as JSON; one peak a line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from sweepack.cell import Cell
from sweepack.records import CellFiles
from sweepack.sizing.estimate import drop_as_gpus_do
from sweepack.sizing.steps import Steps
from torch.profiler import ProfilerActivity, profile


class Enough(BaseException): ...


def stop() -> None:
    raise Enough


def trace(function, params, batch) -> int:
    Steps(stop)
    with (
        tempfile.TemporaryDirectory() as folder,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
        contextlib.suppress(Enough),
    ):
        function(Cell("trace", params, 0, CellFiles(Path(folder)), batch=batch), **params)
    total = peak = 0
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


if __name__ == "__main__":
    file = Path(sys.argv[1])
    sys.path.insert(0, str(file.parent))
    drop_as_gpus_do()
    module = importlib.import_module(file.stem)
    for function, params, batch in json.loads(sys.argv[2]):
        if (child := os.fork()) == 0:
            torch.set_num_threads(1)
            print(trace(getattr(module, function), params, batch), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
