"""A store on disk of cleaned documents, kept from the search for duplicates until they are tokenised.

With it, cleaning steps run only once.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.corpus.corpus import UNFINISHED
from jaxtrain.data.corpus.shard_writer import Origin
from jaxtrain.data.formats.inputs import Piece, Text, stamps
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import opened, parsed, read_json, reason


@contextmanager
def written(output: Path, number: int) -> Iterator[Callable[[Text, Origin], None]]:
    """Yield a function that stores a document of the task."""
    with atomic_files.written(_path(output, number)) as file:
        def keep(text: Text, origin: Origin) -> None:
            line = [origin.piece, origin.place, text.name, text.content.decode(), dict(text.record)]
            file.write(json.dumps(line, default=str).encode() + b"\n")

        yield keep


def read(output: Path, number: int) -> Iterator[tuple[Text, Origin]]:
    """Yield the stored documents of a task."""
    path = _path(output, number)
    with opened(path) as file:
        for line in file:
            try:
                piece, place, name, content, record = parsed(line, (int, int, str, str, dict))
            except ValueError as error:
                raise UserError("--output", f"{path} {reason(error)}", f"delete {output} and run again") from error
            yield Text(name, content.encode(), place, record), Origin(piece, place)


def write_note(output: Path, number: int, note: JsonObject) -> None:
    """Record, last of all, that a task's documents were processed, with its `plan` and its input's `stamps`."""
    atomic_files.write_json(_note_path(output, number), note)


def read_note(output: Path, number: int, task: tuple[Piece, ...], plan: str) -> JsonObject | None:
    """Return the note of a task, or None if there is none or the input has changed since."""
    try:
        note = read_json(_note_path(output, number), {"plan": str, "stamps": list})
        return note if [note["plan"], note["stamps"]] == [plan, stamps(task)] else None
    except (OSError, ValueError):
        return None


def _path(output: Path, number: int) -> Path:
    return output / UNFINISHED / f"{number:05}.cleaned.jsonl"


def _note_path(output: Path, number: int) -> Path:
    return output / UNFINISHED / f"{number:05}.signed.json"
