"""Runners: a Ray cluster gives what this machine alone gives, goes on where it was, and fails as it
would."""

import json
import os
import re
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
import tokenizers

from data_pipeline.base.errors import StorageError, TryAgainError
from data_pipeline.base.remote import place
from data_pipeline.prepare import build, runner
from data_pipeline.prepare import command as prepare
from data_pipeline.prepare.runner import open_runner
from data_pipeline.shards import Manifest
from data_pipeline.sources import FORMATS
from data_pipeline.sources.document import Document, InputRange
from data_pipeline.tokenizer import load_tokenizer, train_bpe

CLUSTER = """
import ray, sys
started = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print(started.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def on_ray():
    """Options that use a Ray cluster of two CPUs, in processes of its own."""
    command, pipe = [sys.executable, "-c", CLUSTER], subprocess.PIPE
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("USAGE_STATS_ENABLED", "0"),
            ("AUTH_MODE", "token"),
            ("AUTH_TOKEN", uuid.uuid4().hex),
        ):
            patch.setenv(f"RAY_{name}", value)
        pytest.importorskip("ray")  # reads them when it is imported, and keeps them
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdout is not None
            yield [
                "--runner",
                "ray",
                "--runner-options",
                f"address={process.stdout.readline().strip()}",
            ]
            process.communicate("")


def contents(directory):
    """Every file below a directory, by relative name."""
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """Options, relative to the working directory, of text and conversations, repeated, and of a
    line that is not clean."""
    monkeypatch.chdir(tmp_path)
    texts = [f"document {number % 700} of some words " * (number % 7 + 1) for number in range(1500)]
    for number, text in enumerate(texts[:40]):
        Path(f"text{number}.txt").write_text(text)
    Path("lines.jsonl").write_text(
        "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts)) + "{\n"
    )
    said = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "words"}]
        for text in texts
    ]
    Path("said.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in said))
    inner = tokenizers.Tokenizer.from_str(train_bpe(texts, 300).content.decode())
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    inner.save("tokenizer.json")
    given = ["--tokenizer", "tokenizer.json", "--chat", "said.jsonl", "--chat-template", "chatml"]
    given += ["--eod", "append"]
    return ["--text", "*.txt", "--jsonl", "lines.jsonl", *given, "--holdout", "0.1", "--dedupe"]


@pytest.mark.long
@pytest.mark.processes
def test_a_cluster_gives_the_same_bytes_and_goes_on_where_it_was(
    inputs, tmp_path, on_ray, monkeypatch, capsys
):
    assert prepare.main(["bad", *inputs, "--workers", "1"]) == 65
    error = capsys.readouterr().err
    assert "lines.jsonl:1501: broken JSON. Correct the file" in error
    assert prepare.main(["bad", *inputs, *on_ray]) == 65
    assert capsys.readouterr().err.splitlines()[-1] == error.splitlines()[-1] and not contents(
        tmp_path / "bad"
    )
    inputs += ["--on-bad", "skip"]
    assert prepare.main(["one", *inputs, "--workers", "1"]) == 0
    wanted, advance = contents(tmp_path / "one"), prepare.Progress.advance
    assert len(wanted) > 40 and json.loads(wanted["train/manifest.json"])["problems"]

    def interrupted(*args):
        if any(Path("two/.prepare/train").glob("*.json")):
            raise KeyboardInterrupt
        advance(*args)

    with monkeypatch.context() as patch:
        patch.setattr(prepare.Progress, "advance", interrupted)
        assert prepare.main(["two", *inputs, *on_ray]) == 75
    assert "interrupted. Run the same command again" in capsys.readouterr().err
    done = {path: path.stat().st_mtime_ns for path in Path("two/.prepare/train").glob("*.json")}
    shards = {path: path.stat().st_mtime_ns for path in Path("two/train").glob("*.bin")}
    assert done and not Path("two/train/manifest.json").exists()
    assert prepare.main(["two", *inputs, *on_ray]) == 0
    assert "tokens/s, on ray" in capsys.readouterr().out
    assert contents(tmp_path / "two") == wanted
    assert sum(path.stat().st_mtime_ns == time for path, time in shards.items()) >= len(done)


@pytest.mark.long
@pytest.mark.processes
def test_a_cluster_leaves_out_duplicates_behind_a_url(inputs, tmp_path, on_ray, s3_server):
    """The machines share only the bucket; variables of the service are given as `ray.init` takes
    them."""
    bucket = place(f"s3://bucket/{tmp_path.name}")
    for file in (*Path().glob("*.txt"), Path("lines.jsonl")):
        (bucket / "in" / file.name).upload(file)
    given = [
        "--text",
        f"{bucket}/in/*.txt",
        "--jsonl",
        f"{bucket}/in/*.jsonl",
        "--dedupe",
        "--on-bad",
        "skip",
        "--cache",
        "cache",
    ]
    names = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    variables = "runtime_env=" + json.dumps({"env_vars": names})
    assert prepare.main([f"{bucket}/one", *given, "--workers", "1"]) == 0
    assert prepare.main([f"{bucket}/two", *given, *on_ray, variables]) == 0
    one, two = (
        {str(f.path)[len(str(bucket)) + 5 :]: f.path.read_bytes() for f in (bucket / name).files()}
        for name in ("one", "two")
    )
    assert one == two and len(one) > 4
    assert Manifest.load(bucket / "two").num_documents == 700


@pytest.mark.long
@pytest.mark.processes
def test_what_a_cluster_loses_or_does_not_see(on_ray, tmp_path, capsys):
    def die(_, unit):
        os._exit(1)

    with open_runner("ray", 1, on_ray[-1:]) as run:
        assert list(run(print, [])) == []
        with pytest.raises(
            TryAgainError,
            match=r"--runner ray: The worker died.*Run the same command again.*work is kept",
        ):
            list(run(die, [("", [])]))
        absent = InputRange("text", "a", str(tmp_path / "absent"), 0, 1)
        with pytest.raises(
            StorageError,
            match=r"absent: is not there on .*Give every machine the same file systems",
        ):
            list(run(print, [("", [absent])]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--runner", "ray", "--workers", "2"],
            "--workers 2: --runner ray has one for each CPU.*Leave it out",
        ),
        (
            ["--runner-options", "address=auto"],
            "--runner-options address=auto: belong to --runner ray. Give that too.",
        ),
        (
            ["--runner", "ray", "--runner-options", "auto"],
            "--runner-options auto: must be KEY=VALUE, such as address=auto",
        ),
        (
            ["--runner", "ray", "--runner-options", "adress=x"],
            "adress=x: Ray does not start .*Give arguments of ray.init",
        ),
    ],
)
def test_options_that_can_not_be_used(tmp_path, capsys, options, message):
    pytest.importorskip("ray")
    (tmp_path / "a.txt").write_text("text")
    assert prepare.main([str(tmp_path / "out"), "--text", f"{tmp_path}/a.txt", *options]) == 64
    assert re.search(message, capsys.readouterr().err, re.DOTALL)


@pytest.mark.every_dose
@pytest.mark.long
def test_a_runner_that_does_not_start_leaves_finished_work_as_it_is(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ray")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("text" * 20_000)
    out, given = tmp_path / "out", ["--text", f"{tmp_path}/?.txt"]

    def interrupted(job, tasks):
        job(*tasks[0])
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_local", lambda _, job, tasks: interrupted(job, tasks))
        assert prepare.main([str(out), *given, "--workers", "1"]) == 75
    before = contents(out)
    assert "tokens-00000.bin" in before and "manifest.json" not in before
    assert prepare.main([str(out), *given, "--runner", "ray", "--runner-options", "adress=x"]) == 64
    assert "Ray does not start" in capsys.readouterr().err and contents(out) == before


@pytest.mark.long
def test_two_attempts_at_one_unit_do_not_disturb_each_other(tmp_path, monkeypatch):
    """A machine that was thought lost writes on while another does its work."""
    both, tokenizer, failed = threading.Barrier(2), load_tokenizer("bytes"), []

    def documents(piece):
        for number in range(4):
            both.wait(20)
            yield Document(f"text {number}" * 50_000, "a")

    monkeypatch.setitem(FORMATS, "text", FORMATS["text"]._replace(documents=documents))
    tokenizer.save(tmp_path)
    (tmp_path / "work").mkdir()
    task = (
        tmp_path / "work/00000.json",
        [InputRange("text", "a", "a", 0, 1)],
        tmp_path,
        (tokenizer.sha256, 256),
        "append",
        "raise",
    )

    def attempt():
        try:
            build.encode_unit(*task)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed
    names = [
        "tokenizer.json",
        "tokens-00000.bin",
        "tokens-00000.crc",
        "tokens-00000.idx",
        "work/00000.json",
    ]
    assert sorted(contents(tmp_path)) == names
    (entry,) = json.loads((tmp_path / "work/00000.json").read_bytes())["shards"]
    assert (
        entry["documents"] == 4 and entry["bytes"] == (tmp_path / "tokens-00000.bin").stat().st_size
    )
