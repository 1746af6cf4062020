"""The main job, end to end: to the end, stopped, killed, refused, and over two processes.

All runs here train the same small model on the same small corpus. Runs inside this process share
its eight devices; the others pretend to have as many, so that they must give the same bits.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError, UserError
from data_pipeline.prepare import command as prepare
from data_pipeline.shards import Manifest, ShardWriter, TokenShards
from data_pipeline.tokenizer import ByteTokenizer
from maxtrain.checkpoint.frozen_params import all_arrays, stores
from maxtrain.checkpoint.integrity import read_commit
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config import load_config
from maxtrain.config.schema import CheckpointConfig
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main
from tests.support.shared import half_a_second

STEPS = 60
REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("this_process")


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file beside its data: 2 layers, 32 wide, 8 rows of 32 bytes, a mesh of 2 x 4."""
    folder = tmp_path_factory.mktemp("train")
    return tiny_run(
        folder,
        *("--holdout", "0.1"),
        texts=60,
        steps=STEPS,
        eval_interval=20,
        checkpoint_interval=8,
        model={"num_layers": 2, "embed_dim": 32, "mlp_dim": 64, "num_heads": 4},
        eval={"sets": {"heldout": {"path": str(folder / "data" / "eval")}}},
        optimizer={"learning_rate": 1e-2, "accumulation": 1},
        schedule={"warmup_steps": 5},
        checkpoint={"keep": 2},
    )


def train(config, run_name, *overrides):
    """Exit code of a run in this process."""
    return main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))


def command(config, run_name, *overrides):
    return [
        sys.executable,
        "-m",
        "maxtrain.train",
        f"config={config}",
        f"run_name={run_name}",
        *overrides,
    ]


def folder_of(config, run_name):
    return config.parent / "runs" / run_name


def numbers(folder, kind="train"):
    """The records that do not depend on the clock, floats as hex."""
    return [
        {
            k: v.hex() if isinstance(v, float) else v
            for k, v in record.items()
            if not re.search("second|mfu|_bytes", k)
        }
        for record in read_metrics(folder)
        if record["kind"] == kind
    ]


def final_state(folder):
    """Bits of every array of the newest checkpoint, and its record."""
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    step = folder / "checkpoints" / f"{checkpoints.latest():08d}"
    saved = all_arrays(step, read_commit(step))
    tree = {name: jax.ShapeDtypeStruct(tuple(x["shape"]), x["dtype"]) for name, x in saved.items()}
    state, record = checkpoints.restore(tree)
    checkpoints.close()
    return {name: np.asarray(x).tobytes() for name, x in state.items()}, record


@pytest.fixture(scope="module")
def finished(config):
    """The folder of a run that nothing disturbed."""
    assert train(config, "undisturbed", "observe.trackers=tensorboard", "observe.plot=true") == 0
    return folder_of(config, "undisturbed")


@pytest.mark.long
def test_records_have_the_norm_of_weights_memory_and_new_epochs(finished):
    records = [r for r in read_metrics(finished) if r["kind"] == "train"]
    assert all(r["weight_norm"] > 1 for r in records)
    assert len({r["weight_norm"] for r in records}) == len(records), "it moves with the weights"
    assert all(r["host_bytes"] > 1e8 for r in records)
    assert not any("device_bytes" in r or "device_peak_bytes" in r for r in records), "of CPUs"
    number = 1
    for record in records:
        begun = record.get("epoch_begun/text")
        if record["epochs/text"] > number + 1e-9:
            number += 1
            assert begun == number
        else:
            assert begun is None
    assert number > 1


def test_a_run_leaves_records_curves_checkpoints_and_its_config(config, finished):
    records = [r for r in read_metrics(finished) if r["kind"] == "train"]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert records[-1]["tokens_seen"] == sum(r["fill"] * 8 * 32 for r in records)
    assert all(
        r["skipped"] == 0 and r["tokens_per_second"] > 0 and 0 < r["mfu_causal"] < r["mfu"]
        for r in records
    )
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG") and list(
        finished.glob("**/events.out.*")
    )
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == [
        "00000056",
        f"{STEPS:08d}",
    ]
    resolved = load_config([f"config={finished / 'config.yaml'}"])
    assert resolved.model.vocab_size == ByteTokenizer().vocab_size and resolved.steps == STEPS
    _, record = final_state(finished)
    assert (
        record["step"] == record["num_steps"] == STEPS
        and record["tokens_seen"] == records[-1]["tokens_seen"]
    )


def test_evaluation_reads_every_held_out_token(config, finished):
    evals = [r for r in read_metrics(finished) if r["kind"] == "eval"]
    held_out = TokenShards.open(config.parent / "data" / "eval").num_tokens
    assert [(r["step"], r["set"], r["tokens"]) for r in evals] == [
        (step, "heldout", held_out) for step in (20, 40, 60)
    ]
    assert evals[-1]["bits_per_byte"] < evals[0]["bits_per_byte"]


@pytest.mark.long
def test_sets_have_their_own_times_sizes_and_batches_and_the_best_is_kept(config, finished, capsys):
    data = config.parent / "data" / "eval"
    often = [
        f"eval.sets.often.path={data}",
        "eval.sets.often.interval=2",
        "eval.sets.often.steps=1",
        "eval.sets.often.batch_size=16",
    ]
    ends = [f"eval.sets.end.path={data}", "eval.sets.end.interval=0"]
    assert train(config, "sets", *SHORT, *often, *ends, "checkpoint_interval=2") == 0
    evals = [r for r in read_metrics(folder_of(config, "sets")) if r["kind"] == "eval"]
    assert {(r["step"], r["set"]) for r in evals} == {
        (2, "often"),
        (4, "often"),
        (6, "end"),
        (6, "heldout"),
        (6, "often"),
    }
    part, whole = evals[0]["tokens"], next(r["tokens"] for r in evals if r["set"] == "end")
    assert part == min(16 * 32, whole) and whole == TokenShards.open(data).num_tokens
    mine = [r for r in evals if r["set"] == "often"]
    best = [min(mine[: i + 1], key=lambda r: r["nll"]) for i in range(3)]
    assert [r["best_step"] for r in mine] == [r["step"] for r in best]
    _, record = final_state(folder_of(config, "sets"))
    assert record["best"]["often"] == {"step": best[-1]["step"], "nll": best[-1]["nll"]}
    with pytest.raises(
        ConfigError, match=r"eval\.sets\.often\.steps=0 would evaluate nothing\. Set it to -1"
    ):
        train(config, "refused", "eval.sets.often.steps=0", *often[:1])


def test_the_loss_goes_down(finished):
    losses = [r["loss"] for r in read_metrics(finished) if r["kind"] == "train"]
    assert np.log(257) < losses[0] < np.log(257) + 1  # logits of deviation 1 cost half a nat
    assert np.mean(losses[-5:]) < 0.6 * losses[0], losses


def test_a_finished_run_has_nothing_to_do(config, finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in (finished / "checkpoints").rglob("*")}
    records = numbers(finished) + numbers(finished, "eval")
    assert train(config, "undisturbed") == 0
    assert f"Nothing to do: {finished} has all {STEPS} steps." in " ".join(
        capsys.readouterr().out.split()
    )
    assert {
        path: path.stat().st_mtime_ns for path in (finished / "checkpoints").rglob("*")
    } == before
    assert numbers(finished) + numbers(finished, "eval") == records


class Running:
    """A run in another process that can't get far unobserved: its output goes to a pipe that soon
    is full."""

    def __init__(self, *arguments):
        read, write = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        self.process = subprocess.Popen(
            arguments, stdout=write, stderr=subprocess.STDOUT, cwd=REPOSITORY
        )
        os.close(write)
        self.output, self.text = open(read, "rb", buffering=0), ""  # noqa: SIM115

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.output.close()

    def until(self, text):
        """Read on until a line that has this."""
        while line := self.output.readline().decode():
            self.text += line
            if text in line:
                return
        raise AssertionError(f"{text!r} did not come:\n{self.text}")

    def end(self):
        """Exit code; all output is in `text`."""
        self.text += self.output.read().decode()
        return self.process.wait(60)


@pytest.mark.long
@pytest.mark.processes
def test_interrupted_and_killed_is_as_never_stopped(config, finished):
    """SIGINT, then SIGKILL, each at some step, and the same command again: loss by loss,
    parameters, data, bit for bit."""
    folder, again = folder_of(config, "disturbed"), command(config, "disturbed")
    with Running(*again) as run:
        run.until(f"step  5/{STEPS}")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 75, run.text
    stopped = Checkpoints(folder / "checkpoints", CheckpointConfig()).latest()
    assert stopped is not None and 5 <= stopped < STEPS
    assert (
        f"SIGINT: stopped and saved at step {stopped:,} of {STEPS}. Run the same command again to go on."
        in run.text
    )
    assert [r["step"] for r in numbers(folder)] == list(range(1, stopped + 1))

    with Running(*again) as run:
        run.until(f"Goes on from step {stopped} in")
        run.until(f"step {stopped + 17}/{STEPS}")
        run.process.kill()
        assert run.end() == -signal.SIGKILL
    killed = numbers(folder)[-1]["step"]

    with Running(*again) as run:
        assert run.end() == 0, run.text
    resumed = next(step for step in range(STEPS) if f"Goes on from step {step} in" in run.text)
    assert (
        stopped < resumed <= killed
    )  # records of steps after the last checkpoint were dropped and written again

    for kind in ("train", "eval"):
        assert numbers(folder, kind) == numbers(finished, kind)
    (state, record), (expected, other) = final_state(folder), final_state(finished)
    assert state == expected and len(state) > 30
    own = ("config", "run", "metrics")  # its settings, its id, its log with the clock
    assert {k: v for k, v in record.items() if k not in own} == {
        k: v for k, v in other.items() if k not in own
    }


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["seed=1"],
            "before step 60 this run has read other data than this config describes: seed was 0 and is 1",
        ),
        (
            ["data.seq_length=16"],
            "before step 60 this run has read other data than this config describes: data.seq_length was 32 and is 16",
        ),
        (
            ["model.mlp_dim=96"],
            r"params\.layers\.0\.mlp\.up\.kernel +float32\[2, 32, 64\] +float32\[2, 32, 96\]",
        ),
        (["model.tie_embeddings=true"], r"params\.head\.kernel +float32\[32, 257\] +missing"),
        (
            ["model.rope_theta=1e4"],
            r"model\.rope_theta=10000\.0 must be 500000\.0, as until step 60 of this run.*"
            r"Set model\.rope_theta=500000\.0",
        ),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "-",
)
def test_going_on_with_something_else_is_refused(config, finished, capsys, overrides, message):
    before = (finished / "config.yaml").read_bytes(), (finished / "metrics.jsonl").read_bytes()
    assert train(config, "undisturbed", *overrides) == 78
    error = capsys.readouterr().err
    assert re.search(message, error) and "set run_name to a new name to start afresh" in error
    assert (
        (finished / "config.yaml").read_bytes(),
        (finished / "metrics.jsonl").read_bytes(),
    ) == before


@pytest.mark.long
def test_more_steps_go_on_where_fewer_ended(config, finished, capsys):
    shutil.copytree(finished, folder_of(config, "longer"))
    assert train(config, "longer", f"steps={STEPS + 4}", "eval_interval=0") == 0
    assert (
        f"The run was planned for {STEPS} steps and has {STEPS + 4} now" in capsys.readouterr().out
    )
    records = numbers(folder_of(config, "longer"))
    assert records[:STEPS] == numbers(finished) and [r["step"] for r in records[STEPS:]] == [
        61,
        62,
        63,
        64,
    ]


SHORT = ("steps=6", "eval_interval=0", "schedule.warmup_steps=1")


@pytest.mark.long
def test_changed_data_is_accepted_from_the_checkpoint_on_if_the_config_says_so(
    config, finished, capsys
):
    """Twice the rows a step from there on; killed after the next checkpoint, the same command gives
    the same run."""
    change = [
        "data.accept_changes=true",
        "data.batch_size=16",
        f"steps={STEPS + 6}",
        "checkpoint_interval=3",
        "eval_interval=0",
    ]
    folder = folder_of(config, "accepted")
    shutil.copytree(finished, folder)
    runs = []
    for accepted in (True, False):  # printed once; afterwards it is what the run was trained on
        assert train(config, "accepted", *change[0 if accepted else 1 :]) == 0
        out = capsys.readouterr().out
        assert ("is not what this config says: accepted, by data.accept_changes" in out) == accepted
        runs.append((numbers(folder)[STEPS:], final_state(folder)[0]))
        shutil.rmtree(folder / "checkpoints" / f"{STEPS + 6:08d}")
    assert runs[0] == runs[1] and len({record["batch"] for record in runs[0][0]}) == 6
    assert train(config, "accepted", *change[1:], "seed=5") == 78, (
        "another change is another question"
    )
    tokens = np.diff([record["tokens_seen"] for record in numbers(folder)])
    assert tokens[STEPS:].min() > 1.5 * tokens[: STEPS - 1].max()


@pytest.mark.long
def test_stages_may_change_the_shape_of_a_batch(config, capsys):
    stages = "data.stages=[{until: 2, batch_size: 16}, {until: 4, seq_length: 16}, {}]"
    assert train(config, "shapes", *SHORT, stages, "log_interval=1") == 0
    records = [r for r in read_metrics(folder_of(config, "shapes")) if r["kind"] == "train"]
    tokens = [r["fill"] for r in records] * np.array([16 * 32] * 2 + [8 * 16] * 2 + [8 * 32] * 2)
    assert np.diff([0, *(r["tokens_seen"] for r in records)]).tolist() == tokens.tolist()
    assert (
        "from step 2 on 8 x 16, every source in a fresh pass; from step 4 on 8 x 32"
        in capsys.readouterr().out
    )


@pytest.mark.long
def test_numbers_that_are_not_finite_end_the_run_after_max_skipped(config, capsys):
    assert (
        train(
            config, "diverged", *SHORT[1:], "optimizer.learning_rate=1e15", "anomaly.max_skipped=3"
        )
        == 70
    )
    error = capsys.readouterr().err
    assert "4 steps in a row were not finite" in error and "Lower optimizer.learning_rate" in error
    records = read_metrics(folder_of(config, "diverged"))
    assert [r["skipped"] for r in records] == [0, 1, 2, 3] and np.isnan(records[-1]["loss"])


@pytest.fixture(scope="module")
def without_targets(config):
    """Overrides that make the batches of steps 3 and 4 of 6 have no target: documents of one token,
    ends not marked."""
    folder, tokenizer = config.parent / "ones", ByteTokenizer()
    folder.mkdir()
    writer = ShardWriter(folder, "tokens-00000", tokenizer.vocab_size)
    writer.append(np.full(600, 65), np.ones(600, np.int64))
    tokenizer.save(folder)
    described = Manifest.load(config.parent / "data" / "train").tokenizer
    Manifest(described, "uint16", "none", 600, (writer.close(),)).save(folder)
    stages = (
        "[{until: 2, weights: {text: 1}}, {until: 4, weights: {ones: 1}}, {weights: {text: 1}}]"
    )
    return [*SHORT, f"data.sources.ones.path={folder}", f"data.stages={stages}"]


@pytest.mark.long
def test_a_batch_without_targets_is_an_error(config, without_targets, capsys):
    assert train(config, "raise", *without_targets) == 65
    assert "step 3: the batch has 0 target tokens" in (error := capsys.readouterr().err)
    assert "or set data.zero_weight to stop or warn" in error


@pytest.mark.long
def test_what_ends_a_run_that_is_asked_to_stop_is_written_down(
    config, without_targets, monkeypatch
):
    monkeypatch.setenv("MAXTRAIN_FAILPOINT", "data:term:4")
    options = [
        *without_targets,
        "data.zero_weight=stop",
        "log_interval=100",
        "checkpoint_interval=0",
    ]
    assert train(config, "both", *options) == 75
    monkeypatch.delenv("MAXTRAIN_FAILPOINT")
    assert train(config, "both", *options) == 0
    assert [record["step"] for record in numbers(folder_of(config, "both"), "end")] == [3]


@pytest.mark.long
def test_or_it_ends_the_run_in_good_order(config, without_targets, capsys):
    assert train(config, "stop", *without_targets, "data.zero_weight=stop") == 0
    printed = capsys.readouterr().out
    assert (
        printed.count("the run stops here") == 3
    )  # when it happens, in the summary, and in the last line
    early = "ENDED EARLY at step 3 of 6: step 3: the batch has 0 target tokens"
    assert (
        printed.splitlines()[-1].startswith(early)
        and "data.zero_weight=warn to go on" in printed.splitlines()[-1]
    )
    assert Checkpoints(folder_of(config, "stop") / "checkpoints", CheckpointConfig()).latest() == 3
    [record] = numbers(folder_of(config, "stop"), "end")
    assert (
        record["step"] == 3
        and record["planned_steps"] == 6
        and record["ending"].startswith("step 3: the batch has 0")
    )
    records = read_metrics(folder_of(config, "stop"))
    assert train(config, "stop", *without_targets, "data.zero_weight=stop") == 0
    again = capsys.readouterr().out
    assert "stop ended early, and would again: step 3: the batch has 0 target" in " ".join(
        again.split()
    )
    assert (
        again.splitlines()[-1] == printed.splitlines()[-1]
        and read_metrics(folder_of(config, "stop")) == records
    )
    assert train(config, "stop", *without_targets, "data.zero_weight=warn") == 0
    assert (
        "ENDED EARLY" not in (on := capsys.readouterr().out)
        and "batches of 2 steps (data.zero_weight)" in on
    )
    assert [r["step"] for r in numbers(folder_of(config, "stop"))] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_or_it_is_told_and_changes_nothing(config, without_targets, capsys):
    assert (
        train(
            config,
            "warn",
            *without_targets,
            "data.zero_weight=warn",
            "checkpoint_interval=1",
            "checkpoint.keep=9",
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        "weights stay as they are (2 such steps)" in printed
        and "batches of 2 steps (data.zero_weight)" in printed
    )
    assert [r["skipped"] for r in numbers(folder_of(config, "warn"))] == [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize(
    "overrides, code, message",
    [
        (["mesh.data=1"], 78, "Set mesh.data to 2"),
        (["model.vocab_size=100"], 78, "Set model.vocab_size to 257 or more, or to null."),
        (["data.sources.text.path=nowhere"], 65, "data.sources.text.path"),
        (["data.batch_size=12"], 78, "Set data.batch_size to 8 or 16"),
        (
            ["eval.sets.heldout.path=DATA/train"],
            78,
            "shards that data.sources.text trains on, such as tokens-00000.bin",
        ),
        (
            ["data.stages=[{until: 9, batch_size: 12}, {}]"],
            78,
            "Set data.stages[0].batch_size to 8 or 16",
        ),
        (["data.stages=[{seq_length: 99999}]"], 78, "Set data.stages[0].seq_length=32 or less"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "-",
)
def test_what_the_user_can_mend_is_a_message_and_an_exit_code(
    config, capsys, overrides, code, message
):
    try:
        result = train(
            config,
            "refused",
            *(text.replace("DATA", str(config.parent / "data")) for text in overrides),
        )
    except UserError as error:  # found while the config was read, where the command line does what `main` does later
        result, text = error.exit_code, str(error)
    else:
        text = capsys.readouterr().err
    assert result == code and message in text
    assert not folder_of(config, "refused").exists()


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.processes
def test_two_processes_are_as_one(config):
    """Two processes of one device each, and one process with two: the same losses, and the files of
    one run, with frozen parameters too."""
    keys = [*SHORT[::2], "eval_interval=3", "mesh.data=1", "checkpoint_interval=3"]
    keys.append("train.freeze=[embedding]")
    launched = "launch local --processes 2".split()
    launched += [f"config={config}", "run_name=two", "mesh.simulated_devices=1", "mesh.fsdp=2"]
    commands = [
        [sys.executable, "-m", "maxtrain.cli", *launched, *keys],
        command(config, "one", *keys, "mesh.simulated_devices=2", "mesh.fsdp=2"),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # Only process 0 of a job writes to the cache of compiled programs, so the other one always
    # compiles: quickly, then.
    quick = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    processes = [subprocess.Popen(c, cwd=REPOSITORY, env=quick, **pipes) for c in commands]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    lines = outputs[0].splitlines()
    assert all(line.startswith(("[0] ", "[1] ")) for line in lines), outputs[0]
    # Process 0 speaks.
    assert not [line for line in lines if line.startswith("[1] ") and "loss" in line]
    two, one = (read_metrics(folder_of(config, name)) for name in ("two", "one"))
    assert [(r["kind"], r["step"]) for r in two] == [(r["kind"], r["step"]) for r in one] and len(
        two
    ) == 8
    for name in ("loss", "grad_norm", "nll", "tokens_seen", "fill", "learning_rate"):
        ours, theirs = ([r[name] for r in records if name in r] for records in (two, one))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=name)
    assert (
        final_state(folder_of(config, "two"))[1]["data"]
        == final_state(folder_of(config, "one"))[1]["data"]
    )
    frozen = []
    for name in ("two", "one"):
        (store,) = stores(folder_of(config, name) / "checkpoints")
        frozen.append(json.loads((store / "commit.json").read_text()))
    assert frozen[0]["arrays"] == frozen[1]["arrays"] and len(frozen[0]["arrays"]) == 1


@pytest.mark.long
@pytest.mark.processes
def test_processes_that_are_not_about_to_do_the_same_all_end_and_name_the_odd_one(config):
    shutil.copytree(
        config.parent / "data", config.parent / "copy", dirs_exist_ok=True
    )  # where a host keeps its data is free
    job = [
        f"mesh.coordinator=localhost:{free_port()}",
        "mesh.num_processes=2",
        "mesh.simulated_devices=1",
        "mesh.fsdp=2",
    ]
    odd = ["seed=7", f"data.sources.text.path={config.parent / 'copy' / 'train'}"]
    commands = [
        command(config, "apart", *SHORT, "mesh.data=1", *job, f"mesh.process_id={i}", *(odd * i))
        for i in range(2)
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(c, cwd=REPOSITORY, **pipes) for c in commands]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [65, 65], "\n".join(outputs)
    for output in outputs:
        assert (
            f"process 1 on {socket.gethostname()}: seed is 7, but 0 elsewhere" in output
            and "data is " in output
        )
        assert ".path is" not in output and "process 0 on" not in output
    assert not folder_of(config, "apart").exists()


def measured(program, *arguments):
    """Standard output, and CPU seconds, of a Python program in a process of its own."""
    ending = "\nimport time; print(time.process_time(), *sorted({'jax', 'orbax', 'grain'} & set(sys.modules)), file=sys.stderr)"
    code = "import runpy, sys\n" + textwrap.dedent(program) + ending
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, *modules = result.stderr.splitlines()[-1].split()
    return result.stdout, float(seconds), modules


@pytest.mark.processes
def test_help_is_fast_and_does_without_jax():
    program = """
        try:
            runpy.run_module("maxtrain.train", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert end.code == 0
    """
    output, seconds, modules = measured(program, "--help")
    print(f"--help: {seconds:.2f} s of CPU")
    assert "optimizer" in output and modules == [] and seconds < half_a_second()


@pytest.mark.processes
def test_importing_the_job_is_fast_and_touches_no_device():
    output, seconds, modules = measured(
        """
        import maxtrain.trainer.loop
        from jax._src import xla_bridge
        print(xla_bridge.backends_are_initialized())
        """
    )
    print(f"import maxtrain.trainer.loop: {seconds:.2f} s of CPU")
    assert output == "False\n" and modules == ["grain", "jax", "orbax"] and seconds < 6


@pytest.mark.parametrize(
    "error, code, message",
    [
        (OSError(28, "No space left on device"), 74, "No space left on device"),
        (RuntimeError("a bug"), 70, "in run\n"),
    ],
    ids=["storage", "internal"],
)
def test_only_errors_of_our_own_show_a_traceback(config, monkeypatch, capsys, error, code, message):
    def run(config, ends_process):
        raise error

    monkeypatch.setattr("maxtrain.trainer.loop.run_from_config", run)
    assert train(config, "broken") == code
    text = capsys.readouterr().err
    assert message in text and ("Traceback" in text) == (code == 70)


@pytest.mark.long
def test_sets_of_another_tokenizer_are_refused(config, capsys):
    other = config.parent / "characters"
    assert (
        prepare.main(
            [
                str(other),
                "--text",
                f"{config.parent}/1*.txt",
                "--tokenizer",
                "chars",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    assert train(config, "refused", f"eval.sets.other.path={other}") == 78
    error = capsys.readouterr().err
    assert (
        f"Make eval.sets.other again, in its place, with the tokenizer of the other: `python -m data_pipeline.prepare {other}"
        in error
    )
