"""The folder of the test cluster, what is configured there, and the one link outside of it."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path
from string import Template

NODES = ("n1", "n2")
GPUS_PER_NODE = 4
ACCOUNTING_PORT = 16819
DATABASE_PORT = 16306

TEMPLATES = Path(__file__).parent.parent / "etc"
# Slurm's commands look here when SLURM_CONF is not set, and the plugins for Snakemake take it from the jobs.
LINK = Path("/etc/slurm/slurm.conf")

# The longest address of a Unix socket is 107 bytes, and the names of the sockets come on top.
_LONGEST_PATH = 80
_FOLDERS = ("etc", "run", "log", "dev", "munge", "controller", "spool")


class ClusterError(Exception):
    """What went wrong and how to mend it, for the person at the terminal."""


class State:
    """The cluster's folder: `SWEEPACK_SLURM_STATE`, or `sweepack-slurm` in the system's temporary directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.etc = root / "etc"
        self.run = root / "run"
        self.log = root / "log"
        self.munge = root / "munge"
        self.database = root / "database"

    @classmethod
    def from_environment(cls) -> State:
        named = os.environ.get("SWEEPACK_SLURM_STATE")
        root = Path(named) if named else Path(tempfile.gettempdir()) / "sweepack-slurm"
        root = root.absolute()
        if len(os.fsencode(root)) > _LONGEST_PATH:
            raise ClusterError(
                f"{root} is longer than {_LONGEST_PATH} bytes, too long for the sockets in it: "
                "set SWEEPACK_SLURM_STATE to a shorter path"
            )
        return cls(root)

    @property
    def _mark(self) -> Path:
        return self.root / ".sweepack-slurm"

    def is_ours(self) -> bool:
        """Whether `prepare` made this folder: `down --wipe` removes no other."""
        return self._mark.exists()

    def prepare(self) -> None:
        """Make the folders, the munge key and the files that stand for GPUs; what is there already stays."""
        self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
        if self.root.is_symlink() or self.root.stat().st_uid != os.geteuid():
            raise ClusterError(f"{self.root} belongs to somebody else: remove it, or set SWEEPACK_SLURM_STATE")
        if not self.is_ours() and any(self.root.iterdir()):
            raise ClusterError(f"{self.root} holds other things: set SWEEPACK_SLURM_STATE to a folder of its own")
        self._mark.touch()
        for name in _FOLDERS:
            (self.root / name).mkdir(mode=0o755, exist_ok=True)
        key = self.munge / "key"
        if not key.exists():
            _write(key, os.urandom(128), 0o400)
        for number in range(GPUS_PER_NODE):
            device = self.root / "dev" / f"nvidia{number}"
            if not device.is_char_device():
                # Twins of /dev/null: Slurm sets CUDA_VISIBLE_DEVICES for character devices only.
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))

    def is_configured(self) -> bool:
        """Whether the configuration on disk is the one that `configure` would write."""
        return all(path.exists() and path.read_text() == text for path, text in self._configuration().items())

    def configure(self) -> None:
        for path, text in self._configuration().items():
            # slurmdbd refuses a file with its password that others may read.
            _write(path, text.encode(), 0o600 if path.name == "slurmdbd.conf" else 0o644)

    def link(self) -> None:
        """Point Slurm's default configuration here. Raises ClusterError where there is one already."""
        self.check_link()
        if not _is_link_to(LINK, self.slurm_conf):
            LINK.parent.mkdir(exist_ok=True)
            LINK.symlink_to(self.slurm_conf)

    def check_link(self) -> None:
        if os.path.lexists(LINK) and not _is_link_to(LINK, self.slurm_conf):
            target = f" (a link to {LINK.readlink()})" if LINK.is_symlink() else ""
            raise ClusterError(
                f"{LINK}{target} is not this test cluster's, so it stays untouched and nothing is started: "
                "take that cluster down first, or remove the file if nothing needs it"
            )

    def unlink(self) -> None:
        """Take the link away if it is ours."""
        if _is_link_to(LINK, self.slurm_conf):
            LINK.unlink()

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    def _configuration(self) -> dict[Path, str]:
        values = {
            "state": self.root,
            # Slurm compares with the part before the first dot.
            "host": socket.gethostname().partition(".")[0],
            "accounting_port": ACCOUNTING_PORT,
            "database_port": DATABASE_PORT,
        }
        return {
            self.etc / template.name: Template(template.read_text()).substitute(values)
            for template in sorted(TEMPLATES.iterdir())
        }


def _is_link_to(path: Path, target: Path) -> bool:
    return path.is_symlink() and path.readlink() == target


def _write(path: Path, content: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    temporary.write_bytes(content)
    temporary.chmod(mode)
    temporary.replace(path)
