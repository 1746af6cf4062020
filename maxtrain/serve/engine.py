"""The engine of generation: prompts go in at any time, tokens come out as they are made.

The engine has slots, which are the rows of one batch. A prompt is read into a slot of its own,
whatever the others are doing, and from then on its row takes part in decoding, in which each row
gets one token at a time. A row that ends leaves its slot to the next prompt. Caches stay where they
are: a slot remembers what it has read, and a prompt that begins like that is read from there on.

Every program has one of a few shapes: prompts are read in pieces of 16, 32, ... tokens, and caches
have room for 128, 256, ... columns. So nothing is compiled for a new length of a prompt. The
numbers of a row depend on nothing in other rows: where its random numbers are concerned, on its
seed, its number and how many tokens it has made.

On several devices, the rows are split like those of a training batch, and heads like in training.
The engine is for one process.
"""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from data_pipeline.errors import UsageError
from maxtrain.models.cache import Caches, enlarged, placed, put_rows, ring_size, take_rows
from maxtrain.models.decoder import Decoder
from maxtrain.parallel.sharding import batch_shards, constrain
from maxtrain.serve.sampling import Chosen, Program, Sampling, Settings, check_length, choose

# Of the shortest piece of a prompt, in tokens.
_LEAST_PIECE = 16
# Of the smallest caches, in columns.
_LEAST_COLUMNS = 128
# Prompts that begin alike for fewer tokens than this are read anew.
_LEAST_SHARED = 16
# Rows whose pieces are read together.
_MOST_READ = 8
# Ids that are compared at a time.
_COMPARED = 256

Reason = Literal["stop", "length", "window", "cancelled", "failed"]


@dataclasses.dataclass(eq=False)
class Generation:
    """One text on its way.

    Attributes:
        prompt: ids that it goes on from.
        max_tokens: new tokens at most.
        sampling: how they are chosen.
        seed, row, before: what its random numbers depend on: token n has those of before + n.
        earlier: ids that count as seen for the penalty, beside the prompt and new ones.
        stop_ids: it ends before any of these.
        stop: called with all new ids when there are more; it ends when that returns True.
        ids: new ones, without the one that ended it.
        logprobs: of each of `ids`, and of the one that ended it, if there is one; as of `Chosen`.
        ended_by: the stop id that it ended before.
        reason: why it has ended; None: it has not. `window`: it has as many tokens as the model is
            meant for. `failed`: a log-probability was not finite, or the engine failed.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    seed: int
    row: int
    before: int
    earlier: tuple[int, ...]
    stop_ids: tuple[int, ...]
    stop: Callable[[list[int]], bool] | None
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    ended_by: int | None = None
    reason: Reason | None = None

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], max_length: int) -> None:
        """New tokens, up to where the text ends."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                self.reason = "failed"
                return
            self.logprobs.append(logprob)
            if token in self.stop_ids:
                self.ended_by = token
                self.reason = "stop"
                return
            self.ids.append(token)
            if len(self.ids) == self.max_tokens:
                self.reason = "length"
                break
            if len(self.prompt) + len(self.ids) > max_length:
                self.reason = "window"
                break
        if tokens and self.stop is not None and self.stop(list(self.ids)):
            self.reason = "stop"


@dataclasses.dataclass(eq=False)
class _Slot:
    """One row of the batch, on the host."""

    # Whose row it is; None: nobody's.
    generation: Generation | None = None
    # Ids whose keys and values are in its caches.
    kept: list[int] = dataclasses.field(default_factory=list)
    # How many columns have been written to its rings, some of which may be behind `kept`: a ring
    # has the last of them.
    reach: int = 0
    # When it was last given to a prompt.
    taken: int = 0
    # Something in its caches may not be finite.
    is_spoiled: bool = False

    def extend(self, ids: list[int]) -> None:
        """These are in its caches, too."""
        self.kept += ids
        self.reach = max(self.reach, len(self.kept))

    def forget(self) -> None:
        """Nothing is in its caches."""
        self.kept = []
        self.reach = 0
        self.is_spoiled = False


class _Reading(NamedTuple):
    """A prompt that is to be read into a slot, from what another slot has of it."""

    slot: int
    source: int | None
    # Of the prompt, in the caches of the source.
    shared: int
    # All of the prompt but its last token.
    ids: list[int]

    @property
    def whole_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids) + 1


class _Rows(NamedTuple):
    """What decoding needs of each row, and the host knows."""

    # The newest token, which is not in the caches yet.
    last: Int[np.ndarray, " B"]
    # Tokens in the caches.
    lengths: Int[np.ndarray, " B"]
    # Most tokens to make now; 0: the row is nobody's.
    wanted: Int[np.ndarray, " B"]
    keys: Key[Array, " B"]
    # Number of the next token, for its random numbers.
    made: Int[np.ndarray, " B"]
    # Those that end a row, filled up with -1.
    stop_ids: Int[np.ndarray, "B I"]
    settings: Settings
    seen: Bool[np.ndarray, "B V"] | None


class _Made(NamedTuple):
    """What decoding gives back."""

    caches: Caches
    # Of each row the new ones, behind them -1.
    tokens: Int[Array, "B N"]
    logprobs: Float[Array, "B N"]


class Engine:
    """Continues texts side by side. For one thread.

    Args:
        model: on one device, or split over the current mesh. Its arrays are used where they are.
        slots: texts that are decoded together; others wait. On a mesh, rounded up to a multiple of
            what rows are split into.
        chunk: tokens of each row between two looks at what has ended, and what waits.
        piece: tokens of a prompt that are read at once, a power of two.
        sharing: prompts that begin like a text that a slot remembers are read from there on. What
            is remembered was computed with other shapes, perhaps, and is equal to rounding.
    """

    def __init__(
        self,
        model: Decoder,
        slots: int = 8,
        chunk: int = 16,
        piece: int = 512,
        sharing: bool = True,
    ):
        for name, value in (("slots", slots), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1. Set it to 8, for example.")
        if piece < _LEAST_PIECE or piece & (piece - 1):
            raise ValueError(f"piece={piece} must be a power of two of at least {_LEAST_PIECE}.")
        shards = batch_shards()
        self.max_length = model.config.max_length
        self._vocab_size = model.config.vocab_size or 0
        self._chunk = chunk
        self._piece = piece
        # What is remembered was rotated for another length.
        ropes = model.layers.spec.ropes()
        self._sharing = sharing and not any(rope.follows_length for rope in ropes)
        self._graphdef, self._params = nnx.split(model)
        self._slots = [_Slot() for _ in range(-(-slots // shards) * shards)]
        self._waiting: deque[Generation] = deque()
        self._columns = 0
        self._caches: Caches | None = None
        self._num_taken = 0
        windows = {layer.window for layer in model.layers.spec.layers()}
        self._windows = sorted(window for window in windows if window is not None)

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int = 0,
        row: int = 0,
        before: int = 0,
        earlier: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        stop: Callable[[list[int]], bool] | None = None,
    ) -> Generation:
        """A text to be continued, as soon as a slot is free.

        Args: as of `Generation`.

        Raises:
            UsageError: an empty prompt, one that is longer than the model's max_length, an id
                outside the vocabulary, or an option outside its range.
        """
        check_length(max_tokens, seed)
        check_ids(prompt, self._vocab_size)
        if not 0 <= row < 1 << 32 or not 0 <= before < (1 << 31) - max_tokens:
            raise UsageError(f"row={row}, before={before} must be at least 0, and 32-bit numbers.")
        if len(prompt) > self.max_length:
            raise UsageError(
                f"a prompt has {len(prompt):,} tokens, and the model is meant for at most "
                f"{self.max_length:,} (model.max_length). Shorten it."
            )
        # No other id can come.
        stop_ids = tuple(i for i in stop_ids if 0 <= i < self._vocab_size)
        seen = tuple(i for i in earlier if 0 <= i < self._vocab_size)
        generation = Generation(
            tuple(prompt), max_tokens, sampling, seed, row, before, seen, stop_ids, stop
        )
        self._waiting.append(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """Ends a text where it is, and frees its slot."""
        if generation.reason is not None:
            return
        generation.reason = "cancelled"
        if generation in self._waiting:
            self._waiting.remove(generation)
        for slot in self._slots:
            if slot.generation is generation:
                slot.generation = None

    @property
    def num_waiting(self) -> int:
        """Texts without a slot."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Texts with a slot."""
        return len(self._generations())

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def step(self) -> list[Generation]:
        """Reads prompts into free slots, then makes up to `chunk` tokens of each row.

        Returns:
            Texts that have new tokens or have ended; empty: there is nothing to do.

        Raises:
            Exception: of a device. All texts with a slot have ended as failed then, for their
                caches are gone; those that wait can go on.
        """
        try:
            self._admit()
            active = {}
            for number, slot in enumerate(self._slots):
                if slot.generation is not None:
                    active[number] = slot.generation
            if not active:
                return []
            tokens, logprobs = self._decode()
        except BaseException:
            self._abandon()
            raise
        for number, generation in active.items():
            slot = self._slots[number]
            count = int((tokens[number] >= 0).sum())
            ids = tokens[number, :count].tolist()
            # Each token is read when the one after it is made.
            slot.extend([(generation.ids or generation.prompt)[-1], *ids[:-1]])
            # The `stop` of another text may have cancelled this one.
            if slot.generation is generation:
                self._take(slot, generation, ids, logprobs[number, :count].tolist())
        self._clear([slot for slot in self._slots if slot.is_spoiled])
        return list(active.values())

    def stream(self, generation: Generation) -> Iterator[list[int]]:
        """New ids of a text as they come, until it ends; other texts go on meanwhile."""
        given = 0
        while True:
            new = generation.ids[given:]
            given += len(new)
            if new:
                yield new
            if generation.reason is not None:
                return
            self.step()

    def run(self) -> None:
        """Until all texts have ended."""
        while self.step():
            pass

    def _abandon(self) -> None:
        """Gives up all caches, and the texts that are in them."""
        for slot in self._slots:
            if slot.generation is not None:
                slot.generation.reason = "failed"
            slot.generation = None
            slot.forget()
        self._caches = None
        self._columns = 0

    def _clear(self, slots: list[_Slot]) -> None:
        """Zeros in the caches of these: what is not finite would reach texts that can't see it."""
        if not slots:
            return
        assert self._caches is not None
        stays = np.array([slot not in slots for slot in self._slots])
        self._caches = _cleared(self._caches, stays)
        for slot in slots:
            slot.forget()

    # Reading prompts.

    def _admit(self) -> None:
        """Reads prompts that wait into slots that are free."""
        while self._waiting and self.num_active < len(self._slots):
            readings = self._next_readings()
            longest = max(len(reading.ids) for reading in readings)
            # At least one column, for the first new token.
            self._make_room(longest + 1)
            self._read(readings)

    def _next_readings(self) -> list[_Reading]:
        """Prompts that can be read together. One that begins like another one of them waits until
        that is read."""
        readings: list[_Reading] = []
        being_read: list[list[int]] = []
        postponed: list[Generation] = []
        while self._waiting and self.num_active < len(self._slots):
            generation = self._waiting.popleft()
            ids = list(generation.prompt[:-1])
            source, shared = self._best_source(ids)
            if self._sharing and any(
                _num_equal(ids, other) >= max(shared + 1, _LEAST_SHARED) for other in being_read
            ):
                postponed.append(generation)
                continue
            number = self._free_slot(source, shared)
            readings.append(_Reading(number, source, shared, ids))
            being_read.append(ids)
            slot = self._slots[number]
            slot.generation = generation
            self._num_taken += 1
            slot.taken = self._num_taken
            if len(readings) == _MOST_READ:
                break
        self._waiting.extendleft(reversed(postponed))
        return readings

    def _best_source(self, ids: list[int]) -> tuple[int | None, int]:
        """The slot that remembers most of the beginning of a prompt, and how much of it."""
        best: tuple[int | None, int] = (None, 0)
        if not self._sharing:
            return best
        for number, slot in enumerate(self._slots):
            shared = _num_equal(ids, slot.kept)
            if shared < _LEAST_SHARED or shared <= best[1]:
                continue
            if self._still_has(slot.reach, shared):
                best = (number, shared)
        return best

    def _still_has(self, reach: int, shared: int) -> bool:
        """Whether rings in which so many columns were written have all that a token at column
        `shared` sees."""
        for window in self._windows:
            kept = ring_size(self._columns, window, self._piece)
            if reach - kept > max(0, shared - window + 1):
                return False
        return True

    def _free_slot(self, source: int | None, shared: int) -> int:
        """A slot that is nobody's: rather one that remembers nothing, or what is long ago, and the
        source itself last; but first, if the prompt goes on where that ends."""
        if source is not None:
            slot = self._slots[source]
            if slot.generation is None and shared == len(slot.kept):
                return source

        def preference(number: int) -> tuple[bool, bool, int]:
            slot = self._slots[number]
            return number == source, bool(slot.kept), slot.taken

        free = [i for i, slot in enumerate(self._slots) if slot.generation is None]
        return min(free, key=preference)

    def _read(self, readings: list[_Reading]) -> None:
        """The prompts of these, into their slots."""
        reaches = {}
        for reading in readings:
            reaches[reading.slot] = 0
            if reading.source is not None:
                reaches[reading.slot] = self._slots[reading.source].reach
        copied = [r for r in readings if r.source is not None and r.source != r.slot]
        if copied:
            self._copy(copied)
        for reading in readings:
            slot = self._slots[reading.slot]
            slot.kept = reading.ids[: reading.shared]
            slot.reach = reaches[reading.slot]
        left = [reading for reading in readings if len(reading.ids) > reading.shared]
        while left:
            length = max(self._next_length(reading) for reading in left)
            together = [r for r in left if self._next_length(r) == length]
            self._read_pieces(together, length)
            left = [r for r in left if len(r.ids) > len(self._slots[r.slot].kept)]

    def _next_length(self, reading: _Reading) -> int:
        """Of the next piece of a prompt, with its padding."""
        left = len(reading.ids) - len(self._slots[reading.slot].kept)
        return min(self._piece, max(_LEAST_PIECE, _power_of_two(left)))

    def _read_pieces(self, readings: list[_Reading], length: int) -> None:
        """The next piece of each prompt, all of the same length."""
        count = len(readings)
        # A few numbers of rows, so that a few programs serve all.
        rows = _power_of_two(count)
        rows = -(-rows // batch_shards()) * batch_shards()
        tokens = np.zeros((rows, length), np.int32)
        counts = np.zeros(rows, np.int32)
        lengths = np.zeros(rows, np.int32)
        whole_lengths = np.ones(rows, np.int32)
        # What is for no slot is dropped.
        targets = np.full(rows, len(self._slots), np.int32)
        pieces = []
        for i, reading in enumerate(readings):
            slot = self._slots[reading.slot]
            new = reading.ids[len(slot.kept) : len(slot.kept) + length]
            pieces.append(new)
            tokens[i, : len(new)] = new
            counts[i] = len(new)
            lengths[i] = len(slot.kept)
            whole_lengths[i] = reading.whole_length
            targets[i] = reading.slot
        assert self._caches is not None
        from_start = not lengths.any()
        self._caches = _read_into(
            self._graphdef,
            from_start,
            self._params,
            self._caches,
            targets,
            tokens,
            counts,
            lengths,
            whole_lengths,
        )
        for reading, new in zip(readings, pieces, strict=True):
            self._slots[reading.slot].extend(new)

    def _copy(self, readings: list[_Reading]) -> None:
        """What slots share with others, into them."""
        rows = -(-_power_of_two(len(readings)) // batch_shards()) * batch_shards()
        sources = np.zeros(rows, np.int32)
        # What is for no slot is dropped.
        targets = np.full(rows, len(self._slots), np.int32)
        for i, reading in enumerate(readings):
            assert reading.source is not None
            sources[i] = reading.source
            targets[i] = reading.slot
        assert self._caches is not None
        self._caches = _copy_rows(self._caches, sources, targets)

    def _make_room(self, columns: int) -> None:
        """For so many columns of each row."""
        if columns <= self._columns:
            return
        columns = max(_LEAST_COLUMNS, _power_of_two(columns))
        shape = (len(self._slots), columns, self._piece)
        if self._caches is None:
            self._caches = _new_caches(self._graphdef, shape, self._params)
        else:
            self._caches = _enlarged(self._graphdef, shape, self._params, self._caches)
        self._columns = columns

    # Decoding.

    def _decode(self) -> tuple[np.ndarray, np.ndarray]:
        """More tokens of each row, behind them -1, and their log-probabilities; both [B, N]."""
        wanted = {}
        for number, slot in enumerate(self._slots):
            if slot.generation is not None:
                wanted[number] = self._wanted(slot)
        self._make_room(max(len(self._slots[i].kept) + count for i, count in wanted.items()))
        rows = self._rows(wanted)
        samplings = [self._sampling(slot) for slot in self._slots]
        program = Program.for_rows(samplings, self._vocab_size)
        assert self._caches is not None
        made = _decode(self._graphdef, program, self._chunk, self._params, self._caches, rows)
        self._caches = made.caches
        return np.asarray(made.tokens), np.asarray(made.logprobs)

    def _wanted(self, slot: _Slot) -> int:
        """How many tokens the row of a slot may get now."""
        generation = slot.generation
        assert generation is not None
        left = generation.max_tokens - len(generation.ids)
        in_window = self.max_length + 1 - len(generation.prompt) - len(generation.ids)
        return min(left, in_window, self._chunk)

    def _sampling(self, slot: _Slot) -> Sampling:
        if slot.generation is None:
            return _NOBODYS
        return slot.generation.sampling

    def _rows(self, wanted: dict[int, int]) -> _Rows:
        count = len(self._slots)
        last = np.zeros(count, np.int32)
        lengths = np.zeros(count, np.int32)
        most = np.zeros(count, np.int32)
        made = np.zeros(count, np.int32)
        seeds = np.zeros((count, 2), np.uint32)
        most_stops = max(len(generation.stop_ids) for generation in self._generations())
        stop_ids = np.full((count, max(1, _power_of_two(most_stops))), -1, np.int32)
        for i, tokens in wanted.items():
            slot = self._slots[i]
            generation = slot.generation
            assert generation is not None
            last[i] = (generation.ids or generation.prompt)[-1]
            lengths[i] = len(slot.kept)
            most[i] = tokens
            made[i] = generation.before + len(generation.ids)
            seeds[i] = generation.seed, generation.row
            stop_ids[i, : len(generation.stop_ids)] = generation.stop_ids
        samplings = [self._sampling(slot) for slot in self._slots]
        settings = Settings.of(samplings, self._vocab_size)
        return _Rows(
            last, lengths, most, _row_keys(seeds), made, stop_ids, settings, self._seen(samplings)
        )

    def _generations(self) -> list[Generation]:
        """Texts with a slot."""
        return [slot.generation for slot in self._slots if slot.generation is not None]

    def _seen(self, samplings: list[Sampling]) -> Bool[np.ndarray, "B V"] | None:
        """Which tokens each row has, if some row has a penalty for them."""
        if all(sampling.repetition_penalty == 1.0 for sampling in samplings):
            return None
        seen = np.zeros((len(self._slots), self._vocab_size), bool)
        for i, slot in enumerate(self._slots):
            generation = slot.generation
            if generation is not None and samplings[i].repetition_penalty != 1.0:
                seen[i, list(generation.earlier)] = True
                seen[i, list(generation.prompt)] = True
                seen[i, generation.ids] = True
        return seen

    def _take(
        self, slot: _Slot, generation: Generation, tokens: list[int], logprobs: list[float]
    ) -> None:
        """What decoding has made of the row of a slot, which is free then if that is the end."""
        generation.take(tokens, logprobs, self.max_length)
        slot.is_spoiled = generation.reason == "failed"
        if generation.reason is not None:
            slot.generation = None


def check_ids(prompt: Sequence[int], vocab_size: int) -> None:
    """UsageError: a prompt is empty, or has ids outside the vocabulary."""
    if not prompt:
        raise UsageError(
            "a prompt is empty, but there must be a token to continue. Give some text."
        )
    if not all(0 <= i < vocab_size for i in prompt):
        raise UsageError(f"prompt: ids beyond model.vocab_size={vocab_size}. Use its tokenizer.")


# Of a row that is nobody's.
_NOBODYS = Sampling(temperature=0.0)


def _power_of_two(count: int) -> int:
    """The least that is not smaller; 1 for 0."""
    return 1 << max(0, count - 1).bit_length()


def _num_equal(ids: list[int], others: list[int]) -> int:
    """How many of the first ids are the same."""
    count = min(len(ids), len(others))
    at = 0
    # Most that begin alike do so for long, and most others differ at once.
    while at < count and ids[at : at + _COMPARED] == others[at : at + _COMPARED]:
        at += _COMPARED
    while at < count and ids[at] == others[at]:
        at += 1
    return min(at, count)


@jax.jit
def _row_keys(seeds: UInt32[Array, "B 2"]) -> Key[Array, " B"]:
    """The key of each row, of its seed and its number."""

    def key(pair: Array) -> Array:
        return jax.random.fold_in(jax.random.key(pair[0]), pair[1])

    return jax.vmap(key)(seeds)


def _merge(graphdef: nnx.GraphDef, params: nnx.State) -> Decoder:
    return nnx.merge(graphdef, params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _new_caches(graphdef: nnx.GraphDef, shape: tuple[int, int, int], params: nnx.State) -> Caches:
    """Empty ones for (rows, columns, most tokens of a pass)."""
    return placed(_merge(graphdef, params).new_caches(*shape))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _enlarged(
    graphdef: nnx.GraphDef, shape: tuple[int, int, int], params: nnx.State, caches: Caches
) -> Caches:
    """The same with room for more columns."""
    model = _merge(graphdef, params)
    shapes = jax.eval_shape(lambda: model.new_caches(*shape))
    return placed(enlarged(caches, shapes))


@functools.partial(jax.jit, donate_argnums=0)
def _copy_rows(caches: Caches, sources: Int[Array, " R"], targets: Int[Array, " R"]) -> Caches:
    """The caches with some rows as others were; targets that are not there are dropped."""
    return placed(put_rows(caches, take_rows(caches, sources), targets))


@functools.partial(jax.jit, donate_argnums=0)
def _cleared(caches: Caches, stays: Bool[Array, " B"]) -> Caches:
    """The caches with zeros in all other rows."""

    def clear(x: Array) -> Array:
        rows = stays[:, None, None, None]
        return jnp.where(rows, x, jnp.zeros((), x.dtype))

    return placed(jax.tree.map(clear, caches))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _read_into(
    graphdef: nnx.GraphDef,
    from_start: bool,
    params: nnx.State,
    caches: Caches,
    targets: Int[Array, " R"],
    tokens: Int[Array, "R T"],
    counts: Int[Array, " R"],
    lengths: Int[Array, " R"],
    whole_lengths: Int[Array, " R"],
) -> Caches:
    """The caches, with more tokens of some rows in them.

    Args:
        targets: the rows; those that are not there are dropped.
        tokens, counts, lengths, whole_lengths: as of `Decoder.extend`.
    """
    model = _merge(graphdef, params)
    read = take_rows(caches, targets)
    _, read = model.extend(tokens, counts, lengths, read, from_start, whole_lengths)
    return placed(put_rows(caches, read, targets))


class _Step(NamedTuple):
    """What goes from one token to the next."""

    number: Int[Array, ""]
    last: Int[Array, " B"]
    lengths: Int[Array, " B"]
    is_active: Bool[Array, " B"]
    seen: Bool[Array, "B V"] | None
    made: _Made


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _decode(
    graphdef: nnx.GraphDef,
    program: Program,
    chunk: int,
    params: nnx.State,
    caches: Caches,
    rows: _Rows,
) -> _Made:
    """Up to `chunk` more tokens of each row, one by one."""
    model = _merge(graphdef, params)
    count = rows.last.shape[0]
    stop_ids = jnp.asarray(rows.stop_ids)

    def choice(logits: Array, number: Array, seen: Array | None) -> Chosen:
        keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.made + number)
        return choose(logits, rows.settings, keys, seen, program)

    def one(step: _Step) -> _Step:
        active = step.is_active
        counts = active.astype(jnp.int32)
        hidden, caches = model.extend(step.last[:, None], counts, step.lengths, step.made.caches)
        logits = constrain(model.logits(hidden)[:, 0], None, None)
        chosen = choice(logits, step.number, step.seen)
        token = jnp.where(active, chosen.tokens, -1)
        made = _Made(
            caches,
            step.made.tokens.at[:, step.number].set(token),
            step.made.logprobs.at[:, step.number].set(chosen.logprobs),
        )
        number = step.number + 1
        seen = step.seen
        if seen is not None:
            seen = seen.at[jnp.arange(count), chosen.tokens].set(True)
        has_stopped = (token[:, None] == stop_ids).any(axis=1)
        still = active & ~has_stopped & (number < rows.wanted)
        return _Step(number, chosen.tokens, step.lengths + counts, still, seen, made)

    seen = None
    if program.penalises:
        seen = jnp.asarray(rows.seen)
    first = _Step(
        number=jnp.int32(0),
        last=jnp.asarray(rows.last),
        lengths=jnp.asarray(rows.lengths),
        is_active=jnp.asarray(rows.wanted) > 0,
        seen=seen,
        made=_Made(
            caches,
            jnp.full((count, chunk), -1, jnp.int32),
            jnp.zeros((count, chunk), jnp.float32),
        ),
    )
    last = jax.lax.while_loop(lambda step: step.is_active.any(), one, first)
    return last.made._replace(caches=placed(last.made.caches))
