"""Read .zst files to their end; unlike the library, treat a truncated file as an error."""

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

READ = 2**16  # compressed bytes that are read at a time


def opened(file: BinaryIO, module: Any) -> BinaryIO:
    """Return a reader of the file's content; `module` is zstandard."""
    return io.BufferedReader(_Frames(file, module))


class _Frames(io.RawIOBase):
    """A raw stream over all frames of a file; it raises EOFError if the file ends within a frame."""

    def __init__(self, file: BinaryIO, module: Any):
        self._file, self._module = file, module
        self._frame: Any = None  # the frame that is not finished
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            if not (raw := self._file.read(READ)):
                if self._frame:
                    raise EOFError("it ends within a frame")
                return 0
            self._left = memoryview(b"".join(self._decompressed(raw)))
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()

    def _decompressed(self, raw: bytes) -> Iterator[bytes]:
        while raw:
            self._frame = self._frame or self._module.ZstdDecompressor().decompressobj()
            try:
                yield self._frame.decompress(raw)
            except self._module.ZstdError as error:
                raise OSError(f"it is not zstd: {error}") from error
            raw, self._frame = (self._frame.unused_data, None) if self._frame.eof else (b"", self._frame)
