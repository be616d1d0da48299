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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.commands.flags import add_json, command, parser_of, tell_json
from jaxtrain.config.hub_names import model_folder
from jaxtrain.errors import UserError, say, tell_text

if TYPE_CHECKING:
    from jaxtrain.hub.speech.transcript_windows import Segment


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags, transcribe, and print or write what was said."""
    flags = _flags(argv)
    from jaxtrain.compile_cache import enable_compilation_cache
    from jaxtrain.hub.speech.transcribe import compared, stream, transcribe
    from jaxtrain.hub.speech.transcript_windows import text_of

    how = {"beams": flags.beams, "language": flags.language, "task": flags.task, "timestamps": flags.timestamps}
    enable_compilation_cache()
    if flags.stream:
        found = stream(flags.workdir, flags.files, flags.step, **how)
    else:
        found = transcribe(flags.workdir, flags.files, flags.step, **how, batch_size=flags.batch_size or 8)
    facts = [{"file": name, "text": text_of(segments), "segments": [asdict(one) for one in segments]}
             for name, segments in found.items()]
    if flags.output:
        Path(flags.output).write_text("".join(json.dumps(one) + "\n" for one in facts))
    if flags.json:
        tell_json(*facts)
    elif not flags.output and not flags.stream:
        tell_text("\n".join(line for name, segments in found.items()
                            for line in _lines(name, segments, flags.timestamps)))
    if flags.references:
        say(compared(found, flags.workdir, flags.english))


def _lines(name: str, segments: "list[Segment]", timestamps: bool) -> list[str]:
    """Return a file's name and transcript; with `timestamps`, a line of name, begin, end and text for each segment."""
    from jaxtrain.hub.speech.transcript_windows import text_of

    if not timestamps:
        return [f"{name}\t{text_of(segments)}"]
    return [f"{name}\t{one.begin:.2f}\t{one.end:.2f}\t{one.text.strip()}" for one in segments]


def _flags(argv: list[str] | None) -> Any:
    parser = parser_of("transcribe", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="the workdir of a run, a folder in Hugging Face's "
                        "format, or hf:ORG/NAME on the Hugging Face Hub")
    parser.add_argument("files", nargs="+", metavar="FILE",
                        help="audio files, or folders of them; -: standard input")
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
    add_json(parser, "print a JSON object for each file: file, text, segments")
    flags = parser.parse_args(argv)
    for key in ("beams", "batch_size"):
        if (value := getattr(flags, key)) is not None and value < 1:
            raise UserError(f"--{key}", f"{value} is below 1", "give 1 or more")
    if flags.english and not flags.references:
        raise UserError("--english", "it is read with --references only", "give that too, or leave it out")
    if flags.stream and flags.batch_size:
        raise UserError("--batch_size", "with --stream windows come one after the other", "leave it out")
    if flags.json and flags.stream:
        raise UserError("--json", "with --stream words are printed as they are heard", "leave one of them out")
    if flags.references and "-" in flags.files:
        raise UserError("--references", "standard input has no reference text", "name a file, or leave the flag out")
    flags.workdir = model_folder(flags.workdir)
    return flags
