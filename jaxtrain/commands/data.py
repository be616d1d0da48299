"""Trace documents: which steps of a run saw them, and what of an evaluation set is in a corpus.

    jaxtrain data trace WORKDIR --document=1234
    jaxtrain data trace WORKDIR --document=@letter.txt --json
    jaxtrain data trace CORPUS --text="a sentence of it"

The batch of each step follows from the corpus, the config and the step, so nothing needs to be
recorded while training. CORPUS_OR_RUN is a run's workdir; a config, of a run that has not begun;
or a corpus, of which documents are found.
"""

import argparse

from jaxtrain.commands.flags import Parser, add_json, add_subcommand, command, overrides_of, parser_of, tell_json
from jaxtrain.errors import UserError, tell


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 2 means a user error, reported in one line."""
    flags, rest = parser().parse_known_args(argv)
    asked = [name for name in ("document", "text", "eval") if getattr(flags, name)]
    if len(asked) != 1:
        raise UserError("command line", f"--{' and --'.join(asked)} are given" if asked else "it does not say what to "
                        "trace", "give one of --document, --text and --eval")
    overrides = overrides_of(rest, vars(flags))
    _documents(flags, overrides)


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
    add_json(trace)
    return made


def _documents(flags: argparse.Namespace, overrides: dict[str, str]) -> None:
    from jaxtrain.data.tracing.found_documents import find
    from jaxtrain.runs import trace_report, traced_run

    run = traced_run.open_traced(flags.where, overrides)
    found = list(dict.fromkeys(one for wanted in flags.document for one in find(run.corpus, wanted)))
    trained = [one for one in found if one.split == "train"]
    seen = run.seen([one.stretch for one in trained]) if run.batches is not None else [[] for _ in trained]
    of = dict(zip(trained, seen, strict=True))
    for one in found:
        if flags.json:
            tell_json(trace_report.as_json(run, one, of.get(one, [])))
        else:
            tell("\n".join(trace_report.as_text(run, one, of.get(one, []))))
    if run.batches is not None:
        redo = run.redo([one for some in seen for one in some])
        tell_json(trace_report.redo_json(run, redo)) if flags.json else [
            tell(line) for line in trace_report.redo_text(run, redo)]
