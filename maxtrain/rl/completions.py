"""Completions as the engine makes them: many side by side, each as a whole."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from maxtrain.inference.engine import Engine
from maxtrain.inference.generation import Generation
from maxtrain.inference.sampling import Sampling
from maxtrain.rl.rollout import Rollout


class GenerationRequest(NamedTuple):
    """A completion that is asked for.

    Attributes:
        ids: what it goes on from.
        row: its number, which its random numbers depend on.
        before: how many tokens of it `ids` ends with.
    """

    ids: tuple[int, ...]
    row: int
    before: int = 0

    def continued(self, ids: Sequence[int]) -> "GenerationRequest":
        """The same behind its first tokens; of one that is asked for from its beginning on."""
        return GenerationRequest((*self.ids, *ids), self.row, len(ids))


class GenerationConfig(NamedTuple):
    """How completions are made.

    Attributes:
        sampling: how tokens are chosen.
        longest: tokens of a completion at most.
        stop_ids: tokens that end one.
        seed: of their random numbers.
    """

    sampling: Sampling
    longest: int
    stop_ids: tuple[int, ...]
    seed: int = 0


class Completion(NamedTuple):
    """A completion that is made.

    Attributes:
        ids: its tokens, with the one that ended it.
        has_ended: whether there is such a one; else it was cut at its longest.
        logprobs: of each token, nats.
    """

    ids: list[int]
    has_ended: bool
    logprobs: list[float]

    @classmethod
    def of(cls, made: Generation) -> "Completion":
        """What the engine has made."""
        return cls(made.ids_with_end(), made.ended_by is not None, made.logprobs)

    def joined(self, rest: "Completion") -> "Completion":
        """With what goes on behind it."""
        return Completion([*self.ids, *rest.ids], rest.has_ended, [*self.logprobs, *rest.logprobs])


def complete(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    generation: GenerationConfig,
    sign_of_life: Callable[[], object] = lambda: None,
) -> list[Generation]:
    """All of these, made together.

    Args:
        engine: of the model; nothing else is asked of it meanwhile.
        requests: which.
        generation: how.
        sign_of_life: called every few tokens. What it raises ends all of it.
    """
    made = []
    for each in requests:
        made.append(
            engine.submit(
                each.ids,
                generation.longest - each.before,
                generation.sampling,
                seed=generation.seed,
                row=each.row,
                before=each.before,
                stop_ids=generation.stop_ids,
            )
        )
    while engine.step():
        sign_of_life()
    return made


def completions_of(rollout: Rollout) -> list[Completion]:
    """Those of a rollout."""
    ends = np.cumsum(rollout.lengths)[:-1]
    found = []
    for ids, logprobs, is_cut in zip(
        np.split(rollout.tokens, ends),
        np.split(rollout.sampled, ends),
        rollout.truncated.tolist(),
        strict=True,
    ):
        found.append(Completion(ids.tolist(), not is_cut, logprobs.tolist()))
    return found
