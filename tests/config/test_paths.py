"""Paths in a config: `~` means the same in all of them, and what can't be a directory is refused
before anything is made."""

import os
from pathlib import Path

import pytest

from data_pipeline.errors import ConfigError
from maxtrain.config import load_config, to_yaml
from maxtrain.config.keys import all_keys
from maxtrain.config.paths import path_keys

LOCAL = [
    "output_dir",
    "data.cache",
    "checkpoint.copy_to",
    "checkpoint.init_from",
    "observe.compilation_cache",
]
ANY = ["data.sources.stdlib.path", "eval.sets.heldout.path"]


def load(*overrides: str):
    return load_config(["config=quickstart", *overrides])


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    (text,) = caught.value.problems
    return text


def paths(config) -> dict[str, str]:
    return {key: value for key, value, _ in path_keys(config)}


def test_every_key_that_sounds_like_a_path_is_one():
    words = ("_dir", "path", ".cache", "_cache", "copy_to", "init_from")
    sound = {key.path for key in all_keys() if key.path.endswith(words)}
    assert sound == {
        path.replace("stdlib", "NAME").replace("heldout", "NAME") for path in [*LOCAL, *ANY]
    }
    assert set(paths(load("checkpoint.copy_to=a", "checkpoint.init_from=b"))) == {*LOCAL, *ANY}


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
@pytest.mark.parametrize("key", LOCAL)
def test_a_url_is_refused_where_it_would_be_a_folder_named_like_one(key, url):
    text = problem(f"{key}={url}")
    assert text.startswith(
        f"{key}={url} must be a directory, not a URL. Set {key} to where it is mounted (gcsfuse"
    )


@pytest.mark.parametrize("key", ANY)
def test_urls_of_data_stay_as_they_are(key):
    assert paths(load(f"{key}=s3://bucket/~/a"))[key] == "s3://bucket/~/a"


@pytest.mark.parametrize(
    "key", ["output_dir", "data.cache", "checkpoint.copy_to", "observe.compilation_cache"]
)
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
