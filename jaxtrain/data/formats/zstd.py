"""Read .zst files to their end; unlike the library, treat a truncated file as an error."""

import io
from collections.abc import Iterator
from types import ModuleType
from typing import Any, BinaryIO

READ = 2**16  # compressed bytes that are read at a time
RATIO, FREE = 1000, 2**28  # text is not compressed as much, beyond so many bytes
FEED = 2**10  # compressed bytes that are decompressed at a time: to 32 MiB at most, since 4 bytes can stand for 128 KiB


def opened(file: BinaryIO, module: ModuleType) -> BinaryIO:
    """Return a reader of the file's content; `module` is zstandard."""
    return io.BufferedReader(_Frames(file, module))


class _Frames(io.RawIOBase):
    """A raw stream over all frames of a file; it raises EOFError if the file ends within a frame."""

    def __init__(self, file: BinaryIO, module: ModuleType):
        self._file, self._module = file, module
        self._frame: Any = None  # the frame that is not finished
        self._left = memoryview(b"")
        self._parts: Iterator[bytes] = iter(())  # what was read and not decompressed yet
        self._sizes = [0, 0]  # bytes before and after decompression

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            part = next(self._parts, None)
            if part is not None:
                self._left = memoryview(part)
            elif raw := self._file.read(READ):
                self._parts = self._decompressed(raw)
            elif self._frame:
                raise EOFError("it ends within a frame")
            else:
                return 0
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()

    def _decompressed(self, raw: bytes) -> Iterator[bytes]:
        for at in range(0, len(raw), FEED):
            fed = raw[at: at + FEED]
            self._sizes[0] += len(fed)
            while fed:
                self._frame = self._frame or self._module.ZstdDecompressor().decompressobj()
                try:
                    part = self._frame.decompress(fed)
                except self._module.ZstdError as error:
                    raise OSError(f"it is not zstd: {error}") from error
                self._sizes[1] += len(part)
                if self._sizes[1] > max(FREE, RATIO * self._sizes[0]):  # a few bytes would take hours
                    raise OSError(f"it is compressed more than {RATIO:,} to 1, to over {FREE:,} bytes")
                yield part
                fed, self._frame = (self._frame.unused_data, None) if self._frame.eof else (b"", self._frame)
