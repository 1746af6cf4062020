"""A context manager that refuses the actions of programs: evaluating text, starting programs,
writing files, using the network.

sympy and the packages around it have many functions that evaluate text. Comparing two formulas
needs none of them, and here the interpreter itself refuses them: an audit hook sees every way in
which text becomes code, in any package, and cannot be removed. Outside of the `with` statement the
hook does nothing.
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
# These modules create classes during late imports, or products of monomials, from text that depends
# only on names in a package's code, or on a number.
_MAKERS = frozenset(["collections", "dataclasses", "typing", "enum", "sympy.polys.monomials"])


class ForbiddenOperationError(PermissionError):
    """An action was refused that no formula needs."""


class _AuditHookState:
    """State of the hook of this process: installed or not, and refusing or not."""

    has_hook = False
    refuses = False


@contextlib.contextmanager
def no_programs() -> Iterator[None]:
    """Refuse to run text, to start programs, to write files and to use the network.

    Each attempt raises a RefusedError. Modules may still be imported. Use it only in
    single-threaded processes.
    """
    if not _AuditHookState.has_hook:
        sys.addaudithook(_hook)
        _AuditHookState.has_hook = True
    before = _AuditHookState.refuses
    _AuditHookState.refuses = True
    try:
        yield
    finally:
        _AuditHookState.refuses = before


# Type checkers wrap functions, and `_is_text` counts the frames below itself.
@no_type_check
def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse an audit event that only programs cause."""
    if not _AuditHookState.refuses:
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
        raise ForbiddenOperationError(f"{event} is refused while a formula is read")


@no_type_check
def _is_text(filename: Any) -> bool:
    """Return whether code with this file name was made from text, and not from the file of a
    module."""
    if isinstance(filename, bytes):
        filename = os.fsdecode(filename)
    if isinstance(filename, str) and not filename.startswith("<"):
        return False
    if isinstance(filename, str) and filename.startswith("<frozen "):
        return False
    # The frame of the evaluating function comes after those of this function and of `_hook`.
    return sys._getframe(2).f_globals.get("__name__") not in _MAKERS
