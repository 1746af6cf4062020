"""The generation engine: continuous batching with a KV cache.

Prompts are submitted at any time, and tokens come out as they are decoded.

The engine has slots, which are the rows of one batch. A prompt is prefilled into a slot of its own,
piece by piece. From then on its row takes part in decoding, in which each row gets one token at a
time. While texts are being decoded, at most one piece of a prompt is prefilled between two chunks
of their tokens. A row that ends leaves its slot to the next prompt. The caches stay: a slot
remembers what it has read, and a prompt with the same prefix is read from there on.

Caches are either rings or pages. Each slot has rings of its own, as long as the longest text. Of
pages there is a fixed number for all texts together, and texts with an equal prefix share its
pages. A text gets a slot only when there are pages for its longest possible continuation, so that
none is ever evicted for lack of memory.

Every program has one of a few shapes: prompts are read in pieces of 16, 32, ... tokens, and caches
have room for 128, 256, ... columns. So no new prompt length needs a compilation. Up to rounding,
the numbers of a row do not depend on other rows; its random numbers depend on its seed, its number
and the number of its tokens.

On several devices, rows are sharded like those of a training batch, and heads as in training. On
several processes, each has an engine, and all of them make the same calls: what the engine does
depends only on the submitted texts and on the tokens, which are equal everywhere.
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
from maxtrain.inference.programs import CacheSizes, DecodeInputs, DecodeOutputs, PrefillChunk
from maxtrain.inference.sampling import (
    MOST_TOP_LOGPROBS,
    History,
    Sampling,
    SamplingArrays,
    SamplingProgram,
    check_length,
)
from maxtrain.inference.slots import LEAST_SHARED, Slot, as_ids, num_equal
from maxtrain.models.cache import PAGE, Caches, ring_size
from maxtrain.models.decoder import Decoder
from maxtrain.models.lora_bank import num_sets
from maxtrain.parallel.sharding import batch_shards

# Tokens of the shortest piece of a prompt.
_LEAST_PIECE = 16
# Tokens of a prompt that are read at once by default.
_PIECE = 512
# Columns of the smallest caches.
_LEAST_COLUMNS = 128
# Most rows whose pieces are read together.
_MOST_READ = 8
# Stop ids of a row in the smallest program.
_LEAST_STOPS = 4
# Settings of a row without a text.
_NOBODYS = Sampling(temperature=0.0)


class _PrefixSource(NamedTuple):
    """A slot that holds the prefix of a prompt in its caches.

    Args:
        slot: the slot; None: there is none.
        shared: number of tokens of the common prefix.
    """

    slot: Slot | None
    shared: int


class Engine:
    """Continuous-batching engine that continues texts side by side. Not thread-safe.

    Args:
        model: on one device, or sharded over the current mesh. Its arrays are not copied.
        slots: texts that are decoded together; others wait. On a mesh, rounded up to a multiple of
            the number of batch shards.
        chunk: tokens of each row between two checks for ended and waiting texts.
        piece: most tokens of a prompt that are read at once, a power of two.
        sharing: whether a prompt reuses the cached prefix of another text (prefix caching). Cached
            values may have been computed with other shapes, and are equal up to rounding.
        cache_tokens: number of tokens in the paged caches of layers without a window, for all texts
            together, with remembered ones; None: each slot has room for the longest text.
        eager: whether all prompts with a slot are read before decoding continues. This is best for
            throughput, if nobody waits for the next token of a text.

    Raises:
        ValueError: a size is out of range.
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
        # Cached keys would have been rotated for another length.
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
        """Submit a text to be continued as soon as a slot is free.

        The arguments are the attributes of `Generation`.

        Raises:
            UsageError: an empty prompt, a prompt longer than the model's max_length, an id outside
                the vocabulary, an option out of range, or a text that may need more pages than
                there are.
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
        # Other ids cannot be generated.
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
        """Raise a UsageError if there are too few pages for a text, even if it were alone."""
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
        """End a text where it is, and free its slot."""
        if generation.reason is not None:
            return
        generation.reason = "cancelled"
        if generation in self._waiting:
            self._waiting.remove(generation)
        for slot in self._slots:
            if slot.generation is generation:
                # Cached values are only known to be finite once there is a new token.
                slot.is_spoiled = not generation.ids
                slot.leave()

    @property
    def num_waiting(self) -> int:
        """Return the number of texts without a slot."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Return the number of texts with a slot."""
        return sum(slot.generation is not None for slot in self._slots)

    @property
    def num_slots(self) -> int:
        """Return the number of slots."""
        return len(self._slots)

    @property
    def num_sets(self) -> int:
        """Return the number of the model's sets of adapters, which are numbered from 1 on."""
        return self._num_sets

    @property
    def vocab_size(self) -> int:
        """Return the number of entries of the model's vocabulary."""
        return self._vocab_size

    @property
    def has_pages(self) -> bool:
        """Return whether caches are pages that texts share."""
        return self._pages is not None

    @property
    def longest_text(self) -> int:
        """Return the tokens of the longest text that the caches have room for."""
        if self._pages is None:
            return self.max_length
        return min(self.max_length, self._pages.count * PAGE)

    @property
    def least_piece(self) -> int:
        """Return the tokens of the shortest piece of a prompt."""
        return _LEAST_PIECE

    @property
    def piece_lengths(self) -> list[int]:
        """Return the lengths in tokens of the prompt pieces for which programs are compiled,
        ascending."""
        return [1 << n for n in range(_LEAST_PIECE.bit_length() - 1, self._piece.bit_length())]

    def forget_idle(self) -> None:
        """Forget the texts that slots without a text remember."""
        for slot in self._slots:
            # Slots with numbers that are not finite are cleared first, with the next step.
            if slot.generation is None and not slot.is_spoiled:
                self._forget(slot)

    def step(self) -> list[Generation]:
        """Give free slots to waiting texts, read a piece of their prompts, then decode up to
        `chunk` tokens of each row whose prompt is read.

        Returns:
            the texts that have new tokens or have ended; empty: there is nothing to do.

        Raises:
            Exception: a device failed. If there was no room for a waiting text, that text has ended
                as failed. Otherwise all texts with a slot have, because their caches are lost.
                Other texts can continue.
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
            # Admit texts that waited for the prefix of a prompt that is read now.
            self._admit()
            while self._eager and any(slot.is_reading for slot in self._slots):
                self._read_prompts()
                self._admit()
            active = {slot: slot.generation for slot in self._slots if slot.is_decoding}
            if not active:
                return []
            before = [generation for generation in active.values() if generation is not None]
            allowed = self._allowed(active)
            # Texts whose constraint cannot be satisfied.
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
            # A token enters the caches when the next one is decoded.
            slot.extend(as_ids([(generation.ids or generation.prompt)[-1], *ids[:-1]]))
            # The `stop` of another text may have cancelled this one.
            if slot.generation is generation:
                top = _alternatives(
                    made.top_tokens, made.top_logprobs, slot, generation.sampling.top_logprobs
                )
                self._take(slot, generation, ids, logprobs[slot.number, :count].tolist(), top)
        return changed

    def stream(self, generation: Generation) -> Iterator[list[int]]:
        """Yield new ids of a text as they come, until it ends; other texts continue meanwhile."""
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
        """Decode until all texts have ended."""
        while self.step():
            pass

    def _caches_are_gone(self) -> bool:
        """Return whether a program that failed had received the donated caches."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self._caches))

    def _abandon(self) -> None:
        """Give up all caches, and the texts in them."""
        for slot in self._slots:
            if slot.generation is not None:
                slot.generation.reason = "failed"
            slot.leave()
            self._forget(slot)
        self._caches = None
        self._columns = 0

    def _forget(self, slot: Slot) -> None:
        """Mark a slot's caches as empty, and free its pages."""
        slot.forget()
        if self._pages is not None:
            self._pages.give_back(slot.pages)
            slot.pages = []

    def _clear(self, slots: list[Slot]) -> None:
        """Write zeros to the caches of these slots, because non-finite values would reach texts
        that must not see them."""
        if not slots:
            return
        assert self._caches is not None
        is_row_kept = np.array([slot not in slots for slot in self._slots])
        is_page_kept = None
        if self._pages is not None:
            users = np.zeros(self._pages.count, np.int32)
            for slot in slots:
                users[slot.pages] += 1
            # A page that other texts share is cleared with the last of them.
            is_page_kept = users < self._pages.num_users
        self._caches = programs.clear(self._room(), self._caches, is_row_kept, is_page_kept)
        for slot in slots:
            self._forget(slot)

    # Reading prompts.

    def _admit(self) -> None:
        """Give free slots to waiting texts, in their order. A text whose prefix is being read for
        another text waits until that is done."""
        postponed: list[Generation] = []
        try:
            while self._waiting and self.num_active < len(self._slots):
                generation = self._waiting.popleft()
                ids = generation.ids_to_read
                source = _PrefixSource(None, 0)
                if not generation.scores_prompt:
                    source = self._best_source(ids, generation.adapter)
                if not generation.scores_prompt and self._is_being_read(
                    ids, generation.adapter, source.shared
                ):
                    postponed.append(generation)
                elif not self._seat(generation, ids, source):
                    # There are no pages for this text, and no later text overtakes it.
                    postponed.append(generation)
                    break
        finally:
            self._waiting.extendleft(reversed(postponed))

    def _is_being_read(self, ids: Int[np.ndarray, " N"], adapter: int, shared: int) -> bool:
        """Return whether a prompt that is being read shares a longer prefix than the remembered
        one."""
        if not self._sharing:
            return False
        for slot in self._slots:
            if not slot.is_reading or slot.adapter != adapter:
                continue
            prompt = np.concatenate([slot.kept, slot.unread])
            soon = self._shareable(num_equal(ids, prompt))
            if soon < LEAST_SHARED or soon <= shared:
                continue
            # Rings may have overwritten the beginning by then.
            if self._still_has(len(prompt), soon):
                return True
        return False

    def _best_source(self, ids: Int[np.ndarray, " N"], adapter: int) -> _PrefixSource:
        """Return the slot that remembers the longest prefix of a prompt."""
        best = _PrefixSource(None, 0)
        if not self._sharing:
            return best
        for slot in self._slots:
            if slot.adapter != adapter:
                continue
            shared = num_equal(ids, slot.kept)
            # A free slot whose text ends there can continue without a copy.
            if slot.generation is not None or shared < len(slot.kept):
                shared = self._shareable(shared)
            if shared < LEAST_SHARED or shared <= best.shared:
                continue
            if self._still_has(slot.reach, shared):
                best = _PrefixSource(slot, shared)
        return best

    def _shareable(self, shared: int) -> int:
        """Return how many of `shared` columns another slot can reuse: whole pages only."""
        if self._pages is None:
            return shared
        return shared - shared % PAGE

    def _still_has(self, reach: int, shared: int) -> bool:
        """Return whether rings of `reach` written columns still hold everything that a token at
        column `shared` attends to."""
        for window in self._windows:
            kept = ring_size(self._columns, window, self._piece)
            if reach - kept > max(0, shared - window + 1):
                return False
        return True

    def _seat(
        self, generation: Generation, ids: Int[np.ndarray, " N"], source: _PrefixSource
    ) -> bool:
        """Give a text a slot, with the remembered prefix of its prompt; False: there are no pages
        for it.

        Args:
            generation: the text.
            ids: the prompt without its last token.
            source: from `_best_source`.
        """
        slot = self._free_slot(source)
        reach = 0
        if source.slot is not None:
            reach = source.slot.reach
        if self._pages is not None and not self._take_pages(slot, generation, source):
            return False
        try:
            # One more column, for the first new token.
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

    def _free_slot(self, source: _PrefixSource) -> Slot:
        """Return a free slot: preferably an empty or long unused one, and the source only last. But
        if the prompt continues where the source ends, return the source."""
        slot = source.slot
        if slot is not None and slot.generation is None and source.shared == len(slot.kept):
            return slot

        def preference(slot: Slot) -> tuple[bool, bool, int]:
            return slot is source.slot, len(slot.kept) > 0, slot.taken

        free = [slot for slot in self._slots if slot.generation is None]
        return min(free, key=preference)

    def _take_pages(self, slot: Slot, generation: Generation, source: _PrefixSource) -> bool:
        """Take pages for everything that a text may become, the first ones shared with the source.
        If too few are free, idle slots forget their texts, the oldest first.

        Returns:
            False: there are too few even then, and nothing has changed.
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
        """Read pieces of prompts: one piece while texts are being decoded, else until one prompt is
        complete."""
        while any(slot.is_reading for slot in self._slots):
            others_wait = any(slot.is_decoding for slot in self._slots)
            reading = [slot for slot in self._slots if slot.is_reading]
            # Prompts take turns, so that a short one does not wait for the end of a long one.
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
        """Return the padded length of the next piece of a prompt."""
        return min(self._piece, max(_LEAST_PIECE, _power_of_two(len(slot.unread))))

    def _read_pieces(self, slots: list[Slot], length: int) -> None:
        """Read the next piece of each prompt, all of the same length."""
        # Row counts are powers of two, so that few programs are compiled.
        rows = _power_of_two(len(slots))
        rows = -(-rows // batch_shards()) * batch_shards()
        piece = PrefillChunk(
            # Rows without a slot are dropped.
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
        """Return the page table of some rows once they have `new` more columns; other rows use no
        pages.

        Args:
            rows: B.
            slots: slots by the number of the row.
            new: number of new columns.
        """
        if self._pages is None:
            return None
        most = max(num_pages(len(slot.kept) + new) for slot in slots.values())
        # Table widths are powers of two, so that few programs are compiled.
        table = np.zeros((rows, _power_of_two(most)), np.int32)
        for row, slot in slots.items():
            count = min(len(slot.pages), table.shape[1])
            table[row, :count] = slot.pages[:count]
            # Entries beyond a row's pages are masked. A page of its own keeps them finite if the
            # row is.
            table[row, count:] = slot.pages[0]
        return table

    def _copy(self, source: Slot, target: Slot) -> None:
        """Copy the rings of one slot into those of another."""
        assert self._caches is not None
        if self._caches.keys() == self._paged:
            return
        rows = batch_shards()
        sources = np.full(rows, source.number, np.int32)
        # Rows without a slot are dropped.
        targets = np.full(rows, len(self._slots), np.int32)
        targets[0] = target.number
        self._caches = programs.copy_rows(self._room(), self._caches, sources, targets)

    def make_room(self, columns: int) -> None:
        """Enlarge the caches to at least this number of columns for each row."""
        if columns <= self._columns:
            return
        # No row becomes longer.
        most = self.max_length
        if self._pages is not None:
            # With pages, only layers with a window have rings.
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

    def _room(self) -> CacheSizes:
        """Return the sizes of the present caches."""
        pages = None
        if self._pages is not None:
            pages = self._pages.count
        return CacheSizes(len(self._slots), self._columns, self._piece, pages, self._paged)

    # Decoding.

    def _allowed(self, active: dict[Slot, Generation | None]) -> dict[Slot, np.ndarray]:
        """Return the tokens that may come next in the rows that have a constraint. A text whose
        constraint allows none ends, and is removed from `active`."""
        found = {}
        for slot, generation in list(active.items()):
            assert generation is not None
            if generation.constraint is None:
                continue
            allowed = generation.constraint.allowed()
            # The model may have entries that the tokenizer does not know.
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

    def _decode(self, slots: list[Slot], allowed: dict[Slot, np.ndarray]) -> DecodeOutputs:
        """Decode more tokens of each row, padded with -1, with their log-probabilities.

        Args:
            slots: the slots that decode.
            allowed: the tokens that may come next in rows that have a constraint. Each row then
                gets one token only, since the constraint decides about the next one.
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
        program = SamplingProgram.for_rows(samplings, self._vocab_size)
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
        """Return the biases added to the logits of each row; None: there are none."""
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
        """Return how many tokens the row of a slot may get now."""
        generation = slot.generation
        assert generation is not None
        left = generation.max_tokens - len(generation.ids)
        in_window = self.max_length + 1 - len(generation.prompt) - len(generation.ids)
        return min(left, in_window, self._chunk)

    def _rows(self, wanted: dict[Slot, int], samplings: list[Sampling]) -> DecodeInputs:
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
        return DecodeInputs(
            last,
            lengths,
            most,
            seeds,
            made,
            stop_ids,
            SamplingArrays.of(samplings, self._vocab_size),
            self._history(list(wanted)),
            None,
            adapters,
            self._table(count, {slot.number: slot for slot in wanted}, max(wanted.values())),
        )

    def _history(self, slots: list[Slot]) -> History | None:
        """Return which tokens each row has, if some row has a penalty for them; else None."""
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
        """Give decoded tokens to the text of a slot, and free the slot if the text ends."""
        generation.take(tokens, logprobs, self.max_length, top)
        if generation.reason is not None:
            slot.leave()


def _alternatives(tokens: Any, logprobs: Any, slot: Slot, count: int) -> list[Alternatives]:
    """Return the likeliest tokens at the position of each new token of a row, without impossible
    ones."""
    if not count:
        return []
    return _pairs(np.asarray(tokens)[slot.number], np.asarray(logprobs)[slot.number], count)


def _pairs(tokens: np.ndarray, logprobs: np.ndarray, count: int) -> list[Alternatives]:
    """Return tokens with their log-probabilities for each position, without impossible ones."""
    return [
        [(int(i), float(x)) for i, x in zip(ids, values) if np.isfinite(x)][:count]
        for ids, values in zip(tokens, logprobs)
    ]


def _take_scores(slots: list[Slot], piece: PrefillChunk, scores: programs.PromptLogProbs) -> None:
    """Add the scores of a piece of each prompt to its text."""
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


def cache_room(slots: int, shards: int, columns: int, max_length: int) -> CacheSizes:
    """Return the largest cache sizes of an engine without pages, once a row has this number of
    columns.

    Args:
        slots: as for `Engine`.
        shards: number of batch shards.
    """
    return CacheSizes(
        _rows(slots, shards), _rounded(columns, max_length), _PIECE, None, frozenset()
    )


def _rows(slots: int, shards: int) -> int:
    """Collect the inputs of decoding for all rows."""
    return -(-slots // shards) * shards


def _rounded(columns: int, most: int) -> int:
    """Round a number of columns up to one of few sizes, because each size needs a compilation."""
    most = -(-most // _LEAST_COLUMNS) * _LEAST_COLUMNS
    return max(_LEAST_COLUMNS, min(_power_of_two(columns), most))


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is not smaller; 1 for 0."""
    return 1 << max(0, count - 1).bit_length()
