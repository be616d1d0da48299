"""Read the headers of the pages of a Parquet file, without their content.

Each page has a header of its own that says how much it holds. Readers allocate that much, whatever the file's footer
says, so the headers decide whether a file can be read. They are Thrift structs in the compact protocol.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

HEADER = 2**13  # bytes that are read for a header; those with long statistics take more
LONGEST = 2**22  # bytes of a header
PADDING = 100  # bytes by which old writers state a column too short
DEPTH = 8  # levels of nested structs
_SIZE, _STORED, _HEADERS, _VALUES = 2, 3, (5, 7, 8), 1  # fields of a page header; of its data or dictionary header
_TRUE, _FALSE, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, (4, 5, 6), 7, 8, 12


@dataclass(frozen=True)
class Page:
    """The sizes that the header of a page declares."""

    size: int  # bytes, decompressed
    stored: int  # bytes in the file
    values: int  # of data, with nulls and what only marks the bounds of lists; 0 for other pages


class Damaged(ValueError):
    """Raised for what is not a page header."""


def pages(read: Callable[[int, int], bytes], start: int, stop: int) -> Iterator[Page]:
    """Yield the pages of a column chunk, bytes `start` to `stop` of a file; `read` returns a stretch of the file."""
    while start < stop:
        header, length = _header(read, start, stop)
        inner = next((header[field] for field in _HEADERS if isinstance(header.get(field), dict)), {})
        page = Page(header.get(_SIZE, -1), header.get(_STORED, -1), inner.get(_VALUES, 0) if 7 not in header else 0)
        if not all(isinstance(said, int) and said >= 0 for said in (page.size, page.stored, page.values)):
            raise Damaged("a page has no valid size")
        start += length + page.stored
        if start > stop + PADDING:
            raise Damaged("a page is longer than its column")
        yield page


def _header(read: Callable[[int, int], bytes], start: int, stop: int) -> tuple[dict[int, Any], int]:
    most = HEADER
    while True:
        content = read(start, min(start + most, stop))
        struct = _Struct(content)
        try:
            return struct.fields(), struct.at
        except IndexError:
            if most > LONGEST or start + most >= stop:
                raise Damaged("a page header is cut off") from None
            most *= 16


class _Struct:
    """A reader of Thrift's compact protocol; it raises IndexError where the content ends too early."""

    def __init__(self, content: bytes):
        self._content, self.at = content, 0

    def fields(self, depth: int = 0) -> dict[int, Any]:
        """Return the integers and structs of the struct that begins here, by field number."""
        if depth > DEPTH:
            raise Damaged("a page header is nested too deeply")
        found: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._integer()
            found[number] = self._value(kind & 15, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return None  # the kind itself is the value
        if kind in _INTEGERS:
            return self._integer()
        if kind == _STRUCT:
            return self.fields(depth + 1)
        if kind not in (_BYTE, _DOUBLE, _BINARY):
            raise Damaged("a page header has a field of an unknown type")  # lists and maps have no place in one
        length = {_BYTE: 1, _DOUBLE: 8}.get(kind) or self._unsigned()
        if length > LONGEST:
            raise Damaged("a page header is too long")
        self.at += length
        self._content[self.at - 1]  # raises if it is cut off
        return None

    def _byte(self) -> int:
        self.at += 1
        return self._content[self.at - 1]

    def _unsigned(self) -> int:
        value, shift = 0, 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise Damaged("a page header has a number that is too long")

    def _integer(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
