"""Log-mel frames of samples as they arrive: those of the whole recording, before they are clipped."""

import numpy as np

from jaxtrain.data.prepare_sequences.audio import HOP, WINDOW
from jaxtrain.kernels.log_mel import logs_of

EDGE = WINDOW // 2  # samples that are mirrored at either end of a file


class LiveFrames:
    """The frames of one recording, not yet clipped.

    Only its two ends are mirrored: what a frame reads of the next samples is waited for, 12.5 ms.

    Args:
        mels: bands of a frame.
        piece: frames that are computed at a time.
    """

    def __init__(self, mels: int, piece: int):
        self.mels, self.piece = mels, piece
        self.kept, self.begun, self.heard, self.given = np.zeros(0, np.float32), False, 0, 0

    def add(self, samples: np.ndarray) -> np.ndarray:
        """Return the frames [M, mels] that are complete with these samples."""
        self.kept, self.heard = np.concatenate([self.kept, samples.astype(np.float32)]), self.heard + len(samples)
        if not self.begun and len(self.kept) > EDGE:
            self.kept, self.begun = np.pad(self.kept, (EDGE, 0), mode="reflect"), True
        logs = logs_of(self.kept if self.begun else self.kept[:0], self.mels, self.piece)
        self.kept, self.given = self.kept[len(logs) * HOP:], self.given + len(logs)
        return logs

    def end(self) -> np.ndarray:
        """Return the frames that the end completes."""
        if self.heard < HOP:
            return np.zeros((0, self.mels), np.float32)
        padded = np.pad(self.kept, (0 if self.begun else EDGE, EDGE), mode="reflect")
        return logs_of(padded, self.mels, self.piece)[:self.heard // HOP - self.given]
