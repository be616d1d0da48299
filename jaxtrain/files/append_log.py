"""A log that is appended to for as long as a run lasts, whatever happens to the file at its path meanwhile."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

from jaxtrain.files.bounded_files import opened


class AppendLog:
    """An open file to append to without a buffer, which notices when it is no longer the one at its path.

    Lines written to a file that was deleted or replaced are lost, and no write fails because of it.
    """

    def __init__(self, path: Path):
        """Open the file, which need not exist yet."""
        self.path, self.file = path, _opened(path)

    def is_at_its_path(self) -> bool:
        """Return whether the open file is the one at the path."""
        try:
            there, here = os.stat(self.path), os.fstat(self.file.fileno())
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def follow(self) -> bool:
        """Open the path again if the file was deleted or replaced; return whether it was.

        Raises:
            OSError: nothing can be appended to at the path, such as a folder in its place.
        """
        if self.is_at_its_path():
            return False
        fresh = _opened(self.path)
        self.file.close()
        self.file = fresh
        return True

    def append(self, lines: bytes) -> None:
        """Write whole lines, on a line of their own even where the one before was cut off; all of them or nothing.

        Raises:
            OSError: they cannot be written, as on a full disk.
        """
        end = self.file.seek(0, os.SEEK_END)
        if end and os.pread(self.file.fileno(), 1, end - 1) != b"\n":
            lines = b"\n" + lines
        if self.file.write(lines) < len(lines):
            self.file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _opened(path: Path) -> BinaryIO:
    return opened(path, "ab", os.O_RDWR | os.O_APPEND | os.O_CREAT)
