"""Windows of audio that the encoder takes at once, and the segments that the tokens of one stand for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.config.modality_families import SILENCE

FRAMES = 100  # a second


@dataclass(frozen=True)
class Segment:
    """The text spoken between two times, in seconds."""

    begin: float
    end: float
    text: str


def text_of(segments: Sequence[Segment]) -> str:
    """Return the text of segments."""
    return " ".join(text for segment in segments if (text := segment.text.strip()))


def silence_of(loudest: float) -> float:
    """Return the value of silence where this is the largest of a frame: that of the file, 8 decades below."""
    return max(loudest - 2, SILENCE)


def window(there: np.ndarray, silence: float, c: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the frames that the encoder takes at once, with silence behind those there are, and which these are."""
    size = 2 * c.audio_positions
    padded = np.full((size, c.mels), silence, np.float32)
    padded[:len(there)] = there
    return padded, (np.arange(size) < len(there)).astype(np.float32)


def read_window(ids: Sequence[int], at: int, size: int, words: Any, first: int) -> tuple[list[Segment], int]:
    """Return the segments of a window of `size` frames, the first one `at`, and by how many frames to move on.

    `first` is the token of 0 seconds; 0: there are no times, and the window is one segment.
    """
    begin = at / FRAMES
    if not first:
        return [Segment(begin, begin + size / FRAMES, words.decode(ids))], size
    whole, rest = cut_at_times(ids, first)
    found = [Segment(begin + since, begin + until, words.decode(part)) for since, until, part in whole if part]
    if rest is not None and whole:
        return found, max(1, min(size, round(whole[-1][1] * FRAMES)))
    if said := [id for id in rest or () if id < first]:  # there is no place to cut it
        found.append(Segment(begin, begin + size / FRAMES, words.decode(said)))
    return found, size


def cut_at_times(ids: Sequence[int], first: int) -> tuple[list[tuple[float, float, list[int]]], list[int] | None]:
    """Return the whole segments (begin, end, tokens) of a window's tokens, and what follows the last.

    None follows where the last segment has an end: then the next window begins where this one ends.
    """
    whole, begin, part = [], None, list[int]()
    for id in ids:
        if id < first:
            part.append(id)
        elif part or begin is None:
            if part:
                whole.append(((begin or first) - first, id - first, part))
                begin, part = None, []
            else:
                begin = id
        else:
            begin = id
    timed = [(since * 0.02, until * 0.02, part) for since, until, part in whole]
    return timed, ([begin, *part] if begin is not None else part) or None
