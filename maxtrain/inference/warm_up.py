"""Warm-up of the engine: programs for ordinary requests are compiled before these requests come.

A program is compiled for each size of the caches, each length of a prompt piece, and each kind of
sampling. There are too many to compile all. A warm-up is one small text of each ordinary kind, in
caches with room for texts of `COLUMNS` tokens.
"""

import functools
from collections.abc import Callable, Sequence

from maxtrain.inference.engine import Engine
from maxtrain.inference.sampling import Sampling
from maxtrain.models.cache import PAGE

# Tokens of the longest text for which programs are compiled.
COLUMNS = 1024
# Kinds of sampling, the most usual first. JSON output and forced tool calls use the program with a
# bias, here of 0.
_GREEDY = Sampling(0.0)
_SAMPLINGS = (
    _GREEDY,
    Sampling(1.0),
    Sampling(1.0, top_p=0.5),
    Sampling(0.0, top_logprobs=1),
    Sampling(0.0, logit_bias=((0, 0.0),)),
    Sampling(1.0, logit_bias=((0, 0.0),)),
)
# Tokens that each warm-up generates.
_NEW = 2


def first_warm_ups(engine: Engine, stop_ids: Sequence[int]) -> list[Callable[[], None]]:
    """Return the warm-ups for a short prompt, greedy and sampled: those that come before the server
    listens.

    There are none for a model whose longest text is shorter than such a prompt.
    """
    texts = _WarmUpTexts(engine, stop_ids)
    if not texts.has_room(engine.least_piece):
        return []
    return [functools.partial(texts.run, [engine.least_piece], kind) for kind in _SAMPLINGS[:2]]


def more_warm_ups(engine: Engine, stop_ids: Sequence[int]) -> list[Callable[[], None]]:
    """Return the warm-ups for longer prompts, later turns of a conversation, several prompts at
    once and other kinds of sampling, the most usual first."""
    texts = _WarmUpTexts(engine, stop_ids)
    lengths = [length for length in engine.piece_lengths if texts.has_room(length)]
    if not lengths:
        return []
    found = []
    for length in lengths[1:]:
        found.append(functools.partial(texts.run, [length], _GREEDY))
    for kind in _SAMPLINGS[2:]:
        found.append(functools.partial(texts.run, lengths[:1], kind))
    if engine.has_pages:
        # Each number of pages has programs of its own.
        pages = [PAGE * count - _NEW for count in (1, 2, 4, 8, 16)]
        for length in filter(texts.has_room, pages):
            for kind in _SAMPLINGS[:3]:
                found.append(functools.partial(texts.run, [length], kind))
    for length in lengths:
        found.append(functools.partial(texts.run_later_turn, length))
    for count in (2, 4, 8):
        if count <= engine.num_slots:
            found += [functools.partial(texts.run, [length] * count, _GREEDY) for length in lengths]
    return found


class _WarmUpTexts:
    """Texts whose only purpose is to compile their programs.

    Args:
        engine: an engine without other texts.
        stop_ids: the stop ids of all texts of the server.
    """

    def __init__(self, engine: Engine, stop_ids: Sequence[int]):
        self._engine = engine
        self._stop_ids = stop_ids
        self._most = min(COLUMNS, engine.longest_text)

    def has_room(self, length: int) -> bool:
        """Return whether a prompt of this length is within the limit."""
        return length + 1 + _NEW <= self._most

    def run(self, lengths: Sequence[int], kind: Sampling) -> None:
        """Continue prompts of these lengths that are read together."""
        self._engine.make_room(self._most)
        for number, length in enumerate(lengths):
            self._submit([self._token(number)] * (length + 1), kind)
        self._engine.run()
        self._engine.forget_idle()

    def run_later_turn(self, length: int) -> None:
        """Continue a prompt whose prefix a slot remembers."""
        # Only whole pages are shared.
        shared = PAGE
        if not self.has_room(shared + length):
            return
        self._engine.make_room(self._most)
        self._submit([self._token(0)] * (shared + 1), _GREEDY)
        self._engine.run()
        self._submit([self._token(0)] * shared + [self._token(1)] * (length + 1), _GREEDY)
        self._engine.run()
        self._engine.forget_idle()

    def _token(self, number: int) -> int:
        """Return an id that prompts of other numbers do not begin with."""
        return number % max(1, self._engine.vocab_size)

    def _submit(self, prompt: list[int], kind: Sampling) -> None:
        self._engine.submit(prompt, _NEW, kind, stop_ids=self._stop_ids)
