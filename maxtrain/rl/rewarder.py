"""Rewards of a rollout: each process computes those of its own prompts, in a thread, and all
processes receive all rewards.

The thread never uses a device, so that steps may be made meanwhile.
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
from maxtrain.rl.rewards.registry import Judgement, RewardScores
from maxtrain.rl.rollout import Rollout

# Longest error text of a reward in characters, and bytes of the message about a process's rewards.
_MOST_WORDS = 200
_MOST_BYTES = 1 << 16
# Seconds between checks for the end of the thread.
_PAUSE = 0.1


class TimedScores(NamedTuple):
    """Rewards of some completions, and how long they took."""

    scores: RewardScores
    seconds: float


class Rewarder:
    """Computes the rewards of a run. All processes call its functions in the same order.

    Args:
        config: the section that names the rewards.
        tokenizer: the tokenizer of the completions.
        columns: names of the columns of the dataset; None: they are not known.

    Attributes:
        rewards: the rewards. Evaluations use them as well.

    Raises:
        ConfigError: a reward does not exist or cannot be imported; raised in all processes.
    """

    def __init__(
        self, config: GrpoConfig, tokenizer: Tokenizer, columns: Sequence[str] | None = None
    ):
        self.rewards = Rewards(config, tokenizer)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rewards")
        self._unfinished: list[concurrent.futures.Future[TimedScores]] = []
        error = None
        try:
            self.rewards.check(columns)
        except Exception as problem:
            error = problem
        raise_together(error)

    def close(self) -> None:
        """End the thread and the processes of rewards, without waiting for their work."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.rewards.close()
        while concurrent.futures.wait(self._unfinished, _PAUSE).not_done:
            # The next reward has started the processes again.
            self.rewards.close()

    def start(
        self, prompts: Sequence[Prompt], rollout: Rollout
    ) -> concurrent.futures.Future[TimedScores]:
        """Start computing the rewards of these prompts' completions, of which each process has its
        share."""
        count = len(prompts)
        first = count * jax.process_index() // jax.process_count()
        end = count * (jax.process_index() + 1) // jax.process_count()
        # All processes use the same columns, even if some of their prompts lack one.
        names = column_names(prompts)
        own = self._thread.submit(self._of_own, prompts, rollout, range(first, end), names)
        self._unfinished = [each for each in self._unfinished if not each.done()]
        self._unfinished.append(own)
        return own

    def collect(self, pending: concurrent.futures.Future[TimedScores]) -> TimedScores:
        """Wait for `start`, and return the rewards of all completions, including those of other
        processes.

        Raises:
            ConfigError: a column that a reward needs is missing.
            DataError: a reward returned an invalid value. Both are raised in all processes.
        """
        own = TimedScores(self.rewards.nothing(), 0.0)
        error = None
        try:
            own = pending.result()
        except Exception as problem:
            error = problem
        raise_together(error)
        if jax.process_count() == 1:
            return own
        judgements = json.dumps(own.scores.judgements).encode()
        reports = gather(_told(own, len(judgements)), _MOST_BYTES)
        rows = [report["rows"] for report in reports]
        # A row for each reward, and one for correctness.
        values = np.zeros((len(own.scores.names) + 1, max(rows)), np.float64)
        values[:-1, : rows[jax.process_index()]] = own.scores.values
        values[-1, : rows[jax.process_index()]] = own.scores.right
        gathered = gather_bytes(values.view(np.uint8).reshape(-1)).view(np.float64)
        # JSON may have spaces at its end, so that all processes send equally many bytes.
        padded = judgements.ljust(max(report["judgement_bytes"] for report in reports))
        gathered_judgements = gather_bytes(np.frombuffer(padded, np.uint8))
        found = self.rewards.nothing()
        for report, count, numbers, text in zip(
            reports, rows, gathered, gathered_judgements, strict=True
        ):
            of_process = numbers.reshape(values.shape)[:, :count]
            judgements_of_process = []
            for of_reward in strict_json.loads(text.tobytes()):
                judgements_of_process.append([Judgement(*each) for each in of_reward])
            scores = found._replace(
                values=of_process[:-1],
                right=of_process[-1],
                outcomes=report["outcomes"],
                details=report["details"],
                judgements=judgements_of_process,
            )
            found = joined(found, scores)
        return TimedScores(found, max(report["seconds"] for report in reports))

    def _of_own(
        self, prompts: Sequence[Prompt], rollout: Rollout, numbers: range, names: Sequence[str]
    ) -> TimedScores:
        """Compute the rewards of the completions of some prompts, by their numbers."""
        began = time.perf_counter()
        if not numbers:
            return TimedScores(self.rewards.nothing(), 0.0)
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
        return TimedScores(scores, time.perf_counter() - began)


def joined(first: RewardScores, second: RewardScores) -> RewardScores:
    """Concatenate two sets of rewards."""
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


def _told(own: TimedScores, judgement_bytes: int) -> dict[str, Any]:
    """Return the message to other processes about this process's rewards, without values and
    judgements."""
    scores = own.scores
    message = {
        "rows": scores.values.shape[1],
        "seconds": own.seconds,
        "outcomes": scores.outcomes,
        "details": scores.details,
        "judgement_bytes": judgement_bytes,
    }
    # With many rewards, the error texts may be too long together.
    if len(json.dumps(message, ensure_ascii=False).encode(errors="backslashreplace")) > _MOST_BYTES:
        message["details"] = {}
    return message
