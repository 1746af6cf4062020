"""Completions of prompts from the weights that are about to be trained, and their log-probabilities
by the training forward.

The random numbers of a completion depend on the run's seed, the step and its place among those that
are sampled for the step. On several processes, all of them call the engine with the same prompts:
its rows are split over all devices like those of a training batch, and the model need not fit onto
one host. So a completion does not depend on how many processes there are.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_pipeline.errors import DivergedError
from data_pipeline.tokenizer import JsonTokenizer, Tokenizer
from maxtrain import failpoints
from maxtrain.config.rollouts import RolloutSettings
from maxtrain.models.decoder import Decoder
from maxtrain.objectives.grpo import OLD, REFERENCE_LOG_PROBS, scored
from maxtrain.objectives.objective import POLICY, Batch
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.speed import ROLLOUT
from maxtrain.rl.batches import RolloutBatches
from maxtrain.rl.prompts import Prompt
from maxtrain.rl.rollout import Rollout
from maxtrain.serve.chat import Chat
from maxtrain.serve.engine import Engine
from maxtrain.serve.generation import Generation
from maxtrain.serve.sampling import Sampling
from maxtrain.training.partition import models_from
from maxtrain.training.state import TrainState, policy_variables


class Sampler:
    """Samples and scores with the arrays of a training state. To be used inside
    `jax.set_mesh(mesh)`; all processes call its functions in the same order.

    Args:
        config: how completions are sampled.
        seed: of the run.
        stop_ids: tokens that end a completion.
        batches: the rows in which they are scored.
        mesh: that the models lie on.
        graphdefs: the structure of each model, as of `models_from`.
        clock: a sign of life for each chunk of tokens.
    """

    def __init__(
        self,
        config: RolloutSettings,
        seed: int,
        stop_ids: Sequence[int],
        batches: RolloutBatches,
        mesh: Mesh,
        graphdefs: Mapping[str, nnx.GraphDef | None],
        clock: Stopwatch,
    ):
        self._config = config
        self._seed = seed
        self._stop_ids = tuple(stop_ids)
        self._batches = batches
        self._graphdefs = graphdefs
        self._clock = clock
        # Whole in each process.
        whole = NamedSharding(mesh, PartitionSpec())
        self._score = jax.jit(self._scores, out_shardings=whole)

    def sampled(
        self, prompts: Sequence[Prompt], step: int, before: int, state: TrainState, slots: int
    ) -> Rollout:
        """Completions of these prompts, without rewards.

        Args:
            prompts: to be completed.
            step: numbered from 0, the first that trains on them.
            before: how many prompts were sampled for that step before these.
            state: whose weights sample.
            slots: completions that are made at once. For each number, programs are compiled.

        Raises:
            DivergedError: a log-probability is not finite.
        """
        began = time.perf_counter()
        config = self._config
        structure = self._graphdefs[POLICY]
        assert structure is not None
        if jax.process_count() > 1:
            # Two programs at a time may read each other's messages.
            jax.block_until_ready(state)
        model: Decoder = nnx.merge(structure, policy_variables(state))
        engine = Engine(model, slots=slots, eager=True)
        seed = _seed_of_step(self._seed, step)
        generations = []
        for number, prompt in enumerate(prompts, before):
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
            failpoints.hit("sampling", step + 1)
            with self._clock.during(ROLLOUT):
                pass
        if any(generation.reason == "failed" for generation in generations):
            raise DivergedError(
                f"step {step + 1:,}: the log-probabilities of a completion are not finite. "
                "Lower optimizer.learning_rate, or go on from an earlier step with other settings."
            )
        about = {"sampling_seconds": time.perf_counter() - began}
        return as_sampled(prompts, generations, about)

    def with_scores(self, rollout: Rollout, state: TrainState) -> Rollout:
        """With log-probabilities by the training forward, under the shapes of the training step."""
        batch, places = self._batches.to_score(rollout)
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


def _seed_of_step(seed: int, step: int) -> int:
    """32 bits for the completions of a step."""
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def as_sampled(
    prompts: Sequence[Prompt], generations: Sequence[Generation], about: dict[str, Any]
) -> Rollout:
    """A rollout of these completions, those of a prompt behind each other."""
    tokens = [np.array(generation.ids_with_end(), np.int32) for generation in generations]
    sampled = [logprob for each in generations for logprob in each.logprobs]
    return Rollout(
        prompts=np.concatenate([np.array(prompt.ids, np.int32) for prompt in prompts]),
        prompt_lengths=np.array([len(prompt.ids) for prompt in prompts], np.int32),
        tokens=np.concatenate(tokens),
        lengths=np.array([len(ids) for ids in tokens], np.int32),
        sampled=np.array(sampled, np.float32),
        old=np.zeros(len(sampled), np.float32),
        reference=np.zeros(0, np.float32),
        truncated=np.array([each.ended_by is None for each in generations]),
        rewards=np.zeros((0, len(generations))),
        advantages=np.zeros(len(generations)),
        about=about,
    )
