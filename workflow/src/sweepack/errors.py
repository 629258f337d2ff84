"""The one shape that errors about a user's input take."""

from __future__ import annotations

import difflib
import errno
import functools
import sys
from collections.abc import Callable, Iterable
from typing import ParamSpec

P = ParamSpec("P")


class UserError(Exception):
    """Input that cannot be used, told so that the reader can mend it at once.

    ``key`` names where the value was given (``sweep.axes.lr``, ``CUDA_VISIBLE_DEVICES``), ``value`` is what
    stood there, ``expected`` what would have been right and ``fix`` what to type instead.
    """

    def __init__(self, key: str, value: object, expected: str, fix: str) -> None:
        super().__init__(key, value, expected, fix)
        self.key = key
        self.value = value
        self.expected = expected
        self.fix = fix

    def __str__(self) -> str:
        shown = self.value if isinstance(self.value, Verbatim) else repr(self.value)
        return (
            f"sweepack: error in {self.key}\n"
            f"  value:    {_indent(shown)}\n"
            f"  expected: {_indent(self.expected)}\n"
            f"  fix:      {_indent(self.fix)}"
        )


class Verbatim(str):
    """A value shown as it is (a traceback, a file's line) and not as a Python literal."""

    __slots__ = ()


def tells_user_errors(main: Callable[P, int]) -> Callable[P, int]:
    """Let a script's ``main`` print a UserError to standard error and return 1 instead of raising it."""

    @functools.wraps(main)
    def told(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(error, file=sys.stderr)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            print(f"sweepack: {error.strerror}: make room and run the same command again", file=sys.stderr)
        return 1

    return told


def _indent(text: str) -> str:
    return text.rstrip().replace("\n", "\n            ")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` was probably meant to be, or None."""
    matches = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"did you mean `lr`? Known: lr, width"``, for the ``fix`` of an unknown name."""
    names = sorted(known)
    guess = nearest(name, names)
    listing = f"Known: {', '.join(names)}." if names else "None is known."
    return f"did you mean `{guess}`? {listing}" if guess else listing
