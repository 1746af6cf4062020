"""Balanced batches: the documents of `pad`, whole, in fewer rows, alike for any hosts, workers and
start."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import ConfigError
from data_pipeline.config import CorruptionConfig, DataConfig, SourceConfig, StageConfig
from data_pipeline.loader import loader
from data_pipeline.loader.loader import open_evaluation, open_training
from data_pipeline.loader.packing import HostSlice
from data_pipeline.prepare.preview import describe_step
from data_pipeline.shards import Manifest, ShardWriter
from data_pipeline.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
# Of ragged documents in two sources: one has no end marks, the other a loss mask.
LENGTHS = np.random.default_rng(0).lognormal(2.6, 0.8, 120).astype(int).clip(2, 63)
NUM_STEPS = 24


def write(directory, seed, lengths, eod="append", masked=False):
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    writer = ShardWriter(directory, "tokens-00000", TOKENIZER.vocab_size)
    for length in lengths.tolist():
        mask = None
        if masked:
            mask = rng.integers(0, 2, length).astype(bool)
        end = TOKENIZER.eod_id if eod == "append" else None
        writer.append(rng.integers(0, 256, length), mask=mask, end=end)
    TOKENIZER.save(directory)
    record = {
        "name": TOKENIZER.name,
        "sha256": TOKENIZER.sha256,
        "vocab_size": TOKENIZER.vocab_size,
        "special_ids": {"eod": TOKENIZER.eod_id},
    }
    Manifest(record, "uint16", eod, int(lengths.sum()), (writer.close(),)).save(directory)
    return str(directory)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("balanced")
    sources = {
        "chat": SourceConfig(write(root / "chat", 1, LENGTHS, masked=True), 2.0, None),
        "code": SourceConfig(write(root / "code", 2, LENGTHS[:50], eod="none"), 1.0, None),
    }
    return DataConfig(
        sources=sources,
        seq_length=64,
        batch_size=16,
        packing="balanced",
        balance_rows=2,
        balance_quadratic=0.01,
    )


def documents_of(arrays):
    """Every document of a batch by what it holds, sorted: how it lies in rows is left out."""
    found = []
    names = ("inputs", "targets", "positions", "loss_mask")
    for row, segments in enumerate(arrays["segment_ids"]):
        for segment in range(1, segments.max() + 1):
            mine = segments == segment
            found.append(tuple(tuple(arrays[name][row, mine].tolist()) for name in names))
    return sorted(found)


def assert_same(first, second):
    assert first._replace(arrays=None) == second._replace(arrays=None)
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, second.arrays[name], strict=True)


def test_the_largest_batches_are_known_ahead(config, monkeypatch):
    """The largest among the remaining ones are known; for a plan with many documents, in steps
    spread evenly over it."""
    data = open_training(config, 3, NUM_STEPS)
    shapes = [data.shape_at(step) for step in range(NUM_STEPS)]
    assert len(set(shapes)) > 1
    for start in (0, NUM_STEPS // 2, NUM_STEPS - 1):
        assert data.largest_shapes(start) == [max(shapes[start:])]
    assert data.largest_shapes(NUM_STEPS) == []
    monkeypatch.setattr(loader, "_DOCUMENTS_COUNTED", 3 * config.batch_size)
    counted = [0, (NUM_STEPS - 1) // 2, NUM_STEPS - 1]
    assert data.largest_shapes(0) == [max(shapes[step] for step in counted)]
    # A stage that is so short that it lies between these counts, too.
    stages = (StageConfig(until=9), StageConfig(until=10, seq_length=96), StageConfig())
    staged = open_training(dataclasses.replace(config, stages=stages), 3, NUM_STEPS)
    assert staged.shape_at(9).seq_length == 96
    assert staged.shape_at(9) in staged.largest_shapes(0)
    assert all(shape.seq_length < 96 for shape in staged.largest_shapes(10))


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_step_has_the_documents_that_it_has_with_pad(config, rate):
    config = dataclasses.replace(config, corruption=CorruptionConfig(rate))
    data = open_training(config, 3, NUM_STEPS)
    pad = open_training(dataclasses.replace(config, packing="pad"), 3, NUM_STEPS)
    smaller = 0
    for step in range(NUM_STEPS):
        ours = data.batch(step)
        theirs = pad.batch(step)
        assert documents_of(ours.arrays) == documents_of(theirs.arrays)
        assert ours.num_targets == theirs.num_targets
        assert ours.digest == theirs.digest
        assert ours.arrays["inputs"].shape == data.shape_at(step)
        assert data.shape_at(step) in data.shapes()
        smaller += len(theirs.arrays["inputs"]) - len(ours.arrays["inputs"])
        places = data.places_at(step)
        begins_row = places.column == 0
        first = np.zeros(data.shape_at(step).batch_size, int)
        first[places.row[begins_row]] = data.rows_at(step).source[begins_row]
        np.testing.assert_array_equal(ours.arrays["source"], first)
    assert smaller > NUM_STEPS * 16 / 3, "most padding is gone"
    assert data.plan.epochs_at(NUM_STEPS) == pad.plan.epochs_at(NUM_STEPS)
    assert data.fingerprint_at(5) != pad.fingerprint_at(5)


def test_the_same_documents_in_another_order_are_the_same_batch(tmp_path):
    """A batch of a whole epoch has the same rows in every epoch: nobody's fault, unlike the same
    tokens from elsewhere."""
    lengths = np.arange(20, 60, 5)
    source = SourceConfig(write(tmp_path / "few", 5, lengths), 1.0, None)
    config = DataConfig(
        sources={"few": source},
        seq_length=64,
        batch_size=8,
        packing="balanced",
        balance_rows=8,
        balance_quadratic=0.01,
    )
    data = open_training(config, 3, 12)
    batches = [data.batch(step) for step in range(12)]
    assert len({batch.digest for batch in batches}) > 1
    assert len({batch.content for batch in batches}) == 1
    assert len({batch.place for batch in batches}) == 1


def test_rows_that_hold_nothing_are_counted(config):
    config = dataclasses.replace(config, batch_size=12)
    data = open_training(dataclasses.replace(config, balance_rows=16), 3, NUM_STEPS)
    found = []
    for step in range(NUM_STEPS):
        segments = data.batch(step).arrays["segment_ids"]
        assert data.num_unused_rows(step) == np.count_nonzero(segments.max(axis=1) == 0)
        found.append(data.num_unused_rows(step))
    assert max(found) > 0
    pad = open_training(dataclasses.replace(config, packing="pad"), 3, NUM_STEPS)
    assert pad.num_unused_rows(0) == 0


def test_targets_of_sources_are_those_of_their_documents(config):
    data = open_training(config, 3, NUM_STEPS)
    pad = open_training(dataclasses.replace(config, packing="pad"), 3, NUM_STEPS)
    for step in (0, 5):
        sources = pad.rows_at(step).source
        targets = np.count_nonzero(pad.batch(step).arrays["loss_mask"], axis=1)
        lines = "\n".join(describe_step(data, step, 1, 80))
        for number, name in enumerate(data.plan.names):
            mine = sources == number
            count = f"{np.count_nonzero(mine)} documents, {targets[mine].sum()} targets"
            assert f"  {name}: {count}, of " in lines


def test_an_epoch_has_every_document_once(config):
    source = dataclasses.replace(config.sources["chat"], epochs=1.0)
    config = dataclasses.replace(config, sources={"chat": source}, batch_size=8)
    data = open_training(config, 3, "auto")
    assert data.plan.num_steps == 15
    total = sum(batch.num_targets for batch in data.iterate(0))
    assert total == data.shards[0].manifest.num_targets


@pytest.mark.every_dose
@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, NUM_STEPS - 1),
    st.integers(1, 4),
    st.integers(0, 63),
    st.booleans(),
    st.booleans(),
)
def test_hosts_read_their_rows_and_columns_of_one_batch(
    config, step, num_hosts, border, restart, across
):
    config = dataclasses.replace(config, restart_positions=restart, attend_across_documents=across)
    data = open_training(config, 3, NUM_STEPS)
    whole = data.batch(step)
    contents = 0
    for rows in np.array_split(np.arange(data.shape_at(step).batch_size), num_hosts):
        for columns in (slice(0, border), slice(border, 64)):
            part = HostSlice(rows, columns)
            if columns.start == columns.stop:
                continue
            parts = dict.fromkeys(data.shapes(), part)
            batch = data.batch(step, parts)
            assert (batch.digest, batch.place) == (whole.digest, whole.place)
            for name, array in batch.arrays.items():
                expected = whole.arrays[name][rows]
                if array.ndim == 2:
                    expected = expected[:, columns]
                np.testing.assert_array_equal(array, expected)
            contents += batch.content
    assert contents % 2**64 == whole.content
    nothing = data.batch(step, HostSlice(np.array([], np.int64)))
    assert nothing.arrays["inputs"].shape == (0, 64) and nothing.digest == whole.digest


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_anywhere_with_any_workers(config, workers):
    data = open_training(dataclasses.replace(config, workers=workers), 3, NUM_STEPS)
    batches = list(data.iterate(7, stop_step=12))
    assert [batch.step for batch in batches] == list(range(7, 12))
    for batch in batches:
        assert_same(batch, open_training(config, 3, NUM_STEPS).batch(batch.step))
    assert_same(pickle.loads(pickle.dumps(data)).batch(5), data.batch(5))


def test_what_decides_the_rows_is_in_the_fingerprint(config):
    def fingerprint(**changes):
        return open_training(dataclasses.replace(config, **changes), 3, 9).fingerprint_at(4)

    prints = [
        fingerprint(),
        fingerprint(balance_rows=4),
        fingerprint(balance_quadratic=0.02),
        fingerprint(packing="pad"),
        fingerprint(packing="bins"),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(balance_quadratic=None) == fingerprint(balance_quadratic=0.0)


def test_long_documents_are_refused_left_out_or_cut_as_with_pad(config):
    short = dataclasses.replace(config, seq_length=20)
    with pytest.raises(ConfigError, match=r"data\.seq_length=20 .*data\.on_long to skip or trunc"):
        open_training(short, 3, 9)
    for on_long in ("skip", "truncate"):
        changed = dataclasses.replace(short, on_long=on_long)
        data = open_training(changed, 3, 9)
        pad = open_training(dataclasses.replace(changed, packing="pad"), 3, 9)
        for step in range(9):
            assert documents_of(data.batch(step).arrays) == documents_of(pad.batch(step).arrays)
        assert "longer than a row: " in data.describe()


def test_stages_count_documents_and_a_description_says_how_full_rows_are(config):
    stages = (StageConfig(until=4), StageConfig(batch_size=24, seq_length=80))
    data = open_training(dataclasses.replace(config, stages=stages), 3, 9)
    assert data.batch(8).arrays["inputs"].shape == data.shape_at(8)
    assert data.shape_at(8).seq_length == 80 and {64, 80} == {s.seq_length for s in data.shapes()}
    said = data.describe()
    assert "tokens (documents x length)" in said
    assert "balanced: 16 documents of a step in " in said
    assert "--packing pad" in data.show_command(3)


def test_evaluation_reads_rows_of_bins(config):
    path = config.sources["chat"].path
    ours = open_evaluation(path, config, 7)
    theirs = open_evaluation(path, dataclasses.replace(config, packing="bins"), 7)
    assert ours.num_batches == theirs.num_batches and ours.num_tokens == theirs.num_tokens
    for first, second in zip(ours.iterate(), theirs.iterate(), strict=True):
        assert_same(first, second)
