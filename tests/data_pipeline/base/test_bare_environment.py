"""The environment variables that reach a process that runs foreign code."""

import os
import subprocess
import sys

import pytest

from data_pipeline.base.bare_environment import bare_environment

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_ACCESS_KEY_ID": "secret",
    "HF_TOKEN": "secret",
    "HUGGING_FACE_HUB_TOKEN": "secret",
    "WANDB_API_KEY": "secret",
    "OPENAI_API_KEY": "secret",
    "GOOGLE_APPLICATION_CREDENTIALS": "/secret.json",
    "MLFLOW_TRACKING_PASSWORD": "secret",
    "SSH_AUTH_SOCK": "/secret",
    "https_proxy": "http://me:secret@proxy",
    "HTTPS_PROXY": "http://me:secret@proxy",
    "PIP_INDEX_URL": "https://me:secret@index",
    "LC_SECRET_1": "secret",
    "MY_PATH": "secret",
}
PLAIN = {
    "PATH": "/bin",
    "HOME": "/me",
    "LANG": "C.UTF-8",
    "LC_ALL": "C",
    "TMPDIR": "/tmp",
    "PYTHONPATH": "/code",
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def test_secrets_are_left_out():
    assert bare_environment(environment=SECRETS | PLAIN) == PLAIN


def test_named_variables_are_passed_on_where_they_are_set():
    found = bare_environment(["OPENAI_API_KEY", "NOT_SET"], SECRETS | PLAIN)
    assert found == PLAIN | {"OPENAI_API_KEY": "secret"}


def test_added_variables_win():
    assert bare_environment((), PLAIN, TZ="UTC", PATH="/usr/bin")["PATH"] == "/usr/bin"


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_a_process_with_it_runs_and_sees_no_secret(monkeypatch, name):
    monkeypatch.setenv(name, "secret")
    assert name not in bare_environment()


def test_python_starts_with_it(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    program = "import os, numpy; print('secret' in repr(dict(os.environ)), os.environ['PATH'])"
    shown = subprocess.run(
        [sys.executable, "-c", program], env=bare_environment(), capture_output=True, text=True
    )
    assert shown.stdout.split() == ["False", os.environ["PATH"]]
