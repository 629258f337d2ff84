"""Shares of this node's devices, kept by kernel file locks: placed, queued for, and free when their holder dies.

A lease is a small JSON file that its holder keeps locked. The cell inherits the descriptor, so a share is free
exactly when the last process that holds it has ended, however it ended. There is no daemon: whoever asks reads
the directory under a short mutex and decides for itself. Shares are in thousandths of a device ("milli").
Standard library only: this runs before every cell.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import stat
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from sweepack.errors import UserError, Verbatim
from sweepack.files import is_locked, try_lock

WHOLE = 1000

_SHARED_MEMORY = Path("/dev/shm")
_REMIND = 60.0  # seconds between two explanations of one wait
_SILENCE = 5.0  # seconds without a poll after which a waiter (stopped by ^Z, say) is passed over
_SHORTEST_NAP, _LONGEST_NAP = 0.01, 0.5


class LeaseTimeout(Exception):
    """No room came free in the time that the caller gave; the message says who holds it."""


class LeaseAbandoned(Exception):
    """The caller's ``give_up`` ended the wait; the message is the reason that it gave."""


@dataclass(frozen=True)
class Holder:
    """A live lease, or a request that waits for one.

    ``devices`` are those held, or, while ``waiting``, those that would do, of which ``count`` are wanted; a lease
    without any could not be read and counts as all of every device. ``milli`` is taken on each device. ``since`` (Unix
    time, seconds) is when the lease was given or the wait began; after ``starve_after`` seconds of waiting room is
    kept for the request. ``pid`` is the process that asked. ``stalled``: a waiter that has stopped polling.
    """

    label: str
    pid: int
    devices: tuple[str, ...]
    milli: int
    since: float
    waiting: bool
    count: int = 1
    starve_after: float = 0.0
    id: str = ""
    stalled: bool = False

    @property
    def order(self) -> tuple[float, str]:
        """Its place in the queue: the oldest first."""
        return self.since, self.id

    @property
    def file_name(self) -> str:
        return f"{self.id}.{'wait' if self.waiting else 'lease'}"


_FIELDS = tuple(field.name for field in fields(Holder))


class Lease:
    """``milli`` thousandths of each of ``devices``, held as long as any process has ``fd`` open.

    ``waited`` is in seconds. As a context manager it is released at the end of the block.
    """

    def __init__(self, path: Path, fd: int, devices: tuple[str, ...], milli: int, waited: float) -> None:
        self._path = path
        self.fd = fd
        self.devices = devices
        self.milli = milli
        self.waited = waited

    def inheritable(self) -> None:
        """Let ``fd`` survive exec, so that the program started next holds the lease."""
        os.set_inheritable(self.fd, True)

    def release(self) -> None:
        """Give up this process's hold. The share stays taken while another process still holds ``fd``."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        if not is_locked(self._path):
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LeasePool:
    """The devices that this process may use, and the directory in which everyone on the node leases them."""

    def __init__(self, directory: Path, devices: Sequence[str], starve_after: float = 30.0) -> None:
        """``devices`` are keys that mean the same to every user of ``directory``; ``starve_after`` is in seconds."""
        self.directory = directory
        self.devices = tuple(dict.fromkeys(devices))
        self.starve_after = starve_after
        self._known: dict[str, Holder] = {}

    def acquire(
        self,
        milli: int,
        *,
        label: str,
        count: int = 1,
        device: str | None = None,
        timeout: float | None = None,
        on_wait: Callable[[str], None] | None = None,
        give_up: Callable[[], str | None] | None = None,
    ) -> Lease:
        """Take ``milli`` thousandths of ``count`` devices (or of ``device``), all at once, waiting for them if need be.

        Requests that fit are served in the order in which they came; one that does not fit yet is passed, until it
        has waited ``starve_after`` seconds: from then on the roomiest devices are kept for it. ``on_wait`` is told
        in one line what the wait is for, at its start and about once a minute. ``give_up`` is asked before every
        attempt; a reason ends the wait.

        Raises UserError at once when the request can never be met or the directory cannot be used, LeaseTimeout after
        ``timeout`` seconds (0: one attempt), LeaseAbandoned with the reason of ``give_up``.
        """
        request = self._request(milli, label, count, device)
        begun = time.monotonic()
        reminded: float | None = None
        queued: int | None = None
        try:
            while True:
                reason = give_up() if give_up else None
                if reason:
                    raise LeaseAbandoned(reason)
                with self._mutex():
                    others = self._scan()
                    place = _turn(request, others)
                    waited = time.monotonic() - begun
                    if place:
                        (self.directory / request.file_name).unlink(missing_ok=True)
                        held = replace(request, devices=place, since=time.time(), waiting=False)
                        return Lease(*self._publish(held), place, milli, waited)
                    if queued is None:
                        _, queued = self._publish(request)
                    else:
                        os.utime(queued)
                if timeout is not None and waited >= timeout:
                    raise LeaseTimeout(f"no room within {_span(timeout)}: {_explain(request, others)}")
                if on_wait and (reminded is None or waited - reminded >= _REMIND):
                    reminded = waited
                    on_wait(_explain(request, others))
                nap = _nap(waited)
                time.sleep(nap if timeout is None else min(nap, max(0.0, timeout - waited)))
        finally:
            if queued is not None:
                (self.directory / request.file_name).unlink(missing_ok=True)
                os.close(queued)

    def holders(self) -> list[Holder]:
        """Every live lease and waiter of the directory, oldest first, also on devices outside this pool.

        Files that dead processes left are removed on the way. Raises UserError when the directory cannot be used.
        """
        with self._mutex():
            return sorted(self._scan(), key=lambda holder: holder.order)

    def free(self) -> dict[str, int]:
        """The thousandths that are free on each device of this pool; raises UserError as ``holders`` does."""
        return free_beside(self.holders(), self.devices)

    def _request(self, milli: int, label: str, count: int, device: str | None) -> Holder:
        label = " ".join(label.split())
        pool = ", ".join(self.devices) or "no device"
        if not 1 <= milli <= WHOLE:
            raise UserError(
                f"the share of a device for {label}",
                Verbatim(f"{milli} thousandths ({milli / WHOLE:g})"),
                f"1 to {WHOLE} thousandths: no device can ever give another share",
                "set `gpu:` of the matching entry under `resources:` to a number between 0.001 and 1",
            )
        if device is not None and device not in self.devices:
            raise UserError(
                f"the device for {label}", device, f"a device of this pool: {pool}", "name one of these, or none"
            )
        candidates = self.devices if device is None else (device,)
        if not 1 <= count <= len(candidates):
            raise UserError(
                f"the number of devices for {label}",
                count,
                f"1 to {len(candidates)}: the request may use {', '.join(candidates) or pool}",
                "ask for fewer devices, or make more visible (CUDA_VISIBLE_DEVICES)",
            )
        return Holder(
            label, os.getpid(), candidates, milli, time.time(), True, count, self.starve_after, uuid.uuid4().hex
        )

    @contextmanager
    def _mutex(self) -> Iterator[None]:
        try:
            fd = os.open(self.directory / "mutex", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                # Closing alone would leave it locked in a child that another thread has just forked.
                fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)
        except OSError as error:
            raise UserError(
                "the lease directory (SWEEPACK_LEASES)",
                Verbatim(f"{self.directory}: {error}"),
                "a folder of yours on a local disk with room for small files",
                "make room there or set SWEEPACK_LEASES=/path/to/another/folder for every run on this node",
            ) from error

    def _scan(self) -> list[Holder]:
        """What live processes have published. Needs the mutex: nobody is half-way through publishing."""
        found = {}
        for name in os.listdir(self.directory):  # noqa: PTH208 (every attempt does this: pathlib would triple its cost)
            if not name.endswith((".lease", ".wait", ".tmp")):
                continue
            path = f"{self.directory}/{name}"
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # released since the directory was listed
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                Path(path).unlink(missing_ok=True)
            except BlockingIOError:
                found[path] = _read(fd, path, self._known.get(path))
            finally:
                os.close(fd)
        self._known = {path: holder for path, holder in found.items() if holder.id}
        return list(found.values())

    def _publish(self, holder: Holder) -> tuple[Path, int]:
        """Write the holder's file; it is locked and whole before it has its name. Returns path and descriptor."""
        path = self.directory / holder.file_name
        draft = path.with_suffix(".tmp")
        fd = try_lock(draft)
        assert fd is not None, f"{draft} is ours alone"
        try:
            with open(fd, "w", closefd=False) as stream:
                stream.write(json.dumps(vars(holder)))
            draft.rename(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            os.close(fd)
            raise
        return path, fd


def lease_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory in which all of this user's runs on this node lease devices; made if missing, for them alone.

    ``SWEEPACK_LEASES``, or ``/dev/shm/sweepack-<uid>``, or the same under the temporary directory. Raises UserError
    when it cannot be made, is a symbolic link or belongs to another user.
    """
    given = environ.get("SWEEPACK_LEASES")
    if given:
        directory = Path(given).expanduser().absolute()
    else:
        usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
        directory = (_SHARED_MEMORY if usable else Path(tempfile.gettempdir())) / f"sweepack-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        trouble = error.strerror or str(error)
    else:
        if stat.S_ISLNK(found.st_mode):
            trouble = "a symbolic link"
        elif found.st_uid != os.getuid():
            trouble = f"belongs to user {found.st_uid}"
        else:
            return directory
    raise UserError(
        "the lease directory (SWEEPACK_LEASES)",
        Verbatim(f"{directory}: {trouble}"),
        f"a folder, not a link, that belongs to you (user {os.getuid()})",
        "set SWEEPACK_LEASES=/path/to/a/folder/of/yours (on a local disk) for every run on this node",
    )


def best_fit(
    free: Mapping[str, int], milli: int, count: int = 1, banned: Collection[str] = ()
) -> tuple[str, ...] | None:
    """The ``count`` fullest devices with ``milli`` thousandths ``free``, or None; ties go by the order of ``free``."""
    fitting = sorted((key for key in free if free[key] >= milli and key not in banned), key=free.__getitem__)
    return tuple(fitting[:count]) if len(fitting) >= count else None


def free_beside(holders: Collection[Holder], devices: Collection[str]) -> dict[str, int]:
    """The thousandths of each of ``devices`` that the leases among ``holders`` leave."""
    return _free(devices, _used(holders, devices))


def _turn(request: Holder, others: Collection[Holder]) -> tuple[str, ...] | None:
    """The devices that ``request`` may take now: what the queue before it leaves, or None."""
    now = time.time()
    queue = sorted(
        (other for other in others if other.waiting and not other.stalled and other.order < request.order),
        key=lambda waiter: waiter.order,
    )
    used = _used(others, (device for claim in (*queue, request) for device in claim.devices))
    reserved: set[str] = set()
    for waiter in queue:
        free = _free(waiter.devices, used)
        place = best_fit(free, waiter.milli, waiter.count, reserved)
        if place:
            used.update(dict.fromkeys(place, waiter.milli))
        elif now - waiter.since > waiter.starve_after and reserved.isdisjoint(waiter.devices):
            # One reservation a set of competitors: more would leave devices idle behind the first.
            reserved.update(sorted(free, key=free.__getitem__, reverse=True)[: waiter.count])
    return best_fit(_free(request.devices, used), request.milli, request.count, reserved)


def _used(holders: Collection[Holder], devices: Iterable[str]) -> Counter[str]:
    """Thousandths taken by the leases; one that could not be read takes the whole of each of ``devices``."""
    used: Counter[str] = Counter()
    everything = set(devices)
    for holder in holders:
        if not holder.waiting:
            used.update(dict.fromkeys(holder.devices or everything, holder.milli))
    return used


def _free(devices: Collection[str], used: Counter[str]) -> dict[str, int]:
    return {device: max(0, WHOLE - used[device]) for device in devices}


def _read(fd: int, path: str, known: Holder | None) -> Holder:
    """The holder that the locked file stands for; its content never changes, so one that is ``known`` is not read."""
    waiting = path.endswith(".wait")
    try:
        if known is None:
            data = json.loads(os.read(fd, 1 << 20))
            known = Holder(**{**{key: data[key] for key in _FIELDS}, "devices": tuple(data["devices"])})
    except (ValueError, TypeError, KeyError):
        # Some live process holds it: better to wait with a reason than to run two cells into one memory.
        return Holder(f"the unreadable file {path}", 0, (), WHOLE, os.fstat(fd).st_mtime, waiting, stalled=waiting)
    stalled = waiting and time.time() - os.fstat(fd).st_mtime > _SILENCE
    return known if stalled == known.stalled else replace(known, stalled=stalled)


def _nap(waited: float) -> float:
    """Seconds until the next attempt: a small part of the wait so far, so that a handover costs little of either."""
    return min(max(waited / 20, _SHORTEST_NAP), _LONGEST_NAP) * random.uniform(0.5, 1.5)


def _explain(request: Holder, others: Collection[Holder]) -> str:
    now, wanted = time.time(), set(request.devices)

    def listing(chosen: list[Holder]) -> str:
        chosen = sorted(chosen, key=lambda holder: holder.order)
        told = [
            f"{holder.label} ({_share(holder)}, pid {holder.pid}, {_span(now - holder.since)})" for holder in chosen[:8]
        ]
        return "; ".join(told + [f"and {len(chosen) - 8} more"] * (len(chosen) > 8))

    rivals = [other for other in others if not other.devices or wanted & set(other.devices)]
    held = [rival for rival in rivals if not rival.waiting]
    ahead = [rival for rival in rivals if rival.waiting and not rival.stalled and rival.order < request.order]
    text = f"{request.label} waits for {_share(request)}; held by {listing(held) or 'nobody'}"
    return f"{text}; came earlier: {listing(ahead)}" if ahead else text


def _share(holder: Holder) -> str:
    names = ", ".join(holder.devices) or "every device"
    choice = f"any {holder.count} of " if holder.waiting and holder.count < len(holder.devices) else ""
    return f"{holder.milli / WHOLE:g} of {choice}{names}"


def _span(seconds: float) -> str:
    """``12 s``, ``7 min`` or ``2.5 h``."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
