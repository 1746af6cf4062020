"""Weights & Biases, of the extra maxtrain[wandb].

Records are rows of the run's history, with the step as `trainer/step`, which is the x axis of every
chart: W&B's own step only grows, so that rows of steps that are made again would be dropped. Rows
can't be taken back there. A run that goes back has the rows that were dropped and those made again,
both with their `trainer/step`; `trainer/rewound_to` marks where the later ones begin.

A run keeps its id over all of its launches. Offline, each launch writes a folder of its own into
RUN/wandb, and `wandb sync` puts those of one id together.
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.base.errors import UsageError
from data_pipeline.base.extras import load_package, require_package
from maxtrain.config.schema import ObserveConfig
from maxtrain.observe.samples import CompletionSample
from maxtrain.observe.tracker import Kind, RunInfo, Status, Tracker, Value, by_name

STEP = "trainer/step"
REWOUND = "trainer/rewound_to"
# Seconds that its own process has to upload what is left when the launch ends.
_FINISH_SECONDS = 25.0
_FILES = ("config.yaml", "curves.png", "samples.jsonl")
_EXIT_CODES = {"finished": 0, "stopped": 0, "failed": 1}


class Wandb(Tracker):
    """Shows a run on Weights & Biases.

    Raises:
        UsageError: its package is not installed.
    """

    def __init__(self, config: ObserveConfig):
        require_package("wandb", "wandb", "observe.trackers=[wandb]")
        self._config = config.tracking
        self._run: Any = None
        self._folder = Path()

    def start(self, run: RunInfo) -> str:
        wandb = load_package("wandb", "wandb", "observe.trackers=[wandb]")
        config = self._config
        self._folder = run.folder
        mode = config.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        if mode == "online" and not wandb.login(prompt=False):
            raise UsageError(
                "no API key is known. Run `wandb login`, or set WANDB_API_KEY, or set "
                "observe.tracking.wandb_mode=offline"
            )
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_stats=not config.system_metrics,
            finish_timeout=_FINISH_SECONDS,
        )
        self._run = wandb.init(
            project=config.project,
            entity=config.wandb_entity,
            group=config.wandb_group,
            name=config.name or run.name,
            tags=config.tags,
            id=run.known_as or run.id,
            resume="allow",
            mode=mode,
            dir=str(run.folder),
            settings=settings,
        )
        facts = {"run": run.id, "git": {"revision": run.revision, "dirty": run.is_dirty}}
        self._run.config.update({**run.hyperparameters, "maxtrain": facts}, allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if run.known_as:
            self.rewind(run.step)
        return self._run.id

    def log(self, step: int, values: Mapping[str, Value], kind: Kind) -> None:
        self._run.log({**by_name(values, kind), STEP: step})

    def show_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        wandb = load_package("wandb", "wandb", "observe.trackers=[wandb]")
        columns = ["step", "number", "prompt", "completion", "reward", "tokens", "truncated"]
        rows = []
        for each in samples:
            texts = (each.prompt, each.completion)
            rows.append([step, each.number, *texts, each.reward, each.length, each.truncated])
        table = wandb.Table(columns=columns, data=rows)
        self._run.log({f"samples/{samples[0].set}": table, STEP: step})

    def rewind(self, step: int) -> None:
        self._run.log({REWOUND: step, STEP: step})

    def finish(self, status: Status) -> None:
        # In a folder of their own, since W&B has a config.yaml itself.
        kept = Path(self._run.dir, "run")
        kept.mkdir(exist_ok=True)
        for name in _FILES:
            if (self._folder / name).exists():
                shutil.copyfile(self._folder / name, kept / name)
                self._run.save(str(kept / name), base_path=self._run.dir, policy="now")
        self._run.summary["status"] = status
        self._run.finish(exit_code=_EXIT_CODES[status])
        # Ends its process, too.
        load_package("wandb", "wandb", "observe.trackers=[wandb]").teardown()

    def abandon(self) -> None:
        """Ends its own process, which Python would wait for at its end."""
        for process in _children("wandb-core"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _children(program: str) -> Iterator[int]:
    """Processes that this one has started and that run this program."""
    for listing in Path("/proc/self/task").glob("*/children"):
        for process in listing.read_text().split():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                if Path(words[0].decode(errors="replace")).name == program:
                    yield int(process)
