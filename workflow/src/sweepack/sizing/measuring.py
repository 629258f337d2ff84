"""Measure one memory profile on one device: the limit, the first guess, the search, and the pin that comes of it.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sweepack.devices import Device, main_memory
from sweepack.environment import cell_environment
from sweepack.errors import UserError, Verbatim
from sweepack.leases import WHOLE
from sweepack.memory import MB, cap_by
from sweepack.sizing.meter import Measurement, Meter
from sweepack.sizing.pins import Pin, Profile
from sweepack.sizing.request import Request, Wanted
from sweepack.sizing.rule import rule_of_thumb, static_and_sample
from sweepack.sizing.search import Answer, search

ESTIMATED = (8, 32)  # batches whose peaks are estimated first
AUTO = "auto"


class NotMeasured(Exception):
    """The task cannot be measured; the message says why."""


@dataclass(frozen=True)
class Place:
    """A device to measure on, its ``model`` as pins name it, and its memory (on a CPU: main memory) in bytes."""

    device: Device
    model: str
    total: int

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "cuda"


Opener = Callable[[Request, Wanted, Place | None, Path, Path], contextlib.AbstractContextManager[Meter]]


class Meters:
    """The meters of a ``with`` block. The task, whose import takes most of the time, is imported once for all profiles
    that differ in parameters only: the last meter of either kind, measuring and estimating, is kept for the next one.
    """

    def __init__(self) -> None:
        self._kept: dict[bool, tuple[tuple[object, ...], Meter, contextlib.ExitStack]] = {}

    def __enter__(self) -> Meters:
        return self

    def __exit__(self, *_: object) -> None:
        for kind in list(self._kept):
            self._close(kind)

    @contextlib.contextmanager
    def open(self, request: Request, wanted: Wanted, place: Place | None, root: Path, scratch: Path) -> Iterator[Meter]:
        """The meter of a profile at a place, or (None) of the estimate without a GPU. ``scratch`` is a folder for it.

        Raises UserError as ``Meter`` does.
        """
        profile = wanted.profile
        alike = (place and place.device.key, profile.task, profile.share, profile.threads, profile.mem_mb)
        kind = place is None
        if kind not in self._kept or self._kept[kind][0] != alike:
            self._close(kind)
            with contextlib.ExitStack() as stack:
                meter = stack.enter_context(_meter(request, wanted, place, root, scratch))
                self._kept[kind] = alike, meter, stack.pop_all()
        _, meter, _ = self._kept[kind]
        meter.aim(wanted.params, wanted.seed)
        yield meter

    def _close(self, kind: bool) -> None:
        if kind in self._kept:
            self._kept.pop(kind)[2].close()


def _meter(request: Request, wanted: Wanted, place: Place | None, root: Path, scratch: Path) -> Meter:
    profile = wanted.profile
    return Meter(
        request.task,
        wanted.params,
        wanted.seed,
        device=place.device if place else None,
        share=profile.share,
        threads=profile.threads,
        mem_mb=profile.mem_mb,
        memory=request.memory,
        root=root,
        timeout=request.sizing["timeout"],
        scratch=scratch,
    )


def place_of(device: Device, environ: Mapping[str, str]) -> Place:
    """What is known of ``device``: by NVML, or else by torch, which is asked in a process of its own.

    Raises UserError when neither can tell the memory of a GPU.
    """
    if device.kind != "cuda":
        return Place(device, device.kind, main_memory(environ) * MB)
    if device.model and device.memory:
        return Place(device, device.model, device.memory)
    ask = "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps([p.name, p.total_memory]))"
    environment = cell_environment(environ, visible=device.entry, threads=1)
    try:
        done = subprocess.run(
            [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        model, total = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise UserError(
            "CUDA_VISIBLE_DEVICES",
            Verbatim(f"{device.label}: {' '.join(words)}"),
            "a GPU whose memory NVML or torch can tell",
            "see that `nvidia-smi` and `python -c 'import torch; torch.cuda.init()'` work here",
        ) from None
    return Place(device, str(model), int(total))


def limit(profile: Profile, place: Place, memory: Mapping[str, Any]) -> int | None:
    """Bytes that a cell may take; None where its share is to be found, since nothing limits that measurement.

    Raises ValueError for a share so small that it leaves nothing.
    """
    if profile.share is None:
        return None
    if place.on_gpu:
        return cap_by(memory, profile.share, place.total)
    return profile.mem_mb * MB or place.total * profile.share // WHOLE


@dataclass(frozen=True)
class Estimate:
    """Peaks in bytes by batch, as they would be on a GPU by what tensors take; or the ``reason`` why there are none."""

    peaks: dict[int | None, int]
    reason: str | None = None

    @property
    def line(self) -> tuple[float, float] | None:
        """M_static and M_sample; None where there is one batch only."""
        return static_and_sample({batch: peak for batch, peak in self.peaks.items() if batch is not None})


def estimate(meter: Meter, batch: int | str | None) -> Estimate:
    """Estimate at ``batch``, or where that is to be found at two small ones."""
    peaks: dict[int | None, int] = {}
    rows = []
    for each in ESTIMATED if batch == AUTO else (batch,):
        assert not isinstance(each, str)
        found = meter.measure(each)
        if found.outcome != "measured" or found.peak is None:
            return Estimate({}, (found.error or found.outcome).removeprefix("no estimate: "))
        peaks[each] = found.peak
        rows.append(found.rows)
    if len(rows) > 1 and rows[0] and rows[0] == rows[1] and len(set(peaks.values())) == 1:
        batches = " and ".join(map(str, ESTIMATED))
        return Estimate(
            {},
            f"steps saw {rows[0]} samples at batches {batches}: the task must take its batch from `cell.batch`, or has "
            "no more",
        )
    return Estimate(peaks)


def first_guess(estimate: Estimate, profile: Profile, place: Place, fill: float) -> int | None:
    """Where to start, by the rule of thumb and what was estimated; None where that does not tell."""
    line = estimate.line
    if line is None or line[1] <= 0:
        return None
    if profile.mem_mb and not place.on_gpu:
        device, cells = profile.mem_mb * MB, 1
    else:
        device, cells = place.total, WHOLE // (profile.share or WHOLE)
    return rule_of_thumb(device, cells, *line, fill=fill).largest or 1


def no_room(request: Request, profile: Profile, place: Place, reason: str) -> Pin:
    """The pin of a profile whose share holds nothing at ``place``, so that there is nothing to measure."""
    return _pin(request, profile, place, None, Answer(trouble=f"does not fit: {reason}", limited_by="memory"))


def measure(
    request: Request, wanted: Wanted, place: Place, meter: Meter, budget: int | None, guess: int | None
) -> tuple[Pin, list[str]]:
    """Find what the profile is to have at ``place``: its pin, and remarks for people. Raises NotMeasured.

    ``budget`` is what ``limit`` says, ``guess`` what ``first_guess`` does.
    """
    profile, sizing = wanted.profile, request.sizing
    if profile.batch == AUTO:
        answer = search(
            meter.measure, budget, largest_batch=sizing["largest_batch"], start=sizing["start"], guess=guess
        )
    else:
        assert not isinstance(profile.batch, str)
        answer = _once(meter.measure(profile.batch), profile.batch, budget)
    if answer.trouble and answer.limited_by == "error":
        raise NotMeasured(answer.trouble)
    return _pin(request, profile, place, budget, answer), answer.remarks


def like(pin: Pin, request: Request, profile: Profile, name: str) -> Pin:
    """What was measured of one profile, as the pin of another one with the same estimates; ``name``: of the first."""
    source = f"{pin.source}, of {name}, whose estimates are the same"
    return replace(pin, key=profile.key, source=source, profile=asdict(profile), code=request.code, at=time.time())


def _once(found: Measurement, batch: int | None, budget: int | None) -> Answer:
    """The answer of a single measurement."""
    if found.outcome == "failed":
        return Answer(trouble=f"the task fails: {found.error}", limited_by="error", measured=[found])
    if found.outcome == "oom" or found.peak is None or (budget is not None and found.peak > budget):
        what = "the task's own batch" if batch is None else f"batch {batch}"
        return Answer(trouble=f"does not fit: {what} needs more than there is", limited_by="memory", measured=[found])
    return Answer(batch=batch, largest=batch, peak=found.peak, measured=[found])


def _pin(request: Request, profile: Profile, place: Place, budget: int | None, answer: Answer) -> Pin:
    source = next((found.source for found in answer.measured if found.batch == answer.batch), None)
    return Pin(
        key=profile.key,
        device=place.model,
        total=place.total,
        batch=answer.batch,
        largest=answer.largest,
        peak=answer.peak,
        source=source or next((found.source for found in answer.measured), "the settings"),
        static=answer.static,
        sample=answer.sample,
        cap=budget,
        limited_by=answer.limited_by,
        trouble=answer.trouble,
        measured=[asdict(found) for found in answer.measured],
        profile=asdict(profile),
        code=request.code,
        at=time.time(),
    )
