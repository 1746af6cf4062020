"""The console script: `maxtrain VERB ...`.

Each verb imports its module when it is called, so that help appears at once.
"""
# ruff: noqa: PLC0415

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from data_pipeline.base.errors import UsageError, end_at_signals, ending_with_reader, run_command
from data_pipeline.base.interrupts import end_at_ctrl_c
from maxtrain import __version__

VERBS = {
    "prepare": "turn text into token shards: prepare OUT --text GLOB",
    "plan": "show what a run would read, and when: plan RUN|config=NAME key=value ...; "
    "--step N for one step",
    "train": "train a model on token shards: train config=NAME key=value ...",
    "supervise": "train, and restart the run when it dies: "
    "supervise -- python -m maxtrain.train ...",
    "launch": "start a job of many processes, on this machine, by Slurm or by Kubernetes: "
    "launch local|slurm|k8s|gke-tpu config=NAME key=value ...",
    "doctor": "measure devices, network and disks of all hosts, and say what is broken: doctor",
    "status": "show how far a run has come, and how it spent its time: status RUN",
    "rollouts": "show the completions that a run learned from, with their rewards: "
    "rollouts RUN --step N",
    "replay": "repeat steps of a run, and compare them bit for bit: replay RUN --steps A:B",
    "compare": "show where two runs differ: compare RUN RUN",
    "probe": "find a batch size that fits and is worth using, and a learning rate: "
    "probe config=NAME key=value ...",
    "fit": "show whether a run fits onto devices that need not be here, and what they send: "
    "fit config=NAME key=value ... topology=v5p:4x4x4",
    "checkpoint": "list, show, verify, copy or prune checkpoints: checkpoint list RUN",
    "evaluate": "compute the loss of a model on held-out sets: evaluate RUN|DIR",
    "generate": "write text with a model: generate RUN|DIR --prompt TEXT",
    "score": "show the log-probability of each token of a text: score RUN|DIR --text TEXT",
    "teach": "keep what a teacher says of prepared data, for distillation: teach RUN|DIR DATA",
    "serve": "answer clients of OpenAI's API with a model: serve RUN|DIR",
    "export": "write a model as files that other programs load: export RUN OUT --format hf|gguf",
    "import": "make a run of a Hugging Face directory: import DIR RUN",
    "merge": "make one model of several: merge RECIPE.yml OUT",
}
# Modules of the verbs whose `main` takes the arguments and the name of the program.
JOBS = {
    "supervise": "maxtrain.commands.supervise",
    "launch": "maxtrain.commands.launch.command",
    "doctor": "maxtrain.commands.doctor.command",
    "status": "maxtrain.commands.status",
    "rollouts": "maxtrain.commands.rollouts",
    "replay": "maxtrain.commands.replay",
    "compare": "maxtrain.commands.compare",
    "probe": "maxtrain.commands.probe.command",
    "fit": "maxtrain.commands.fit.command",
    "checkpoint": "maxtrain.commands.checkpoint",
    "evaluate": "maxtrain.commands.evaluate.command",
    "generate": "maxtrain.commands.generate",
    "score": "maxtrain.commands.score",
    "teach": "maxtrain.commands.teach.command",
    "serve": "maxtrain.commands.serve.command",
    "export": "maxtrain.commands.export.command",
    "import": "maxtrain.commands.import_hf",
    "merge": "maxtrain.commands.merge.command",
}
# Verbs that forward signals to the processes that they start.
STARTING = ("supervise", "launch")
# Verbs that check the environment here; train, probe and fit do so when they read their config.
COMPUTING = (
    "supervise",
    "doctor",
    "replay",
    "evaluate",
    "generate",
    "score",
    "teach",
    "serve",
    "export",
    "import",
    "merge",
)


def main(argv: Sequence[str] | None = None, *, ends_process: bool = False) -> int:
    """Run a verb with its arguments and return the exit code.

    Args:
        argv: the arguments; None: those of the process.
        ends_process: the process ends with this command, as it also does without `argv`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with ending_with_reader():
        return _run(words, ends_process=ends_process or argv is None)


def _run(words: list[str], ends_process: bool) -> int:
    """Run a verb as `main` does; `ends_process`: the process ends with this command."""
    if not words:
        words = ["help"]
    verb, *rest = words
    if verb == "help" and rest:
        verb = rest[0]
        rest = ["--help"]
    if verb == "prepare":
        from data_pipeline.prepare import command as prepare

        return prepare.main(rest)
    # Signals may come while a config file runs, or while the import of jax takes seconds.
    if verb in ("train", "plan") and ends_process:
        end_at_signals()
    if verb == "plan":
        from maxtrain.commands.plan.options import read_options

        # Before jax is imported.
        options = read_options(rest, "maxtrain plan")
        from maxtrain.commands.plan import command as show_plan

        return show_plan.main(options)
    if verb == "train":
        from maxtrain.config.load import from_command_line
        from maxtrain.models.known import MODELS

        # Before jax is imported.
        config = from_command_line(rest, "maxtrain train", MODELS)
        from maxtrain.trainer import loop

        return loop.main(config, ends_process=ends_process)
    if verb in JOBS and verb not in STARTING and ends_process:
        end_at_ctrl_c()
    if verb in COMPUTING:
        from maxtrain.config.environment import check_environment

        code = run_command(lambda: check_environment(os.environ))
        if code:
            return code
    if verb in JOBS:
        return importlib.import_module(JOBS[verb]).main(rest, f"maxtrain {verb}")
    if verb == "--version":
        print(__version__)
        return 0
    if verb in ("help", "--help", "-h"):
        verbs = "\n".join(f"  {name:<10} {about}" for name, about in VERBS.items())
        print(f"usage: maxtrain VERB ...\n\n{verbs}\n\n`maxtrain VERB --help` says more.")
        return 0
    close = difflib.get_close_matches(verb, VERBS, 1)
    advice = f"Use one of {', '.join(VERBS)}."
    if close:
        advice = f"Did you mean {close[0]}?"
    print(f"maxtrain: {verb!r} is not a verb. {advice}", file=sys.stderr)
    return UsageError.exit_code


if __name__ == "__main__":
    sys.exit(main())
