"""Follow a log of JSON lines that grows: what was added since the last look, and whether lines were taken back."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.base.annotations import Json
from jaxtrain.files.bounded_files import LINE, PART, Form, lines_with_ends, misfit, opened, parsed


class LogTail:
    """The place up to which a log has been read."""

    def __init__(self, path: str | Path, form: Form = dict, last: int | None = None):
        """Begin before the first line of a file, which need not exist yet; lines of another form are left out.

        `last`: begin with the lines that end within this many bytes of the end; None: with all of them.
        """
        self._path, self._form, self._bytes = Path(path), form, last
        simple = isinstance(form, dict) and all(
            type(part) is type and not name.endswith("?") for name, part in form.items())
        self._types = [*form.items()] if simple else None
        self._begin()

    def _begin(self) -> None:
        self._size, self._last = 0, b""
        if self._bytes is not None:
            with contextlib.suppress(OSError), opened(self._path) as file:
                start = os.fstat(file.fileno()).st_size - self._bytes - 1
                if start >= 0:  # what is left of the line there is not a line
                    file.seek(start)
                    self._size = start + len(file.readline(LINE))

    def shrunk(self) -> bool:
        """Return whether lines were taken back, as a run that resumes does; `added` then begins again."""
        try:
            if not self._last or next(lines_with_ends(self._path, self._size - len(self._last)), (b"", 0))[
                    0] == self._last:
                return False
        except OSError:
            return False
        self._begin()
        return True

    def added(self) -> Iterator[Json]:
        """Yield what whole lines that nobody has read hold, without damaged ones; none, if the file cannot be read."""
        try:
            for part in _parts(lines_with_ends(self._path, self._size)):
                for (line, self._size), value in zip(part, _values([line for line, _ in part]), strict=True):
                    self._last = line
                    if value is not None and self._fits(value):
                        yield value
        except OSError:
            return

    def _fits(self, value: Json) -> bool:
        """Return whether a value is of the form expected, at once where it has the very types of a simple one."""
        if self._types is not None and type(value) is dict and all(
                [type(value.get(name)) is wanted for name, wanted in self._types]):
            return True
        return not misfit(value, self._form)


def _parts(lines: Iterator[tuple[bytes, int]]) -> Iterator[list[tuple[bytes, int]]]:
    """Yield so many lines at a time as are read well together."""
    part, size = [], 0
    for line, end in lines:
        part.append((line, end))
        size += len(line)
        if size > PART:
            yield part
            part, size = [], 0
    yield part


def _values(lines: list[bytes]) -> list[Json]:
    """Return what lines hold, None for a damaged one; those without nested values are parsed as one list, for speed."""
    if all(line.startswith(b"{") and line.endswith(b"}\n") and line.count(b"{") == 1 and b"[" not in line
           for line in lines):
        with contextlib.suppress(ValueError):  # no text reaches beyond its line, so each of these is one object
            return json.loads(b"[" + b",".join(lines) + b"]")
    return list(map(_value, lines))


def _value(line: bytes) -> Json:
    try:
        return parsed(line)
    except ValueError:
        return None
