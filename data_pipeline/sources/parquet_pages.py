"""Headers of the pages of a Parquet file, which say how large a page is after decompression.

pyarrow allocates and decompresses a page as a whole, whatever its header says. So headers are read
before pyarrow reads the pages.

Source: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift and
    https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

DICTIONARY = 2
# Fields of a header that are the headers of pages of data, versions 1 and 2. Their field 1 is the
# number of values.
_DATA_HEADERS = (5, 8)
# Bytes of a header: few without statistics, and at most as many as pyarrow reads.
_FIRST_READ = 1 << 8
_MOST_HEADER_BYTES = 1 << 24
_MOST_DEPTH = 8
# Types of Thrift's compact protocol.
_BOOLEANS = (1, 2)
_BYTE = 3
_INTEGERS = (4, 5, 6)
_INT32 = 5
_DOUBLE = 7
_BINARY = 8
_LISTS = (9, 10)
_STRUCT = 12


class Page(NamedTuple):
    """Header of a page.

    Args:
        kind: the type of the page.
        uncompressed: bytes of the page after decompression.
        compressed: bytes of the page in the file.
        num_values: values of the page, which are also the elements of its lists.
    """

    kind: int
    uncompressed: int
    compressed: int
    num_values: int


def pages(file: BinaryIO, start: int, length: int) -> Iterator[Page]:
    """Yield the pages of a column chunk.

    Args:
        file: the Parquet file.
        start: its first byte.
        length: its bytes.

    Raises:
        OSError: a header is damaged, or there cannot be such a column chunk.
    """
    if start < 0 or length < 0:
        raise OSError(f"a column of {length:,} bytes cannot begin at byte {start:,}")
    at = start
    while at < start + length:
        page, size = _read_header(file, at)
        yield page
        at += size + page.compressed


def _read_header(file: BinaryIO, at: int) -> tuple[Page, int]:
    """Return the page that begins at a byte of the file, and the bytes of its header."""
    count = _FIRST_READ
    while True:
        file.seek(at)
        content = file.read(count)
        reader = _ThriftReader(content)
        try:
            fields = reader.integers()
            break
        except IndexError:
            if len(content) < count or count >= _MOST_HEADER_BYTES:
                raise OSError("the header of a page is damaged or cut short") from None
            count *= 8
    num_values = max(reader.nested.get((number, 1), 0) for number in _DATA_HEADERS)
    kind, uncompressed, compressed = (fields.get(number, -1) for number in (1, 2, 3))
    page = Page(kind, uncompressed, compressed, num_values)
    if not all(0 <= value < 1 << 31 for value in page):
        raise OSError("the header of a page has no type or sizes")
    return page, reader.at


class _ThriftReader:
    """A struct of Thrift's compact protocol, of which only 32-bit integers are kept.

    Its methods raise IndexError where more bytes are needed, and OSError where there can be no such
    struct.
    """

    def __init__(self, content: bytes):
        self._content = content
        self.at = 0
        # Integers of the structs in the outermost struct, by the numbers of both fields. As in
        # Thrift, a field that comes twice has the integers of both structs.
        self.nested: dict[tuple[int, int], int] = {}

    def integers(self, depth: int = 0) -> dict[int, int]:
        """Return the 32-bit integers of a struct by the numbers of their fields."""
        if depth > _MOST_DEPTH:
            raise OSError("the header of a page is nested too deeply")
        found = {}
        number = 0
        while True:
            head = self._byte()
            if head == 0:
                return found
            number = number + (head >> 4) if head >> 4 else self._signed()
            if not 0 < number < 1 << 15:
                # Thrift keeps 16 bits of the number: 65538 is field 2 to it.
                raise OSError(f"the header of a page has a field with the number {number}")
            kind = head & 15
            if kind == _INT32:
                # As Thrift does, the last one counts.
                found[number] = self._signed()
            elif kind == _STRUCT:
                fields = self.integers(depth + 1)
                if depth == 0:
                    self.nested |= {(number, inner): value for inner, value in fields.items()}
            elif kind not in _BOOLEANS:
                self._skip(kind, depth)

    def _skip(self, kind: int, depth: int) -> None:
        if kind in (*_BOOLEANS, _BYTE):
            self._take(1)
        elif kind in _INTEGERS:
            self._varint()
        elif kind == _DOUBLE:
            self._take(8)
        elif kind == _BINARY:
            self._take(self._varint())
        elif kind in _LISTS:
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            for _ in range(count):
                self._skip(head & 15, depth + 1)
        elif kind == _STRUCT:
            self.integers(depth + 1)
        else:
            # Maps, which no header of a page has, and unknown types.
            raise OSError("the header of a page has a field of an unknown type")

    def _byte(self) -> int:
        value = self._content[self.at]
        self.at += 1
        return value

    def _take(self, count: int) -> None:
        self.at += count
        if self.at > len(self._content):
            raise IndexError

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise OSError("the header of a page has a number that is too long")

    def _signed(self) -> int:
        """Return an integer in zigzag form, whose sign is the lowest bit."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
