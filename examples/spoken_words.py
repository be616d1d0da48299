"""Speech to text: spoken digits, prepared, learned and transcribed, with the word error rate of unheard clips.

    python examples/spoken_words.py
    python examples/spoken_words.py --clips=400 --steps=60
    python examples/spoken_words.py --stream --folder=SPOKEN

The clips are made here: by espeak-ng where it is installed, in several voices, speeds and pitches; else each word is a
chord of its own. docs/speech.md says how long it takes and what it reaches. With --stream the encoder attends by chunks
of 0.32 seconds, so that it can transcribe while it hears: then each clip is also transcribed like that. Chords then
have pauses behind them.
"""

import argparse
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import soundfile

import jaxtrain as jt
from jaxtrain.data.prepare_sequences.audio import RATE, Audio
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences
from jaxtrain.hub.speech.transcribe import compared, stream, text_of, transcribe

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
VOICES = "en", "en-us", "en-gb-scotland", "en-gb-x-rp"
ROOT = Path(__file__).parents[1]


def write_clip(folder: Path, number: int, seconds: float = 0) -> None:
    """Write one clip of two to four words, up to so many seconds long by a pause behind, and its transcript."""
    rng = np.random.default_rng(number)
    words = [WORDS[n] for n in rng.integers(len(WORDS), size=rng.integers(2, 5))]
    clip = folder / f"{number:04}.wav"
    if shutil.which("espeak-ng"):
        how = {"-v": VOICES[rng.integers(len(VOICES))], "-s": rng.integers(150, 220), "-p": rng.integers(25, 75)}
        subprocess.run(["espeak-ng", *(f"{x}" for pair in how.items() for x in pair), "-w", clip, " ".join(words)],
                       check=True)
    else:
        soundfile.write(clip, chords(words, rng, rng.uniform(0, seconds) if seconds else 0)[0], RATE)
    clip.with_suffix(".txt").write_text(" ".join(words))


def chords(words: list[str], rng: np.random.Generator, length: float = 0) -> tuple[np.ndarray, list[float]]:
    """Return a sound for each word, two notes at a time, with pauses and noise, and when each word ends.

    There is a pause behind the last word, too, up to a `length` of so many seconds.
    """
    sound, ends = [np.zeros(1600)], []
    for word in words:
        n, seconds = WORDS.index(word), np.arange(int(RATE * rng.uniform(0.2, 0.35))) / RATE
        notes = np.array([220, 660]) * 2 ** (np.array([n % 4, n // 4]) / 4)
        sound.append(0.3 * np.sin(2 * np.pi * notes[:, None] * seconds).sum(0))
        ends.append(sum(map(len, sound)) / RATE)
        sound.append(np.zeros(int(RATE * rng.uniform(0.05, 0.2))))
    sound.append(np.zeros(max(0, int(RATE * length) - sum(map(len, sound)))))
    return (samples := np.concatenate(sound)) + 0.01 * rng.normal(size=len(samples)), ends


def main() -> None:
    """Make the clips, prepare them, train, and transcribe those held back."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clips", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the initial values and the order of the clips")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--folder", type=Path, help="for clips and run; default: a temporary one")
    flags = parser.parse_args()
    started = time.perf_counter()
    folder = flags.folder or Path(tempfile.mkdtemp())
    with ThreadPoolExecutor() as pool:
        for name, numbers in (("clips", range(flags.clips)), ("unheard", range(10**6, 10**6 + 60))):
            (folder / name).mkdir(parents=True)
            list(pool.map(lambda number, name=name: write_clip(folder / name, number, 2.5 * flags.stream), numbers))
    corpus = prepare_sequences([f"{folder}/clips"], folder / "corpus", Audio("text", eval_fraction=0.05))
    made = time.perf_counter()
    print(f"{len(corpus.train)} clips to learn from, {len(corpus.eval)} to evaluate, in {made - started:.0f} s")
    config = jt.load_config(f"{ROOT}/configs/whisper.py:words", {
        "data.source": f"{folder}/corpus", "train.steps": flags.steps, "train.seed": flags.seed,
        "data.seed": flags.seed, "model.audio_chunk": 16 * flags.stream})
    jt.train(config, workdir=folder / "run")
    print(f"trained in {time.perf_counter() - made:.0f} s, {time.process_time():.0f} of a processor's")
    found = transcribe(folder / "run", [f"{folder}/unheard"], batch_size=60)
    for name, segments in list(found.items())[:5]:
        print(f"heard {text_of(segments)!r}, said {Path(name).with_suffix('.txt').read_text()!r}")
    print(compared(found, folder, english=False))
    if flags.stream:
        live = stream(folder / "run", [f"{folder}/unheard"])
        same = sum(text_of(live[name]) == text_of(found[name]) for name in found)
        print(f"{same} of {len(found)} texts are the same by --stream: {compared(live, folder, english=False)}")


if __name__ == "__main__":
    main()
