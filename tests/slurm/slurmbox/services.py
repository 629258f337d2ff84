"""What the nodes need: munge, MariaDB, slurmdbd with its accounts, slurmctld."""

from __future__ import annotations

import secrets
import shutil

from slurmbox.box import DATABASE_PORT, Box
from slurmbox.processes import Daemon, run, succeeds

CLUSTER = "sweepack"
# Root's account, and one that root may not use.
ACCOUNT = "ml"
OTHER_ACCOUNT = "other"
SCHEMA = """
create database if not exists slurm_acct_db;
create user if not exists 'slurm'@'127.0.0.1' identified by 'slurm';
grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1';
"""


def all_services(box: Box) -> list[Daemon]:
    """In the order in which they start."""
    return [munged(box), database(box), slurmdbd(box), controller(box)]


def start_services(box: Box) -> None:
    """Start what does not run, in order, each after what it needs answers."""
    _make_munge_key(box)
    munged(box).ensure()
    _install_database(box)
    database(box).ensure()
    run(_sql(box, SCHEMA), box.environment)
    slurmdbd(box).ensure()
    _register_accounts(box)
    controller(box).ensure()


def munged(box: Box) -> Daemon:
    folder = box.state / "munge"
    command = (
        "munged",
        "--force",
        f"--key-file={folder}/munge.key",
        f"--socket={folder}/munge.socket",
        f"--pid-file={box.state}/run/munged.pid",
        f"--log-file={box.state}/log/munged.log",
        f"--seed-file={folder}/munged.seed",
        "--group-update-time=-1",
    )

    def answers() -> bool:
        return succeeds(["munge", "-n", "-S", f"{folder}/munge.socket"], box.environment)

    return Daemon("munged", "munged", command, box.environment, box.state, answers)


def database(box: Box) -> Daemon:
    command = (
        "mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={box.state}/db",
        f"--socket={box.state}/run/mariadbd.sock",
        f"--pid-file={box.state}/run/mariadbd.pid",
        "--bind-address=127.0.0.1",
        f"--port={DATABASE_PORT}",
        "--skip-name-resolve",
        "--skip-log-bin",
        "--innodb-buffer-pool-size=128M",
        "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0",
    )

    def answers() -> bool:
        return succeeds(_sql(box, "select 1"), box.environment)

    return Daemon("mariadbd", "mariadbd", command, box.environment, box.state, answers, stays=True)


def slurmdbd(box: Box) -> Daemon:
    def answers() -> bool:
        return succeeds(["sacctmgr", "-n", "-P", "show", "cluster"], box.environment)

    return Daemon("slurmdbd", "slurmdbd", ("slurmdbd",), box.environment, box.state, answers)


def controller(box: Box) -> Daemon:
    def answers() -> bool:
        return succeeds(["scontrol", "ping"], box.environment)

    # -i: state files that a crash of the machine has cut short must not keep it from starting.
    return Daemon("slurmctld", "slurmctld", ("slurmctld", "-i"), box.environment, box.state, answers)


def _make_munge_key(box: Box) -> None:
    key = box.state / "munge" / "munge.key"
    if not key.exists():
        new = key.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_bytes(secrets.token_bytes(128))
        new.replace(key)


def _install_database(box: Box) -> None:
    """Make the system tables, whole or not at all: a folder that an interruption left half made would stay broken."""
    final, new = box.state / "db", box.state / "db.new"
    if (final / "mysql").exists():
        return
    shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(final, ignore_errors=True)
    command = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={new}", "--skip-test-db"]
    run([*command, "--auth-root-authentication-method=normal"], box.environment, seconds=120)
    new.rename(final)


def _sql(box: Box, statements: str) -> list[str]:
    socket = box.state / "run" / "mariadbd.sock"
    return ["mariadb", "--no-defaults", f"--socket={socket}", "--user=root", f"--execute={statements}"]


def _register_accounts(box: Box) -> None:
    def show(*what: str) -> list[str]:
        return run(["sacctmgr", "-n", "-P", "show", *what], box.environment).split()

    def change(*what: str) -> None:
        run(["sacctmgr", "-i", *what], box.environment)

    known = show("associations", f"cluster={CLUSTER}", "format=account,user")
    if not known:
        change("add", "cluster", CLUSTER)
    for account in (ACCOUNT, OTHER_ACCOUNT):
        if f"{account}|" not in known:
            change("add", "account", account, f"Cluster={CLUSTER}", f"Description={account}", "Organization=tests")
    if f"{ACCOUNT}|root" not in known:
        change("add", "user", "root", f"Account={ACCOUNT}", f"Cluster={CLUSTER}")
    if show("user", "root", "format=defaultaccount") != [ACCOUNT]:
        change("modify", "user", "root", "set", f"DefaultAccount={ACCOUNT}")
