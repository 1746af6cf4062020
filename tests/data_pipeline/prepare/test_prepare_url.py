"""prepare from URLs and to URLs: the same bytes as here, whatever happens on the way, and changed
input is noticed."""

import gzip
import json
import pickle
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.base import remote
from data_pipeline.base.errors import DataError
from data_pipeline.base.extras import install_command
from data_pipeline.base.remote import RemotePath, place
from data_pipeline.prepare import build, runner
from data_pipeline.prepare import command as prepare
from data_pipeline.shards import Manifest
from data_pipeline.sources import jsonl
from data_pipeline.sources.document import InputOptions

arrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
TEXTS = [f"document {n} é 東 of some length " * (n % 7 + 1) for n in range(120)]


def write_inputs(folder):
    """The documents in every format that is read from URLs; the option and the pattern of each."""
    (folder / "texts").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number:03d}.txt").write_bytes(text.encode())
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.jsonl.zst").write_bytes(zstd.compress(lines))
    table = arrow.table({"text": TEXTS})
    arrow.parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    (folder / "saved").mkdir()
    with arrow.ipc.new_stream(folder / "saved" / "data.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    with arrow.ipc.new_file(folder / "whole.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    (folder / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    documents = [np.array([*text.encode(), 256], "<u2") for text in TEXTS]
    flat = np.concatenate(documents)
    for name in ("a.bin", "a.npy", "web.bin"):
        flat.tofile(folder / name)
    np.save(folder / "b.npy", flat)
    sizes = np.array([len(ids) for ids in documents], "<i4")
    pointers, firsts = (
        (np.cumsum([0, *sizes])[:-1] * 2).astype("<i8"),
        np.arange(len(TEXTS) + 1).astype("<i8"),
    )
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(sizes), len(firsts))
    (folder / "web.idx").write_bytes(
        header + sizes.tobytes() + pointers.tobytes() + firsts.tobytes()
    )
    patterns = {
        "text": ["texts/*.txt"],
        "jsonl": ["*.jsonl", "a.jsonl.gz", "*.zst"],
        "parquet": ["*.parquet"],
    }
    patterns |= {
        "arrow": ["saved", "whole.arrow"],
        "nanogpt": ["a.bin"],
        "olmo": ["a.npy", "b.npy"],
        "megatron": ["web"],
    }
    return [(f"--{name}", pattern) for name in patterns for pattern in patterns[name]]


def send(folder, url):
    for file in folder.rglob("*"):
        if file.is_file():
            (place(url) / str(file.relative_to(folder))).upload(file)


def contents(base):
    """Every file of an output, by relative name, but for what belongs to its place: the command of
    the manifest."""
    if isinstance(base, Path):
        return {str(p.relative_to(base)): p.read_bytes() for p in base.rglob("*") if p.is_file()}
    return {str(f.path)[len(str(base)) + 1 :]: f.path.read_bytes() for f in base.files()}


@pytest.fixture
def run(tmp_path, capsys):
    def call(out, *arguments, code=0, workers=1):
        found = prepare.main(
            [
                str(out),
                *map(str, arguments),
                "--workers",
                str(workers),
                "--cache",
                str(tmp_path / "cache"),
            ]
        )
        shown = capsys.readouterr()
        assert found == code, shown.err
        assert "Traceback" not in shown.err
        return shown.err if code else shown.out

    return call


@pytest.fixture
def look(tmp_path, capsys):
    def call(verb, *arguments, code=0):
        capsys.readouterr()
        found = prepare.main([verb, *arguments, "--cache", str(tmp_path / "cache")])
        shown = capsys.readouterr()
        assert found == code, shown.err
        return shown

    return call


@pytest.mark.long
def test_every_format_is_read_from_urls_with_the_same_result(url, tmp_path, run):
    commands, uids = write_inputs(tmp_path / "in"), {}
    send(tmp_path / "in", url)
    for number, (option, pattern) in enumerate(commands):
        rest = ("--tokenizer", "bytes", "--holdout", "0.3")
        run(tmp_path / f"here{number}", option, tmp_path / "in" / pattern, *rest)
        run(tmp_path / f"there{number}", option, f"{url}/{pattern}", *rest)
        here, there = (contents(tmp_path / f"{name}{number}") for name in ("here", "there"))
        assert here.keys() == there.keys()
        assert sorted(name for name in here if here[name] != there[name]) == [
            ".prepare.json",
            "eval/manifest.json",
            "train/manifest.json",
        ]
        sides = [
            Manifest.load(tmp_path / f"{name}{number}" / "train") for name in ("here", "there")
        ]
        assert sides[0].uid == sides[1].uid and sides[0].sources == sides[1].sources
        uids[pattern] = sides[0].uid
    assert len(uids) == 11


@pytest.mark.long
@pytest.mark.every_dose
def test_an_output_behind_a_url_is_the_one_made_here(url, tmp_path, run, look):
    write_inputs(tmp_path / "in")
    command = (
        "--text",
        tmp_path / "in" / "texts" / "*.txt",
        "--tokenizer",
        "bpe:300",
        "--holdout",
        "0.2",
        "--dedupe",
    )
    run(tmp_path / "here", *command)
    assert "complete. Check it" in run(url, *command)
    here, there = contents(tmp_path / "here"), contents(place(url))
    assert here.pop(".prepare.json") != there.pop(
        ".prepare.json"
    )  # there, it says when each input file was written
    assert (
        here == there and len(here) == 10 and not list((tmp_path / "cache" / "prepare").iterdir())
    )
    assert "nothing to do" in run(url, *command)
    assert "every byte is as it was built" in look("verify", url).out
    assert look("show", f"{url}/train", "--document", "2").out in TEXTS
    assert (
        "segment 1"
        in look("show", f"{url}/train", "--row", "0", "--seq-length", "64", "--packing", "bins").out
    )
    (place(url) / "train" / "tokens-00000.bin").write_bytes(
        b"x" * len(there["train/tokens-00000.bin"])
    )
    assert "tokens-00000.bin: bytes 0 to " in look("verify", url, code=65).err


class UploadKill(BaseException):
    pass


@pytest.mark.long
def test_killed_at_any_upload_it_goes_on_to_the_same_bytes(url, tmp_path, run, monkeypatch):
    write_inputs(tmp_path / "in")
    command = ("--jsonl", tmp_path / "in" / "a.jsonl", "--parquet", tmp_path / "in" / "a.parquet")
    command += ("--tokenizer", "bpe:300", "--holdout", "0.2", "--dedupe")
    monkeypatch.setattr(build, "_MIN_UNIT_BYTES", 1 << 12)
    monkeypatch.setattr(build, "_MAX_UNIT_BYTES", 1 << 12)
    run(f"{url}/whole", *command)
    wanted = contents(place(url) / "whole")
    rng, kills, encoded = random.Random(1), 0, []
    upload, write, encode = RemotePath.upload, RemotePath.write_bytes, build.encode_unit

    def or_killed(real):
        def call(self, content):
            nonlocal kills
            if kills < 12 and rng.random() < 0.3:
                kills += 1
                if rng.random() < 0.5:
                    real(self, content)  # just after it
                raise UploadKill
            return real(self, content)

        return call

    monkeypatch.setattr(RemotePath, "upload", or_killed(upload))
    monkeypatch.setattr(RemotePath, "write_bytes", or_killed(write))
    monkeypatch.setattr(
        build, "encode_unit", lambda record, *rest: (encoded.append(record), encode(record, *rest))
    )
    while True:
        try:
            run(f"{url}/killed", *command)
            break
        except UploadKill:
            continue
    assert contents(place(url) / "killed") == wanted and kills == 12
    units = len(set(encoded))
    assert units > 4 and len(encoded) <= units + 12, "a finished unit is not done again"


@pytest.mark.long
def test_scratch_of_an_output_that_was_finished_elsewhere_is_removed(
    url, tmp_path, run, monkeypatch, capsys
):
    """This machine is interrupted in three builds; another one finishes one of them, and begins one
    with other settings."""
    write_inputs(tmp_path / "in")
    text, scratch = tmp_path / "in" / "texts" / "*.txt", tmp_path / "cache" / "prepare"
    command = ("--text", text, "--tokenizer", "bpe:300", "--dedupe")

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "encode_unit", interrupted)
        for name in "abc":
            run(f"{url}/{name}", *command, code=75)
        assert len(list(scratch.iterdir())) == len(list(scratch.glob("*/tokenizer.json"))) == 3
        elsewhere = ("--workers", "1", "--cache", str(tmp_path / "elsewhere"))
        again = [str(word) for word in (f"{url}/b", *command, "--on-bad", "skip", "--overwrite")]
        assert prepare.main([*again, *elsewhere]) == 75
    assert prepare.main([f"{url}/a", *map(str, command), *elsewhere]) == 0
    capsys.readouterr()
    assert (
        prepare.main(
            [f"{url}/d", *map(str, command), "--workers", "1", "--cache", str(tmp_path / "cache")]
        )
        == 0
    )
    (left,) = scratch.iterdir()
    assert json.loads((left / "of.json").read_bytes())["out"] == f"{url}/c"
    assert (
        f"{left}: is kept of a prepare that was interrupted (it is not finished). Run its command"
        in capsys.readouterr().err
    )
    assert "complete" in run(f"{url}/c", *command) and not list(scratch.iterdir())


@pytest.mark.long
def test_workers_need_nothing_of_the_machine_where_the_command_runs(
    url, tmp_path, run, monkeypatch
):
    """While a task runs, the command's own folder does not exist, as on the machines of a
    cluster."""
    write_inputs(tmp_path / "in")
    send(tmp_path / "in", f"{url}/in")
    command = (
        "--jsonl",
        f"{url}/in/*.jsonl.*",
        "--text",
        f"{url}/in/texts/*.txt",
        "--tokenizer",
        "bpe:300",
        "--dedupe",
    )
    monkeypatch.setattr(build, "_MIN_UNIT_BYTES", 1 << 11)
    monkeypatch.setattr(build, "_MAX_UNIT_BYTES", 1 << 11)
    run(f"{url}/here", *command, "--holdout", "0.2")
    tasks_run = []

    def elsewhere(_, job, tasks):
        for task in tasks:
            (tmp_path / "cache").rename(tmp_path / "unseen")
            pickle.loads(pickle.dumps(job))(*pickle.loads(pickle.dumps(task)))
            assert not (tmp_path / "cache").exists()
            (tmp_path / "unseen").rename(tmp_path / "cache")
            tasks_run.append(task)
            yield task

    monkeypatch.setattr(runner, "run_local", elsewhere)
    run(f"{url}/there", *command, "--holdout", "0.2")
    one, two = (contents(place(f"{url}/{name}")) for name in ("here", "there"))
    assert one == two and len(tasks_run) > 10
    kept = [Manifest.load(place(f"{url}/there/{part}")).num_documents for part in ("train", "eval")]
    assert sum(kept) == len(TEXTS) and min(kept) > 0


def test_outputs_that_no_other_process_would_find(tmp_path, run):
    pytest.importorskip("fsspec")
    (tmp_path / "a.txt").write_text("text")
    error = run("memory://out", "--text", tmp_path / "a.txt", code=64)
    assert "memory://out must be a path or one plain URL" in error and "s3://" in error


def test_a_service_whose_package_is_missing_says_what_to_install(tmp_path, run, monkeypatch):
    registry = pytest.importorskip("fsspec.registry")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    # Where a test before this one has loaded the package, fsspec does not look for it again.
    monkeypatch.delitem(registry._registry, "gs", raising=False)
    (tmp_path / "a.txt").write_text("text")
    for out, given in (
        ("gs://bucket/out", tmp_path / "a.txt"),
        (tmp_path / "out", "gs://bucket/*.txt"),
    ):
        error = run(out, "--text", given, code=64)
        assert "gs://bucket/" in error and "needs a package for gs:// (" in error
        assert f"Install it: {install_command('gcs')}" in error and not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_changed_input_is_noticed(url, tmp_path, run):
    write_inputs(tmp_path / "in")
    send(tmp_path / "in", url)
    for out in (tmp_path / "here", f"{url}/out"):
        command = ("--jsonl", f"{url}/a.jsonl", "--tokenizer", "bytes")
        run(out, *command)
        assert "nothing to do" in run(out, *command)
        changed = (tmp_path / "in" / "a.jsonl").read_bytes().replace(b"document 3", b"document 4")
        (place(url) / "a.jsonl").write_bytes(changed)
        assert "input files were written to since it was begun. Choose another OUT" in run(
            out, *command, code=64
        )
        (place(url) / "a.jsonl").write_bytes(changed)
        run(out, *command, "--overwrite")
        (place(url) / "a.jsonl").upload(tmp_path / "in" / "a.jsonl")
    (piece,) = jsonl.find(f"{url}/a.jsonl", InputOptions())
    (place(url) / "a.jsonl").write_bytes(changed)
    with pytest.raises(
        DataError, match=r"has changed since it was found. Let nobody write to the input"
    ):
        list(jsonl.documents(piece))


@pytest.mark.long
def test_a_network_that_fails_is_never_a_bad_document(url, tmp_path, run, monkeypatch):
    write_inputs(tmp_path / "in")
    send(tmp_path / "in", url)
    monkeypatch.setattr(remote, "_PAUSE", 0)
    fs = remote.load_package("fsspec", "remote", "").core.url_to_fs(url, use_listings_cache=False)[
        0
    ]
    monkeypatch.setattr(
        fs, "cat_ranges", lambda paths, *_, **__: [OSError("reset by peer") for _ in paths]
    )
    for option, pattern in (
        ("--jsonl", "a.jsonl.gz"),
        ("--text", "texts/*.txt"),
        ("--parquet", "a.parquet"),
        ("--arrow", "saved"),
    ):
        message = run(
            tmp_path / option,
            option,
            f"{url}/{pattern}",
            "--tokenizer",
            "bytes",
            "--on-bad",
            "skip",
            code=74,
        )
        assert (
            "failed 5 times (OSError: reset by peer), which may pass." in message
            and "run the same command again" in message
        )


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_what_can_not_be_read_from_a_url_says_so(url, tmp_path, run):
    place(f"{url}/folder/a.txt").write_bytes(b"text")
    for option in ("--arrayrecord", "--tfds"):
        error = run(tmp_path / "out", option, f"{url}/a", code=64)
        assert (
            f"{option} {url}/a: is read by a library that can't open URLs. Copy its files to a disk"
            in error
        )
    assert "matches no file. Check bucket and path" in run(
        tmp_path / "out", "--text", f"{url}/*.md", code=65
    )
    error = run(tmp_path / "out", "--text", f"{url}/folder", code=65)
    assert f"is a directory. Name its files: --text '{url}/folder/**/*" in error


@pytest.mark.long
@pytest.mark.processes
def test_workers_read_and_write_urls(url, tmp_path, run):
    write_inputs(tmp_path / "in")
    send(tmp_path / "in", f"{url}/in")
    command = ("--text", f"{url}/in/texts/*.txt", "--tokenizer", "bytes")
    for workers in (1, 2):
        run(f"{url}/out{workers}", *command, workers=workers)
    one, two = (contents(place(f"{url}/out{workers}")) for workers in (1, 2))
    assert one == two and len(one) > 4
