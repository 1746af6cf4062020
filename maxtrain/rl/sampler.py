"""Sampling of completions by the weights that are about to train, and their log-probabilities by
the training forward pass.

The engine decodes with a KV cache, by matrix products of other shapes than in training, so its
log-probabilities equal those of training only up to rounding. With determinism=full, completions
are exactly what the training forward pass itself draws. The engine proposes tokens. Then one
training forward pass over all proposals draws each token again, with the same random numbers, after
the tokens before it. Both nearly always agree, and a text on which they agree is what a pass for
each token would have drawn. At the first disagreement, the token of the training pass counts, and
the engine continues after it. A completion is laid out as in its training batch, in a row with room
for the longest, so that later tokens and other texts do not change a confirmed token. The recorded
log-probabilities of the sampler are those of the last pass, which confirms every token. This is
speculative decoding (Leviathan et al. 2022, https://arxiv.org/abs/2211.17192) with common random
numbers instead of rejections.

The random numbers of a completion depend on the run's seed, the step and its index in that step. On
several processes, all of them call the engine with the same prompts. Rows are sharded over all
devices like those of a training batch, and the model need not fit onto one host. So a completion
does not depend on the number of processes.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, UInt32

from data_pipeline.base.errors import ConfigError, DivergedError
from data_pipeline.tokenizer import JsonTokenizer, Tokenizer
from maxtrain import failpoints
from maxtrain.config.rollouts import RolloutSettings
from maxtrain.inference.chat import Chat
from maxtrain.inference.engine import Engine
from maxtrain.inference.sampling import Sampling, row_keys, token_keys
from maxtrain.models.decoder import Decoder
from maxtrain.objectives.grpo import DRAWN, OLD, REFERENCE_LOG_PROBS, VALUES, scored
from maxtrain.objectives.objective import POLICY, Batch
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.speed import ROLLOUT
from maxtrain.ops.micro_batches import micro_batches, whole_batch
from maxtrain.parallel.hardware import compiler_options
from maxtrain.rl.batches import COMPLETION, NUMBER, RolloutBatches
from maxtrain.rl.completions import Completion, GenerationConfig, GenerationRequest, complete
from maxtrain.rl.prompts import Prompt
from maxtrain.rl.rollout import Rollout
from maxtrain.train_step.state import TrainState, policy_variables
from maxtrain.train_step.trainable import models_from


class Sampler:
    """Samples and scores completions with the arrays of a training state. Use it inside
    `jax.set_mesh(mesh)`; all processes call its functions in the same order.

    Args:
        config: settings of rollouts.
        seed: the seed of the run.
        stop_ids: tokens that end a completion.
        batches: the layout of rows for scoring.
        mesh: the mesh of the models.
        graphdefs: the structure of each model, as for `models_from`.
        clock: receives a heartbeat for each chunk of tokens.
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
        # Results are replicated, so that each process can read them.
        whole = NamedSharding(mesh, PartitionSpec())
        platform = next(iter(mesh.devices.flat)).platform
        self._score = jax.jit(
            self._scores, out_shardings=whole, compiler_options=compiler_options(platform)
        )

    def sampled(
        self, prompts: Sequence[Prompt], step: int, before: int, state: TrainState, slots: int
    ) -> Rollout:
        """Sample completions of these prompts, without rewards.

        Args:
            prompts: the prompts to complete.
            step: the first step that trains on the completions, numbered from 0.
            before: number of prompts that were sampled for that step before these.
            state: the state whose weights sample.
            slots: completions that are generated at once. Each number needs its own compiled
                programs.

        Raises:
            DivergedError: a log-probability is not finite.
        """
        began = time.perf_counter()
        config = self._config
        structure = self._graphdefs[POLICY]
        assert structure is not None
        if jax.process_count() > 1:
            # Two programs at a time may mix up their collectives.
            jax.block_until_ready(state)
        model: Decoder = nnx.merge(structure, policy_variables(state))
        engine = Engine(model, slots=slots, eager=True)
        generation = GenerationConfig(
            Sampling(temperature=config.temperature),
            config.max_completion_length,
            self._stop_ids,
            _seed_of_step(self._seed, step),
        )
        requests = []
        for number, prompt in enumerate(prompts, before):
            for sample in range(config.num_generations):
                requests.append(
                    GenerationRequest(prompt.ids, number * config.num_generations + sample)
                )

        def sign_of_life() -> None:
            failpoints.hit("sampling", step + 1)
            self._sign_of_life()

        def completed(requests: Sequence[GenerationRequest]) -> list[Completion]:
            made = complete(engine, requests, generation, sign_of_life)
            _require_finite(all(each.reason != "failed" for each in made), step)
            return [Completion.of(each) for each in made]

        if self._batches.is_exact:
            rollout = self._drawn_by_training(prompts, requests, completed, generation, state)
            _require_finite(bool(np.isfinite(rollout.sampled).all()), step)
        else:
            rollout = as_sampled(prompts, completed(requests))
        about = {"sampling_seconds": time.perf_counter() - began}
        return rollout._replace(about=rollout.about | about)

    def with_scores(self, rollout: Rollout, state: TrainState) -> Rollout:
        """Add log-probabilities, and values if there are any, by the training forward pass, in the
        shapes of the training step."""
        found = self._scored(rollout, state)
        nothing = np.zeros(0, np.float32)
        return rollout._replace(
            old=found[OLD],
            reference=found.get(REFERENCE_LOG_PROBS, nothing),
            values=found.get(VALUES, nothing),
        )

    def _drawn_by_training(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[GenerationRequest],
        completed: Callable[[Sequence[GenerationRequest]], list[Completion]],
        generation: GenerationConfig,
        state: TrainState,
    ) -> Rollout:
        """Sample completions of which the training forward pass draws every token.

        Args:
            prompts: the prompts to complete.
            requests: the requested completions.
            completed: returns the completions that the engine makes of some requests.
            generation: settings of the generation.
            state: the state whose weights draw.

        Raises:
            ConfigError: the training pass's result for a token depends on later tokens or other
                texts, so that the passes never agree.
        """
        made = completed(requests)
        num_replaced = 0
        # Each pass confirms at least one more token of each completion.
        for passes in range(1, generation.longest + 2):
            rollout = as_sampled(prompts, made)
            found = self._scored(rollout, state, generation.seed, requests[0].row)
            self._sign_of_life()
            replaced = with_first_replaced(made, found[DRAWN], generation)
            if not replaced:
                about = {"sampling_passes": passes, "tokens_replaced": num_replaced}
                return rollout._replace(sampled=found[OLD], about=about)
            num_replaced += len(replaced)
            unfinished = {}
            for number, completion in replaced.items():
                made[number] = completion
                if not completion.has_ended and len(completion.ids) < generation.longest:
                    unfinished[number] = requests[number].continued(completion.ids)
            rests = completed(list(unfinished.values()))
            for number, rest in zip(unfinished, rests, strict=True):
                made[number] = made[number].joined(rest)
        raise ConfigError(
            f"determinism=full: after {generation.longest + 1:,} passes, the training forward "
            "still draws other tokens than those that were sampled, so what it gives for a token "
            "depends on tokens behind it or in other texts. Set determinism=seeded."
        )

    def _scored(
        self, rollout: Rollout, state: TrainState, seed: int = 0, first: int = 0
    ) -> dict[str, np.ndarray]:
        """Score the tokens of completions with `scored`, in their order; with exact sampling also
        draw tokens.

        Args:
            rollout: the completions.
            state: the state whose weights score.
            seed: random seed of the draws.
            first: the number of the first completion within the step.
        """
        batch, places = self._batches.to_score(rollout, first)
        arguments = (state.trainable, state.frozen, state.buffers, batch, np.uint32(seed))
        found = jax.device_get(self._score(*arguments))
        return {name: values.reshape(-1)[places.tokens] for name, values in found.items()}

    def _scores(
        self, trainable: nnx.State, frozen: Any, buffers: nnx.State, batch: Batch, seed: Array
    ) -> dict[str, Array]:
        """Apply `scored` to the micro-batches of a step."""
        models = models_from(self._graphdefs, frozen, buffers)(trainable)

        def one(micro: Batch) -> dict[str, Array]:
            keys = None
            if self._batches.is_exact:
                keys = _keys(seed, micro[COMPLETION], micro[NUMBER])
            return scored(models, micro, self._config.temperature, keys)

        accumulation = self._batches.accumulation
        if accumulation == 1:
            return one(batch)
        return whole_batch(jax.lax.map(one, micro_batches(batch, accumulation)))

    def _sign_of_life(self) -> None:
        with self._clock.during(ROLLOUT):
            pass


def _keys(
    seed: UInt32[Array, ""], completions: UInt32[Array, "B T"], numbers: Int[Array, "B T"]
) -> Key[Array, "B T"]:
    """Return the engine's random key for each token, from the number of its completion and its
    index."""
    rows = completions.reshape(-1)
    seeds = jnp.stack([jnp.broadcast_to(seed, rows.shape), rows], axis=-1)
    return token_keys(row_keys(seeds), numbers.reshape(-1)).reshape(completions.shape)


def with_first_replaced(
    made: Sequence[Completion], drawn: np.ndarray, generation: GenerationConfig
) -> dict[int, Completion]:
    """For each completion with a different draw, return its tokens before the first difference, and
    the drawn token; by the completion's number.

    Args:
        made: completions.
        drawn: the drawn token at each of their tokens, concatenated.
        generation: says what ends a completion.
    """
    found = {}
    ends = np.cumsum([len(each.ids) for each in made])
    for number, (completion, tokens) in enumerate(
        zip(made, np.split(drawn, ends[:-1]), strict=True)
    ):
        differs = np.flatnonzero(tokens != np.array(completion.ids))
        if not differs.size:
            continue
        first = int(differs[0])
        token = int(tokens[first])
        ids = [*completion.ids[:first], token]
        # The pass that confirms the token provides its log-probability.
        logprobs = [*completion.logprobs[:first], 0.0]
        found[number] = Completion(ids, token in generation.stop_ids, logprobs)
    return found


def _require_finite(is_finite: bool, step: int) -> None:
    """Raise a DivergedError if a log-probability is not finite."""
    if is_finite:
        return
    raise DivergedError(
        f"step {step + 1:,}: the log-probabilities of a completion are not finite. "
        "Lower optimizer.learning_rate, or go on from an earlier step with other settings."
    )


def stop_ids(tokenizer: Tokenizer, shards: Any) -> tuple[int, ...]:
    """Return the tokens that end a completion: the end-of-document token, and with a chat template
    the tokens that end a turn."""
    found = {tokenizer.eod_id}
    if shards.is_rendered and isinstance(tokenizer, JsonTokenizer):
        found.update(Chat(tokenizer, shards.path).stop_ids)
    return tuple(sorted(i for i in found if i is not None))


def _seed_of_step(seed: int, step: int) -> int:
    """Return a 32-bit seed for the completions of a step."""
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def as_sampled(prompts: Sequence[Prompt], made: Sequence[Completion]) -> Rollout:
    """Build a rollout of these completions, those of a prompt consecutive."""
    tokens = [np.array(completion.ids, np.int32) for completion in made]
    sampled = [logprob for completion in made for logprob in completion.logprobs]
    return Rollout(
        prompts=np.concatenate([np.array(prompt.ids, np.int32) for prompt in prompts]),
        prompt_lengths=np.array([len(prompt.ids) for prompt in prompts], np.int32),
        tokens=np.concatenate(tokens),
        lengths=np.array([len(ids) for ids in tokens], np.int32),
        sampled=np.array(sampled, np.float32),
        old=np.zeros(len(sampled), np.float32),
        reference=np.zeros(0, np.float32),
        truncated=np.array([not completion.has_ended for completion in made]),
        rewards=np.zeros((0, len(made))),
        advantages=np.zeros(len(made)),
        about={},
    )
