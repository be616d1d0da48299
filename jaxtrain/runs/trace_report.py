"""Reports of the steps that saw documents, as text for a terminal and as objects for JSON."""

import shlex
from collections.abc import Sequence
from itertools import groupby

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config import data_stages
from jaxtrain.data.loading.skipped_batches import FILE
from jaxtrain.data.tracing.found_documents import FoundDocument
from jaxtrain.data.tracing.inverse_batches import held
from jaxtrain.data.tracing.text_matches import TextMatch
from jaxtrain.runs.traced_run import Redo, Seen, TracedRun

SHOWN = 10  # steps of a document that are shown as text


def as_json(run: TracedRun, document: FoundDocument, seen: Sequence[Seen]) -> JsonObject:
    """Return what is known of a document and of where the run has it."""
    found: JsonObject = {"document": document.name, "split": document.split, "origin": document.origin(run.corpus)}
    found |= {"tokens": document.stop - document.start} if run.text else {}
    if run.batches is None:
        return found
    past, future = counted(run, seen)
    return found | {"steps_done": past, "steps_to_come": future, "seen": [_row(run, document, one) for one in seen]}


def counted(run: TracedRun, seen: Sequence[Seen]) -> tuple[list[int], list[int]]:
    """Return the steps that are done and saw it, and those to come that will."""
    steps = sorted({one.step for one in seen if one.counts and one.step is not None})
    return [step for step in steps if step < run.done], [step for step in steps if step >= run.done]


def _row(run: TracedRun, document: FoundDocument, one: Seen) -> JsonObject:
    first = one.token - document.start
    row: JsonObject = {"step": one.step, "row": one.row, "positions": list(one.positions), "epoch": one.epoch}
    row |= {"tokens": [first, first + one.positions[1] - one.positions[0]]} if run.text else {}
    if one.island is not None:
        row["island"] = one.island
    if one.step != one.batch:
        row["batch"] = one.batch
    if one.step is None:
        row["skipped"] = True
    if one.lost:
        row["lost"] = True
    return row


def as_text(run: TracedRun, document: FoundDocument, seen: Sequence[Seen]) -> list[str]:
    """Return lines about a document and where the run has it."""
    size = f", {document.stop - document.start:,} tokens" if run.text else ""
    lines = [f"document {document.name}: {document.origin(run.corpus)}{size}"]
    return lines + _seen_text(run, document, seen)


def in_order(match: TextMatch) -> tuple[object, ...]:
    """Return what matches are sorted by."""
    one = match.document
    return one.source, one.split != "train", one.number, match.bytes


def match_json(run: TracedRun, match: TextMatch, seen: Sequence[Seen]) -> JsonObject:
    """Return what is known of a place with a text, and of where the run has it."""
    found = as_json(run, match.document, seen)
    return {"document": found.pop("document"), "split": found.pop("split"), "origin": found.pop("origin"),
            "bytes": list(match.bytes), "text_tokens": list(match.tokens), "same_tokens": match.same_tokens, **found}


def match_text(run: TracedRun, match: TextMatch, seen: Sequence[Seen]) -> list[str]:
    """Return lines about a place with a text, and about where the run has it."""
    one, same = match.document, "the same as of the text alone" if match.same_tokens else "tokenized otherwise"
    return [f"document {one.name}: {one.origin(run.corpus)}; bytes {match.bytes[0]} to {match.bytes[1]}, tokens "
            f"{match.tokens[0]} to {match.tokens[1]} of it, {same}", *_seen_text(run, one, seen)]


def _seen_text(run: TracedRun, document: FoundDocument, seen: Sequence[Seen]) -> list[str]:
    if document.split == "eval":
        return ["  it is of the evaluation split, which no step trains on"]
    if run.batches is None:
        return []
    past, future = counted(run, seen)
    lines = [f"  seen by {_steps(len(past))} of {run.done:,} done, and by {_steps(len(future))} of "
             f"{max(0, run.steps - run.done):,} to come" if run.workdir else
             f"  will be seen by {_steps(len(future))} of {run.steps:,}"]
    if not seen:
        lines.append(f"  {_why_not(run, document)}")
    by_batch = [list(some) for _, some in groupby(seen, key=lambda one: one.batch)]
    for some in by_batch[:SHOWN]:
        first = some[0]
        when = f"batch {first.batch}, skipped" if first.step is None else f"step {first.step}"
        where = "; ".join(_where(run, document, one) for one in some)
        lines.append(f"  {when}{' (done)' if first.step is not None and first.step < run.done else ''}: {where}")
    if len(by_batch) > SHOWN:
        lines.append(f"  and {len(by_batch) - SHOWN:,} more, to step {by_batch[-1][0].step}; --json lists all")
    return lines


def _why_not(run: TracedRun, document: FoundDocument) -> str:
    """Return why no step has a document, or a place in it."""
    assert run.batches is not None
    if not any(stage.weights[document.source] for stage in data_stages.stages(run.data)):
        return "the weight of its source is 0"
    if held(run.batches, document.stretch):
        return "the run ends before its turn"
    if run.data.packing in ("pairs", "answers"):
        return "no row has it: it is longer than data.seq_len, and never cut"
    if run.data.packing == "concat":
        return "no row has it: it is in what is left behind the last whole row"
    return "no row has it: it has no token to predict"


def _where(run: TracedRun, document: FoundDocument, one: Seen) -> str:
    begin, end = one.positions
    first = one.token - document.start
    island = "" if one.island is None else f"island {one.island} "
    tokens = f", tokens {first} to {first + end - begin} of it" if run.text else ""
    return f"{island}row {one.row} [{begin}:{end}]{tokens}, epoch {one.epoch}{', lost' * one.lost}"


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def redo_json(run: TracedRun, redo: Redo | None, again: Sequence[str], unused: Sequence[str]) -> JsonObject:
    """Return what to do so that the run has nothing of the documents, as an object.

    `again`: as `commands` takes it. `unused`: checkpoints that have them, and that the run no longer uses.
    """
    found: JsonObject = {"steps": run.steps, "done": run.done, "unused_checkpoints": list(unused), "redo": None}
    if redo is not None:
        found["redo"] = {"first_seen": redo.first, "from_step": redo.checkpoint or 0, "to_step": redo.done - 1,
                         "checkpoint": redo.checkpoint, "checkpoints_that_have_it": list(redo.newer),
                         "commands": commands(run, redo, again)}
    return found


def redo_text(run: TracedRun, redo: Redo | None, again: Sequence[str], unused: Sequence[str]) -> list[str]:
    """Return lines about what to do so that the run has nothing of the documents; arguments as of `redo_json`."""
    if run.workdir is None:
        return []
    before = unused_text(run, unused)
    before += [f"The run began with {run.init_from}, which may have seen it before."] if run.init_from else []
    if redo is None:
        return [f"No step that is done saw it{'.' if before else ': the state of the run has nothing of it.'}", *before]
    start = redo.checkpoint or 0
    lines = [f"To redo: steps {start} to {redo.done - 1} ({redo.done - start:,}); step {redo.first} was the first that "
             "saw it."]
    if redo.newer:
        lines.append(f"Checkpoints that have it: {', '.join(map(str, redo.newer))}; so has what was exported or begun "
                     "from them.")
    lines.append("No good checkpoint is from before. Train from the start in a workdir that skips batches with it:"
                 if redo.checkpoint is None else
                 f"Checkpoint {redo.checkpoint} is the last one from before. To go back and skip batches with it:")
    lines += [f"  {line}" for line in commands(run, redo, again)]
    return lines + before


def unused_text(run: TracedRun, unused: Sequence[str]) -> list[str]:
    """Return a line about the checkpoints that the run no longer uses, but that have what is to be deleted."""
    return [f"The run no longer uses these checkpoints, which have it or may have it; delete them too: "
            f"{', '.join(f'{run.workdir}/checkpoints/{name}' for name in unused)}"] if unused else []


def commands(run: TracedRun, redo: Redo, again: Sequence[str]) -> list[str]:
    """Return the commands that take the run back to before it saw the documents, and keep it from seeing them.

    `again`: the flags that name the documents.
    """
    workdir = f"{run.workdir}"
    skip = ["jaxtrain", "data", "trace", workdir, *again, "--skip"]
    if redo.checkpoint is None:
        return [shlex.join([*skip, f"{workdir}-again"])]
    return [shlex.join(["jaxtrain", "checkpoint", "restore-to", workdir, f"{redo.checkpoint}"]),
            shlex.join([*skip, workdir])]


def skipped_text(run: TracedRun, batches: Sequence[int], workdir: str) -> str:
    """Return a line about batches that the run in a workdir skips from now on."""
    if not batches:
        return "The run skips all batches to come that have it, or has none."
    rows = sum(run.batches.shape(batch)[0] for batch in batches) if run.batches else 0
    batches_in_words = f"{len(batches):,} batch{'es' * (len(batches) > 1)}"
    return (f"The run skips {batches_in_words} ({rows:,} row{'s' * (rows != 1)}) from now on, which "
            f"ha{'ve' if len(batches) > 1 else 's'} it: "
            f"{', '.join(map(str, batches[:SHOWN]))}{', ...' * (len(batches) > SHOWN)}; {workdir}/{FILE} lists them.")
