"""What is behind a .zst, read to its end: the library itself takes a file that is cut short for a whole one."""

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

READ = 2**16  # compressed bytes that are read at a time


def opened(file: BinaryIO, module: Any) -> BinaryIO:
    """Its content; `module` is zstandard."""
    return io.BufferedReader(_Frames(file, module))


class _Frames(io.RawIOBase):
    """All frames of a file, one after another; EOFError where it ends within one."""

    def __init__(self, file: BinaryIO, module: Any):
        self._file, self._module = file, module
        self._frame: Any = None  # that is not at its end
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
                raise OSError(f"it is no zstd: {error}") from error
            raw, self._frame = (self._frame.unused_data, None) if self._frame.eof else (b"", self._frame)
