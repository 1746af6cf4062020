"""Shards behind a URL: the same windows as local ones, whatever the cache has been through, and no
changed byte unnoticed."""

import gc
import hashlib
import multiprocessing
import pickle
import random
import threading

import numpy as np
import pytest

from data_pipeline.base import remote
from data_pipeline.base.errors import DataError, StorageError
from data_pipeline.base.remote import place
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import open_training
from data_pipeline.plan.document_packing import open_bins
from data_pipeline.shards import Manifest, ShardWriter, TokenShards, cached, files
from data_pipeline.shards.cache import Cache

BLOCK = 2048
FILES = pytest.mark.parametrize(
    "url", ["file"], indirect=True
)  # where it is no matter what is behind the URL


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", BLOCK)


def build(directory, seed=0):
    """Three shards of 3 to 15 blocks of 2 KiB, the second one with a mask."""
    directory.mkdir(parents=True)
    rng, entries = np.random.default_rng(seed), []
    for number, count in enumerate((150, 60, 30)):
        writer = ShardWriter(directory, f"tokens-{number:05d}", 1000)
        for length in rng.integers(1, 200, count).tolist():
            writer.append(
                rng.integers(0, 1000, length),
                mask=rng.random(length) < 0.5 if number == 1 else None,
            )
        entries.append(writer.close())
    (directory / "tokenizer.json").write_text("{}")
    identity = {
        "name": "test",
        "sha256": hashlib.sha256(b"{}").hexdigest(),
        "vocab_size": 1000,
        "special_ids": {"eod": 0},
    }
    Manifest(identity, "uint16", "append", 10, tuple(entries)).save(directory)
    return directory


@pytest.fixture
def both(small_blocks, tmp_path, url):
    """The reader of a local directory, and the URL of a copy."""
    local = build(tmp_path / "local")
    for file in local.iterdir():
        (place(url) / file.name).upload(file)
    return TokenShards.open(local), url


def check_same(local, shards, rng, count=20):
    """Windows, masks, documents and their parts, anywhere in the stream, in both."""
    for _ in range(count):
        starts, length = rng.integers(-3000, 2 * local.num_tokens, 8), int(rng.integers(1, 3000))
        for ours, theirs in zip(local.windows(starts, length), shards.windows(starts, length)):
            np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))
        np.testing.assert_array_equal(
            local.windows(starts, length)[0], shards.windows(starts, length)[0]
        )
        np.testing.assert_array_equal(local.mask(starts, length), shards.mask(starts, length))
        numbers = rng.integers(0, local.num_documents, 9)
        np.testing.assert_array_equal(local.documents(numbers), shards.documents(numbers))
        for ours, theirs in zip(
            local.spans(*local.documents(numbers)), shards.spans(*shards.documents(numbers))
        ):
            np.testing.assert_array_equal(ours, theirs)


def used(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.glob("??/*"))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("verify", ["off", "lazy", "full"])
def test_a_url_reads_as_a_directory_does(both, tmp_path, verify):
    local, url = both
    shards = TokenShards.open(url, verify, Cache(tmp_path / "cache", 1 << 30))
    assert (shards.uid, shards.manifest.shards, list(shards.problems())) == (
        local.uid,
        local.manifest.shards,
        [],
    )
    check_same(local, shards, np.random.default_rng(1))
    check_same(local, pickle.loads(pickle.dumps(shards)), np.random.default_rng(2), 3)


def test_what_is_cached_is_not_fetched_again_and_neighbours_are_fetched_together(
    both, tmp_path, monkeypatch
):
    (local, url), asked = both, []
    real = cached.read_ranges
    monkeypatch.setattr(
        cached, "read_ranges", lambda ranges: (asked.extend(ranges), real(ranges))[1]
    )
    shards = TokenShards.open(url, cache=Cache(tmp_path / "cache", 1 << 30))
    assert shards.read(0, 4 * BLOCK // 2).tolist() == local.read(0, 4 * BLOCK // 2).tolist()
    tokens = [(start, stop) for path, start, stop in asked if path.name.endswith(".bin")]
    assert tokens == [(0, 4 * BLOCK)]
    asked.clear()
    again = TokenShards.open(url, cache=Cache(tmp_path / "cache", 1 << 30))
    assert (
        again.read(0, 4 * BLOCK // 2).tolist() == local.read(0, 4 * BLOCK // 2).tolist()
        and not asked
    )


@pytest.mark.every_dose
@pytest.mark.long
@FILES
def test_a_bit_flipped_in_the_cache_is_mended(both, tmp_path):
    (local, url), rng, cache = both, random.Random(0), Cache(tmp_path / "cache", 1 << 30)
    check_same(local, TokenShards.open(url, cache=cache), np.random.default_rng(0))
    kept = {path: path.read_bytes() for path in cache.folder.glob("??/*")}
    assert len(kept) == 10
    for path in [*kept, *rng.choices(list(kept), k=20)]:
        flip(path, rng.randrange(path.stat().st_size))
        check_same(local, TokenShards.open(url, cache=cache), np.random.default_rng(0), 12)
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("verify", ["lazy", "full"])
def test_a_bit_flipped_behind_the_url_is_refused(both, tmp_path, verify):
    (local, url), rng = both, random.Random(verify)
    for number, file in enumerate(sorted(local.path.iterdir())):
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (place(url) / file.name).write_bytes(bytes(content))
        with pytest.raises(DataError, match=rf"(?s){file.stem}.*prepare"):
            config = DataConfig(
                {"a": SourceConfig(url)},
                cache=str(tmp_path / str(number)),
                verify=verify,
                seq_length=64,
            )
            data = open_training(config, 0, "auto")
            for step in range(data.plan.num_steps):
                data.batch(step)
        (place(url) / file.name).upload(file)
    file = local.path / "tokens-00001.idx"
    (place(url) / file.name).write_bytes(file.read_bytes()[:-8])
    with pytest.raises(
        DataError, match=r"tokens-00001.idx: expected \d+ bytes, found \d+.*--overwrite"
    ):
        TokenShards.open(url)
    (place(url) / file.name).remove()
    with pytest.raises(DataError, match=r"tokens-00001.idx: can't be read.*--overwrite"):
        TokenShards.open(url)


@FILES
def test_the_cache_stays_below_its_limit_and_readers_are_right_all_the_time(both, tmp_path):
    (local, url), folder, limit, rng = both, tmp_path / "cache", 24_000, np.random.default_rng(3)
    one, other = (TokenShards.open(url, cache=Cache(folder, limit)) for _ in range(2))
    sizes = []
    for _ in range(20):
        for shards in (one, other):
            check_same(local, shards, rng, 1)
            sizes.append(used(folder))
    whole = sum(path.stat().st_size for path in local.path.glob("tokens*"))
    assert whole > 2 * limit, "there is something to remove"
    assert max(sizes) <= limit and one._files._cache.generation() > 0


@FILES
def test_files_that_were_removed_are_let_go(both, tmp_path):
    (local, url), folder = both, tmp_path / "cache"
    shards = TokenShards.open(url, cache=Cache(folder, 1 << 30))
    shards.read(0, local.num_tokens)
    small = Cache(folder, 4096)
    small._written = 4096
    small.trim()
    assert used(folder) <= 4096
    check_same(local, shards, np.random.default_rng(0), 1)
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if str(folder) in line and "deleted" in line]


def _read(url, folder, seed, queue):
    files.BLOCK_BYTES = BLOCK
    shards, rng = TokenShards.open(url, cache=Cache(folder, 60_000)), np.random.default_rng(seed)
    digest = hashlib.sha256()
    for _ in range(60):
        digest.update(shards.windows(rng.integers(0, shards.num_tokens, 6), 500)[0].tobytes())
    queue.put((seed, digest.hexdigest()))


@pytest.mark.long
@pytest.mark.processes
def test_processes_share_a_cache(both, tmp_path):
    local, url = both
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_read, args=(url, tmp_path / "cache", 1, queue))
    child.start()
    while child.is_alive() and not (tmp_path / "cache").exists():
        child.join(0.01)
    _read(url, tmp_path / "cache", 2, queue)
    found = dict(queue.get(timeout=60) for _ in range(2))
    child.join()
    for seed in (1, 2):
        rng, digest = np.random.default_rng(seed), hashlib.sha256()
        for _ in range(60):
            digest.update(local.windows(rng.integers(0, local.num_tokens, 6), 500)[0].tobytes())
        assert found[seed] == digest.hexdigest()


@pytest.mark.every_dose
@pytest.mark.long
@FILES
def test_threads_share_a_reader(both, tmp_path, monkeypatch):
    """The cache has no room for all of them: each removes what another one fills, on a busy machine
    more often than a run would."""
    monkeypatch.setattr(cached, "_TRIES", 10_000)
    local, url = both
    shards, failed = TokenShards.open(url, cache=Cache(tmp_path / "cache", 40_000)), []

    def read(seed):
        try:
            check_same(local, shards, np.random.default_rng(seed), 20)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_training_data_is_the_same_from_a_url(both, tmp_path):
    local, url = both
    cache = {"cache": str(tmp_path / "cache")}
    sides = [
        open_training(
            DataConfig(
                {"a": SourceConfig(str(path))},
                seq_length=64,
                packing=packing,
                on_long="truncate",
                **cache,
            ),
            3,
            "auto",
        )
        for packing in ("stream", "bins")
        for path in (local.path, url)
    ]
    for here, there in (sides[:2], sides[2:]):
        assert here.fingerprint_at(9) == there.fingerprint_at(9)
        for ours, theirs in zip(
            here.iterate(0, stop_step=9), there.iterate(0, stop_step=9), strict=True
        ):
            assert (ours.digest, ours.content, ours.place) == (
                theirs.digest,
                theirs.content,
                theirs.place,
            )
            for name, array in ours.arrays.items():
                np.testing.assert_array_equal(array, theirs.arrays[name])


@FILES
def test_the_plan_of_bins_is_kept_in_the_cache_not_behind_the_url(both, tmp_path):
    (local, url), cache = both, Cache(tmp_path / "cache", 1 << 30)
    shards = TokenShards.open(url, cache=cache)
    made = open_bins(shards, 300, "bins", "raise")
    (kept,) = cache.folder.glob("??/*.plan")
    assert not (place(url) / "bins-300.plan").exists()
    kept.write_bytes(b"damaged" + kept.read_bytes()[7:])
    for _ in range(2):
        again = open_bins(shards, 300, "bins", "raise")
        np.testing.assert_array_equal(made.numbers, again.numbers)
    open_bins(local, 300, "bins", "raise")
    assert kept.read_bytes() == (local.path / "bins-300.plan").read_bytes()


def test_what_was_built_anew_at_the_url_is_never_mixed_with_what_was_cached(both, tmp_path):
    (local, url), cache = both, Cache(tmp_path / "cache", 1 << 30)
    before = TokenShards.open(url, cache=cache)
    before.read(0, 10)
    new = TokenShards.open(build(tmp_path / "new", seed=1))
    for file in new.path.iterdir():
        (place(url) / file.name).upload(file)
    check_same(new, TokenShards.open(url, cache=cache), np.random.default_rng(0), 3)
    with pytest.raises(DataError, match="changed after it was built"):
        check_same(local, before, np.random.default_rng(0))


def test_connections_that_fail_for_a_while_are_tried_again(both, tmp_path, monkeypatch):
    (local, url), calls = both, []
    monkeypatch.setattr(remote, "_PAUSE", 0)
    shards = TokenShards.open(url, cache=Cache(tmp_path / "cache", 1 << 30))
    fs = remote.load_package("fsspec", "remote", "").core.url_to_fs(url, use_listings_cache=False)[
        0
    ]
    original = fs.cat_ranges

    def flaky(*args, **settings):
        calls.append(args)
        found = original(*args, **settings)
        return [OSError("reset by peer"), *found[1:]] if len(calls) % 3 else found

    monkeypatch.setattr(fs, "cat_ranges", flaky)
    check_same(local, shards, np.random.default_rng(0), 3)
    assert len(calls) > 3
    monkeypatch.setattr(
        fs, "cat_ranges", lambda paths, *_, **__: [OSError("reset by peer") for _ in paths]
    )
    with pytest.raises(
        StorageError,
        match=r"tokens.*failed 5 times.*reset by peer.*may pass.*run the same command again",
    ):
        TokenShards.open(url, cache=Cache(tmp_path / "empty", 1 << 30)).read(0, 9)
