"""Files and command lines that no sane person writes: each ends with a message, exit 78 or 64,
soon, and never a traceback."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import ConfigError, UserError
from maxtrain import cli
from maxtrain.config import default_config, from_command_line, keys, load_config
from maxtrain.config.environment import check_environment
from maxtrain.config.limits import out_of_range

ROOT = Path(__file__).parents[2]
HEAD = "from maxtrain.config import default_config\n\n\ndef get_config():\n    config = default_config()\n"


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert len(str(caught.value)) < 20_000
    return caught.value.problems


def end_of(*argv: str, cwd: Path | None = None, **environment: str) -> tuple[int, str]:
    """Return the exit code of a command, and its output."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(
        [sys.executable, "-m", *argv], env=env, cwd=cwd, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


# Python files


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import sys; sys.exit(0)", "line 6: SystemExit: 0. Correct it there."),
        ("import sys; sys.exit()", "line 6: SystemExit. Correct it there."),
        ("raise SystemExit('bye')", "line 6: SystemExit: bye. Correct it there."),
        ("raise KeyboardInterrupt", "line 6: KeyboardInterrupt. Correct it there."),
        ("raise GeneratorExit", "line 6: GeneratorExit. Correct it there."),
        ("class E(BaseException): __str__ = None\n    raise E", "line 7: E. Correct it there."),
        (
            "def f(): f()\n    f()",
            "line 6: RecursionError: maximum recursion depth exceeded. Correct it there.",
        ),
        ("raise MemoryError", "line 6: MemoryError. Correct it there."),
        ("exec('(' * 1000)", "line 6: "),
        ("x = []\n    for _ in range(9999): x = [x]\n    config.steps = x", "deep"),
        ("x = []; x.append(x); config.steps = x", "deep"),
        ("x = 1\n    for _ in range(40): x = [x, x]\n    config.steps = x", "deep"),
        (
            "x = 1\n    for _ in range(20): x = [x, x]\n    config.steps = x",
            "has more than 20,000 values",
        ),
        (
            "config.eval_interval = 10 ** 5000",
            "eval_interval=<int> must be: whole number | 0.5 epochs (too many digits)",
        ),
        (
            "config.optimizer.learning_rate = 10 ** 5000",
            "OverflowError: int too large to convert to float",
        ),
        ("config.data.sources.b = {1: 2}", "data.sources.b.1 is not a key"),
        ("config.data.stages = ({'weights': {1: 2}},)", "the name 1 is not letters"),
        ("config.observe.prompts = ('\\ud800',)", "must be: list of texts (not UTF-8)"),
        ("config.steps = object", "steps=<class 'object'> must be: whole number | auto"),
        ("config.run_name = type('X', (), {'__str__': None})()", "run_name=<X> must be: text"),
        ("config.run_name = 'a' * 10**6", "at most 200 bytes. Set run_name to a shorter one."),
        ("config.output_dir = 'a' * 256", "is longer than a path can be: 255 bytes in each name"),
        ("config.output_dir = '/a' * 2500", "4,000 in all. Set output_dir to a shorter one."),
    ],
)
def test_a_python_file(tmp_path, body, said):
    (tmp_path / "c.py").write_text(
        f"{HEAD}    {body}\n    config.data.sources.a = {{'path': 'b'}}\n    return config\n"
    )
    (found,) = problems(f"config={tmp_path}/c.py")
    assert said in found


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b"import sys\nsys.exit(0)\n", "line 2: SystemExit: 0"),
        (b"raise KeyboardInterrupt\n", "line 1: KeyboardInterrupt"),
        (b"\0", "c.py"),
        (b"\xff = 1\n", "SyntaxError"),
        (b"", "has no get_config()"),
        (b"x = " + b"[" * 5000, "SyntaxError"),
        (b"x = " + b"-" * 200_000 + b"1", "Error"),
        (b"get_config = 3\n", "TypeError: 'int' object is not callable"),
        (b"get_config = lambda x: x\n", "TypeError"),
    ],
    ids=lambda x: x[:20].decode("latin") if isinstance(x, bytes) else "",
)
def test_a_python_file_that_is_no_config(tmp_path, source, said):
    (tmp_path / "c.py").write_bytes(source)
    (found,) = problems(f"config={tmp_path}/c.py", "data.sources.a.path=b")
    assert (
        said in found
        and found.startswith(f"config={tmp_path}/c.py")
        and found.endswith(("there.", "with changes."))
    )


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    "verb",
    [
        ["maxtrain.cli", "train"],
        ["maxtrain.cli", "plan"],
        ["maxtrain.cli", "supervise", "--", "maxtrain", "train"],
    ],
)
def test_exit_in_a_file_is_no_success_of_a_command(tmp_path, verb):
    (tmp_path / "c.py").write_text("import sys\nsys.exit(0)\n")
    code, said = end_of(*verb, f"config={tmp_path}/c.py")
    assert code == 78 and f"config={tmp_path}/c.py line 2: SystemExit: 0. Correct it there." in said
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["maxtrain.train"], 75),
        (["maxtrain.cli", "train"], 75),
        (["maxtrain.cli", "plan"], 75),
        (["maxtrain.cli", "supervise", "--", "maxtrain", "train"], 75),
        (["maxtrain.cli", "probe"], 130),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_ctrl_c_ends_a_file_that_never_ends(tmp_path, command, code):
    (tmp_path / "c.py").write_text(
        "print('begun', flush=True)\nwhile True:\n    try: pass\n    except BaseException: pass\n"
    )
    words = [sys.executable, "-m", *command, f"config={tmp_path}/c.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell that starts the tests in the background has them ignore SIGINT, and what they start
    # inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen(words, cwd=ROOT, **pipes)
    signal.signal(signal.SIGINT, before)
    try:
        assert child.stderr and child.stderr.readline() == "begun\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == code and "Traceback" not in out + err
    assert "Run the same command again" in err


def test_what_a_file_prints_is_no_part_of_the_config(tmp_path, capsys):
    body = "print('x')\n    config.data.sources.a = {'path': 'b'}\n    return config\n"
    (tmp_path / "c.py").write_text(f"{HEAD}    {body}")
    with pytest.raises(SystemExit):
        from_command_line([f"config={tmp_path}/c.py", "--print-config"], "train")
    said = capsys.readouterr()
    assert said.err == "x\n" and said.out.startswith("run_name: run\n")


def test_the_handler_of_ctrl_c_is_as_before(tmp_path):
    (tmp_path / "c.py").write_text("raise KeyboardInterrupt\n")
    before = signal.getsignal(signal.SIGINT)
    problems(f"config={tmp_path}/c.py")
    assert signal.getsignal(signal.SIGINT) is before


# YAML files

LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 20)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}, *a{i - 1}], y{i}: 1}}\n" for i in range(1, 20)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: 2020-99-99", "steps=2020-99-99 must be: whole number | auto"),
        ("steps: 0b_", "0b_ must be a whole number in decimal digits"),
        ("steps: 010", "010 must be a whole number in decimal digits, without leading zeros"),
        ("steps: 1:30", "1:30 must be a whole number in decimal digits"),
        ("optimizer: {learning_rate: 1:30.5}", "1:30.5 must be a number or text in quotes"),
        ('steps: !!int "xyz"', "xyz must be a whole number in decimal digits"),
        ('steps: !!float "xyz"', "not a value of type float"),
        ('steps: !!bool "xyz"', "not a value of type bool"),
        ("steps: !!timestamp x", "not a value of type timestamp"),
        ("steps: !!timestamp 2020-99-99", "not a value of type timestamp"),
        ("steps: !!binary 'x'", "is not valid YAML"),
        ("steps: !!binary 'eHg='", "steps=b'xx' must be: whole number | auto"),
        ("steps: !!map 3", "is not valid YAML"),
        ("steps: !!seq 3", "is not valid YAML"),
        ("steps: !!set {a, b}", "must be: whole number | auto"),
        ("steps: !!omap [a: 1]", "must be: whole number | auto"),
        ("steps: !!str [a]", "is not valid YAML"),
        ("steps: !!python/name:os.system", "is not valid YAML"),
        ("steps: !x 3", "is not valid YAML"),
        ("steps: =", "is not valid YAML"),
        ("steps: " + "9" * 5000, "not a value of type int"),
        ("eval_interval: " + "9" * 400, "must be: whole number | 0.5 epochs (too many digits)"),
        ("optimizer: {eps: 1.0e+400}", "nan and inf are not allowed"),
        ("steps: " + "[" * 50_000, "nested more than 24 deep"),
        ("steps: " + "{a: " * 50_000, "nested more than 24 deep"),
        ("- " * 5000, "nested more than 24 deep"),
        ("? " * 5000, "nested more than 24 deep"),
        (LAUGHS, "more than 20,000 values, aliases included"),
        (MERGES, "more than 20,000 values, aliases included"),
        ("steps: &a [*a]", "an alias of what it is part of"),
        ("steps: &a {<<: *a}", "an alias of what it is part of"),
        ("steps: *a", "found undefined alias"),
        ("steps: 1\n---\nsteps: 2", "expected a single document"),
        ("a: 1\n" * 2, "a is given twice"),
        ("data: {sources: {a: {path: x}, a: {path: y}}}", "a is given twice"),
        ("data: {sources: {1: {path: x}, '1': {path: y}}}", "1 is given twice"),
        ("[a]: 3", "a key must be text"),
        ("? {a: 1}\n: 3", "a key must be text"),
        ("null: 3", "null is not a key"),
        ("~: 3", "~ is not a key"),
        ("true: 3", "true is not a key"),
        ("? ~\n: 3", "~ is not a key"),
        ("<<: 3", "expected a mapping or list of mappings"),
        ("[1, 2]", "must be a mapping of keys to values"),
        ("- steps: 3", "must be a mapping of keys to values"),
        ("", "must be a mapping of keys to values"),
        ("# nothing", "must be a mapping of keys to values"),
        ("steps: a\0b", "is not valid YAML"),
        ("steps: \x07", "is not valid YAML"),
        ("steps:\t3\n\tx: 3", "is not valid YAML"),
        ("%YAML 9.9\n---\nsteps: 3", "is not valid YAML"),
        ("x" * 3_000_000, "longer than 1,048,576 bytes"),
        ("k" * 1000 + ": 3", "is not a key"),
        (
            "eval: {sets: {" + "k" * 1000 + ": {path: x}}}",
            "is not letters, digits, _ and -, at most 100",
        ),
    ],
    ids=lambda text: text[:30] if ": " in text or "[" in text else "",
)
def test_a_yaml_file(tmp_path, text, said):
    (tmp_path / "c.yaml").write_text(text)
    found = problems(f"config={tmp_path}/c.yaml")
    assert said in found[0], found[0]


@pytest.mark.long
@pytest.mark.every_dose
def test_thousands_of_unknown_keys_are_refused_soon(tmp_path):
    (tmp_path / "c.yaml").write_text("".join(f"learning_rate{i}: 3\n" for i in range(2000)))
    found = problems(f"config={tmp_path}/c.yaml")
    assert len(found) == 41 and "more problems. Fix these first." in found[-1]


@pytest.mark.parametrize("raw", [b"\xff", b"steps: \xe9", b"\xff\xfes\0", b"steps: \xed\xa0\x80"])
def test_bytes_that_are_no_utf8(tmp_path, raw):
    (tmp_path / "c.yaml").write_bytes(raw)
    assert (
        "is not valid YAML: 'utf-8' codec can't decode" in problems(f"config={tmp_path}/c.yaml")[0]
    )


def test_what_is_fine_in_yaml(tmp_path):
    text = "\ufeffx: &x {path: b}\n"
    (tmp_path / "c.yaml").write_text(text)
    assert (
        "x is not a key" in problems(f"config={tmp_path}/c.yaml", "data.sources.a.path=b")[0]
    )  # of a BOM no word
    text = "\ufeffdata: {sources: {007: &x {path: b, weight: 2}, 2024-01-01: {<<: *x, path: c}, null: {path: d}}}\n"
    (tmp_path / "c.yaml").write_text(text + "run_name: 2024-01-01\n")
    config = load_config([f"config={tmp_path}/c.yaml"])
    assert config.run_name == "2024-01-01" and list(config.data.sources) == [
        "007",
        "2024-01-01",
        "null",
    ]
    assert (config.data.sources["2024-01-01"].path, config.data.sources["2024-01-01"].weight) == (
        "c",
        2.0,
    )


def test_values_merged_in_are_no_second_ones(tmp_path):
    """The outer mapping is made before the inner one that it takes its values from, and that takes
    some itself."""
    text = "eval: {sets: {a: {path: p}, b: &b {<<: &c {path: q}, path: r}}}\ndata: {sources: {d: {<<: *b}}}\n"
    (tmp_path / "c.yaml").write_text(text)
    config = load_config([f"config={tmp_path}/c.yaml"])
    assert config.data.sources["d"].path == config.eval.sets["b"].path == "r"


def test_a_file_that_can_not_be_read(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text("steps: 3")

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    (found,) = problems(f"config={tmp_path}/c.yaml", "data.sources.a.path=b")
    assert (
        found
        == f"config={tmp_path}/c.yaml can't be read: Permission denied. Make it readable, or name another file."
    )


# Command lines


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["data.stages=" + "[" * 60_000], "must be: list of sections"),
        (["data.stages=" + "{weights: " * 10_000], "must be: list of sections"),
        (["data.stages=[[]]"], "data.stages[0]=[] is a section"),
        (["data.stages=[&a [*a]]"], "must be: list of sections"),
        (["observe.prompts=[" + "[" * 100 + "]" * 100 + "]"], "must be: list of texts"),
        (["observe.prompts=[!!timestamp x]"], "must be: list of texts"),
        (["observe.prompts=[0b_]"], "must be: list of texts"),
        (["eval.sets={null: {path: x}, [a]: {path: y}}"], "must be: section by name"),
        (["eval_interval=" + "9" * 100_000], "(too many digits)"),
        (["steps=1e99999999999999999999"], "must be: whole number | auto"),
        (["steps=1e-999999999"], "must be: whole number | auto"),
        (["optimizer.weight_decay=1e-400"], "(0, or not that small)"),
        (["optimizer.weight_decay=1e999999999"], "nan and inf are not allowed"),
        (["a" * 100_000 + "=3"], "is not a key"),
        ([".".join("a" * 50_000) + "=3"], "is not a key"),
        (["data.sources..path=x"], "is not a key"),
        (["data.sources.a b.path=x"], "the name 'a b' is not letters"),
        (["data.sources.a\n.path=x"], "is not letters"),
        (["config=" + "a" * 100_000], "is neither a known name nor a .py or .yaml file"),
        (["config=a\0.yaml"], "is neither a known name nor a .py or .yaml file"),
        (["config=" + "a" * 5000 + ".yaml"], "is neither a known name nor a .py or .yaml file"),
        (["config=/dev/null"], "is neither a known name nor a .py or .yaml file"),
    ],
    ids=lambda x: x[0][:30] if isinstance(x, list) else "",
)
def test_a_command_line(argv, said):
    config = [] if argv[0].startswith("config=") else ["config=quickstart"]
    assert any(said in found for found in problems(*config, *argv))


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ("data.sources={a: {path: x}}", "data.sources.a.path=y"),
        ("data.sources.a=x", "data.sources.a.path=y"),
        ("eval.sets={}", "eval.sets.more.path=y"),
        ("optimizer.groups={}", "optimizer.groups.a.pattern=y"),
    ],
)
def test_what_is_set_twice_as_a_whole_and_in_part(whole, part, turn):
    found = problems("config=quickstart", *[whole, part][::turn])
    key = whole.partition("=")[0]
    (text,) = (text for text in found if "set the same twice" in text)
    assert text.startswith(f"{whole} and {part} set the same twice. Put ") and text.endswith(
        f"into the value of {key}, or leave one out."
    )


# Numbers that devices don't hold

FLOATS = [
    key.path.replace("NAME", "x")
    for key in keys.all_keys()
    if "[" not in key.path and "number" in keys.describe(key.kind).split(" | ")
]
INTS = [
    key.path.replace("NAME", "x")
    for key in keys.all_keys()
    if "[" not in key.path and "whole number" in keys.describe(key.kind)
]


@pytest.mark.long
@pytest.mark.parametrize("path", FLOATS)
def test_a_number_that_float32_does_not_hold(path):
    for value in ("1e39", "-1e39", "1e-39", "1e300", "1e-300"):
        found = problems("config=quickstart", f"{path}={value}")
        assert any(
            f"{path}={value}".replace("e3", "e+3") in text or f"{path}={value}" in text
            for text in found
        )
        assert all(". Set " in text or ". Write " in text or ". Add " in text for text in found)


@pytest.mark.parametrize("path", INTS)
def test_a_whole_number_that_int32_does_not_hold(path):
    if path == "data.cache_bytes":
        assert "must be at most" in problems("config=quickstart", f"{path}=2e18")[0]
        return
    limit = 2**32 if path.rpartition(".")[2] == "seed" else 2**31
    found = problems("config=quickstart", f"{path}={limit}")
    assert any(f"{path}={limit} must be at most" in text for text in found)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        (
            "optimizer.learning_rate=1e39",
            "must be at most 3.403e+38 (float32). Set optimizer.learning_rate to at most 3.403e+38",
        ),
        (
            "optimizer.weight_decay=1e300",
            "must be at most 1000000.0. Set optimizer.weight_decay to at most 1000000.0",
        ),
        (
            "data.sources.stdlib.weight=1e39",
            "must be at most 3.403e+38 (float32). Set data.sources.stdlib.weight to at most",
        ),
        ("optimizer.eps=1e-300", "must be at least 1.175e-38: float32 makes 0 of what is smaller"),
        (
            "optimizer.weight_decay=1e-300",
            "must be 0 or at least 1.175e-38: float32 makes 0 of what is smaller",
        ),
        ("mesh.simulated_devices=1e9", "must be at most 4096"),
        ("data.prefetch=1e6", "must be at most 1024"),
        ("data.workers=5000", "must be at most 1024"),
        ("watchdog.step_seconds=1e12", "must be at most 100000000.0"),
        ("model.rope_theta=0.5", "must be at least 1"),
        ("model.norm_eps=1e-30", "must be at least 1e-12"),
        (
            "regularization.residual_dropout=0.99999999999",
            "must be less than 1. Set regularization.residual_dropout=0.1",
        ),
        (
            "optimizer.beta2=0.999999999999",
            "must be less than 1. Set for example optimizer.beta2=0.95",
        ),
    ],
)
def test_ranges(override, rule):
    (text,) = problems("config=quickstart", override)
    assert rule in text, text


def test_limits_of_float32_and_int32_are_inside():
    free = {"low": None, "above": None, "high": None}
    for value in (2.0**-126, -(2.0**-126), 0.0, 3.4028234663852886e38, 2**31 - 1, True, "x", None):
        assert out_of_range("a", value, free) is None
    for value in (2.0**-127, 3.4028235677973366e38, 2**31):
        assert out_of_range("a", value, free)


# The environment


@pytest.mark.parametrize("value", ["1", "true", "True", "yes", "on"])
def test_wide_types_are_refused(value):
    with pytest.raises(
        ConfigError,
        match=f"JAX_ENABLE_X64={value} in the environment .* Unset it: `env -u JAX_ENABLE_X64",
    ):
        check_environment({"JAX_ENABLE_X64": value})
    check_environment({"JAX_ENABLE_X64": "0"})
    check_environment({"JAX_ENABLE_X64": ""})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--nonsense=1", "Unknown flag in XLA_FLAGS: --nonsense=1"),
        (
            "--xla_force_host_platform_device_count=abc",
            "Couldn't interpret value abc for flag xla_force_host_platform_device_count",
        ),
        ("nonsense", 'Could not open file "nonsense"'),
    ],
)
def test_flags_that_xla_does_not_know(flags, said):
    with pytest.raises(ConfigError) as caught:
        check_environment(os.environ | {"XLA_FLAGS": flags})
    assert f"XLA_FLAGS={flags} in the environment" in str(caught.value) and said in str(
        caught.value
    )
    assert "Correct or unset it." in str(caught.value)


@pytest.mark.parametrize("verb", ["generate", "replay", "supervise"])
def test_verbs_that_compute_say_so(verb, monkeypatch, capsys):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    assert cli.main([verb, "x"]) == 78
    assert "JAX_ENABLE_X64=1 in the environment" in capsys.readouterr().err
    assert cli.main(["status", "/nowhere"]) not in (0, 78)


def test_flags_that_xla_knows():
    check_environment(os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})
    check_environment(os.environ | {"XLA_FLAGS": " "})


def test_the_command_says_so_with_78(tmp_path):
    code, said = end_of(
        "maxtrain.train", "config=quickstart", JAX_ENABLE_X64="1", XLA_FLAGS="--nonsense=1"
    )
    assert (
        code == 78
        and "2 problems in the config" in said
        and "JAX_ENABLE_X64=1" in said
        and "XLA_FLAGS=--nonsense" in said
    )
    assert "Traceback" not in said


# Whatever else

PATHS = [key.path.replace("NAME", "stdlib").replace("[0]", "") for key in keys.all_keys()]
NASTY = [
    "", "~", "null", "[]", "{}", "[", "{", "&a [*a]", "{<<: 3}", "!!int x", "!!timestamp x", "0b_",
    "2020-99-99", "1e39", "-1e39", "1e-300", "nan", "inf", "-0", "9" * 5000, "0x1F", "\x00", "\ud800",
    "\x85", "a\nb", "~nobody/x", "s3://x", "file://", "/dev/null", "/", "..", "*", "[[[[]]]]",
    "{a: {path: x}}", "{1: 2}", "[{}]", "[{name: wsd}]", "[{until: 1}, {}]", "(", "a**", "(?P<", "-1", "1",
    "2", "0.5", "true", "off", "auto", "x" * 3000,
]  # fmt: skip
YAML_WORDS = st.sampled_from(
    [
        *NASTY,
        *(path.rpartition(".")[2] for path in PATHS),
        ": ",
        "\n",
        "\n  ",
        "- ",
        ", ",
        "}",
        "]",
        "? ",
        "<<",
        "#",
        "'",
    ]
)


@contextlib.contextmanager
def check_only_messages():
    """Nothing but a UserError, each with whole sentences."""
    try:
        yield
    except UserError as error:
        assert error.exit_code in (64, 78) and str(error).endswith((".", "?", "`"))


@functools.cache
def folder() -> Path:
    import tempfile  # noqa: PLC0415

    return Path(tempfile.mkdtemp(prefix="hostile-"))


@pytest.mark.every_dose
@pytest.mark.long
@settings(deadline=None, max_examples=80)
@given(
    st.dictionaries(
        st.sampled_from(PATHS), st.sampled_from(NASTY) | st.text(max_size=8), min_size=1, max_size=6
    )
)
@example({"output_dir": "\0"})
@example({"data.sources.stdlib.path": "\0", "checkpoint.copy_to": "\0"})
def test_hostile_overrides(overrides):
    with check_only_messages():
        load_config(["config=quickstart", *(f"{key}={value}" for key, value in overrides.items())])


@pytest.mark.long
@pytest.mark.every_dose
@settings(deadline=None, max_examples=150)
@given(st.lists(YAML_WORDS, max_size=12).map("".join) | st.text(max_size=60))
def test_hostile_yaml(text):
    path = folder() / "c.yaml"
    path.write_text(text, "utf-8", errors="surrogatepass")
    with check_only_messages():
        load_config([f"config={path}", "data.sources.a.path=b"])


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(NASTY)
)
TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.every_dose
@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from(PATHS), TREES, min_size=1, max_size=5))
def test_hostile_values_of_a_file(values):
    config = default_config()
    config.data.sources.stdlib = {"path": "x"}
    for path, value in values.items():
        section, _, leaf = path.rpartition(".")
        with contextlib.suppress(
            KeyError, TypeError, AttributeError, ValueError
        ):  # ConfigDict's own
            (config[section] if section else config)[leaf] = value
    from maxtrain.config import resolve  # noqa: PLC0415

    with check_only_messages():
        resolve(config)
