"""Bad luck of running cells: the right cell gets the right status, the others go on, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
from conftest import REPOSITORY, make_sandbox
from traces import hosts, nothing_is_left, processes

NOBODY = 65534
GATED = """
import os, subprocess, time
from pathlib import Path
IMPORTED = os.getpid()
def train(cell, *, x: int):
    assert not Path("unarmed").exists()
    subprocess.Popen(["sleep", "1000"])
    Path(f"started-{x}").touch()
    while not Path("go").exists() and not Path(f"go-{x}").exists():
        time.sleep(0.02)
    return {"host": IMPORTED, "forked": IMPORTED != os.getpid()}
"""


def sweep(sandbox, task, gpu=0.1, **axes):
    sandbox.write("task.py", task)
    sandbox.config(sweep={"name": "test", "task": "task.py:train", "axes": axes}, resources=[{"gpu": gpu}])


def by(sandbox, axis):
    return {record["params"][axis]: record for record in sandbox.cells().values()}


def started(sandbox):
    return {int(path.name.partition("-")[2]) for path in sandbox.root.glob("started-*")}


@pytest.fixture
def sandbox(sandbox):
    """A sandbox whose processes end with its test, however that ends."""
    yield sandbox
    end(sandbox)


def end(sandbox):
    for pid in processes(sandbox):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def device_node(path):
    try:
        os.mknod(path, 0o20600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device file takes root")
    try:
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def small_disk(folder, megabytes):
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting a small disk takes root: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("how", ["torch", "device"])
def test_an_import_that_touches_the_gpu_means_fresh_cells(sandbox, eventually, how):
    node = Path(f"/dev/nvidia-of-test-{os.getpid()}")
    touch = {
        "torch": "import torch\ntorch.cuda._initialized = True\n",
        "device": f"FILE = open('{node}')\n",
    }[how]
    words = {"torch": "importing the task has initialised CUDA", "device": "importing the task has opened a GPU"}[how]
    with device_node(node) if how == "device" else contextlib.nullcontext():
        sweep(sandbox, touch + GATED, x=[0, 1])
        (sandbox.root / "go").touch()
        sandbox.snakemake("--cores", "2")
    for record in sandbox.cells().values():
        assert not record["metrics"]["forked"]
        assert f"started fresh: {words}\n" in (record["dir"] / "log.txt").read_text()
    nothing_is_left(sandbox, eventually)


FILLING = """
import time
from pathlib import Path
def train(cell, *, x: int):
    directory = Path("results/test/cells")
    if x == 1 and not Path("room").exists():
        while len(list(directory.glob("*/result.json"))) < 2:
            time.sleep(0.02)
        try:
            with open(directory / cell.id / "big", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        finally:
            Path("full").touch()
    while x == 3 and not Path("full").exists():
        time.sleep(0.02)
    return {"score": x}
"""


def test_a_full_disk_costs_only_the_cells_that_still_had_to_write(sandbox, eventually):
    sweep(sandbox, FILLING, x=[0, 1, 2, 3])
    with small_disk(sandbox.root / "results", 4):
        output = sandbox.snakemake("--cores", "4", status=1)
        cells = by(sandbox, "x")
        assert {x: cells[x]["status"] == "finished" for x in cells} == {0: True, 1: False, 2: True, 3: False}
        for x in (1, 3):
            about = [line for line in output.splitlines() if f"cell {cells[x]['dir'].name}" in line]
            assert any("No space left on device" in line for line in about), output
        assert "Traceback" not in output
        nothing_is_left(sandbox, eventually)

        again = sandbox.snakemake("--cores", "4", status=1)
        assert "No space left on device" in again and "Traceback" not in again

        (cells[1]["dir"] / "big").unlink()
        (sandbox.root / "room").touch()
        assert "2 finished, 2 to run" in sandbox.snakemake("--cores", "4")
        after = by(sandbox, "x")
        assert {record["status"] for record in after.values()} == {"finished"}
        assert after[0] == cells[0] and after[2] == cells[2]
        assert not list(sandbox.root.glob("results/**/*.tmp"))
        nothing_is_left(sandbox, eventually)


CLOSING = """
import os, sys
def train(cell, *, how: str):
    exec(how)
    return {"score": 1}
"""
CLOSED = [
    "sys.stdout.close()",
    "sys.stderr.close()",
    "print('unflushed', end=''); os.close(1)",
    "os.closerange(0, 3)",
    "os.closerange(3, 256)",
    "sys.stdout = sys.stderr = None",
    "sys.stdout = open('/dev/full', 'w'); print('nowhere')",
]


@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_a_cell_may_close_its_output_and_still_finish_or_fail(sandbox, eventually, start):
    raising = "sys.stderr.close(); raise ValueError('the real reason')"
    sweep(sandbox, CLOSING, how=[*CLOSED, raising])
    sandbox.snakemake("--config", f"start={start}", status=1)
    cells = by(sandbox, "how")
    assert "the real reason" in (cells[raising]["error"] or "") and cells[raising]["status"] == "failed"
    handed_over = [how for how in CLOSED if (cells[how]["dir"] / "result.json").exists()]
    assert {how: cells[how]["status"] for how in handed_over} == dict.fromkeys(CLOSED, "finished")
    nothing_is_left(sandbox, eventually)


def test_ten_cells_on_two_devices_end_with_their_host_and_the_next_run_finishes_them(sandbox, eventually):
    sweep(sandbox, GATED, gpu=0.2, x=list(range(10)))
    driver = sandbox.start("--cores", "12", SWEEPACK_DEVICES="sim:2")
    eventually(lambda: len(started(sandbox)) == 10, "ten cells")
    (host,) = hosts(sandbox)
    os.kill(host, signal.SIGKILL)
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 1, output
    assert {(record["status"], record["attempt"]) for record in sandbox.cells().values()} == {("interrupted", 1)}
    assert {record["device"] for record in sandbox.cells().values()} == {"sim:0", "sim:1"}
    eventually(lambda: not processes(sandbox), "the cells' children to end")

    (sandbox.root / "go").touch()
    assert "10 interrupted before" in sandbox.snakemake("--cores", "12", SWEEPACK_DEVICES="sim:2")
    assert {(record["status"], record["attempt"]) for record in sandbox.cells().values()} == {("finished", 2)}
    nothing_is_left(sandbox, eventually)


LEAVING = """
import os, subprocess, time
def train(cell, *, how: str):
    if how == "program":
        subprocess.Popen(["setsid", "sleep", "1000"])
    elif os.fork() == 0:
        os.setsid()
        if how == "child" or os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    return {"score": 1}
"""


@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_what_a_cell_leaves_in_a_session_of_its_own_ends_with_it(sandbox, eventually, start):
    sweep(sandbox, LEAVING, how=["program", "child", "grandchild"])
    # Not read to its end: whoever is left holds it open.
    assert sandbox.start("--config", f"start={start}").wait(timeout=300) == 0
    assert {record["status"] for record in sandbox.cells().values()} == {"finished"}
    nothing_is_left(sandbox, eventually)


def test_a_socket_deleted_while_cells_run_costs_a_new_host_and_nothing_else(sandbox, eventually):
    sweep(sandbox, GATED, x=[0, 1, 2, 3])
    driver = sandbox.start("--cores", "2")
    eventually(lambda: len(started(sandbox)) == 2, "two cells")
    before = started(sandbox)
    (path,) = hosts(sandbox).values()
    path.unlink()
    (sandbox.root / f"go-{min(before)}").touch()
    eventually(lambda: len(started(sandbox)) == 3, "a cell after the socket was deleted")
    assert len(hosts(sandbox)) == 2
    (sandbox.root / "go").touch()
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, output
    cells = by(sandbox, "x")
    old = {cells[x]["metrics"]["host"] for x in before}
    new = {cells[x]["metrics"]["host"] for x in cells if x not in before}
    assert len(old) == len(new) == 1 and old != new and all(r["metrics"]["forked"] for r in cells.values())
    nothing_is_left(sandbox, eventually)


def test_by_hand_a_cell_ends_with_the_status_of_its_signal(sandbox, eventually):
    # From a process that ends with it, as a shell script would: the last driver of its host.
    by_hand = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    signals = ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, 137))
    ends = [(start, *end) for start in ("auto", "fresh", "asked") for end in signals]
    sweep(sandbox, GATED, x=list(range(len(ends))))
    (sandbox.root / "unarmed").touch()
    sandbox.snakemake(status=1)
    (sandbox.root / "unarmed").unlink()
    running = []
    for x, (start, _, _) in enumerate(ends):
        meaning = by(sandbox, "x")[x]["dir"] / "cell.json"
        cell = json.loads(meaning.read_text())
        cell["launch"] |= {"start": "fresh" if start == "fresh" else "auto", "share": 100}
        meaning.write_text(json.dumps(cell))
        command = [REPOSITORY / "scripts/cell.py", "--sweep-dir", "results/test", "--cell", cell["id"]]
        if start == "asked":  # as Snakemake's jobs do
            eventually(lambda: len(started(sandbox)) >= 3, "the host")
            (path,) = hosts(sandbox).values()
            command = ["-I", "-S", command[0], "--host", path, *command[1:]]
        command = [sys.executable, "-c", by_hand, sys.executable, *command]
        running.append(subprocess.Popen(command, cwd=sandbox.root, env=sandbox.environment))
    eventually(lambda: len(started(sandbox)) == len(ends), "the cells")
    for x, (_, signum, _) in enumerate(ends):
        (client,) = map(int, Path(f"/proc/{running[x].pid}/task/{running[x].pid}/children").read_text().split())
        os.kill(leader(processes(sandbox), by(sandbox, "x")[x]) if signum == signal.SIGKILL else client, signum)
    assert [process.wait(timeout=300) for process in running] == [status for _, _, status in ends]
    for x, (_, signum, _) in enumerate(ends):
        record = by(sandbox, "x")[x]
        assert record["status"] == "interrupted" and signum.name in record["error"] and record["attempt"] == 2
    nothing_is_left(sandbox, eventually)

    (sandbox.root / "go").touch()
    sandbox.snakemake()
    assert {record["attempt"] for record in sandbox.cells().values()} == {3}


def leader(pids, record):
    """The process of a running cell: the leader of its session among those that hold its log."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.getsid(pid) == pid and Path(f"/proc/{pid}/fd/1").readlink() == record["dir"] / "log.txt":
                return pid
    raise AssertionError(f"no process of cell {record['cell']} among {pids}")


def usable(become, python, packages):
    """Whether the user nobody can start ``python``, see the packages from it, and start it from there again."""
    again = (
        f"import os, sweepack, snakemake; os.execv('{python}', ['python', '-c', 'open(\"{REPOSITORY}/Snakefile\")'])"
    )
    command = [*become.split(), python, "-c", again]
    return not subprocess.run(command, capture_output=True, cwd="/", env={"PYTHONPATH": packages}).returncode


@pytest.fixture
def stranger():
    """A sandbox of the user nobody, in a folder that nobody may enter."""
    if os.getuid():
        pytest.skip("running as another user takes root")
    become = f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups"
    packages = f"{REPOSITORY}/workflow/src:{sysconfig.get_path('purelib')}"
    # A virtual environment may lead to a Python in somebody's home.
    known = (sys.executable, shutil.which(f"python{sys.version_info.major}.{sys.version_info.minor}", path=os.defpath))
    python = next((path for path in known if path and usable(become, path, packages)), None)
    if python is None:
        pytest.skip("the user nobody may not read this checkout or start its Python")
    folder = Path(tempfile.mkdtemp(prefix="sweepack-nobody-"))
    default = Path(f"/dev/shm/sweepack-{NOBODY}")
    had_leases = default.exists()
    sandbox = make_sandbox(folder)
    try:
        shim = sandbox.write("bin/snakemake", f'#!/bin/sh\nexec {become} {python} -m snakemake "$@"\n')
        shim.chmod(0o755)
        del sandbox.environment["SWEEPACK_LEASES"]
        path = f"{shim.parent}:{sandbox.environment['PATH']}"
        sandbox.environment |= {"PATH": path, "HOME": str(folder), "PYTHONPATH": packages}
        yield sandbox
    finally:
        end(sandbox)
        shutil.rmtree(folder)
        if not had_leases:
            shutil.rmtree(default, ignore_errors=True)


KNOCK = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
with socket.socket(socket.AF_UNIX) as client:
    client.settimeout(30)
    try:
        client.connect(sys.argv[1])
        client.sendall(b"?")
        print("answered", client.recv(1))
    except OSError as error:
        print(type(error).__name__)
"""


def knock(path, *descriptors):
    """What the user nobody is told who tries the socket at ``path``."""
    command = [sys.executable, "-c", KNOCK, path]
    return subprocess.run(command, capture_output=True, text=True, check=True, pass_fds=descriptors).stdout.strip()


def test_two_users_run_on_one_node_and_neither_reaches_the_others_host(sandbox, stranger, eventually):
    del sandbox.environment["SWEEPACK_LEASES"]
    drivers = []
    for one in (sandbox, stranger):
        sweep(one, GATED, x=[0, 1])
        for path in (one.root, *one.root.rglob("*"), one.root.parent) if one is stranger else ():
            os.chown(path, NOBODY, NOBODY)
        drivers.append(one.start("--cores", "2"))
    eventually(lambda: all(len(started(one)) == 2 for one in (sandbox, stranger)), "two cells of either user", 90)
    path = next(Path(word) for line in processes(sandbox).values() for word in line.split() if word.endswith(".sock"))
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent == Path(f"/dev/shm/sweepack-{os.getuid()}")
    assert knock(path) == "PermissionError"
    # Past the folder, through a socket that has been opened to all: the host itself refuses.
    path.chmod(0o666)
    opened = os.open(path, os.O_PATH)
    assert knock(f"/proc/self/fd/{opened}", opened) in ("answered b''", "ConnectionResetError", "BrokenPipeError")
    os.close(opened)
    for one, driver in zip((sandbox, stranger), drivers, strict=True):
        (one.root / "go").touch()
        output, _ = driver.communicate(timeout=300)
        assert driver.returncode == 0, output
        assert all(record["metrics"]["forked"] for record in one.cells().values())
        nothing_is_left(one, eventually)
    assert {path.stat().st_uid for path in stranger.root.glob("results/**/result.json")} == {NOBODY}
    assert not path.exists()
