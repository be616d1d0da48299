"""Transcribe speech while it is spoken: words come once they are stable, and the window as a whole when it is over.

After each chunk of audio the window is decoded again, behind the tokens that are stable already. Tokens become stable
when two decodings in a row agree on them, up to the end of a word (LocalAgreement: Liu et al., arXiv 2005.11185;
Macháček et al., arXiv 2307.14743). A window that is over is decoded afresh: its segments are those of jaxtrain
transcribe without --stream, unless something louder, by which a file's frames are clipped, follows later.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from jaxtrain.hub.speech.live_encoder import State
from jaxtrain.hub.speech.live_frames import LiveFrames
from jaxtrain.hub.speech.speech_model import SpeechModel
from jaxtrain.hub.speech.transcript_windows import Segment, cut_at_times, silence_of, text_of, window
from jaxtrain.kernels.log_mel import clipped


@dataclass(frozen=True)
class Said:
    """The text of a window: what is stable of it so far, or, with its segments, all of it once it is over."""

    text: str
    segments: list[Segment] | None = None


@dataclass
class _Window:
    """The window that is being heard."""

    at: int  # its first frame
    logs: np.ndarray  # its frames, not yet clipped, and those that have come behind it
    features: np.ndarray  # its frames as they were encoded
    chunks: int = 0  # that are encoded
    state: State | None = None  # of the encoder after these
    latest: list[int] = field(default_factory=list)  # tokens of the latest decoding
    stable: list[int] = field(default_factory=list)


class LiveTranscript:
    """The transcription of recordings, one after the other, by a model whose encoder attends by chunks."""

    def __init__(self, model: SpeechModel):
        self.model, self.encoder, self.size = model, model.encoder, 2 * model.c.audio_positions
        self.whole_windows = 0  # number of windows that were encoded once more, since something louder came later

    def of(self, blocks: Iterable[np.ndarray]) -> Iterator[Said]:
        """Yield what is said in a recording, whose samples come in blocks of any length."""
        frames = LiveFrames(self.model.c.mels, self.encoder.width)
        self.loudest, self.now = -np.inf, self._window(0, np.zeros((0, self.model.c.mels), np.float32))
        for block in blocks:
            yield from self._hear(frames.add(block))
            if self._encode_whole_chunks() and self._agree(self._decoded_so_far()):
                yield Said(text_of(self.model.read(self.now.stable, 0, self.size)[0]))
        yield from self._hear(frames.end(), ended=True)

    def _window(self, at: int, logs: np.ndarray) -> _Window:
        return _Window(at, logs, np.zeros((self.size, self.model.c.mels), np.float32))

    def _hear(self, logs: np.ndarray, ended: bool = False) -> Iterator[Said]:
        """Add frames, and yield the windows that are over."""
        self.now.logs = np.concatenate([self.now.logs, logs])
        self.loudest = max(self.loudest, logs.max(initial=-np.inf))
        while len(self.now.logs) >= self.size or (ended and len(self.now.logs)):
            yield self._over()

    def _frames(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the frames of the window as a file that ends here would have them, and which of them are heard."""
        there = clipped(self.now.logs[:self.size], self.loudest)
        frames, valid = window(there, silence_of(clipped(self.loudest, self.loudest)), self.model.c)
        return frames, valid if self.model.c.mask_padding else np.ones_like(valid)

    def _encode(self, frames: np.ndarray, valid: np.ndarray, chunks: int) -> None:
        """Encode the next chunks, up to this many."""
        now, width = self.now, self.encoder.width
        part = slice(now.chunks * width + 1 if now.state else 0, chunks * width + 1)
        now.features[part] = frames[part]
        state = now.state or self.encoder.begin(frames[0])
        now.state, now.chunks = self.encoder.encode(state, frames, valid, now.chunks, chunks), chunks

    def _encode_whole_chunks(self) -> bool:
        """Encode the chunks that have come as a whole, and the frame behind; return whether there were any."""
        if (chunks := (len(self.now.logs) - 1) // self.encoder.width) <= self.now.chunks:
            return False
        self._encode(*self._frames(), chunks)
        return True

    def _decoded_so_far(self) -> list[int]:
        """Return the tokens of what is encoded, of which the stable ones are given."""
        state, model = self.now.state, self.model
        assert state is not None
        if model.c.mask_padding:
            ahead = np.arange(model.c.audio_positions) >= self.now.chunks * model.c.audio_chunk
            heard = (~ahead).astype(np.float32)[None]
        else:  # the decoder reads a whole window, which is silent from here on
            heard = None
            state = self.encoder.encode(state, *self._frames(), self.now.chunks, self.encoder.chunks)
        return self._decoded(state, heard, self.now.stable)

    def _decoded(self, state: State, heard: np.ndarray | None, given: Sequence[int]) -> list[int]:
        model = self.model
        tokens, _ = model.decoding.continue_from(self.encoder.memory(state), heard, model.prompts(1), model.new,
                                                 model.beams, given)
        return model.said(tokens[0])

    def _agree(self, ids: list[int]) -> bool:
        """Make the words stable in which this decoding agrees with the one before; return whether there are more."""
        now, latest = self.now, self.now.latest
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, latest, strict=False)))
        ends = (n for n in range(shared, len(now.stable), -1) if self._ends(ids, n) and self._ends(latest, n))
        now.latest, before = ids, len(now.stable)
        now.stable = ids[:next(ends, before)]
        return len(now.stable) > before

    def _ends(self, ids: list[int], n: int) -> bool:
        """Return whether the first `n` tokens end with a word, or with a segment where there are times."""
        if self.model.first:
            whole, rest = cut_at_times(ids[:n], self.model.first)
            return bool(whole) and rest is None
        before = self.model.words.decode(ids[:n])
        after = self.model.words.decode(ids)[len(before):]
        # Scripts without spaces have letters without case, of which each is a word here.
        caseless = any(unicodedata.category(letter) == "Lo" for letter in before[-1:] + after[:1])
        return not before.endswith("\ufffd") and (not after or after[0].isspace() or caseless)

    def _over(self) -> Said:
        """Return what was said in the window as a whole, and begin the next one."""
        now, model = self.now, self.model
        size, (frames, valid) = min(self.size, len(now.logs)), self._frames()
        encoded = now.chunks * self.encoder.width + 1 if now.state else 0
        if np.array_equal(now.features[:encoded], frames[:encoded]):
            self._encode(frames, valid, max(now.chunks, -(-int(valid.sum()) // self.encoder.width)))
            assert now.state is not None
            ids = self._decoded(now.state, valid[None, ::2] if model.c.mask_padding else None, ())
        else:
            self.whole_windows += 1
            tokens, _ = model.decoding.decode(frames[None], valid[None] if model.c.mask_padding else None,
                                              model.prompts(1), model.new, model.beams)
            ids = model.said(tokens[0])
        segments, moved = model.read(ids, now.at, size)
        self.now = self._window(now.at + moved, now.logs[moved:])
        return Said(text_of(segments), segments)
