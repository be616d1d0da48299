"""Transcribe audio files window by window, or print what is said as it comes."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import storage
from jaxtrain.errors import UserError
from jaxtrain.hub.speech.transcript_windows import Segment, silence_of, text_of, window

PIPE = "-"


@dataclass
class _Reading:
    """The position up to which a file, or a window that does not depend on the one before, has been transcribed."""

    model: Any  # with or without times
    frames: np.ndarray
    silence: float
    found: list[Segment]
    begin: int  # of the frames, in the file
    length: int  # of what is spoken; frames of silence may follow
    prompt: list[int]
    at: int = 0


def compared(found: dict[str, list[Segment]], folder: str | Path, english: bool) -> str:
    """Return the word error rate of transcripts by file, against the text files beside these, as a sentence."""
    from jaxtrain.hub.speech import transcript_normalizer, word_errors

    said = []
    for name in found:
        if not (path := Path(name).with_suffix(".txt")).is_file():
            raise UserError("--references", f"{name} has no {path.name} beside it", "write it, or leave the flag out")
        said.append(path.read_text())
    normalized = transcript_normalizer.basic
    if english:
        normalized = transcript_normalizer.english(transcript_normalizer.published_spellings(folder))
    errors = word_errors.count(said, [text_of(segments) for segments in found.values()], normalized)
    return (f"word error rate {errors.rate:.2%} of {errors.words:,} words: {errors.substituted} substituted, "
            f"{errors.deleted} deleted, {errors.inserted} inserted")


def transcribe(folder: str | Path, files: Sequence[str], step: int | None = None, *, beams: int = 1,
               language: str = "", task: str = "", timestamps: bool = False,
               batch_size: int = 8) -> dict[str, list[Segment]]:
    """Return the segments of each audio file, by its path.

    Args:
        folder: the workdir of a run, or a published folder.
        files: audio files, or folders of them; "-": standard input.
        step: of a run's checkpoint; None: the newest good one.
        beams: how many transcripts are followed at once.
        language: that is spoken; "": what `model.prefix` says, or the one that a published model of several hears.
        task: "transcribe" or "translate"; "": what `model.prefix` says.
        timestamps: whether segments have times of their own; else each window is one segment.
        batch_size: how many windows are transcribed at once.
    """
    from jaxtrain.hub.speech.speech_model import open_model

    sources = _sources(folder, files)
    model = open_model(folder, step, beams=beams, language=language, task=task, timestamps=timestamps)
    return transcribed(model, ((name, np.concatenate([np.zeros(0, np.float32), *_piped()]) if source is None
                                else _samples(source)) for name, source in sources.items()), batch_size)


def transcribed(model: Any, sounds: Iterable[tuple[str, np.ndarray]], batch_size: int) -> dict[str, list[Segment]]:
    """Return the segments of recordings, each a name and its samples, of which `batch_size` at most are in memory."""
    c, found, active, longest = model.c, dict[str, list[Segment]](), list[_Reading](), 2 * model.c.audio_positions
    readings = (one for name, samples in sounds for one in _readings(model, samples, found.setdefault(name, [])))
    while active := [*active, *islice(readings, batch_size - len(active))]:
        how = active[0].model
        batch = [one for one in active if one.model is how]
        windows, valid = zip(*(window(one.frames[one.at:one.at + longest], one.silence, c)
                               for one in batch), strict=True)
        rows = [*range(len(batch)), *[0] * (batch_size - len(batch))]  # one number of rows, for one program
        tokens, _ = how.decoding.decode(np.stack(windows)[rows], np.stack(valid)[rows] if c.mask_padding else None,
                                        np.array([batch[row].prompt for row in rows], np.int32), how.new, how.beams)
        for reading, ids in zip(batch, tokens, strict=False):
            size = min(longest, reading.length - reading.at)
            segments, moved = how.read(how.said(ids), reading.begin + reading.at, size)
            reading.found += segments
            reading.at += moved
        active = [one for one in active if one.at < one.length]
    return found


def _readings(model: Any, samples: np.ndarray, found: list[Segment]) -> Iterator[_Reading]:
    """Yield what is read one after the other of a file: all of it, or, each for itself, its windows."""
    from jaxtrain.data.prepare_sequences.audio import HOP
    from jaxtrain.kernels.log_mel import log_mel_of_file

    c, longest, length = model.c, 2 * model.c.audio_positions, len(samples) // HOP
    as_published = not c.mask_padding and not c.audio_chunk
    if not length:
        return
    if length > longest:
        model = model.timed
    elif as_published:  # zeros follow a clip, and its last frames reach into them
        samples = np.pad(samples, (0, longest * HOP - len(samples)))
    frames = log_mel_of_file(samples, c.mels)
    # In the last window of a long file the published decoding has frames of 0, which are not those of silence.
    silence = 0.0 if as_published and model.first and length > longest else silence_of(frames.max())
    prompt = model.prompt_for(*window(frames[:longest], silence, c))
    if model.first:
        yield _Reading(model, frames, silence, found, 0, length, prompt)
        return
    for begin in range(0, length, longest):
        yield _Reading(model, frames[begin:begin + longest], silence, found, begin, min(longest, length - begin),
                       prompt)


def stream(folder: str | Path, files: Sequence[str], step: int | None = None, *, beams: int = 1, language: str = "",
           task: str = "", timestamps: bool = False) -> dict[str, list[Segment]]:
    """Print what is said in files, one after the other, as it becomes known; arguments and result as `transcribe`."""
    from jaxtrain.config.speech.transcript_rules import DETECTED
    from jaxtrain.data.prepare_sequences.audio import HOP
    from jaxtrain.hub.speech.live_printing import print_live
    from jaxtrain.hub.speech.piped_audio import as_it_comes
    from jaxtrain.hub.speech.speech_model import open_model
    from jaxtrain.hub.trained_model import sections_of

    sources = _sources(folder, files)
    if not (chunk := 2 * HOP * sections_of(folder)["model"].get("audio_chunk", 0)):
        raise UserError("--stream", "the encoder of this model attends to later audio too",
                        "leave it out, or train with model.audio_chunk=50: a second")
    model = open_model(folder, step, beams=beams, language=language, task=task, timestamps=timestamps)
    if DETECTED in model.prompt:
        raise UserError("--language", "with --stream the language is not detected", "give one, such as --language=en")

    def blocks(source):
        if source is None:
            return as_it_comes(_piped())
        samples = _samples(source)
        return (samples[at:at + chunk] for at in range(0, len(samples), chunk))

    return print_live(model, ((name, blocks(source)) for name, source in sources.items()), named=len(sources) > 1)


def _sources(folder: str | Path, files: Sequence[str]) -> dict[str, Any]:
    """Return the audio files among these and in the folders among these, by path; None: standard input."""
    from jaxtrain.data.formats import inputs
    from jaxtrain.data.prepare_sequences.audio import CLIPS, unusable
    from jaxtrain.hub import trained_model

    if (name := trained_model.sections_of(folder)["model"].get("name", "gpt2")) != "whisper":
        raise UserError("WORKDIR", f"its model is {name}, which does not read audio", "give one of whisper")
    named, fix = [file for file in files if file != PIPE], f"name files or folders of {', '.join(CLIPS)}"
    if gone := [file for file in named if not storage.is_url(file) and not Path(file).expanduser().exists()]:
        raise UserError("FILES", f"{gone[0]} does not exist", fix)
    pieces = inputs.find_pieces(named, 2**62, ends=CLIPS)
    if named and not pieces:
        raise UserError("FILES", f"{', '.join(files)} has no audio", fix)
    if PIPE in files and sys.stdin.isatty():
        raise UserError(PIPE, "standard input is a terminal", "write audio into it, as in: arecord ... | jaxtrain ...")
    for piece in pieces:
        if reason := unusable(piece):
            raise UserError("FILES", f"{piece.path} is {reason}", "leave it out")
    return {**{piece.path: piece for piece in pieces}, **({PIPE: None} if PIPE in files else {})}


def _samples(piece: Any) -> np.ndarray:
    from jaxtrain.data.prepare_sequences.audio import samples_of

    samples = samples_of(piece, 1e3)
    if isinstance(samples, str):
        raise UserError("FILES", f"{piece.path} is {samples}", "leave it out")
    return samples


def _piped() -> Iterator[np.ndarray]:
    """Return the samples of standard input."""
    from jaxtrain.hub.speech.piped_audio import samples_of_pipe

    return samples_of_pipe(open(sys.stdin.fileno(), "rb", buffering=0, closefd=False))
