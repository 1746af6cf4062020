"""The batches of reinforcement learning: prompts -> completions from today's weights -> rewards ->
advantages -> rows.

A rollout is made before the first step that reads it, from the arrays that are about to be trained,
and stored before that step: see rollout.py. With grpo.num_iterations=n, steps k n + 1 to k n + n
read their prompts together, and each of them trains on all completions. So prompts are read as the
plan says, whatever n is.

The random numbers of a completion depend on the run's seed, the step and its place in the batch.
Old log-probabilities are those of the training forward, not the sampler's.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from data_pipeline.errors import DivergedError
from data_pipeline.guard import checksum
from data_pipeline.loader import HostBatch, Made, TrainingData
from data_pipeline.plan import Shape as BatchShape
from data_pipeline.tokenizer import JsonTokenizer, Tokenizer
from maxtrain.config import RunConfig
from maxtrain.models.cost import relative_quadratic
from maxtrain.models.decoder import Decoder
from maxtrain.objectives.grpo import OLD, REFERENCE_LOG_PROBS, scored
from maxtrain.objectives.objective import POLICY, Batch
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.ops.digest import digests, hash_text
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.sharding import batch_shards
from maxtrain.rl.advantages import Advantages, advantages, weighted_sum
from maxtrain.rl.prompts import Prompt, prompts_of
from maxtrain.rl.reward_calls import parse_reward
from maxtrain.rl.rewards.registry import RewardSet, Scores
from maxtrain.rl.rewards.verify import WARM_UP
from maxtrain.rl.rewards.workers import RewardWorkers
from maxtrain.rl.rollout import DamagedRolloutError, Rollout, load
from maxtrain.rl.rows import Shape, batch_arrays
from maxtrain.serve.chat import Chat
from maxtrain.serve.engine import Engine
from maxtrain.serve.generation import Generation
from maxtrain.serve.sampling import Sampling
from maxtrain.serve.text import decode_new
from maxtrain.training.partition import models_from
from maxtrain.training.state import TrainState, policy_variables

FOLDER = "rollouts"
# Completions whose rewards are computed by so many processes at once.
_MOST_WORKERS = 8
# What the sampler's time is booked as.
_CAUSE = "rollout"


class _Sampled(NamedTuple):
    """What the sampler has made of prompts."""

    prompts: list[Prompt]
    generations: list[Generation]
    texts: list[str]
    seconds: float

    def tokens(self) -> list[list[int]]:
        """Those of each completion, with the one that ended it."""
        found = []
        for generation in self.generations:
            ids = list(generation.ids)
            if generation.ended_by is not None:
                ids.append(generation.ended_by)
            found.append(ids)
        return found


class Rollouts:
    """The rollouts of a run. To be used inside `jax.set_mesh(mesh)`.

    Args:
        config: of the run, with objective=grpo.
        data: the prompts.
        mesh: that the models lie on.
        graphdefs: the structure of each model, as of `models_from`.
        run: the folder of the run.
        clock: books the time of sampling, rewards and scoring as `rollout`.
        progress: what is told of them.
        saved_steps: of checkpoints that are there; rollouts that none of them needs are removed.

    Raises:
        ConfigError: rewards that there are not, or that can't be imported.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        mesh: Mesh,
        graphdefs: Mapping[str, nnx.GraphDef | None],
        run: Path,
        clock: Stopwatch,
        progress: Progress,
        saved_steps: Callable[[], Sequence[int]],
    ):
        self._run = config
        self._config = config.grpo
        self._data = data
        self._mesh = mesh
        self._graphdefs = graphdefs
        self._folder = run / FOLDER
        self._clock = clock
        self._progress = progress
        self._saved_steps = saved_steps
        self._length = max(length for _, length in data.shapes())
        self._quadratic = relative_quadratic(config.model)
        self._stop_ids = stop_ids(data.tokenizer, data.shards[0])
        self._layouts: dict[int, BatchLayout] = {}
        workers = min(os.cpu_count() or 1, _MOST_WORKERS)
        calls = [parse_reward(text) for text in self._config.rewards]
        preload = []
        if any(call.name == "math" for call in calls):
            # Else the first answer of each process would pay for it, out of its own seconds.
            preload = [WARM_UP]
        self._pool = RewardWorkers(workers, seconds=self._config.reward_seconds, preload=preload)
        self._rewards = RewardSet(
            [call.name for call in calls],
            options={call.name: call.options for call in calls if call.options},
            weights=self._config.reward_weights or None,
            pool=self._pool,
            num_generations=self._config.num_generations,
        )
        self._rewards.check()
        self._score = jax.jit(self._scores)
        # The last one that was read, and the steps that it is for.
        self._newest: tuple[range, Rollout] | None = None

    def close(self) -> None:
        """Ends the processes of rewards."""
        self._pool.close()

    def steps_of(self, step: int) -> range:
        """The steps, numbered from 0, that read the same rollout as this one."""
        count = self._config.num_iterations
        first = step // count * count
        return range(first, min(first + count, self._data.plan.num_steps))

    def batches(
        self,
        start: int,
        state: Callable[[], TrainState],
        left_out: frozenset[int],
    ) -> Iterator[tuple[Batch, HostBatch]]:
        """Batches from step `start` to the plan's end, each made when it is asked for; and where
        each comes from.

        Args:
            start: finished steps.
            state: that the next step begins with; called when its batch is asked for.
            left_out: steps whose batches have no target, so that they change nothing.
        """
        self._newest = None
        for step in range(start, self._data.plan.num_steps):
            steps = self.steps_of(step)
            if self._newest is None or self._newest[0] != steps:
                with self._clock.during(_CAUSE):
                    self._newest = (steps, self._rollout(steps, step, state()))
            yield self._batch(step, steps, self._newest[1], step in left_out)

    # Steps

    def _batch(
        self, step: int, steps: range, rollout: Rollout, is_left_out: bool
    ) -> tuple[Batch, HostBatch]:
        """The batch of a step, on the devices, and where it comes from."""
        arrays, _ = batch_arrays(rollout, self._shape(), step == steps.start)
        if is_left_out:
            arrays["loss_mask"] = np.zeros_like(arrays["loss_mask"])
        rows, length = arrays["targets"].shape
        origin = HostBatch(
            step=step,
            arrays={},
            num_targets=int(np.count_nonzero(arrays["loss_mask"])),
            digest=rollout.content()[:16],
            content=checksum(arrays["targets"], np.arange(rows), 0),
            # The same completions may be written again: that is no fault of the data.
            place=FOLDER,
            made=Made(
                shape=BatchShape(rows, length),
                unused_rows=int((arrays["loss_mask"] <= 0).all(axis=1).sum()),
                numbers=rollout.about["numbers"],
            ),
        )
        return self._layout(rows).to_global(arrays), origin

    def _layout(self, rows: int) -> BatchLayout:
        if rows not in self._layouts:
            self._layouts[rows] = BatchLayout(self._mesh, rows, self._length)
        return self._layouts[rows]

    def _shape(self) -> Shape:
        unit = self._run.optimizer.accumulation * batch_shards()
        masks = self._config.mask_truncated_completions
        return Shape(self._length, unit, self._quadratic, masks)

    # Rollouts

    def _path(self, steps: range) -> Path:
        return self._folder / f"{steps.start + 1:08d}.npz"

    def _identity(self, steps: range) -> str:
        """Of what is asked for: prompts, settings and seed."""
        config = self._run
        asked = {
            "prompts": [self._data.digest_at(step) for step in steps],
            "shards": [shards.uid for shards in self._data.shards],
            "grpo": dataclasses.asdict(config.grpo),
            "seed": config.seed,
        }
        text = json.dumps(asked, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _rollout(self, steps: range, step: int, state: TrainState) -> Rollout:
        """The rollout of these steps: the stored one, if it is what would be made now."""
        path = self._path(steps)
        identity = self._identity(steps)
        weights = hash_text(digests(policy_variables(state)))
        problem = ""
        try:
            stored = load(path)
            if stored.about["identity"] != identity:
                problem = "it is of other prompts or settings"
            elif step == steps.start and stored.about["weights"] != weights:
                problem = "other weights have made it"
            else:
                return stored
        except DamagedRolloutError as damage:
            problem = str(damage)
        # None is expected where a rollout is made for the first time.
        if path.exists() or step != steps.start:
            again = "It is made again"
            if step != steps.start:
                again += f", by the weights of step {step:,} and not those of {steps.start:,}"
            self._progress.message(f"{path}: {problem}. {again}.", style="yellow")
        rollout = self._make(steps, state, {"identity": identity, "weights": weights})
        rollout.save(path)
        self._remove_old(steps)
        return rollout

    def _remove_old(self, steps: range) -> None:
        """Removes rollouts that no checkpoint needs, from which a launch could go on."""
        saved = self._saved_steps()
        if not saved:
            return
        needed_from = self.steps_of(min(saved)).start
        for path in self._folder.glob("*.npz"):
            if path.stem.isdecimal() and int(path.stem) - 1 < min(needed_from, steps.start):
                path.unlink(missing_ok=True)

    def _make(self, steps: range, state: TrainState, about: dict[str, Any]) -> Rollout:
        """A rollout by the weights of this state."""
        self._progress.phase("sampling")
        made = self._sampled(steps, state)
        self._progress.phase("computing rewards")
        began = time.perf_counter()
        scores = self._rewarded(made)
        reward_seconds = time.perf_counter() - began
        found = advantages(
            scores.values,
            self._config.num_generations,
            weights=scores.weights,
            scale_rewards=self._config.scale_rewards,
        )
        about = about | {
            "names": list(scores.names),
            "weights_of_rewards": list(scores.weights),
            "outcomes": scores.outcomes,
            "details": scores.details,
            "texts": [_shown(made.prompts[0].original), made.texts[0]],
        }
        rollout = _rollout_of(made, scores, found, about)
        self._progress.phase("scoring")
        began = time.perf_counter()
        rollout = self._with_scores(rollout, state)
        numbers = {
            **_numbers(rollout, scores, found),
            "sampling_seconds": made.seconds,
            "sampled_tokens_per_second": float(rollout.lengths.sum()) / made.seconds,
            "reward_seconds": reward_seconds,
            "scoring_seconds": time.perf_counter() - began,
        }
        self._progress.phase("")
        return rollout._replace(about=about | {"numbers": numbers})

    def _sampled(self, steps: range, state: TrainState) -> _Sampled:
        """Completions of the prompts of these steps."""
        began = time.perf_counter()
        config = self._config
        prompts = prompts_of(self._data, steps)
        structure = self._graphdefs[POLICY]
        assert structure is not None
        model: Decoder = nnx.merge(structure, policy_variables(state))
        count = len(prompts) * config.num_generations
        engine = Engine(model, slots=min(count, config.slots), eager=True)
        seed = _seed(self._run, steps.start)
        generations = []
        for number, prompt in enumerate(prompts):
            for sample in range(config.num_generations):
                generation = engine.submit(
                    prompt.ids,
                    config.max_completion_length,
                    Sampling(temperature=config.temperature),
                    seed=seed,
                    row=number * config.num_generations + sample,
                    stop_ids=self._stop_ids,
                )
                generations.append(generation)
        # Each chunk is a sign of life.
        while engine.step():
            with self._clock.during(_CAUSE):
                pass
        if any(generation.reason == "failed" for generation in generations):
            raise DivergedError(
                f"step {steps.start + 1:,}: the log-probabilities of a completion are not finite. "
                "Lower optimizer.learning_rate, or go on from an earlier step with other settings."
            )
        tokenizer = self._data.tokenizer
        texts = [decode_new(tokenizer, each.prompt, each.ids) for each in generations]
        return _Sampled(prompts, generations, texts, time.perf_counter() - began)

    def _rewarded(self, made: _Sampled) -> Scores:
        """The rewards of completions."""
        count = self._config.num_generations
        of_rows = [prompt for prompt in made.prompts for _ in range(count)]
        names = dict.fromkeys(name for prompt in made.prompts for name in prompt.columns)
        columns = {name: [prompt.columns.get(name) for prompt in of_rows] for name in names}
        originals = [prompt.original for prompt in of_rows]
        return self._rewards(originals, made.texts, made.tokens(), columns)

    def _with_scores(self, rollout: Rollout, state: TrainState) -> Rollout:
        """With log-probabilities by the training forward, under the shapes of the training step."""
        arrays, places = batch_arrays(rollout, self._shape(), is_first=True)
        wanted = {name: arrays[name] for name in ("inputs", "targets", "segment_ids", "positions")}
        batch = self._layout(places.num_rows).to_global(wanted)
        found = jax.device_get(self._score(state.trainable, state.frozen, state.buffers, batch))
        flat = {name: values.reshape(-1)[places.tokens] for name, values in found.items()}
        nothing = np.zeros(0, np.float32)
        return rollout._replace(old=flat[OLD], reference=flat.get(REFERENCE_LOG_PROBS, nothing))

    def _scores(
        self, trainable: nnx.State, frozen: Any, buffers: nnx.State, batch: Batch
    ) -> dict[str, jax.Array]:
        models = models_from(self._graphdefs, frozen, buffers)(trainable)
        return scored(models, batch, self._config.temperature)


def stop_ids(tokenizer: Tokenizer, shards: Any) -> tuple[int, ...]:
    """Tokens that end a completion: the end mark, and with a chat template what ends a turn."""
    found = {tokenizer.eod_id}
    if shards.is_rendered and isinstance(tokenizer, JsonTokenizer):
        found.update(Chat(tokenizer, shards.path).stop_ids)
    return tuple(sorted(i for i in found if i is not None))


def _seed(config: RunConfig, step: int) -> int:
    """32 bits for the completions of a step."""
    digest = hashlib.blake2b(f"{config.seed} {step}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _shown(prompt: Any) -> str:
    """A prompt, text or messages, in words."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps(prompt, ensure_ascii=False)


def _rollout_of(
    made: _Sampled, scores: Scores, found: Advantages, about: dict[str, Any]
) -> Rollout:
    """A rollout that is not scored yet."""
    tokens = made.tokens()
    sampled = [logprob for each in made.generations for logprob in each.logprobs]
    count = sum(map(len, tokens))
    return Rollout(
        prompts=np.concatenate([np.array(prompt.ids, np.int32) for prompt in made.prompts]),
        prompt_lengths=np.array([len(prompt.ids) for prompt in made.prompts], np.int32),
        tokens=np.concatenate([np.array(ids, np.int32) for ids in tokens]),
        lengths=np.array([len(ids) for ids in tokens], np.int32),
        sampled=np.array(sampled, np.float32),
        old=np.zeros(count, np.float32),
        reference=np.zeros(0, np.float32),
        truncated=np.array([each.ended_by is None for each in made.generations]),
        rewards=scores.values,
        advantages=found.values,
        about=about,
    )


def _numbers(rollout: Rollout, scores: Scores, found: Advantages) -> dict[str, float]:
    """What is recorded of a rollout, but for its times."""
    rewards = {"reward": weighted_sum(scores.values, np.array(scores.weights, np.float64))}
    for name, values in zip(scores.names, scores.values):
        rewards[f"reward/{name}"] = values
    numbers = {}
    for name, values in rewards.items():
        applies = values[~np.isnan(values)]
        # A reward that applies to no completion has no mean.
        if applies.size:
            numbers[name] = float(applies.mean())
    for name, outcomes in scores.outcomes.items():
        for outcome, count in outcomes.items():
            numbers[f"reward_outcomes/{name}/{outcome}"] = float(count)
    numbers["completion_length"] = float(rollout.lengths.mean())
    numbers["longest_completion"] = float(rollout.lengths.max())
    numbers["truncated"] = float(rollout.truncated.mean())
    without = found.equal_groups + found.empty_groups
    numbers["groups_without_signal"] = without / found.num_groups
    return numbers
