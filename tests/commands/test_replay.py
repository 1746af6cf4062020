"""Steps of a run again: the same bit for bit, and what is found, named and told when they are
not."""

import json
import logging
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from data_pipeline.prepare import command as prepare
from data_pipeline.shards import TokenShards
from maxtrain.checkpoint.integrity import encode_commit, read_commit
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.commands import replay
from maxtrain.config import load_config
from maxtrain.config.schema import CheckpointConfig
from maxtrain.observe import launches
from maxtrain.observe.launches import FILE_NAME, read_launches
from maxtrain.observe.metrics import MetricsLog, read_metrics, same
from maxtrain.parallel import distributed
from maxtrain.trainer import loop
from tests.support.shared import WORDS

STEPS = 24
REPOSITORY = Path(__file__).parents[2]
SAME = r"[1-9]\d+ numbers and [1-9]\d+ arrays compared, all the same bit for bit"
KINDS = {
    "dense": [],
    "dropout": [
        "regularization.residual_dropout=0.2",
        "regularization.embedding_dropout=0.1",
        "regularization.attention_dropout=0.1",
        "model.attention=eager",
        "loss.z_loss=0.25",
        "loss.adversarial=0.5",
    ],
    "full": [
        "determinism=full",
        "optimizer.accumulation=2",
        "data.batch_size=16",
        "precision.compute=float32",
    ],
}


def same_revision(folder):
    return "0" * 40


@pytest.fixture(scope="module", autouse=True)
def this_process():
    level = logging.getLogger("absl").level
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(distributed, "keep_host_memory", lambda: "")
        # Who commits while the tests run has not changed what is replayed here.
        patch.setattr(launches, "git_revision", same_revision)
        before = jax.config.jax_default_matmul_precision
        yield
        jax.config.update("jax_default_matmul_precision", before)
    logging.getLogger("absl").setLevel(level)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config file beside its data: 24 steps, a checkpoint every 8, all kept."""
    folder, rng = tmp_path_factory.mktemp("replay"), random.Random(0)
    for number in range(60):
        (folder / f"{number}.txt").write_text(
            " ".join(rng.choices(WORDS, k=rng.randrange(20, 120)))
        )
    assert prepare.main([str(folder / "data"), "--text", f"{folder}/*.txt", "--workers", "1"]) == 0
    values = {
        "output_dir": str(folder / "runs"),
        "steps": STEPS,
        "log_interval": 1,
        "eval_interval": 0,
        "checkpoint_interval": 8,
        "model": {
            "num_layers": 2,
            "embed_dim": 32,
            "mlp_dim": 64,
            "num_heads": 4,
            "num_kv_heads": 2,
            "max_length": 32,
        },
        "data": {
            "sources": {"text": {"path": str(folder / "data"), "epochs": None}},
            "seq_length": 32,
            "batch_size": 8,
        },
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"warmup_steps": 5},
        "mesh": {"data": 2, "fsdp": 4, "simulated_devices": 8},
        "checkpoint": {"keep": 9},
        "observe": {
            "progress": "off",
            "trackers": [],
            "plot": False,
            "peak_tflops": 1.0,
            "compilation_cache": None,
        },
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    return folder / "tiny.yaml"


@pytest.fixture(scope="module")
def finished(config) -> Path:
    """The folder of a run on eight devices."""
    assert loop.main(load_config([f"config={config}", "run_name=dense"])) == 0
    return config.parent / "runs" / "dense"


@pytest.fixture
def dense(config, finished, tmp_path):
    """A copy of a run, to be spoilt."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def replayed(folder, steps, capsys, *overrides):
    """Return the exit code, and the output on both streams."""
    code = replay.main([str(folder), "--steps", steps, *overrides])
    said = capsys.readouterr()
    return code, said.out + said.err


def everything(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param("0:20", marks=pytest.mark.long),
        pytest.param("4:24", marks=pytest.mark.long),
        pytest.param("8:16", marks=pytest.mark.long),
        pytest.param("15:17", marks=pytest.mark.long),
    ],
)
def test_the_same_bit_for_bit_on_eight_devices_and_nothing_is_written(finished, steps, capsys):
    before = everything(finished)
    code, text = replayed(finished, steps, capsys)
    assert code == 0 and "all the same bit for bit" in text, text
    assert int(re.search(r"(\d+) numbers", text)[1]) >= 7 * (
        int(steps.split(":")[1]) - int(steps.split(":")[0])
    )
    assert "arrays compared" in text and "although" not in text
    assert everything(finished) == before


@pytest.mark.long
def test_one_step_by_its_number(finished, capsys):
    assert replay.main([str(finished), "--step", "15"]) == 0
    one = capsys.readouterr().out
    assert replay.main([str(finished), "--steps", "14:15"]) == 0
    assert capsys.readouterr().out == one and "steps 9 to 15 again" in one


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--step", "0"],
            "--step=0 must be the number of a step, counted from 1. Use for example --step 100.",
        ),
        (["--step", "25"], "--steps=24:25: .* has steps 0 to 24"),
        (["--step", "2", "--steps", "1:2"], "not allowed with argument"),
        ([], "one of the arguments --steps --step is required"),
    ],
)
def test_one_step_that_is_none(finished, capsys, arguments, message):
    assert replay.main([str(finished), *arguments]) == 64
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"dense"}))
def test_other_kinds_are_the_same_on_eight_devices_too(config, kind, capsys):
    assert loop.main(load_config([f"config={config}", f"run_name={kind}", *KINDS[kind]])) == 0
    capsys.readouterr()
    code, text = replayed(config.parent / "runs" / kind, "2:22", capsys)
    assert code == 0 and re.search(SAME, text), text
    for record in read_metrics(config.parent / "runs" / kind) if kind == "dropout" else ():
        assert (
            record["objective"] > record["loss"] + 0.25 * record["z"] + 0.5 * record["adversarial"]
        ), "and z of the attacked"


@pytest.mark.long
def test_without_hashes_the_other_numbers_are_compared(config, capsys):
    keys = ["determinism=off", "steps=4", "schedule.warmup_steps=1", "checkpoint_interval=0"]
    assert loop.main(load_config([f"config={config}", "run_name=off", *keys])) == 0
    capsys.readouterr()
    folder = config.parent / "runs" / "off"
    assert not any(name.endswith("_hash") for record in read_metrics(folder) for name in record)
    code, text = replayed(folder, "0:4", capsys)
    assert code == 0 and re.search(SAME, text), text


PROGRAM = """
import sys
from maxtrain.commands import replay
from maxtrain.trainer import loop
from maxtrain.config import load_config
code = loop.main(load_config(sys.argv[2:]))
sys.exit(code or replay.main([sys.argv[1], "--steps", "2:22"]))
"""


@pytest.mark.long
@pytest.mark.processes
# On eight devices it is shown above.
@pytest.mark.parametrize(
    "kind", [pytest.param("dense", marks=pytest.mark.slow), *sorted(KINDS.keys() - {"dense"})]
)
def test_the_same_bit_for_bit_on_one_device(config, kind):
    name = f"{kind}-alone"
    keys = [
        f"config={config}",
        f"run_name={name}",
        "mesh.simulated_devices=1",
        "mesh.data=1",
        "mesh.fsdp=1",
        *KINDS[kind],
    ]
    command = [sys.executable, "-c", PROGRAM, str(config.parent / "runs" / name), *keys]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and re.search(SAME, result.stdout), result.stdout + result.stderr


def flip(folder, step, leaf):
    """Flips one bit of one number of an array in a checkpoint, in the memory of who writes it: its
    digest is of what it was."""
    path = folder / "checkpoints" / f"{step:08d}"
    saved = read_commit(path)["arrays"]
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(keep=9))
    tree = {name: jax.ShapeDtypeStruct(tuple(x["shape"]), x["dtype"]) for name, x in saved.items()}
    state, record = checkpoints.restore(tree, step)
    bits = np.asarray(state[leaf]).copy().view(np.uint32)
    bits.reshape(-1)[bits.size // 3] ^= 1 << 9
    state[leaf] = jnp.asarray(bits.view(np.float32))
    shutil.rmtree(path)
    checkpoints.save(step, state, record)
    checkpoints.close()
    (path / "commit.json").write_bytes(encode_commit(read_commit(path) | {"arrays": saved}))


@pytest.mark.long
def test_a_flipped_bit_of_the_checkpoint_it_begins_with_is_found_and_named(dense, capsys):
    flip(dense, 8, "params.layers.0.mlp.up.kernel")
    code, text = replayed(dense, "10:20", capsys)
    assert code == 70
    assert (
        "the checkpoint of step 8 does not hold what was saved: params.layers.0.mlp.up.kernel\n"
        in text
    )
    assert "step 8 is the first that differs" in text and "params_hash" in text
    assert f"Remove {dense / 'checkpoints' / '00000008'}, so that nothing goes on from it." in text


@pytest.mark.long
def test_a_flipped_bit_of_a_checkpoint_on_the_way_is_found_and_named(dense, capsys):
    names = saved_digests(dense / "checkpoints")[16]
    leaf = next(
        name for name in names if name.startswith("opt_state.") and name.endswith(".embedding")
    )
    flip(dense, 16, leaf)
    code, text = replayed(dense, "8:20", capsys)
    assert (
        code == 70 and f"the checkpoint of step 16 does not hold what was saved: {leaf}\n" in text
    )
    assert "first that differs" not in text, "the run itself was right"


def rewrite(folder, change):
    """The records of a run, each as `change` makes it."""
    records = [change(dict(record)) for record in read_metrics(folder)]
    (folder / "metrics.jsonl").unlink()
    log = MetricsLog(folder)
    for record in records:
        log.append(record.pop("step"), record, record.pop("kind"))
    log.close()


@pytest.mark.long
def test_the_first_step_that_differs_is_named_with_both_numbers(dense, capsys):
    """The last bit of a loss differs, as on another device; nothing on record explains it."""

    def change(record):
        if record["step"] >= 13:
            record["step_loss"] = float(
                np.nextafter(np.float32(record["step_loss"]), np.float32(9))
            )
        return record

    rewrite(dense, change)
    code, text = replayed(dense, "8:16", capsys)
    assert code == 70 and "step 13 is the first that differs, of 4" in text
    then = next(r["step_loss"] for r in read_metrics(dense) if r["step"] == 13)
    assert f"step_loss: {then!r} ({then.hex()}) then, " in text and "grad_norm" not in text
    assert "nothing that is on record has changed" in text and "train with determinism=full" in text


@pytest.mark.long
def test_what_a_launch_had_otherwise_is_the_likely_cause(dense, capsys):
    launch = read_launches(dense)[0]
    launch["versions"]["jaxlib"], launch["git"] = "0.0.1", "abc"
    (dense / FILE_NAME).write_text(json.dumps(launch) + "\n")
    code, text = replayed(dense, "8:12", capsys)
    assert code == 0 and "although versions.jaxlib 0.0.1, and now it is " in text
    rewrite(dense, lambda record: record | {"grad_norm": record["grad_norm"] + 1})
    code, text = replayed(dense, "8:12", capsys)
    assert (
        code == 70
        and "the launch had versions.jaxlib 0.0.1" in text
        and "Replay with what the run had." in text
    )


@pytest.mark.long
def test_another_mesh_is_named_with_the_arrays_that_differ(dense, capsys):
    code, text = replayed(dense, "3:16", capsys, "mesh.data=8", "mesh.fsdp=1")
    assert code == 70 and "arrays that are not those saved at step 8: params." in text
    assert (
        "the launch had mesh.fsdp 4, and now it is 1" in text
        and "Replay with what the run had." in text
    )


@pytest.mark.long
def test_other_tokens_under_the_same_manifest_are_found(dense, config, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(config.parent / "data", data)
    source = f"data.sources.text.path={data}"
    assert replayed(dense, "0:4", capsys, source)[0] == 0, "where the data lies is of no account"
    (tokens,) = data.glob("*.bin")
    raw = np.fromfile(tokens, np.uint16)
    raw[:] = raw[::-1]
    raw.tofile(tokens)
    assert TokenShards.open(data).num_tokens == len(raw)
    code, text = replayed(dense, "0:4", capsys, source, "data.verify=off")
    assert code == 70 and "step 1 is the first that differs" in text and "batch_hash" in text
    assert "the same rows hold other tokens. Run `prepare verify` on the sources." in text


@pytest.mark.long
def test_other_data_is_found_and_named(dense, config, capsys):
    for window in ("0:3", "9:12"):
        code, text = replayed(dense, window, capsys, "seed=5", "data.batch_size=16")
        assert code == 70 and "other data: another manifest, or other settings of it" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("steps", "code", "message"),
    [
        ("5", 64, "--steps=5 must be two whole numbers. Use for example --steps 100:200."),
        ("9:9", 64, f"has steps 0 to {STEPS}. Use A:B with 0 <= A < B, both among these."),
        (f"3:{STEPS + 1}", 64, f"has steps 0 to {STEPS}. Use A:B"),
    ],
)
def test_windows_that_the_run_does_not_have_are_refused(dense, capsys, steps, code, message):
    found, text = replayed(dense, steps, capsys)
    assert found == code and message in text


@pytest.mark.long
def test_records_between_which_nothing_is_compared_are_refused(dense, capsys):
    lines = (dense / "metrics.jsonl").read_text().splitlines(keepends=True)
    (dense / "metrics.jsonl").write_text(
        "".join(line for line in lines if json.loads(line)["step"] in (8, 16, 24))
    )
    code, text = replayed(dense, "9:16", capsys)
    assert code == 0 and "compared, all the same" in text, "log_interval=8"
    code, text = replayed(dense, "9:20", capsys)
    assert (
        code == 0
        and "steps 9 to 16 again" in text
        and "nothing was recorded after step 16 up to 20" in text
    )
    code, text = replayed(dense, "9:15", capsys)  # the record of step 8 is of what it begins with
    assert (
        code == 65
        and "has no record of a step after 8 up to 15. Replay up to a step that has a record"
        in text
    )


@pytest.mark.long
def test_steps_of_launches_with_other_settings_are_replayed_apart(dense, capsys):
    launches = read_launches(dense)
    other = launches[0] | {
        "step": 16,
        "config": launches[0]["config"].replace("learning_rate: 0.01", "learning_rate: 0.02"),
    }
    with open(dense / FILE_NAME, "a") as file:
        file.write(json.dumps(other) + "\n")
    code, text = replayed(dense, "8:20", capsys)
    assert code == 64 and "from step 17 on the run had another optimizer.learning_rate" in text
    assert "Replay up to step 16" in text
    assert replayed(dense, "8:16", capsys)[0] == 0
    code, text = replayed(dense, "16:20", capsys)
    assert code == 70 and "step 17 is the first that differs" in text, (
        "these steps had 0.01 in truth"
    )


@pytest.mark.every_dose
@pytest.mark.long
def test_records_keep_float32_bit_for_bit(tmp_path):
    values = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    log = MetricsLog(tmp_path)
    for step, value in enumerate(values):
        log.append(step, {"loss": value.item()})
    log.close()
    read = np.array([record["loss"] for record in read_metrics(tmp_path)], np.float32)
    nan = np.isnan(values)
    assert (
        (read.view(np.uint32)[~nan] == values.view(np.uint32)[~nan]).all()
        and np.isnan(read[nan]).all()
        and nan.any()
    )
    assert (
        same(float("nan"), float("nan"))
        and not same(0.0, -0.0)
        and same("a", "a")
        and not same(1.0, None)
    )
