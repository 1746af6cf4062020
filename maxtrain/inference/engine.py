"""The engine of generation: prompts go in at any time, tokens come out as they are made.

The engine has slots, which are the rows of one batch. A prompt is read into a slot of its own,
piece by piece, and from then on its row takes part in decoding, in which each row gets one token at
a time. Where texts are being made, they wait for one piece at most between two chunks of their
tokens. A row that ends leaves its slot to the next prompt. Caches stay where they are: a slot
remembers what it has read, and a prompt that begins like that is read from there on.

Caches are either rings, of which each slot has its own, as long as the longest text; or pages, of
which there is a fixed number for all texts together, and of which texts that begin alike share
those that are equal. A text gets a slot when there are pages for all that it may become, so that
none is ever given up for want of memory.

Every program has one of a few shapes: prompts are read in pieces of 16, 32, ... tokens, and caches
have room for 128, 256, ... columns. So nothing is compiled for a new length of a prompt. The
numbers of a row depend, to rounding, on nothing in other rows; its random numbers depend on its
seed, its number and how many tokens it has made.

On several devices, the rows are split like those of a training batch, and heads like in training.
On several processes, each has an engine, and all of them call it alike: what it does next depends
on what was submitted, and on tokens, which all of them get.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from data_pipeline.base.errors import UsageError
from maxtrain.inference import programs
from maxtrain.inference.generation import Alternatives, Constraint, Generation, check_ids
from maxtrain.inference.pages import Pages, num_pages
from maxtrain.inference.programs import Made, Piece, Room, Rows
from maxtrain.inference.sampling import (
    MOST_TOP_LOGPROBS,
    History,
    Program,
    Sampling,
    Settings,
    check_length,
)
from maxtrain.inference.slots import LEAST_SHARED, Slot, as_ids, num_equal
from maxtrain.models.cache import PAGE, Caches, ring_size
from maxtrain.models.decoder import Decoder
from maxtrain.models.lora_bank import num_sets
from maxtrain.parallel.sharding import batch_shards

# Of the shortest piece of a prompt, in tokens.
_LEAST_PIECE = 16
# Of a prompt, read at once.
_PIECE = 512
# Of the smallest caches, in columns.
_LEAST_COLUMNS = 128
# Rows whose pieces are read together.
_MOST_READ = 8
# Stop ids of a row in the smallest program.
_LEAST_STOPS = 4
# Of a row that is nobody's.
_NOBODYS = Sampling(temperature=0.0)


class _Source(NamedTuple):
    """A slot that remembers the beginning of a prompt.

    Args:
        slot: None: there is none.
        shared: how many tokens of it.
    """

    slot: Slot | None
    shared: int


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
        cache_tokens: that all texts together, with those remembered, have in the caches of layers
            without a window, in pages; None: each slot has room for the longest text.
        eager: all prompts with a slot are read before there are more tokens: best where many texts
            are wanted as a whole, and nobody waits for the next token of one.

    Raises:
        ValueError: a size that is none.
    """

    def __init__(
        self,
        model: Decoder,
        slots: int = 8,
        chunk: int = 16,
        piece: int = _PIECE,
        sharing: bool = True,
        cache_tokens: int | None = None,
        eager: bool = False,
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
        self._eager = eager
        self._piece = piece
        # What is remembered was rotated for another length.
        ropes = model.layers.spec.ropes()
        self._sharing = sharing and not any(rope.follows_length for rope in ropes)
        self._graphdef, self._params = nnx.split(model)
        self._num_sets = num_sets(self._params)
        self._slots = [Slot(number) for number in range(_rows(slots, shards))]
        self._waiting: deque[Generation] = deque()
        self._columns = 0
        self._caches: Caches | None = None
        self._num_taken = 0
        self._num_read = 0
        windows = {layer.window for layer in model.layers.spec.layers()}
        self._windows = sorted(window for window in windows if window is not None)
        self._pages: Pages | None = None
        self._paged: frozenset[str] = frozenset()
        if cache_tokens is not None:
            if cache_tokens < PAGE:
                raise ValueError(
                    f"cache_tokens={cache_tokens} must be at least {PAGE}, which is one page."
                )
            if shards > 1:
                raise ValueError(
                    f"cache_tokens={cache_tokens}: pages are for all rows, and this mesh splits "
                    f"rows over {shards} devices. Leave it out, or use a mesh of tensor alone."
                )
            self._pages = Pages(cache_tokens // PAGE)
            self._paged = model.layers.paged_names()

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
        adapter: int = 0,
        constraint: Constraint | None = None,
        scores_prompt: bool = False,
    ) -> Generation:
        """A text to be continued, as soon as a slot is free.

        Args: as of `Generation`.

        Raises:
            UsageError: an empty prompt, one that is longer than the model's max_length, an id
                outside the vocabulary, an option outside its range, or a text that may need more
                pages than there are.
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
        if not 0 <= adapter <= self._num_sets:
            raise UsageError(
                f"adapter={adapter} must be 0 (none), or the number of one of the "
                f"{self._num_sets} sets of adapters that the model has."
            )
        # No other id can come.
        stop_ids = tuple(i for i in stop_ids if 0 <= i < self._vocab_size)
        seen = tuple(i for i in earlier if 0 <= i < self._vocab_size)
        for token, _ in sampling.logit_bias:
            if not 0 <= token < self._vocab_size:
                raise UsageError(
                    f"logit_bias: token {token} must be in [0, {self._vocab_size}). Use ids of the "
                    "model's tokenizer."
                )
        generation = Generation(
            tuple(prompt),
            max_tokens,
            sampling,
            seed,
            row,
            before,
            seen,
            stop_ids,
            stop,
            adapter,
            constraint,
            scores_prompt,
        )
        self._require_pages(generation)
        self._waiting.append(generation)
        return generation

    def _require_pages(self, generation: Generation) -> None:
        """UsageError: there are too few pages for a text, even if it were alone."""
        if self._pages is None:
            return
        columns = generation.num_columns(self.max_length)
        if num_pages(columns) > self._pages.count:
            raise UsageError(
                f"a prompt of {len(generation.prompt):,} tokens and {generation.max_tokens:,} more "
                f"need {columns:,} columns of the caches, which have "
                f"{self._pages.count * PAGE:,}. Ask for fewer tokens, or make the caches larger."
            )

    def cancel(self, generation: Generation) -> None:
        """Ends a text where it is, and frees its slot."""
        if generation.reason is not None:
            return
        generation.reason = "cancelled"
        if generation in self._waiting:
            self._waiting.remove(generation)
        for slot in self._slots:
            if slot.generation is generation:
                # What was read has not been looked at before there is a new token.
                slot.is_spoiled = not generation.ids
                slot.leave()

    @property
    def num_waiting(self) -> int:
        """Texts without a slot."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Texts with a slot."""
        return sum(slot.generation is not None for slot in self._slots)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_sets(self) -> int:
        """Sets of adapters that the model has, numbered from 1 on."""
        return self._num_sets

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def has_pages(self) -> bool:
        """Whether caches are pages that texts share."""
        return self._pages is not None

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that the caches have room for."""
        if self._pages is None:
            return self.max_length
        return min(self.max_length, self._pages.count * PAGE)

    @property
    def least_piece(self) -> int:
        """Tokens of the shortest piece of a prompt."""
        return _LEAST_PIECE

    @property
    def piece_lengths(self) -> list[int]:
        """Lengths in tokens of the prompt pieces for which programs are compiled, ascending."""
        return [1 << n for n in range(_LEAST_PIECE.bit_length() - 1, self._piece.bit_length())]

    def forget_idle(self) -> None:
        """Forget the texts that slots without a text remember."""
        for slot in self._slots:
            # Slots with numbers that are not finite are cleared first, with the next step.
            if slot.generation is None and not slot.is_spoiled:
                self._forget(slot)

    def step(self) -> list[Generation]:
        """Gives free slots to texts that wait, reads a piece of their prompts, then makes up to
        `chunk` tokens of each row whose prompt is read.

        Returns:
            Texts that have new tokens or have ended; empty: there is nothing to do.

        Raises:
            Exception: of a device. If there was no room for a text that waited, it has ended as
                failed. Otherwise all texts with a slot have, for their caches are gone. Others can
                go on.
        """
        try:
            self._clear([slot for slot in self._slots if slot.is_spoiled])
            self._admit()
        except BaseException:
            if self._caches_are_gone():
                self._abandon()
            raise
        try:
            self._read_prompts()
            # Those that waited for a prompt that is read now.
            self._admit()
            while self._eager and any(slot.is_reading for slot in self._slots):
                self._read_prompts()
                self._admit()
            active = {slot: slot.generation for slot in self._slots if slot.is_decoding}
            if not active:
                return []
            before = [generation for generation in active.values() if generation is not None]
            allowed = self._allowed(active)
            # Those whose constraint can't be kept.
            changed = [each for each in before if each.reason is not None]
            if not active:
                return changed
            made = self._decode(list(active), allowed)
            tokens, logprobs = np.asarray(made.tokens), np.asarray(made.logprobs)
        except BaseException:
            self._abandon()
            raise
        for slot, generation in active.items():
            assert generation is not None
            changed.append(generation)
            count = int((tokens[slot.number] >= 0).sum())
            ids = tokens[slot.number, :count].tolist()
            slot.is_spoiled = not np.isfinite(logprobs[slot.number, :count]).all()
            # Each token is read when the one after it is made.
            slot.extend(as_ids([(generation.ids or generation.prompt)[-1], *ids[:-1]]))
            # The `stop` of another text may have cancelled this one.
            if slot.generation is generation:
                top = _alternatives(
                    made.top_tokens, made.top_logprobs, slot, generation.sampling.top_logprobs
                )
                self._take(slot, generation, ids, logprobs[slot.number, :count].tolist(), top)
        return changed

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

    def _caches_are_gone(self) -> bool:
        """Whether a program that failed had been given the caches."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self._caches))

    def _abandon(self) -> None:
        """Gives up all caches, and the texts that are in them."""
        for slot in self._slots:
            if slot.generation is not None:
                slot.generation.reason = "failed"
            slot.leave()
            self._forget(slot)
        self._caches = None
        self._columns = 0

    def _forget(self, slot: Slot) -> None:
        """Nothing is in its caches, and its pages are free."""
        slot.forget()
        if self._pages is not None:
            self._pages.give_back(slot.pages)
            slot.pages = []

    def _clear(self, slots: list[Slot]) -> None:
        """Zeros in the caches of these: what is not finite would reach texts that can't see it."""
        if not slots:
            return
        assert self._caches is not None
        is_row_kept = np.array([slot not in slots for slot in self._slots])
        is_page_kept = None
        if self._pages is not None:
            users = np.zeros(self._pages.count, np.int32)
            for slot in slots:
                users[slot.pages] += 1
            # What others have as well is cleared with the last of them.
            is_page_kept = users < self._pages.num_users
        self._caches = programs.clear(self._room(), self._caches, is_row_kept, is_page_kept)
        for slot in slots:
            self._forget(slot)

    # Reading prompts.

    def _admit(self) -> None:
        """Gives free slots to texts that wait, in their order. One that begins like a prompt that
        is being read waits until that is read."""
        postponed: list[Generation] = []
        try:
            while self._waiting and self.num_active < len(self._slots):
                generation = self._waiting.popleft()
                ids = generation.ids_to_read
                source = _Source(None, 0)
                if not generation.scores_prompt:
                    source = self._best_source(ids, generation.adapter)
                if not generation.scores_prompt and self._is_being_read(
                    ids, generation.adapter, source.shared
                ):
                    postponed.append(generation)
                elif not self._seat(generation, ids, source):
                    # There are no pages for it; it is not overtaken.
                    postponed.append(generation)
                    break
        finally:
            self._waiting.extendleft(reversed(postponed))

    def _is_being_read(self, ids: Int[np.ndarray, " N"], adapter: int, shared: int) -> bool:
        """Whether more of these than are remembered are in a prompt that is being read."""
        if not self._sharing:
            return False
        for slot in self._slots:
            if not slot.is_reading or slot.adapter != adapter:
                continue
            prompt = np.concatenate([slot.kept, slot.unread])
            soon = self._shareable(num_equal(ids, prompt))
            if soon < LEAST_SHARED or soon <= shared:
                continue
            # Rings may have forgotten the beginning by then.
            if self._still_has(len(prompt), soon):
                return True
        return False

    def _best_source(self, ids: Int[np.ndarray, " N"], adapter: int) -> _Source:
        """The slot that remembers most of the beginning of a prompt."""
        best = _Source(None, 0)
        if not self._sharing:
            return best
        for slot in self._slots:
            if slot.adapter != adapter:
                continue
            shared = num_equal(ids, slot.kept)
            # A free slot that ends there can go on as it is.
            if slot.generation is not None or shared < len(slot.kept):
                shared = self._shareable(shared)
            if shared < LEAST_SHARED or shared <= best.shared:
                continue
            if self._still_has(slot.reach, shared):
                best = _Source(slot, shared)
        return best

    def _shareable(self, shared: int) -> int:
        """How many columns a slot can have from another one that has so many."""
        if self._pages is None:
            return shared
        return shared - shared % PAGE

    def _still_has(self, reach: int, shared: int) -> bool:
        """Whether rings in which so many columns were written have all that a token at column
        `shared` sees."""
        for window in self._windows:
            kept = ring_size(self._columns, window, self._piece)
            if reach - kept > max(0, shared - window + 1):
                return False
        return True

    def _seat(self, generation: Generation, ids: Int[np.ndarray, " N"], source: _Source) -> bool:
        """Gives a text a slot, with what another slot remembers of its prompt; False: there are no
        pages for it.

        Args:
            generation: the text.
            ids: of its prompt, without the last.
            source: as of `_best_source`.
        """
        slot = self._free_slot(source)
        reach = 0
        if source.slot is not None:
            reach = source.slot.reach
        if self._pages is not None and not self._take_pages(slot, generation, source):
            return False
        try:
            # At least one column, for the first new token.
            self.make_room(len(ids) + 1)
            if source.slot is not None and source.slot is not slot:
                self._copy(source.slot, slot)
        except BaseException:
            generation.reason = "failed"
            self._forget(slot)
            raise
        slot.kept = ids[: source.shared]
        slot.unread = ids[source.shared :]
        slot.reach = reach
        slot.adapter = generation.adapter
        slot.generation = generation
        self._num_taken += 1
        slot.taken = self._num_taken
        slot.read = self._num_read
        return True

    def _free_slot(self, source: _Source) -> Slot:
        """A slot that is nobody's: rather one that remembers nothing, or what is long ago, and the
        source itself last; but first, if the prompt goes on where that ends."""
        slot = source.slot
        if slot is not None and slot.generation is None and source.shared == len(slot.kept):
            return slot

        def preference(slot: Slot) -> tuple[bool, bool, int]:
            return slot is source.slot, len(slot.kept) > 0, slot.taken

        free = [slot for slot in self._slots if slot.generation is None]
        return min(free, key=preference)

    def _take_pages(self, slot: Slot, generation: Generation, source: _Source) -> bool:
        """Pages for all that a text may become, of which the first are those of the source. Where
        too few are free, slots that are nobody's forget what they remember, the oldest first.

        Returns:
            False: there are too few, even then; nothing has changed.
        """
        assert self._pages is not None
        shared: list[int] = []
        if source.slot is not None:
            shared = source.slot.pages[: num_pages(source.shared)]
        self._pages.share(shared)
        count = num_pages(generation.num_columns(self.max_length)) - len(shared)
        idle = [other for other in self._slots if other.generation is None]
        if self._pages.num_free_after([other.pages for other in idle]) < count:
            self._pages.give_back(shared)
            return False
        for other in sorted(idle, key=lambda other: (other is not slot, other.taken)):
            if other is slot or self._pages.num_free < count:
                self._forget(other)
        slot.pages = [*shared, *self._pages.take(count)]
        return True

    def _read_prompts(self) -> None:
        """Reads pieces of prompts: one, where texts are being made that wait for it, and else until
        one of them can begin."""
        while any(slot.is_reading for slot in self._slots):
            others_wait = any(slot.is_decoding for slot in self._slots)
            reading = [slot for slot in self._slots if slot.is_reading]
            # By turns, so that a short prompt need not wait for the end of a long one.
            reading.sort(key=lambda slot: (slot.read, slot.taken))
            length = self._next_length(reading[0])
            most = _MOST_READ
            if others_wait:
                most = min(_MOST_READ, max(1, self._piece // length))
            together = [
                slot
                for slot in reading
                if self._next_length(slot) == length
                and slot.scores_prompt == reading[0].scores_prompt
            ]
            self._read_pieces(together[:most], length)
            if others_wait:
                return
            if any(slot.is_decoding for slot in self._slots):
                return

    def _next_length(self, slot: Slot) -> int:
        """Of the next piece of a prompt, with its padding."""
        return min(self._piece, max(_LEAST_PIECE, _power_of_two(len(slot.unread))))

    def _read_pieces(self, slots: list[Slot], length: int) -> None:
        """The next piece of each prompt, all of the same length."""
        # A few numbers of rows, so that a few programs serve all.
        rows = _power_of_two(len(slots))
        rows = -(-rows // batch_shards()) * batch_shards()
        piece = Piece(
            # What is for no slot is dropped.
            targets=np.full(rows, len(self._slots), np.int32),
            tokens=np.zeros((rows, length), np.int32),
            counts=np.zeros(rows, np.int32),
            lengths=np.zeros(rows, np.int32),
            whole_lengths=np.ones(rows, np.int32),
            adapters=np.zeros(rows, np.int32),
            pages=self._table(rows, dict(enumerate(slots)), length),
            following=None,
        )
        num_top = 0
        if slots[0].scores_prompt:
            num_top = min(MOST_TOP_LOGPROBS, self._vocab_size)
            piece = piece._replace(following=np.zeros((rows, length), np.int32))
        self._num_read += 1
        for i, slot in enumerate(slots):
            new = slot.unread[:length]
            piece.targets[i] = slot.number
            piece.tokens[i, : len(new)] = new
            piece.counts[i] = len(new)
            piece.lengths[i] = len(slot.kept)
            piece.whole_lengths[i] = slot.whole_length
            piece.adapters[i] = slot.adapter
            if piece.following is not None:
                assert slot.generation is not None
                after = slot.generation.prompt[len(slot.kept) + 1 :][: len(new)]
                piece.following[i, : len(after)] = after
        assert self._caches is not None
        from_start = not piece.lengths.any()
        self._caches, scores = programs.read_into(
            self._graphdef, self._room(), from_start, num_top, self._params, self._caches, piece
        )
        if scores is not None:
            _take_scores(slots, piece, scores)
        for slot in slots:
            slot.extend(slot.unread[:length])
            slot.unread = slot.unread[length:]
            slot.read = self._num_read

    def _table(self, rows: int, slots: dict[int, Slot], new: int) -> Int[np.ndarray, "B M"] | None:
        """The pages that some rows use when they get so many new columns; others use none.

        Args:
            rows: B.
            slots: by the number of the row.
            new: columns.
        """
        if self._pages is None:
            return None
        most = max(num_pages(len(slot.kept) + new) for slot in slots.values())
        # A few sizes, so that a few programs serve all.
        table = np.zeros((rows, _power_of_two(most)), np.int32)
        for row, slot in slots.items():
            count = min(len(slot.pages), table.shape[1])
            table[row, :count] = slot.pages[:count]
            # Nobody sees what is behind; of its own pages it is finite if the row is.
            table[row, count:] = slot.pages[0]
        return table

    def _copy(self, source: Slot, target: Slot) -> None:
        """What is in the rings of one slot, into those of another."""
        assert self._caches is not None
        if self._caches.keys() == self._paged:
            return
        rows = batch_shards()
        sources = np.full(rows, source.number, np.int32)
        # What is for no slot is dropped.
        targets = np.full(rows, len(self._slots), np.int32)
        targets[0] = target.number
        self._caches = programs.copy_rows(self._room(), self._caches, sources, targets)

    def make_room(self, columns: int) -> None:
        """Enlarge the caches to at least so many columns of each row, if they have fewer."""
        if columns <= self._columns:
            return
        # No row becomes longer than that.
        most = self.max_length
        if self._pages is not None:
            # Rings are those of layers with a window alone.
            most = max((window + self._piece for window in self._windows), default=0)
        columns = _rounded(columns, most)
        if columns <= self._columns:
            return
        room = self._room()._replace(columns=columns)
        if self._caches is None:
            self._caches = programs.new_caches(self._graphdef, room, self._params)
        else:
            self._caches = programs.enlarge(self._graphdef, room, self._params, self._caches)
        self._columns = columns

    def _room(self) -> Room:
        """Of the caches as they are."""
        pages = None
        if self._pages is not None:
            pages = self._pages.count
        return Room(len(self._slots), self._columns, self._piece, pages, self._paged)

    # Decoding.

    def _allowed(self, active: dict[Slot, Generation | None]) -> dict[Slot, np.ndarray]:
        """Return the tokens that may come next in the rows that have a constraint. A text whose
        constraint allows none ends, and is taken out of `active`."""
        found = {}
        for slot, generation in list(active.items()):
            assert generation is not None
            if generation.constraint is None:
                continue
            allowed = generation.constraint.allowed()
            # Entries of the model that the tokenizer does not know.
            allowed = np.pad(
                allowed[: self._vocab_size], (0, max(0, self._vocab_size - len(allowed)))
            )
            if allowed.any():
                found[slot] = allowed
            else:
                generation.reason = "unconstrained"
                slot.leave()
                del active[slot]
        return found

    def _decode(self, slots: list[Slot], allowed: dict[Slot, np.ndarray]) -> Made:
        """More tokens of each row, behind them -1, and their log-probabilities.

        Args:
            slots: of rows that decode.
            allowed: the tokens that may come next in rows that have a constraint. There is one
                token of each row then, since the constraint decides about the next one.
        """
        wanted = {slot: self._wanted(slot) for slot in slots}
        if allowed:
            wanted = dict.fromkeys(slots, 1)
        self.make_room(max(len(slot.kept) + count for slot, count in wanted.items()))
        samplings = [_NOBODYS] * len(self._slots)
        for slot in slots:
            assert slot.generation is not None
            samplings[slot.number] = slot.generation.sampling
        rows = self._rows(wanted, samplings)._replace(bias=self._bias(slots, allowed))
        program = Program.for_rows(samplings, self._vocab_size)
        assert self._caches is not None
        made = programs.decode(
            self._graphdef,
            self._room(),
            program,
            self._chunk,
            self._params,
            self._caches,
            rows,
        )
        self._caches = made.caches
        return made

    def _bias(
        self, slots: list[Slot], allowed: dict[Slot, np.ndarray]
    ) -> Float[np.ndarray, "B V"] | None:
        """Return what is added to the logits of each row, if there is anything."""
        bias = None
        for slot in slots:
            generation = slot.generation
            assert generation is not None
            if slot not in allowed and not generation.sampling.logit_bias:
                continue
            if bias is None:
                bias = np.zeros((len(self._slots), self._vocab_size), np.float32)
            row = bias[slot.number]
            for token, value in generation.sampling.logit_bias:
                row[token] = value
            if slot in allowed:
                row[~allowed[slot]] = -np.inf
        return bias

    def _wanted(self, slot: Slot) -> int:
        """How many tokens the row of a slot may get now."""
        generation = slot.generation
        assert generation is not None
        left = generation.max_tokens - len(generation.ids)
        in_window = self.max_length + 1 - len(generation.prompt) - len(generation.ids)
        return min(left, in_window, self._chunk)

    def _rows(self, wanted: dict[Slot, int], samplings: list[Sampling]) -> Rows:
        count = len(self._slots)
        last = np.zeros(count, np.int32)
        lengths = np.zeros(count, np.int32)
        most = np.zeros(count, np.int32)
        made = np.zeros(count, np.int32)
        seeds = np.zeros((count, 2), np.uint32)
        adapters = np.zeros(count, np.int32)
        most_stops = 0
        for slot in wanted:
            assert slot.generation is not None
            most_stops = max(most_stops, len(slot.generation.stop_ids))
        width = _power_of_two(max(most_stops, _LEAST_STOPS))
        stop_ids = np.full((count, width), -1, np.int32)
        for slot, tokens in wanted.items():
            generation = slot.generation
            assert generation is not None
            i = slot.number
            last[i] = (generation.ids or generation.prompt)[-1]
            lengths[i] = len(slot.kept)
            most[i] = tokens
            made[i] = generation.before + len(generation.ids)
            seeds[i] = generation.seed, generation.row
            stop_ids[i, : len(generation.stop_ids)] = generation.stop_ids
            adapters[i] = slot.adapter
        return Rows(
            last,
            lengths,
            most,
            seeds,
            made,
            stop_ids,
            Settings.of(samplings, self._vocab_size),
            self._history(list(wanted)),
            None,
            adapters,
            self._table(count, {slot.number: slot for slot in wanted}, max(wanted.values())),
        )

    def _history(self, slots: list[Slot]) -> History | None:
        """Return which tokens each row has, if some row has a penalty for them."""
        rows = []
        for slot in slots:
            generation = slot.generation
            assert generation is not None
            if not generation.sampling.penalises:
                continue
            if slot.seen is None or slot.counts is None:
                slot.seen = np.zeros(self._vocab_size, bool)
                slot.seen[list(generation.earlier)] = True
                slot.seen[list(generation.prompt)] = True
                slot.counts = np.zeros(self._vocab_size, np.int32)
                slot.num_counted = 0
            new = generation.ids[slot.num_counted :]
            slot.seen[new] = True
            np.add.at(slot.counts, new, 1)
            slot.num_counted = len(generation.ids)
            rows.append(slot)
        if not rows:
            return None
        shape = (len(self._slots), self._vocab_size)
        seen = np.zeros(shape, bool)
        counts = np.zeros(shape, np.int32)
        for slot in rows:
            seen[slot.number] = slot.seen
            counts[slot.number] = slot.counts
        return History(seen, counts)  # type: ignore[arg-type]

    def _take(
        self,
        slot: Slot,
        generation: Generation,
        tokens: list[int],
        logprobs: list[float],
        top: list[Alternatives],
    ) -> None:
        """What decoding has made of the row of a slot, which is free then if that is the end."""
        generation.take(tokens, logprobs, self.max_length, top)
        if generation.reason is not None:
            slot.leave()


def _alternatives(tokens: Any, logprobs: Any, slot: Slot, count: int) -> list[Alternatives]:
    """Return the likeliest tokens in the place of each new token of a row, those that can come."""
    if not count:
        return []
    return _pairs(np.asarray(tokens)[slot.number], np.asarray(logprobs)[slot.number], count)


def _pairs(tokens: np.ndarray, logprobs: np.ndarray, count: int) -> list[Alternatives]:
    """Return tokens with their log-probabilities for each position, without impossible ones."""
    return [
        [(int(i), float(x)) for i, x in zip(ids, values) if np.isfinite(x)][:count]
        for ids, values in zip(tokens, logprobs)
    ]


def _take_scores(slots: list[Slot], piece: Piece, scores: programs.Scores) -> None:
    """Give the scores of a piece of each prompt to its text."""
    logprobs = np.asarray(scores.logprobs)
    top_tokens = np.asarray(scores.top_tokens)
    top_logprobs = np.asarray(scores.top_logprobs)
    for i, slot in enumerate(slots):
        generation = slot.generation
        assert generation is not None
        count = int(piece.counts[i])
        generation.prompt_logprobs += logprobs[i, :count].tolist()
        wanted = generation.sampling.top_logprobs
        generation.prompt_top += _pairs(top_tokens[i, :count], top_logprobs[i, :count], wanted)


def cache_room(slots: int, shards: int, columns: int, max_length: int) -> Room:
    """The largest caches of an engine without pages, once a row has so many columns.

    Args:
        slots: as of `Engine`.
        shards: parts that rows are split into.
    """
    return Room(_rows(slots, shards), _rounded(columns, max_length), _PIECE, None, frozenset())


def _rows(slots: int, shards: int) -> int:
    """Slots, in which each shard has as many."""
    return -(-slots // shards) * shards


def _rounded(columns: int, most: int) -> int:
    """Columns of caches, of which there are few numbers: each is compiled for."""
    most = -(-most // _LEAST_COLUMNS) * _LEAST_COLUMNS
    return max(_LEAST_COLUMNS, min(_power_of_two(columns), most))


def _power_of_two(count: int) -> int:
    """The least that is not smaller; 1 for 0."""
    return 1 << max(0, count - 1).bit_length()
