"""The peers' own virtual environments: what a peer needs beyond this one, pinned in `requirements/<peer>.txt`."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
VENVS = ROOT / ".bench" / "venvs"
_INSTALL_SECONDS = 900.0


def environment_of(peer: str | None) -> Path:
    """The folder of the virtual environment of ``peer``, made if need be; None stands for the one we are in.

    It sees the packages of ours through a `.pth` file, so that torch is the same and on disk only once. Raises
    RuntimeError with pip's words when the peer cannot be installed.
    """
    if peer is None:
        return Path(sys.prefix)
    wanted = HERE / "requirements" / f"{peer}.txt"
    pinned = ROOT / "requirements.txt"
    digest = hashlib.sha256(
        f"{sys.prefix} {sys.version} {wanted.read_text()} {pinned.read_text()}".encode()
    ).hexdigest()
    folder = VENVS / peer
    stamp = folder / "installed"
    if stamp.exists() and stamp.read_text() == digest:
        return folder
    venv.create(folder, clear=True)
    site = folder.joinpath("lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    try:
        subprocess.run(
            [*pip, "install", "--quiet", "--requirement", str(wanted), "--constraint", str(pinned)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=_INSTALL_SECONDS,
        )
    except subprocess.CalledProcessError as failed:
        raise RuntimeError("\n".join(failed.stderr.strip().splitlines()[-4:])) from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pip did not end within {_INSTALL_SECONDS:g} s") from None
    stamp.write_text(digest)
    return folder
