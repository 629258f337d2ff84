"""The process of one cell, started by ``launch`` in a clean environment: runs the task, writes down how it ended."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from sweepack import memory, oom, orphans, provenance, randomness
from sweepack.cell import Cell, Interrupted, plain_metrics
from sweepack.command import run_command
from sweepack.ddp.world import World
from sweepack.files import write_atomic
from sweepack.job import STOP_SIGNALS, Job, report
from sweepack.leases import WHOLE
from sweepack.mps.control import Place, is_client
from sweepack.mps.faults import excuse, was_struck
from sweepack.records import CellFiles, Record, State, assess

THREAD_SECONDS = 10.0
SAME_REQUEST_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_stopped_by: int | None = None
_stopped_at = 0.0


def main(job: Job) -> int:
    """Run the cell of ``job``; its exit status."""
    catch_signals()
    files = CellFiles(Path(job.directory))
    meaning = json.loads(files.meaning.read_bytes())
    before = assess(files.directory, meaning["id"]).record
    record = Record(
        meaning["id"],
        State.RUNNING,
        attempt=(before.attempt if before else 0) + 1,
        rejected=job.rejected,
        started=time.time(),
        host=os.uname().nodename,
        device=job.device,
        share=job.share,
        threads=job.threads,
        batch=job.batch,
        outgrown=before.outgrown if before and before.batch == job.batch else None,
    )
    process = os.getpid()
    held = memory.Held(job)
    try:
        files.result.unlink(missing_ok=True)
        write_atomic(files.status, record.to_json())
    except OSError as error:
        # A full disk: the log may not take it either.
        os.write(job.terminal, f"cell {record.cell}: {error}\n".encode())
        return 1
    try:
        metrics = run_task(job, files, meaning, record, held)
        if os.getpid() != process:
            # A child that the task has forked and let return: the cell is its parent's.
            os._exit(0)
        if _stopped_by is not None:
            raise Interrupted(_stopped_by)
        held.release()
        _reopen_output(files.log)
        record = replace(record, status=State.FINISHED, metrics=metrics, memory=held.read())
        code = 0
    except BaseException as error:
        if os.getpid() != process:
            os._exit(1)
        held.release()
        _reopen_output(files.log)
        record, code = judge(error, replace(record, memory=held.read()))
        told = oom.tell(error, record, job)
        # A program's own process has gone, and with it the number by which MPS knew it.
        struck = excuse(record, job.mps, pid=None if meaning["task"]["argv"] else process)
        # A fault under MPS can look like a lost device, not like a lack of memory.
        record = struck if was_struck(struck) and told.failure in (None, oom.DEVICE_LOST) else told
    ignore_signals()
    record = replace(record, ended=time.time())
    provenance.amend(files.provenance, held.facts() | {"memory": record.memory})
    goes_on = job.retry_oom and oom.retry_share(record) is not None
    accepted = record.status is State.FAILED and job.accept and not goes_on
    write_atomic(files.status, record.to_json())
    if record.status is State.FINISHED or accepted:
        write_atomic(files.result, record.to_json())
        code = 0
    report(record, meaning["slug"], files, job.terminal)
    return code


def run_task(
    job: Job,
    files: CellFiles,
    meaning: dict[str, Any],
    record: Record,
    held: memory.Held,
    world: World | None = None,
) -> dict[str, Any]:
    """The metrics that the task returns, run in this process, ``held`` to its memory; ``world``: a rank of which."""
    device = "cpu"
    program = bool(meaning["task"]["argv"])
    # A program has the GPU to itself: a context of this process would take memory from it.
    on_gpu = job.kind == "cuda" and not program and _cuda_works()
    if job.kind == "cuda" and not on_gpu and not program:
        message = f"torch sees no GPU, though the cell was given {job.device}"
        if job.checked:
            raise RuntimeError(
                f"{message} ({_cuda_trouble()}): install the build of torch that fits the driver, or set "
                "SWEEPACK_DEVICES=cpu to mean it"
            )
        print(f"{message}, which no driver here knows: running on the CPU", file=sys.stderr)
    held.take(program=program, on_gpu=on_gpu)
    if on_gpu:
        device = _device(world)
        oom.watch(held.cap, world.local_rank if world else 0)
    cell = Cell(
        meaning["id"],
        meaning["params"],
        meaning["seed"],
        files,
        device=device,
        world=world,
        share=job.share / WHOLE,
        batch=job.batch,
        attempt=record.attempt,
        threads=job.threads,
    )
    facts = {
        "device": job.device,
        "share": job.share,
        "threads": job.threads,
        "batch": job.batch,
        "seed": cell.seed,
        **held.facts(),
    }
    if job.mps is not None:
        facts["mps"] = {"client": None, **job.mps["variables"]}
    root = Path.cwd()
    if cell.rank == 0:
        facts |= world.facts(cell.seed) if world else {}
        described = provenance.describe(meaning["task"], root, facts)
        write_atomic(files.provenance, json.dumps(described, indent=2) + "\n", durable=False)
    if program:
        held.take_main()
        return run_command(cell, meaning["task"]["argv"], job.kept_open)

    from sweepack.importing import import_task

    umask = os.umask(0o022)
    os.umask(umask)
    _, function = import_task(meaning["task"], root)
    # Whatever the import did to the process: a cell can be stopped, and starts in the project's folder.
    catch_signals()
    os.chdir(root)
    os.umask(umask)
    randomness.seed_all(cell.seed)
    held.take_main()
    metrics = plain_metrics(function(cell, **meaning["params"]))
    cell.history.close()
    if job.mps is not None:
        _note_client(job.mps, files, on_gpu)
    for trainer in cell.trainers:
        # Lightning ends a fit that was cut short like one that was not.
        if trainer.interrupted or trainer.received_sigterm:
            raise Interrupted(signal.SIGTERM)
    cell.require_joined()
    return metrics


def _note_client(told: dict[str, Any], files: CellFiles, on_gpu: bool) -> None:
    """Write down whether this process, which has done its work, did it by MPS: CUDA runs without and says nothing."""
    client = is_client(Place(Path(told["folder"])), os.getpid())
    provenance.amend(files.provenance, {"mps": {"client": client, **told["variables"]}})
    if on_gpu and client is False:
        print("note: this cell was no client of its MPS daemon: it ran beside the others without it", file=sys.stderr)


def _device(world: World | None) -> str:
    if world is None:
        return "cuda"
    import torch

    torch.cuda.set_device(world.local_rank)
    return f"cuda:{world.local_rank}"


def _cuda_works() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _cuda_trouble() -> str:
    """Why there is no GPU for torch: `is_available` keeps it to itself, be it a lost device or an MPS that refuses."""
    try:
        import torch

        torch.cuda.init()
    except Exception as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return "CUDA starts, but has no device"


def judge(error: BaseException, record: Record) -> tuple[Record, int]:
    """The record and the exit status that ``error`` leads to: interruptions are no failures of the task."""
    signum = _stopped_by
    if signum is None and isinstance(error, KeyboardInterrupt):
        signum = signal.SIGINT
    if signum is None and type(error).__name__ == "SIGTERMException":
        signum = signal.SIGTERM
    if isinstance(error, Interrupted):
        signum = error.signum
    if signum is not None:
        return replace(
            record, status=State.INTERRUPTED, error=f"stopped by {signal.Signals(signum).name}"
        ), 128 + signum
    if isinstance(error, SystemExit):
        message = f"the task called sys.exit({error.code!r}) instead of returning its metrics"
        print(message, file=sys.stderr)
        return replace(record, status=State.FAILED, error=message), 1
    traceback.print_exception(error)
    text = "".join(traceback.format_exception_only(error)).strip()
    return replace(record, status=State.FAILED, error=text), 1


def _reopen_output(log: Path) -> None:
    """From here on print to ``log`` again: the task may have closed or replaced its streams."""
    _flush()
    sys.stdout = sys.stderr = log.open("a", buffering=1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def catch_signals() -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, _stop)
    # A warm host has them blocked; one that came since it forked this process is delivered now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _stop(signum: int, frame: FrameType | None) -> None:
    global _stopped_by, _stopped_at
    # Slurm tells every process of a job, the cell's launcher passes it on: one request must not break into what is
    # done upon it.
    again = _stopped_by == signum and time.monotonic() - _stopped_at < SAME_REQUEST_SECONDS
    _stopped_by = signum
    if not again:
        _stopped_at = time.monotonic()
        raise Interrupted(signum)


def ignore_signals() -> None:
    """From here on the end is being written down: a signal must not tear it."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def spare_libraries() -> None:
    """Leave out at the process's end what torch does at its own: every operator is taken apart, which costs 0.1 s.

    What others have registered, the task among them, is still done.
    """
    finalizers = getattr(weakref.finalize, "_registry", {})
    for finalizer, info in list(finalizers.items()):
        if getattr(info.func, "__module__", "").startswith("torch."):
            finalizer.atexit = False
    if "torch._dynamo.utils" in sys.modules:
        atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)


def leave(code: int) -> NoReturn:
    """End as a Python process does, but without taking torch apart, which costs most of a second.

    All is written down by now: threads that the task has left may finish within ``THREAD_SECONDS``, and signals end
    the process again.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    end = time.monotonic() + THREAD_SECONDS
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                print(f"thread {thread.name} is still running and is ended with the cell", file=sys.stderr)
    watchdog = threading.Timer(THREAD_SECONDS, os._exit, [code])
    watchdog.daemon = True
    watchdog.start()
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when ``parent`` ends: nobody else would write down how the cell ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    orphans.adopt()
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    code = main(Job.from_json(sys.argv[1]))
    spare_libraries()
    leave(code)
