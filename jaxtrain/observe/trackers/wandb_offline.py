"""The rows that Weights & Biases has of an offline run, read from its files, the only record of them after a crash.

A file is a log as LevelDB writes it: blocks of 32 KiB, records with a header of checksum, length and kind, of which
long ones are cut into parts; behind a header of 7 bytes. Each record is a message of wandb's own protocol.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, struct.Struct("<IHB")
_FULL, _LAST = 1, 4  # kinds of parts that end a record


def last_row(folder: str | Path, run_id: str) -> int:
    """Return the number of the last row of this run in all of its files, -1 without any."""
    return max((int(row["_step"]) for row in rows(folder, run_id)), default=-1)


def rows(folder: str | Path, run_id: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a run, their values as JSON text, in the order in which they were logged."""
    for path in sorted(Path(folder, "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        for record in records(path):
            if record.HasField("history"):
                yield {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


def records(path: str | Path) -> Iterator[Any]:
    """Yield the records of a file, up to one that is cut off."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyrefly: ignore[missing-module-attribute]

    data, at, whole = Path(path).read_bytes(), 7, b""
    while at + _HEADER.size <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEADER.size:
            at += left
            continue
        _, size, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        part, at = data[at:at + size], at + size
        if len(part) < size or not kind:
            return
        whole += part
        if kind in (_FULL, _LAST):
            yield Record.FromString(whole)
            whole = b""
