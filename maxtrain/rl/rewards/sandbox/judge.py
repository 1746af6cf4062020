"""The judge: a process that runs tests, calls the program in another process, and reports a
verdict.

Tests see stand-ins for the program's functions and objects. A call returns plain data of exactly
the built-in types, or a `Proxy`, which equals nothing but itself. The tests come from the dataset,
so this process is confined like that of the program.
"""

import ast
import builtins
import importlib
import json
import math
import os
import socket
import sys
import types
import unittest
from typing import Any, NoReturn

from maxtrain.rl.rewards.sandbox.assertions import (
    JudgeableTests,
    UnsupportedTestsError,
    functions_to_call,
    read_assertions,
)
from maxtrain.rl.rewards.sandbox.values import (
    ProtocolError,
    ValueDecoder,
    ValueEncoder,
    receive,
    send,
)

# Verdicts.
PASSED = "passed"
FAILED = "failed"
UNSUPPORTED = "unsupported_tests"

# File descriptors of the sockets to the runner, which sends the tests and gets the verdict, and to
# the program.
_RUNNER = 3
_PROGRAM = 4
_DETAIL = 2000
# Numbers in expected results are rarely written with all their digits.
_TOLERANCE = 1e-6


class TestsEnd(BaseException):
    """Exception that ends the tests when there is a verdict; tests must not be able to continue."""


def serve() -> int:
    """Judge once, and return the exit status."""
    runner = socket.socket(fileno=_RUNNER)
    job = receive(runner)
    verdict = UNSUPPORTED, ""
    try:
        if job["form"] == "assertions":
            tests = read_assertions(job["tests"], job["entry_point"])
            _import_modules(tests)
            if not job["has_program"]:
                verdict = FAILED, "no program"
            else:
                channel = _Channel(socket.socket(fileno=_PROGRAM))
                verdict = _judge(channel, lambda: _run_assertions(channel, tests, job))
        else:
            channel = _Channel(socket.socket(fileno=_PROGRAM))
            verdict = _judge(channel, lambda: _run_cases(channel, job))
    except UnsupportedTestsError as error:
        verdict = UNSUPPORTED, f"the tests cannot be judged: {error}."
    send(runner, [verdict[0], verdict[1][:_DETAIL]])
    return 0


def _judge(channel: "_Channel", run: Any) -> tuple[str, str]:
    try:
        channel.start()
        run()
    except BaseException as error:
        channel.note(error)
    if channel.unsupported:
        return UNSUPPORTED, f"the tests cannot be judged: {channel.unsupported}."
    if channel.failure:
        return FAILED, channel.failure
    return PASSED, ""


def _run_assertions(channel: "_Channel", tests: JudgeableTests, job: dict[str, Any]) -> None:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    names = module.__dict__
    for name, (package, attribute) in tests.imports.items():
        imported = importlib.import_module(package)
        names[name] = getattr(imported, attribute) if attribute else imported
    names.update(channel.request("names", tests.names))
    # The test cases are run below, under any name that the tests use.
    unittest.main = unittest.TestProgram = lambda *_, **__: None  # type: ignore
    code = compile(tests.tree, "tests.py", "exec")
    exec(code, names)
    if tests.check is not None:
        names[tests.check](names[job["entry_point"]])
    for function in functions_to_call(tests.tree):
        names[function]()
    own_classes = [each for each in tests.tree.body if isinstance(each, ast.ClassDef)]
    for definition in own_classes:
        cls = names[definition.name]
        if isinstance(cls, type) and issubclass(cls, unittest.TestCase):
            _run_unittest(channel, cls)
        elif definition.name.startswith("Test"):
            _run_methods(cls)
    if channel.failure:
        raise TestsEnd


def _import_modules(tests: JudgeableTests) -> None:
    """Raise an UnsupportedTestsError if a module that the tests import is not installed."""
    wanted = [package for package, _ in tests.imports.values()]
    for node in tests.tree.body:
        if isinstance(node, ast.Import):
            wanted += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            wanted.append(node.module)
    for name in wanted:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UnsupportedTestsError(f"they need {name} ({error})") from None


def _run_unittest(channel: "_Channel", cls: type[unittest.TestCase]) -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(cls).run(result)
    if channel.failure or channel.unsupported:
        raise TestsEnd
    problems = [*result.failures, *result.errors]
    if problems or result.unexpectedSuccesses:
        channel.fail(problems[0][1] if problems else "a test passed that must fail")


def _run_methods(cls: type) -> None:
    for name in [each for each in vars(cls) if each.startswith("test")]:
        instance = cls()
        if hasattr(instance, "setup_method"):
            instance.setup_method()
        getattr(instance, name)()


def _run_cases(channel: "_Channel", job: dict[str, Any]) -> None:
    """Call a function with the arguments of each case, and compare the result."""
    for number, (arguments, expected) in enumerate(job["cases"]):
        result = channel.request("case", job["name"], arguments)
        if isinstance(result, Proxy):
            result = list(result)
        value = _as_json(result)
        is_same = is_same_json(value, expected)
        if not is_same and job["may_be_wrapped"]:
            is_same = is_same_json(value, expected[0])
        if not is_same:
            channel.fail(f"case {number}: the result is another one")


def _as_json(value: Any) -> Any:
    """Convert tuples to lists, and keys of dicts to texts, as in JSON."""
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, dict):
        return {_as_key(key): _as_json(each) for key, each in value.items()}
    return value


def _as_key(key: Any) -> Any:
    if isinstance(key, bool) or key is None:
        return json.dumps(key)
    if isinstance(key, int | float):
        return str(key)
    return key


def is_same_json(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal: floats within 1e-6, relative or absolute, and true
    is not 1."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) or isinstance(expected, float):
        if not isinstance(value, int | float) or not isinstance(expected, int | float):
            return False
        try:
            return math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        except OverflowError:
            return False
    if type(value) is not type(expected):
        return False
    if isinstance(value, list):
        return len(value) == len(expected) and all(map(is_same_json, value, expected))
    if isinstance(value, dict):
        if value.keys() != expected.keys():
            return False
        return all(is_same_json(value[key], expected[key]) for key in value)
    return value == expected


class _Channel:
    """Calls of the program in the other process, whose answers are not trusted."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._proxies: dict[int, Proxy] = {}
        self._exceptions: dict[int, type[BaseException]] = {}
        self._functions: list[Any] = []
        self._numbers: dict[int, int] = {}
        # Why the program failed, and why the tests cannot be judged. Tests cannot take them back,
        # even if they catch all exceptions.
        self.failure = ""
        self.unsupported = ""
        self._has_returned = False

    def start(self) -> None:
        """Wait until the program is loaded."""
        message = self._receive()
        if "loaded" not in message:
            self.fail(str(message.get("failed", "the program ended")))

    def fail(self, why: str) -> NoReturn:
        """Record that the program has failed, and stop the tests."""
        self.failure = self.failure or why
        raise TestsEnd

    def note(self, error: BaseException) -> None:
        """Record the exception that ended the tests."""
        if isinstance(error, TestsEnd) and (self.failure or self.unsupported):
            return
        if isinstance(error, UnsupportedTestsError):
            self.unsupported = self.unsupported or str(error)
            return
        self.failure = self.failure or _described(error)

    def request(self, do: str, *operands: Any) -> Any:
        """Let the program execute a request; return its value or raise its exception."""
        if self.failure or self.unsupported:
            raise TestsEnd
        encoder = ValueEncoder(self._node)
        try:
            references = [encoder.add(each) for each in operands]
            send(self._connection, {"do": do, "nodes": encoder.nodes, "operands": references})
        except UnsupportedTestsError as error:
            self.unsupported = str(error)
            raise TestsEnd from None
        except (ValueError, ProtocolError) as error:
            # The tests are certainly at fault only before the program has returned anything.
            if self._has_returned:
                self.fail(str(error))
            self.unsupported = str(error)
            raise TestsEnd from None
        except OSError:
            self.fail("the program ended")
        message = self._receive()
        while "call_back" in message:
            self._call_back(message)
            message = self._receive()
        try:
            decoder = ValueDecoder(message["nodes"], self._value, encoder.containers)
            for number, node in message["changed"]:
                decoder.fill(encoder.containers[number], node)
            if "raised" not in message:
                self._has_returned |= do != "names"
                return decoder.get(message["value"])
            error: BaseException = self._exception(message, decoder, is_iteration=do == "next")
        except Exception as problem:
            self.fail(f"the program broke the protocol ({type(problem).__name__}: {problem})")
        raise error from None

    def _receive(self) -> dict[str, Any]:
        try:
            message = receive(self._connection)
        except (EOFError, OSError):
            self.fail("the program ended")
        except ProtocolError as error:
            self.fail(f"the program broke the protocol ({error})")
        if not isinstance(message, dict):
            self.fail("the program broke the protocol (a message is no object)")
        return message

    def _call_back(self, message: dict[str, Any]) -> None:
        """Execute a call of a function of the tests by the program."""
        try:
            decoder = ValueDecoder(message["nodes"], self._value)
            arguments, keywords = (decoder.get(each) for each in message["operands"])
            number = message["call_back"]
            if type(number) is not int or number < 0:
                raise ProtocolError("a function has no number")
            function = self._functions[number]
            if type(arguments) is not tuple or type(keywords) is not dict:
                raise ProtocolError("arguments are none")
        except Exception as problem:
            self.fail(f"the program broke the protocol ({type(problem).__name__}: {problem})")
        encoder = ValueEncoder(self._node)
        try:
            answer = {"value": encoder.add(function(*arguments, **keywords))}
        except UnsupportedTestsError as error:
            self.unsupported = str(error)
            raise TestsEnd from None
        except Exception as error:
            name = type(error).__name__
            answer = {"raised": name, "arguments": encoder.add((str(error),))}
        try:
            send(self._connection, {**answer, "nodes": encoder.nodes})
        except (OSError, ProtocolError):
            self.fail("the program ended")

    def _node(self, value: Any) -> list:
        """Return the node of a value that is not plain data, for the program."""
        if isinstance(value, Proxy):
            return ["handle", _handle(value)]
        if isinstance(value, type):
            for number, cls in self._exceptions.items():
                if cls is value:
                    return ["handle", number]
        module = getattr(value, "__module__", None)
        name = getattr(value, "__name__", "")
        if module == "builtins" and getattr(builtins, name, None) is value:
            return ["builtin", name]
        is_standard = isinstance(module, str) and module.split(".")[0] in sys.stdlib_module_names
        if is_standard and getattr(sys.modules.get(str(module)), name, None) is value:
            return ["global", module, name]
        if callable(value) and not isinstance(value, type):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self._functions)
                self._functions.append(value)
            return ["function", self._numbers[id(value)]]
        raise UnsupportedTestsError(f"they hand an object ({type(value).__name__}) to the program")

    def _value(self, node: list) -> Any:
        """Return the value of a node of the program that is not plain data."""
        kind, argument = node[0], node[1]
        if kind == "builtin" and isinstance(argument, str):
            value = getattr(builtins, argument)
            if isinstance(value, type):
                return value
        if kind == "function" and type(argument) is int and argument >= 0:
            return self._functions[argument]
        if type(argument) is not int:
            raise ProtocolError("a handle is no number")
        if kind == "handle":
            if argument not in self._proxies:
                self._proxies[argument] = Proxy(self, argument, str(node[2]))
            return self._proxies[argument]
        if kind == "exception":
            if argument not in self._exceptions:
                self._exceptions[argument] = type(
                    str(node[2]), (_ProgramError, _known_exception(node[3])), {}
                )
            return self._exceptions[argument]
        raise ProtocolError("a node is of no known kind")

    def _exception(
        self, message: dict[str, Any], decoder: ValueDecoder, is_iteration: bool
    ) -> BaseException:
        """Return the exception that the program raised: of a class that the tests know, or of a
        built-in one."""
        arguments = decoder.get(message["arguments"])
        if type(arguments) is not tuple:
            raise ProtocolError("arguments of an exception are none")
        for _, _, number in message["raised"]:
            if number in self._exceptions:
                cls = self._exceptions[number]
                break
        else:
            cls = _known_exception(message["raised"])
        if issubclass(cls, StopIteration) and not is_iteration:
            # StopIteration would end `map` and `all(map(...))` early, as if the tests had passed.
            return RuntimeError("a function of the program raised StopIteration")
        error = cls.__new__(cls)
        error.args = arguments
        if isinstance(error, _ProgramError):
            error.of_program = decoder.get(message["self"])
        return error


class _ProgramError:
    """An exception whose class the program defined; its attributes are in the program."""

    of_program: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.of_program, name)

    def __str__(self) -> str:
        return str(self.of_program)


def _known_exception(classes: list) -> type[BaseException]:
    """Return the first class that this process has imported as well."""
    for module, name, *_ in classes:
        cls = getattr(sys.modules.get(module), name, None)
        # Exceptions of unittest would skip a test, or end it without a failure.
        package = module.partition(".")[0]
        is_ours = package in sys.stdlib_module_names and package != "unittest"
        if is_ours and isinstance(cls, type) and issubclass(cls, BaseException):
            return cls
    return Exception


class Proxy:
    """A stand-in for an object of the program, with its attributes, calls, items and iteration.

    It has no comparisons and no arithmetic, because an object of the program could claim to equal
    everything.
    """

    __slots__ = ("__weakref__", "_proxy_channel", "_proxy_handle", "_proxy_name")

    def __init__(self, channel: _Channel, handle: int, name: str):
        object.__setattr__(self, "_proxy_channel", channel)
        object.__setattr__(self, "_proxy_handle", handle)
        object.__setattr__(self, "_proxy_name", name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _request(self, "call", arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):
            # numpy would read memory at the given addresses. Without these attributes, it reads
            # item by item.
            raise AttributeError(name)
        return _request(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _request(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _request(self, "delattr", name)

    def __getitem__(self, key: Any) -> Any:
        return _request(self, "getitem", _key(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        _request(self, "setitem", _key(key), value)

    def __delitem__(self, key: Any) -> None:
        _request(self, "delitem", _key(key))

    def __len__(self) -> int:
        return _typed(self, "len", int)

    def __bool__(self) -> bool:
        return _typed(self, "bool", bool)

    def __str__(self) -> str:
        return _typed(self, "str", str)

    def __repr__(self) -> str:
        return _typed(self, "repr", str)

    def __iter__(self) -> Any:
        return _request(self, "iter")

    def __next__(self) -> Any:
        return _request(self, "next")

    def __enter__(self) -> Any:
        return _request(self, "enter")

    def __exit__(self, cls: type | None, error: BaseException | None, _: Any) -> bool:
        if cls is not None and cls.__module__ != "builtins":
            return False
        return _typed(self, "exit", bool, cls, str(error))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Proxy) and _typed(instance, "isinstance", bool, self)


def _handle(proxy: Proxy) -> int:
    return object.__getattribute__(proxy, "_proxy_handle")


def _request(proxy: Proxy, do: str, *operands: Any) -> Any:
    channel = object.__getattribute__(proxy, "_proxy_channel")
    return channel.request(do, proxy, *operands)


def _typed(proxy: Proxy, do: str, kind: type, *operands: Any) -> Any:
    value = _request(proxy, do, *operands)
    if type(value) is not kind:
        raise TypeError(f"{do} returned a value of type {type(value).__name__}")
    return value


def _key(key: Any) -> Any:
    if isinstance(key, slice):
        return ("__slice__", key.start, key.stop, key.step)
    return key


def _described(error: BaseException) -> str:
    """Describe an exception with the line of the tests in which it was raised."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = type(error).__name__
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if os.path.basename(trace.tb_frame.f_code.co_filename) == "tests.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{text} (line {line} of the tests)"
