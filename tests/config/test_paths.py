"""Paths in a config: `~` means the same in all of them, and what can't be a directory is refused
before anything is made."""

import os
from pathlib import Path

import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.config import load_config, to_yaml
from maxtrain.config.keys import all_keys
from maxtrain.config.paths import path_keys
from maxtrain.config.run_path import local_folder, run_path, run_url

LOCAL = [
    "output_dir",
    "local_dir",
    "data.cache",
    "checkpoint.copy_to",
    "checkpoint.local",
    "observe.compilation_cache",
]
# A run on a disk does not use them.
OF_URLS = ("local_dir", "checkpoint.local")
_OTHERS = ["mesh.coordinator=localhost:1", "mesh.num_processes=2"]
ANY = ["data.sources.stdlib.path", "eval.sets.heldout.path", "checkpoint.init_from"]


def load(*overrides: str):
    if overrides and overrides[0].partition("=")[0] in OF_URLS:
        overrides = ("output_dir=s3://bucket/runs", *overrides)
    return load_config(["config=quickstart", *overrides])


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    (text,) = caught.value.problems
    return text


def paths(config) -> dict[str, str]:
    return {key: value for key, value, _ in path_keys(config)}


def test_every_key_that_sounds_like_a_path_is_one():
    words = ("_dir", "path", ".cache", "_cache", "copy_to", "init_from", ".local")
    sound = {key.path for key in all_keys() if key.path.endswith(words)}
    assert sound == {
        path.replace("stdlib", "NAME").replace("heldout", "NAME") for path in [*LOCAL, *ANY]
    }
    on_disk = paths(load("checkpoint.copy_to=a", "checkpoint.init_from=b"))
    assert {*on_disk, *paths(load("checkpoint.local=c"))} == {*LOCAL, *ANY}


@pytest.mark.parametrize("key", [*LOCAL, *ANY])
def test_a_home_is_expanded_when_the_config_is_read(key, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths(load(f"{key}=~/q"))[key] == f"{tmp_path}/q"
    assert paths(load(f"{key}=~root/q"))[key] == os.path.expanduser("~root/q") != "~root/q"
    assert paths(load(f"{key}=a/~"))[key] == "a/~"
    assert problem(f"{key}=~nobody-of-this-name/q").startswith(
        f"{key}=~nobody-of-this-name/q must begin with the home of a user"
    )


def test_homes_in_files_are_expanded_and_stay_so(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "c.yaml"
    file.write_text("output_dir: ~/q\ndata: {sources: {a: {path: ~/d}, b: {path: 's3://x/~/y'}}}\n")
    found = paths(load_config([f"config={file}"]))
    assert found["output_dir"] == f"{tmp_path}/q"
    assert (
        found["data.sources.a.path"] == f"{tmp_path}/d"
        and found["data.sources.b.path"] == "s3://x/~/y"
    )
    assert found["data.cache"] == f"{tmp_path}/.cache/maxtrain/shards"


def test_defaults_are_written_as_they_are_so_that_a_run_can_move_to_another_home(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path / "a"))
    (tmp_path / "config.yaml").write_text(to_yaml(load("output_dir=~/q")))
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    found = paths(load_config([f"config={tmp_path}/config.yaml"]))
    assert found["observe.compilation_cache"] == f"{tmp_path}/b/.cache/maxtrain/jax"
    assert found["data.cache"] == f"{tmp_path}/b/.cache/maxtrain/shards"
    assert found["output_dir"] == f"{tmp_path}/a/q"


@pytest.mark.parametrize("url", ["s3://bucket/runs", "gs://bucket", "file:///tmp/x", "memory://x"])
@pytest.mark.parametrize("key", LOCAL[1:])
def test_a_url_is_refused_where_it_would_be_a_folder_named_like_one(key, url):
    text = problem(f"{key}={url}")
    assert text.startswith(
        f"{key}={url} must be a directory, not a URL. Set {key} to where it is mounted (gcsfuse"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["output_dir=https://x/y"],
            "https:// is not known to have them. Set output_dir to a path",
        ),
        (["output_dir=s3://"], "must be a bucket and folders in it. Set output_dir=s3://BUCKET"),
        (["output_dir=s3://b/../c"], "must be a bucket and folders in it"),
        (["output_dir=gs://b", "checkpoint.copy_to=a"], "copy_to=a is for runs on a disk of their"),
        (["output_dir=s3://b", "observe.trackers=[mlflow]"], "Set observe.tracking.mlflow_uri"),
        (["run_name=x", "local_dir=work"], "local_dir=work is for runs behind a URL"),
        (["output_dir=s3://b", "run_name=x", "data.sources.stdlib.path=s3://b/x"], "is the data"),
        (
            ["output_dir=runs", "checkpoint.local=fast"],
            "checkpoint.local=fast is for runs behind a URL, and output_dir=runs is a path, so "
            "every save is on a disk anyway. Set output_dir to a URL",
        ),
        (
            ["output_dir=s3://b", "local_dir=work", "checkpoint.local=work/fast"],
            "checkpoint.local=work/fast is in local_dir=work, where a launch has only what is at "
            "the URL. Set checkpoint.local to a directory of its own",
        ),
        (
            ["output_dir=file://b/runs", "checkpoint.local=b/runs"],
            "checkpoint.local=b/runs is in output_dir=file://b/runs",
        ),
    ],
)
def test_what_a_run_behind_a_url_cannot_have_is_refused(words, message):
    assert message in problem(*words)


def test_a_process_works_on_a_run_behind_a_url_in_a_folder_of_its_own():
    first = load("local_dir=work", "run_name=x")
    second = load("local_dir=work", "run_name=x", "mesh.process_id=1", *_OTHERS)
    assert run_url(first) == run_url(second) == "s3://bucket/runs/x"
    assert run_path(first) == Path("work/s3/bucket/runs/x")
    assert run_path(second) == Path("work/s3/bucket/runs/x.process-1")
    fast = load("checkpoint.local=fast", "run_name=x", "mesh.process_id=1", *_OTHERS)
    assert local_folder(fast) == Path("fast/s3/bucket/runs/x") and local_folder(first) is None
    on_disk = load("output_dir=a", "run_name=x")
    assert run_url(on_disk) is None and run_path(on_disk) == Path("a/x")


@pytest.mark.parametrize("key", ANY)
def test_urls_of_data_stay_as_they_are(key):
    assert paths(load(f"{key}=s3://bucket/~/a"))[key] == "s3://bucket/~/a"


@pytest.mark.parametrize("key", [*LOCAL])
def test_a_file_where_a_directory_is_to_be(key, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for value in (file, file / "below" / "it"):
        text = problem(f"{key}={value}")
        assert text.startswith(
            f"{key}={value} must be a directory, and {file} is a file. Set {key} to another place"
        )
    (tmp_path / "link").symlink_to(tmp_path)
    assert paths(load(f"{key}={tmp_path}/link/new"))[key] == f"{tmp_path}/link/new"


def test_a_file_with_the_name_of_the_run(tmp_path):
    (tmp_path / "runs" / "quickstart").parent.mkdir()
    (tmp_path / "runs" / "quickstart").touch()
    text = problem(f"output_dir={tmp_path}/runs")
    assert (
        text.startswith("run_name=quickstart must be the name of a folder in output_dir")
        and "Set run_name to" in text
    )


@pytest.mark.parametrize("key", [*LOCAL, *ANY])
def test_nul_is_in_no_path(key, tmp_path):
    file = Path(tmp_path, "c.py")
    body = "config = default_config()\n    config.data.sources.stdlib = {'path': 'x'}\n"
    body += "    config.eval.sets.heldout = {'path': 'y'}\n"
    if key in OF_URLS:
        body += "    config.output_dir = 's3://bucket/runs'\n"
    section, _, leaf = key.rpartition(".")
    target = f"config.{section}" if section else "config"
    body += f"    {target}[{leaf!r}] = 'a\\0b'\n    return config\n"
    file.write_text(f"from maxtrain.config import default_config\ndef get_config():\n    {body}")
    with pytest.raises(ConfigError, match=r"must not have NUL characters.*without them") as caught:
        load_config([f"config={file}"])
    assert len(caught.value.problems) == 1


def test_bytes_that_are_no_utf8_are_refused():
    text = problem("output_dir=" + os.fsdecode(b"\xff"))
    assert "must be: text (not UTF-8). Write for example output_dir=runs." in text


def test_a_directory_under_two_names(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "e").symlink_to("d")
    for other in (f"{tmp_path}/d/", f"{tmp_path}/x/../d", f"{tmp_path}/e"):
        text = problem(f"data.sources.stdlib.path={tmp_path}/d", f"data.sources.more.path={other}")
        assert text.startswith(
            f"data.sources.more.path={other} is the directory of data.sources.stdlib.path too"
        )
        assert "Keep one of them, with the sum of both weights" in text
    text = problem("eval.sets.more.path=data/stdlib/eval")
    assert (
        text.startswith("eval.sets.more.path=data/stdlib/eval is the same as eval.sets.heldout")
        and "Leave one" in text
    )
    load(
        "eval.sets.more.path=data/stdlib/eval", "eval.sets.more.steps=3"
    )  # a part of it, more often
