"""Audio from a pipe as it comes, such as a microphone's: WAV, or, without a header, 16-bit samples at 16 kHz.

Nothing seeks, and nothing waits for a block to fill, so a recorder can write at its own pace.
"""

import contextlib
import queue
import signal
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import numpy as np

from jaxtrain.data.formats import inputs
from jaxtrain.data.prepare_sequences.audio import ENDLESS, RATE, RATES
from jaxtrain.errors import UserError

BYTES = 2**16  # the most that is read at a time
PCM, EXTENSIBLE = 1, 0xFFFE  # formats of samples
DECODE_FIRST = "decode it first, such as by ffmpeg -i FILE -f wav -"
END = object()
OTHERS = {b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"\x1aE\xdf\xa3": "Matroska or WebM", b"RIFX": "RIFX",
          b"RF64": "RF64", b"FORM": "AIFF"}


def samples_of_pipe(pipe: BinaryIO) -> Iterator[np.ndarray]:
    """Yield the samples at 16 kHz, averaged over channels, as they come.

    `pipe` has no buffer: its lock would be held while a thread waits for bytes, at the end of the program too.
    """
    head = _exactly(pipe, 4)
    if kind := next((kind for magic, kind in OTHERS.items() if head.startswith(magic)), ""):
        raise UserError("-", f"it is {kind}, and standard input is read as WAV or samples only", DECODE_FIRST)
    if head != b"RIFF":
        yield from _mono(_bytes(pipe, head), 1)
        return
    channels, rate, size = _header(pipe)
    blocks = _mono(_bytes(pipe, b"", size), channels)
    yield from blocks if rate == RATE else _resampled(blocks, rate)


def _header(pipe: BinaryIO) -> tuple[int, int, float]:
    """Return the channels, the rate and the bytes of samples of WAV, which begin where reading goes on."""
    found = None
    if _exactly(pipe, 8)[4:] == b"WAVE":
        while len(head := _exactly(pipe, 8)) == 8:
            name, size = head[:4], struct.unpack("<I", head[4:])[0]
            if name == b"data" and found:
                return *found, float("inf") if size == 0 or size >= ENDLESS else size
            content = _exactly(pipe, min(size + size % 2, 2**24))
            if name == b"fmt " and len(content) >= 16:
                found = _format(content)
    raise UserError("-", "its header is not that of a WAV file", DECODE_FIRST)


def _format(content: bytes) -> tuple[int, int]:
    """Return the channels and the rate that WAV says it has."""
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", content[:16])
    if kind == EXTENSIBLE and len(content) >= 26:
        kind = struct.unpack("<H", content[24:26])[0]
    if (kind, bits) != (PCM, 16) or not channels:
        raise UserError("-", f"its samples have {bits} bits, in format {kind} of WAV",
                        "write 16-bit integers, such as by ffmpeg -i FILE -c:a pcm_s16le -f wav -")
    if not RATES[0] <= rate <= RATES[1]:
        raise UserError("-", f"a sampling rate of {rate:,} Hz", DECODE_FIRST)
    return channels, rate


def _exactly(pipe: BinaryIO, count: int) -> bytes:
    """Return so many bytes, or fewer at the end."""
    found = b""
    while len(found) < count and (new := pipe.read(count - len(found))):
        found += new
    return found


def _bytes(pipe: BinaryIO, first: bytes, size: float = float("inf")) -> Iterator[bytes]:
    left = size - len(first)
    if first:
        yield first
    while left > 0 and (new := pipe.read(int(min(BYTES, left)))):
        left -= len(new)
        yield new


def _mono(parts: Iterable[bytes], channels: int) -> Iterator[np.ndarray]:
    rest, width = b"", 2 * channels
    for part in parts:
        rest += part
        whole = len(rest) // width * width
        if whole:
            samples = np.frombuffer(rest[:whole], "<i2").reshape(-1, channels).astype(np.float32) / 2**15
            yield samples.mean(1)
        rest = rest[whole:]


def _resampled(blocks: Iterable[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    soxr = inputs.extra("soxr", "audio", "-", group="audio")
    resampling = soxr.ResampleStream(rate, RATE, 1, dtype="float32")
    for block in blocks:
        yield resampling.resample_chunk(block)
    yield resampling.resample_chunk(np.zeros(0, np.float32), last=True)


def as_it_comes(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield blocks, and as one those that came while the one before was worked on; Ctrl-C is their end.

    A thread reads them, so that no recorder has to wait, or drops samples, while a chunk is transcribed.
    """
    arrived: queue.SimpleQueue = queue.SimpleQueue()  # into which a signal's handler may put something

    def read():
        try:
            for block in blocks:
                arrived.put(block)
            arrived.put(END)
        except Exception as error:  # raised where they are read
            arrived.put(error)

    with _interrupted_by(lambda: arrived.put(END)):
        threading.Thread(target=read, daemon=True).start()
        while True:
            some = [arrived.get()]
            while isinstance(some[-1], np.ndarray) and not arrived.empty():
                some.append(arrived.get())
            last = None if isinstance(some[-1], np.ndarray) else some.pop()
            if some:
                yield np.concatenate(some)
            if isinstance(last, Exception):
                raise last
            if last is END:
                return


@contextlib.contextmanager
def _interrupted_by(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C, instead of an exception; the second is one again.

    A process that ignores it, as shells begin those in the background, goes on ignoring it.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return

    def first(*_):
        signal.signal(signal.SIGINT, before)
        stop()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
