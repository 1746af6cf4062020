"""The loader: one stream for any worker count, start, host split; evaluation that sees every token
once; errors at launch."""

import dataclasses
import json
import multiprocessing
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import ConfigError, DataError, TryAgainError
from data_pipeline.config import CorruptionConfig, DataConfig, SourceConfig
from data_pipeline.loader import workers as watch
from data_pipeline.loader.loader import carry_errors, open_evaluation, open_training
from data_pipeline.loader.one_tokenizer import require_one_tokenizer
from data_pipeline.loader.packing import HostSlice
from data_pipeline.prepare import command as prepare
from data_pipeline.shards import BLOCK_BYTES, Manifest, ShardWriter
from data_pipeline.tokenizer import ByteTokenizer, CharTokenizer, load_tokenizer
from tests.support import pretrained

TOKENIZER = ByteTokenizer()


def write(directory, seed, lengths, eod="append", tokenizer=TOKENIZER):
    """Random documents of the given lengths in two shards."""
    directory.mkdir(parents=True)
    random_ids, entries = np.random.default_rng(seed), []
    for number, part in enumerate(np.array_split(np.array(lengths), 2)):
        writer = ShardWriter(directory, f"tokens-{number:05d}", TOKENIZER.vocab_size)
        writer.append(random_ids.integers(0, 256, part.sum()), part)
        entries.append(writer.close())
    tokenizer.save(directory)
    special = {"eod": tokenizer.eod_id}
    record = {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "special_ids": special,
    }
    text_bytes = 3 * int(np.sum(lengths))
    Manifest(record, "uint16", eod, text_bytes, tuple(entries)).save(directory)
    return directory


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpora")
    lengths = np.random.default_rng(0).integers(1, 60, 100)
    return {
        "web": write(root / "web", 1, lengths),
        "code": write(root / "code", 2, lengths[:40], eod="none"),
    }


@pytest.fixture(scope="module")
def config(corpora):
    sources = {
        "web": SourceConfig(str(corpora["web"]), 2.0, None),
        "code": SourceConfig(str(corpora["code"]), 1.0, None),
    }
    return DataConfig(sources=sources, seq_length=32, batch_size=6)


def assert_same(first, second):
    assert first._replace(arrays=None) == second._replace(arrays=None)
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, second.arrays[name], strict=True)


def test_a_batch_has_what_it_says(config):
    data = open_training(config, seed=3, steps=50)
    batch = data.batch(7)
    assert batch.step == 7 and batch.num_targets == batch.arrays["loss_mask"].sum()
    shapes = {name: (array.dtype, array.shape) for name, array in batch.arrays.items()}
    assert shapes.pop("source") == (np.int32, (6,)) and {shape for _, shape in shapes.values()} == {
        (6, 32)
    }
    np.testing.assert_array_equal(
        batch.arrays["source"], data.plan.rows(*data.plan.row_range(7)).source
    )
    assert data.vocab_size == TOKENIZER.vocab_size and data.tokenizer.sha256 == TOKENIZER.sha256
    assert len({data.batch(step).arrays["inputs"].tobytes() for step in range(50)}) == 50


def test_hosts_read_their_rows_of_one_batch(config):
    data = open_training(config, seed=3, steps=50)
    whole = data.batch(11)
    for rows in ([0, 1, 2], [5, 3], [4], []):
        part = data.batch(11, HostSlice(np.array(rows, np.int64)))
        for name, array in part.arrays.items():
            np.testing.assert_array_equal(array, whole.arrays[name][rows])


@pytest.mark.parametrize("packing", ["stream", "bins"])
def test_hosts_read_their_columns_of_one_batch_and_their_checksums_sum_to_that_of_it(
    config, packing
):
    data = open_training(
        dataclasses.replace(config, packing=packing, on_long="truncate"), seed=3, steps=20
    )
    whole = data.batch(11)
    parts = [
        HostSlice(np.array(rows), slice(*columns))
        for rows in ([0, 2, 3], [1, 4, 5])
        for columns in ((0, 10), (10, 31), (31, 32))
    ]
    for part in parts:
        batch = data.batch(11, {(6, 32): part})
        assert (batch.digest, batch.place) == (whole.digest, whole.place)
        for name, array in batch.arrays.items():
            expected = whole.arrays[name][part.rows]
            np.testing.assert_array_equal(
                array, expected[:, part.columns] if array.ndim == 2 else expected
            )
    assert sum(data.batch(11, part).content for part in parts) % 2**64 == whole.content


def test_a_stream_that_cannot_be_read_goes_on_with_empty_batches_that_carry_the_error(config):
    data = open_training(config, seed=3, steps=50)
    part, failure = HostSlice(np.array([1, 4]), slice(8, 16)), OSError("no more")

    def stream():
        yield from data.iterate(4, part, 6)
        raise failure

    batches = list(carry_errors(stream(), range(4, 9), lambda step: part))
    assert [batch.step for batch in batches] == [4, 5, 6, 7, 8]
    assert [batch.error for batch in batches] == [None, None, failure, failure, failure]
    assert_same(batches[1], data.batch(5, part))
    for name, array in batches[0].arrays.items():
        empty = batches[3].arrays[name]
        assert (empty.shape, empty.dtype, empty.any()) == (array.shape, array.dtype, False), name


def test_pickled_data_gives_the_same_batches(config):
    data = open_training(config, seed=3, steps=50)
    assert_same(pickle.loads(pickle.dumps(data)).batch(20), data.batch(20))


@pytest.mark.long
@pytest.mark.parametrize(
    "workers",
    [0, pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)],
)
def test_stream_is_the_same_for_any_number_of_workers(config, workers):
    data = open_training(dataclasses.replace(config, workers=workers), seed=3, steps=50)
    rows = HostSlice(np.array([4, 0, 3]))
    for start, stop in ((0, 9), (17, 23)) if workers < 2 else ((17, 29),):
        stream = list(data.iterate(start, rows, stop))
        assert [batch.step for batch in stream] == list(range(start, stop))
        for batch in stream:
            assert_same(batch, data.batch(batch.step, rows))
    assert not workers or flags.FLAGS.is_parsed()


def test_stream_ends_with_the_plan_and_may_be_left_early(config):
    data = open_training(config, seed=3, steps=50)
    assert [batch.step for batch in data.iterate(48)] == [48, 49]
    assert list(data.iterate(50)) == []
    stream = data.iterate(0)
    assert next(stream).step == 0
    stream.close()


def test_fingerprint_names_what_the_batches_depend_on(config, corpora):
    base = open_training(config, seed=3, steps=50)
    same = open_training(dataclasses.replace(config, workers=2, verify="full"), seed=3, steps=50)
    assert base.fingerprint_at(50) == same.fingerprint_at(50)
    alone = {"web": SourceConfig(str(corpora["web"]), 2.0, None)}
    changes = [
        {"seq_length": 16},
        {"batch_size": 5},
        {"restart_positions": False},
        {"sources": alone},
    ]
    others = [open_training(dataclasses.replace(config, **change), 3, 50) for change in changes] + [
        open_training(config, 4, 50)
    ]
    assert len({data.fingerprint_at(50) for data in [base, *others]}) == 6
    indifferent = [
        {"on_long": "truncate"},
        {"on_long": "skip"},
        {"prefetch": 1},
    ]  # a stream has no long documents
    assert {
        open_training(dataclasses.replace(config, **c), 3, 50).fingerprint_at(50)
        for c in indifferent
    } == {base.fingerprint_at(50)}
    rows = [
        dataclasses.replace(config, packing="bins", seq_length=n, on_long=p)
        for n in (20, 64)
        for p in ("skip", "truncate")
    ]
    cut, cut_too, fits, fits_too = (open_training(c, 3, 20).fingerprint_at(20) for c in rows)
    assert cut != cut_too and fits == fits_too
    longer = open_training(config, seed=3, steps=60)
    assert longer.fingerprint_at(60) != base.fingerprint_at(50) == longer.fingerprint_at(50)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_shard_stops_the_stream_with_its_place(corpora, tmp_path, config, workers):
    copy = write(tmp_path / "web", 1, np.full(2, BLOCK_BYTES // 4))
    path = copy / "tokens-00001.bin"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    damaged = dataclasses.replace(
        config, sources={"web": SourceConfig(str(copy), 1.0, None)}, workers=workers
    )
    with pytest.raises(DataError, match=r"tokens-00001\.bin.*expected crc32"):
        list(open_training(damaged, seed=0, steps=40).iterate(0))
    with pytest.raises(DataError, match=r"data\.sources\.web\.path: .*expected crc32"):
        open_training(dataclasses.replace(damaged, verify="full"), seed=0, steps=40)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("batch_size", [6, pytest.param(128, marks=pytest.mark.long)])
def test_a_killed_worker_ends_the_stream_and_says_what_to_do(config, monkeypatch, batch_size):
    """The worker may be killed while it writes a batch that is larger than a pipe holds."""
    monkeypatch.setattr(watch, "_PATIENCE", 0.2)
    many = dataclasses.replace(config, workers=1, prefetch=2, batch_size=batch_size)
    stream = open_training(many, seed=0, steps=5000).iterate(0)
    for _ in range(4):
        next(stream)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid or 0, signal.SIGKILL)
    with pytest.raises(
        TryAgainError,
        match=r"data\.workers=1: a worker process was killed\. Run the same command again, with",
    ):
        list(stream)


def test_an_id_outside_the_vocabulary_names_step_source_and_row(config):
    data = open_training(config, seed=3, steps=50)
    data.vocab_size = 100
    with pytest.raises(
        DataError,
        match=r"step 0, source '(web|code)' in .*, epoch 0, row \d+\), position \d+: inputs=\d+, but must",
    ):
        data.batch(0)


@pytest.mark.every_dose
@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["web", "code"]), st.integers(1, 200), st.integers(1, 70))
def test_evaluation_sees_every_token_exactly_once(corpora, config, name, batch_size, length):
    data = open_evaluation(
        corpora[name], dataclasses.replace(config, seq_length=length), batch_size
    )
    batches = [data.batch(i) for i in range(data.num_batches)]
    assert sum(batch.num_targets for batch in batches) == data.num_tokens
    real = np.concatenate(
        [batch.arrays["targets"][batch.arrays["segment_ids"] > 0] for batch in batches]
    )
    np.testing.assert_array_equal(real, data.shards.read(0, data.shards.num_tokens))
    shapes = {name: {batch.arrays[name].shape for batch in batches} for name in batches[0].arrays}
    assert shapes.pop("source") == {(batch_size,)} and all(
        shape == {(batch_size, length)} for shape in shapes.values()
    )
    assert not any(batch.arrays["source"].any() for batch in batches)
    assert data.num_tokens == data.shards.num_tokens - (40 if name == "code" else 0)


def test_evaluation_streams_by_host(corpora, config):
    data = open_evaluation(corpora["web"], config, batch_size=5)
    rows = HostSlice(np.array([1, 4]))
    stream = list(data.iterate(rows))
    assert len(stream) == data.num_batches and [
        batch.step for batch in data.iterate(num_batches=3)
    ] == [0, 1, 2]
    for number, batch in enumerate(stream):
        assert_same(batch, data.batch(number, rows))
    assert_same(pickle.loads(pickle.dumps(data)).batch(1), data.batch(1))
    assert data.text_bytes == data.manifest.text_bytes == 3 * data.num_tokens


@pytest.mark.parametrize("step", [1, 20, 50])
def test_from_a_cursor_batches_are_those_of_the_new_plan(config, step):
    """The rows before it, with another mixture, are none of its business, wherever the blocks of
    rows begin."""
    before = open_training(config, seed=3, steps=50)
    sources = {
        "web": dataclasses.replace(config.sources["web"], weight=0.1),
        "code": config.sources["code"],
    }
    changed = dataclasses.replace(config, sources=sources, batch_size=4)
    after = open_training(
        changed, seed=3, steps=90, cursor=json.loads(json.dumps(before.cursor_at(step)))
    )
    assert after.plan.row_range(step) == (6 * step, 6 * step + 4)
    seen = {tuple(row) for row in np.stack(before.plan.rows(0, 6 * step)).T.tolist()}
    for batch in after.iterate(step):
        rows = after.plan.rows(*after.plan.row_range(batch.step))
        fresh = {tuple(row) for row in np.stack(rows).T.tolist()}
        assert len(fresh) == 4 and not fresh & seen, "a row came twice"
        seen |= fresh
        expected = [
            after.batch(batch.step, HostSlice(np.array([i]))).arrays["inputs"][0] for i in range(4)
        ]
        np.testing.assert_array_equal(batch.arrays["inputs"], expected)
        names = [after.plan.names[source] for source in rows.source]
        assert batch.arrays["targets"].shape == (4, 32) and set(names) <= {"web", "code"}
    everything = after.plan.rows(6 * step, after.plan.row_range(89)[1])
    assert abs((everything.source == 0).mean() - 10 / 11) < 0.05  # code, of the weights 1 and 0.1
    blocks = np.concatenate([after._block(b) for b in range(2)], axis=1)
    np.testing.assert_array_equal(
        blocks[:3], np.stack(after.plan.rows(after.plan.first_row, after.plan.first_row + 8192))
    )


@pytest.mark.parametrize("packing", ["bins", "pad"])
def test_rows_of_whole_documents_are_read_alike_by_hosts_workers_and_evaluation(
    corpora, config, packing
):
    config = dataclasses.replace(config, packing=packing, seq_length=64)
    data = open_training(config, seed=3, steps=40)
    assert (
        all(f"{name}: " in data.describe() for name in data.plan.names)
        and "documents" in data.describe()
    )
    whole = data.batch(5)
    np.testing.assert_array_equal(
        data.batch(5, {(6, 64): HostSlice(np.array([4, 1]))}).arrays["inputs"],
        whole.arrays["inputs"][[4, 1]],
    )
    assert_same(pickle.loads(pickle.dumps(data)).batch(5), whole)
    assert_same(next(iter(data.iterate(5))), whole)
    for name in corpora:
        once = dataclasses.replace(
            config, sources={name: SourceConfig(str(corpora[name]))}, batch_size=1
        )
        alone = open_training(once, 0, "auto")
        assert sum(b.num_targets for b in alone.iterate(0)) == alone.shards[0].manifest.num_targets
        for rows in (1, 7, 1000):
            held_out = open_evaluation(corpora[name], config, rows)
            assert (
                sum(b.num_targets for b in held_out.iterate())
                == held_out.num_tokens
                == alone.shards[0].manifest.num_targets
            )


def test_documents_longer_than_a_row_are_refused_left_out_or_cut(corpora, config, tmp_path):
    config = dataclasses.replace(config, packing="bins", seq_length=20, on_long="raise")
    with pytest.raises(
        ConfigError,
        match=r"data\.seq_length=20 .*Set data\.seq_length to at least .*data\.on_long to skip or",
    ):
        open_training(config, 0, 1)
    sizes = [
        open_evaluation(corpora["web"], dataclasses.replace(config, on_long=p), 4)
        for p in ("skip", "truncate")
    ]
    assert (
        sizes[0].num_tokens < sizes[1].num_tokens < sizes[0].manifest.num_targets
        and not sizes[0].text_bytes
    )
    long = write(tmp_path / "long", 7, [50, 50])
    with pytest.raises(
        DataError,
        match=r"no document has a target in a row of data\.seq_length=20\. .*on_long=truncate",
    ):
        open_evaluation(long, dataclasses.replace(config, on_long="skip"), 4)


def test_sources_with_different_tokenizers_are_refused(corpora, tmp_path, config):
    other = write(tmp_path / "other", 1, [50, 50], tokenizer=CharTokenizer(map(chr, range(257))))
    mixed = dataclasses.replace(config, sources={**config.sources, "new": SourceConfig(str(other))})
    with pytest.raises(
        ConfigError,
        match=r"data\.sources\.new was made with tokenizer chars .*Prepare one of them again",
    ):
        open_training(mixed, 0, 10)
    data = open_training(config, 0, 10)
    require_one_tokenizer(
        {
            "data.sources": data.shards[0],
            "eval.sets.val": open_evaluation(corpora["web"], config, 2).shards,
        }
    )


def test_a_tokenizer_that_is_missing_or_another_is_found_before_the_first_step(tmp_path, config):
    for name, damage in (
        ("missing", Path.unlink),
        ("another", lambda path: path.write_text('{"type": "chars"}')),
    ):
        folder = write(tmp_path / name, 5, [500, 500])
        damage(folder / "tokenizer.json")
        bad = dataclasses.replace(config, sources={"text": SourceConfig(str(folder))})
        with pytest.raises(
            DataError,
            match=r"text\.path: .*tokenizer\.json: expected sha256 .*Restore it, or build",
        ):
            open_training(bad, 0, 1)
        assert open_training(dataclasses.replace(bad, verify="off"), 0, 1).batch(0).num_targets


def test_missing_directories_are_named(config, tmp_path):
    for path, error, message in (
        ("", ConfigError, "is empty.*Set it to one made by"),
        ("nowhere", DataError, "nowhere.*Make one with"),
    ):
        missing = dataclasses.replace(
            config, sources={"web": SourceConfig(path and str(tmp_path / path))}
        )
        with pytest.raises(error, match=rf"data\.sources\.web\.path.*{message}"):
            open_training(missing, 0, "auto")
    with pytest.raises(DataError, match=r"eval\.sets\.NAME\.path: .*nowhere"):
        open_evaluation(tmp_path / "nowhere", config, 2)
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        open_training(DataConfig(), 0, "auto")


def test_an_evaluation_set_without_targets_is_refused(tmp_path, config):
    ones = write(tmp_path / "ones", 1, [1, 1], eod="none")
    with pytest.raises(DataError, match=r"has no target tokens\. Prepare it from longer documents"):
        open_evaluation(ones, config, 2)


@pytest.mark.parametrize("packing", ["stream", "bins"])
def test_corrupted_inputs_are_a_function_of_the_row_alone(corpora, config, packing):
    """Any part of a batch, worker and other batch size the same; targets as they were; evaluation
    untouched."""
    clean = dataclasses.replace(config, packing=packing, on_long="truncate")
    noisy = dataclasses.replace(clean, corruption=CorruptionConfig(rate=0.3, span=2.0))
    before, after = (open_training(c, seed=3, steps=30) for c in (clean, noisy))
    twice = open_training(dataclasses.replace(noisy, batch_size=12), seed=3, steps=15)
    changed, real = 0, 0
    for step in range(30):
        ours, theirs = after.batch(step).arrays, before.batch(step).arrays
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours if name != "inputs")
        kept = (theirs["segment_ids"] == 0) | (theirs["inputs"] == TOKENIZER.eod_id)
        assert np.array_equal(ours["inputs"][kept], theirs["inputs"][kept])
        changed, real = changed + (ours["inputs"] != theirs["inputs"]).sum(), real + (~kept).sum()
        part = after.batch(step, HostSlice(np.array([4, 1]), slice(8, 20))).arrays["inputs"]
        assert np.array_equal(part, ours["inputs"][[4, 1], 8:20])
        rows = slice(0, 6) if step % 2 == 0 else slice(6, 12)
        assert np.array_equal(twice.batch(step // 2).arrays["inputs"][rows], ours["inputs"])
    assert 0.25 < changed / real < 0.32  # a random id may be the one that was there
    for first, second in zip(after.iterate(3), pickle.loads(pickle.dumps(after)).iterate(3)):
        assert_same(first, second)
    assert after.fingerprint_at(0) != before.fingerprint_at(0)
    held_out = [
        open_evaluation(corpora["web"], c, 4).batch(0).arrays["inputs"] for c in (clean, noisy)
    ]
    assert np.array_equal(*held_out)


def test_corruption_keeps_the_mark_that_each_source_has(tmp_path):
    paths = [write(tmp_path / "a", 1, [20] * 40), write(tmp_path / "b", 2, [20] * 40)]
    manifest = Manifest.load(paths[1])
    dataclasses.replace(manifest, tokenizer=manifest.tokenizer | {"special_ids": {"eod": 65}}).save(
        paths[1]
    )
    sources = {path.name: SourceConfig(str(path), 1.0, None) for path in paths}
    clean = DataConfig(sources=sources, seq_length=64, batch_size=8)
    noisy = dataclasses.replace(clean, corruption=CorruptionConfig(rate=0.9, token_id=7))
    marks = 0
    for step in range(10):
        before, after = (
            open_training(c, seed=3, steps=10).batch(step).arrays for c in (clean, noisy)
        )
        mark = before["inputs"] == np.array([TOKENIZER.eod_id, 65])[before["source"], None]
        marks += mark.any(axis=1)[before["source"] == 1].sum()
        assert np.array_equal(after["inputs"][mark], before["inputs"][mark])
    assert marks


def test_an_id_to_corrupt_with_is_one_of_the_tokenizer(config):
    wrong = dataclasses.replace(config, corruption=CorruptionConfig(rate=0.1, token_id=9999))
    with pytest.raises(
        ConfigError, match=r"data.corruption.token_id=9999 must be below 257.* or to null"
    ):
        open_training(wrong, seed=0, steps=5)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_sources_behind_urls_give_the_same_stream_in_workers_too(
    corpora, config, tmp_path, workers
):
    sources = {
        name: dataclasses.replace(s, path=f"file://{s.path}") for name, s in config.sources.items()
    }
    remote = dataclasses.replace(
        config, sources=sources, workers=workers, cache=str(tmp_path / "cache")
    )
    ours, theirs = (open_training(c, seed=3, steps=12) for c in (remote, config))
    assert ours.fingerprint_at(12) == theirs.fingerprint_at(12)
    for step, batch in enumerate(ours.iterate(2), 2):
        assert_same(batch, theirs.batch(step))
    assert any((tmp_path / "cache").glob("??/*.bin"))


def test_a_tokenizer_whose_padding_is_its_end_of_documents_trains_that_end(tmp_path):
    """Lengths say what padding is, never an id."""
    model = tmp_path / "model"
    model.mkdir()
    pretrained.write(model)
    names = {"eos_token": "<|end|>", "pad_token": "<|end|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(names))
    for number, text in enumerate(["a short one", "one that is longer than it"]):
        (tmp_path / f"{number}.txt").write_text(text)
    made = [str(tmp_path / "data"), "--text", f"{tmp_path}/*.txt", "--tokenizer", str(model)]
    assert prepare.main([*made, "--workers", "1"]) == 0
    source = SourceConfig(str(tmp_path / "data"), 1.0, None)
    config = DataConfig(sources={"text": source}, seq_length=40, batch_size=2, packing="pad")
    data = open_training(config, seed=0, steps=1)
    arrays = data.batch(0).arrays
    is_end = arrays["targets"] == load_tokenizer(model).eod_id
    is_target = arrays["loss_mask"] == 1
    is_padding = arrays["segment_ids"] == 0
    # All of a text, and the end.
    lengths = [len("a short one") + 1, len("one that is longer than it") + 1]
    assert sorted(is_target.sum(1)) == lengths
    assert (is_end & is_target).sum(1).tolist() == [1, 1]
    assert is_padding.sum() == 2 * 40 - sum(lengths)
    assert not (is_padding & is_target).any()
