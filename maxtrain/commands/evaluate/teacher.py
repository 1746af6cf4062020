"""Comparison of `maxtrain evaluate` with a teacher: the divergence of a model from the one that
--teacher names, on texts; and of a run of on-policy distillation (distill.on_policy) from its
recorded teacher, on completions of prompts.
"""

import argparse
import time
from collections.abc import Mapping
from typing import NamedTuple

from flax import nnx
from jax.sharding import Mesh
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from data_pipeline.loader.loader import EvaluationData
from data_pipeline.tokenizer import Tokenizer
from maxtrain.commands.evaluate.prompts import PromptSetResult, require_room_in
from maxtrain.config.rollouts import RolloutSettings, rollout_settings
from maxtrain.config.schema import RunConfig
from maxtrain.config.sections.grpo import FROM_REWARDS
from maxtrain.models.decoder import Decoder
from maxtrain.objectives.distill import TEACHER, distill
from maxtrain.objectives.objective import POLICY, Objective
from maxtrain.parallel.batches import BatchLayout
from maxtrain.rl.unrewarded_evaluation import PromptEvaluator
from maxtrain.train_step.evaluate import evaluate, make_eval_step
from maxtrain.trainer.job import objective_of
from maxtrain.trainer.reference_model import find_model


class Comparison(NamedTuple):
    """Comparison of a model with a teacher: the teacher, and the objective that measures the
    divergence.
    """

    objective: Objective
    graphdef: nnx.GraphDef
    params: nnx.State


def compare_with(
    place: str, model: Decoder, tokenizer: Tokenizer, length: int, mesh: Mesh
) -> Comparison:
    """The teacher that --teacher names. The divergence is KL(teacher || model) at temperature 1,
    whatever a run has learnt with, so that models can be compared. The mesh is set.

    Raises:
        ConfigError: its tokens are others than the model's, or rows are too long for it.
    """
    objective = distill(temperature=1.0, weight=1.0, kind="forward")
    return _open(objective, place, "--teacher ", model, tokenizer, length, mesh)


def _open(
    objective: Objective,
    place: str,
    asked_by: str,
    model: Decoder,
    tokenizer: Tokenizer,
    length: int,
    mesh: Mesh,
) -> Comparison:
    """The teacher in a directory, with its weights. The mesh is set; errors as of
    `compare_with`."""
    teacher = find_model(TEACHER, place, asked_by)
    teacher.require_same_tokens(model.config.vocab_size or 0)
    teacher.require_same_tokenizer(tokenizer.sha256)
    teacher.require_length(length)
    graphdef, params = teacher.abstract(mesh)
    return Comparison(objective, graphdef, teacher.load(params))


def settings(args: argparse.Namespace, config: RunConfig | None) -> RolloutSettings | None:
    """Return the rollout settings of a run whose completions a teacher judges; None if there is no
    such run, or if --reward judges.

    Args:
        args: options of the command line.
        config: of the evaluated run; None for weights that are no run.
    """
    if config is None or config.objective in FROM_REWARDS or args.reward:
        return None
    found = rollout_settings(config)
    if found is None:
        return None
    if args.max_completion_length is not None:
        found = found._replace(max_completion_length=args.max_completion_length)
    if args.batch_size is not None:
        found = found._replace(slots=args.batch_size)
    return found


def evaluate_completions(
    model: Decoder,
    tokenizer: Tokenizer,
    mesh: Mesh,
    sets: Mapping[str, EvaluationData],
    counts: Mapping[str, int],
    config: RunConfig,
    settings: RolloutSettings,
    num_shown: int,
) -> dict[str, PromptSetResult]:
    """Return the results of a model on sets of prompts, and how far it is from its teacher there.

    Args:
        model: split over the mesh, which is set.
        tokenizer: the model's own.
        mesh: of model and teacher.
        sets: by name.
        counts: how many prompts of each set are completed.
        config: of the run; says the teacher and the divergence.
        settings: the longest completion, and how many are made at once.
        num_shown: completions of each set that are wanted themselves.

    Raises:
        ConfigError: a prompt without room for a completion, or a teacher that does not fit.
    """
    longest = settings.max_completion_length
    require_room_in(sets, model, config.objective, longest)
    length = max(data.config.seq_length for data in sets.values())
    place = config.distill.teacher or ""
    objective = objective_of(config)
    teacher = _open(objective, place, "distill.teacher=", model, tokenizer, length, mesh)
    graphdef, of_model = nnx.split(model)
    step = make_eval_step({POLICY: graphdef, TEACHER: teacher.graphdef}, objective)
    params = {POLICY: of_model, TEACHER: teacher.params}
    evaluator = PromptEvaluator(settings, tokenizer, settings.slots)
    found = {}
    for name, data in sets.items():
        began = time.perf_counter()
        completions = evaluator(model, data.shards, counts[name])
        batches = completions.batches(BatchLayout(mesh, data.batch_size, data.config.seq_length))
        numbers = evaluate(step, params, batches, None, 0, counted=objective.counted)
        record = completions.record() | numbers | {"seconds": time.perf_counter() - began}
        found[name] = PromptSetResult(record, completions.samples(name, num_shown))
    return found


def table_of(answered: Mapping[str, PromptSetResult]) -> RenderableType:
    """Return the output for the user: a line for each set."""
    forms = {
        "distill": "{:.4f}",
        "agreement": "{:.1%}",
        "entropy": "{:.4f}",
        "completion_length": "{:.1f}",
        "truncated": "{:.1%}",
        "prompts": "{:,}",
        "seconds": "{:.1f}",
    }
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("set", no_wrap=True)
    for name in forms:
        head = {"distill": "divergence", "completion_length": "tokens"}.get(name, name)
        table.add_column(head, justify="right", no_wrap=True)
    for name, (record, _) in answered.items():
        table.add_row(Text(name), *(form.format(record[key]) for key, form in forms.items()))
    return table
