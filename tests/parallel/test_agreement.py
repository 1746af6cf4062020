"""The reports of the processes of a job are compared; those that differ, or are missing, are
named."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from data_pipeline.base.errors import LostProcessError, StorageError
from maxtrain.checkpoint.listing import as_storage_error
from maxtrain.parallel import agreement
from maxtrain.parallel.agreement import (
    differences,
    gather,
    is_loss,
    losing_others,
    raise_together,
    require_agreement,
)

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, time
import jax
from data_pipeline.base.errors import UserError
import numpy as np
from maxtrain.parallel.agreement import await_first, from_first, from_one, gather, require_agreement
from maxtrain.parallel.agreement import forget, broadcast_text

jax.config.update("jax_platforms", "cpu")
index = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], 2, index)
mine = np.full(3, 250 + index, np.uint8)
said = gather({"step": 7, "rows": "abc", "process": index})
print(said, from_first(mine).tolist(), flush=True)
long = "ab" * (3 << 19)
heard = [broadcast_text("long", long * (index == 0)), broadcast_text("short", str(index), 1), broadcast_text("no", "")]
print(heard[0] == long, heard[1:], from_one(mine, 1).tolist(), flush=True)
if index == 0:
    forget("long")
try:
    require_agreement("first", {"data.seed": "1", "jax": "0.12"})
    print("agreed", flush=True)
    require_agreement("second", {"data.seed": str(index), "jax": "0.12"})
except UserError as error:
    print(error.exit_code, error, flush=True)
try:
    begin = time.monotonic()
    if index == 0:
        require_agreement("third", {}, timeout_seconds=1)
except UserError as error:
    print(error.exit_code, error, flush=True)
try:
    await_first("fourth", 60)
    print("process 0 has come", time.monotonic() - begin > 0.9, flush=True)
    if index == 1:
        await_first("fifth", 0.5)
    time.sleep(2)
except UserError as error:
    print(error.exit_code, error, flush=True)
"""


def test_a_single_process_agrees_with_itself():
    require_agreement("launch", {"seed": "1"})
    assert gather({"step": 1}) == [{"step": 1}]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (
            jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"),
            True,
        ),
        (
            ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"),
            True,
        ),  # of a program that is called
        (LostProcessError("process 0 did not come"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (ValueError("the gloo of this config is no number"), False),
        (StorageError("UNKNOWN: Gloo"), False),
    ],
)
def test_the_loss_of_a_process_is_told_from_other_errors(monkeypatch, error, lost):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert is_loss(error) == lost
    with pytest.raises(LostProcessError if lost else type(error)) as raised, losing_others():
        raise error
    assert (raised.value is error) == (not lost or isinstance(error, LostProcessError))


def test_a_loss_while_processes_tell_each_other_is_no_error_of_what_they_tell(monkeypatch):
    """The report may be about the checkpoint that they read."""

    def lose(rows):
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")

    between = agreement._between_processes()._replace(everywhere=lose)
    monkeypatch.setattr(agreement, "_between_processes", lambda: between)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *args: None)
    with (
        pytest.raises(LostProcessError, match="run the same command again"),
        as_storage_error("reading", "Remove it."),
    ):
        raise_together(None)


@pytest.mark.parametrize("text", ["\U0001f600" * 600, "\udcff" * 600, '"\n' * 600])
def test_six_hundred_characters_of_any_kind_fit_where_errors_are_told(text):
    assert gather({"code": 74, "text": text}, 4096) == [{"code": 74, "text": text}]


def test_the_processes_and_fields_that_differ_from_most_are_named():
    usual = {"data": "aa", "jax": "0.12.0"}
    said = {i: (f"host{i}", usual) for i in range(5)} | {
        5: ("host5", usual | {"jax": "0.11.0"}),
        6: ("host6", {"data": "bb"}),
    }
    assert differences(said) == [
        "process 6 on host6: data is bb, but aa elsewhere",
        "process 5 on host5: jax is 0.11.0, but 0.12.0 elsewhere",
        "process 6 on host6: jax is missing, but 0.12.0 elsewhere",
    ]
    assert differences(dict.fromkeys(range(3), ("host", usual))) == []


@pytest.mark.long
@pytest.mark.processes
def test_two_processes_end_alike_and_one_that_does_not_come_is_named():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, address, str(i)], **pipes)
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=700) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index, (out, err) in enumerate(outputs):
        lines = [line for line in out.splitlines() if "Gloo" not in line]
        said = [{"step": 7, "rows": "abc", "process": i} for i in range(2)]
        told = lines.pop(1)
        assert told == "True ['1', ''] [251, 251, 251]", err
        assert lines[:2] == [f"{said} [250, 250, 250]", "agreed"], err
        assert lines[2].startswith("65 second: the processes of this job have different settings:")
        assert f"process 1 on {socket.gethostname()}: data.seed is 1, but 0 elsewhere" in lines[3]
        assert index or "75 third: process 1 did not come within 1 s; 2 are expected." in lines[5]
        assert "process 0 has come True" in lines
        assert (
            not index
            or "75 fifth: process 0 did not come within 0.5 s. See its log, then run the same"
            in lines[-1]
        )
