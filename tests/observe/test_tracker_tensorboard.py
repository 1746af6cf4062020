"""TensorBoard files hold every number, and a resumed run hides what came after the step it resumed
from."""

import struct
import subprocess
import sys

import pytest
from tensorboardX.proto import event_pb2

from data_pipeline.base.errors import UsageError
from maxtrain.config.schema import ObserveConfig
from maxtrain.observe.samples import CompletionSample
from maxtrain.observe.tracker import RunInfo
from maxtrain.observe.trackers.tensorboard import TensorBoard


def events(run):
    """The events of all files, oldest file first: records of (length, crc, bytes, crc)."""
    for path in sorted((run / "tensorboard").iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def begun(folder, step=0):
    """A tracker that shows a run from this step on."""
    board = TensorBoard(ObserveConfig())
    assert board.start(RunInfo(folder=folder, name="name", id="0123", step=step)) == ""
    return board


def test_scalars_by_kind_and_set(tmp_path):
    board = begun(tmp_path)
    board.log(10, {"loss": 2.5, "tokens_seen": 1000, "note": "x"}, "train")
    board.log(10, {"set": "val", "nll": 2.25, "perplexity": float("inf")}, "eval")
    board.finish("finished")
    found = {(e.step, v.tag): v.simple_value for e in events(tmp_path) for v in e.summary.value}
    assert found == {
        (10, "train/loss"): 2.5,
        (10, "train/tokens_seen"): 1000,
        (10, "eval/val/nll"): 2.25,
        (10, "eval/val/perplexity"): float("inf"),
    }


def test_samples_are_text(tmp_path):
    board = begun(tmp_path)
    board.show_samples(3, [CompletionSample("held", 0, "1+3=", "<4>", 1.5, {}, 4, False)])
    board.finish("finished")
    (value,) = [v for e in events(tmp_path) if e.step == 3 for v in e.summary.value]
    assert value.tag.startswith("samples/held")
    assert "| 1+3= | &lt;4> | reward 1.5 | 4 |" in value.tensor.string_val[0].decode()


def test_resuming_purges_later_steps(tmp_path):
    for resume_step in (0, 5):
        board = begun(tmp_path, resume_step)
        board.log(resume_step + 1, {"loss": 1.0}, "train")
        board.finish("finished")
    starts = [
        e.step for e in events(tmp_path) if e.session_log.status == event_pb2.SessionLog.START
    ]
    assert starts == [6]


def test_going_back_purges_later_steps(tmp_path):
    board = begun(tmp_path)
    board.log(8, {"loss": 1.0}, "train")
    board.rewind(5)
    board.log(6, {"loss": 2.0}, "train")
    board.finish("finished")
    starts = [
        e.step for e in events(tmp_path) if e.session_log.status == event_pb2.SessionLog.START
    ]
    assert starts == [6]


def test_a_package_that_is_missing_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        UsageError,
        match=r"needs tensorboardX, which is not installed.*pip install tensorboardX, or",
    ):
        TensorBoard(ObserveConfig())


PROGRAM = """
import sys
from pathlib import Path
from maxtrain.config.schema import ObserveConfig
from maxtrain.observe.tracker import RunInfo
from maxtrain.observe.tracking import Trackers
with Trackers() as trackers:
    info = RunInfo(folder=Path(sys.argv[1]), name="name", id="0123", step=0)
    trackers.begin(ObserveConfig(), info, print)
    for step in range(200):
        trackers.log(step, {"loss": 1.0, "tokens_seen": step}, "train")
"""


@pytest.mark.long
def test_a_full_disk_costs_records_and_not_the_end_of_the_process(tmp_path):
    """Files that may have no more bytes fail as those on a full disk do."""
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n" + PROGRAM
    words = [sys.executable, "-c", limited, str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr
    assert "observe.trackers: tensorboard failed (OSError: " in ended.stdout
