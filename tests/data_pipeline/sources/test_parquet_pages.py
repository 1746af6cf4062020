"""What the headers of Parquet's pages say is known before the pages are decompressed."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.prepare import main
from data_pipeline.sources import parquet
from data_pipeline.sources.parquet_pages import DICTIONARY, pages

TEXTS = [f"text {number} " * 50 for number in range(2000)]
TABLES = {
    "text": {"text": TEXTS},
    "lists": {"text": [[text, text[:9]] for text in TEXTS]},
    "long statistics": {"text": [text * 20 for text in TEXTS]},
    "nulls": {"text": [None, *TEXTS]},
    "numbers": {"text": [float(number) for number in range(5000)]},
}


def chunks(content):
    """Start, length and metadata of each column chunk of a file."""
    metadata = pq.ParquetFile(io.BytesIO(content)).metadata
    for group in range(metadata.num_row_groups):
        chunk = metadata.row_group(group).column(0)
        start = chunk.data_page_offset
        if chunk.has_dictionary_page:
            start = min(start, chunk.dictionary_page_offset)
        yield start, chunk.total_compressed_size, chunk


def written(table, **options):
    file = io.BytesIO()
    pq.write_table(pa.table(table), file, **options)
    return file.getvalue()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("has_dictionary", [False, True])
def test_the_pages_of_a_chunk_are_all_of_it(name, version, compression, has_dictionary):
    content = written(
        TABLES[name],
        compression=compression,
        use_dictionary=has_dictionary,
        data_page_version=version,
        data_page_size=4096,
        write_page_checksum=True,
        row_group_size=1000,
    )
    for start, length, chunk in chunks(content):
        found = list(pages(io.BytesIO(content), start, length))
        # Both count the headers.
        headers = length - sum(page.compressed for page in found)
        whole = sum(page.uncompressed for page in found) + headers
        assert headers > 0 and whole == chunk.total_uncompressed_size
        assert (found[0].kind == DICTIONARY) == has_dictionary
        if compression == "none":
            assert all(page.compressed == page.uncompressed for page in found)


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_pages_or_damaged(content):
    try:
        for page in pages(io.BytesIO(content), 0, 100):
            assert all(0 <= value < 1 << 31 for value in page)
    except OSError:
        pass


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x15\x00\x15\x10",
        # A negative size, one that is too large, and none.
        b"\x15\x00\x15\x01\x15\x02\x00",
        b"\x15\x00\x15" + b"\xff" * 4 + b"\x7f\x15\x02\x00",
        b"\x15\x00\x00",
        # Structs within structs, and lists that go on for ever.
        b"\x5c" * 100,
        b"\x19\xf9" * 100,
        b"\x18" + b"\xff" * 12,
    ],
)
def test_headers_that_are_none_are_damaged(content):
    with pytest.raises(OSError, match="the header of a page"):
        list(pages(io.BytesIO(content), 0, 1))


def prepare(tmp_path, file):
    words = [str(tmp_path / "out"), "--parquet", str(file), "--tokenizer", "bytes"]
    return main([*words, "--key", "text", "--workers", "1", "--overwrite"])


def test_a_page_that_grows_a_thousand_times_is_refused(tmp_path, capsys, monkeypatch):
    """Zeros of zstd: some kB that become 100 MB."""
    file = tmp_path / "bomb.parquet"
    pq.write_table(
        pa.table({"text": ["a" * (100 << 20)]}),
        file,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
    )
    assert file.stat().st_size < 1 << 20
    read = []
    monkeypatch.setattr(parquet, "values", lambda *given: read.append(given) or iter(()))
    assert prepare(tmp_path, file) == DataError.exit_code
    err = capsys.readouterr().err
    assert "a page of 104,857" in err and "less than a part in 256" in err and not read


def test_an_empty_file_has_no_pages(tmp_path):
    file = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), file)
    assert main([str(tmp_path / "full"), "--parquet", str(file), "--tokenizer", "bytes"]) == 65
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "other.parquet")
    assert prepare(tmp_path, tmp_path / "*.parquet") == 0


def test_a_page_above_the_limit_is_refused(tmp_path, capsys, monkeypatch):
    file = tmp_path / "large.parquet"
    pq.write_table(pa.table({"text": TEXTS}), file, use_dictionary=False)
    assert prepare(tmp_path, file) == 0
    monkeypatch.setattr(parquet, "_MOST_PAGE_BYTES", 1000)
    assert prepare(tmp_path, file) == DataError.exit_code
    assert "more than 1,000: write it with smaller pages" in capsys.readouterr().err


def test_a_header_that_understates_is_an_error_of_reading(tmp_path, capsys):
    """Then pyarrow has too little room, and refuses to decompress the page."""
    content = bytearray(written({"text": TEXTS}, use_dictionary=False, write_statistics=False))
    ((start, length, _),) = chunks(bytes(content))
    (page, *_) = pages(io.BytesIO(bytes(content)), start, length)
    size = page.uncompressed << 1
    old = bytearray()
    while size > 127:
        old.append(size & 127 | 128)
        size >>= 7
    old.append(size)
    at = content.index(bytes(old), start)
    content[at] = 0x80 | (content[at] & 1) if len(old) > 1 else 2
    file = tmp_path / "lying.parquet"
    file.write_bytes(content)
    assert prepare(tmp_path, file) == DataError.exit_code
    assert "Traceback" not in capsys.readouterr().err
