"""Measure how late `jaxtrain transcribe --stream` prints words, and how fast it is.

    python tools/benchmarks/bench_live_speech.py WORKDIR

WORKDIR is of `python examples/spoken_words.py --stream --folder=FOLDER`: FOLDER/run. Recordings of chords, in each
window one clip of two to four words, are heard as a microphone would give them, 20 ms at a time in real time, and then
at once. A word's delay is from the end of its sound to its print, wherever its window has the right words.
"""

import argparse
import importlib.util
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.prepare_sequences.audio import RATE
from jaxtrain.hub.speech import transcript_normalizer, word_errors
from jaxtrain.hub.speech.live_transcript import LiveTranscript
from jaxtrain.hub.speech.piped_audio import as_it_comes
from jaxtrain.hub.speech.speech_model import open_model
from jaxtrain.hub.speech.transcribe import text_of, transcribed

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workdir")
    parser.add_argument("--windows", type=int, default=60)
    flags = parser.parse_args()
    model = open_model(flags.workdir)
    said, ends, samples = recording(flags.windows, 2 * model.c.audio_positions / 100)
    for _ in range(2):  # the first time compiles
        begun = time.perf_counter()
        whole = transcribed(model, [("", samples)], 8)[""]
        spent = time.perf_counter() - begun
    print(f"as a whole: {rate(said, [one.text for one in whole])}; {len(samples) / RATE / spent:.0f} seconds a second")
    live = LiveTranscript(model)
    for _ in range(2):
        begun = time.perf_counter()
        final = finals(live, samples)
        spent = time.perf_counter() - begun
    same = sum(a == b.text for a, b in zip(final, whole, strict=True))
    print(f"streamed: {rate(said, final)}; {len(samples) / RATE / spent:.0f} seconds a second; {same} texts the same")
    quiet = [np.concatenate([np.zeros(1600, np.float32), one])[:len(one)] for one in np.split(samples, flags.windows)]
    for name, parts in (("as they are", np.split(samples, flags.windows)), ("with 0.1 s of zeros in front", quiet)):
        clipping(model, said, name, parts)
    delays(said, ends, samples, live, 2 * model.c.audio_positions / 100)


def finals(live: LiveTranscript, samples: np.ndarray) -> list[str]:
    chunk = 320 * live.model.c.audio_chunk
    parts = (samples[at:at + chunk] for at in range(0, len(samples), chunk))
    return [one.text for one in live.of(parts) if one.segments is not None]


def clipping(model: Any, said: list[str], name: str, recordings: list[np.ndarray]) -> None:
    """Print how much it matters that the loudest of a recording is not known while it is heard."""
    named = ((f"{n}", one) for n, one in enumerate(recordings))
    whole = [text_of(one) for one in transcribed(model, named, 8).values()]
    live, carried = LiveTranscript(model), Carried(model)
    streamed, once = ([finals(one, part)[0] for part in recordings] for one in (live, carried))
    same = [sum(a == b for a, b in zip(whole, texts, strict=True)) for texts in (streamed, once)]
    print(f"recordings of a window, {name}: as a whole {rate(said, whole)}; streamed {rate(said, streamed)}, {same[0]} "
          f"the same, {live.whole_windows} encoded again; never encoded again {rate(said, once)}, {same[1]} the same")


class Carried(LiveTranscript):
    """Windows are never encoded again, whatever their frames were clipped by."""

    def _over(self):
        frames, _ = self._frames()
        self.now.features[:] = frames
        return super()._over()


def recording(windows: int, length: float) -> tuple[list[str], list[list[float]], np.ndarray]:
    """Return what is said in each window, when each word ends, and the samples."""
    spec = importlib.util.spec_from_file_location("spoken_words", ROOT / "examples/spoken_words.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    said, ends, parts = [], [], []
    for n in itertools.count(2 * 10**6):
        if len(said) == windows:
            return said, ends, np.concatenate(parts).astype(np.float32)
        rng = np.random.default_rng(n)
        words = [example.WORDS[n] for n in rng.integers(10, size=rng.integers(2, 5))]
        clip, at = example.chords(words, rng, length)
        if len(clip) == round(length * RATE):
            ends.append([len(said) * length + end for end in at])
            said.append(" ".join(words))
            parts.append(clip)


def rate(said: list[str], heard: list[str]) -> str:
    errors = word_errors.count(said, heard, transcript_normalizer.basic)
    return f"word error rate {errors.rate:.2%} of {errors.words}"


def delays(said: list[str], ends: list[list[float]], samples: np.ndarray, live: LiveTranscript, length: float) -> None:
    """Hear the samples in real time, and print how late words come."""
    def microphone():
        for at in range(0, len(samples), RATE // 50):
            block = samples[at:at + RATE // 50]
            time.sleep(max(0, begun + (at + len(block)) / RATE - time.perf_counter()))
            yield block

    begun, late, corrected, wrong, window = time.perf_counter(), [], 0, 0, 0
    printed, shown = [], ""
    for one in live.of(as_it_comes(microphone())):
        now = time.perf_counter() - begun
        if not one.text.startswith(shown):
            corrected, printed = corrected + 1, []
        printed += [now] * (len(one.text.split()) - len(printed))
        shown = one.text
        if one.segments is not None:
            if one.text == said[window]:
                late += [(at - end, at > (window + 1) * length) for at, end in zip(printed, ends[window], strict=True)]
            wrong += one.text != said[window]
            window, printed, shown = window + 1, [], ""
    seconds = sorted(second for second, _ in late)
    print(f"in real time: {len(late)} words, {sum(after for _, after in late)} of them when their window was over; "
          f"delay {seconds[len(late) // 2]:.2f} s (median), {seconds[len(late) * 19 // 20]:.2f} s (95 %), "
          f"{seconds[-1]:.2f} s (most); {corrected} lines corrected, {wrong} wrong in the end")


if __name__ == "__main__":
    main()
