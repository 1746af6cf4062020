"""Bins: rows are those of a naive best fit; no document is divided or lost; a plan file is what was
planned, or an error."""

import dataclasses
import hashlib
import itertools
import os
import pickle
import random
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import ConfigError, DataError
from data_pipeline.base.new_files import remove_abandoned
from data_pipeline.plan import document_packing as bins_module
from data_pipeline.plan.document_packing import best_fit, document_targets, open_bins
from data_pipeline.shards import Manifest, ShardWriter, TokenShards


def write(directory, layout, eod="append", masked=()):
    """Shards of documents with the given lengths; those whose numbers are in `masked` have every
    second token as a target."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, lengths in enumerate(layout):
        writer = ShardWriter(directory, f"tokens-{number:05d}", 300)
        for length in lengths:
            mask = np.arange(length) % 2 == 1 if number in masked else None
            writer.append(np.arange(length) % 300, mask=mask)
        entries.append(writer.close())
    tokenizer = {
        "name": "test",
        "sha256": hashlib.sha256(b"").hexdigest(),
        "vocab_size": 300,
        "special_ids": {"eod": 0},
    }
    Manifest(tokenizer, "uint16", eod, 10, tuple(entries)).save(directory)
    return TokenShards.open(directory)


def rows_of(bins):
    return (
        [part.tolist() for part in np.split(bins.numbers, bins.offsets[1:-1])]
        if bins.num_rows
        else []
    )


def naive_best_fit(sizes, length):
    """Return the free space of each row, by looking through all rows for each item."""
    left = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, room in enumerate(left) if room >= size]
        if not fitting:
            left.append(length)
            fitting = [len(left) - 1]
        left[min(fitting, key=left.__getitem__)] -= size
    return left


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=80))
    )
)
def test_best_fit_leaves_in_rows_what_the_naive_one_leaves(case):
    length, sizes = case
    sizes = np.array(sizes, np.int64)
    offsets, items = best_fit(sizes, length)
    assert sorted(items.tolist()) == list(range(len(sizes)))
    left = [length - int(sizes[items[a:b]].sum()) for a, b in itertools.pairwise(offsets)]
    assert sorted(left) == sorted(naive_best_fit(sizes.tolist(), length))
    assert (np.diff(offsets) > 0).all() and offsets[-1] == len(sizes)


def test_rows_longer_than_16_bits_are_planned_the_same():
    sizes = np.random.default_rng(0).integers(1, 70_000, 300)
    offsets, items = best_fit(sizes, 1 << 17)
    left = [(1 << 17) - int(sizes[items[a:b]].sum()) for a, b in itertools.pairwise(offsets)]
    assert sorted(left) == sorted(naive_best_fit(sizes.tolist(), 1 << 17))


layouts = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(
    layouts, st.sampled_from(["append", "none"]), st.sets(st.integers(0, 2)), st.integers(1, 25),
    st.sampled_from(["bins", "pad"]), st.sampled_from(["skip", "truncate"]),
)  # fmt: skip
def test_every_document_is_in_one_row_and_counted(
    tmp_path_factory, layout, eod, masked, length, packing, on_long
):
    shards = write(tmp_path_factory.mktemp("shards"), layout, eod, masked)
    bins = open_bins(shards, length, packing, on_long)
    every = [(n, number in masked) for number, lengths in enumerate(layout) for n in lengths]
    first = int(eod == "none")
    # Without end marks nothing predicts the first token of a document.
    sizes = [n if n > first else 0 for n, _ in every]
    long = [number for number, size in enumerate(sizes) if size > length]
    kept = [
        number
        for number, size in enumerate(sizes)
        if size and (on_long == "truncate" or size <= length)
    ]
    rows = rows_of(bins)
    assert sorted(number for row in rows for number in row) == kept
    assert all(
        sum(sizes[number] for number in row) <= length or (len(row) == 1 and row[0] in long)
        for row in rows
    )
    assert packing == "bins" or all(len(row) == 1 for row in rows)
    assert bins.num_tokens == sum(min(sizes[number], length) for number in kept)
    assert bins.num_targets == sum(
        (i % 2 == 1) if every[number][1] else 1
        for number in kept
        for i in range(first, min(sizes[number], length))
    )
    assert (bins.skipped, bins.truncated) == (
        (len(long), 0) if on_long == "skip" else (0, len(long))
    )
    assert bins.fill == pytest.approx(bins.num_tokens / max(1, len(rows) * length))
    again = open_bins(shards, length, packing, on_long)
    assert rows_of(again) == rows
    wanted = np.random.default_rng(0).integers(-1, bins.num_rows + 1, 10)
    offsets, numbers = pickle.loads(pickle.dumps(again)).documents(wanted)
    found = [numbers[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert found == [rows[row] if 0 <= row < len(rows) else [] for row in wanted.tolist()]


def test_targets_of_documents_with_and_without_end_marks(tmp_path):
    for eod, expected in (("append", ([0, 3], [3, 1])), ("none", ([1, 4], [2, 0]))):
        first, sizes = document_targets(write(tmp_path / eod, [[3, 1]], eod), np.arange(2))
        assert (first.tolist(), sizes.tolist()) == expected


def test_a_document_longer_than_a_row_is_refused_with_its_name_and_the_mend(tmp_path):
    shards = write(tmp_path, [[3, 9], [4, 12]])
    with pytest.raises(
        ConfigError,
        match=r"data.seq_length=8 .*document 1 of .* has 9; 2 documents.*at least 12, or data.on_long",
    ):
        open_bins(shards, 8, "bins", "raise")
    with pytest.raises(ConfigError, match=r"data.on_long to skip or truncate") as caught:
        open_bins(shards, 8, "pad", "raise")
    assert caught.value.exit_code == 78
    assert open_bins(shards, 12, "bins", "raise").num_tokens == shards.num_tokens
    assert "1 left out" in open_bins(shards, 9, "bins", "skip").describe()
    assert open_bins(shards, 12, "bins", "raise").describe() == "3 rows of 4 documents, 77.78% full"


def test_the_plan_is_made_once_and_is_the_same_bytes_again(tmp_path, monkeypatch):
    shards = write(tmp_path, [[5, 3, 2, 7, 1]])
    rows = rows_of(open_bins(shards, 8, "bins", "raise"))
    path = tmp_path / "bins-8.plan"
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(bins_module, "best_fit", None)  # not needed while the file is there
        assert rows_of(open_bins(shards, 8, "bins", "raise")) == rows
    path.unlink()
    open_bins(shards, 8, "bins", "raise")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.glob("*bins*")] == [path.name]
    open_bins(shards, 9, "pad", "raise")
    assert not (tmp_path / "bins-9.plan").exists()


def test_what_a_killed_process_has_left_is_removed_and_what_is_being_written_is_not(tmp_path):
    shards = write(tmp_path, [[3, 4, 5]])
    old, new = (tmp_path / f".{digit * 16}.tmp" for digit in "0a")
    other = tmp_path / "bins-18.x.plan"
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    # As in a new process.
    remove_abandoned.cache_clear()
    open_bins(shards, 8, "bins", "raise")
    assert [path.exists() for path in (old, new, other)] == [False, True, True]
    assert (tmp_path / "bins-8.plan").exists()


def test_where_nothing_can_be_written_the_plan_is_made_each_time(tmp_path, monkeypatch):
    shards = write(tmp_path, [[5, 3, 2, 7, 1]])
    monkeypatch.setattr(bins_module.os, "access", lambda path, mode: False)
    rows = rows_of(open_bins(shards, 8, "bins", "raise"))
    assert not list(tmp_path.glob("*.plan")) and rows == rows_of(
        open_bins(shards, 8, "bins", "raise")
    )


def test_no_damage_to_a_plan_goes_unnoticed(tmp_path):
    shards = write(tmp_path, [[5, 3, 2, 7, 1]])
    open_bins(shards, 8, "bins", "raise")
    path, rng = tmp_path / "bins-8.plan", random.Random(3)
    before = path.read_bytes()
    changes = [before[: rng.randrange(len(before))] for _ in range(20)] + [b"", before + b"\0"]
    for at in rng.sample(range(len(before)), 60):
        changes.append(before[:at] + bytes([before[at] ^ 1 << rng.randrange(8)]) + before[at + 1 :])
    for change in changes:
        path.write_bytes(change)
        with pytest.raises(
            DataError,
            match=r"bins-8.plan: expected digest \w+, found \w*: it is damaged.*Delete it",
        ) as caught:
            open_bins(shards, 8, "bins", "raise")
        assert caught.value.exit_code == 65


def test_a_plan_of_other_tokens_or_another_length_is_refused(tmp_path):
    ours, theirs = write(tmp_path / "ours", [[5, 3, 2]]), write(tmp_path / "theirs", [[5, 3, 1, 1]])
    for shards in (ours, theirs):
        open_bins(shards, 8, "bins", "raise")
    shutil.copy(theirs.path / "bins-8.plan", ours.path / "bins-8.plan")
    shutil.copy(theirs.path / "bins-8.plan", theirs.path / "bins-9.plan")
    for shards, length in ((ours, 8), (theirs, 9)):
        with pytest.raises(DataError, match=r"made for other tokens. Delete it"):
            open_bins(shards, length, "bins", "raise")


def test_data_without_a_target_has_no_rows(tmp_path):
    shards = write(tmp_path, [[1, 1]], "none")
    for packing in ("bins", "pad"):
        bins = open_bins(shards, 4, packing, "raise")
        assert (bins.num_rows, bins.fill, bins.num_targets) == (0, 0, 0)
        assert bins.documents(np.array([0, 1]))[0].tolist() == [0, 0, 0]


def test_every_row_of_small_documents_but_the_last_is_full(tmp_path):
    lengths = np.random.default_rng(1).integers(1, 40, 3000).tolist()
    bins = open_bins(write(tmp_path, [lengths]), 128, "bins", "raise")
    assert bins.num_rows == -(-sum(lengths) // 128)
    assert dataclasses.replace(bins, num_tokens=bins.num_rows * 128).fill == 1
