"""Report what a preparation would leave out and change, with examples, without writing anything.

Everything runs in this process.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.cleaning.cleaning_steps import Steps, added, summed
from jaxtrain.data.formats.inputs import Ids, Text
from jaxtrain.data.prepare.duplicates import compared, signature
from jaxtrain.data.prepare.tasks import ALIKE, Options, Task, chat_of, key_of, offered

EXAMPLES, WIDTH = 3, 100  # examples per step; characters per example


def rehearsed(tasks: Sequence[Task], options: Options, sample: int = 0) -> JsonObject:
    """Return what would become of `sample` documents, the first ones of tasks across the input; 0: of all documents.
    """
    examples: list[list[str]] = [[] for _ in options.steps]

    def watch(step: int, before: Text, after: Text | str) -> None:
        if len(examples[step]) < EXAMPLES:
            what = f"{after}: {_head(before)}" if isinstance(after, str) else _change(before, after)
            examples[step].append(f"{before.name}: {what}")

    counts, left_out, names, heads = [], [], [], []
    keys, signatures, chat = bytearray(), bytearray(), chat_of(options)
    for task, share in _shares(tasks, sample):
        steps, unusable = Steps(options.steps, watch), {}
        for found, _ in islice(offered(task, options, unusable, steps, chat), share):
            clean = steps(found)
            if isinstance(clean, str) or not options.deduplicate:
                continue
            names.append(clean.name)
            heads.append(_head(clean))
            keys += key_of(clean)
            if options.deduplicate == "near":
                signatures += signature(clean, options)
        counts.append(steps.counts)
        left_out.append(unusable)
    rows = [{**row, "examples": some} for row, some in zip(summed(counts), examples, strict=True)]
    if options.deduplicate:
        rows.append(_duplicates(options, names, heads, bytes(keys), bytes(signatures)))
    return {"left_out": added(left_out), "steps": rows}


def dry_run(found: JsonObject) -> str:
    """Return the report on what `rehearsed` found."""
    lines = [f"{count:,} dropped: {reason}" for reason, count in found["left_out"].items()]
    for row in found["steps"]:
        lines += [_title(row), *(f"    {count:,} {reason}" for reason, count in row["removed"].items()),
                  *(f"  {example}" for example in row["examples"])]
    return "\n".join([*lines, "nothing was written"])


def _shares(tasks: Sequence[Task], sample: int) -> Iterator[tuple[Task, int | None]]:
    """Yield tasks from across the input, and how many documents to take from each."""
    if not sample:
        yield from ((task, None) for task in tasks)
        return
    chosen = np.unique(np.linspace(0, len(tasks) - 1, min(sample, len(tasks))).astype(int))
    for i, number in enumerate(chosen):
        yield tasks[number], sample * (i + 1) // len(chosen) - sample * i // len(chosen)


def _duplicates(options: Options, names: list[str], heads: list[str], keys: bytes, signatures: bytes) -> JsonObject:
    def columns(which: np.ndarray):
        bands, marks = options.near.columns(signatures)
        return lambda band: bands[band][which], lambda some: marks[which[some]]

    table = np.frombuffer(keys, "V16")
    verdicts, different, first = compared(options, [table], columns)
    origin = {key: number for number, key in reversed(list(enumerate(table.tolist())))}

    def like(number: int) -> int:
        if verdicts[number] == 1:
            return origin[table[number].tobytes()]
        return different[first[np.searchsorted(different, number)]]

    removed = {reason: int((verdicts == i).sum()) for i, reason in enumerate(ALIKE) if i and (verdicts == i).any()}
    examples = [f"{names[i]} is like {names[like(i)]}: {heads[i]}" for verdict in (1, 2)
                for i in np.flatnonzero(verdicts == verdict)[:EXAMPLES]]
    return {"step": f"deduplicate={options.deduplicate}", "seen": len(table), "changed": 0, "removed": removed,
            "examples": examples}


def _title(row: JsonObject) -> str:
    removed = sum(row["removed"].values())
    return f"{row['step']}: of {row['seen']:,} documents {removed:,} dropped, {row['changed']:,} changed"


def _change(before: Text, after: Text) -> str:
    """Return both texts around the first difference."""
    old, new = before.content.decode(), after.content.decode()
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, at - WIDTH // 4)
    return f"{old[start: start + WIDTH]!r} -> {new[start: start + WIDTH]!r}"


def _head(document: Text | Ids) -> str:
    if isinstance(document, Ids):
        return f"{len(document.ids)} tokens"
    return repr(document.content[: 4 * WIDTH].decode(errors="ignore")[:WIDTH])
