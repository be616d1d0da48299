"""Prepare audio clips, tables of events or images as sequences.

    jaxtrain prepare_sequences audio --input=FOLDER --output=FOLDER
    jaxtrain prepare_sequences pictures --input=FOLDER --output=FOLDER
    jaxtrain prepare_sequences events --input=FOLDER --output=FOLDER --user=COLUMN --time=COLUMN --category COLUMN

It works like `jaxtrain prepare`: the input determines tasks, each task has a ledger, and the manifest is written last.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.cleaning.cleaning_steps import added
from jaxtrain.data.corpus.corpus import SPLITS
from jaxtrain.data.corpus.sequences import (
    FORMAT,
    Column,
    Columns,
    SequenceCorpus,
    SequenceWriter,
    content_key,
    describe,
    open_sequences,
)
from jaxtrain.data.corpus.shard_writer import Origin
from jaxtrain.data.formats import inputs
from jaxtrain.data.loading import bucketing
from jaxtrain.data.prepare import job
from jaxtrain.data.prepare.provenance import code
from jaxtrain.data.prepare.tasks import Task, write_ledger
from jaxtrain.data.prepare_sequences.audio import TARGETS, Audio
from jaxtrain.data.prepare_sequences.event_streams import Events
from jaxtrain.data.prepare_sequences.picture_patches import Pictures
from jaxtrain.errors import UserError, tell
from jaxtrain.files import atomic_files
from jaxtrain.files.work_progress import Line
from jaxtrain.flags import Parser, command, parser_of


class Source(Protocol):
    """The protocol of sources of sequences, one per kind of data; it is pickled for worker processes."""

    @property
    def kind(self) -> str:
        """The name of this kind of data."""
        ...

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages whose versions the manifest records."""
        ...

    @property
    def eval_fraction(self) -> float:
        """The share of sequences for evaluation, chosen by their content."""
        ...

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of its sequences, by name."""
        ...

    def identity(self) -> JsonObject:
        """Return what determines the sequences, besides the input."""
        ...

    def find_tasks(self, sources: Sequence[str]) -> list[Task]:
        """Return the tasks, from names and sizes alone."""
        ...

    def ready(self, tasks: Sequence[Task], output: Path, workers: int,
              say: Callable[..., None]) -> tuple["Source", list[Task]]:
        """Return the source with what it must know of all tasks, and the tasks that are then left to do."""
        ...

    def read(self, number: int, task: Task, output: Path, left_out: dict[str, int],
             ) -> Iterator[tuple[Columns, Origin]]:
        """Yield the sequences of a task in order, and count in `left_out` what is dropped."""
        ...

    def manifest(self) -> JsonObject:
        """Return what a reader of the corpus needs to know, for the manifest."""
        ...


def prepare_sequences(sources: Sequence[str], output: str | Path, source: Source, workers: int = 1,
                      say: Callable[..., None] = lambda line: None) -> SequenceCorpus:
    """Make the corpus, or only its missing part, and open it."""
    if not 0 <= source.eval_fraction < 1:
        raise UserError("--eval_fraction", f"{source.eval_fraction} is not between 0 and 1", "try 0.005")
    output = job.folder(output)
    tasks = source.find_tasks(sources)
    pieces = [[piece.identity() for piece in task] for task in tasks]
    plan = atomic_files.digest([FORMAT, source.kind, source.identity(), pieces])
    with job.begun(output, plan, FORMAT) as anything_left:
        if anything_left:
            _prepare(tasks, pieces, plan, output, source, workers, say)
    return open_sequences(output)


def _prepare(tasks: list[Task], pieces: list[Any], plan: str, output: Path, source: Source, workers: int,
             say: Callable[..., None]) -> None:
    source, tasks = source.ready(tasks, output, workers, say)
    made = atomic_files.digest([plan, source.manifest()])
    missing = job.missing(tasks, range(len(tasks)), output, made)
    job.run("sequences", make_shard, tasks, missing, output, source, made, workers, say)
    ledgers = job.ledgers(tasks, output, made)
    splits = {}
    for split in SPLITS:
        shards = [ledger["shards"][split] for ledger in ledgers if ledger["shards"][split]["sequences"]]
        splits[split] = {key: sum(shard[key] for shard in shards) for key in ("sequences", "steps")}
        splits[split]["shards"] = shards
    job.complete(output, {
        "format": FORMAT, "plan": plan, "kind": source.kind, "columns": describe(source.columns),
        "options": source.identity(), "inputs": pieces, **source.manifest(),
        "left_out": added(ledger["left_out"] for ledger in ledgers), "splits": splits}, code(source.packages))


def make_shard(number: int, task: Task, output: str | Path, source: Source, plan: str) -> int:
    """Write the shards of both splits, then their ledger."""
    output, columns, before = Path(output), source.columns, inputs.stamps(task)
    writers = {split: SequenceWriter(output / f"{split}-{number:05}", columns) for split in SPLITS}
    left_out: dict[str, int] = {}
    for found, origin in source.read(number, task, output, left_out):
        values = {name: column.array(found[name]) for name, column in columns.items()}
        key = content_key(values, columns)
        into = "eval" if int.from_bytes(key[:8]) < source.eval_fraction * 2**64 else "train"
        writers[into].add(values, key, origin)
    shards = {split: writer.close() for split, writer in writers.items()}
    write_ledger(output, number, plan, before, shards, {"left_out": left_out})
    return number


# ------------------------------------------------------------------------------------------------------ command line

@command("stopped; run the same command to continue")
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 0: the corpus is complete; 2: a user error, reported in one line."""
    flags = parse(argv)
    with Line(sys.stderr) as say:
        workers = flags.workers or job.cores()
        corpus = prepare_sequences(flags.input, flags.output, source_of(flags), workers, say)
    tell(summary(corpus))


def source_of(flags: argparse.Namespace) -> Source:
    """Return the source that the flags describe."""
    common = {"eval_fraction": flags.eval_fraction, "task_bytes": flags.task_bytes}
    if flags.kind == "audio":
        return Audio(flags.target, flags.tokenizer, clip_hours=flags.clip_hours, mels=flags.mels,
                     audio_column=flags.audio_column, text_column=flags.text_column,
                     special_tokens=flags.special_tokens, **common)
    if flags.kind == "pictures":
        return Pictures(flags.target, flags.tokenizer, flags.patch_size, flags.most_patches, flags.patches_per_side,
                        flags.picture_field, flags.text_field, flags.square, flags.crop_square, **common)
    return Events(flags.user, flags.time, tuple(flags.category), tuple(flags.number), flags.vocab_size, **common)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the parsed flags."""
    parser = parser_of("prepare_sequences", __doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=Parser)
    audio = kinds.add_parser("audio", help="audio clips, as log-mel frames", text="""\
Prepare audio clips as log-mel frames.

    jaxtrain prepare_sequences audio --input=FOLDER --output=FOLDER
""")
    audio.add_argument("--target", default=Audio.target, help=f"label of a clip: {', '.join(TARGETS)}; "
                       f"default: {Audio.target}")
    audio.add_argument("--tokenizer", default=Audio.tokenizer, help="tokenizer of texts: 'bytes' or a tokenizer.json; "
                       "default: bytes")
    audio.add_argument("--clip_hours", type=float, default=Audio.clip_hours,
                       help=f"drop clips longer than this; default: {Audio.clip_hours:g}")
    audio.add_argument("--mels", type=int, default=Audio.mels, help="mel bands per frame; 128 for large-v3; "
                       f"default: {Audio.mels}")
    audio.add_argument("--audio_column", default=Audio.audio_column, help="Parquet column with the bytes "
                       f"of audio files; default: {Audio.audio_column}")
    audio.add_argument("--text_column", default=Audio.text_column, help="Parquet column with transcripts; "
                       f"default: {Audio.text_column}")
    audio.add_argument("--special_tokens", action="store_true",
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
    pictures = kinds.add_parser("pictures", help="images, as patches", text="""\
Prepare images from files, tar archives or Parquet as patches.

    jaxtrain prepare_sequences pictures --input=FOLDER --output=FOLDER
""")
    pictures.add_argument("--target", default=Pictures.target, help="label of an image: none, text, folder; "
                          f"default: {Pictures.target}")
    pictures.add_argument("--tokenizer", default=Pictures.tokenizer,
                          help="tokenizer of captions: 'bytes' or a tokenizer.json; "
                          "default: bytes")
    for name, what in (("patch_size", "side length of a patch in pixels"),
                       ("most_patches", "maximum patches per image"),
                       ("patches_per_side", "maximum patches along the longer side")):
        pictures.add_argument(f"--{name}", type=int, default=getattr(Pictures, name),
                              help=f"{what}; default: {getattr(Pictures, name)}")
    pictures.add_argument("--square", type=int, default=Pictures.square,
                          help="side length in pixels of a square to which "
                          "images are resized, as published encoders need it; default: keep their shapes")
    pictures.add_argument("--crop_square", action="store_true",
                          help="with --square: crop images to the centre, as CLIP "
                          "does, instead of squeezing them, as SigLIP does")
    pictures.add_argument("--picture_field", default=Pictures.picture_field, help="Parquet column with images; "
                          f"default: {Pictures.picture_field}")
    pictures.add_argument("--text_field", default=Pictures.text_field, help="Parquet column with captions; "
                          f"default: {Pictures.text_field}")
    for kind, default in ((audio, Audio), (events, Events), (pictures, Pictures)):
        kind.add_argument("--input", nargs="+", required=True, help="files or folders")
        kind.add_argument("--output", required=True, help="folder of the corpus")
        kind.add_argument("--eval_fraction", type=float, default=default.eval_fraction,
                          help=f"share of sequences held out for evaluation;  default: {default.eval_fraction:g}")
        kind.add_argument("--task_bytes", type=int, default=default.task_bytes, help="bytes of input per shard")
        kind.add_argument("--workers", type=int, help="number of processes; default: number of cores")
    flags = parser.parse_args(argv)
    if flags.workers is not None and flags.workers < 1:
        raise UserError("--workers", f"{flags.workers} is not a positive number", "use 1 or more, or leave it out")
    return flags


def summary(corpus: SequenceCorpus) -> str:
    """Return the corpus's counts, and bucket lengths that suit it, as text."""
    columns = ", ".join(f"{name} {column.dtype[1:]}{list(column.shape) or ''} per {column.per}".replace("per own", "")
                        for name, column in corpus.train.columns.items())
    lines = [f"{corpus.path}: {columns}"]
    for split in SPLITS:
        lengths = getattr(corpus, split).counts()
        lines.append(f"{split:<6}{len(lengths):>14,} sequences {lengths.sum():>18,} steps")
    lines += [f"dropped: {count:,} ({reason})" for reason, count in corpus.manifest["left_out"].items()]
    lengths = corpus.train.counts()
    # Where few lengths occur, all of them need fewer buckets than are asked for.
    for buckets in dict.fromkeys(bucketing.choose(lengths, count) for count in (1, 4, 8) if len(lengths)):
        lines.append(f"buckets {' '.join(map(str, buckets))}: {bucketing.padding(lengths, buckets):.1%} padding")
    return "\n".join(lines)
