"""The programs that the test cluster is made of, and Debian's packages that bring them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .state import ClusterError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "slurmdbd": "slurmdbd",
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "mariadb": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
_POLICY = Path("/usr/sbin/policy-rc.d")


def missing_packages() -> list[str]:
    return sorted({package for program, package in _PACKAGES.items() if not shutil.which(program, path=PATH)})


def check_packages() -> None:
    """Raises ClusterError naming what to install."""
    missing = missing_packages()
    if missing:
        raise ClusterError(
            f"not installed: {', '.join(missing)}. `make test-slurm` installs Debian's packages, and so does:  "
            f"apt-get install --no-install-recommends {' '.join(missing)}"
        )


def install() -> None:
    """Install what is missing. Raises ClusterError where that is not possible here."""
    missing = missing_packages()
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get", path=PATH):
        reason = "this is not root" if os.geteuid() != 0 else "there is no apt-get"
        raise ClusterError(f"not installed, and not to be installed since {reason}: Debian's {', '.join(missing)}")
    print(f"installing Debian's packages: {' '.join(missing)}", flush=True)
    with _services_not_started():
        _apt_get("update", "--quiet")
        _apt_get("install", "--quiet", "--yes", "--no-install-recommends", *missing)
    check_packages()


@contextlib.contextmanager
def _services_not_started() -> Iterator[None]:
    """Debian starts the services of what it installs, unless this file says no. One that exists is left as it is."""
    if _POLICY.exists():
        yield
        return
    try:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
        yield
    finally:
        _POLICY.unlink(missing_ok=True)


def _apt_get(*arguments: str) -> None:
    done = subprocess.run(
        ["apt-get", *arguments],
        env={**os.environ, "PATH": PATH, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=900,
    )
    if done.returncode != 0:
        raise ClusterError(f"`apt-get {' '.join(arguments)}` failed:\n{done.stdout[-3000:].strip()}")
