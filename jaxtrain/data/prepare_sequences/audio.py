"""Convert audio to sequences of log-mel frames, a hundred per second: the features that Whisper was trained on.

A clip is a file, a member of a tar, or a row of Parquet. Its transcript may be next to it (`a.wav`, `a.txt`, in a tar
too) or in another column, or its folder's name may be its label.
"""

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jaxtrain import storage
from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.corpus.sequences import TOKENIZER, Column, Columns
from jaxtrain.data.corpus.shard_writer import Origin
from jaxtrain.data.formats import inputs
from jaxtrain.data.formats.inputs import Piece
from jaxtrain.data.formats.tar_members import Member, content_of, members
from jaxtrain.data.prepare.tasks import Task
from jaxtrain.data.prepare_sequences.text_beside import TEXT_BYTES, TEXT_TOO_LARGE, text_beside, with_texts
from jaxtrain.data.tokenizers import tokenizer_folder
from jaxtrain.data.tokenizers.special_tokens import Specials
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.errors import UserError, nearest

RATE, WINDOW, HOP, MELS = 16_000, 400, 160, 80
CLIPS = (".wav", ".flac", ".ogg", ".mp3")
TAR, PARQUET = ".tar", ".parquet"
TARGETS = ("none", "text", "folder")
RATES = 1_000, 768_000  # Hz: others are those of damaged files
CLIP_BYTES = 2**32  # the largest file of a clip
_TOO_LARGE, _UNREADABLE = f"larger than {CLIP_BYTES:,} bytes", "not readable as audio"
_SILENT, _CUT_OFF = "a clip without a transcript", "cut off: its header announces more"
DECODED = 2**14  # frames decoded at a time, of each of up to 1024 channels
ENDLESS = 2**31 - 2**16  # bytes of samples: recorders that do not know the length write one from here on
CHUNKS = 10_000  # of a WAV file, before its samples
SLACK = 64  # bytes by which headers of some programs are wrong: a few milliseconds
BLOCK = 6_000  # frames transformed at a time, so that hours of audio need no more memory than their samples


def log_mel(samples: np.ndarray, mels: int = MELS) -> np.ndarray:
    """Convert [n] samples at 16 kHz to [n // 160, mels] float32 log-mel frames, clipped 8 decades below the loudest."""
    frames = len(samples) // HOP
    if not frames:
        return np.zeros((0, mels), np.float32)
    padded = np.pad(samples.astype(np.float64), WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:frames]
    bands = np.concatenate([_power(windows[at: at + BLOCK]) @ mel_filters(mels) for at in range(0, frames, BLOCK)])
    logs = np.log10(np.maximum(bands, 1e-10))
    return ((np.maximum(logs, logs.max() - 8) + 4) / 4).astype(np.float32)


def _power(windows: np.ndarray) -> np.ndarray:
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    spectrum = np.fft.rfft(windows * hann)
    return spectrum.real**2 + spectrum.imag**2


@functools.cache
def mel_filters(mels: int = MELS) -> np.ndarray:
    """Return the [201, mels] filters: triangles of equal area, evenly spaced on Slaney's mel scale.

    The scale is linear up to 1 kHz, and logarithmic above.
    """
    at = np.linspace(0, 15 + 27 * np.log(RATE / 2 / 1000) / np.log(6.4), mels + 2)
    corners = np.where(at < 15, at * 200 / 3, 1000 * 6.4 ** ((at - 15) / 27))
    low, centre, high = corners[:-2], corners[1:-1], corners[2:]
    hertz = np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    triangles = np.minimum((hertz - low) / (centre - low), (high - hertz) / (high - centre))
    return np.maximum(triangles, 0) * 2 / (high - low)


_tokenizer = functools.cache(load_tokenizer)


@dataclass(frozen=True)
class Audio:
    """A source of sequences from audio clips: `features`, and the requested target."""

    target: str = "none"  # text: `target` holds the ids of a clip's .txt file; folder: `label`, the folder's number
    tokenizer: str = "bytes"
    eval_fraction: float = 0.005
    task_bytes: int = 2**26
    clip_hours: float = 4  # a longer clip is dropped, since a small file can hold much silence
    mels: int = MELS  # bands of a frame
    audio_column: str = "audio"  # of Parquet: bytes, or a struct with `bytes`
    text_column: str = "text"  # of Parquet
    special_tokens: bool = False  # tokens such as <|de|> that are written in transcripts are those of the tokenizer
    labels: tuple[str, ...] = ()  # set by `ready`

    kind = "audio"
    packages = ("soundfile", "soxr", "tokenizers")

    def __post_init__(self):
        if self.target not in TARGETS:
            raise UserError("--label", f"{self.target!r} is not known", nearest(self.target, TARGETS))
        if not 1 < self.mels <= 256:
            raise UserError("--mels", f"{self.mels} is not a number of bands", "use 80, or 128 for large-v3")
        if not 0 < self.clip_hours < 1e6:
            raise UserError("--clip_hours", f"{self.clip_hours} is not a length", "use 4 or so")

    @property
    def columns(self) -> dict[str, Column]:
        """The columns; float16 has steps of a thousandth in the range of features, -1.5 to 2."""
        target = {"none": {}, "text": {"target": Column("<i4", per="own")},
                  "folder": {"label": Column("<i4", per="sequence")}}
        return {"features": Column("<f2", (self.mels,)), **target[self.target]}

    def identity(self) -> JsonObject:
        """Return what determines the sequences, besides the input."""
        tokenizer = _tokenizer(self.tokenizer).fingerprint if self.target == "text" else None
        names = ("clip_hours", "mels", "audio_column", "text_column", "special_tokens")
        more = {name: value for name in names if (value := getattr(self, name)) != getattr(Audio, name)}
        return {"target": self.target, "tokenizer": tokenizer, "eval_fraction": self.eval_fraction, **more}

    def find_tasks(self, sources: Sequence[str]) -> list[Task]:
        """Return tasks of clips in order of name, each followed by its transcript if that is a file of its own."""
        clips = inputs.find_pieces(sources, self.task_bytes, ends=(*CLIPS, TAR, PARQUET))
        if not clips:
            raise UserError("--input", f"{', '.join(sources)} has no audio clips",
                            f"name files or folders of {', '.join((*CLIPS, TAR, PARQUET))}")
        if self.target == "folder" and (others := [clip for clip in clips if not _is_clip(clip.name)]):
            raise UserError("--label", f"clips in {others[0].name} are in no folders", "unpack it, or use text")
        groups = with_texts(clips, _is_clip, "transcript") if self.target == "text" else [(clip,) for clip in clips]
        return inputs.cut(groups, self.task_bytes)

    def ready(self, tasks: Sequence[Task], output: Path, workers: int,
              say: Callable[..., None]) -> tuple["Audio", list[Task]]:
        """Return the source with the names of all folders as labels, and the tasks."""
        if self.target == "text":
            tokenizer_folder.save(_tokenizer(self.tokenizer), output / TOKENIZER)
        labels = {_folder(piece) for task in tasks for piece in task} if self.target == "folder" else ()
        return replace(self, labels=tuple(sorted(labels))), list(tasks)

    def read(self, number: int, task: Task, output: Path, left_out: dict[str, int],
             ) -> Iterator[tuple[Columns, Origin]]:
        """Yield the sequences of a task, and where each comes from."""
        for i, place, clip, text in self._clips(task, left_out):
            samples = _CUT_OFF if _ends_early(clip) else samples_in(clip, self.clip_hours)
            if isinstance(samples, str) or len(samples) < HOP:
                reason = samples if isinstance(samples, str) else "shorter than a frame"
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            found: dict[str, Any] = {"features": log_mel(samples, self.mels)}
            if self.target == "text":
                found["target"] = self._tokens(text.strip())
            elif self.target == "folder":
                found["label"] = [self.labels.index(_folder(task[i]))]
            yield found, Origin(i, place)

    def _tokens(self, text: bytes) -> np.ndarray:
        tokenizer = _tokenizer(self.tokenizer)
        if not self.special_tokens:
            return tokenizer.encode(text)
        return Specials(tokenizer).encode([text.decode(errors="replace")])[0][0]

    def _clips(self, task: Task, left_out: dict[str, int]) -> Iterator[tuple[int, int, bytes, bytes]]:
        """Yield the piece of each clip, its place there, its file's bytes, and its transcript."""
        def without(reason: str) -> None:
            left_out[reason] = left_out.get(reason, 0) + 1

        for i, piece in enumerate(task):
            if piece.name.lower().endswith(PARQUET):
                yield from ((i, row, clip, text) for row, clip, text in self._rows(piece, without))
            elif piece.name.lower().endswith(TAR):
                wants = self.target == "text"
                yield from ((i, place, clip, text) for place, clip, text in _members(piece, wants, without))
            elif not _is_clip(piece.name):
                continue
            elif piece.size > CLIP_BYTES:
                without(_TOO_LARGE)
            else:
                beside = text_beside(task, i) if self.target == "text" else None
                if self.target == "text" and not beside:
                    without(_SILENT)
                elif beside and beside.size > TEXT_BYTES:
                    without(TEXT_TOO_LARGE)
                else:
                    yield i, 0, _content(piece), _content(beside) if beside else b""

    def _rows(self, piece: Piece, without: Callable[[str], None]) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield the number, the clip and the transcript of each row of Parquet that has both."""
        columns = [self.audio_column, *[self.text_column] * (self.target == "text")]
        for flag, column in zip(("--audio_field", "--text_field"), columns, strict=False):
            if column not in (names := inputs.parquet_file(piece.path).schema_arrow.names):
                raise UserError(flag, f"{piece.name} has no column {column!r}", f"it has {', '.join(names)}")
        table = inputs.row_group(piece, columns)
        for row in range(len(table)):
            clip, *text = (table[column][row].as_py() for column in columns)
            named = isinstance(clip, dict) and clip.get("path") is not None
            clip = clip.get("bytes") if isinstance(clip, dict) else clip
            if not isinstance(clip, bytes | None) or (clip is None and named):
                raise UserError("--audio_field", f"row {row} of {piece.name} has no bytes of audio",
                                "write the files' bytes into it, or name another column")
            if not all(isinstance(one, str | None) for one in text):
                raise UserError("--text_field", f"row {row} of {piece.name} has no text", "name another column")
            if clip is None or None in text:
                without("a row without audio" if clip is None else _SILENT)
                continue
            yield row, clip, text[0].encode() if text else b""

    def manifest(self) -> JsonObject:
        """Return the labels for the manifest, if there are any."""
        return {"labels": list(self.labels)} if self.target == "folder" else {}


def _is_clip(name: str) -> bool:
    return name.lower().endswith(CLIPS)


def _members(piece: Piece, wants_text: bool, without: Callable[[str], None]) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield where each clip of a tar begins, its bytes and its transcript, when both have come.

    Members with the same name except for its end belong together. What has no counterpart is dropped.
    """
    waiting: dict[str, dict[str, Member]] = {}
    with inputs.readable(piece.path), storage.open(piece.path) as tar:
        for member in members(tar, piece.path):
            stem, _, end = member.name.rpartition(".")
            kind = "clip" if _is_clip(member.name) else "text" if end == "txt" and wants_text else ""
            if not member.is_file or not kind:
                continue
            if member.size > (CLIP_BYTES if kind == "clip" else TEXT_BYTES):
                without(_TOO_LARGE if kind == "clip" else TEXT_TOO_LARGE)
                continue
            both = waiting.setdefault(stem, {})
            both[kind] = member
            if "clip" in both and (not wants_text or "text" in both):
                clip, text = waiting.pop(stem)["clip"], both.get("text")
                yield clip.place, content_of(tar, clip), content_of(tar, text) if text else b""
    for both in waiting.values():
        without(_SILENT if "clip" in both else "a transcript without a clip")


def _folder(clip: Piece) -> str:
    """Return the name of the folder that a clip is in."""
    if not (name := PurePosixPath(clip.name).parent.name):
        raise UserError("--label", f"{clip.name} is not in a subfolder of its --input",
                        "name the folder that contains the label folders")
    return name


def _content(piece: Piece) -> bytes:
    with inputs.readable(piece.path):  # an error, since the file may be readable the next time
        return storage.read(piece.path)


def samples_of(piece: Piece, hours: float) -> np.ndarray | str:
    """Return the samples of a clip at 16 kHz, averaged over channels, or the reason why it is dropped."""
    return _TOO_LARGE if piece.size > CLIP_BYTES else samples_in(_content(piece), hours)


def unusable(piece: Piece) -> str:
    """Return the reason why a clip is dropped, as far as the beginning of its file says; "": none."""
    soundfile = inputs.extra("soundfile", "audio", group="audio")
    try:
        with inputs.readable(piece.path), storage.open(piece.path) as file, soundfile.SoundFile(file) as clip:
            return _wrong_rate(clip.samplerate)
    except soundfile.LibsndfileError:
        return _UNREADABLE


def _wrong_rate(rate: int) -> str:
    return "" if RATES[0] <= rate <= RATES[1] else f"a sampling rate of {rate:,} Hz"


def samples_in(content: bytes, hours: float) -> np.ndarray | str:
    """Return the samples of a file with these bytes, as `samples_of` does.

    It is decoded and resampled a block at a time, so that memory follows the length of the result, which is bounded.
    """
    soundfile = inputs.extra("soundfile", "audio", group="audio")
    parts, left, ended = [], int(hours * 3600 * RATE), False
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as clip:
            if wrong := _wrong_rate(clip.samplerate):
                return wrong
            soxr = None if clip.samplerate == RATE else inputs.extra("soxr", "audio", group="audio")
            resampled = soxr and soxr.ResampleStream(clip.samplerate, RATE, 1, dtype="float32")
            while not ended and left >= 0:
                mono = clip.read(DECODED, dtype="float32", always_2d=True).mean(1)
                if not np.isfinite(mono).all():
                    return "damaged: samples that are not finite numbers"
                ended = not len(mono)
                parts.append(resampled.resample_chunk(mono, last=ended) if resampled else mono)
                left -= len(parts[-1])
    except soundfile.LibsndfileError:
        return _UNREADABLE
    return np.concatenate(parts) if left >= 0 else f"longer than {hours:g} hours (--clip_hours)"


def _ends_early(content: bytes) -> bool:
    """Return whether a file in the WAV format has fewer samples than its header announces, as after a broken copy.

    libsndfile returns those that are there, without an error. A header that was written before the length was known,
    as to a pipe, announces none, or the most that a header can.
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        return False
    at = 12
    for _ in range(CHUNKS):
        if at + 8 > len(content):
            break
        name, size = content[at: at + 4], int.from_bytes(content[at + 4: at + 8], "little")
        if name == b"data":
            return at + 8 + size > len(content) + SLACK and size < ENDLESS
        at += 8 + size + size % 2
    return False
