"""Measure the memory profiles that a run asks for, each on every model of device at hand, and pin what was found.

Each measurement takes its turn beside running cells: it leases the share that it is about. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from sweepack.devices import load_nvml, visible_pool
from sweepack.errors import tells_user_errors
from sweepack.files import try_lock, write_atomic
from sweepack.job import STOP_SIGNALS
from sweepack.launch import TEMPORARY_FAILURE, watch_driver
from sweepack.leases import WHOLE, LeaseAbandoned, LeasePool, LeaseTimeout, lease_directory
from sweepack.sizing.measuring import (
    AUTO,
    Estimate,
    Meters,
    NotMeasured,
    Opener,
    Place,
    estimate,
    first_guess,
    like,
    limit,
    measure,
    no_room,
    place_of,
)
from sweepack.sizing.pins import FOLDER, Pin, Profile, read_pins
from sweepack.sizing.request import Request, Wanted
from sweepack.sizing.words import found

_PAUSE = 0.5  # seconds between two looks at whether another process has ended


_BY_MEMORY = ("memory", "largest_batch")  # what holds for all with the same tensors, whatever their data


class Stopped(BaseException):
    """A signal asked to end; its number is the argument."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure how much memory cells of a sweep take and which batch fits, and pin it for the next plan. "
        "What is pinned already is not measured again. `snakemake probe` does this."
    )
    parser.add_argument("--sweep-dir", type=Path, required=True, help="the sweep's directory, results/<sweep>")
    parser.add_argument("--request", required=True, help="what to measure, as in pins/<name>.request")
    parser.add_argument("--stamp", type=Path, help="file to write once all is measured")
    return parser


@tells_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure what ``argv`` names. The exit status: 1 when something could not be measured; that it doesn't fit is an
    answer."""
    options = parser().parse_args(argv)
    for signum in STOP_SIGNALS:
        signal.signal(signum, _stop)
    try:
        request = Request.read(options.sweep_dir, options.request)
        with (
            _alone(options.sweep_dir, options.request, request.lease_timeout * 60) as scratch,
            Meters() as meters,
        ):
            done = Probe(options.sweep_dir, request, Path.cwd(), os.environ, scratch, meters.open).run()
    except Stopped as stopped:
        _say("stopped; what was measured is kept, and the same command goes on from there")
        return 128 + stopped.args[0]
    except (LeaseTimeout, LeaseAbandoned) as error:
        _say(f"not measured: {error}")
        return TEMPORARY_FAILURE
    if done and options.stamp:
        write_atomic(options.stamp, "")
    return 0 if done else 1


class Probe:
    """The profiles of a ``request`` in the folder ``sweep``, to be measured on the devices that ``environ`` allows.

    ``scratch`` is a folder where files may be kept in the meantime.
    """

    def __init__(
        self,
        sweep: Path,
        request: Request,
        root: Path,
        environ: Mapping[str, str],
        scratch: Path,
        open_meter: Opener,
    ) -> None:
        self._sweep = sweep
        self._request = request
        self._root = root
        self._environ = environ
        self._scratch = scratch
        self._open = open_meter
        self._give_up = watch_driver()
        # Of what was measured in this run: the profile's name, its estimates and its pin.
        self._measured: list[tuple[str, Estimate, Pin]] = []

    def run(self) -> bool:
        """Measure what is not pinned yet; whether all could be."""
        pool = visible_pool(self._environ, load_nvml())[: self._request.devices or None]
        places: dict[str, list[Place]] = {}
        for place in [place_of(device, self._environ) for device in pool]:
            places.setdefault(place.model, []).append(place)
        chosen = self._request.sizing.get("device")
        if chosen and chosen not in places:
            _say(f"`sizing.device` is {chosen}, and here is {', '.join(places)}: this is what is measured")
        done = True
        for wanted in self._request.profiles:
            done &= self._profile(wanted, places)
        return done

    def _profile(self, wanted: Wanted, places: Mapping[str, Sequence[Place]]) -> bool:
        """Measure one profile on each model of ``places`` on which it is not pinned; whether that was possible."""
        pins = read_pins(self._sweep).get(wanted.profile.key, {})
        cells = f"{wanted.count} cell{'s' * (wanted.count != 1)}"
        open_for = []
        for model in places:
            if (pin := pins.get(model)) and pin.counts(self._request.code):
                _say(f"{wanted.name} ({cells}): measured before: {found(pin)}")
            else:
                open_for.append(model)
        if not open_for:
            return True
        estimated = self._estimate(wanted) if wanted.profile.batch == AUTO else Estimate({})
        done = True
        for model in open_for:
            try:
                pin, remarks = self._find(wanted, places[model], estimated)
            except NotMeasured as reason:
                _say(f"{wanted.name} ({cells}) could not be measured on {model}: {reason}")
                done = False
                continue
            pin.write(self._sweep)
            self._measured.append((wanted.name, estimated, pin))
            _say(f"{wanted.name} ({cells}): {found(pin)}", *remarks)
        return done

    def _find(self, wanted: Wanted, places: Sequence[Place], estimated: Estimate) -> tuple[Pin, list[str]]:
        profile = wanted.profile
        for name, earlier, pin in self._measured:
            same = pin.device == places[0].model and _circumstances(Profile(**pin.profile)) == _circumstances(profile)
            same &= pin.limited_by in _BY_MEMORY
            if same and estimated.peaks and earlier == estimated:
                return like(pin, self._request, profile, name), [f"measured as {name}, whose estimates are the same"]
        try:
            budget = limit(profile, places[0], self._request.memory)
        except ValueError as error:
            return no_room(self._request, profile, places[0], str(error)), []
        guess = first_guess(estimated, profile, places[0], self._request.sizing["guess"])
        devices = {place.device.key: place for place in places}
        with LeasePool(lease_directory(self._environ), list(devices)).acquire(
            profile.share or WHOLE,
            label=f"{self._sweep.absolute()}/{FOLDER} {wanted.name}",
            timeout=self._request.lease_timeout * 60,
            on_wait=_say,
            give_up=self._give_up,
        ) as lease:
            place = devices[lease.devices[0]]
            with self._open(self._request, wanted, place, self._root, self._scratch) as meter:
                return measure(self._request, wanted, place, meter, budget, guess)

    def _estimate(self, wanted: Wanted) -> Estimate:
        """It needs no device, and none is kept waiting for it."""
        with self._open(self._request, wanted, None, self._root, self._scratch) as meter:
            return estimate(meter, AUTO)


@contextlib.contextmanager
def _alone(sweep: Path, job: str, timeout: float) -> Iterator[Path]:
    """Be the only process at a job, with a folder for it on the file system of the sweep, as a cell has one.

    Another one, which may have outlived its run, is waited for: what it pins need not be measured again. What one that
    was killed has left is removed. ``timeout`` is in seconds. Raises LeaseTimeout, and LeaseAbandoned.
    """
    folder = sweep.absolute() / FOLDER / f".measuring-{job}"
    give_up = watch_driver()
    end = time.monotonic() + timeout
    told = False
    while (lock := try_lock(folder.with_suffix(".lock"))) is None:
        if reason := give_up():
            raise LeaseAbandoned(reason)
        if time.monotonic() > end:
            raise LeaseTimeout(f"{job} is still being measured by another process")
        if not told:
            told = True
            _say(f"{job} is being measured already; waiting for it")
        time.sleep(_PAUSE)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _circumstances(profile: Profile) -> tuple[object, ...]:
    """What, beside the parameters, decides what is measured."""
    return profile.task, profile.share, profile.batch, profile.threads, profile.mem_mb, profile.settings


def _stop(signum: int, _: FrameType | None) -> None:
    for other in STOP_SIGNALS:
        # What is going on is being ended.
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(signum)


def _say(text: str, *more: str) -> None:
    print("\n  ".join([f"sweepack: {text}", *more]), file=sys.stderr, flush=True)
