"""Refuses, within a `with` statement, what only a program does: to evaluate text, to start another
program, to write a file, to use the network.

sympy and the packages around it have many functions that evaluate the text they are given. None of
them is needed to compare two formulas, and the interpreter itself is asked to refuse them here: an
audit hook sees every way in which text becomes code, whichever package does it, and cannot be
removed. Outside of the `with` statement the hook does nothing.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, no_type_check

_STARTING = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.", "pty.")
_OTHERS = ("socket.", "ctypes.", "shutil.", "os.remove", "os.rename", "os.kill", "os.putenv")
_REFUSED = (*_STARTING, *_OTHERS, "urllib.", "webbrowser.", "os.mkdir", "os.symlink", "os.link")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# These make classes, where a package is imported late, or products of monomials, from text that
# depends on nothing but names in the code of a package, or on a number.
_MAKERS = frozenset(["collections", "dataclasses", "typing", "enum", "sympy.polys.monomials"])


class RefusedError(PermissionError):
    """Something was refused that no formula needs."""


class _State:
    """Whether the hook of this process is there, and whether it refuses."""

    has_hook = False
    refuses = False


@contextlib.contextmanager
def no_programs() -> Iterator[None]:
    """Refuse to run text, to start programs, to write files and to use the network.

    Each attempt raises a RefusedError. Modules may still be imported. It is for processes with a
    single thread.
    """
    if not _State.has_hook:
        sys.addaudithook(_hook)
        _State.has_hook = True
    before = _State.refuses
    _State.refuses = True
    try:
        yield
    finally:
        _State.refuses = before


# Type checkers wrap functions, and `_is_text` counts the frames below itself.
@no_type_check
def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _State.refuses:
        return
    if event == "exec":
        refused = _is_text(getattr(arguments[0], "co_filename", ""))
    elif event == "compile":
        refused = _is_text(arguments[1])
    elif event == "open":
        mode, flags = arguments[1:3]
        refused = bool(isinstance(flags, int) and flags & _WRITES)
        refused = refused or (isinstance(mode, str) and not set(mode).isdisjoint("wax+"))
    else:
        refused = event.startswith(_REFUSED)
    if refused:
        raise RefusedError(f"{event} is refused while a formula is read")


@no_type_check
def _is_text(filename: Any) -> bool:
    """Whether code with this file name was made from text, and not from the file of a module."""
    if isinstance(filename, bytes):
        filename = os.fsdecode(filename)
    if isinstance(filename, str) and not filename.startswith("<"):
        return False
    if isinstance(filename, str) and filename.startswith("<frozen "):
        return False
    # The frame of the function that evaluates: that of the hook, and of `_hook`, come first.
    return sys._getframe(2).f_globals.get("__name__") not in _MAKERS
