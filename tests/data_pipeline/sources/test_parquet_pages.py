"""The headers of Parquet's pages are checked before the pages are decompressed."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import DataError
from data_pipeline.prepare.command import main
from data_pipeline.sources import parquet
from data_pipeline.sources.document import InputOptions, find_files
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
        # Numbers of fields that Thrift takes for 2 (65538) and 0, and one before the first.
        b"\x15\x00\x15\x14\x15\x14\x05\x84\x80\x08\xc8\x05\x00",
        b"\x15\x00\x15\x14\x15\x14\x05\x80\x80\x08\x02\x00",
        b"\x15\x00\x15\x14\x15\x14\x05\x01\x02\x00",
        # Structs within structs, and lists that go on for ever.
        b"\x5c" * 100,
        b"\x19\xf9" * 100,
        b"\x18" + b"\xff" * 12,
    ],
)
def test_headers_that_are_none_are_damaged(content):
    with pytest.raises(OSError, match="the header of a page"):
        list(pages(io.BytesIO(content), 0, 1))


def test_the_integers_of_a_data_page_that_comes_twice_are_those_of_both():
    # Field 5 with 100 values, then again with another field; the header ends with no bytes of data.
    header = b"\x15\x00\x15\x00\x15\x00\x2c\x15\xc8\x01\x00" + b"\x0c\x0a\x25\x02\x00" + b"\x00"
    (page,) = pages(io.BytesIO(header), 0, len(header))
    assert page.num_values == 100


@pytest.mark.parametrize(("start", "length"), [(-1, 5), (4, -5)])
def test_a_chunk_cannot_begin_before_the_file_or_be_shorter_than_nothing(start, length):
    with pytest.raises(OSError, match="cannot begin"):
        list(pages(io.BytesIO(bytes(100)), start, length))


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


def varint(value):
    """A positive integer as Thrift's compact protocol writes it."""
    value <<= 1
    content = bytearray()
    while value > 127:
        content.append(value & 127 | 128)
        value >>= 7
    return bytes([*content, value])


def in_footer(content, old, new):
    """A file with other bytes in its footer, which are there once."""
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    assert content.count(old, start) == 1
    footer = content[start:-8].replace(old, new)
    return content[:start] + footer + len(footer).to_bytes(4, "little") + content[-4:]


def records(path, content, key="text"):
    path.write_bytes(content)
    (piece,) = find_files(str(path), "parquet", InputOptions(key=key), ".parquet")
    return list(parquet.records(parquet.find_records(piece, "test")))


@pytest.mark.parametrize("offset", [0, 1 << 19])
def test_an_offset_of_a_dictionary_that_pyarrow_ignores_is_ignored(tmp_path, monkeypatch, offset):
    """Byte 0 has the file's magic number, whose bytes could be a header of a harmless page."""
    content = written({"text": TEXTS}, use_dictionary=True, write_statistics=False)
    _, _, chunk = next(chunks(content))
    data, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    assert 0 < dictionary < data
    # The offset of the data is that of the dictionary, which pyarrow reads there, too.
    content = in_footer(
        content,
        b"\x26" + varint(data) + b"\x26" + varint(dictionary),
        b"\x26" + varint(dictionary) + b"\x26" + varint(offset),
    )
    assert len(records(tmp_path / "text.parquet", content)) == len(TEXTS)
    monkeypatch.setattr(parquet, "_LARGEST_BYTES", 1000)
    with pytest.raises(OSError, match="a dictionary of"):
        records(tmp_path / "text.parquet", content)


@pytest.mark.parametrize("limit", ["_MOST_PAGE_BYTES", "_LARGEST_BYTES", "_MOST_ELEMENTS"])
@pytest.mark.parametrize("name", ["a.b", "a.b.c", ".", "a.", ""])
@pytest.mark.parametrize(
    "rows", [[TEXTS, TEXTS], [{"x.y": TEXTS, "z": 1}]], ids=["lists", "objects"]
)
def test_columns_with_dots_in_their_names_have_the_same_limits(
    tmp_path, monkeypatch, name, rows, limit
):
    content = written({"other": [1] * len(rows), name: rows})
    assert len(records(tmp_path / "text.parquet", content, name)) == len(rows)
    monkeypatch.setattr(parquet, limit, 1000)
    with pytest.raises(OSError, match=r"more than 1,000|larger than 1,000"):
        records(tmp_path / "text.parquet", content, name)


def test_columns_with_dots_count_for_the_size_of_rows(tmp_path):
    sizes = []
    for name in ("text", "te.xt"):
        (tmp_path / name).write_bytes(written({name: [TEXTS]}))
        (piece,) = find_files(str(tmp_path / name), "parquet", InputOptions(key=name), ".parquet")
        sizes.append(parquet.find_records(piece, "test").scale)
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_elements_of_lists_are_those_of_pages_whatever_the_chunk_says(
    tmp_path, monkeypatch, version
):
    content = written(
        {"text": [list(range(5000))]},
        use_dictionary=False,
        write_statistics=False,
        data_page_version=version,
    )
    # Field 5 of the chunk behind field 4, which is the type of compression.
    content = in_footer(content, b"\x16" + varint(5000), b"\x16" + varint(100))
    (row,) = records(tmp_path / "text.parquet", content)
    assert len(json.loads(row)["text"]) == 5000
    monkeypatch.setattr(parquet, "_MOST_ELEMENTS", 4999)
    with pytest.raises(OSError, match="5,000 elements"):
        records(tmp_path / "text.parquet", content)


@pytest.mark.parametrize(
    ("writer", "is_read"),
    [
        ("parquet-mr version 1.2.8 (build abc)", False),
        ("Parquet-MR version 1.2.8", False),
        ("parquet-mr", False),
        # 1.2.8 in 32 bits.
        ("parquet-mr version 4294967297.2.8", False),
        ("parquet-mr version " + "9" * 90 + ".1.1", False),
        ("parquet-mr version 1.2.9", True),
        ("parquet-mr version 1.13.1-SNAPSHOT (build abc)", True),
        ("other version 1.0.0", True),
    ],
)
def test_writers_with_wrong_sizes_of_chunks_are_refused(tmp_path, writer, is_read):
    """pyarrow reads up to 100 bytes behind the end of a chunk of such a writer."""
    content = written({"text": ["a"]}, store_schema=False)
    old = pq.ParquetFile(io.BytesIO(content)).metadata.created_by.encode()
    content = in_footer(content, bytes([len(old)]) + old, bytes([len(writer)]) + writer.encode())
    if is_read:
        assert len(records(tmp_path / "text.parquet", content)) == 1
    else:
        with pytest.raises(OSError, match="not reliable"):
            records(tmp_path / "text.parquet", content)


@pytest.mark.parametrize("field", ["writer", "column", "inner"])
def test_names_that_are_not_utf_8_are_damage(tmp_path, field):
    content = written({"text": ["a"], "column": [{"inner": 1}]}, store_schema=False)
    name = field
    if field == "writer":
        name = pq.ParquetFile(io.BytesIO(content)).metadata.created_by
    content = content.replace(name.encode(), b"\xff" * len(name))
    with pytest.raises(DataError, match="is not a Parquet file"):
        records(tmp_path / "text.parquet", content)
    with pytest.raises(DataError, match="is not a Parquet file"):
        parquet.find(str(tmp_path / "text.parquet"), InputOptions(key="text"))
