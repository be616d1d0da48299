"""Prepare audio clips, tables of events or images as sequences.

    jaxtrain prepare_sequences audio --input=FOLDER --output=FOLDER
    jaxtrain prepare_sequences images --input=FOLDER --output=FOLDER
    jaxtrain prepare_sequences events --input=FOLDER --output=FOLDER --user=COLUMN --time=COLUMN --category COLUMN

It works like `jaxtrain prepare`: the input determines tasks, each task has a ledger, and the manifest is written last.
"""

import argparse
import sys

from jaxtrain.commands.flags import Parser, add_dry_run, add_json, command, parser_of, tell_json
from jaxtrain.data.prepare import job
from jaxtrain.data.prepare_sequences.audio import TARGETS, Audio
from jaxtrain.data.prepare_sequences.event_streams import Events
from jaxtrain.data.prepare_sequences.image_patches import Images
from jaxtrain.data.prepare_sequences.prepare_sequences import Source, counted, prepare_sequences, summary
from jaxtrain.errors import UserError, tell
from jaxtrain.files.work_progress import Line
from jaxtrain.pages.plain_text import in_bytes


@command("stopped; run the same command to continue")
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 0: the corpus is complete; 2: a user error, reported in one line."""
    flags = parse(argv)
    if flags.dry_run:
        tasks = source_of(flags).find_tasks(flags.input)
        pieces = [piece for task in tasks for piece in task]
        size, count = sum(piece.size for piece in pieces), len({piece.path for piece in pieces})
        if flags.json:
            tell_json({"path": flags.output, "shards": len(tasks), "bytes": size, "files": count})
        else:
            tell(f"{len(tasks):,} shards would be made in {flags.output}, of {in_bytes(size)} in {count:,} files")
        return
    with Line(sys.stderr) as say:
        workers = flags.workers or job.cores()
        corpus = prepare_sequences(flags.input, flags.output, source_of(flags), workers, say)
    tell_json(counted(corpus)) if flags.json else tell(summary(corpus))


def source_of(flags: argparse.Namespace) -> Source:
    """Return the source that the flags describe."""
    common = {"eval_fraction": flags.eval_fraction, "task_bytes": flags.task_bytes}
    if flags.kind == "audio":
        return Audio(flags.label, flags.tokenizer, clip_hours=flags.clip_hours, mels=flags.mels,
                     audio_column=flags.audio_field, text_column=flags.text_field,
                     special_tokens=flags.parse_special_tokens, **common)
    if flags.kind == "images":
        return Images(flags.label, flags.tokenizer, flags.patch_size, flags.most_patches, flags.patches_per_side,
                      flags.image_field, flags.text_field, flags.square, flags.crop_square, **common)
    return Events(flags.user, flags.time, tuple(flags.category), tuple(flags.number), flags.vocab_size, **common)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the parsed flags."""
    parser = parser_of("prepare_sequences", __doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=Parser)
    audio = kinds.add_parser("audio", help="audio clips, as log-mel frames", text="""\
Prepare audio clips as log-mel frames.

    jaxtrain prepare_sequences audio --input=FOLDER --output=FOLDER
""")
    audio.add_argument("--label", default=Audio.target, help=f"label of a clip: {', '.join(TARGETS)}; "
                       f"default: {Audio.target}")
    audio.add_argument("--tokenizer", default=Audio.tokenizer, help="tokenizer of texts: 'bytes' or a tokenizer.json; "
                       "default: bytes")
    audio.add_argument("--clip_hours", type=float, default=Audio.clip_hours,
                       help=f"drop clips longer than this; default: {Audio.clip_hours:g}")
    audio.add_argument("--mels", type=int, default=Audio.mels, help="mel bands per frame; 128 for large-v3; "
                       f"default: {Audio.mels}")
    audio.add_argument("--audio_field", default=Audio.audio_column, help="Parquet column with the bytes "
                       f"of audio files; default: {Audio.audio_column}")
    audio.add_argument("--text_field", default=Audio.text_column, help="Parquet column with transcripts; "
                       f"default: {Audio.text_column}")
    audio.add_argument("--parse_special_tokens", action="store_true",
                       help="parse special tokens such as <|de|> in transcripts")
    events = kinds.add_parser("events", help="tables of events, as one sequence per user", text="""\
Prepare tables of events as one sequence per user.

    jaxtrain prepare_sequences events --input=FOLDER --output=FOLDER --user=COLUMN --time=COLUMN --category COLUMN
""")
    events.add_argument("--user", required=True, help="column with the user (or other key) of an event")
    events.add_argument("--time", required=True, help="column with the time of an event")
    events.add_argument("--category", nargs="+", default=[],
                        help="columns of categories; values get ids, the most frequent first")
    events.add_argument("--number", nargs="+", default=[], help="columns of numbers")
    events.add_argument("--vocab_size", type=int, default=Events.vocab_size, help="maximum number of ids per category; "
                        f"default: {Events.vocab_size}")
    images = kinds.add_parser("images", help="images, as patches", text="""\
Prepare images from files, tar archives or Parquet as patches.

    jaxtrain prepare_sequences images --input=FOLDER --output=FOLDER
""")
    images.add_argument("--label", default=Images.target, help="label of an image: none, text, folder; "
                        f"default: {Images.target}")
    images.add_argument("--tokenizer", default=Images.tokenizer,
                        help="tokenizer of captions: 'bytes' or a tokenizer.json; "
                        "default: bytes")
    for name, what in (("patch_size", "side length of a patch in pixels"),
                       ("most_patches", "maximum patches per image"),
                       ("patches_per_side", "maximum patches along the longer side")):
        images.add_argument(f"--{name}", type=int, default=getattr(Images, name),
                            help=f"{what}; default: {getattr(Images, name)}")
    images.add_argument("--square", type=int, default=Images.square,
                        help="side length in pixels of a square to which "
                        "images are resized, as published encoders need it; default: keep their shapes")
    images.add_argument("--crop_square", action="store_true",
                        help="with --square: crop images to the centre, as CLIP "
                        "does, instead of squeezing them, as SigLIP does")
    images.add_argument("--image_field", default=Images.image_field, help="Parquet column with images; "
                        f"default: {Images.image_field}")
    images.add_argument("--text_field", default=Images.text_field, help="Parquet column with captions; "
                        f"default: {Images.text_field}")
    for kind, default in ((audio, Audio), (events, Events), (images, Images)):
        kind.add_argument("--input", nargs="+", required=True, help="files or folders")
        kind.add_argument("--output", required=True, help="folder of the corpus")
        kind.add_argument("--eval_fraction", type=float, default=default.eval_fraction,
                          help=f"share of sequences held out for evaluation;  default: {default.eval_fraction:g}")
        kind.add_argument("--task_bytes", type=int, default=default.task_bytes, help="bytes of input per shard")
        add_dry_run(kind, "find the input, say how it would be divided, and stop")
        add_json(kind, "print the counts of the corpus, or of a dry run, as a JSON object")
        kind.add_argument("--workers", type=int, help="number of processes; default: number of cores")
    flags = parser.parse_args(argv)
    if flags.workers is not None and flags.workers < 1:
        raise UserError("--workers", f"{flags.workers} is not a positive number", "use 1 or more, or leave it out")
    return flags
