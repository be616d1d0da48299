"""Transcribe audio files, or live speech.

    jaxtrain transcribe WORKDIR talk.wav
    jaxtrain transcribe FOLDER talks --timestamps --language=de --beams=5 --output=said.jsonl
    jaxtrain transcribe WORKDIR clips --references
    arecord -q -f S16_LE -r 16000 -t raw | jaxtrain transcribe WORKDIR - --stream

The model is that of a run, or a published Whisper. Files are .wav, .flac, .ogg or .mp3, or folders of them. Long files
are read in windows (30 seconds in published models). With --timestamps, and always in published models, the next window
begins where the last complete segment ended. If a published model supports several languages, --language names the
spoken one; by default it is detected for each file. With --references, the transcript of a.wav is compared with the
text in a.txt beside it, and the word error rate is printed.

The file - is standard input: WAV, or 16-bit samples at 16 kHz, of one channel. With --stream, words are printed once
two successive transcripts agree on them. Each line is one window; if a word turns out to be wrong when its window
ends, the whole line is printed again as "corrected: ...". --stream needs a model trained with model.audio_chunk.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import storage
from jaxtrain.config.hub_names import model_folder
from jaxtrain.errors import UserError, say, tell_text
from jaxtrain.commands.flags import command, parser_of
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


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags, transcribe, and print or write what was said."""
    from jaxtrain.compile_cache import enable_compilation_cache

    flags = _flags(argv)
    how = {"beams": flags.beams, "language": flags.language, "task": flags.task, "timestamps": flags.timestamps}
    enable_compilation_cache()
    if flags.stream:
        found = stream(flags.workdir, flags.files, flags.step, **how)
    else:
        found = transcribe(flags.workdir, flags.files, flags.step, **how, batch_size=flags.batch_size or 8)
    if flags.output:
        Path(flags.output).write_text("".join(json.dumps({
            "file": name, "text": text_of(segments), "segments": [asdict(one) for one in segments]}) + "\n"
            for name, segments in found.items()))
    elif not flags.stream:
        tell_text("\n".join(line for name, segments in found.items()
                            for line in _lines(name, segments, flags.timestamps)))
    if flags.references:
        say(compared(found, flags.workdir, flags.english))


def _lines(name: str, segments: list[Segment], timestamps: bool) -> list[str]:
    """Return a file's name and transcript; with `timestamps`, a line of name, begin, end and text for each segment."""
    if not timestamps:
        return [f"{name}\t{text_of(segments)}"]
    return [f"{name}\t{one.begin:.2f}\t{one.end:.2f}\t{one.text.strip()}" for one in segments]


def _flags(argv: list[str] | None) -> Any:
    parser = parser_of("transcribe", __doc__)
    parser.add_argument("workdir", help="workdir of a run, folder of a published model, or hf:ORG/NAME "
                        "on the Hugging Face Hub")
    parser.add_argument("files", nargs="+", help="audio files, or folders of them; -: standard input")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest verified one")
    parser.add_argument("--beams", type=int, default=1,
                        help="beam size of the beam search; 1: greedy decoding; default: 1")
    parser.add_argument("--language", default="", help="spoken language, such as de; default: that of model.prefix; "
                        "published models with several languages detect it")
    parser.add_argument("--task", default="", help="transcribe, or translate into English")
    parser.add_argument("--timestamps", action="store_true", help="print a line for each segment: file, start and end "
                        "in seconds, and text")
    parser.add_argument("--stream", action="store_true", help="print the transcript as it grows")
    parser.add_argument("--batch_size", type=int, help="windows per batch; default: 8")
    parser.add_argument("--output", default="", metavar="FILE", help="write JSON lines here; default: print texts")
    parser.add_argument("--references", action="store_true", help="compare with the .txt files beside the audio")
    parser.add_argument("--english", action="store_true",
                        help="with --references: normalize both texts by the rules for English")
    flags = parser.parse_args(argv)
    for key in ("beams", "batch_size"):
        if (value := getattr(flags, key)) is not None and value < 1:
            raise UserError(f"--{key}", f"{value} is below 1", "give 1 or more")
    if flags.english and not flags.references:
        raise UserError("--english", "it is read with --references only", "give that too, or leave it out")
    if flags.stream and flags.batch_size:
        raise UserError("--batch_size", "with --stream windows come one after the other", "leave it out")
    if flags.references and PIPE in flags.files:
        raise UserError("--references", "standard input has no reference text", "name a file, or leave the flag out")
    flags.workdir = model_folder(flags.workdir)
    return flags


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


if __name__ == "__main__":
    raise SystemExit(main())
