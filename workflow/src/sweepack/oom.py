"""Out of memory, told apart: at the cell's own cap, by another's doing, or with the device itself gone.

Numbers decide: what torch's allocator held and was asked for when it gave up, against the cap. Its text says "allowed"
in either case. Every launcher asks `next_share`: what it takes to tell an error is imported when there is one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweepack.job import Job
from sweepack.leases import WHOLE
from sweepack.records import Record, State

if TYPE_CHECKING:
    from sweepack.neighbours import Others

OOM_CAP = "oom_cap"
OOM_NEIGHBOUR = "oom_neighbour"
DEVICE_LOST = "device_lost"

MPS_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_MIB, _GIB = 2**20, 2**30
# What a library asks for that does not say: its handles and workspaces.
_UNTOLD = _GIB // 2
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": _MIB, "GiB": _GIB, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_TORCH = r"(CUDA|HIP) out of memory\. Tried to allocate "
# From the driver or a library, about memory that torch's allocator does not hand out.
_DRIVER = (
    r"(CUDA|HIP)( driver)? error: out of memory|Triton Error \[\w+\]: out of memory|"
    r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_(STATUS_)?ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|"
    r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|Cuda failure (2 )?'out of memory'|"
    r"Allocation on device \d+ would exceed allowed memory"
)
# Errors 46, 100, 214, 220, 226 and 802 of CUDA, as it words and names them (torch has words of its own for 100); the
# driver's and NVML's words.
_LOST = (
    r"CUDA-capable device\(s\) is/are busy or unavailable|no CUDA-capable device is detected|"
    r"uncorrectable ECC error|uncorrectable NVLink error|over nvlink or a hardware error|system not yet initialized|"
    r"No CUDA GPUs are available|fallen off the bus|GPU is lost|GPU requires re(start|set)|"
    r"cudaError(DevicesUnavailable|NoDevice|ECCUncorrectable|NvlinkUncorrectable|Contained|SystemNotReady)|"
    r"CUDA_ERROR_(DEVICE_UNAVAILABLE|NO_DEVICE|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|CONTAINED|SYSTEM_NOT_READY)"
)
_MAIN = r"DefaultCPUAllocator: can't allocate memory|std::bad_alloc"


def next_share(share: int) -> int | None:
    """The share, in thousandths, with which half as many cells fit a device; None for a whole one."""
    return None if share >= WHOLE else WHOLE // max(1, WHOLE // share // 2)


def grown(share: int, batch: int | None, record: Record | None) -> int:
    """``share``, or the larger one that a cell needs by what it has run out of so far, with the same ``batch``."""
    if record is None or record.outgrown is None or record.batch != batch:
        return share
    return max(share, next_share(record.outgrown) or WHOLE)


def retry_share(record: Record | None) -> int | None:
    """The larger share with which a cell can be tried again that has ended as in ``record``; None if none would help.

    Main memory does not come with a share.
    """
    if record is None or record.status is not State.FAILED or record.failure != OOM_CAP or record.outgrown is None:
        return None
    return next_share(record.outgrown)


@dataclass(frozen=True)
class Usage:
    """GPU memory when an allocation failed, in bytes.

    ``cap`` is what torch's allocator may reserve (None: not capped), ``request`` what it wanted beside ``reserved``
    (None: something else asked). ``rounding``: by how much ``request`` may be too small. ``free`` of the device.
    ``returned``: what the cell has given back of ``reserved`` since.
    """

    reserved: int
    allocated: int
    request: int | None
    cap: int | None
    total: int | None
    model: str = "the device"
    free: int | None = None
    rounding: int = 0
    returned: int = 0


@dataclass
class _Watch:
    """What is known of this process's device, and the allocator's latest failure."""

    cap: int | None
    index: int
    last: Usage | None = None


_watch = _Watch(None, 0)


def watch(cap: int | None, index: int = 0) -> None:
    """From here on note the numbers at each failure of torch's allocator: when the error arrives they are gone.

    ``cap`` is the one in force, in bytes. Lightning, for one, empties the allocator's cache before it raises.
    """
    global _watch
    _watch = _Watch(cap, index)
    import torch

    with contextlib.suppress(AttributeError):
        attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        # Not before CUDA is in use: a process that has it cannot fork others that want it.
        torch.cuda._lazy_call(lambda: attach(_note))


def _note(device: int, request: int, limit: int, free: int) -> None:
    """Told by torch's allocator, before it raises; what is raised here would take the error's place."""
    with contextlib.suppress(Exception):
        reserved, allocated = _held(device)
        cap = None if _watch.cap is None else limit
        _watch.last = Usage(reserved, allocated, request, cap, None, free=free)


def _held(device: int) -> tuple[int, int]:
    """Bytes that torch's allocator has reserved and handed out: its own books, which ask nothing of the device."""
    import torch

    stats = torch.cuda.memory_stats(device)
    return int(stats.get("reserved_bytes.all.current", 0)), int(stats.get("allocated_bytes.all.current", 0))


def tell(error: BaseException, record: Record, job: Job) -> Record:
    """``record``, of a cell that ``error`` has ended: with the kind and a line about it, where it is one of ours.

    What is not the cell's doing leaves it interrupted. Never raises.
    """
    if record.status is not State.FAILED:
        return record
    try:
        found = _tell(error, job)
    except Exception:
        import traceback

        print("what the error has to do with memory cannot be told:", file=sys.stderr)
        traceback.print_exc()
        return record
    if found is None:
        return record
    kind, words, outgrown = found
    print(f"{kind}: {words}", file=sys.stderr)
    state = State.FAILED if kind == OOM_CAP else State.INTERRUPTED
    text = f"{kind}: {words}\n{record.error}"
    return replace(record, status=state, failure=kind, error=text, outgrown=outgrown or record.outgrown)


def _tell(error: BaseException, job: Job) -> tuple[str, str, int | None] | None:
    """The kind, the words about it, and the share that was too small."""
    from sweepack.neighbours import others_on

    on_gpu = job.kind == "cuda"
    for each in _chain(error):
        text = f"{type(each).__name__}: {each}"
        if on_gpu and re.search(_LOST, text):
            return DEVICE_LOST, _lost_words(job, each), None
        if on_gpu and (re.search(_TORCH, text) or re.search(_DRIVER, text)):
            others = others_on(_entry())
            if others.lost:
                return DEVICE_LOST, _lost_words(job, others.trouble), None
            return about_gpu(usage_at(text), job, others)
        if _is_main_memory(each, text) and (limit := main_limit(job)):
            return OOM_CAP, main_words(text, limit), None
        if on_gpu and re.search("CUDA( driver)? error", text) and (others := others_on(_entry())).lost:
            return DEVICE_LOST, _lost_words(job, others.trouble), None
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what led to it, the last first."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting and len(seen) < 100:
        each = waiting.pop(0)
        if each is None or any(each is known for known in seen):
            continue
        seen.append(each)
        yield each
        waiting += [each.__cause__, None if each.__suppress_context__ else each.__context__]
        waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def usage_at(text: str) -> Usage:
    """The numbers at the failure that ``text`` is about: as torch's allocator told them, else as they are now."""
    found = re.search(_TORCH + _SIZE, text)
    request, rounding = _bytes(found[2], found[3]) if found else (None, 0)
    total, model, reserved, allocated = None, "the device", 0, 0
    if "torch" in sys.modules:
        reserved, allocated = _held(_watch.index)
        with contextlib.suppress(Exception):  # CUDA could not be had at all
            properties = sys.modules["torch"].cuda.get_device_properties(_watch.index)
            total, model = int(properties.total_memory), str(properties.name)
    last = _watch.last
    if last is not None and request is not None and abs((last.request or 0) - request) <= rounding:
        return replace(last, total=total, model=model, returned=last.reserved - reserved)
    now = reserved
    if said := re.search(rf"Of the allocated memory {_SIZE} is allocated.* and {_SIZE} is reserved", text):
        # Of the moment itself, while the books may have been cleared since.
        used, unused = _bytes(said[1], said[2])[0], _bytes(said[3], said[4])[0]
        reserved, allocated = max(reserved, used + unused), max(allocated, used)
    return Usage(reserved, allocated, request, _watch.cap, total, model, None, rounding, returned=reserved - now)


def _bytes(number: str, unit: str) -> tuple[int, int]:
    """What torch's ``number`` stands for, and by how much it may be wrong."""
    scale = _UNITS[unit]
    return round(float(number) * scale), 0 if scale == 1 else scale // 200 + 1


def about_gpu(usage: Usage, job: Job, others: Others) -> tuple[str, str, int | None]:
    """Whether the cell met its own cap, with the words about it and the share that was too small."""
    limit = usage.cap if usage.cap is not None else _alone(usage.total, job)
    wanted = usage.reserved + (usage.request if usage.request is not None else _UNTOLD) + usage.rounding
    what = f"asked for {_gib(usage.request)}" if usage.request is not None else "a library asked for memory of its own"
    asked = f"{what} beside {_gib(usage.reserved)} reserved"
    share = f"{job.share / WHOLE:g} of {usage.model}"
    mps = _mps_limit(job, usage, others)
    # What is not torch's has no cap: only where the cell has the device to itself is it short by its own doing.
    over = usage.request is not None or usage.cap is None
    if limit is not None and over and wanted > limit:
        bound = "the cell's cap is" if usage.cap is not None else "there is no more than"
        return OOM_CAP, f"{asked}, but {bound} {_gib(limit)} ({share}); {_advice(usage, job, limit)}", job.share
    if mps is not None:
        words = f"{asked}, but MPS holds the cell to {_gib(mps)} ({share}); {_advice(usage, job, mps)}"
        return OOM_CAP, words, job.share
    below = "" if limit is None else f", below the cell's cap of {_gib(limit)}"
    if usage.cap is None and limit is not None:
        below = f", of {_gib(limit)} that it could have alone"
    free = usage.free if usage.free is not None else others.free
    left = f"the device had {_gib(free)} left" if free is not None else "the device had none left"
    beside = "" if others.seen else "; or cells take more beside torch's allocator than `memory: {overhead: …}` says"
    return OOM_NEIGHBOUR, f"{asked}{below} ({share}), but {left}: {others}{beside}; the cell stays pending", None


def _alone(total: int | None, job: Job) -> int | None:
    """Bytes that torch can have where it is not capped and nobody else is on the device."""
    if total is None:
        return None
    return total - (job.memory.get("reserve", 300) + job.memory.get("overhead", 600)) * 10**6


def _mps_limit(job: Job, usage: Usage, others: Others) -> int | None:
    """The bytes to which MPS holds the cell, if the device still had room for what was refused."""
    limit = re.search(r"=(\d+)M", ((job.mps or {}).get("variables") or {}).get(MPS_LIMIT, ""))
    if limit is None or others.free is None:
        return None
    if others.free - usage.returned < max(usage.request or 0, _GIB // 4):
        return None
    return int(limit[1]) * _MIB


def _advice(usage: Usage, job: Job, limit: int) -> str:
    todo = ["a smaller batch", "activation checkpointing"]
    larger = next_share(job.share)
    if larger is not None:
        todo.append(f"a larger share (`gpu: {larger / WHOLE:g}`, or `retry: {{oom: next_share}}`)")
    else:
        todo.append("several devices (`gpus_per_node`)")
    unused = usage.reserved - usage.allocated
    fragmented = ""
    if unused >= limit // 10:
        fix = "" if job.memory.get("expandable_segments") else ": try `memory: {expandable_segments: true}`"
        fragmented = f"; {_gib(unused)} of what is reserved lies idle in fragments{fix}"
    return f"what helps: {', '.join(todo[:-1])}, or {todo[-1]}{fragmented}"


def _lost_words(job: Job, said: object) -> str:
    reason = (str(said).splitlines() or ["it does not answer"])[0]
    return f"{job.device} has failed or cannot be had ({reason}); see `nvidia-smi`, the cell stays pending"


def _entry() -> str:
    """What CUDA_VISIBLE_DEVICES calls this process's device."""
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return entries[_watch.index].strip() if _watch.index < len(entries) else ""


def _is_main_memory(error: BaseException, text: str) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and re.search(_MAIN, text) is not None


def main_limit(job: Job) -> int | None:
    """The cell's ``mem`` in bytes, if the kernel holds this process to it; else None."""
    import resource

    held = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    return job.mem_mb * 10**6 if held and job.mem_mb and job.memory.get("limit_main") else None


def main_words(text: str, limit: int) -> str:
    found = re.search(r"tried to allocate (\d+) (bytes)", text) or re.search(rf"Unable to allocate {_SIZE}", text)
    asked = f"asked for {_gib(_bytes(found[1], found[2])[0])} more" if found else "asked for more main memory"
    return (
        f"{asked}, but the cell's `mem` holds it to {_gib(limit)} of main memory; "
        "raise `mem` under `resources`, or make the batch smaller"
    )


def kernel_kills(root: Path = Path("/")) -> int | None:
    """How many processes of this one's control group the kernel has killed for lack of memory; None: not known."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            mounted = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            name = "memory.oom_control" if controllers else "memory.events"
            # In a container the group's path may be seen from outside, while its files are at the top.
            for folder in (mounted / path.strip("/"), mounted):
                with contextlib.suppress(OSError):
                    if count := re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), re.MULTILINE):
                        return int(count[1])
    return None


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB // 10 else f"{size / _MIB:.1f} MiB"
