"""Follow a log of JSON lines that grows: what was added since the last look, and whether lines were taken back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtrain.files.bounded_files import lines_with_ends, parsed


class LogTail:
    """The place up to which a log has been read."""

    def __init__(self, path: str | Path, form: Any = dict):
        """Begin before the first line of a file, which need not exist yet; lines of another form are left out."""
        self._path, self._form = Path(path), form
        self._size, self._last = 0, b""

    def shrunk(self) -> bool:
        """Return whether lines were taken back, as a run that resumes does; `added` then begins again."""
        try:
            if not self._last or next(lines_with_ends(self._path, self._size - len(self._last)), (b"", 0))[
                    0] == self._last:
                return False
        except OSError:
            return False
        self._size, self._last = 0, b""
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
