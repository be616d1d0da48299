"""Headers of Parquet's pages: what other programs write is understood, and damage costs a moment and an error."""

import io
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain.data.formats.parquet_pages import Damaged, Page, pages

TABLE = pa.table({"text": ["x" * (i % 50) for i in range(5000)], "list": [[1] * (i % 3) for i in range(5000)]})


def chunks(**settings):
    """The content of a file, and its columns with the bytes at which each begins and ends."""
    file = io.BytesIO()
    pq.write_table(TABLE, file, **settings)
    columns = pq.ParquetFile(file).metadata.row_group(0)
    for column in (columns.column(i) for i in range(columns.num_columns)):
        start = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
        yield file.getvalue(), column, start, start + column.total_compressed_size


@pytest.mark.parametrize("settings", [
    {}, {"compression": "zstd", "use_dictionary": False}, {"data_page_version": "2.0"}, {"write_page_checksum": True},
    {"compression": "none", "data_page_size": 300}, {"use_dictionary": False, "column_encoding": {
        "text": "DELTA_BYTE_ARRAY", "list.list.element": "DELTA_BINARY_PACKED"}}])
def test_pages_add_up_to_what_the_footer_says(settings):
    for content, column, start, stop in chunks(**settings):
        found = list(pages(lambda a, b, content=content: content[a:b], start, stop))
        assert sum(page.values for page in found) == column.num_values
        headers = stop - start - sum(page.stored for page in found)  # the footer counts them, too
        assert headers > 0 and sum(page.size for page in found) + headers == column.total_uncompressed_size


def test_a_page_of_two_gigabytes_is_told_without_reading_it():
    header = bytes([0x15, 0, 0x15]) + b"\xfe\xff\xff\xff\x0f" + bytes([0x15, 20, 0x2C, 0x15, 6, 0, 0])
    assert list(pages(lambda a, b: (header + b"0123456789")[a:b], 0, len(header) + 10)) == [Page(2**31 - 1, 10, 3)]


@pytest.mark.parametrize("content", [
    b"\x15", b"\x19" * 40, b"\x1c" * 40, b"\x15" + b"\xff" * 40, b"\x18\xff\xff\xff\xff\x7f", b"\x00",
    bytes([0x15, 0, 0x15, 1, 0x15, 1, 0]), bytes([0x15, 0, 0x15, 2, 0x16, 255, 255, 3, 0])])
def test_what_is_no_header_is_said(content):
    with pytest.raises(Damaged):
        list(pages(lambda a, b: content[a:b], 0, len(content)))


def test_random_damage_costs_one_error_or_other_numbers():
    rng = random.Random(0)
    for content, _, start, stop in chunks(compression="none", data_page_size=300):
        for _ in range(200):
            damaged = bytearray(content)
            for _ in range(rng.randint(1, 20)):
                damaged[rng.randrange(start, min(start + 400, stop))] = rng.randrange(256)
            try:
                found = list(pages(lambda a, b, damaged=damaged: bytes(damaged[a:b]), start, stop))
            except Damaged:
                continue
            assert sum(page.stored for page in found) <= stop - start + 100
