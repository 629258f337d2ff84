"""A process that has been forked from a warm host: it sheds what is its parent's, and does what a client asks for.

What it does then is what a script of the same name does in a fresh interpreter; only the imports are there already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sweepack import finish, launch, orphans, run
from sweepack.job import STOP_SIGNALS

# By the name of the script, which a client says first.
COMMANDS = {"cell": launch.main, "table": finish.table, "report": finish.report}


@dataclass(frozen=True)
class Surroundings:
    """What a process forked here takes on in place of the host's own."""

    environment: dict[str, str]
    folder: str
    umask: int


def run_command(content: bytes, descriptors: list[int], host: int) -> NoReturn:
    """Do what a lean client asks for in ``content`` (``ask``), its output going to the client's ``descriptors``."""
    code = 1
    try:
        _, umask, folder, count, *words = content.split(b"\0")
        name, *arguments = [os.fsdecode(word) for word in words[: int(count)]]
        variables = (os.fsdecode(word).partition("=") for word in words[int(count) :])
        shed(host, (os.open(os.devnull, os.O_RDONLY), *descriptors), ())
        take_on(Surroundings({name: value for name, _, value in variables}, os.fsdecode(folder), int(umask)))
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        # As in a fresh interpreter: what is half written is removed on the way out.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        orphans.adopt()
        code = COMMANDS[name](arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def shed(parent: int, streams: tuple[int, ...], kept: tuple[int, ...]) -> None:
    """Lead a session, die with ``parent``, and hold no descriptors but ``streams`` (as 0, 1 and 2) and ``kept``."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    run.die_with(parent)
    for target, source in enumerate(streams):
        os.dup2(source, target)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor not in {0, 1, 2, *kept}:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def take_on(surroundings: Surroundings) -> None:
    """Have the environment, the folder and the umask of a process that was started elsewhere."""
    os.environ.clear()
    os.environ.update(surroundings.environment)
    os.chdir(surroundings.folder)
    os.umask(surroundings.umask)
