"""What the cluster needs of Debian: which packages are missing, and their installation."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from slurmbox.box import SBIN
from slurmbox.processes import ClusterError

# Program → the package that brings it.
NEEDED = {
    "munged": "munge",
    "munge": "munge",
    "mariadbd": "mariadb-server",
    "mariadb": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "slurmdbd": "slurmdbd",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
}
POLICY = Path("/usr/sbin/policy-rc.d")
INSTALL_SECONDS = 900


def missing_packages() -> list[str]:
    """Names of the Debian packages whose programs are not there."""
    path = f"{os.environ.get('PATH', '')}:/usr/bin:/bin:{SBIN}"
    missing = {package for program, package in NEEDED.items() if shutil.which(program, path=path) is None}
    return sorted(missing)


def check() -> None:
    """ClusterError if there can be no cluster on this machine."""
    missing = missing_packages()
    if missing:
        names = " ".join(missing)
        raise ClusterError(f"Slurm's test cluster needs Debian's packages {names}: apt-get install {names}")
    if os.geteuid() != 0:
        raise ClusterError("Slurm's test cluster needs root, for its nodes' host names and device files")


def install() -> None:
    """Install what is missing; ClusterError where that is not for us to do, or fails."""
    missing = missing_packages()
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        check()
    print(f"installing {', '.join(missing)}", flush=True)
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0", *missing]
    with _no_service_starts():
        # The lists of packages may be missing or old.
        if not _apt(command) and not (_apt(["apt-get", "update", "-qq"]) and _apt(command)):
            raise ClusterError(f"`{' '.join(command)}` failed, see above")
    check()


def _apt(command: list[str]) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        return (
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=INSTALL_SECONDS).returncode == 0
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{' '.join(command)}` did not end within {INSTALL_SECONDS} s") from None


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    """Debian starts the services that it installs unless a policy says no. A machine's own policy stays."""
    if os.path.lexists(POLICY):
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
