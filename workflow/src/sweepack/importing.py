"""Import a task's module, in the cell that runs it and beforehand in a subprocess that only tries."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from sweepack.errors import UserError, Verbatim
from sweepack.files import write_atomic
from sweepack.task import Task


def import_task(spec: dict[str, Any], root: Path) -> tuple[ModuleType, Callable[..., Any]]:
    """The module and the function of a Python task, imported as running its file from ``root`` would.

    ``spec`` is ``Task.to_json()``. Whatever the module raises is raised.
    """
    file = root / spec["file"]
    if spec["module"]:
        _put_first(str(root))
        module = importlib.import_module(spec["module"])
    else:
        _put_first(str(root))
        _put_first(str(file.parent))
        name = file.stem
        loaded = sys.modules.get(name)
        if loaded is not None and getattr(loaded, "__file__", None) == str(file):
            # In a cell that was forked from a process that has imported it.
            return loaded, getattr(loaded, spec["function"])
        location = importlib.util.spec_from_file_location(name, file)
        if location is None or location.loader is None:
            raise ImportError(f"{file} cannot be imported")
        module = importlib.util.module_from_spec(location)
        # Registered before it runs, as `import` does: pickling and dataloader workers look it up by name.
        sys.modules[name] = module
        location.loader.exec_module(module)
    return module, getattr(module, spec["function"])


def imported_files(root: Path) -> set[str]:
    """The files below ``root`` that this process has imported, without those of installed packages."""
    imported = [str(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
    return {file for file in imported if Path(file).is_relative_to(root) and "site-packages" not in Path(file).parts}


def check_import(task: Task, root: Path, cache: Path, limit: float) -> None:
    """Import ``task`` once in a subprocess; raises UserError when that fails or takes over ``limit`` seconds.

    A success is remembered in ``cache`` until the task's file, or a file of the project that it imports, changes.
    """
    stamp = import_stamp(task, cache)
    if is_remembered(stamp):
        return
    with tempfile.TemporaryDirectory() as scratch:
        report, output = Path(scratch) / "report.json", Path(scratch) / "output.txt"
        spec = json.dumps(task.to_json(root))
        command = [sys.executable, "-P", "-m", "sweepack.importing", spec, str(root), str(report)]
        try:
            # Into a file: a pipe would be waited for as long as anything that the module started holds it.
            with output.open("wb") as sink:
                done = subprocess.run(
                    command, cwd=root, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, timeout=limit
                )
        except subprocess.TimeoutExpired:
            raise UserError(
                "sweep.task",
                task.reference,
                f"a module that can be imported within {limit:g} s",
                "move slow work (downloads, preprocessing) into `prepare()`, or raise `import_timeout`",
            ) from None
        if not report.exists():
            words = output.read_text(errors="replace").strip().splitlines()[-12:]
            raise UserError(
                "sweep.task",
                task.reference,
                "a module that can be imported",
                f"the import ended the process with exit status {done.returncode}\n" + "\n".join(words),
            )
        found = json.loads(report.read_text())
    require_imported(task.reference, found)
    remember_import(stamp, found)


def require_imported(reference: str, found: dict[str, Any]) -> None:
    """Raise UserError when ``found``, from ``try_import`` of the task ``reference``, tells of a failure."""
    if found["error"]:
        raise UserError("sweep.task", Verbatim(reference), found["expected"], found["error"])


def import_stamp(task: Task, cache: Path) -> Path:
    """Where it is remembered that ``task`` could be imported."""
    return cache / f"{task.digest()}.json"


def remember_import(stamp: Path, found: dict[str, Any]) -> None:
    """Remember a success; a project that cannot be written to is checked each time."""
    with contextlib.suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(stamp, json.dumps(found["files"]) + "\n")


def is_remembered(stamp: Path) -> bool:
    """Whether the import that is remembered in ``stamp`` succeeded and its files are still the same."""
    try:
        files = json.loads(stamp.read_text())
        return all(_digest(Path(file)) == digest for file, digest in files.items())
    except (OSError, ValueError, AttributeError):
        return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _put_first(folder: str) -> None:
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)


def try_import(spec: dict[str, Any], root: Path) -> dict[str, Any]:
    """Import here: the digests of the project's ``files`` that it read, or its ``error`` and what was ``expected``."""
    expected = "a module that can be imported"
    try:
        _, function = import_task(spec, root)
        expected = "a function that takes the cell and the sweep's parameters"
        if not callable(function):
            raise TypeError(f"`{spec['function']}` is {type(function).__name__}, not a function")
        inspect.signature(function)
    except BaseException as error:
        # Our own frames say nothing to the author of the task.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(root / spec["file"]):
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace)
        return {"error": f"mend what the import raised:\n{''.join(lines[-8:])}", "expected": expected}
    own = {*imported_files(root), str(root / spec["file"])}
    return {"error": None, "files": {file: _digest(Path(file)) for file in sorted(own)}}


def _main(spec_text: str, root: str, report: str) -> None:
    outcome = try_import(json.loads(spec_text), Path(root))
    write_atomic(Path(report), json.dumps(outcome))
    # A module that started threads must not keep the check waiting.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
