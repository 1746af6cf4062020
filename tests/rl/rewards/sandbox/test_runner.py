"""Programs pass only by giving right answers, and reach nothing outside of their process."""

import contextlib
import os
import socket
import textwrap
import time

import pytest

from maxtrain.rl.rewards.sandbox import confinement, forms
from maxtrain.rl.rewards.sandbox.runner import (
    FAILED,
    PASSED,
    TIMEOUT,
    UNSUPPORTED,
    ConfinementError,
    Sandbox,
)

MEMORY = 1 << 30
KINDS = [confinement.NAMESPACES, pytest.param(confinement.LANDLOCK, marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request):
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(Sandbox(request.param))
        except ConfinementError as error:
            pytest.skip(f"this machine does not have it: {error}")


def run(sandbox, program, tests, seconds=20.0, entry_point=None, memory=MEMORY):
    program = textwrap.dedent(program)
    if isinstance(tests, str):
        tests = textwrap.dedent(tests)
    return sandbox.run(program, forms.read_tests(tests, entry_point), seconds, memory)


# Name: a right program, a wrong one, and the tests.
HONEST = {
    "integers": ("def f(a, b): return a + b", "def f(a, b): return a - b", "assert f(1, 2) == 3"),
    "float_tolerance": (
        "def f(x): return x / 3",
        "def f(x): return x / 4",
        "assert abs(f(1) - 0.333333) < 1e-5",
    ),
    "isclose_without_import": (
        "def f(x): return x ** 0.5",
        "def f(x): return x ** 0.4\ndef isclose(*a, **k): return True",
        "assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)\nassert isclose(f(4), 2)",
    ),
    "sorted": (
        "def f(x): return {v: 1 for v in x}.keys()",
        "def f(x): return x",
        "assert sorted(f([3, 1, 1])) == [1, 3]",
    ),
    "none": ("def f(x): pass", "def f(x): return 0", "assert f(1) is None"),
    "falsy": ("def f(x): return []", "def f(x): return [0]", "assert not f(1)"),
    "expected_exception": (
        "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
        "def f(x): return x",
        """
        try:
            f(-1)
            assert False
        except ValueError as error:
            assert str(error) == "negative"
        """,
    ),
    "own_exception": (
        "class EmptyError(Exception): pass\ndef f(x):\n    raise EmptyError('no', x)",
        "class EmptyError(Exception): pass\ndef f(x):\n    raise TypeError('no')",
        """
        try:
            f(3)
        except EmptyError as error:
            assert error.args == ("no", 3) and str(error) == "('no', 3)"
        else:
            raise AssertionError
        """,
    ),
    "loops_and_helpers": (
        "def f(n): return n * (n + 1) // 2",
        "def f(n): return n * n",
        """
        import random
        from itertools import accumulate
        def slow(n):
            return sum(range(n + 1))
        for n in range(20):
            assert f(n) == slow(n), n
        assert [f(n) for n in range(4)] == list(accumulate(range(4)))
        """,
    ),
    "in_place": (
        "def f(a): a.sort()",
        "def f(a): return sorted(a)",
        "a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]",
    ),
    "same_object": (
        "def f(a):\n    a[0].append(4)\n    return a",
        "def f(a): return [[4]]",
        "inner = []\na = [inner]\nb = f(a)\nassert b is a and inner == [4]",
    ),
    "generator": (
        "def f(n):\n    for i in range(n): yield i, i * i",
        "def f(n):\n    yield 1",
        "assert list(f(3)) == [(0, 0), (1, 1), (2, 4)]\nassert next(f(1)) == (0, 0)",
    ),
    "containers": (
        "import collections\n"
        "def f(s): return collections.Counter(s), {1: (2, {3}), None: frozenset([(1, 2)])}, b'x'",
        "def f(s): return {}, {}, b'x'",
        """
        a, b, c = f("aab")
        assert a == {"a": 2, "b": 1} and a.most_common(1) == [("a", 2)]
        assert b == {1: (2, {3}), None: frozenset({(1, 2)})} and type(b[1]) is tuple and c == b"x"
        """,
    ),
    "values": (
        "import datetime, decimal, fractions\n"
        "def f(): return [decimal.Decimal('0.10'), fractions.Fraction(1, 3),"
        " datetime.date(2020, 2, 3), 2 ** 5000, -0.0, 1j, range(3), '\\ud800']",
        "def f(): return []",
        """
        from datetime import date
        from decimal import Decimal
        from fractions import Fraction
        assert f() == [Decimal("0.1"), Fraction(1, 3), date(2020, 2, 3), 2**5000, 0, 1j, range(3),
                       "\\ud800"]
        """,
    ),
    "subclasses": (
        "import collections, enum\n"
        "class Level(enum.IntEnum):\n    LOW = 1\n"
        "P = collections.namedtuple('P', 'x y')\n"
        "def f(): return Level.LOW, P(1, 2), collections.defaultdict(list, a=[1])",
        "def f(): return 2, (1, 2), {}",
        "assert f() == (1, (1, 2), {'a': [1]})",
    ),
    "methods": (
        """
        class Stack:
            def __init__(self): self.items = []
            def push(self, x): self.items.append(x)
            def pop(self): return self.items.pop()
            def __len__(self): return len(self.items)
            def __str__(self): return f"Stack{self.items}"
        """,
        """
        class Stack:
            def __init__(self): self.items = []
            def push(self, x): self.items.insert(0, x)
            def pop(self): return self.items.pop()
            def __len__(self): return 1
        """,
        """
        s = Stack()
        assert len(s) == 0 and not s
        s.push(1); s.push(2)
        assert str(s) == "Stack[1, 2]"
        assert s.pop() == 2 and s.items == [1] and isinstance(s, Stack)
        try:
            s.pop(); s.pop()
        except IndexError:
            pass
        else:
            assert False
        """,
    ),
    "callbacks": (
        "def f(g, xs, key=None): return [g(x) for x in sorted(xs, key=key)]",
        "def f(g, xs, key=None): return [g(x) for x in xs]",
        "assert f(lambda x: x * 2, [3, 1], key=abs) == [2, 6]\nassert f(str, [2, 1]) == ['1', '2']",
    ),
    "check": (
        "def add(a, b): return a + b",
        "def add(a, b): return 3",
        """
        METADATA = {"author": "x"}
        def check(candidate):
            assert candidate(1, 2) == 3
            for i in range(5):
                assert candidate(i, i) == 2 * i
        check(add)
        """,
    ),
    "pytest_functions": (
        "def f(x): return x * 2",
        "def f(x): return x",
        "from solution import f\ndef test_double():\n    assert f(2) == 4\n"
        "class TestMore:\n    def test_zero(self):\n        assert f(0) == 0",
    ),
    "unittest": (
        "def f(x): return x * 2",
        "import unittest\ndef f(x): raise unittest.SkipTest('x')",
        """
        import unittest
        class Cases(unittest.TestCase):
            def test_double(self):
                self.assertEqual(f(2), 4)
        if __name__ == "__main__":
            unittest.main()
        """,
    ),
    "mbpp": (
        "import re\ndef text_match(t): return bool(re.fullmatch('ab*', t))",
        "def text_match(t): return True",
        ["assert text_match('abb') == True", "assert text_match('ac') == False"],
    ),
    "stdin": (
        "n = int(input())\nprint(sum(map(int, input().split())), ' ')\n",
        "print(6)",
        {"inputs": ["3\n1 2 3\n", "1\n5\n"], "outputs": ["6\n", "5"]},
    ),
    "stdin_list": (
        "import sys\nfor line in sys.stdin: print(line.strip().upper())",
        "print('A')",
        '[{"input": "a\\nb\\n", "output": "A\\nB\\n", "testtype": "stdin"}]',
    ),
    "calls": (
        "class Solution:\n    def twice(self, x, y): return (x * 2, y / 3)",
        "def twice(x, y): return [x, y]",
        {"fn_name": "twice", "inputs": [[2, 1]], "outputs": [[4, 0.333333]]},
    ),
    "calls_in_lines": (
        "def add(x, y): return x + y",
        "def add(x, y): return str(x + y)",
        [{"input": "1\n2", "output": "3", "testtype": "functional", "func_name": "add"}],
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_right_programs_pass_and_wrong_ones_fail(sandbox, name):
    right, wrong, tests = HONEST[name]
    ran = run(sandbox, right, tests)
    assert ran.outcome == PASSED, ran
    ran = run(sandbox, wrong, tests)
    assert ran.outcome == FAILED, ran


def test_the_function_of_a_check_is_named_by_a_column(sandbox):
    tests = "def check(candidate):\n    assert candidate(2) == 4\n"
    assert run(sandbox, "def f(x): return 2 * x", tests, entry_point="f").outcome == PASSED
    assert run(sandbox, "def f(x): return x", tests, entry_point="f").outcome == FAILED
    assert run(sandbox, "def g(x): return 2 * x", tests, entry_point="f").outcome == FAILED


# Programs that do not compute `f(20) == 40`, and try to pass all the same.
FORGERIES = {
    "exit_in_module": "raise SystemExit(0)",
    "exit_now": "import os; os._exit(0)",
    "exit_in_call": "import os\ndef f(x): os._exit(0)",
    "system_exit_in_call": "def f(x): raise SystemExit(0)",
    "marker": "def f(x): print('passed'); print('[\"passed\", \"\"]')",
    "builtins": """
        import builtins
        builtins.AssertionError = type("Fine", (BaseException,), {})
        builtins.isinstance = lambda *a: True
        builtins.sorted = builtins.abs = builtins.len = lambda *a, **k: 40
        builtins.__build_class__ = None
        def f(x): return None
        """,
    "always_equal": """
        class Equal:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __hash__(self): return 0
            def __bool__(self): return True
            __lt__ = __gt__ = __le__ = __ge__ = __eq__
        def f(x): return Equal()
        """,
    "always_equal_int": """
        class Equal(int):
            def __eq__(self, other): return True
            def __hash__(self): return hash(40)
        def f(x): return Equal(7)
        """,
    "always_equal_str": """
        class Equal(str):
            def __eq__(self, other): return True
            def __radd__(self, other): return 40
        def f(x): return Equal("7")
        """,
    "always_equal_list": """
        class Equal(list):
            def __eq__(self, other): return True
        def f(x): return Equal([40])
        """,
    "class_as_function": """
        class f(int):
            def __eq__(self, other): return True
        """,
    "nan": "def f(x): return float('nan')",
    "frames": """
        import gc, sys
        def f(x):
            frame = sys._getframe()
            while frame:
                for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):
                    if name in ("failure", "verdict", "expected", "tests", "proof"):
                        return 40
                frame = frame.f_back
            for each in gc.get_objects():
                if isinstance(each, str) and "f(20) ==" in each:
                    return 40
            if any(type(each).__name__ == "_Channel" for each in gc.get_objects()):
                return 40
        """,
    "descriptors": """
        import os
        def f(x):
            for fd in range(64):
                try:
                    os.write(fd, b'\\x10\\x00\\x00\\x00["passed", "aaa"]')
                except OSError:
                    pass
        """,
    "forged_verdict": """
        import json, os, struct
        data = json.dumps(["passed", ""]).encode()
        os.write(3, struct.pack("<I", len(data)) + data)
        os._exit(0)
        """,
    "forged_answers": """
        import json, os, struct
        for message in ({"loaded": True}, {"value": [0], "nodes": [["dict", []]], "changed": []}):
            data = json.dumps(message).encode()
            os.write(3, struct.pack("<I", len(data)) + data)
        os.close(3)
        """,
    "forged_references": """
        import json, os, struct
        def f(x):
            for message in ({"call_back": -1, "nodes": [], "operands": [[], {}]},
                            {"value": [0], "nodes": [["builtin", "eval"]], "changed": []}):
                data = json.dumps(message).encode()
                os.write(3, struct.pack("<I", len(data)) + data)
        """,
    "patched_json": """
        import json, ast, pickle, sys, socket
        json.dumps = lambda *a, **k: '["passed", ""]'
        json.loads = ast.literal_eval = pickle.loads = lambda *a, **k: ["passed", ""]
        def f(x): return 0
        """,
    "patched_runtime": """
        import gc, sys
        for name, module in list(sys.modules.items()):
            if "judge" in name or "values" in name:
                for each in vars(module):
                    setattr(module, each, lambda *a, **k: 40)
        sys.stdout = sys.stderr = None
        def f(x): return 0
        """,
    "stop_iteration": "def f(x): raise StopIteration",
    "module_not_found": "def f(x): raise ModuleNotFoundError('x')",
    "infinite_generator": "def f(x):\n    while True: yield 40",
    "deep": """
        def f(x):
            a = []
            for _ in range(100_000): a = [a]
            return a
        """,
    "cyclic": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "large_message": "def f(x): return 'x' * (40 << 20)",
    "large_int": "def f(x): return 10 ** 10 ** 6",
    "answer_from_disk": "import os\ndef f(x): return os.listdir(os.path.expanduser('~/..'))",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_program_passes_that_does_not_compute_the_answer(sandbox, name):
    tests = "assert all(map(lambda x: f(x) == 2 * x, [20]))\nassert f(20) == 40"
    ran = run(sandbox, FORGERIES[name], tests)
    assert ran.outcome == FAILED, ran


@pytest.mark.parametrize(
    "tests",
    [
        "assert abs(f(20) - 40) < 1e-6",
        "assert f(20) in (40, 41)",
        "assert 40 in {f(20)}",
        "assert f(20) <= 40 <= f(20)",
        "assert not f(20) != 40",
        "assert f(20) == f(21) - 1 == 40",
        "try:\n    assert f(20) == 40\nexcept ValueError:\n    pass",
        "import numpy as np\nassert np.isclose(f(20), 40)",
    ],
)
def test_an_object_that_agrees_to_all_passes_no_comparison(sandbox, tests):
    program = """
    class Agrees(float):
        def __eq__(self, other): return True
        def __ne__(self, other): return False
        def __sub__(self, other): return Agrees(0)
        def __abs__(self): return self
        def __hash__(self): return 40
        __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__
        __rsub__ = __add__ = __array__ = __sub__
    class Bare:
        vars().update({k: v for k, v in vars(Agrees).items() if k not in ("__dict__", "__new__")})
    """
    for returned in ("Agrees(7)", "Bare()", "[Bare()]", "Bare"):
        ran = run(sandbox, f"{textwrap.dedent(program)}\ndef f(x): return {returned}", tests)
        assert ran.outcome == FAILED, ran


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [
        "def f(x):\n    while True: pass",
        "while True: pass",
        "import time\ntime.sleep(600)",
        "def f(x): return 9**9**9",
        "while True: print('x' * 1000)",
        "import atexit, time\natexit.register(time.sleep, 600)\ndef f(x): time.sleep(600)",
        "import threading\ndef g():\n    while True: pass\n"
        "for _ in range(3): threading.Thread(target=g).start()\ndef f(x):\n    while True: pass",
        "class A:\n    def __iter__(self): return self\n    def __next__(self): return 1\n"
        "def f(x): return A()",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_what_does_not_end_is_ended(sandbox, program):
    began = time.monotonic()
    ran = run(sandbox, program, "assert list(f(1)) == [1]", seconds=0.5)
    assert ran.outcome == TIMEOUT, ran
    assert time.monotonic() - began < 10 and len(ran.output) < 10_000


@pytest.mark.parametrize(
    "program",
    [
        "import time\nclass A:\n    def __del__(self): time.sleep(600)\na = A()\ndef f(x): return 40",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
        "def f(x): return 40",
    ],
)
def test_what_comes_after_the_tests_is_not_waited_for(sandbox, program):
    began = time.monotonic()
    assert run(sandbox, program, "assert f(20) == 40", seconds=60.0).outcome == PASSED
    assert time.monotonic() - began < 20


def does(sandbox, program):
    """Return True if a program can do something: it raises no exception."""
    ran = run(sandbox, program, {"inputs": [""], "outputs": ["done"]})
    if ran.outcome != PASSED:
        assert ran.outcome == FAILED, ran
        assert any(word in ran.output for word in ("Error", "over", "printed")), ran
    return ran.outcome == PASSED


def test_the_folder_of_a_program_is_its_own_and_can_be_used(sandbox):
    program = """
    import os, shutil, tempfile
    assert os.listdir(".") == []
    with open("a", "w") as file: file.write("x")
    os.mkdir("b"); shutil.copy("a", "b"); os.rename("b/a", "c"); os.remove("c")
    os.chmod("a", 0o600)
    with tempfile.TemporaryDirectory() as folder:
        open(folder + "/t", "w").close()
    assert open("a").read() == "x"
    print("done")
    """
    for _ in range(2):
        assert does(sandbox, program)


def test_nothing_outside_can_be_read_or_written(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    attacks = [
        f"open({str(secret)!r}).read()",
        f"open({str(secret)!r}, 'a')",
        f"os.truncate({str(secret)!r}, 0)",
        f"os.open({str(secret)!r}, os.O_RDONLY | os.O_TRUNC)",
        f"os.remove({str(secret)!r})",
        f"os.link({str(secret)!r}, 'here'); open('here').read()",
        f"os.symlink({str(secret)!r}, 'there'); open('there').read()",
        f"os.rename({str(tmp_path)!r}, 'moved')",
        f"os.listdir({str(tmp_path)!r})",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"os.mkdir({str(tmp_path / 'new')!r})",
        f"open('/proc/{os.getpid()}/environ', 'rb').read()",
        f"open('/proc/{os.getpid()}/mem', 'rb')",
        "os.listdir('/proc')",
        "os.listdir('/proc/self/fd')",
        f"open({os.path.abspath(__file__)!r}).read()",
        f"open({os.__file__!r}, 'a')",
        "open(os.path.join(os.path.dirname(os.__file__), 'new_module.py'), 'w')",
        "open('/etc/shadow').read()",
        "os.chroot('.')",
        "os.setuid(1)",
    ]
    for attack in attacks:
        assert not does(sandbox, f"import os\n{attack}\nprint('done')"), attack
    does(sandbox, f"import os\nos.chmod({str(secret)!r}, 0); os.utime({str(secret)!r}, (0, 0))")
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]
    assert secret.read_text() == "secret" and secret.stat().st_mtime > 1


@pytest.mark.long
def test_the_environment_of_the_parent_is_not_there(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    program = "import os\nassert 'SECRET_TOKEN' not in os.environ\nprint('done')"
    for kind in (confinement.NAMESPACES, confinement.LANDLOCK):
        try:
            with Sandbox(kind) as sandbox:
                assert does(sandbox, program)
        except ConfinementError:
            pass


def test_no_socket_reaches_anything(sandbox, tmp_path):
    with contextlib.ExitStack() as stack:
        addresses = [
            (socket.AF_UNIX, socket.SOCK_STREAM, str(tmp_path / "stream")),
            (socket.AF_UNIX, socket.SOCK_DGRAM, str(tmp_path / "datagram")),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0test-{os.getpid()}"),
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        ]
        attacks = ["socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"]
        for family, kind, address in addresses:
            listener = stack.enter_context(socket.socket(family, kind))
            listener.bind(address)
            if kind == socket.SOCK_STREAM:
                listener.listen()
            name = listener.getsockname()
            if isinstance(name, bytes):
                name = name.decode()
            attacks.append(f"socket.socket({int(family)}, {int(kind)}).connect({name!r})")
            pair = "socket.socketpair()[0]"
            attacks.append(f"{pair}.sendto(b'x', {name!r})")
            attacks.append(f"{pair}.sendmsg([b'x'], [], 0, {name!r})")
        attacks.append("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)")
        for attack in attacks:
            assert not does(sandbox, f"import socket\n{attack}\nprint('done')"), attack
    assert does(sandbox, "import socket\na, b = socket.socketpair()\na.send(b'x')\nprint('done')")


def test_no_processes_signals_or_new_rights(sandbox):
    attacks = [
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        f"os.kill({os.getpid()}, 0)",
        "os.kill(-1, 9)",
        f"os.sched_setaffinity({os.getpid()}, [0])",
        f"os.setpriority(os.PRIO_PROCESS, {os.getpid()}, 19)",
        f"import resource; resource.prlimit({os.getpid()}, resource.RLIMIT_CORE)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        "os.unshare(os.CLONE_NEWUSER)",
        "os.memfd_create('x')",
        f"import fcntl; fcntl.fcntl(0, 8, {os.getpid()})",
        "import ctypes; os.close(0) if ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0 else 1 / 0",
        "import ctypes; 1 / (1 + ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))",
    ]
    for attack in attacks:
        assert not does(sandbox, f"import os\n{attack}\nprint('done')"), attack


@pytest.mark.long
def test_memory_files_and_threads_have_limits(sandbox):
    attacks = [
        "bytearray(2 << 30)",
        "a = [bytearray(1 << 27) for _ in range(16)]",
        "open('large', 'wb').write(bytes(1 << 25))",
        "import time\nfor i in range(20): open(str(i), 'wb').write(bytes(1 << 23))\ntime.sleep(3)",
        "import time\nfor i in range(9000): open(str(i), 'wb').close()\ntime.sleep(3)",
        "import os, time\nfor i in range(9000): os.mkdir('d'); os.chdir('d')\ntime.sleep(3)",
        "a = [open('x', 'w') for _ in range(100)]",
        "import threading, time\nthreading.stack_size(32768)\n"
        "for _ in range(1000): threading.Thread(target=time.sleep, args=(3,), daemon=True).start()\n"
        "time.sleep(3)",
    ]
    for attack in attacks:
        assert not does(sandbox, f"{attack}\nprint('done')"), attack


def test_threads_and_numpy_work(sandbox):
    program = """
    from concurrent.futures import ThreadPoolExecutor
    import numpy as np
    def f(n):
        with ThreadPoolExecutor(4) as pool:
            return np.array(list(pool.map(lambda x: x * x, range(n)))).sum()
    def g(n): return np.arange(n) / 2
    """
    tests = "import numpy as np\nassert f(4) == 14\nassert np.allclose(g(3), [0, 0.5, 1])"
    ran = run(sandbox, program, tests)
    assert ran.outcome == PASSED, ran


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("print('1' * (20 << 20))", {"inputs": [""], "outputs": ["1"]}),
        ("import os\nprint(1)\nos._exit(3)", {"inputs": [""], "outputs": ["1"]}),
        ("print(1)\nraise ValueError", {"inputs": [""], "outputs": ["1"]}),
        ("print(open('/proc/self/environ').read())", {"inputs": [""], "outputs": ["1"]}),
        ("f = lambda: True", {"fn_name": "f", "inputs": [[]], "outputs": [1]}),
        (
            "class E(int):\n    __eq__ = lambda a, b: True\ndef f(): return E(2)",
            {"fn_name": "f", "inputs": [[]], "outputs": [1]},
        ),
        ("def f(): return {'a': object()}", {"fn_name": "f", "inputs": [[]], "outputs": [{}]}),
    ],
)
def test_cases_fail(sandbox, program, tests):
    assert run(sandbox, program, tests).outcome == FAILED


UNSUPPORTED_TESTS = {
    "comparison": "assert Point(1, 2) == Point(1, 2)",
    "short_name": "assert P(1) != P(2)",
    "arithmetic": "p = Vector(1) + Vector(2)\nassert p.x == 3",
    "subclass": "class Mine(Base): pass\nassert Mine().f() == 1",
    "eval": "assert eval(f(1)) == 2",
    "patch": "import math\nmath.sqrt = None\nassert f(1) == 1",
    "stdout": "import sys, io\nsys.stdout = io.StringIO()\nassert f(1) == 1",
    "open": "assert f(open('x')) == 1",
    "nothing": "pass",
    "nothing_of_the_program": "assert sum([1, 2]) == 3",
    "no_check": "f(1)",
    "syntax": "assert f(1 ==",
    "fixture": "def test_f(capsys):\n    assert f(1) == 1",
    "own_object": "class Node: pass\nassert f(Node()) == 1",
    "no_entry_point": "def check(candidate):\n    assert candidate(1) == 1",
    "module": "import not_a_module_here\nassert f(1) == 1",
}


@pytest.mark.parametrize("name", UNSUPPORTED_TESTS)
def test_tests_that_cannot_be_judged_are_an_outcome_of_their_own(sandbox, name):
    """Whatever the program does, so that it cannot choose."""
    programs = ["class Base: pass\nPoint = Vector = Base\ndef f(x): return 1", "x = ("]
    if name == "own_object":
        programs = programs[:1]
    for program in programs:
        ran = run(sandbox, program, UNSUPPORTED_TESTS[name])
        assert ran.outcome == UNSUPPORTED and "cannot be judged" in ran.output, ran


def test_hostile_tests_are_confined_as_well(sandbox, tmp_path):
    """They come with the dataset. What they win is a reward that they could give anyway."""
    attacks = [
        f"import os\nos.mkdir({str(tmp_path / 'x')!r})",
        "import os\nos.fork()",
        "import os\nos.kill(1, 0)",
        "import os\nos.write(3, b'x' * 100)\nos._exit(0)",
        "import os\nos._exit(0)",
        "while True: pass",
    ]
    for attack in attacks:
        ran = run(sandbox, "def f(): pass", f"{attack}\nassert f() is None", seconds=1.0)
        assert ran.outcome in (FAILED, TIMEOUT), ran
    assert list(tmp_path.iterdir()) == []


def test_endless_recursion_fails(sandbox):
    program = "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)"
    ran = run(sandbox, program, "assert f(20) == 40", seconds=1.0)
    assert ran.outcome in (FAILED, TIMEOUT)


def test_tests_that_catch_everything_do_not_pass_a_program_that_ended(sandbox):
    tests = "try:\n    f()\nexcept BaseException:\n    pass\nassert True"
    assert run(sandbox, "import os\ndef f(): os._exit(0)", tests).outcome == FAILED


def test_what_is_printed_is_kept_and_no_more_than_its_end(sandbox):
    ran = run(sandbox, "print('x' * 100_000)\nprint('end')\ndef f(): pass", "assert f() is None")
    assert ran.outcome == PASSED and ran.output.endswith("x\nend\n") and len(ran.output) < 5000


@pytest.mark.long
def test_programs_end_with_the_process_that_runs_them():
    """They leave no folder behind."""
    for kind in (confinement.NAMESPACES, confinement.LANDLOCK):
        try:
            sandbox = Sandbox(kind)
        except ConfinementError:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        ours, theirs = socket.socketpair()
        fds = [null, null, null, theirs.fileno()]
        running = sandbox.child("script", fds, 60.0, MEMORY)
        with contextlib.suppress(ConfinementError), running as child:
            os.kill(sandbox._process.pid, 9)
            deadline = time.monotonic() + 20
            while os.path.exists(f"/proc/{child.pid}") and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not os.path.exists(f"/proc/{child.pid}")
        sandbox.close()
        for each in (ours, theirs):
            each.close()
        os.close(null)
