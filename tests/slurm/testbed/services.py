"""The parts of the cluster in the order in which they start: each is started if it is not running, and waited for."""

from __future__ import annotations

import contextlib
import functools
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from .daemons import Daemon, wait_until
from .packages import PATH
from .state import ACCOUNTING_PORT, DATABASE_PORT, NODES, ClusterError, State

# The account that root's jobs are charged to, and one that root may not use.
ACCOUNTS = ("ml", "other")
GOOD_STATES = {"idle", "planned", "mixed", "allocated", "completing"}

_NODE_PROGRAM = Path(__file__).parent.parent / "node.sh"


class Services:
    """The daemons of one cluster. Methods that wait raise ClusterError, saying for what, when it does not happen."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.environment = {
            "PATH": PATH,
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(state.slurm_conf),
            "SLURM_TIME_FORMAT": "%s",
        }
        munge, run = state.munge, state.run
        self._munge_socket = munge / "socket"
        self._database_socket = run / "mariadbd.socket"
        self.munged = self._daemon(
            "munged",
            *("munged", "--foreground", "--force", "--group-update-time=-1"),
            *(f"--key-file={munge}/key", f"--socket={self._munge_socket}", f"--seed-file={munge}/seed"),
            f"--pid-file={run}/munged.own-pid",
        )
        self.mariadbd = self._daemon(
            "mariadbd",
            *("mariadbd", "--no-defaults", "--user=root", f"--datadir={state.database}"),
            *(f"--socket={self._database_socket}", f"--pid-file={run}/mariadbd.own-pid"),
            *("--bind-address=127.0.0.1", f"--port={DATABASE_PORT}", "--skip-name-resolve", "--skip-log-bin"),
            *("--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"),
            "--innodb-flush-log-at-trx-commit=0",
        )
        self.slurmdbd = self._daemon("slurmdbd", "slurmdbd", "-D")
        # -i: jobs that it can't restore must not keep it from starting.
        self.slurmctld = self._daemon("slurmctld", "slurmctld", "-D", "-i")
        self.nodes = {name: self._node(name) for name in NODES}

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        """All of them, in the order in which they start."""
        return (self.munged, self.mariadbd, self.slurmdbd, self.slurmctld, *self.nodes.values())

    def start_munged(self) -> None:
        def ready() -> bool:
            return self._succeeds("munge", "--no-input", f"--socket={self._munge_socket}")

        # munged takes the lock file of a killed one for its own only with --force, the socket not at all.
        self._ensure(self.munged, ready, 15, before=lambda: self._munge_socket.unlink(missing_ok=True))

    def start_mariadbd(self) -> None:
        set_up = (
            "create database if not exists slurm_acct_db; "
            "create user if not exists 'slurm'@'127.0.0.1' identified by 'slurm'; "
            "grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1';"
        )

        def ready() -> bool:
            client = ("mariadb", "--no-defaults", f"--socket={self._database_socket}", "--user=root")
            return self._database_socket.exists() and self._succeeds(*client, f"--execute={set_up}")

        self._ensure(self.mariadbd, ready, 90, before=self._make_database)

    def start_slurmdbd(self) -> None:
        self._ensure(self.slurmdbd, lambda: _listens(ACCOUNTING_PORT), 90)
        self._make_accounts()

    def start_slurmctld(self) -> None:
        self._ensure(self.slurmctld, lambda: self._succeeds("scontrol", "ping"), 30)

    def start_node(self, name: str) -> None:
        """Start it; `wait_for_nodes` waits until Slurm uses it."""
        node = self.nodes[name]
        if node.pid() is None:
            node.start(self.environment)

    def wait_for_nodes(self, *names: str) -> None:
        """Until Slurm may use these nodes. One that it has set aside, for a job that did not die say, is taken back."""
        for name in names:
            usable = functools.partial(self._node_is_usable, name)
            self.nodes[name].wait_until(usable, f"node {name} to be usable", 60)

    def node_states(self) -> dict[str, str]:
        """Slurm's view of each node: idle, mixed, down* ("*": it does not answer), drained…; empty without Slurm."""
        try:
            rows = self.slurm("sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%N %T").splitlines()
        except ClusterError:
            return {}
        return dict(row.split() for row in rows)

    def kill_node(self, name: str) -> None:
        """Every process of the node gets SIGKILL, at once, as if its power had failed."""
        node = self.nodes[name]
        if node.pid() is None:
            raise ClusterError(f"node {name} is not running")
        space = self.namespace(name)
        node.kill()
        wait_until(lambda: not processes_in(space), f"the processes of node {name} to end", 20)

    def namespace(self, name: str) -> str | None:
        """What tells the processes of a node that runs from all others; None for one that does not."""
        pid = self.nodes[name].pid()
        return _namespace(pid, "pid_for_children") if pid else None

    def cancel_jobs(self) -> None:
        """Cancel all jobs, so that none is found running when the cluster is up again."""
        if self.slurmctld.pid() is None:
            return
        with contextlib.suppress(ClusterError):
            self.slurm("scancel", "--user=root")
            wait_until(lambda: not self.slurm("squeue", "--noheader"), "jobs to end", 8)

    def stop(self) -> None:
        """End everything, in the order opposite to the start."""
        for name, node in self.nodes.items():
            if node.pid() is not None:
                self.kill_node(name)
        for daemon, seconds in ((self.slurmctld, 15), (self.slurmdbd, 15), (self.mariadbd, 30), (self.munged, 5)):
            daemon.stop(seconds)

    def slurm(self, *command: str) -> str:
        """The output of one of Slurm's commands. Raises ClusterError with its message if it fails."""
        done = self._run(*command)
        if done.returncode != 0:
            raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def _node_is_usable(self, name: str) -> bool:
        state = self.node_states().get(name, "unknown")
        if state in ("down", "drained", "draining"):
            self.slurm("scontrol", "update", f"NodeName={name}", "State=RESUME")
        return state in GOOD_STATES and self._has_registered(name)

    def _has_registered(self, name: str) -> bool:
        """Whether this slurmd has reported to this slurmctld: until then a busy node's state is the one from before."""
        shown = self.slurm("scontrol", "--oneliner", "show", "node", name)
        start = next(word for word in shown.split() if word.startswith("SlurmdStartTime=")).partition("=")[2]
        # "None" for a controller that was started since. It is rounded down, and the pid file is written a bit later.
        return start.isdecimal() and int(start) >= self.nodes[name].pid_file.stat().st_mtime - 2

    def _make_database(self) -> None:
        """The tables of MariaDB itself. Made aside, so that an interruption leaves no half of them."""
        if self.state.database.exists():
            return
        aside = self.state.root / "database.new"
        shutil.rmtree(aside, ignore_errors=True)
        done = self._run(
            *("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={aside}"),
            *("--auth-root-authentication-method=normal", "--skip-test-db"),
            seconds=90,
        )
        if done.returncode != 0:
            raise ClusterError(f"mariadb-install-db failed:\n{done.stdout}{done.stderr}")
        aside.rename(self.state.database)

    def _make_accounts(self) -> None:
        have = self.slurm("sacctmgr", "--noheader", "--parsable2", "show", "associations", "format=Account,User")
        known = have.splitlines()
        if "sweepack" not in self.slurm("sacctmgr", "--noheader", "--parsable2", "show", "cluster", "format=Cluster"):
            self.slurm("sacctmgr", "--immediate", "add", "cluster", "sweepack")
        for account in ACCOUNTS:
            if f"{account}|" not in known:
                self.slurm("sacctmgr", "--immediate", "add", "account", account, "Cluster=sweepack")
        if f"{ACCOUNTS[0]}|root" not in known:
            self.slurm("sacctmgr", "--immediate", "add", "user", "root", f"Account={ACCOUNTS[0]}")
            self.slurm("sacctmgr", "--immediate", "modify", "user", "root", "set", f"DefaultAccount={ACCOUNTS[0]}")

    def _ensure(
        self,
        daemon: Daemon,
        ready: Callable[[], bool],
        seconds: float,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        if daemon.pid() is None:
            before()
            daemon.start(self.environment)
        daemon.wait_until(ready, f"{daemon.name} to answer", seconds)

    def _daemon(self, name: str, *command: str | Path) -> Daemon:
        return Daemon(name, command, self.state.run / f"{name}.pid", self.state.log / f"{name}.out")

    def _node(self, name: str) -> Daemon:
        """Own host name, /etc/hosts, /dev/shm and process numbers; network, users and files are the machine's."""
        return self._daemon(
            f"node-{name}",
            *("unshare", "--uts", "--mount", "--propagation=private", "--pid", "--fork"),
            *("--kill-child", "--mount-proc"),
            *(_NODE_PROGRAM, self.state.root, name),
        )

    def _succeeds(self, *command: str) -> bool:
        return self._run(*command).returncode == 0

    def _run(self, *command: str, seconds: float = 20) -> subprocess.CompletedProcess[str]:
        """Run to the end; one that takes longer than `seconds` counts as failed."""
        try:
            return subprocess.run(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, -signal.SIGKILL, "", f"no answer within {seconds:g} s")


def processes_in(space: str | None) -> list[int]:
    """The processes of a node, given its `Services.namespace`."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if space is not None and _namespace(pid, "pid") == space]


def _namespace(pid: int, kind: str) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False
