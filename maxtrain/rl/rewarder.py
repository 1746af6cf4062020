"""Rewards of a rollout: each process computes those of its own prompts, in a thread, and all of
them get all.

The thread never touches a device, so that steps may be made meanwhile.
"""

import collections
import concurrent.futures
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from data_pipeline.base import strict_json
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.schema import GrpoConfig
from maxtrain.parallel.agreement import gather, gather_bytes, raise_together
from maxtrain.rl.completions import completions_of
from maxtrain.rl.prompts import Prompt
from maxtrain.rl.reward_calls import Rewards, column_names
from maxtrain.rl.rewards.registry import Judgement, Scores
from maxtrain.rl.rollout import Rollout

# Of what a reward says went wrong, in characters; and bytes of what a process tells of its rewards.
_MOST_WORDS = 200
_MOST_BYTES = 1 << 16
# Seconds after which a thread that is to end is looked at again.
_PAUSE = 0.1


class Counted(NamedTuple):
    """Rewards of some completions, and how long they took."""

    scores: Scores
    seconds: float


class Rewarder:
    """The rewards of a run. All processes call these functions in the same order.

    Args:
        config: names the rewards.
        tokenizer: of the completions.
        columns: names of the columns of the dataset; None: they are not known.

    Attributes:
        rewards: which they are. Evaluations use them as well.

    Raises:
        ConfigError: rewards that there are not, or that can't be imported; in all processes.
    """

    def __init__(
        self, config: GrpoConfig, tokenizer: Tokenizer, columns: Sequence[str] | None = None
    ):
        self.rewards = Rewards(config, tokenizer)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rewards")
        self._unfinished: list[concurrent.futures.Future[Counted]] = []
        error = None
        try:
            self.rewards.check(columns)
        except Exception as problem:
            error = problem
        raise_together(error)

    def close(self) -> None:
        """Ends the thread and the processes of rewards, without waiting for what they do."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.rewards.close()
        while concurrent.futures.wait(self._unfinished, _PAUSE).not_done:
            # The reward after the one that was ended has started them again.
            self.rewards.close()

    def start(
        self, prompts: Sequence[Prompt], rollout: Rollout
    ) -> concurrent.futures.Future[Counted]:
        """Begins with the rewards of the completions of these prompts, of which each process has
        its part."""
        count = len(prompts)
        first = count * jax.process_index() // jax.process_count()
        end = count * (jax.process_index() + 1) // jax.process_count()
        # The same columns everywhere, whoever has the prompts that lack one.
        names = column_names(prompts)
        own = self._thread.submit(self._of_own, prompts, rollout, range(first, end), names)
        self._unfinished = [each for each in self._unfinished if not each.done()]
        self._unfinished.append(own)
        return own

    def collect(self, pending: concurrent.futures.Future[Counted]) -> Counted:
        """The rewards of all completions, with those of other processes; waits for what `start` has
        begun.

        Raises:
            ConfigError: a column that a reward needs is missing.
            DataError: a reward returned what it must not; either in all processes.
        """
        own = Counted(self.rewards.nothing(), 0.0)
        error = None
        try:
            own = pending.result()
        except Exception as problem:
            error = problem
        raise_together(error)
        if jax.process_count() == 1:
            return own
        judgements = json.dumps(own.scores.judgements).encode()
        said = gather(_told(own, len(judgements)), _MOST_BYTES)
        rows = [theirs["rows"] for theirs in said]
        # A row for each reward, and one for what is right.
        values = np.zeros((len(own.scores.names) + 1, max(rows)), np.float64)
        values[:-1, : rows[jax.process_index()]] = own.scores.values
        values[-1, : rows[jax.process_index()]] = own.scores.right
        gathered = gather_bytes(values.view(np.uint8).reshape(-1)).view(np.float64)
        # JSON may have spaces at its end, so that all processes send equally many bytes.
        padded = judgements.ljust(max(theirs["judgement_bytes"] for theirs in said))
        gathered_judgements = gather_bytes(np.frombuffer(padded, np.uint8))
        found = self.rewards.nothing()
        for theirs, count, numbers, text in zip(
            said, rows, gathered, gathered_judgements, strict=True
        ):
            of_process = numbers.reshape(values.shape)[:, :count]
            judgements_of_process = []
            for of_reward in strict_json.loads(text.tobytes()):
                judgements_of_process.append([Judgement(*each) for each in of_reward])
            scores = found._replace(
                values=of_process[:-1],
                right=of_process[-1],
                outcomes=theirs["outcomes"],
                details=theirs["details"],
                judgements=judgements_of_process,
            )
            found = joined(found, scores)
        return Counted(found, max(theirs["seconds"] for theirs in said))

    def _of_own(
        self, prompts: Sequence[Prompt], rollout: Rollout, numbers: range, names: Sequence[str]
    ) -> Counted:
        """The rewards of the completions of some prompts, by their numbers."""
        began = time.perf_counter()
        if not numbers:
            return Counted(self.rewards.nothing(), 0.0)
        own = [prompts[number] for number in numbers]
        made = completions_of(rollout.taken(numbers))
        scores = self.rewards(own, made, self.rewards.texts(own, made), names)
        details = {name: words[:_MOST_WORDS] for name, words in scores.details.items()}
        judgements = []
        for of_reward in scores.judgements:
            judgements.append(
                [each._replace(detail=each.detail[:_MOST_WORDS]) for each in of_reward]
            )
        scores = scores._replace(details=details, judgements=judgements)
        return Counted(scores, time.perf_counter() - began)


def joined(first: Scores, second: Scores) -> Scores:
    """The rewards of both, those of `first` in front."""
    outcomes = {}
    for name in first.names:
        counts = collections.Counter(first.outcomes.get(name, {}))
        counts.update(second.outcomes.get(name, {}))
        outcomes[name] = dict(counts)
    return first._replace(
        values=np.concatenate([first.values, second.values], axis=1),
        outcomes=outcomes,
        details=second.details | first.details,
        right=np.concatenate([first.right, second.right]),
        judgements=[a + b for a, b in zip(first.judgements, second.judgements, strict=True)],
    )


def _told(own: Counted, judgement_bytes: int) -> dict[str, Any]:
    """What a process tells the others of its rewards, beside their values and judgements."""
    scores = own.scores
    told = {
        "rows": scores.values.shape[1],
        "seconds": own.seconds,
        "outcomes": scores.outcomes,
        "details": scores.details,
        "judgement_bytes": judgement_bytes,
    }
    # Many rewards may have too many words about what went wrong.
    if len(json.dumps(told, ensure_ascii=False).encode(errors="backslashreplace")) > _MOST_BYTES:
        told["details"] = {}
    return told
