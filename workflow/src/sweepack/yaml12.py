"""YAML 1.2 as its core schema has it: ``no`` is a string, ``010`` is ten, ``1e-3`` is a number, a date is text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ruamel.yaml import YAML, YAMLError
from ruamel.yaml.constructor import ConstructorError, DuplicateKeyError, SafeConstructor
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from sweepack.errors import UserError, Verbatim

_TAG = "tag:yaml.org,2002:"

_LONGEST = 300  # characters of a number: about as many digits as a float holds

# The core schema's table, in its order: what an unquoted scalar must look like to be more than text.
_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"null|Null|NULL|~|", lambda _: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
        lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10),
    ),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}


class CoreResolver(VersionedResolver):
    """The tag of a scalar by the core schema, whatever version a directive in the file asks for."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode and implicit[0]:
            if value == "<<":
                return Tag(suffix=f"{_TAG}merge")
            for name, (pattern, _) in _SCALARS.items():
                if re.fullmatch(pattern, value):
                    return Tag(suffix=_TAG + name)
            return self.DEFAULT_SCALAR_TAG
        return super().resolve(kind, value, implicit)


class CoreConstructor(SafeConstructor):
    """Plain values only: null, booleans, numbers, text, lists and mappings. No dates, sets or bytes, as ruamel has."""

    def construct_core(self, node: ScalarNode) -> Any:
        name = str(node.tag).removeprefix(_TAG)
        pattern, convert = _SCALARS[name]
        text = self.construct_scalar(node)
        if not re.fullmatch(pattern, text) or len(text) > _LONGEST:
            problem = f"`{text[:20]}` is not a {name} of at most {_LONGEST} characters"
            raise ConstructorError(None, None, problem, node.start_mark)
        return convert(text)

    def construct_text(self, node: ScalarNode) -> str:
        text = self.construct_scalar(node)
        try:
            # JSON writes a character beyond the 16-bit range as a pair of escapes.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise ConstructorError(None, None, "half of a pair of `\\u` escapes", node.start_mark) from None


CoreConstructor.yaml_constructors = {
    f"{_TAG}seq": SafeConstructor.construct_yaml_seq,
    f"{_TAG}map": SafeConstructor.construct_yaml_map,
    None: SafeConstructor.construct_undefined,
}
for _name in _SCALARS:
    CoreConstructor.add_constructor(_TAG + _name, CoreConstructor.construct_core)
for _name in ("str", "merge"):  # `<<` merges as a key, as a value it is text
    CoreConstructor.add_constructor(_TAG + _name, CoreConstructor.construct_text)


def parse(text: str, source: str) -> Any:
    """The value of one YAML document; ``source`` names it in errors.

    Raises UserError when the text is not YAML, repeats a key, or holds a tag that has no plain value.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.Resolver = CoreConstructor, CoreResolver
    try:
        value = yaml.load(text)
        json.dumps(value, skipkeys=True)  # finds a value that contains itself
    except DuplicateKeyError as error:
        raise UserError(
            *_place(error, text, source), "every key once", "remove one of the two, or join their values"
        ) from None
    except YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(
            *_place(error, text, source),
            "YAML 1.2",
            f"{problem}; quote strings that hold `: `, `{{`, `[`, `#`, `&`, `*` or `%`",
        ) from None
    except (ValueError, RecursionError):
        raise UserError(
            source,
            Verbatim("a value nested without end, or far too deep"),
            "values that end",
            "write the value out where an alias (`*name`) stands inside its own anchor (`&name`)",
        ) from None
    return value


def parse_texts(text: str) -> Any:
    """The same document with every scalar left as the text that was typed; ``text`` is known to be YAML."""
    yaml = YAML(typ="base", pure=True)
    yaml.allow_duplicate_keys = True  # `1` and `"1"` are two keys, but one text
    return yaml.load(text)


def _place(error: YAMLError, text: str, source: str) -> tuple[str, Verbatim]:
    """Where the error is, and the line that stands there."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return source, Verbatim("(unknown place)")
    lines = text.splitlines()
    line = lines[mark.line].strip() if mark.line < len(lines) else ""
    return f"{source}, line {mark.line + 1}, column {mark.column + 1}", Verbatim(line or "(end of the text)")
