"""Follow a log of JSON lines that grows: what was added since the last look, and whether lines were taken back."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtrain.files.bounded_files import LINE, lines_with_ends, opened, parsed


class LogTail:
    """The place up to which a log has been read."""

    def __init__(self, path: str | Path, form: Any = dict, last: int | None = None):
        """Begin before the first line of a file, which need not exist yet; lines of another form are left out.

        `last`: begin with the lines that end within so many last bytes; None: with all of them.
        """
        self._path, self._form, self._bytes = Path(path), form, last
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

    def added(self) -> Iterator[Any]:
        """Yield what whole lines that nobody has read hold, without damaged ones; none, if the file cannot be read."""
        try:
            for line, end in lines_with_ends(self._path, self._size):
                self._size, self._last = end, line
                try:
                    value = parsed(line, self._form)
                except ValueError:
                    continue
                yield value
        except OSError:
            return
