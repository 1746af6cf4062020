"""Token shards: what is written is what is read, everywhere in the cyclic stream, and no changed
byte goes unnoticed."""

import dataclasses
import errno
import gc
import hashlib
import json
import os
import pickle
import random
import re
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import DataError
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import open_training
from data_pipeline.shards import (
    BLOCK_BYTES,
    Manifest,
    ShardWriter,
    TokenShards,
    checked,
    files,
    token_dtype,
)
from data_pipeline.shards.manifest import digest_of


def build(directory, shards_of_documents, vocab_size=1000, masks=None, eod="append"):
    """Write shards of the given documents (lists of ids) with masks of the same layout (lists of
    bools, or None)."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, documents in enumerate(shards_of_documents):
        writer = ShardWriter(directory, f"tokens-{number:05d}", vocab_size)
        for nth, document in enumerate(documents):
            mask = masks[number][nth] if masks else None
            writer.append(np.asarray(document), mask=None if mask is None else np.array(mask, bool))
        entries.append(writer.close())
    (directory / "tokenizer.json").write_text("{}")
    sha256 = hashlib.sha256(b"{}").hexdigest()
    tokenizer = {
        "name": "test",
        "sha256": sha256,
        "vocab_size": vocab_size,
        "special_ids": {"eod": 0},
    }
    Manifest(tokenizer, token_dtype(vocab_size).name, eod, 10, tuple(entries)).save(directory)
    return directory


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Two shards of 2.4 and 1.2 MiB, so that there are whole and partial blocks."""
    random_ids = np.random.default_rng(0)
    documents = [[random_ids.integers(0, 1000, 25_000) for _ in range(count)] for count in (50, 25)]
    masks = [[None] * 50, [random_ids.random(25_000) < 0.5 for _ in range(25)]]
    return build(tmp_path_factory.mktemp("large"), documents, masks=masks)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=7), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    st.integers(-50, 200),
    st.integers(1, 120),
)
def test_window_is_the_cyclic_stream(tmp_path_factory, layout, start, length):
    shards = TokenShards.open(build(tmp_path_factory.mktemp("shards"), layout))
    documents = [document for shard in layout for document in shard]
    stream = np.concatenate(documents)
    begins = np.concatenate([[1] + [0] * (len(document) - 1) for document in documents])
    at = np.arange(start, start + length) % len(stream)
    window = shards.read(start, length)
    assert window.dtype == np.int32
    np.testing.assert_array_equal(window, stream[at])
    grid = np.add.outer([start, start + 3, -start], np.arange(length))
    several, borders = shards.windows(grid[:, 0], length)
    np.testing.assert_array_equal(several, stream[grid % len(stream)])
    np.testing.assert_array_equal(np.sort(borders), np.flatnonzero(begins[grid % len(stream)]))
    assert (shards.num_tokens, shards.num_documents) == (len(stream), len(documents))
    assert shards.read(*shards.document(len(documents) - 1)).tolist() == documents[-1]


@st.composite
def masked_layouts(draw):
    """Shards of documents, as lengths, and a mask (or None) for each."""
    layout = draw(
        st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=4)
    )
    masks = [
        [draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n)) for n in shard]
        for shard in layout
    ]
    return layout, masks


@settings(max_examples=60, deadline=None)
@given(
    masked_layouts(),
    st.integers(-50, 200),
    st.integers(1, 120),
    st.sampled_from(["append", "none"]),
)
def test_mask_of_windows_is_the_cyclic_mask(tmp_path_factory, layout_and_masks, start, length, eod):
    layout, masks = layout_and_masks
    directory = tmp_path_factory.mktemp("shards")
    shards = TokenShards.open(
        build(directory, [[np.arange(n) for n in shard] for shard in layout], masks=masks, eod=eod)
    )
    written = [
        [True] * n if mask is None else mask
        for ns, of in zip(layout, masks)
        for n, mask in zip(ns, of)
    ]
    stream = np.concatenate(written)
    grid = np.add.outer([start, start + 3, -start], np.arange(length))
    np.testing.assert_array_equal(shards.mask(grid[:, 0], length), stream[grid % len(stream)])
    with_file = {path.stem for path in directory.glob("*.mask")}
    assert with_file == {
        f"tokens-{i:05d}" for i, of in enumerate(masks) if any(mask is not None for mask in of)
    }
    assert shards.masked == bool(with_file) and not list(shards.problems())
    assert shards.manifest.num_targets == sum(sum(mask[eod == "none" :]) for mask in written)


@settings(max_examples=60, deadline=None)
@given(masked_layouts(), st.data())
def test_parts_of_documents_are_those_of_the_stream(tmp_path_factory, layout_and_masks, data):
    layout, masks = layout_and_masks
    shards = TokenShards.open(
        build(
            tmp_path_factory.mktemp("shards"),
            [[np.arange(n) for n in ns] for ns in layout],
            masks=masks,
        )
    )
    numbers = np.array(
        data.draw(st.lists(st.integers(0, shards.num_documents - 1), max_size=8)), np.int64
    )
    first, lengths = shards.documents(numbers)
    assert list(zip(first.tolist(), lengths.tolist())) == [
        shards.document(number) for number in numbers.tolist()
    ]
    skipped = data.draw(st.integers(0, 3))
    first, lengths = (
        first + np.minimum(skipped, lengths - 1),
        lengths - np.minimum(skipped, lengths - 1),
    )
    tokens, mask = shards.spans(first, lengths)
    stream, counts = (
        shards.read(0, shards.num_tokens),
        shards.mask(np.array([0]), shards.num_tokens)[0],
    )
    at = [
        i
        for start, length in zip(first.tolist(), lengths.tolist())
        for i in range(start, start + length)
    ]
    assert (tokens.dtype, mask.dtype) == (np.int32, bool)
    assert (tokens.tolist(), mask.tolist()) == (stream[at].tolist(), counts[at].tolist())


@pytest.mark.parametrize("suffix", ["bin", "mask"])
def test_damage_in_a_part_of_a_document_is_noticed(large, suffix):
    path = large / f"tokens-00001.{suffix}"  # 625,000 tokens from 1,250,000 on, documents of 25,000
    before = path.read_bytes()
    path.write_bytes(before[:-3] + bytes([before[-3] ^ 1]) + before[-2:])
    try:
        first, lengths = TokenShards.open(large).documents(np.array([0, 50, 74]))
        shards = TokenShards.open(large)  # its tokens are two blocks, its mask is one
        assert shards.spans(first[:1], lengths[:1])[0].size == 25_000
        if suffix == "bin":
            assert shards.spans(first[:2], lengths[:2])[0].size == 50_000
        with pytest.raises(
            DataError, match=rf"tokens-00001.{suffix}: bytes .*expected crc32.*--overwrite"
        ):
            shards.spans(first[2:], lengths[2:])
    finally:
        path.write_bytes(before)


def test_mask_belongs_to_the_identity_of_the_content(tmp_path):
    documents, masks = (
        [[[1, 2, 3]]],
        (None, [[[True, True, True]]], [[[False, True, True]]], [[[True, True, False]]]),
    )
    made = [build(tmp_path / str(i), documents, masks=mask) for i, mask in enumerate(masks)]
    assert len({TokenShards.open(path).uid for path in made}) == len(masks)


def test_manifest_without_the_fields_of_masks_still_reads(tmp_path):
    directory = build(tmp_path, [[[1, 2, 3], [4]]])
    expected, content = (
        TokenShards.open(directory),
        json.loads((directory / "manifest.json").read_text()),
    )
    for name in ("digest", "num_targets"):
        del content[name]
    for name in ("targets", "first_targets"):
        del content["shards"][0][name]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(content | {"digest": digest}))
    shards = TokenShards.open(directory, "full")
    assert (shards.uid, shards.masked, shards.manifest.num_targets) == (expected.uid, False, 4)
    parts = [
        1,
        "uint16",
        "append",
        10,
        {n: shards.manifest.tokenizer[n] for n in ("sha256", "vocab_size", "special_ids")},
    ]
    parts += [
        [
            [
                content["shards"][0][n]
                for n in ("tokens", "documents", "max_id", "sha256", "checks_sha256")
            ]
        ]
    ]
    assert (
        shards.uid == hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    )  # as before masks


def test_a_mask_cut_short_or_changed_is_noticed(tmp_path):
    directory = build(tmp_path, [[list(range(40))]], masks=[[[True, False] * 20]])
    path = directory / "tokens-00000.mask"
    before = path.read_bytes()
    path.write_bytes(before[:-1])
    with pytest.raises(
        DataError, match=r"tokens-00000.mask: expected 5 bytes, found 4.*prepare.*--overwrite"
    ):
        TokenShards.open(directory)
    path.write_bytes(b"\xff" + before[1:])
    shards = TokenShards.open(directory)
    assert shards.read(0, 40).tolist() == list(range(40))
    with pytest.raises(
        DataError, match=r"tokens-00000.mask: bytes 0 to 4 \(block 0\): expected crc32.*--overwrite"
    ):
        shards.mask(np.array([0]), 1)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (1 << 16, "uint16"), ((1 << 16) + 1, "uint32")]
)
def test_smallest_dtype_that_holds_the_vocabulary(tmp_path, vocab_size, dtype):
    shards = TokenShards.open(build(tmp_path, [[[vocab_size - 1, 0]]], vocab_size))
    assert shards.manifest.dtype == dtype and shards.read(0, 2).tolist() == [vocab_size - 1, 0]


@pytest.mark.parametrize("bad", [-1, 300, 70_000])
def test_id_outside_the_vocabulary_is_refused(tmp_path, bad):
    writer = ShardWriter(tmp_path, "tokens-00000", 300)
    with pytest.raises(
        DataError, match=rf"token id {bad} .*\[0, 300\).*tokenizer that these ids belong to"
    ):
        writer.append(np.array([1, bad]))
    writer.abort()
    assert not list(tmp_path.iterdir())


def test_same_content_same_uid_other_content_other_uid(tmp_path):
    documents = [[[1, 2, 3], [4]]]
    first, same = build(tmp_path / "a", documents), build(tmp_path / "b", documents)
    others = [build(tmp_path / "c", [[[1, 2, 3, 4]]]), build(tmp_path / "d", [[[1, 2, 3]], [[4]]])]
    assert (
        first.joinpath("manifest.json").read_bytes() == same.joinpath("manifest.json").read_bytes()
    )
    uids = [TokenShards.open(path).uid for path in (first, same, *others)]
    assert uids[0] == uids[1] and len(set(uids)) == 3


def damage(directory, change, rng):
    """Change one random file of `directory`; returns it and a function that undoes the change."""
    path = rng.choice(sorted(directory.iterdir()))
    before = path.read_bytes()
    if change == "flip":
        data = bytearray(before)
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif change == "truncate":
        path.write_bytes(
            before[: rng.randrange(len(before) - 1)]
        )  # a manifest without its last line break means the same
    else:
        path.unlink()
    return path, lambda: path.write_bytes(before)


def read_everything(directory, verify):
    """All checks, or what a run of one epoch reads."""
    if verify == "full":
        TokenShards.open(directory, verify)
        return
    sources = {"data": SourceConfig(str(directory))}
    data = open_training(
        DataConfig(sources=sources, seq_length=64, batch_size=256, verify=verify), 0, "auto"
    )
    for step in range(data.plan.num_steps):
        data.batch(step)


@pytest.fixture
def small_blocks(tmp_path, monkeypatch):
    """Three shards of 3 to 15 blocks of 2 KiB, the second one with a mask."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 2048)
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 200, count) for count in (150, 60, 30)]
    documents = [[rng.integers(0, 1000, n) for n in of] for of in lengths]
    masks = [
        [rng.random(n) < 0.5 if number == 1 else None for n in of]
        for number, of in enumerate(lengths)
    ]
    return build(tmp_path / "small_blocks", documents, masks=masks)


@pytest.mark.long
@pytest.mark.parametrize("verify", ["full", "lazy"])
def test_none_of_a_thousand_damages_goes_unnoticed_and_none_is_imagined(small_blocks, verify):
    """Each check finds all of 650 random changes (130 are deletions) in any file, before what
    depends on them is handed out."""
    rng, damaged = random.Random(verify), set()
    for trial in range(650):
        if trial % 10 == 0:
            read_everything(small_blocks, verify)
        path, undo = damage(
            small_blocks, rng.choice(["flip", "flip", "flip", "truncate", "delete"]), rng
        )
        damaged.add(path.name)
        with pytest.raises(DataError, match=r"prepare") as caught:
            read_everything(small_blocks, verify)
        undo()
        assert path.stem in str(caught.value)
    assert len(damaged) == len(list(small_blocks.iterdir())) == 12


@pytest.mark.every_dose
@pytest.mark.long
def test_no_block_of_a_large_shard_goes_unchecked(large):
    """A flipped bit in each block of each file in turn, the last byte of each among them, is found;
    undone, it is well."""
    for path in sorted(
        path for path in large.iterdir() if path.suffix in {".bin", ".idx", ".mask"}
    ):
        size = path.stat().st_size
        for at in [*range(0, size, BLOCK_BYTES), size - 1]:
            with open(path, "r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                for value, expected in (
                    (byte ^ 4, pytest.raises(DataError, match=path.name)),
                    (byte, nullcontext()),
                ):
                    file.seek(at)
                    file.write(bytes([value]))
                    file.flush()
                    with expected:
                        read_everything(large, "lazy" if at else "full")


def test_message_names_shard_bytes_block_expected_found_and_mend(large):
    path = large / "tokens-00000.bin"
    before = path.read_bytes()
    path.write_bytes(before[: BLOCK_BYTES + 5] + b"\xff\xff" + before[BLOCK_BYTES + 7 :])
    try:
        shards = TokenShards.open(large)
        shards.read(0, BLOCK_BYTES // 2)  # the first block is whole, so a lazy reader may use it
        expected = r"tokens-00000.bin: bytes 1048576 to 2097151 \(block 1\): expected crc32 \w{8}, found \w{8}.*prepare.*--overwrite"
        with pytest.raises(DataError, match=expected):
            shards.read(BLOCK_BYTES // 2 - 1, 2)
        with pytest.raises(
            DataError, match=expected
        ):  # and again: a failed block is never taken for checked
            shards.read(BLOCK_BYTES // 2, 1)
        TokenShards.open(large, "size").read(BLOCK_BYTES // 2, 1)
    finally:
        path.write_bytes(before)


def test_swapped_shards_are_noticed(tmp_path):
    directory = build(tmp_path, [[[1, 2, 3]], [[4, 5, 6]]])
    for suffix in ("bin", "idx", "crc"):
        first, second = (directory / f"tokens-0000{i}.{suffix}" for i in (0, 1))
        data = first.read_bytes(), second.read_bytes()
        first.write_bytes(data[1]), second.write_bytes(data[0])
    with pytest.raises(DataError, match=r"tokens-00000.crc.*expected sha256"):
        TokenShards.open(directory).read(0, 1)


def test_directories_that_are_not_shards(tmp_path):
    with pytest.raises(DataError, match=r"not a directory of token shards.*prepare"):
        TokenShards.open(tmp_path / "absent")
    build(tmp_path / "both" / "train", [[[1]]])
    with pytest.raises(DataError, match=r"folders train have. Name one"):
        TokenShards.open(tmp_path / "both")
    (tmp_path / "manifest.json").write_text('{"model": 1}')
    with pytest.raises(DataError, match=r"not a manifest.*Name a directory"):
        TokenShards.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"is not JSON"):
        TokenShards.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"version": 99, "shards": [], "digest": ""}')
    with pytest.raises(DataError, match=r"version=99.*Update the program"):
        TokenShards.open(tmp_path)
    with pytest.raises(DataError, match=r"0 tokens.*at least one document"):
        TokenShards.open(build(tmp_path / "empty", []))
    with pytest.raises(DataError, match=r"document 7 does not exist. Choose one of 0 to 0"):
        TokenShards.open(build(tmp_path / "one", [[[1]]])).document(7)


def _places(value, path=()):
    """Return the paths of the values inside a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from _places(inner, (*path, key))


def _replaced(value, place, wrong):
    """A copy of a JSON value in which another one is at a place."""
    copy = json.loads(json.dumps(value))
    *before, last = place
    inner = copy
    for key in before:
        inner = inner[key]
    inner[last] = wrong
    return copy


@pytest.mark.long
def test_a_manifest_with_a_wrong_value_anywhere_is_told(tmp_path):
    """The digest matches the content: the manifest was not damaged, but written by another
    program."""
    directory = build(
        tmp_path, [[[1, 2, 3], [4]], [[5, 6]]], masks=[[[True, False, True], [True]], [None]]
    )
    path = directory / "manifest.json"
    problems = {"NUL character": {"count": 1, "left_out": 1, "examples": ["a.txt:1"]}}
    manifest = dataclasses.replace(
        Manifest.load(directory), problems=problems, sources=[{"kind": "text"}], settings={"n": 1}
    )
    manifest.save(directory)
    good = json.loads(path.read_text())
    accepted = []
    for place in _places(good):
        for wrong in (None, -1, 1e400, 10**30, 0.5, True, "x", "../x.bin", [], {}):
            content = _replaced(good, place, wrong)
            if place != ("digest",):
                content["digest"] = digest_of(
                    {key: value for key, value in content.items() if key != "digest"}
                )
            path.write_text(json.dumps(content))
            try:
                TokenShards.open(directory, "off")
                accepted.append((place, wrong))
            except DataError as error:
                assert re.search(
                    r"Restore it from a copy|Name a directory|Update the program", str(error)
                ), error
                assert len(str(error)) < 500
    # What says nothing of the tokens, and is of the type that it should be of, may be anything.
    for place, wrong in accepted:
        if place[:-1] in [("sources", 0), ("settings",)]:
            assert wrong != 1e400
        elif wrong is None:
            assert place in [("shards", 1, "targets"), ("shards", 1, "first_targets")], place
        elif isinstance(wrong, str):
            texts = [
                ("tokenizer", "name"),
                ("command",),
                ("problems", "NUL character", "examples", 0),
            ]
            assert place in texts, place
        else:
            assert (place, wrong) in [
                (("sources",), []), (("sources", 0), {}), (("settings",), {}), (("problems",), {}),
                (("problems", "NUL character", "examples"), []),
            ], (place, wrong)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 1, "version": 1}', "is not JSON .a key occurs twice: 'version'"),
        ("[" * 100_000, "is not JSON .lists or objects are more than 200 deep"),
        ('{"version": ' + "9" * 5000 + "}", "is not JSON .a number has too many digits"),
        ('{"version": 1, "shards": [], "digest": {}}', "changed after it was built"),
        ("\ufeff{}", "is not a manifest"),
        ("\ud800", "is not JSON"),
    ],
)
def test_a_manifest_that_is_hardly_json_is_told(tmp_path, text, message):
    (tmp_path / "manifest.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(DataError, match=message):
        TokenShards.open(tmp_path)


def test_pickled_reader_reads_the_same(large):
    shards = TokenShards.open(large)
    expected = shards.read(-5, 100)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(shards)).read(-5, 100), expected)


@pytest.mark.every_dose
@pytest.mark.long
def test_many_shards_open_fast_and_keep_few_descriptors(tmp_path, monkeypatch):
    monkeypatch.setattr(checked, "MAPPED", 16)
    directory = build(tmp_path, [[[1, 2], [3]]])
    entry = TokenShards.open(directory).manifest.shards[0]
    for suffix in ("bin", "idx", "crc"):
        for number in range(1, 300):
            (directory / f"tokens-{number:05d}.{suffix}").hardlink_to(
                directory / f"tokens-00000.{suffix}"
            )
    manifest = Manifest.load(directory)
    entries = [
        dataclasses.replace(entry, path=f"tokens-{number % 300:05d}.bin")
        for number in range(10_000)
    ]
    dataclasses.replace(manifest, shards=tuple(entries)).save(directory)
    started = time.perf_counter()
    shards = TokenShards.open(directory)
    assert time.perf_counter() - started < 3
    assert shards.read(0, 3 * 600).tolist() == [1, 2, 3] * 600
    assert shards.windows(np.array([0]), 9)[1].tolist() == [0, 2, 3, 5, 6, 8]
    assert shards._files.map.cache_info().currsize <= 16


def mapped(directory):
    """Return the number of files of a directory that this process has mapped."""
    return Path("/proc/self/maps").read_text().count(f"{directory}/")


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux' table of mappings")
def test_a_mapping_needs_no_descriptor_and_ends_with_its_last_reader(large):
    gc.collect()  # what is left of earlier readers
    descriptors = len(os.listdir("/proc/self/fd"))
    shards = TokenShards.open(large)
    shards.read(0, shards.num_tokens)
    assert len(os.listdir("/proc/self/fd")) == descriptors and mapped(large) == 4
    data = shards._files.map(0, ".bin")[5:7]
    expected = data.tolist()
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
    del shards
    gc.collect()
    assert mapped(large) == 1 and data.tolist() == expected
    del data
    assert mapped(large) == 0


def test_where_no_more_mappings_are_allowed_old_ones_are_given_back(large, monkeypatch):
    shards = TokenShards.open(large)
    expected, real, refused = shards.read(0, shards.num_tokens), files.map_read_only, []

    def only_one(path, size):
        if shards._files.map.cache_info().currsize:
            refused.append(path.name)
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(path, size)

    monkeypatch.setattr(files, "map_read_only", only_one)
    shards._files.map.cache_clear()
    np.testing.assert_array_equal(shards.read(0, shards.num_tokens), expected)
    assert len(refused) == 3
    monkeypatch.undo()
    with pytest.raises(OSError, match="Invalid argument"):
        files.map_read_only(large / "tokens-00000.bin", 0)
