"""Convert tables of events (Parquet) to sequences: one per user, ordered by time.

A user's events may be anywhere in the input. So each task first spreads its rows over partitions by a hash of the user,
in a file of its own, and counts the values of categories. Then each partition is small enough to be sorted.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.corpus.corpus import UNFINISHED
from jaxtrain.data.corpus.sequences import Column, Columns
from jaxtrain.data.corpus.shard_writer import Origin
from jaxtrain.data.formats import inputs
from jaxtrain.data.formats.inputs import Piece
from jaxtrain.data.prepare import job
from jaxtrain.data.prepare.tasks import Task
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import LARGE, read_json, user_json

ELAPSED = "elapsed"
PARTITIONS = "partitions.json"


@dataclass(frozen=True)
class Events:
    """A source of sequences from event tables: a column for each category and number, and the `elapsed` time.

    `elapsed` is the time since the previous event, in seconds if the time column holds dates, else in its own unit.
    """

    user: str
    time: str
    categories: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    vocab_size: int = 65_536  # ids per category: 0 for missing or rare values, then from the most frequent on
    eval_fraction: float = 0.005
    task_bytes: int = 2**26
    partitions: int = 0  # this and the next are set by `ready`
    counts: tuple[tuple[tuple[str, int], ...], ...] = ()  # of each category's values

    kind = "events"
    packages = ("pyarrow",)

    def __post_init__(self):
        names = [self.user, self.time, ELAPSED, *self.categories, *self.numbers]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UserError("--category", f"{twice[0]!r} would be two columns", "name each once, and none 'elapsed'")
        for name in (*self.categories, *self.numbers):
            if "/" in name or name == "weights":  # they name files, and `weights` is taken
                raise UserError("--category", f"a column of a corpus cannot be called {name!r}", "rename it")
        if self.vocab_size < 2:
            raise UserError("--vocab_size", f"{self.vocab_size} leaves no id for any value", "use 2 or more")

    @property
    def columns(self) -> dict[str, Column]:
        """The columns, all with a value per step."""
        return ({name: Column("<i4") for name in self.categories} | {name: Column("<f4") for name in self.numbers}
                | {ELAPSED: Column("<f4")})

    def identity(self) -> JsonObject:
        """Return what determines the sequences, besides the input."""
        return {"user": self.user, "time": self.time, "categories": list(self.categories),
                "numbers": list(self.numbers), "vocab_size": self.vocab_size, "eval_fraction": self.eval_fraction,
                "task_bytes": self.task_bytes}

    def manifest(self) -> JsonObject:
        """Return the vocabularies for the manifest: the values of ids 1, 2, ..., and the count of each in the input."""
        return {"vocabularies": {name: {"values": [value for value, _ in counts], "counts": [n for _, n in counts]}
                                 for name, counts in zip(self.categories, self.counts, strict=True)}}

    def find_tasks(self, sources: Sequence[str]) -> list[Task]:
        """Return tasks of row groups; every file must have the columns, and its time must be of the same type."""
        found = inputs.find_pieces(sources, self.task_bytes, ends=".parquet")
        groups = [piece for piece in found if piece.kind == "parquet"]
        if not groups:
            raise UserError("--input", f"{', '.join(sources)} has no rows of Parquet", "name .parquet files or folders")
        types = {}
        for path, name in {piece.path: piece.name for piece in groups}.items():
            schema = inputs.parquet_file(path).schema_arrow
            for column in (self.user, self.time, *self.categories, *self.numbers):
                if column not in schema.names:
                    raise UserError("--input", f"{name} has no column {column!r}", f"it has {', '.join(schema.names)}")
            types[_kind_of_time(schema.field(self.time).type, name)] = name
        if len(types) > 1:
            (one, a), (other, b) = list(types.items())[:2]
            raise UserError("--time", f"{self.time!r} is {one} in {a} and {other} in {b}", "convert one of them")
        return inputs.cut([(group,) for group in groups], self.task_bytes)

    def ready(self, tasks: Sequence[Task], output: Path, workers: int,
              say: Callable[..., None]) -> tuple["Events", list[Task]]:
        """Spread rows over partitions, and return the source with its vocabularies and a task per partition.

        Rows that an earlier run spread are not read again.
        """
        size = inputs.total_size(tasks)
        source: Any = replace(self, partitions=-(-size // self.task_bytes))
        spread = [source.spread_path(output, task) for task in tasks]
        missing = [number for number, path in enumerate(spread) if not path.exists()]
        job.run("spread", spread_task, tasks, missing, output, source, "", workers, say)
        # The partitions' ledgers track this file instead of the input: it changes when the input does.
        path, content = output / UNFINISHED / PARTITIONS, [[path.name, len(task)]
                                                           for path, task in zip(spread, tasks, strict=True)]
        if not path.exists() or read_json(path, object) != content:
            atomic_files.write_json(path, content)
        sums: list[Counter[str]] = [Counter() for _ in self.categories]
        for one in spread:
            for total, counts in zip(sums, _notes(one)["counts"], strict=True):
                total.update(counts)
        ranked = (sorted(total.items(), key=lambda entry: (-entry[1], entry[0])) for total in sums)
        source = replace(source, counts=tuple(tuple(entries[: self.vocab_size - 1]) for entries in ranked))
        return source, [(Piece(f"partition {part}", str(path), "events", part, part + 1, size // source.partitions),)
                        for part in range(source.partitions)]

    def spread_path(self, output: Path, task: Task) -> Path:
        """Return the path of a task's spread rows; its name is a hash of all that they depend on."""
        content = [self.identity(), self.partitions, inputs.stamps(task)]
        return output / UNFINISHED / f"{atomic_files.digest(content)[:32]}.arrow"

    def read(self, number: int, task: Task, output: Path, left_out: dict[str, int],
             ) -> Iterator[tuple[Columns, Origin]]:
        """Yield the users of a partition, ordered by name; in origins, pieces are counted over all tasks."""
        pa, _ = _arrow()

        parts, before = [], 0
        for name, pieces in read_json(task[0].path, [(str, int)]):
            path = output / UNFINISHED / name
            with pa.memory_map(str(path)) as file:
                part = pa.Table.from_batches([pa.ipc.open_file(file).get_batch(number)])
            piece = pa.array(part["piece"].to_numpy() + np.uint32(before))
            parts.append(part.set_column(part.schema.get_field_index("piece"), "piece", piece))
            before += pieces
            for reason, count in _notes(path)["left_out"].items() if number == 0 else ():
                left_out[reason] = left_out.get(reason, 0) + count
        table = pa.concat_tables(parts).sort_by([(key, "ascending") for key in ("user", "time", "piece", "row")])
        values = self._values(table)
        is_date = pa.types.is_timestamp(table["time"].type)
        time = (table["time"].cast(pa.int64()) if is_date else table["time"]).to_numpy()
        pieces, rows = table["piece"].to_numpy(), table["row"].to_numpy()
        users = table["user"].combine_chunks().dictionary_encode().indices.to_numpy()
        starts = np.flatnonzero(np.diff(users, prepend=-1)).tolist()
        for start, stop in pairwise([*starts, len(users)]):
            found = {name: column[start:stop] for name, column in values.items()}
            found[ELAPSED] = np.diff(time[start:stop], prepend=time[start]) / (1e6 if is_date else 1)
            yield found, Origin(int(pieces[start]), int(rows[start]))

    def _values(self, table: Any) -> dict[str, np.ndarray]:
        pa, pc = _arrow()

        found = {}
        for i, name in enumerate(self.categories):
            known = pa.array([value for value, _ in self.counts[i]], pa.large_string())
            found[name] = pc.fill_null(pc.add(pc.index_in(table[f"category {i}"], value_set=known), 1), 0).to_numpy()
        return found | {name: table[f"number {i}"].to_numpy() for i, name in enumerate(self.numbers)}


def spread_task(number: int, task: Task, output: str | Path, source: Events, plan: str) -> int:
    """Write a task's rows into a file, one record batch per partition, and the counts of category values next to it."""
    pa, pc = _arrow()

    output, left_out = Path(output), dict[str, int]()
    path = source.spread_path(output, task)
    table = pa.concat_tables([_rows(source, piece, i, left_out) for i, piece in enumerate(task)])
    users = table["user"].combine_chunks().dictionary_encode()
    partition_of = np.array([int.from_bytes(inputs.content_hash(user.encode())[:8]) % source.partitions
                             for user in users.dictionary.to_pylist()], np.int64)
    partition = partition_of[users.indices.to_numpy()] if len(users) else np.zeros(0, np.int64)
    order = np.argsort(partition, kind="stable")
    ends = np.cumsum(np.bincount(partition, minlength=source.partitions))
    table = table.take(order).combine_chunks()
    counts = []
    for i in range(len(source.categories)):
        counted = pc.value_counts(table[f"category {i}"].drop_null())
        counts.append(dict(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True)))
    atomic_files.write_json(path.with_suffix(".json"), {"counts": counts, "left_out": left_out})
    with atomic_files.written(path) as file, pa.ipc.new_file(file, table.schema) as sink:
        for start, stop in pairwise([0, *ends.tolist()]):
            rows = table.slice(start, stop - start).combine_chunks().to_batches()
            sink.write_batch(rows[0] if rows else pa.RecordBatch.from_pylist([], table.schema))
    if source.spread_path(output, task) != path:
        raise UserError("--input", f"{task[0].path} changed while it was read", "run again")
    return number


def _rows(source: Events, piece: Piece, number: int, left_out: dict[str, int]) -> Any:
    """Return the required columns of a row group, without rows that lack user or time."""
    pa, pc = _arrow()

    wanted = [source.user, source.time, *source.categories, *source.numbers]
    group = inputs.row_group(piece, wanted)
    columns = {"user": _cast(group, source.user, pa.large_string(), "--user", piece), "time": _time(group[source.time])}
    columns |= {f"category {i}": _cast(group, name, pa.large_string(), "--category", piece)
                for i, name in enumerate(source.categories)}
    columns |= {f"number {i}": _cast(group, name, pa.float32(), "--number", piece)
                for i, name in enumerate(source.numbers)}
    columns["piece"] = pa.array(np.full(len(group), number, np.uint32))
    columns["row"] = pa.array(np.arange(len(group), dtype=np.uint64))
    table = pa.table(columns)
    for column in ("user", "time"):
        there = pc.is_valid(table[column])
        if missing := table[column].null_count:
            reason = f"an event without {column}"
            left_out[reason] = left_out.get(reason, 0) + missing
            table = table.filter(there)
    for i, name in enumerate(source.numbers):
        if not np.isfinite(table[f"number {i}"].to_numpy()).all():
            raise UserError("--number", f"{piece.name} has rows without a finite {name!r}", "fill or remove them")
    return table


def _time(values: Any) -> Any:
    """Convert times to integers, floats, or dates in microseconds; NaN becomes null."""
    pa, pc = _arrow()

    if pa.types.is_temporal(values.type):
        zone = values.type.tz if pa.types.is_timestamp(values.type) else None
        return values.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64()).cast(pa.timestamp("us"))
    if pa.types.is_integer(values.type):
        return values.cast(pa.int64())
    values = values.cast(pa.float64())
    return pc.if_else(pc.is_nan(values), None, values)


def _kind_of_time(type: Any, name: str) -> str:
    pa, _ = _arrow()

    for kind, holds in (("a date", lambda t: pa.types.is_timestamp(t) or pa.types.is_date(t)),
                        ("an integer", pa.types.is_integer), ("a number", pa.types.is_floating)):
        if holds(type):
            return kind
    raise UserError("--time", f"{name} has a {type} there", "write a timestamp, a date or a number")


def _cast(group: Any, name: str, type: Any, flag: str, piece: Piece) -> Any:
    pa, _ = _arrow()

    try:
        return group[name].cast(type, safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(flag, f"{name!r} of {piece.name} cannot be used ({error})", "name another column") from error


def _notes(spread: Path) -> JsonObject:
    path, fix = spread.with_suffix(".json"), f"delete {spread.parent}, and run again"
    found = user_json(path, {"counts": [{str: int}], "left_out": {str: int}}, "--output", fix, LARGE)
    if found is None:
        raise UserError("--output", f"{path} is missing", fix)
    return found


def _arrow() -> tuple[Any, Any]:
    return tuple(inputs.extra(module, "tables of events") for module in ("pyarrow", "pyarrow.compute"))
