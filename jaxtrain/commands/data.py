"""Find the steps of a run that saw a document, a text or an evaluation set.

    jaxtrain data trace WORKDIR --document=1234
    jaxtrain data trace WORKDIR --document=@letter.txt --json
    jaxtrain data trace CORPUS --text="a sentence of it"
    jaxtrain data trace CORPUS --eval=questions.jsonl

The batch of each step follows from the corpus, the config and the step, so nothing needs to be
recorded while training. CORPUS_OR_RUN is a run's workdir; a config, of a run that has not begun;
or a corpus, of which documents are found.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.base.annotations import JsonObject
from jaxtrain.commands.flags import Parser, add_json, add_subcommand, command, overrides_of, parser_of, tell_json
from jaxtrain.errors import UserError, tell

if TYPE_CHECKING:  # imported when a command runs, as --help does without
    from jaxtrain.data.tracing.stretches import Stretch
    from jaxtrain.runs.traced_run import Seen, TracedRun

SPLITS = ("train", "eval")


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 2 means a user error, reported in one line."""
    flags, rest = parser().parse_known_args(argv)
    asked = [name for name in ("document", "text", "eval") if getattr(flags, name)]
    if len(asked) != 1:
        raise UserError("command line", f"--{' and --'.join(asked)} are given" if asked else "it does not say what to "
                        "trace", "give one of --document, --text and --eval")
    if flags.workers is not None and flags.workers < 1:
        raise UserError("--workers", f"{flags.workers} is not a number of processes", "give 1 or more")
    if flags.skip and flags.eval:
        raise UserError("--skip", "an evaluation set may be in many batches", "skip those of single documents, with "
                        "--document")
    overrides = overrides_of(rest, vars(flags))
    if flags.document:
        _documents(flags, overrides)
    elif flags.text:
        _text(flags, overrides)
    else:
        _eval(flags, overrides)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("data", __doc__)
    commands = made.add_subparsers(dest="what", required=True, parser_class=Parser)
    trace = add_subcommand(commands, "data", "trace CORPUS_OR_RUN --document=1234",
                           "find the steps that saw documents, and what they have of a text or an evaluation set")
    trace.add_argument("where", metavar="CORPUS_OR_RUN", help="a run's workdir, a config, or a corpus; "
                       "--config.SECTION.KEY=VALUE sets any key of a config")
    trace.add_argument("--document", nargs="+", metavar="ID", help="a number, from 0, of the training split "
                       "(SOURCE:NUMBER in a mixture); a content hash; @FILE with the text; or the place as `inspect` "
                       "prints it, such as 'a.jsonl byte 12'")
    trace.add_argument("--text", help="find the documents with exactly this text, and what has seen it")
    trace.add_argument("--eval", metavar="FILE", help="find what documents have of the items of an evaluation set")
    trace.add_argument("--skip", metavar="WORKDIR", help="have the run in its workdir, or in a new one, skip all "
                       "batches to come that have what --document or --text finds")
    trace.add_argument("--text_field", nargs="+", default=[], metavar="NAME",
                       help="with --eval, the fields of a record that make the item; default: all text but the id")
    trace.add_argument("--ngram", type=int, default=13, help="with --eval, the words in a row that count as "
                       "contamination; default: 13")
    trace.add_argument("--near_threshold", type=float, default=0.8, help="with --eval, the share of an item's windows "
                       "of five words that makes a document a near duplicate; default: 0.8")
    trace.add_argument("--workers", type=int, help="processes that read the corpus; default: number of cores")
    add_json(trace)
    return made


def _documents(flags: argparse.Namespace, overrides: dict[str, str]) -> None:
    from jaxtrain.data.tracing.found_documents import find
    from jaxtrain.runs import trace_report, traced_run

    run = traced_run.open_traced(flags.where, overrides)
    found = list(dict.fromkeys(one for wanted in flags.document for one in find(run.corpus, wanted)))
    seen = _seen(run, [one.stretch if one.split == "train" else None for one in found])
    for one, rows in zip(found, seen, strict=True):
        _tell(flags, trace_report.as_json(run, one, rows), trace_report.as_text(run, one, rows))
    _redo(flags, run, seen, [one.stretch for one in found if one.split == "train"], ["--document", *flags.document])


def _text(flags: argparse.Namespace, overrides: dict[str, str]) -> None:
    from jaxtrain.data.tracing.document_texts import searched
    from jaxtrain.data.tracing.text_matches import TextSearch
    from jaxtrain.runs import trace_report, traced_run

    run = _with_text(traced_run.open_traced(flags.where, overrides), "--text")
    search = TextSearch(flags.text.encode(errors="surrogateescape"))  # the bytes that the shell gave
    matches = sorted((one for some in searched(run.data, run.corpus, search, SPLITS, _workers(flags)) for one in some),
                     key=trace_report.in_order)
    seen = _seen(run, [one.stretch if one.document.split == "train" else None for one in matches])
    for one, rows in zip(matches, seen, strict=True):
        _tell(flags, trace_report.match_json(run, one, rows), trace_report.match_text(run, one, rows))
    if not matches and not flags.json:
        tell("no document has exactly this text")
    _redo(flags, run, seen, [one.stretch for one in matches if one.document.split == "train"], ["--text", flags.text])


def _eval(flags: argparse.Namespace, overrides: dict[str, str]) -> None:
    from jaxtrain.data.tracing.contamination import EvalSearch
    from jaxtrain.data.tracing.document_texts import searched
    from jaxtrain.runs import contamination_report, traced_run

    search = EvalSearch(flags.eval, tuple(flags.text_field), flags.ngram, flags.near_threshold)
    search.items()  # before the corpus is opened, which may take long
    run = _with_text(traced_run.open_traced(flags.where, overrides), "--eval")
    found = contamination_report.gathered(searched(run.data, run.corpus, search, ["train"], _workers(flags)))
    made = list(contamination_report.objects(run, search, found))
    tell_json(*made) if flags.json else tell("\n".join(contamination_report.as_text(run, made)))


def _with_text(run: "TracedRun", flag: str) -> "TracedRun":
    if not run.text:
        raise UserError(flag, "the corpus has prepared sequences, without text to search", "name them by --document")
    return run


def _seen(run: "TracedRun", stretches: Sequence["Stretch | None"]) -> list[list["Seen"]]:
    """Return where the run has each stretch; None: it is not of the training split."""
    asked = [stretch for stretch in stretches if stretch is not None]
    found = iter(run.seen(asked) if run.batches is not None else [[] for _ in asked])
    return [[] if stretch is None else next(found) for stretch in stretches]


def _tell(flags: argparse.Namespace, one: JsonObject, lines: Sequence[str]) -> None:
    tell_json(one) if flags.json else tell("\n".join(lines))


def _redo(flags: argparse.Namespace, run: "TracedRun", seen: Sequence[Sequence["Seen"]],
          stretches: Sequence["Stretch"], again: Sequence[str]) -> None:
    """Tell what to do so that the run has nothing of what was found, or have it skip the batches to come."""
    from jaxtrain.runs import trace_report

    rows = [one for some in seen for one in some]
    unused = run.unused_with(rows)
    if flags.skip:
        if run.batches is None:
            raise UserError("--skip", f"{flags.where} is a corpus, without a run", "give a workdir or a config")
        skipped = run.skip(stretches, Path(flags.skip))
        tell_json({"skipped_from_now_on": skipped, "unused_checkpoints": unused}) if flags.json else tell("\n".join(
            [trace_report.skipped_text(run, skipped, flags.skip), *trace_report.unused_text(run, unused)]))
    elif run.batches is not None:
        redo = run.redo(rows)
        if flags.json:
            tell_json(trace_report.redo_json(run, redo, again, unused))
        elif lines := trace_report.redo_text(run, redo, again, unused):
            tell("\n".join(lines))


def _workers(flags: argparse.Namespace) -> int:
    from jaxtrain.data.prepare.job import cores

    return flags.workers or cores()
