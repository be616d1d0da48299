"""Make a corpus of sequences in tasks; each task has a ledger, and the manifest is written last."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

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
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files


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


def counted(corpus: SequenceCorpus) -> JsonObject:
    """Return the corpus's counts, as scripts read them."""
    counts = {split: getattr(corpus, split).counts() for split in SPLITS}
    return {"path": f"{corpus.path}", "splits": {split: {"sequences": len(lengths), "steps": int(lengths.sum())}
                                                 for split, lengths in counts.items()},
            "left_out": corpus.manifest["left_out"],
            "buckets": [{"lengths": [*map(int, buckets)], "padding": float(bucketing.padding(counts["train"], buckets))}
                        for buckets in _buckets(counts["train"])]}


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
    for buckets in _buckets(lengths):
        lines.append(f"buckets {' '.join(map(str, buckets))}: {bucketing.padding(lengths, buckets):.1%} padding")
    return "\n".join(lines)


def _buckets(lengths: np.ndarray) -> Iterable[tuple[int, ...]]:
    """Return lengths of buckets that suit sequences; where few lengths occur, fewer than are asked for."""
    return dict.fromkeys(bucketing.choose(lengths, count) for count in (1, 4, 8) if len(lengths))
