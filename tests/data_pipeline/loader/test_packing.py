"""Packing: equal to slow oracles that walk token by token, and every token a target exactly
once."""

import collections
import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.loader.packing import Windows, count_rows, pack, pack_documents, phase
from data_pipeline.plan.document_packing import Bins, open_bins
from data_pipeline.shards import Manifest, ShardWriter, TokenShards

END = 4999  # the end-of-document token
layouts = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3)
policies = st.sampled_from(["append", "none"])
masked_shards = st.sets(st.integers(0, 2))  # numbers of the shards that have a loss mask


def is_target(token):
    """The loss mask that `write` gives on request."""
    return token * 7919 % 11 < 6


def write(directory, layout, eod, masked=()):
    """Shards of documents with the given lengths; token i of the stream is i, so that it tells
    where it was read.

    Shards whose numbers are in `masked` have a loss mask.
    """
    directory.mkdir(parents=True, exist_ok=True)
    entries, first = [], 0
    for number, lengths in enumerate(layout):
        writer = ShardWriter(directory, f"tokens-{number:05d}", 5000)
        tokens = np.arange(first, first + sum(lengths))
        writer.append(tokens, np.array(lengths), is_target(tokens) if number in masked else None)
        first += sum(lengths)
        entries.append(writer.close())
    tokenizer = {
        "name": "test",
        "sha256": hashlib.sha256(b"").hexdigest(),
        "vocab_size": 5000,
        "special_ids": {"eod": END},
    }
    Manifest(tokenizer, "uint16", eod, 10, tuple(entries)).save(directory)
    return TokenShards.open(directory)


def packed(shards, rows, length, restart=True, across=False):
    """A batch of (start, count) rows of one source."""
    start, count = np.array(rows).T
    return pack([shards], Windows(np.zeros_like(start), start, count), length, restart, across)


def targets_of(layout, masked):
    """Return the loss mask of each token of the stream."""
    shard_of = [number for number, lengths in enumerate(layout) for _ in range(sum(lengths))]
    return [number not in masked or is_target(token) for token, number in enumerate(shard_of)]


def oracle(layout, masked, start, count, length, eod, restart, across):
    """Pack one row, position by position."""
    lengths = [n for shard in layout for n in shard]
    total, begins, counts = (
        sum(lengths),
        set(np.cumsum([0, *lengths])[:-1].tolist()),
        targets_of(layout, masked),
    )
    row = {
        name: [0] * length
        for name in ("inputs", "targets", "segment_ids", "positions", "loss_mask")
    }
    segment, position = 1, 0
    for i in range(length):
        if not restart:
            row["positions"][i] = i
        if i >= count:
            continue
        target = (start + 1 + i) % total
        # Without end marks a segment begins with its document's own first token.
        first = target if eod == "append" else (start + i) % total
        if i and first in begins and not across:
            segment, position = segment + 1, 0
        if restart:
            row["positions"][i] = position
        row["inputs"][i], row["targets"][i], row["segment_ids"][i] = (
            (start + i) % total,
            target,
            segment,
        )
        row["loss_mask"][i] = int(counts[target] and (eod == "append" or target not in begins))
        position += 1
    return row


@settings(max_examples=80, deadline=None)
@given(
    layouts, masked_shards, policies, st.integers(1, 20), st.booleans(), st.booleans(), st.data()
)
def test_rows_equal_the_oracle(
    tmp_path_factory, layout, masked, eod, length, restart, across, data
):
    shards = write(tmp_path_factory.mktemp("shards"), layout, eod, masked)
    rows = st.tuples(st.integers(-1, 60), st.integers(0, length))
    windows = data.draw(st.lists(rows, min_size=1, max_size=5))
    batch = packed(shards, windows, length, restart, across)
    for index, (start, count) in enumerate(windows):
        for name, expected in oracle(
            layout, masked, start, count, length, eod, restart, across
        ).items():
            assert batch[name][index].tolist() == expected, (name, index)
    for name, array in batch.items():
        assert array.flags.c_contiguous and array.dtype == (
            np.float32 if name == "loss_mask" else np.int32
        )


@settings(max_examples=40, deadline=None)
@given(
    layouts, masked_shards, policies, st.integers(1, 20), st.integers(0, 2**63), st.integers(0, 50)
)
def test_every_token_is_a_target_exactly_once_per_epoch(
    tmp_path_factory, layout, masked, eod, length, seed, epoch
):
    shards = write(tmp_path_factory.mktemp("shards"), layout, eod, masked)
    total = shards.num_tokens
    first = phase(seed, shards.uid, epoch, total)
    rows = range(count_rows(total, length))
    batch = packed(
        shards, [(first + i * length, min(length, total - i * length)) for i in rows], length
    )
    found = collections.Counter(batch["targets"][batch["segment_ids"] > 0].tolist())
    assert found == collections.Counter(range(total))
    assert batch["loss_mask"].sum() == shards.manifest.num_targets
    assert 0 <= first < total


def test_end_of_document_token_begins_the_next_document(tmp_path):
    shards = write(
        tmp_path, [[3, 4]], "append"
    )  # documents 0 1 2 | 3 4 5 6: tokens 2 and 6 are the end marks
    batch = packed(shards, [(-1, 7)], 8)
    assert batch["inputs"].tolist() == [[6, 0, 1, 2, 3, 4, 5, 0]]
    assert batch["targets"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]


def test_phases_of_epochs_seeds_and_sources_differ():
    phases = {
        phase(seed, uid, epoch, 10**9) for seed in range(5) for uid in "ab" for epoch in range(5)
    }
    assert len(phases) == 50
    assert np.std([p / 10**9 for p in phases]) == pytest.approx(
        12**-0.5, abs=0.05
    )  # uniform over the stream


def oracle_of_documents(layout, masked, eod, documents, length, restart, across):
    """Pack one row of the documents of these numbers, position by position."""
    lengths = [n for shard in layout for n in shard]
    firsts, counts = np.cumsum([0, *lengths]).tolist(), targets_of(layout, masked)
    columns = []  # input, target, segment, position, loss mask
    for segment, number in enumerate(documents, 1):
        tokens = list(range(firsts[number], firsts[number + 1]))[:length]
        if eod == "append":
            pairs = list(zip([END, *tokens], tokens))
        else:
            pairs = list(itertools.zip_longest(tokens, tokens[1:]))
        for i, (before, token) in enumerate(pairs[:length]):
            target = (token, segment, i, counts[token]) if token is not None else (0, segment, i, 0)
            columns.append((before, *target))
    if across:
        columns = [
            (before, token, 1, i, counts) for i, (before, token, _, _, counts) in enumerate(columns)
        ]
    columns += [(0, 0, 0, 0, 0)] * (length - len(columns))
    names = ("inputs", "targets", "segment_ids", "positions", "loss_mask")
    return dict(zip(names, map(list, zip(*columns)))) | (
        {} if restart else {"positions": list(range(length))}
    )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(layouts, masked_shards, policies), min_size=1, max_size=3), st.integers(1, 20),
    st.sampled_from(["bins", "pad"]), st.sampled_from(["skip", "truncate"]), st.booleans(), st.booleans(), st.data(),
)  # fmt: skip
def test_rows_of_documents_equal_the_oracle(
    tmp_path_factory, content, length, packing, on_long, restart, across, data
):
    shards = [
        write(tmp_path_factory.mktemp("shards"), layout, eod, masked)
        for layout, masked, eod in content
    ]
    bins = [open_bins(source, length, packing, on_long) for source in shards]
    which = st.integers(0, len(shards) - 1).flatmap(
        lambda s: st.tuples(st.just(s), st.integers(-1, bins[s].num_rows))
    )
    source, row = np.array(data.draw(st.lists(which, min_size=1, max_size=6))).T
    batch = pack_documents(shards, bins, source, row, length, restart, across)
    for index, (s, r) in enumerate(zip(source.tolist(), row.tolist())):
        documents = bins[s].documents(np.array([r]))[1].tolist()
        layout, masked, eod = content[s]
        for name, expected in oracle_of_documents(
            layout, masked, eod, documents, length, restart, across
        ).items():
            assert batch[name][index].tolist() == expected, (name, index)
    for name, array in batch.items():
        assert array.flags.c_contiguous and array.dtype == (
            np.float32 if name == "loss_mask" else np.int32
        )


@settings(max_examples=60, deadline=None)
@given(layouts, masked_shards, policies, st.integers(1, 20), st.sampled_from(["bins", "pad"]))
def test_every_target_of_documents_that_fit_is_one_exactly_once(
    tmp_path_factory, layout, masked, eod, length, packing
):
    shards = write(tmp_path_factory.mktemp("shards"), layout, eod, masked)
    bins = open_bins(shards, length, packing, "skip")
    rows = np.arange(bins.num_rows)
    batch = pack_documents([shards], [bins], np.zeros_like(rows), rows, length, True, False)
    real = batch["segment_ids"] > 0
    borders = np.cumsum([0, *(n for lengths in layout for n in lengths)]).tolist()
    # Where documents have no end marks, one of a single token has nothing to predict it.
    least = 1 if eod == "append" else 2
    spans = [range(a, b) for a, b in itertools.pairwise(borders) if least <= b - a <= length]
    # A row holds each token of its documents, as targets or, without end marks, as inputs.
    tokens = batch["targets"] if eod == "append" else batch["inputs"]
    assert collections.Counter(tokens[real].tolist()) == collections.Counter(
        itertools.chain(*spans)
    )
    assert (batch["loss_mask"].sum(), real.sum()) == (bins.num_targets, bins.num_tokens)
    assert bins.skipped or bins.num_targets == shards.manifest.num_targets
    document = np.searchsorted(borders, tokens, "right")
    for row in rows:  # a segment is a document, whole
        pairs = set(
            zip(batch["segment_ids"][row][real[row]].tolist(), document[row][real[row]].tolist())
        )
        assert len(pairs) == len(dict(pairs)) == len({document for _, document in pairs})
        for segment, number in pairs:
            size = borders[number] - borders[number - 1]
            assert (batch["segment_ids"][row] == segment).sum() == size


def test_a_document_has_the_same_inputs_targets_and_positions_as_in_the_stream(tmp_path):
    shards = write(tmp_path, [[3, 4], [2]], "append")
    stream = packed(shards, [(-1, 9)], 9)
    bins = Bins(9, np.array([0, 3]), np.arange(3), 9, 9, 0, 0)
    rows = pack_documents([shards], [bins], np.zeros(1, int), np.zeros(1, int), 9, True, False)
    stream["inputs"][0, [0, 3, 7]] = END  # where documents of `write` end with tokens of their own
    for name, expected in stream.items():
        assert rows[name].tolist() == expected.tolist(), name


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(layouts, masked_shards, policies), min_size=1, max_size=2), st.integers(1, 20),
    st.sampled_from(["stream", "bins", "pad"]), st.booleans(), st.booleans(), st.data(),
)  # fmt: skip
def test_some_columns_are_those_of_the_whole_rows(
    tmp_path_factory, content, length, packing, restart, across, data
):
    shards = [
        write(tmp_path_factory.mktemp("shards"), layout, eod, masked)
        for layout, masked, eod in content
    ]
    source = np.array(data.draw(st.lists(st.integers(0, len(shards) - 1), min_size=1, max_size=4)))
    row = np.array(
        data.draw(st.lists(st.integers(-1, 9), min_size=source.size, max_size=source.size))
    )
    first = data.draw(st.integers(0, length - 1))
    columns = slice(first, data.draw(st.integers(first + 1, length)))
    if packing == "stream":
        count = np.array(
            data.draw(st.lists(st.integers(0, length), min_size=source.size, max_size=source.size))
        )
        given, read = (Windows(source, row, count),), pack
    else:
        bins = [open_bins(reader, length, packing, "truncate") for reader in shards]
        given, read = (bins, source, row), pack_documents
    whole, part = (read(shards, *given, length, restart, across, c) for c in (slice(None), columns))
    for name, array in part.items():
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, whole[name][:, columns], err_msg=name, strict=True)
