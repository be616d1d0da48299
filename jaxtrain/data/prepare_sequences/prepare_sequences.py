"""Prepare audio clips or tables of events as sequences.

    jaxtrain prepare_sequences audio --input=FOLDER --output=FOLDER
    jaxtrain prepare_sequences events --input=FOLDER --output=FOLDER --user=COLUMN --time=COLUMN --category COLUMN

It works as `jaxtrain prepare` does: tasks that follow from the input, a ledger for each, the manifest last.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.data.cleaning.cleaning_steps import added
from jaxtrain.data.corpus import atomic_files
from jaxtrain.data.corpus.corpus import SPLITS
from jaxtrain.data.corpus.sequences import (
    FORMAT,
    Column,
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
from jaxtrain.data.prepare.prepare_progress import Line
from jaxtrain.data.prepare.provenance import code
from jaxtrain.data.prepare.tasks import Task, write_ledger
from jaxtrain.data.prepare_sequences.audio import TARGETS, Audio
from jaxtrain.data.prepare_sequences.event_streams import Events
from jaxtrain.errors import UserError
from jaxtrain.flags import Parser, command, parser_of


class Source(Protocol):
    """Where sequences come from: all that preparing them needs to know of a kind of data. It travels to the workers."""

    @property
    def kind(self) -> str:
        """Its name."""
        ...

    @property
    def packages(self) -> tuple[str, ...]:
        """Whose versions the manifest keeps."""
        ...

    @property
    def eval_fraction(self) -> float:
        """Of the sequences, chosen by their content."""
        ...

    @property
    def columns(self) -> dict[str, Column]:
        """Of its sequences."""
        ...

    def identity(self) -> dict[str, Any]:
        """What decides about the sequences, beside the input."""
        ...

    def find_tasks(self, sources: Sequence[str]) -> list[Task]:
        """From names and sizes alone."""
        ...

    def ready(self, tasks: Sequence[Task], output: Path, workers: int, say: Any) -> tuple["Source", list[Task]]:
        """With what must be known of all tasks before any can be done; and the tasks that are left to do then."""
        ...

    def read(self, number: int, task: Task, output: Path, left_out: dict[str, int],
             ) -> Iterator[tuple[dict[str, Any], Origin]]:
        """The sequences of a task in order; what is left out is counted."""
        ...

    def manifest(self) -> dict[str, Any]:
        """What a reader of the corpus needs to know."""
        ...


def prepare_sequences(sources: Sequence[str], output: str | Path, source: Source, workers: int = 1,
                      say: Any = lambda line: None) -> SequenceCorpus:
    """Make the corpus, or what of it is missing, and open it."""
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
             say: Any) -> None:
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
    """Make the shards of both splits, then their ledger."""
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

@command("stopped; the same command goes on")
def main(argv: list[str] | None) -> None:
    """Exit status 0: the corpus is complete; 2: the user's mistake, in one line."""
    flags = parse(argv)
    with Line(sys.stderr) as say:
        workers = flags.workers or job.cores()
        corpus = prepare_sequences(flags.input, flags.output, source_of(flags), workers, say)
    print(summary(corpus))


def source_of(flags: argparse.Namespace) -> Source:
    """What the flags describe."""
    common = {"eval_fraction": flags.eval_fraction, "task_bytes": flags.task_bytes}
    if flags.kind == "audio":
        return Audio(flags.target, flags.tokenizer, **common)
    return Events(flags.user, flags.time, tuple(flags.category), tuple(flags.number), flags.vocab_size, **common)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = parser_of("prepare_sequences", __doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=Parser)
    audio = kinds.add_parser("audio", help="clips to log-mel frames", text="""\
Prepare audio clips as log-mel frames.

    jaxtrain prepare_sequences audio --input=FOLDER --output=FOLDER
""")
    audio.add_argument("--target", default=Audio.target, help=f"{', '.join(TARGETS)}: what belongs to a clip")
    audio.add_argument("--tokenizer", default=Audio.tokenizer, help="of texts: 'bytes' or a tokenizer.json")
    events = kinds.add_parser("events", help="tables of events to one sequence a user", text="""\
Prepare tables of events as one sequence a user.

    jaxtrain prepare_sequences events --input=FOLDER --output=FOLDER --user=COLUMN --time=COLUMN --category COLUMN
""")
    events.add_argument("--user", required=True, help="the column that says whose event it is")
    events.add_argument("--time", required=True, help="the column that orders a user's events")
    events.add_argument("--category", nargs="+", default=[], help="columns to number by how often values occur")
    events.add_argument("--number", nargs="+", default=[], help="columns to take as numbers")
    events.add_argument("--vocab_size", type=int, default=Events.vocab_size, help="ids of a category, at most")
    for kind, default in ((audio, Audio), (events, Events)):
        kind.add_argument("--input", nargs="+", required=True, help="files or folders")
        kind.add_argument("--output", required=True, help="the corpus")
        kind.add_argument("--eval_fraction", type=float, default=default.eval_fraction,
                          help=f"share of sequences kept for evaluation; default: {default.eval_fraction:g}")
        kind.add_argument("--task_bytes", type=int, default=default.task_bytes, help="input that makes one shard")
        kind.add_argument("--workers", type=int, default=0, help="processes; default: all cores")
    flags = parser.parse_args(argv)
    if flags.workers < 0:
        raise UserError("--workers", f"{flags.workers} is no number of processes", "use 1 or more")
    return flags


def summary(corpus: SequenceCorpus) -> str:
    """Counts, and what buckets would suit the lengths."""
    columns = ", ".join(f"{name} {column.dtype[1:]}{list(column.shape) or ''} per {column.per}".replace("per own", "")
                        for name, column in corpus.train.columns.items())
    lines = [f"{corpus.path}: {columns}"]
    for split in SPLITS:
        lengths = getattr(corpus, split).counts()
        lines.append(f"{split:<6}{len(lengths):>14,} sequences {lengths.sum():>18,} steps")
    lines += [f"left out: {count:,} ({reason})" for reason, count in corpus.manifest["left_out"].items()]
    lengths = corpus.train.counts()
    for count in (1, 4, 8) if len(lengths) else ():
        buckets = bucketing.choose(lengths, count)
        lines.append(f"buckets {' '.join(map(str, buckets))}: {bucketing.padding(lengths, buckets):.1%} padding")
    return "\n".join(lines)
