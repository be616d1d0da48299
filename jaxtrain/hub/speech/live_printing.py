"""Print transcripts of recordings while they grow: one line a window, to which words are added once they are stable."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxtrain.hub.speech.live_transcript import LiveTranscript
from jaxtrain.hub.speech.speech_model import SpeechModel
from jaxtrain.hub.speech.transcript_windows import Segment


@dataclass
class _Line:
    """The line of a window."""

    before: str  # in front of every line
    shown: str = ""
    begun: bool = False

    def show(self, text: str) -> None:
        """Add what is new in the text, or, where words that were shown are others now, begin a corrected line."""
        corrected = "" if text.startswith(self.shown) else f"\n{self.before}corrected: "
        if text and not self.begun:
            print(self.before, end="")
        if corrected:
            print(corrected, end="")
            self.shown = ""
        print(text[len(self.shown):], end="", flush=True)
        self.shown, self.begun = text, self.begun or bool(text)

    def end(self) -> None:
        """Begin the next line, if there is anything in this one."""
        if self.begun:
            print(flush=True)
        self.shown, self.begun = "", False


def print_live(model: SpeechModel, sounds: Iterable[tuple[str, Iterable[np.ndarray]]],
               named: bool = False) -> dict[str, list[Segment]]:
    """Print what is said in recordings, each a name and its samples in blocks, and return their segments by name.

    `named`: the name is in front of every line.
    """
    live, found = LiveTranscript(model), {}
    for name, blocks in sounds:
        line, segments = _Line(f"{name}\t" if named else ""), found.setdefault(name, [])
        for said in live.of(blocks):
            line.show(said.text)
            if said.segments is not None:
                line.end()
                segments += said.segments
    return found
