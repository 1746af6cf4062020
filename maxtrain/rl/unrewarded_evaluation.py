"""Evaluation on prompts without rewards: each is completed once, greedily, and the objective's
metrics of these completions are recorded."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from data_pipeline.shards import TokenShards
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.rollouts import RolloutSettings
from maxtrain.inference.text import decode_new
from maxtrain.models.decoder import Decoder
from maxtrain.objectives.objective import Batch
from maxtrain.observe.samples import CompletionSample, as_text
from maxtrain.parallel.batches import BatchLayout
from maxtrain.rl.batches import OF_TOKENS
from maxtrain.rl.completions import Completion
from maxtrain.rl.evaluation import first_prompts, likeliest
from maxtrain.rl.maker import length_numbers
from maxtrain.rl.prompts import Prompt, read_together
from maxtrain.rl.rollout import Rollout
from maxtrain.rl.rows import RowShape, batch_arrays
from maxtrain.rl.sampler import as_sampled, stop_ids


class Completions(NamedTuple):
    """The completions of N prompts by a model.

    Attributes:
        prompts: the prompts.
        texts: the completions.
        rollout: the tokens of the completions.
        failed: number of completions with a log-probability that was not finite.
    """

    prompts: list[Prompt]
    texts: list[str]
    rollout: Rollout
    failed: int

    def record(self) -> dict[str, Any]:
        """Return the number and the lengths of the completions."""
        numbers: dict[str, Any] = dict(length_numbers(self.rollout))
        numbers["prompts"] = len(self.prompts)
        return numbers

    def samples(self, name: str, count: int) -> list[CompletionSample]:
        """Return the first completions as samples.

        Args:
            name: the set that the prompts are from.
            count: most samples.
        """
        found = []
        for i, prompt in enumerate(self.prompts[:count]):
            found.append(
                CompletionSample(
                    set=name,
                    number=i,
                    prompt=as_text(prompt.original),
                    completion=self.texts[i],
                    reward=None,
                    rewards={},
                    length=int(self.rollout.lengths[i]),
                    truncated=bool(self.rollout.truncated[i]),
                )
            )
        return found

    def batches(self, layout: BatchLayout) -> Iterator[Batch]:
        """Iterate over batches of this layout that hold all completions, on the devices.

        The layout has a row for each completion of a batch, so that all batches have its shape.
        """
        rows, length = layout.shape
        shape = RowShape(length, unit=rows, quadratic=0.0)
        for first in range(0, len(self.prompts), rows):
            some = range(first, min(first + rows, len(self.prompts)))
            arrays, _ = batch_arrays(self.rollout.taken(some), shape, is_first=True)
            yield layout.to_global(layout.own_part({name: arrays[name] for name in OF_TOKENS}))


class PromptEvaluator:
    """Asks a model for completions.

    Args:
        settings: rollout settings, such as the longest completion.
        tokenizer: the tokenizer of prompts and model.
        slots: completions that are generated at once. Each number needs its own compiled programs.
    """

    def __init__(self, settings: RolloutSettings, tokenizer: Tokenizer, slots: int):
        self._settings = settings
        self._tokenizer = tokenizer
        self._slots = slots

    def __call__(
        self,
        model: Decoder,
        shards: TokenShards,
        count: int,
        sign_of_life: Callable[[], object] = lambda: None,
    ) -> Completions:
        """The completions of the first prompts of a set; arguments as of
        `RewardedPromptEvaluator`."""
        prompts = read_together(first_prompts, shards, count)
        ends = stop_ids(self._tokenizer, shards)
        longest = self._settings.max_completion_length
        made = likeliest(model, prompts, ends, longest, self._slots, sign_of_life)
        return Completions(
            prompts=prompts,
            texts=[decode_new(self._tokenizer, each.prompt, each.ids) for each in made],
            rollout=as_sampled(prompts, [Completion.of(each) for each in made]),
            failed=sum(each.reason == "failed" for each in made),
        )
