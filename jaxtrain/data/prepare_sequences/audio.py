"""Audio to sequences of log-mel frames, a hundred a second: the features that Whisper was trained on.

A clip is a file. What is said in it may lie beside it (`a.wav`, `a.txt`), or be the name of its folder.
"""

import functools
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jaxtrain import storage
from jaxtrain.data.corpus.sequences import Column
from jaxtrain.data.corpus.shard_writer import Origin
from jaxtrain.data.formats import inputs
from jaxtrain.data.formats.inputs import Piece
from jaxtrain.data.prepare.tasks import Task
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.errors import UserError, nearest

RATE, WINDOW, HOP, MELS = 16_000, 400, 160, 80
CLIPS = (".wav", ".flac", ".ogg", ".mp3")
TARGETS = ("none", "text", "folder")
BLOCK = 6_000  # frames transformed at a time, so that hours of audio need no more memory than their samples


def log_mel(samples: np.ndarray) -> np.ndarray:
    """[n] samples at 16 kHz -> [n // 160, 80] float32: logarithms of mel bands, at most 8 decades below the loudest."""
    frames = len(samples) // HOP
    if not frames:
        return np.zeros((0, MELS), np.float32)
    padded = np.pad(samples.astype(np.float64), WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:frames]
    bands = np.concatenate([_power(windows[at: at + BLOCK]) @ mel_filters() for at in range(0, frames, BLOCK)])
    logs = np.log10(np.maximum(bands, 1e-10))
    return ((np.maximum(logs, logs.max() - 8) + 4) / 4).astype(np.float32)


def _power(windows: np.ndarray) -> np.ndarray:
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    spectrum = np.fft.rfft(windows * hann)
    return spectrum.real**2 + spectrum.imag**2


@functools.cache
def mel_filters() -> np.ndarray:
    """[201, 80]: triangles of equal area, evenly spaced on Slaney's scale: linear to 1 kHz, logarithmic above."""
    mels = np.linspace(0, 15 + 27 * np.log(RATE / 2 / 1000) / np.log(6.4), MELS + 2)
    corners = np.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))
    low, centre, high = corners[:-2], corners[1:-1], corners[2:]
    hertz = np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    triangles = np.minimum((hertz - low) / (centre - low), (high - hertz) / (high - centre))
    return np.maximum(triangles, 0) * 2 / (high - low)


_tokenizer = functools.cache(load_tokenizer)


@dataclass(frozen=True)
class Audio:
    """A source of sequences: `features`, and what was asked for as the target."""

    target: str = "none"  # text: `target` holds the ids of the .txt beside a clip; folder: `label`, the folder's number
    tokenizer: str = "bytes"
    eval_fraction: float = 0.005
    task_bytes: int = 2**26
    labels: tuple[str, ...] = ()  # found by `ready`

    kind = "audio"
    packages = ("soundfile", "soxr", "tokenizers")

    def __post_init__(self):
        if self.target not in TARGETS:
            raise UserError("--target", f"{self.target!r} is not known", nearest(self.target, TARGETS))

    @property
    def columns(self) -> dict[str, Column]:
        """Half precision: steps of a thousandth, where features lie between -1.5 and 2."""
        target = {"none": {}, "text": {"target": Column("<i4", per="own")},
                  "folder": {"label": Column("<i4", per="sequence")}}
        return {"features": Column("<f2", (MELS,)), **target[self.target]}

    def identity(self) -> dict[str, Any]:
        """What decides about the sequences, beside the input."""
        tokenizer = _tokenizer(self.tokenizer).fingerprint if self.target == "text" else None
        return {"target": self.target, "tokenizer": tokenizer, "eval_fraction": self.eval_fraction}

    def find_tasks(self, sources: Sequence[str]) -> list[Task]:
        """Clips in order of name, each followed by its text."""
        clips = inputs.find_pieces(sources, self.task_bytes, ends=CLIPS)
        if not clips:
            raise UserError("--input", f"{', '.join(sources)} has no clips",
                            f"name files or folders of {', '.join(CLIPS)}")
        return inputs.cut([(clip, _text(clip)) if self.target == "text" else (clip,) for clip in clips],
                          self.task_bytes)

    def ready(self, tasks: Sequence[Task], output: Path, workers: int, say: Any) -> tuple["Audio", list[Task]]:
        """With the names of all folders."""
        labels = {_folder(piece) for task in tasks for piece in task} if self.target == "folder" else ()
        return replace(self, labels=tuple(sorted(labels))), list(tasks)

    def read(self, number: int, task: Task, output: Path, left_out: dict[str, int],
             ) -> Iterator[tuple[dict[str, Any], Origin]]:
        """The sequences of a task."""
        for i, piece in enumerate(task):
            if not piece.name.lower().endswith(CLIPS):
                continue
            samples = _samples(piece)
            if isinstance(samples, str) or len(samples) < HOP:
                reason = samples if isinstance(samples, str) else "shorter than a frame"
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            found: dict[str, Any] = {"features": log_mel(samples)}
            if self.target == "text":
                found["target"] = _tokenizer(self.tokenizer).encode(_content(task[i + 1]).strip())
            elif self.target == "folder":
                found["label"] = [self.labels.index(_folder(piece))]
            yield found, Origin(i, 0)

    def manifest(self) -> dict[str, Any]:
        """What a reader needs to know."""
        return {"labels": list(self.labels)} if self.target == "folder" else {}


def _text(clip: Piece) -> Piece:
    """What is said in it."""
    path, name = (f"{whole.rpartition('.')[0]}.txt" for whole in (clip.path, clip.name))
    if not storage.exists(path):
        raise UserError("--target", f"{clip.name} has no text beside it", f"write {name}, or use --target=none")
    size = storage.size(path)
    return Piece(name, path, "text", 0, size, size)


def _folder(clip: Piece) -> str:
    """What it is called."""
    if not (name := PurePosixPath(clip.name).parent.name):
        raise UserError("--target", f"{clip.name} is in no folder of its --input",
                        "give the folder that holds the folders named after labels")
    return name


def _content(piece: Piece) -> bytes:
    with inputs.readable(piece.path):  # not left out: it may be there the next time
        return storage.read(piece.path)


def _samples(piece: Piece) -> np.ndarray | str:
    """At 16 kHz, channels averaged; or why not."""
    soundfile = inputs.extra("soundfile", "audio", group="audio")
    try:
        samples, rate = soundfile.read(io.BytesIO(_content(piece)), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError:
        return "no audio that can be read"
    mono = samples.mean(1)
    return mono if rate == RATE else inputs.extra("soxr", "audio", group="audio").resample(mono, rate, RATE)
