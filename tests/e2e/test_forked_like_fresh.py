"""What a cell finds when it starts: forked from a warm host the same as in a fresh process, cell after cell."""

from __future__ import annotations

import pytest
from conftest import make_sandbox
from test_bad_luck import sweep

# A module that does at its import all that a module should not, and a cell that spoils all it can for the next one.
TASK = """
import math, multiprocessing, os, random, re, resource, signal, socket, sys, threading, warnings
from concurrent.futures import ProcessPoolExecutor
import numpy, torch

print("printed at import", flush=True)
READ = sys.stdin.read()
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
sys.path.append("elsewhere")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
os.umask(0o27)
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
os.environ["OMP_NUM_THREADS"] = "7"
os.environ.pop("PASSED_ON", None)
random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
warnings.simplefilter("error", FutureWarning)
sys.setrecursionlimit(1234)
STATE = []


def opened():
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and os.path.exists(f"/proc/self/fd/{descriptor}"):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            yield "the terminal" if target.startswith("pipe:") else re.sub(r"^.*[/.]", "", target)


def train(cell, *, x: int):
    view = {
        "state": list(STATE),
        "standard input": [READ, sys.stdin.read(), os.read(0, 1).decode()],
        "folder": os.getcwd(),
        "environment": sorted(f"{name}={value}" for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"),
        "search path": sys.path,
        "handlers": [repr(signal.getsignal(signum)).partition(" at ")[0] for signum in sorted(signal.valid_signals())],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "draws": [random.random(), numpy.random.rand(), torch.rand(()).item()],
        "threads": [threading.active_count(), torch.get_num_threads(), len(os.listdir("/proc/self/task"))],
        "pools": [os.popen("echo $OMP_NUM_THREADS").read(), torch.get_num_interop_threads()],
        "precision": str(torch.get_default_dtype()),
        "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
        "mask": os.umask(0o77),
        "opened": sorted(set(opened())),
        "streams": [str((s.fileno(), s.encoding, s.errors, s.write_through)) for s in (sys.stdout, sys.stderr)],
        "limits": [list(resource.getrlimit(which)) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "priority": [os.nice(0), sorted(os.sched_getaffinity(0))],
        "interpreter": [str(sys.flags), sys.getrecursionlimit(), str(warnings.filters), socket.getdefaulttimeout()],
        "hooks": [len(sys.meta_path), repr(sys.excepthook), repr(sys.gettrace())],
    }
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        view["children"] = list(pool.map(math.factorial, [4]))
    STATE.append(x)
    os.environ["LEFT_BY"] = str(x)
    os.chdir("/")
    sys.path.insert(0, "left")
    signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    torch.set_default_dtype(torch.float16), torch.set_num_threads(3)
    sys.setrecursionlimit(4321), socket.setdefaulttimeout(5), os.nice(1), warnings.resetwarnings()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.excepthook = print
    return view
"""
ASPECTS = (
    *("state", "standard input", "folder", "environment", "search path", "handlers", "blocked", "draws"),
    *("threads", "pools", "precision", "leads", "mask", "opened", "streams", "limits", "priority", "interpreter"),
    *("hooks", "children"),
)


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    """What two cells have found, one after the other, by the way in which they were started."""
    found = {}
    for start in ("auto", "fresh"):
        sandbox = make_sandbox(tmp_path_factory.mktemp("project"))
        folder = str(sandbox.root.parent)
        sweep(sandbox, TASK, x=[0, 1])
        sandbox.snakemake("--cores", "1", "--config", f"start={start}", PASSED_ON="1", PYTHONWARNINGS="default")
        records = sandbox.cells().values()
        assert not [r for r in records if "started fresh" in (r["dir"] / "log.txt").read_text()]
        found[start] = {r["params"]["x"]: without(r["metrics"], folder) for r in records}
    return found


def without(value, folder):
    """``value`` with the sandbox's own ``folder`` taken out of every text."""
    if isinstance(value, str):
        return value.replace(folder, "")
    if isinstance(value, list):
        return [without(item, folder) for item in value]
    return {name: without(item, folder) for name, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("aspect", ASPECTS)
def test_a_forked_cell_finds_what_a_fresh_one_finds(views, aspect):
    for x in (0, 1):
        assert views["auto"][x][aspect] == views["fresh"][x][aspect]


@pytest.mark.parametrize("aspect", ASPECTS)
def test_nothing_of_one_cell_reaches_the_next(views, aspect):
    first, second = views["auto"].values()
    if aspect == "draws":
        assert len({*first[aspect], *second[aspect]}) >= 3
    else:
        assert first[aspect] == second[aspect]


def test_every_aspect_is_compared(views):
    assert set(ASPECTS) == set(views["auto"][0]) and views["auto"][0]["state"] == []
