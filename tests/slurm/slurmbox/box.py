"""Where the cluster lives: its folder of state, its configuration, its link in /etc/slurm."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import string
import tempfile
from dataclasses import dataclass
from pathlib import Path

from slurmbox.processes import STATE_VARIABLE, ClusterError

TEMPLATES = Path(__file__).resolve().parent.parent / "etc"
# Where Slurm's commands look when SLURM_CONF is not set; jobs do not get that variable.
LINK = Path("/etc/slurm/slurm.conf")
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
DATABASE_PORT = 16306
GPUS = 4
FOLDERS = ("etc", "run", "log", "state", "spool", "dev", "munge", "db")
# The kernel's limit on the path of a socket is 107 bytes, the longest of ours has 20 after the folder.
LONGEST_STATE = 80


@dataclass(frozen=True)
class Box:
    """The folder that holds all of the cluster."""

    state: Path

    @classmethod
    def here(cls) -> Box:
        """The folder that SWEEPACK_SLURM_STATE names, else one under the temporary folder."""
        named = os.environ.get(STATE_VARIABLE)
        state = Path(named) if named else Path(tempfile.gettempdir()) / "sweepack-slurm"
        state = state.absolute()
        if not re.fullmatch(r"[A-Za-z0-9._/+-]+", str(state)) or len(str(state)) > LONGEST_STATE:
            raise ClusterError(
                f"{STATE_VARIABLE}={state}: Slurm's files and sockets need a path of at most {LONGEST_STATE} "
                "letters, digits and ._/+-: name a shorter or plainer folder"
            )
        return cls(state)

    @property
    def environment(self) -> dict[str, str]:
        """What daemons and commands get: nothing of the caller's that could name another cluster or be a job's."""
        return {
            "PATH": f"{os.environ.get('PATH', '/usr/bin:/bin')}:{SBIN}",
            "HOME": os.environ.get("HOME", "/root"),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.configuration),
            STATE_VARIABLE: str(self.state),
        }

    @property
    def configuration(self) -> Path:
        return self.state / "etc" / "slurm.conf"

    @property
    def lock(self) -> Path:
        """Beside the folder, not inside: it outlives a wipe that others wait for."""
        return self.state.with_name(f"{self.state.name}.lock")

    @property
    def mark(self) -> Path:
        return self.state / ".sweepack-slurm"

    def claim(self) -> None:
        """Make the folder. One that is not ours is refused, for `down --wipe` removes what is in it."""
        self.state.mkdir(mode=0o755, parents=True, exist_ok=True)
        if self.state.stat().st_uid != os.geteuid():
            raise ClusterError(f"{self.state} belongs to another user: name another folder by {STATE_VARIABLE}")
        if not self.mark.exists():
            if any(self.state.iterdir()):
                raise ClusterError(
                    f"{self.state} is not empty and not a test cluster's: name another folder by {STATE_VARIABLE}"
                )
            self.mark.touch()
        for name in FOLDERS:
            (self.state / name).mkdir(exist_ok=True)
            (self.state / name).chmod(0o755)

    def wipe(self) -> None:
        """Remove the folder and all that the cluster remembers."""
        if self.mark.exists():
            shutil.rmtree(self.state)

    def configure(self) -> bool:
        """Fill in the templates; whether anything is new since the last time."""
        values = {
            "STATE": str(self.state),
            "HOST": socket.gethostname().partition(".")[0],
            "DATABASE_PORT": str(DATABASE_PORT),
            "MACHINE_HOSTS": Path("/etc/hosts").read_text(),
        }
        changed = False
        for template in sorted(TEMPLATES.iterdir()):
            text = string.Template(template.read_text()).substitute(values)
            changed |= _replace(self.state / "etc" / template.name, text)
        return changed

    def make_devices(self) -> None:
        """The GPUs: device files that nobody opens."""
        for index in range(GPUS):
            path = self.state / "dev" / f"nvidia{index}"
            if path.is_char_device():
                continue
            path.unlink(missing_ok=True)
            try:
                os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(195, index))
            except PermissionError:
                raise ClusterError(f"this machine forbids device files ({path}): CAP_MKNOD is needed") from None

    def owns_link(self) -> bool:
        return LINK.is_symlink() and LINK.readlink() == self.configuration

    def check_link(self) -> None:
        """ClusterError when the machine's slurm.conf is there and is not this cluster's."""
        if self.owns_link() or not os.path.lexists(LINK):
            return
        if LINK.is_symlink():
            other = LINK.readlink()
            about = f"it points to {other}"
            if Box(other.parent.parent).mark.exists():
                about += f", a test cluster: `{STATE_VARIABLE}={other.parent.parent} tests/slurm/cluster down` first"
        else:
            about = "it is a file, perhaps of a real cluster"
        raise ClusterError(f"{LINK} is not this test cluster's and stays as it is ({about})")

    def make_link(self) -> None:
        if not self.owns_link():
            LINK.parent.mkdir(exist_ok=True)
            LINK.symlink_to(self.configuration)

    def remove_link(self) -> None:
        if self.owns_link():
            LINK.unlink()


def _replace(path: Path, text: str) -> bool:
    """Write the file in one step unless it says this already; whether it was written. Only its owner may read
    slurmdbd.conf, or slurmdbd refuses it."""
    if path.exists() and path.read_text() == text:
        return False
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.chmod(0o600 if path.name == "slurmdbd.conf" else 0o644)
    new.replace(path)
    return True
