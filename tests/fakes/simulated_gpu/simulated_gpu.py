"""A GPU of which there is only the memory: torch's caching allocator on it, caps and errors worded as torch's own.

Its processes share it through the folder SIMULATED_GPU: a file for each, with the bytes that it holds, as long as it
lives. `allocate` takes what a tensor would take. What torch.cuda is asked for beside is answered as by an idle GPU.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

MIB, GIB = 2**20, 2**30
TOTAL = 16 * GIB
CONTEXT = 400 * MIB
NAME = "Simulated 16 GB"


def size_text(size):
    """As torch's format_size has it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def rounded(size):
    """The segment that the allocator asks the driver for."""
    if size <= MIB:
        return 2 * MIB
    if size < 10 * MIB:
        return 20 * MIB
    return -(-size // (2 * MIB)) * 2 * MIB


class Block:
    """Memory that is handed out, until it is collected."""

    def __init__(self, gpu, size):
        self.gpu, self.size = gpu, size

    def __del__(self):
        self.gpu.allocated -= self.size


class Gpu:
    """This process's part of the card. ``scattered``: what is cached is never whole enough to be handed out again."""

    def __init__(self, folder, out_of_memory: type[Exception]):
        self.folder = Path(folder)
        self.error = out_of_memory
        self.observers: list[Callable] = []
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0
        self.allowed = None
        self.scattered = False

    def card(self, change=0):
        """Take so many bytes more, if they are there; those that are free on the card, and whether that went well."""
        with (self.folder / "mutex").open("a") as mutex:
            fcntl.flock(mutex, fcntl.LOCK_EX)
            used = {}
            for path in self.folder.glob("[0-9]*"):
                if Path(f"/proc/{path.name}").exists():
                    used[path.name] = int(path.read_text())
                else:
                    path.unlink()
            own = str(os.getpid())
            free = TOTAL - sum(size for pid, size in used.items() if pid != own) - CONTEXT - self.reserved
            if change > free:
                return free, False
            (self.folder / own).write_text(str(CONTEXT + self.reserved + change))
            self.reserved += change
            self.peak_reserved = max(self.reserved, self.peak_reserved)
            return free - change, True

    def reserve(self, size):
        within = self.allowed is None or self.reserved + size <= self.allowed
        return within and self.card(size)[1]

    def allocate(self, size):
        segment = rounded(size)
        cached = 0 if self.scattered else self.reserved - self.allocated
        if segment > cached and not self.reserve(segment):
            if not self.scattered:
                self.empty_cache()
            if not self.reserve(segment):
                self.fail(segment)
        self.allocated += segment
        self.peak_allocated = max(self.allocated, self.peak_allocated)
        return Block(self, segment)

    def fail(self, segment):
        free, _ = self.card()
        for observer in self.observers:
            observer(0, segment, TOTAL if self.allowed is None else self.allowed, free)
        allowed = "" if self.allowed is None else f"{size_text(self.allowed)} allowed; "
        raise self.error(
            f"CUDA out of memory. Tried to allocate {size_text(segment)}. GPU 0 has a total capacity of "
            f"{size_text(TOTAL)} of which {size_text(free)} is free. Including non-PyTorch memory, this process has "
            f"{size_text(CONTEXT + self.reserved)} memory in use. {allowed}Of the allocated memory "
            f"{size_text(self.allocated)} is allocated by PyTorch, and {size_text(self.reserved - self.allocated)} is "
            "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
            "Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-"
            "alloc-conf)"
        )

    def empty_cache(self):
        self.card(self.allocated - self.reserved)

    def stats(self):
        return {
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.peak_reserved,
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak_allocated,
        }


def install(torch):
    """Let ``torch`` have the GPU, where the process may see one."""
    cuda = torch.cuda
    gpu = Gpu(os.environ["SIMULATED_GPU"], torch.OutOfMemoryError)
    state = SimpleNamespace(initialised=False, waiting=[])

    def visible():
        return os.environ.get("CUDA_VISIBLE_DEVICES") not in (None, "", "-1")

    def initialise(*_):
        if not visible():
            raise RuntimeError("No CUDA GPUs are available")
        if not state.initialised:
            state.initialised = True
            for call in state.waiting:
                call()

    def lazily(call, **_):
        if state.initialised:
            call()
        else:
            state.waiting.append(call)

    def set_fraction(fraction, device=None):
        initialise()
        gpu.allowed = int(fraction * TOTAL)

    def properties(device=None):
        initialise()
        return SimpleNamespace(total_memory=TOTAL, name=NAME)

    def allocate(size):
        initialise()
        return gpu.allocate(size)

    def use(name, function):
        # A function for each name: torch._dynamo wants them to be different ones.
        setattr(cuda, name, lambda *arguments, **named: function(*arguments, **named))

    cuda.simulated = gpu
    use("allocate", allocate)
    use("is_available", visible)
    use("is_initialized", lambda: state.initialised)
    use("device_count", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) if visible() else 0)
    use("init", initialise)
    use("_lazy_init", initialise)
    use("_lazy_call", lazily)
    use("current_device", lambda: 0)
    use("set_device", initialise)
    use("get_device_properties", properties)
    use("get_device_name", lambda device=None: NAME)
    use("set_per_process_memory_fraction", set_fraction)
    use("get_per_process_memory_fraction", lambda device=None: 1.0 if gpu.allowed is None else gpu.allowed / TOTAL)
    use("mem_get_info", lambda device=None: (gpu.card()[0], TOTAL))
    use("memory_stats", lambda device=None: gpu.stats())
    for kind in ("reserved", "allocated"):
        use(f"memory_{kind}", lambda device=None, kind=kind: gpu.stats()[f"{kind}_bytes.all.current"])
        use(f"max_memory_{kind}", lambda device=None, kind=kind: gpu.stats()[f"{kind}_bytes.all.peak"])
    use("empty_cache", gpu.empty_cache)
    use("synchronize", lambda device=None: None)
    use("manual_seed", lambda seed: None)
    use("manual_seed_all", lambda seed: None)
    use("get_rng_state", lambda device="cuda": torch.zeros(16, dtype=torch.uint8))
    use("set_rng_state", lambda state, device="cuda": None)
    torch._C._cuda_attach_out_of_memory_observer = gpu.observers.append
    with contextlib.suppress(FileExistsError):
        gpu.folder.mkdir(parents=True)
