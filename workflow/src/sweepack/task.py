"""The task of a sweep: found, and its signature read, without importing it."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweepack.errors import UserError, Verbatim, did_you_mean, nearest
from sweepack.values import Annotation, coerce, kind_of, plain

KEY = "sweep.task"
_SPELLING = "`path/to/file.py:function`, `module:function`, or a mapping with `command`"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a task: its annotation, if it says anything, and its default, if it has one."""

    name: str
    annotation: Annotation | None
    required: bool
    default: Any = None


@dataclass(frozen=True)
class Signature:
    """What a task takes beside ``cell``. ``open`` tasks (``**params``, commands) take any name but ``reserved``."""

    parameters: dict[str, Parameter]
    open: bool
    reserved: str | None = None

    def annotation(self, name: str) -> Annotation | None:
        """The annotation of a (dotted) parameter; a nested key has none of its own."""
        parameter = self.parameters.get(name)
        return parameter.annotation if parameter else None

    def check(self, name: str, key: str) -> None:
        """Raise UserError when the task does not take ``name`` (of a dotted name, the part before the dot)."""
        head, dotted, _ = name.partition(".")
        annotation = self.annotation(head)
        if dotted and annotation and not annotation.accepts("dict"):
            raise UserError(
                f"{key}.{name}",
                name,
                f"a parameter that takes a mapping; `{head}` is `{annotation.text}` in the task's function",
                f"give `{head}` itself, or annotate it as `dict`",
            )
        if head == self.reserved:
            raise UserError(
                f"{key}.{name}", name, f"a name other than `{head}`, the function's first argument", "rename it"
            )
        if self.open or head in self.parameters:
            return
        raise UserError(
            f"{key}.{name}",
            name,
            "a parameter of the task's function",
            did_you_mean(head, self.parameters) + " Or add it to the function, or let the function take `**params`.",
        )


@dataclass(frozen=True)
class Task:
    """A task as the plan knows it.

    ``reference`` is what cell ids are made from. ``file`` and ``function`` locate a Python task, ``argv`` is the
    command of any other program. ``has_prepare`` says whether the module defines ``prepare()``.
    """

    reference: str
    signature: Signature
    file: Path | None = None
    module: str | None = None
    function: str | None = None
    argv: tuple[str, ...] = ()
    has_prepare: bool = False

    @property
    def is_command(self) -> bool:
        return bool(self.argv)

    def to_json(self, root: Path) -> dict[str, Any]:
        """What a job needs to run the task; files inside ``root`` are named relative to it."""
        file = self.file.relative_to(root) if self.file and self.file.is_relative_to(root) else self.file
        return {
            "reference": self.reference,
            "file": str(file) if file else None,
            "module": self.module,
            "function": self.function,
            "argv": list(self.argv),
        }

    def digest(self) -> str:
        """A hash of the task's source file and the interpreter, the key under which an import check counts."""
        content = self.file.read_bytes() if self.file else b""
        return hashlib.sha256(content + f"\0{self.function}\0{sys.executable}".encode()).hexdigest()[:16]


def load_task(reference: str | list[str], root: Path) -> Task:
    """The task that ``reference`` names, paths and modules being looked up from ``root``.

    Raises UserError when the file, module or function does not exist or cannot be a task.
    """
    if isinstance(reference, list):
        return Task(json.dumps(reference), Signature({}, open=True), argv=tuple(reference))
    place, separator, function = reference.rpartition(":")
    if not separator or not place or not function.isidentifier():
        raise UserError(KEY, reference, _SPELLING, "for example `examples/digits.py:train`")
    if place.endswith(".py"):
        file = _find_file(place, reference, root)
        module = None
        canonical = f"{Path(place).as_posix()}:{function}"
    else:
        file = _find_module(place, reference, root)
        module = place
        canonical = reference
    tree = _parse(file, reference)
    signature = read_signature(tree, function, file, reference)
    return Task(canonical, signature, file, module, function, has_prepare="prepare" in _functions(tree))


def read_signature(tree: ast.Module, function: str, file: Path, reference: str) -> Signature:
    """The signature of ``function`` in the source ``tree``; raises UserError when it cannot be a task."""
    functions = _functions(tree)
    if function not in functions:
        others = [name for name in functions if not name.startswith("_")]
        raise UserError(
            KEY, reference, f"a function that {file.name} defines with `def`", did_you_mean(function, others)
        )
    arguments = functions[function].args
    positional = [*arguments.posonlyargs, *arguments.args]
    if not positional:
        raise UserError(
            KEY,
            reference,
            "a function whose first argument takes the cell",
            f"write `def {function}(cell, *, lr: float, width: int = 64):`",
        )
    constants = _module_constants(tree)
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    pairs = list(zip(positional, defaults, strict=True))[1:]
    pairs += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    parameters = {}
    for argument, node in pairs:
        if argument in arguments.posonlyargs:
            raise UserError(
                KEY, reference, "parameters that can be given by name", f"move `{argument.arg}` behind the `/`"
            )
        annotation = read_annotation(argument.annotation)
        default = None
        if node is not None:
            stated = _default(node, constants, argument.arg, file, function)
            annotation, default = _reconcile(annotation, stated)
        parameters[argument.arg] = Parameter(argument.arg, annotation, node is None, default)
    reserved = None if arguments.posonlyargs else positional[0].arg
    return Signature(parameters, open=arguments.kwarg is not None, reserved=reserved)


def read_annotation(node: ast.expr | None) -> Annotation | None:
    """What an annotation accepts; None when it is missing or says nothing about plain values."""
    if node is None:
        return None
    text = ast.unparse(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return None
        text = ast.unparse(node)
    if isinstance(node, ast.Constant) and node.value is None:
        return Annotation(frozenset({"None"}), text="None")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([node.left, node.right], text)
    name, arguments = _subscript(node)
    if name in ("Any", "object") or name is None:
        return None
    simple = {"bool": "bool", "int": "int", "float": "float", "str": "str", "None": "None"}
    if name in simple:
        return Annotation(frozenset({simple[name]}), text=text)
    if name in ("list", "List", "tuple", "Tuple", "Sequence", "Iterable"):
        items = read_annotation(arguments[0]) if arguments and name not in ("tuple", "Tuple") else None
        return Annotation(frozenset({"list"}), items=items, text=text)
    if name in ("dict", "Dict", "Mapping", "MutableMapping"):
        return Annotation(frozenset({"dict"}), text=text)
    if name == "Optional" and arguments:
        return _union([arguments[0], ast.Constant(None)], text)
    if name == "Union" and arguments:
        return _union(arguments, text)
    if name == "Literal" and arguments:
        try:
            return Annotation(choices=tuple(plain(ast.literal_eval(item), KEY) for item in arguments), text=text)
        except (ValueError, UserError):
            return None
    return None


def _union(nodes: list[ast.expr], text: str) -> Annotation | None:
    parts = [read_annotation(node) for node in nodes]
    known = [part for part in parts if part]
    if len(known) < len(parts):
        return None
    lists = [part for part in known if part.accepts("list")]
    return Annotation(
        frozenset().union(*(part.kinds for part in known)),
        tuple(choice for part in known for choice in part.choices),
        lists[0].items if len(lists) == 1 else None,
        text,
    )


def _reconcile(annotation: Annotation | None, default: Any) -> tuple[Annotation | None, Any]:
    """The default as its own annotation wants it, so that stating it names the same cell: ``lr: float = 1`` is 1.0.

    An annotation that refuses its own default (``depth: int = None``) is widened by it.
    """
    try:
        return annotation, coerce(default, annotation, "")
    except UserError:
        assert annotation is not None
        kind = kind_of(default)
        return replace(annotation, kinds=annotation.kinds | {kind}, text=f"{annotation.text} | {kind}"), default


def _subscript(node: ast.expr) -> tuple[str | None, list[ast.expr]]:
    """``("Literal", [a, b])`` for ``typing.Literal[a, b]``."""
    arguments: list[ast.expr] = []
    if isinstance(node, ast.Subscript):
        inner = node.slice
        arguments = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr, arguments
    return (node.id if isinstance(node, ast.Name) else None), arguments


def _module_constants(tree: ast.Module) -> dict[str, Any]:
    """The names that the module sets once, to a literal, and never anew."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    stores = Counter(name.id for name in names if isinstance(name.ctx, ast.Store))
    constants = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and stores[target.id] == 1:
                with contextlib.suppress(ValueError, TypeError):
                    constants[target.id] = ast.literal_eval(node.value)
    return constants


def _default(node: ast.expr, constants: dict[str, Any], name: str, file: Path, function: str) -> Any:
    try:
        if isinstance(node, ast.Name) and node.id in constants:
            return plain(constants[node.id], name)
        return plain(ast.literal_eval(node), name)
    except (ValueError, TypeError, UserError):
        raise UserError(
            f"the default of `{name}` in {file.name}:{function}",
            Verbatim(ast.unparse(node)),
            "a literal, since defaults are part of a cell's id and are read without importing the task",
            f"write the value out, use None, or drop the default and state `{name}` under `params`",
        ) from None


def _find_file(place: str, reference: str, root: Path) -> Path:
    file = root / place
    with contextlib.suppress(OSError):  # a name that is too long
        if file.is_file():
            return file.resolve()
    folder = file.parent
    siblings = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
    guess = nearest(file.name, siblings)
    where = f"{folder} holds {', '.join(sorted(siblings)) or 'no Python file'}"
    fix = f"did you mean `{Path(place).parent / guess}`? {where}" if guess else where
    raise UserError(KEY, reference, f"a file {place}, seen from {root}", fix)


def _find_module(name: str, reference: str, root: Path) -> Path:
    """The file of a module, found part by part: importlib's own search would import the parents."""
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        raise UserError(KEY, reference, _SPELLING, "for example `examples/digits.py:train`")
    search: list[str] | None = [str(root), *sys.path]
    spec = None
    for part in name.split("."):
        # By its own name only: for a dotted one importlib wants the parent in sys.modules.
        spec = importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None:
            break
        search = list(spec.submodule_search_locations or [])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UserError(
            KEY,
            reference,
            f"a Python module `{name}` that can be found from {root} or in this environment",
            "install it, or name the file instead: `path/to/file.py:function`",
        )
    return Path(spec.origin)


def _parse(file: Path, reference: str) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise UserError(KEY, reference, "a file that is valid Python", f"mend {file}: {error}") from None


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
