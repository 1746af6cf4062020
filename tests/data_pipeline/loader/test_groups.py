"""Pairs: what belongs together is one thing to the plan, and two segments of a row, wherever it is
read; and numbers of documents, which reach every position of theirs."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import ConfigError, DataError
from data_pipeline.config import DataConfig, SourceConfig, StageConfig
from data_pipeline.loader.loader import carry_errors, open_evaluation, open_training
from data_pipeline.loader.packing import HostSlice, pack_documents
from data_pipeline.plan.document_packing import open_bins
from data_pipeline.prepare.preview import describe_step
from data_pipeline.prepare.report import row_arrays
from data_pipeline.shards import Manifest, ShardWriter, TokenShards
from data_pipeline.shards.cache import Cache
from data_pipeline.shards.manifest import digest_of
from data_pipeline.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
LENGTH = 48
NUM_STEPS = 16


def write(directory, layout, group=2, seed=0, eod="append", valued=False):
    """Shards of random documents of these lengths, end marks included, of which the second half is
    a target; if they are `valued`, the number of each is the sum of its ids, end mark included."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    entries = []
    for number, lengths in enumerate(layout):
        writer = ShardWriter(directory, f"tokens-{number:05d}", TOKENIZER.vocab_size)
        for length in lengths:
            is_target = np.arange(length - 1) >= length // 2
            ids = rng.integers(0, 256, length - 1)
            value = None
            if valued:
                value = float(ids.sum() + TOKENIZER.eod_id)
            writer.append(ids, mask=is_target, end=TOKENIZER.eod_id, value=value)
        entries.append(writer.close())
    TOKENIZER.save(directory)
    record = {
        "name": TOKENIZER.name,
        "sha256": TOKENIZER.sha256,
        "vocab_size": TOKENIZER.vocab_size,
        "special_ids": {"eod": TOKENIZER.eod_id},
    }
    manifest = Manifest(record, "uint16", eod, 10, tuple(entries), group=group)
    manifest.save(directory)
    return directory


def lengths_of_pairs(seed, count):
    return np.random.default_rng(seed).integers(2, LENGTH // 2, 2 * count).tolist()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    layouts = {
        "many": [lengths_of_pairs(1, 30), lengths_of_pairs(2, 11)],
        "few": [lengths_of_pairs(3, 17)],
    }
    sources = {}
    for seed, (name, layout) in enumerate(layouts.items()):
        path = str(write(root / name, layout, seed=seed, valued=True))
        sources[name] = SourceConfig(path, 1.0 + seed, None)
    return DataConfig(
        sources=sources,
        seq_length=LENGTH,
        batch_size=6,
        packing="balanced",
        balance_rows=2,
        balance_quadratic=0.01,
    )


def with_packing(config, packing):
    if packing == "balanced":
        return config
    changes = {"packing": packing, "balance_rows": 1, "balance_quadratic": None}
    return dataclasses.replace(config, **changes)


def segments_of(arrays):
    """Return the content of each segment of each row, in order."""
    names = [name for name in arrays if name not in ("source", "segment_ids")]
    rows = []
    for row, segments in enumerate(arrays["segment_ids"]):
        found = []
        for segment in range(1, segments.max(initial=0) + 1):
            mine = segments == segment
            found.append(tuple(tuple(arrays[name][row, mine].tolist()) for name in names))
        rows.append(found)
    return rows


def pairs_of(arrays):
    """The pairs of a batch by what they hold, sorted: segments 2k - 1 and 2k of each row."""
    pairs = []
    for segments in segments_of(arrays):
        assert len(segments) % 2 == 0
        pairs += zip(segments[::2], segments[1::2])
    return sorted(pairs)


def assert_same(first, second):
    assert first._replace(arrays=None) == second._replace(arrays=None)
    assert first.arrays.keys() == second.arrays.keys()
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, second.arrays[name], strict=True)


layouts = st.integers(1, 3).flatmap(
    lambda group: st.tuples(
        st.just(group),
        st.lists(
            st.lists(
                st.lists(st.integers(2, 15), min_size=group, max_size=group),
                min_size=1,
                max_size=6,
            ),
            min_size=1,
            max_size=3,
        ),
    )
)


@settings(max_examples=25, deadline=None)
@given(layouts, st.integers(1, 40), st.sampled_from(["bins", "pad"]))
def test_every_group_that_fits_is_in_one_row_whole(tmp_path_factory, layout, length, packing):
    group, of_shards = layout
    flat = [[n for documents in shard for n in documents] for shard in of_shards]
    shards = TokenShards.open(write(tmp_path_factory.mktemp("shards") / "of", flat, group))
    bins = open_bins(shards, length, packing, "skip")
    sizes = [sum(documents) for shard in of_shards for documents in shard]
    kept = [number for number, size in enumerate(sizes) if size <= length]
    assert (shards.num_groups, bins.skipped) == (len(sizes), len(sizes) - len(kept))
    rows = np.split(bins.numbers, bins.offsets[1:-1])
    found = []
    for row in rows[: bins.num_rows]:
        groups = row.reshape(-1, group)
        np.testing.assert_array_equal(groups, groups[:, :1] + np.arange(group))
        assert not (groups[:, 0] % group).any()
        numbers = (groups[:, 0] // group).tolist()
        assert sum(sizes[number] for number in numbers) <= length
        assert packing == "bins" or len(numbers) == 1
        found += numbers
    assert sorted(found) == kept
    assert bins.num_tokens == sum(sizes[number] for number in kept)

    number = np.arange(bins.num_rows)
    batch = pack_documents([shards], [bins], np.zeros_like(number), number, length, True, False)
    assert batch["loss_mask"].sum() == bins.num_targets
    for row, documents in zip(segments_of(batch), rows):
        lengths = [len(segment[0]) for segment in row]
        assert lengths == shards.documents(documents)[1].tolist()


def test_a_pair_is_two_segments_that_begin_at_0(config):
    data = open_training(with_packing(config, "pad"), 3, NUM_STEPS)
    arrays = data.batch(0).arrays
    for segments, positions in zip(arrays["segment_ids"], arrays["positions"]):
        assert segments.max() == 2
        for segment in (1, 2):
            np.testing.assert_array_equal(
                positions[segments == segment], np.arange(np.count_nonzero(segments == segment))
            )


def test_balanced_rows_have_the_pairs_that_pad_has(config):
    data = open_training(config, 3, NUM_STEPS)
    pad = open_training(with_packing(config, "pad"), 3, NUM_STEPS)
    fewer = 0
    for step in range(NUM_STEPS):
        ours = data.batch(step)
        theirs = pad.batch(step)
        assert len(pairs_of(theirs.arrays)) == 6
        assert pairs_of(ours.arrays) == pairs_of(theirs.arrays)
        assert (ours.digest, ours.num_targets) == (theirs.digest, theirs.num_targets)
        fewer += len(theirs.arrays["inputs"]) - len(ours.arrays["inputs"])
    assert fewer > NUM_STEPS
    said = data.describe()
    assert "tokens (pairs x length)" in said and "balanced: 6 pairs of a step in " in said


@pytest.mark.parametrize("packing", ["bins", "pad", "balanced"])
def test_an_epoch_has_every_pair_once(config, packing):
    few = dataclasses.replace(config.sources["few"], epochs=1.0)
    config = with_packing(dataclasses.replace(config, sources={"few": few}, batch_size=1), packing)
    data = open_training(dataclasses.replace(config, balance_rows=1), 3, "auto")
    pairs = []
    for batch in data.iterate(0):
        pairs += pairs_of(batch.arrays)
    assert len(pairs) == len(set(pairs)) == data.shards[0].num_groups == 17
    held_out = open_evaluation(data.shards[0].path, data.config, 3)
    again = []
    for batch in held_out.iterate():
        again += pairs_of(batch.arrays)
    assert sorted(again) == sorted(pairs)


@pytest.mark.every_dose
@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["bins", "pad", "balanced"]),
    st.integers(0, NUM_STEPS - 1),
    st.integers(1, 4),
    st.integers(0, LENGTH - 1),
)
def test_any_host_and_any_start_read_their_part_of_one_batch(
    config, packing, step, num_hosts, border
):
    config = with_packing(config, packing)
    whole = open_training(config, 3, NUM_STEPS).batch(step)
    data = pickle.loads(pickle.dumps(open_training(config, 3, NUM_STEPS + 3)))
    (streamed,) = data.iterate(step, stop_step=step + 1)
    assert_same(streamed, whole)
    contents = 0
    for rows in np.array_split(np.arange(data.shape_at(step).batch_size), num_hosts):
        for columns in (slice(0, border), slice(border, LENGTH)):
            if columns.start == columns.stop:
                continue
            batch = data.batch(step, HostSlice(rows, columns))
            for name, array in batch.arrays.items():
                expected = whole.arrays[name][rows]
                if array.ndim == 2:
                    expected = expected[:, columns]
                np.testing.assert_array_equal(array, expected)
            contents += batch.content
    assert contents % 2**64 == whole.content


@pytest.mark.parametrize("packing", ["bins", "pad", "balanced"])
@pytest.mark.parametrize("group", [1, 2])
def test_every_position_has_the_number_of_its_document(tmp_path, packing, group):
    lengths = lengths_of_pairs(4, 12)
    path = write(tmp_path / "valued", [lengths[:8], lengths[8:]], group, valued=True)
    sources = {"valued": SourceConfig(str(path), 1.0, None)}
    data = open_training(
        DataConfig(sources=sources, seq_length=LENGTH, batch_size=4, packing=packing), 3, 6
    )
    (streamed,) = data.iterate(3, stop_step=4)
    held_out = open_evaluation(path, data.config, 5)
    for batch in (streamed, held_out.batch(0), held_out.batch(held_out.num_batches - 1)):
        arrays = batch.arrays
        assert arrays["value"].dtype == np.float32
        assert not arrays["value"][arrays["segment_ids"] == 0].any()
        for row, segments in enumerate(arrays["segment_ids"]):
            for segment in range(1, segments.max() + 1):
                mine = segments == segment
                expected = arrays["targets"][row, mine].sum()
                np.testing.assert_array_equal(arrays["value"][row, mine], expected)


def test_a_stream_that_cannot_be_read_goes_on_with_batches_of_the_same_arrays(config):
    data = open_training(config, 3, NUM_STEPS)
    part = HostSlice(np.array([1]), slice(0, LENGTH))
    failure = OSError("no more")

    def stream():
        yield from data.iterate(4, part, 5)
        raise failure

    read, empty = carry_errors(stream(), range(4, 6), lambda _: part, data.numbers)
    assert empty.error is failure
    for name, array in read.arrays.items():
        other = empty.arrays[name]
        assert (other.shape, other.dtype, other.any()) == (array.shape, array.dtype, False)


def test_data_without_numbers_has_no_array_of_them_and_does_not_mix(config, tmp_path):
    plain = write(tmp_path / "plain", [[5, 6, 7, 8]])
    source = SourceConfig(str(plain), 1.0, None)
    alone = dataclasses.replace(config, sources={"plain": source}, batch_size=2)
    assert "value" not in open_training(alone, 3, 2).batch(0).arrays
    both = config.sources | {"plain": source}
    with pytest.raises(
        ConfigError, match=r"few has a number .*, but data\.sources\.plain none.*out"
    ):
        open_training(dataclasses.replace(config, sources=both), 3, 2)


@pytest.mark.parametrize("change", ["flip", "cut", "remove"])
def test_damaged_numbers_are_told(tmp_path, change):
    directory = write(tmp_path / "valued", [[5, 6], [7, 8]], valued=True)
    assert not list(TokenShards.open(directory).problems())
    path = directory / "tokens-00001.val"
    content = path.read_bytes()
    assert np.frombuffer(content, "<f4").size == 2
    if change == "flip":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif change == "cut":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    (problem,) = TokenShards.open(directory, "off").problems()
    assert "tokens-00001.val" in problem and "build it again" in problem
    if change == "flip":
        with pytest.raises(DataError, match=r"tokens-00001\.val: .*expected crc32"):
            TokenShards.open(directory, "lazy").values(np.array([3]))


def test_numbers_are_in_the_identity_and_behind_urls(tmp_path):
    layout = [[5, 6], [7, 8]]
    local = TokenShards.open(write(tmp_path / "valued", layout, valued=True))
    assert local.uid != TokenShards.open(write(tmp_path / "plain", layout)).uid
    numbers = np.array([3, 0, 2, 0])
    remote = TokenShards.open(f"file://{tmp_path}/valued", cache=Cache(tmp_path / "cache"))
    np.testing.assert_array_equal(remote.values(numbers), local.values(numbers))
    assert not list(remote.problems())
    assert remote.manifest.shards[0].has_values


def test_a_run_goes_on_from_a_cursor(config):
    first = open_training(config, 3, NUM_STEPS)
    cursor = json.loads(json.dumps(first.cursor_at(5)))
    assert_same(open_training(config, 3, NUM_STEPS, cursor).batch(9), first.batch(9))


def test_a_step_is_described_in_pairs(config):
    stages = (StageConfig(until=4), StageConfig(batch_size=8, seq_length=64))
    data = open_training(dataclasses.replace(config, stages=stages), 3, 8)
    lines = list(describe_step(data, 6, 1, 80))
    assert count_of(lines, "pairs") == 8
    (command,) = [line for line in lines if line.startswith("A whole pair: ")]
    source = data.rows_at(6).source[0]
    number = data.bins_of(6, source).documents(data.rows_at(6).row[:1])[1][0] // 2
    assert command.endswith(f"--pair {number}")


def count_of(lines, unit):
    """The sum of the counts of a unit in the lines of sources."""
    count = 0
    for line in lines:
        words = line.replace(",", "").split()
        if line.startswith("  ") and unit in words:
            count += int(words[words.index(unit) - 1])
    return count


def test_what_would_tear_or_join_documents_of_a_pair_is_refused(config, tmp_path):
    def refused(match, **changes):
        with pytest.raises(ConfigError, match=match):
            open_training(dataclasses.replace(config, **changes), 3, 4)

    plain = {"balance_rows": 1, "balance_quadratic": None}
    few = write(tmp_path / "few", [[5, 6, 7, 8]])
    refused(
        r"packing=stream, .*pairs of 2 documents.*=bins, pad or balanced",
        packing="stream",
        sources={"few": SourceConfig(str(few))},
        **plain,
    )
    refused(r"Set data\.attend_across_documents=false", attend_across_documents=True)
    refused(r"Set data\.restart_positions=true", restart_positions=False)
    refused(r"on_long=truncate, .*pairs.*can't be cut.* raise or skip", on_long="truncate")
    refused(
        r"but pair \d+ of .* has \d+; \d+ pairs have too many. Set .* at least \d+, or "
        r"data\.on_long to skip\.",
        seq_length=20,
    )
    short = dataclasses.replace(config, seq_length=20, on_long="skip")
    assert "longer than a row: " in open_training(short, 3, 4).describe()
    path = config.sources["few"].path
    with pytest.raises(ConfigError, match=r"packing=stream, .*number for each document"):
        open_evaluation(path, with_packing(config, "stream"), 2)
    with pytest.raises(DataError, match=r"--packing stream: .*pairs.* Give --packing bins or pad"):
        row_arrays(TokenShards.open(path), 0, 20, "stream", 0)


def test_pairs_and_single_documents_do_not_mix(config, tmp_path):
    single = write(tmp_path / "single", [[5, 6]], group=1, valued=True)
    sources = config.sources | {"single": SourceConfig(str(single), 1.0, None)}
    with pytest.raises(ConfigError, match=r"single holds single documents, but .*Leave one of th"):
        open_training(dataclasses.replace(config, sources=sources), 3, 4)


def test_a_manifest_says_what_belongs_together_only_where_something_does(tmp_path):
    layout = [[3, 4, 5, 6]]
    manifests = {}
    for group in (1, 2, 4):
        directory = write(tmp_path / str(group), layout, group)
        manifests[group] = Manifest.load(directory)
        content = json.loads((directory / "manifest.json").read_text())
        assert ("group" in content) == (group > 1)
    assert len({manifest.uid for manifest in manifests.values()}) == 3
    assert [manifest.num_groups for manifest in manifests.values()] == [4, 2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 3}, r"shards\[0\]\.documents=4 must be a multiple of 3"),
        ({"group": 0}, r"group=0 must be an integer in \[1, 64\]"),
        ({"group": True}, r"group=true must be an integer"),
        ({"shards": True}, r"shards\[1\]\.has_values=true must be as in the first shard"),
    ],
)
def test_a_manifest_of_torn_groups_is_refused(tmp_path, changes, message):
    directory = write(tmp_path / "pairs", [[3, 4, 5, 6], [7, 8]])
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    if "shards" in changes:
        content["shards"][1]["has_values"] = changes["shards"]
    else:
        content |= changes
    del content["digest"]
    path.write_text(json.dumps(content | {"digest": digest_of(content)}))
    with pytest.raises(DataError, match=message):
        TokenShards.open(directory)
