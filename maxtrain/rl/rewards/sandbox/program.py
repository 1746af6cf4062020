"""The process of a program: it runs the program, and answers calls of its functions.

Nothing here is trusted: the program shares this interpreter, and may change all of it. It can only
gain the ability to answer calls with other plain data, which it could have returned anyway.
"""

import builtins
import collections
import contextlib
import os
import socket
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from maxtrain.rl.rewards.sandbox.values import (
    ProtocolError,
    ValueDecoder,
    ValueEncoder,
    receive,
    send,
)

SOCKET = 3
# Most characters of an error message.
_DETAIL = 2000


def run_script() -> int:
    """Run a program that reads stdin and writes stdout, and return its exit status."""
    with socket.socket(fileno=SOCKET) as connection:
        code = receive(connection)
    try:
        status = _exit_status(lambda: exec(_compiled(code), _new_main().__dict__))
        sys.stdout.flush()
    except BaseException:
        _show_error()
        return 1
    return status


def _exit_status(run: Callable[[], None]) -> int:
    try:
        run()
    except SystemExit as end:
        if end.code is None:
            return 0
        if isinstance(end.code, int):
            return end.code & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    return 0


def serve_functions() -> int:
    """Run a program, and then call its functions on request, until there are no more requests."""
    connection = socket.socket(fileno=SOCKET)
    code = receive(connection)
    main = _new_main()
    try:
        exec(_compiled(code), main.__dict__)
    except BaseException as error:
        _show_error()
        send(connection, {"failed": _text(error)})
        return 1
    _flush()
    send(connection, {"loaded": True})
    _ObjectServer(connection, main).serve()
    return 0


def _compiled(code: str) -> types.CodeType:
    return compile(code, "program.py", "exec", dont_inherit=True)


def _new_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = ["program.py"]
    return main


def _flush() -> None:
    """Flush the printed text, because this process is killed once there is a verdict."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()


def _show_error() -> None:
    _flush()
    text = traceback.format_exc(limit=-5)
    os.write(2, text[-_DETAIL:].encode(errors="replace"))


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_DETAIL]
    except Exception:
        return "an exception without a text"


class _ObjectServer:
    """The program's objects that the judge has handles of, and the operations on them."""

    def __init__(self, connection: socket.socket, main: types.ModuleType):
        self._connection = connection
        self._main = main
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}
        self._callbacks: dict[int, Callable] = {}

    def serve(self) -> None:
        while True:
            try:
                request = receive(self._connection)
            except EOFError:
                return
            send(self._connection, self._answer(request))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request: a value or an exception, and the containers that have
        changed."""
        decoder = ValueDecoder(request["nodes"], self._foreign_value)
        operands = [decoder.get(each) for each in request["operands"]]
        containers = decoder.containers
        before = [_snapshot(each) for each in containers]
        known = {id(each): number for number, each in enumerate(containers)}
        encoder = ValueEncoder(self._foreign_node, known, converts=True)
        answer: dict[str, Any] = {}
        try:
            result = getattr(self, f"_do_{request['do']}")(*operands)
            answer["value"] = encoder.add(result)
        except BaseException as error:
            answer = self._raised(error, encoder)
        answer["changed"] = [
            [number, encoder.content(container)]
            for number, container in enumerate(containers)
            if not _is_same(before[number], _snapshot(container))
        ]
        answer["nodes"] = encoder.nodes
        _flush()
        return answer

    def _raised(self, error: BaseException, encoder: ValueEncoder) -> dict[str, Any]:
        classes = [
            [cls.__module__, cls.__qualname__, self._handle(cls)]
            for cls in type(error).__mro__
            if issubclass(cls, BaseException)
        ]
        try:
            arguments = encoder.add(tuple(error.args))
        except Exception:
            arguments = encoder.add(())
        return {
            "raised": classes,
            "arguments": arguments,
            "text": _text(error),
            "self": encoder.add(error),
        }

    def _handle(self, value: Any) -> int:
        if id(value) not in self._handles:
            self._handles[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._handles[id(value)]

    def _foreign_node(self, value: Any) -> list:
        if isinstance(value, _Callback):
            return ["function", value.number]
        if isinstance(value, type) and value.__module__ == "builtins":
            return ["builtin", value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [[cls.__module__, cls.__qualname__] for cls in value.__mro__]
            return ["exception", self._handle(value), value.__name__, bases]
        return ["handle", self._handle(value), type(value).__name__]

    def _foreign_value(self, node: list) -> Any:
        if node[0] == "handle":
            return self._objects[node[1]]
        if node[0] == "function":
            if node[1] not in self._callbacks:
                self._callbacks[node[1]] = _Callback(self, node[1])
            return self._callbacks[node[1]]
        if node[0] == "builtin":
            return getattr(builtins, node[1])
        if node[0] == "global":
            return getattr(sys.modules.get(node[1]) or __import__(node[1]), node[2])
        raise ProtocolError(f"unknown node {node[0]}")

    def call_back(self, number: int, arguments: tuple, keywords: dict[str, Any]) -> Any:
        """Call a function of the tests, which runs in the judge."""
        encoder = ValueEncoder(self._foreign_node, converts=True)
        operands = [encoder.add(arguments), encoder.add(keywords)]
        message = {"call_back": number, "nodes": encoder.nodes, "operands": operands}
        send(self._connection, message)
        while True:
            message = receive(self._connection)
            if "do" not in message:
                break
            # The function of the tests calls the program in turn.
            send(self._connection, self._answer(message))
        decoder = ValueDecoder(message["nodes"], self._foreign_value)
        if "raised" in message:
            cls = getattr(builtins, message["raised"], Exception)
            raise cls(*decoder.get(message["arguments"]))
        return decoder.get(message["value"])

    def _do_names(self, names: list[str]) -> dict[str, Any]:
        return {name: self._main.__dict__[name] for name in names if name in self._main.__dict__}

    def _do_case(self, name: str, arguments: list) -> Any:
        """Call a function by its name, or the method of a class `Solution`."""
        function = self._main.__dict__.get(name)
        if function is None and "Solution" in self._main.__dict__:
            function = getattr(self._main.__dict__["Solution"](), name)
        if function is None:
            raise NameError(f"name '{name}' is not defined")
        return function(*arguments)

    def _do_call(self, function: Any, arguments: tuple, keywords: dict[str, Any]) -> Any:
        return function(*arguments, **keywords)

    def _do_getattr(self, value: Any, name: str) -> Any:
        return getattr(value, name)

    def _do_setattr(self, value: Any, name: str, new: Any) -> None:
        setattr(value, name, new)

    def _do_delattr(self, value: Any, name: str) -> None:
        delattr(value, name)

    def _do_getitem(self, value: Any, key: Any) -> Any:
        return value[slice(*key[1:]) if _is_slice(key) else key]

    def _do_setitem(self, value: Any, key: Any, new: Any) -> None:
        value[slice(*key[1:]) if _is_slice(key) else key] = new

    def _do_delitem(self, value: Any, key: Any) -> None:
        del value[slice(*key[1:]) if _is_slice(key) else key]

    def _do_len(self, value: Any) -> int:
        return len(value)

    def _do_bool(self, value: Any) -> bool:
        return bool(value)

    def _do_str(self, value: Any) -> str:
        return str(value)

    def _do_repr(self, value: Any) -> str:
        return repr(value)

    def _do_iter(self, value: Any) -> Any:
        return iter(value)

    def _do_next(self, value: Any) -> Any:
        return next(value)

    def _do_enter(self, value: Any) -> Any:
        return type(value).__enter__(value)

    def _do_exit(self, value: Any, cls: Any, text: str) -> bool:
        error = None if cls is None else cls(text)
        return bool(type(value).__exit__(value, cls, error, None))

    def _do_isinstance(self, value: Any, cls: Any) -> bool:
        return isinstance(value, cls)


class _Callback:
    """A function of the tests, which the judge calls."""

    def __init__(self, server: _ObjectServer, number: int):
        self._server = server
        self.number = number
        self.__name__ = "function_of_the_tests"

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._server.call_back(self.number, arguments, keywords)


def _is_slice(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 4 and key[0] == "__slice__"


def _snapshot(container: Any) -> list:
    if isinstance(container, dict):
        return [each for pair in container.items() for each in pair]
    if isinstance(container, set | bytearray | collections.deque | list):
        return list(container)
    return [container]


def _is_same(before: list, after: list) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after))
