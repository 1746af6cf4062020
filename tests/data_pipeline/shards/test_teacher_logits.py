"""Stored logits of a teacher: found for each target in every packing, and refused if they are not
what was written."""

import dataclasses
import hashlib
import pickle

import numpy as np
import pytest

from data_pipeline.base.errors import DataError
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import open_training
from data_pipeline.loader.packing import HostSlice
from data_pipeline.shards import TokenShards
from data_pipeline.shards.teacher_logits import (
    IDS,
    LOG_PROBS,
    TAIL,
    StoredTeacher,
    TeacherFile,
    TeacherFiles,
    TeacherRecord,
    checks_of,
    folder_of,
)
from tests.data_pipeline.shards.test_shards import build

TOP = 3
LENGTHS = [5, 12, 3, 9, 16, 1, 7, 8, 2, 11]


def keep(shards, name="t"):
    """Files in which the likeliest token is the one that is there, and its log-probability the
    number of it in the stream; others follow."""
    folder = folder_of(shards, name, "name")
    folder.mkdir()
    record = TeacherRecord(shards.uid, "a-b", "nowhere", {}, shards.vocab_size, TOP, 1.0, 16)
    files = []
    begin = 0
    for entry in shards.manifest.shards:
        content = np.zeros(entry.tokens, record.entry())
        number = begin + np.arange(entry.tokens)
        begin += entry.tokens
        content["ids"] = shards.read(int(number[0]), entry.tokens)[:, None] + np.arange(TOP)
        content["log_probs"] = -np.float32(number)[:, None] - np.arange(TOP)
        content["tail"] = -0.5
        path = folder / f"{entry.path}.top"
        path.write_bytes(content.tobytes())
        checks = checks_of(path)
        path.with_name(f"{path.name}.crc").write_bytes(checks)
        digest = hashlib.sha256(checks).hexdigest()
        files.append(TeacherFile(path.name, path.stat().st_size, digest))
    dataclasses.replace(record, files=tuple(files)).save(folder)
    return folder


@pytest.fixture
def shards(tmp_path):
    """Two sources, one of several shards."""
    found = []
    for number, eod in enumerate(("append", "none")):
        folder = tmp_path / str(number)
        documents = [list(range(1 + 20 * number, 1 + 20 * number + n)) for n in LENGTHS]
        build(folder, [documents[:4], documents[4:]], eod=eod)
        found.append(TokenShards.open(folder))
    return found


@pytest.mark.parametrize("packing", ["pad", "bins", "balanced"])
def test_each_target_has_its_own_entry(shards, packing):
    config = DataConfig(
        sources={str(i): SourceConfig(str(s.path), epochs=None) for i, s in enumerate(shards)},
        seq_length=20,
        batch_size=8,
        packing=packing,
        balance_rows=2,
    )
    data = open_training(config, 0, 6)
    opened = [StoredTeacher.open(keep(source), source) for source in data.shards]
    data.teacher = TeacherFiles(opened, [source.num_tokens for source in data.shards], TOP)
    again = pickle.loads(pickle.dumps(data))
    seen = 0
    for step in range(6):
        batch = data.batch(step).arrays
        assert "place" not in batch
        is_there = batch["segment_ids"] > 0
        np.testing.assert_array_equal(batch[IDS][is_there][:, 0], batch["targets"][is_there])
        # Without end marks, nothing is predicted from the last token of a document.
        has_entry = batch["loss_mask"] > 0
        np.testing.assert_array_equal(batch[IDS][..., 2], batch["targets"] + 2 * has_entry)
        assert (batch[IDS][~has_entry] == 0).all() and (batch[TAIL][~has_entry] == 0).all()
        assert (batch[TAIL][has_entry] == -0.5).all()
        # Numbers count on within a document.
        inside = has_entry[:, 1:] & (batch["positions"][:, 1:] > 0)
        steps = np.diff(batch[LOG_PROBS][..., 0], axis=1)
        assert (steps[inside] == -1).all()
        seen += int(inside.sum())
        rows = len(batch["targets"])
        part = HostSlice(np.arange(rows)[1::2], slice(3, 11))
        for reader in (data, again):
            of_part = reader.batch(step, part).arrays
            for name in (IDS, LOG_PROBS, TAIL):
                np.testing.assert_array_equal(of_part[name], batch[name][1::2, 3:11])
    assert seen > 100


def test_fewer_entries_leave_more_to_the_tail(shards):
    (source, _) = shards
    teacher = StoredTeacher.open(keep(source), source)
    tokens = np.array([7, -1, 0])
    found = teacher.read(tokens, 1)
    assert found[IDS].shape == (3, 1) and found[IDS].dtype == np.int32
    expected = np.log(np.exp(-0.5) + np.exp(-8.0) + np.exp(-9.0))
    np.testing.assert_allclose(found[TAIL][0], expected, rtol=1e-6)
    assert found[TAIL][1] == 0
    whole = teacher.read(tokens, TOP)
    np.testing.assert_array_equal(whole[LOG_PROBS][0], [-7, -8, -9])
    assert whole[TAIL][0] == np.float32(-0.5)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda folder: flip(next(folder.glob("*.top"))), "expected crc32"),
        (lambda folder: flip(next(folder.glob("*.crc"))), "expected sha256"),
        (lambda folder: next(folder.glob("*.top")).unlink(), "can't be read"),
        (lambda folder: next(folder.glob("*.top")).write_bytes(b"ab"), "bytes, found 2"),
        (lambda folder: (folder / "record.json").unlink(), "was never finished"),
        (lambda folder: (folder / "record.json").write_text("{}"), "can't be read"),
        (
            lambda folder: (folder / "record.json").write_text(
                (folder / "record.json").read_text().replace('"top": 3', '"top": 2')
            ),
            "expected digest",
        ),
    ],
)
def test_what_is_not_as_it_was_written_is_an_error(shards, damage, rule):
    (source, _) = shards
    folder = keep(source)
    damage(folder)
    with pytest.raises(DataError, match="with `maxtrain teach`") as error:
        StoredTeacher.open(folder, source, "full")
    assert rule in str(error.value)


@pytest.mark.parametrize("name", ["../canary", "/etc/passwd", "a/b.top", "a\0b", "", None])
def test_files_elsewhere_are_refused(shards, name):
    (source, _) = shards
    folder = keep(source)
    record = TeacherRecord.load(folder)
    files = (dataclasses.replace(record.files[0], name=name), *record.files[1:])
    dataclasses.replace(record, files=files).save(folder)
    with pytest.raises(DataError, match="no name of a file beside it"):
        StoredTeacher.open(folder, source, "off")


def test_a_damaged_block_is_found_when_it_is_read(shards):
    (source, _) = shards
    folder = keep(source)
    flip(next(iter(sorted(folder.glob("*.top")))))
    teacher = StoredTeacher.open(folder, source)
    with pytest.raises(DataError, match="changed after it was made"):
        teacher.read(np.array([3]), TOP)


def test_files_of_other_data_are_refused(shards):
    first, second = shards
    folder = keep(first)
    with pytest.raises(DataError, match="is of other data"):
        StoredTeacher.open(folder, second)
