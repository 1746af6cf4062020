"""optimizer.accumulation=auto: chosen from compiled memory, once for a run, and then kept."""

import json
import re
from pathlib import Path

import jax
import pytest
import yaml

from maxtrain.checkpoint.listing import saved_steps
from maxtrain.config.load import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.parallel import memory
from maxtrain.parallel.memory import bytes_on_device
from maxtrain.trainer import loop
from maxtrain.trainer.abstract_step import StepMemory
from maxtrain.trainer.compile_step import Programs
from maxtrain.trainer.job import open_job
from maxtrain.trainer.run import Run

pytestmark = [pytest.mark.usefixtures("this_process"), pytest.mark.long]

ROWS = 32


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    return tiny_run(
        tmp_path_factory.mktemp("auto"),
        steps=4,
        checkpoint_interval=2,
        schedule={"warmup_steps": 0},
        data={"batch_size": ROWS},
    )


@pytest.fixture(scope="module")
def needs(config) -> dict[int, int]:
    """Bytes on each device that a step needs, by its micro-batches; 32 rows on 8 parts of the mesh
    may have 1, 2 or 4."""
    found = {}
    for count in (1, 2):
        words = [f"config={config}", f"optimizer.accumulation={count}"]
        asked = open_job(load_config(words), None).requested
        found[count] = StepMemory(asked, jax.devices()).bytes(ROWS, 32)
    assert found[1] > found[2]
    return found


class Machine:
    """This host, with so much memory."""

    def __init__(self, config: Path, monkeypatch, capfd):
        self.config = config
        self._monkeypatch = monkeypatch
        self._capfd = capfd
        self.said = ""

    def run(self, name: str, *overrides: str, each: int, until: int | None = None) -> int:
        """The exit code of a launch.

        Args:
            each: bytes that each device may use.
            until: the step after which the launch is lost.
        """
        look = Run.look

        def lost(run, write):
            if run.step > until:
                raise RuntimeError("lost")
            return look(run, write)

        with self._monkeypatch.context() as patch:
            patch.setattr(memory, "available_memory", lambda: 8 * each)
            if until is not None:
                patch.setattr(Run, "look", lost)
            words = [f"config={self.config}", f"run_name={name}", *overrides]
            code = loop.main(load_config(words))
        out, err = self._capfd.readouterr()
        self.said = re.sub(r"\s+", " ", out + err)
        return code

    def folder(self, name: str) -> Path:
        return self.config.parent / "runs" / name

    def numbers(self, name: str) -> list[tuple]:
        records = [one for one in read_metrics(self.folder(name)) if one["kind"] == "train"]
        return [(one["step"], one["loss"], one["params_hash"]) for one in records]


@pytest.fixture
def machine(config, monkeypatch, capfd) -> Machine:
    return Machine(config, monkeypatch, capfd)


AUTO = "optimizer.accumulation=auto"


def test_a_run_keeps_what_was_chosen_when_it_began(machine, needs, monkeypatch):
    """Lost before its first checkpoint, and after it, it goes on where there is more memory, and
    where there is less, to the numbers of a run with that number in its config."""
    compiled = set()
    compile_step = Programs.compile

    def noted(programs, state, batch):
        found = compile_step(programs, state, batch)
        compiled.add(id(found))
        return found

    monkeypatch.setattr(Programs, "compile", noted)
    plenty = 4 * needs[1]
    between = (needs[1] + needs[2]) // 2
    assert machine.run("number", "optimizer.accumulation=2", each=plenty) == 0
    wanted = machine.numbers("number")
    assert len(wanted) == 4
    assert len(compiled) == 1, "what was compiled of shapes is what steps run"

    assert machine.run("auto", AUTO, each=between, until=0) == 70
    chosen = r"optimizer\.accumulation=2: a step needs [\d.]+ MiB of the [\d.]+ MiB of each device; with 1 it would be [\d.]+ MiB\."
    assert re.search(chosen, machine.said), machine.said
    assert json.loads((machine.folder("auto") / "run.json").read_text())["accumulation"] == 2
    assert saved_steps(machine.folder("auto") / "checkpoints") == {}

    assert machine.run("auto", AUTO, each=plenty, until=2) == 70
    assert "optimizer.accumulation=2, as it was decided when the run began." in machine.said
    assert list(saved_steps(machine.folder("auto") / "checkpoints")) == [2]

    # The checkpoint alone says it, too.
    identity = machine.folder("auto") / "run.json"
    content = json.loads(identity.read_text())
    del content["accumulation"]
    identity.write_text(json.dumps(content))
    assert machine.run("auto", AUTO, each=plenty) == 0
    assert "optimizer.accumulation=2, as it was decided" in machine.said
    assert machine.numbers("auto") == wanted
    recorded = yaml.safe_load((machine.folder("auto") / "config.yaml").read_text())
    assert recorded["optimizer"]["accumulation"] == 2

    assert machine.run("plenty", AUTO, each=plenty) == 0
    assert re.search(r"optimizer\.accumulation=1: a step needs [^;]*\. ", machine.said)


@pytest.mark.slow
def test_what_was_chosen_and_fits_no_more_is_refused(machine, needs):
    plenty = 4 * needs[1]
    assert machine.run("less", AUTO, each=plenty, until=2) == 70
    assert machine.run("less", AUTO, each=(needs[1] + needs[2]) // 3) == 78
    assert "optimizer.accumulation=1, as it was decided when the run began" in machine.said
    assert "beside the training state, needs" in machine.said
    assert "raise optimizer.accumulation" in machine.said


def test_a_run_that_no_number_makes_fit_leaves_no_folder(machine, config):
    state = bytes_on_device(open_job(load_config([f"config={config}"]), None).abstract)
    assert machine.run("none", AUTO, each=state + 100) == 78
    rule = r"optimizer\.accumulation=auto: even with 4, the most that data\.batch_size=32 and the mesh allow, a step needs "
    assert re.search(rule, machine.said), machine.said
    assert "Set model.remat=full, lower data.seq_length" in machine.said
    assert not machine.folder("none").exists()


def test_the_longest_rows_of_the_plan_are_compiled_before_the_first_step(machine, needs):
    """They come at step 3, and do not fit."""
    stages = "data.stages=[{until: 2}, {seq_length: 256}]"
    assert machine.run("long", stages, "model.max_length=256", each=2 * needs[1]) == 78
    rule = r"a step of 32 rows x 256 tokens, beside the training state, needs [\d.]+ MiB"
    assert re.search(rule, machine.said), machine.said
    assert not (machine.folder("long") / "metrics.jsonl").exists() or not machine.numbers("long")
    assert saved_steps(machine.folder("long") / "checkpoints") == {}
