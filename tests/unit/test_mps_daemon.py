"""The MPS daemon of a device: one for all its users, gone with the last of them, mended when it is broken."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mps_tools import GPU, PROGRAM, daemons, path_with_fakes
from sweepack.devices import Device
from sweepack.errors import UserError
from sweepack.hosts import host_socket
from sweepack.mps import control, daemon, keeper
from sweepack.mps.faults import excuse, was_struck
from sweepack.records import Record, State

DEVICE = Device(GPU, GPU, "cuda", "cuda:0", "NVIDIA H200", 141 * 2**30)
OTHER = Device("GPU-9", "GPU-9", "cuda", "cuda:1")
SETTINGS = {"pinned_memory": True, "thread_percentage": None}
USER = """
import sys, time
from sweepack.devices import Device
from sweepack.mps.daemon import join
device = Device(sys.argv[1], sys.argv[1], "cuda", "cuda:0")
for _ in range(int(sys.argv[2])):
    with join(device, {"pinned_memory": False, "thread_percentage": None}, 250, 300):
        pass
with join(device, {"pinned_memory": False, "thread_percentage": None}, 250, 300) as membership:
    import os; os.set_inheritable(membership.fd, True)
    print("joined", flush=True)
    sys.stdin.read()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]) -> Iterator[Path]:
    """Leases of the test's own, in a path short enough for sockets; at the end no daemon is left."""
    folder = Path(tempfile.mkdtemp(prefix="mps-"))
    monkeypatch.setenv("SWEEPACK_LEASES", str(folder))
    monkeypatch.setenv("PATH", path_with_fakes())
    yield folder
    eventually(lambda: not daemons(folder), "the end of every daemon")
    shutil.rmtree(folder)


@pytest.fixture
def user(leases: Path) -> Iterator[Start]:
    """Start a process that uses a device's daemon until its input ends, after having used it ``times`` times."""
    started: list[subprocess.Popen[str]] = []

    def start(entry: str = GPU, times: int = 0, wait: bool = True) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", USER, entry, str(times)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert not wait or joined(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def joined(process: subprocess.Popen[str]) -> bool:
    assert process.stdout
    return process.stdout.readline() == "joined\n"


def trouble_of(settings: dict[str, Any] = SETTINGS) -> str:
    with pytest.raises(UserError) as caught, daemon.join(DEVICE, settings, 250, 300):
        pass
    assert caught.value.key == "mps" and "`mps: false`" in caught.value.fix
    return str(caught.value)


def test_users_of_a_device_share_a_daemon_that_goes_with_the_last(leases, user, eventually):
    first, second, other = user(), user(), user("GPU-9")
    running = daemons(leases)
    assert len(running) == 2
    visible = {
        word for pid in running for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if "VISI" in word
    }
    assert visible == {f"CUDA_VISIBLE_DEVICES={GPU}", "CUDA_VISIBLE_DEVICES=GPU-9"}
    other.communicate("")
    first.communicate("")
    eventually(lambda: len(daemons(leases)) == 1, "the end of the other device's daemon")
    assert control.servers(daemon.place_of(DEVICE)) == []
    second.communicate("")
    eventually(lambda: not daemon.place_of(DEVICE).pipe.exists(), "the end of the daemon")
    assert daemons(leases) == []


def test_a_daemon_goes_when_its_users_are_killed(leases, user, eventually):
    users = [user(), user()]
    for process in users:
        process.kill()
    eventually(lambda: not daemons(leases), "the end of the daemon")


def test_a_daemon_dies_with_its_keeper_and_the_next_user_gets_another(leases, user, eventually):
    user()
    (first,) = daemons(leases)
    os.kill(int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    eventually(lambda: not daemons(leases), "the end of the daemon")
    user()
    assert len(daemons(leases)) == 1


def test_a_daemon_that_was_killed_is_replaced(leases, user, eventually):
    user()
    (first,) = daemons(leases)
    os.kill(first, signal.SIGKILL)
    user()
    assert daemons(leases) not in ([], [first])


def test_what_a_dead_daemon_left_is_no_hindrance(leases, user):
    place = daemon.place_of(DEVICE)
    place.pipe.mkdir()
    (place.pipe / f"{PROGRAM}.pid").write_text("1\n")
    subprocess.run([sys.executable, "-c", f"import socket; socket.socket(1).bind('{place.pipe}/control')"], check=True)
    user()
    assert len(daemons(leases)) == 1


def test_a_daemon_without_a_keeper_is_replaced(leases, user, eventually):
    place = daemon.place_of(DEVICE)
    place.pipe.mkdir()
    stray = subprocess.Popen([PROGRAM, "-f"], env={**os.environ, **place.variables}, stdout=subprocess.DEVNULL)
    eventually((place.pipe / f"{PROGRAM}.pid").exists, "the daemon")
    user()
    assert stray.wait(60) == -signal.SIGKILL
    assert len(daemons(leases)) == 1


def test_many_users_that_come_and_go_at_once(leases, user, eventually):
    users = [user(times=3, wait=False) for _ in range(8)]
    assert all(joined(process) for process in users)
    assert len(daemons(leases)) == 1
    assert control.servers(daemon.place_of(DEVICE)) == []


def test_a_program_that_fails_is_told_with_its_own_words(leases, monkeypatch):
    monkeypatch.setenv("FAKE_MPS", "fail")
    assert "exit status 1" in trouble_of() and "SM 3.5 or higher" in trouble_of()


def test_a_program_that_hangs_is_given_up(leases, monkeypatch):
    monkeypatch.setenv("FAKE_MPS", "hang")
    code = (
        "import sys; from sweepack.mps import keeper; keeper.START_SECONDS = keeper.QUIT_SECONDS = 1.0; "
        "sys.exit(keeper.main(sys.argv[1:]))"
    )
    spawn = daemon.orphans.spawn

    def impatient(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        at = command.index("-m")
        return spawn([*command[:at], "-c", code, *command[at + 2 :]], **options)

    monkeypatch.setattr(daemon.orphans, "spawn", impatient)
    assert "no answer to `get_server_list`" in trouble_of()


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (Device("", "cpu", "cpu", "cpu"), "cpu is no GPU"),
        (Device("", "sim:0", "sim", "sim:0"), "sim:0 is no GPU"),
        (Device("0", "host:0", "cuda", "cuda:0"), "UUID of cuda:0"),
        (DEVICE, f"no {PROGRAM} on the PATH"),
    ],
)
def test_where_mps_cannot_run_it_says_why(device, words):
    with pytest.raises(UserError) as caught:
        daemon.require_usable([device], {"PATH": "/nowhere"})
    assert words in str(caught.value) and "`mps: false`" in caught.value.fix
    daemon.require_usable([DEVICE], {"PATH": path_with_fakes()})


def test_a_path_too_long_for_sockets_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("SWEEPACK_LEASES", str(tmp_path / ("long" * 20)))
    with pytest.raises(UserError, match="too long for sockets"):
        daemon.place_of(DEVICE)


def test_limits_are_in_the_environment_of_a_client_only(leases):
    with daemon.join(DEVICE, {"pinned_memory": True, "thread_percentage": 30}, 250, 300) as membership:
        # A quarter of 141 GiB less a reserve of 300 MB, in MiB.
        assert (
            membership.variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
            == f"0={(141 * 2**30 - 300 * 10**6) // 4 // 2**20}M"
        )
        assert membership.variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
        (pid,) = daemons(leases)
        assert "PERCENTAGE" not in Path(f"/proc/{pid}/environ").read_text()
    with daemon.join(OTHER, SETTINGS, 250, 300) as membership:
        assert set(membership.variables) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}


def test_one_warm_host_serves_cells_with_and_without_mps(leases):
    task = {"file": "no-such.py", "reference": "module:function"}
    with daemon.join(DEVICE, SETTINGS, 250, 300) as membership:
        assert host_socket({**membership.variables, "HOME": "/"}, task) == host_socket({"HOME": "/"}, task)


class TestFaults:
    """Whose fault it was that a cell failed, by the daemon's logs."""

    @pytest.fixture
    def told(self, leases: Path) -> Iterator[dict[str, Any]]:
        place = daemon.place_of(DEVICE)
        place.log.mkdir()
        (place.log / "server.log").write_text("Volta MPS: Server is handling a fatal GPU error. That was long ago.\n")
        with daemon.join(DEVICE, SETTINGS, 250, 300) as membership:
            yield membership.told

    def judged(self, told: dict[str, Any], *lines: str, error: str = "CUDA error", pid: int | None = 7) -> Record:
        with (control.Place(Path(told["folder"])).log / "server.log").open("a") as log:
            log.writelines(f"[2022-04-28 15:56:08.906 Other 11570] Volta MPS: {line}\n" for line in lines)
        return excuse(Record("c", State.FAILED, 1, error=error), told, pid)

    FAULT = "Server is handling a fatal GPU error."

    def test_without_a_fault_it_was_its_own(self, told):
        assert self.judged(told).status is State.FAILED

    @pytest.mark.parametrize(
        "form", ["status of client {%d, 1} is INACTIVE", "status of client {PID: %d, Context ID: 1} is INACTIVE"]
    )
    def test_of_several_clients_each_may_be_innocent(self, told, form):
        record = self.judged(told, self.FAULT, form % 7, form % 8)
        assert was_struck(record) and "its own error: CUDA error" in str(record.error)

    def test_the_only_client_was_it(self, told):
        assert self.judged(told, self.FAULT, "status of client {7, 1} is INACTIVE").status is State.FAILED

    def test_who_was_no_client_failed_by_itself(self, told):
        lines = [f"status of client {{{pid}, 1}} is INACTIVE" for pid in (8, 9)]
        assert self.judged(told, self.FAULT, *lines).status is State.FAILED
        # A program's process is not known.
        assert was_struck(self.judged(told, pid=None))

    def test_a_server_that_is_gone_is_not_the_cells_fault(self, told):
        assert was_struck(self.judged(told, error="MPS server is not ready to accept new MPS client requests"))

    def test_a_daemon_that_ended_is_not_the_cells_fault(self, told, leases, eventually):
        os.kill(*daemons(leases), signal.SIGKILL)
        place = control.Place(Path(told["folder"]))
        eventually(lambda: keeper.ENDED in place.output.read_text(), "the keeper's note")
        assert was_struck(self.judged(told))
