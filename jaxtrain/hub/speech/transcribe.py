"""Transcribe speech in audio files.

    jaxtrain transcribe WORKDIR talk.wav
    jaxtrain transcribe FOLDER talks --timestamps --language=de --beams=5 --to=said.jsonl
    jaxtrain transcribe WORKDIR clips --references

The model is that of a run, or a published Whisper. Files are .wav, .flac, .ogg or .mp3, or folders of them. Long ones
are read in windows, of 30 seconds in published models: with --timestamps the next window begins where the last whole
segment ended. With --references the words in a.txt beside a.wav are compared, and the word error rate is printed.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import storage
from jaxtrain.config.modality_families import SILENCE
from jaxtrain.errors import UserError, nearest, say
from jaxtrain.flags import command, parser_of

START, NO_TIMES, FIRST_TIME = "<|startoftranscript|>", "<|notimestamps|>", "<|0.00|>"


@dataclass(frozen=True)
class Segment:
    """The text spoken between two times, in seconds."""

    begin: float
    end: float
    text: str


@dataclass
class _Reading:
    """The position up to which a file has been transcribed."""

    frames: np.ndarray
    at: int = 0
    found: list[Segment] = field(default_factory=list)


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags, transcribe, and print or write what was said."""
    parser = parser_of("transcribe", __doc__)
    parser.add_argument("workdir", help="workdir of the run, or a published folder")
    parser.add_argument("files", nargs="+", help="audio files, or folders of them")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest good one")
    parser.add_argument("--beams", type=int, default=1, help="transcripts that are followed at once; 1: greedily")
    parser.add_argument("--language", default="", help="spoken language, such as en; default: what model.prefix says")
    parser.add_argument("--task", default="", help="transcribe, or translate into English")
    parser.add_argument("--timestamps", action="store_true", help="say when each segment is said")
    parser.add_argument("--batch_size", type=int, default=8, help="windows that are transcribed at once")
    parser.add_argument("--to", default="", help="a file for JSON lines; by default texts are printed")
    parser.add_argument("--references", action="store_true", help="compare with the .txt files beside the audio")
    parser.add_argument("--english", action="store_true", help="with --references: compare by the rules for English")
    flags = parser.parse_args(argv)
    for key in ("beams", "batch_size"):
        if getattr(flags, key) < 1:
            raise UserError(f"--{key}", f"{getattr(flags, key)} is below 1", "give 1 or more")
    if flags.english and not flags.references:
        raise UserError("--english", "it is read with --references only", "give that too, or leave it out")
    found = transcribe(flags.workdir, flags.files, flags.step, beams=flags.beams, language=flags.language,
                       task=flags.task, timestamps=flags.timestamps, batch_size=flags.batch_size)
    lines = [json.dumps({"file": name, "text": text_of(segments), "segments": [asdict(one) for one in segments]})
             if flags.to else f"{name}\t{text_of(segments)}" for name, segments in found.items()]
    if flags.to:
        Path(flags.to).write_text("".join(f"{line}\n" for line in lines))
    else:
        print("\n".join(lines))
    if flags.references:
        say(compared(found, flags.workdir, flags.english))


def text_of(segments: Sequence[Segment]) -> str:
    """Return the text of segments."""
    return " ".join(text for segment in segments if (text := segment.text.strip()))


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
    return (f"word error rate {errors.rate:.2%} of {errors.words:,} words: {errors.substituted} replaced, "
            f"{errors.deleted} left out, {errors.inserted} added")


def transcribe(folder: str | Path, files: Sequence[str], step: int | None = None, *, beams: int = 1,
               language: str = "", task: str = "", timestamps: bool = False,
               batch_size: int = 8) -> dict[str, list[Segment]]:
    """Return the segments of each audio file, by its path.

    Args:
        folder: the workdir of a run, or a published folder.
        files: audio files, or folders of them.
        step: of a run's checkpoint; None: the newest good one.
        beams: how many transcripts are followed at once.
        language: that is spoken; "": what `model.prefix` says.
        task: "transcribe" or "translate"; "": what `model.prefix` says.
        timestamps: whether segments have times of their own; else each window is one segment.
        batch_size: how many windows are transcribed at once.
    """
    from jaxtrain.config.modality_families import WhisperConfig
    from jaxtrain.data.formats import inputs
    from jaxtrain.data.prepare_sequences.audio import CLIPS, log_mel, samples_of
    from jaxtrain.hub import trained_model
    from jaxtrain.hub.speech.speech_decoding import SpeechDecoding, Timestamps
    from jaxtrain.hub.trained_tokenizer import tokenizer_of

    if (name := trained_model.sections_of(folder)["model"]["name"]) != "whisper":
        raise UserError("WORKDIR", f"its model is {name}, which does not read audio", "give one of whisper")
    if gone := [file for file in files if not storage.is_url(file) and not Path(file).expanduser().exists()]:
        raise UserError("FILES", f"{gone[0]} does not exist", f"name files or folders of {', '.join(CLIPS)}")
    if not (pieces := inputs.find_pieces(files, 2**62, ends=CLIPS)):
        raise UserError("FILES", f"{', '.join(files)} has no audio", f"name files or folders of {', '.join(CLIPS)}")
    words = tokenizer_of(folder)
    run, state = trained_model.load_model(folder, step=step)
    c = run.config.model
    assert isinstance(c, WhisperConfig)
    prompt = prompt_of(words, c, language, task, timestamps)
    first = _times(words, c) if timestamps else 0
    silent = [id for id in (words.specials.get(NO_TIMES), words.specials.get(START)) if id is not None]
    programs = SpeechDecoding(run.module(state), c.end, known_tokens(words, c, first), silent,
                              Timestamps(first, c.end) if timestamps else None)
    readings = {}
    for piece in pieces:
        samples = samples_of(piece, 1e3)
        if isinstance(samples, str):
            raise UserError("FILES", f"{piece.path} is {samples}", "leave it out")
        readings[piece.path] = _Reading(log_mel(samples, c.mels))
    while waiting := [one for one in readings.values() if one.at < len(one.frames)][:batch_size]:
        windows, valid = zip(*(window(one.frames, one.at, c) for one in waiting), strict=True)
        rows = [*range(len(waiting)), *[0] * (batch_size - len(waiting))]  # one number of rows, for one program
        tokens, _ = programs.decode(np.stack(windows)[rows], np.stack(valid)[rows] if c.mask_padding else None,
                                    np.array([prompt] * batch_size, np.int32), c.max_seq_len - len(prompt), beams)
        for reading, ids in zip(waiting, tokens, strict=False):
            _read_on(reading, ids[ids != c.end].tolist(), words, c, first)
    return {name: reading.found for name, reading in readings.items()}


def window(frames: np.ndarray, at: int, c: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the frames from `at` on that the encoder takes at once, with silence behind, and which of them there are.
    """
    size = 2 * c.audio_positions
    there = frames[at:at + size]
    silence = max(frames.max() - 2, SILENCE)  # as that of the file itself: 8 decades below its loudest
    padded = np.full((size, c.mels), silence, np.float32)
    padded[:len(there)] = there
    return padded, (np.arange(size) < len(there)).astype(np.float32)


def known_tokens(words: Any, c: Any, first: int) -> int:
    """Return how many tokens may be chosen: the tokenizer's, the end, and from `first` on, if not 0, times."""
    return max(words.vocab_size, c.end + 1, first and first + c.audio_positions + 1)


def prompt_of(words: Any, c: Any, language: str, task: str, timestamps: bool) -> list[int]:
    """Return the tokens before a transcript: those of the model, with this language, task and timestamps in place."""
    known = words.specials
    if not language and not task and not timestamps:
        return list(c.prefix)
    names = {id: token for token, id in known.items()}
    given = [names.get(id, "") for id in c.prefix]
    before = next((name for name in given if len(name) in (6, 7) and name.startswith("<|")), "")
    if not language and not before and "<|en|>" in known:
        raise UserError("--language", "the model knows several, and model.prefix names none of them",
                        "give one, such as --language=en")
    tokens = [START, f"<|{language}|>" if language else before, f"<|{task or 'transcribe'}|>"]
    tokens = [token for token in (*tokens, "" if timestamps else NO_TIMES) if token]
    for token in tokens:
        if token not in known:
            flag = "--language" if token == f"<|{language}|>" else "--task" if token == f"<|{task}|>" else "WORKDIR"
            raise UserError(flag, f"the tokenizer has no token {token}", nearest(token, known))
    return [known[token] for token in tokens]


def _times(words: Any, c: Any) -> int:
    """Return the token of 0 seconds."""
    if FIRST_TIME in words.specials:
        return words.specials[FIRST_TIME]
    if NO_TIMES in words.specials:  # published tokenizers may leave them out of what they list
        return words.specials[NO_TIMES] + 1
    raise UserError("--timestamps", "the model's tokenizer has no tokens of times", "leave it out")


def _read_on(reading: _Reading, ids: list[int], words: Any, c: Any, first: int) -> None:
    """Add what was said in a window to what was found in its file, and move on."""
    begin, size = reading.at / 100, min(2 * c.audio_positions, len(reading.frames) - reading.at)
    if not first:
        reading.found.append(Segment(begin, begin + size / 100, words.decode(ids)))
        reading.at += size
        return
    whole, rest = cut_at_times(ids, first)
    reading.found += [Segment(begin + since, begin + until, words.decode(part)) for since, until, part in whole if part]
    if rest is None or not whole:  # all was said within the window, or there is no place to cut it
        if said := [id for id in rest or () if id < first]:
            reading.found.append(Segment(begin, begin + size / 100, words.decode(said)))
        reading.at += size
    else:
        reading.at += max(1, min(size, round(whole[-1][1] * 100)))


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


if __name__ == "__main__":
    raise SystemExit(main())
