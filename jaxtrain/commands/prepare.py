"""Tokenize text into a corpus to train on.

    jaxtrain prepare --input jaxtrain configs --output=corpora/own --eval_fraction=0.1
    jaxtrain prepare --input=jaxtrain --dry_run --sample=50 --filters pii quality language=en

The input is divided into tasks. If the command is killed, only running tasks are lost: run it again to
continue. The result has the same bytes for any number of workers and any engine.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.commands.flags import Parser, add_json, command, parser_of, tell_json
from jaxtrain.data.chat.templates import BUILT_IN, TRAIN_ON
from jaxtrain.data.cleaning.filters import STEPS
from jaxtrain.data.cleaning.near_duplicates import Near
from jaxtrain.data.corpus import lengths
from jaxtrain.data.formats.conversations import FORMATS
from jaxtrain.data.prepare import job, on_slurm
from jaxtrain.data.prepare.dry_run import dry_run, rehearsed
from jaxtrain.data.prepare.engines import Engine
from jaxtrain.data.prepare.on_ray import Ray
from jaxtrain.data.prepare.prepare import counted, plan_tasks, prepare, prepare_part, summary, totals
from jaxtrain.data.prepare.tasks import Options
from jaxtrain.errors import UserError, tell
from jaxtrain.files.work_progress import Line
from jaxtrain.redaction import redacted


@command("stopped; run the same command to continue")
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 0: the corpus, or the part, is complete; 2: a user error, reported in one line."""
    flags = parse(argv)
    options = Options(flags.tokenizer, flags.eod, flags.text_field, flags.eval_fraction, flags.deduplicate,
                      flags.task_bytes, token_dtype=flags.token_dtype, bos="" if flags.bos == "none" else flags.bos,
                      format=flags.format, record_bytes=flags.record_bytes,
                      chat_template=flags.chat_template, train_on=flags.train_on,
                      eval_input=tuple(flags.eval_input),
                      steps=tuple(flags.filters), licence_of=flags.licence_of, describe=tuple(flags.describe),
                      near=Near(flags.near_threshold, flags.near_permutations, flags.near_shingle))
    if flags.dry_run:
        tasks, _, options = plan_tasks(flags.input, options)
        found = rehearsed(tasks, options, flags.sample)
        tell_json(found) if flags.json else tell(dry_run(found))
        return
    drawing = Path(flags.histogram).expanduser() if flags.histogram else None
    if drawing:
        lengths.check_drawing(drawing)
    if flags.engine == "slurm":
        tell(_script(flags, options, sys.argv[1:] if argv is None else argv))
        return
    began = time.monotonic()
    with Line(sys.stderr) as say:
        if flags.part or flags.stage != "tokens":
            prepare_part(flags.input, flags.output, options, flags.part, flags.stage, _engine(flags), say)
            return
        corpus = prepare(flags.input, flags.output, options, _engine(flags), say)
    if flags.json:
        tell_json({**counted(corpus), "seconds": time.monotonic() - began})
    else:
        tell(summary(corpus))
        tell(totals(corpus, time.monotonic() - began))
    if drawing:
        lengths.draw(corpus, drawing)


def _engine(flags: argparse.Namespace) -> int | Engine:
    if flags.engine == "ray":
        return Ray(flags.ray_address, flags.workers or 0)
    return flags.workers or job.cores()


def _script(flags: argparse.Namespace, options: Options, argv: Sequence[str]) -> str:
    """Return the script to submit, or write it to --script and return how to submit it."""
    if redacted(list(argv)) != list(argv):
        raise UserError("--engine", "the script would have the credentials of a URL in it",
                        "give them in the environment of the jobs, as the storage libraries read them")
    job.folder(flags.output)
    tasks, _, _ = plan_tasks(flags.input, options)  # so that mistakes are reported now
    parts = min(flags.parts or 16, len(tasks))
    script = on_slurm.render(_of_a_part(argv), parts, flags.workers or 1, flags.deduplicate)
    if not flags.script:
        return script.rstrip()
    try:
        Path(flags.script).expanduser().write_text(script)
    except OSError as error:
        raise UserError("--script", f"{flags.script} cannot be written ({error.strerror})", "name another file"
                        ) from error
    return f"bash {flags.script} submits {len(tasks):,} tasks"


def _of_a_part(argv: Sequence[str]) -> list[str]:
    """Return the flags without those that say how parts become jobs."""
    ours = Parser(add_help=False)
    for flag in ("--engine", "--parts", "--script", "--workers"):
        ours.add_argument(flag)
    return ours.parse_known_args(argv)[1]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the parsed flags."""
    parser = parser_of("prepare", __doc__)
    parser.add_argument("--input", nargs="+", default=[], help="files or folders: text, .jsonl[.gz|.zst], .parquet")
    parser.add_argument("--eval_input", nargs="+", default=[],
                        help="files or folders for evaluation; all of --input is then for training")
    parser.add_argument("--output", default="", help="folder of the corpus; pass it to a run as --config.data.source")
    parser.add_argument("--tokenizer", default=Options.tokenizer,
                        help="'bytes', 'characters' (of --input), or the path of a tokenizer.json, "
                        ".tiktoken[:SCHEME] or .model, or tiktoken:NAME")
    parser.add_argument("--eod", default="", help="token that ends a document; known for common vocabularies")
    parser.add_argument("--bos", default="none", help="token to put before each document, or none")
    parser.add_argument("--text_field", default=Options.field,
                        help="field of a JSON record or Parquet row that holds the text")
    parser.add_argument("--token_dtype", default="", help="dtype of token files without a header: uint16, uint32, ...")
    parser.add_argument("--format", default=Options.format, help=f"format of records: auto, {', '.join(FORMATS)}")
    parser.add_argument("--chat_template", default="", help=f"a jinja file, or {', '.join(BUILT_IN)}; default: the "
                        "tokenizer's own")
    parser.add_argument("--train_on", default=Options.train_on, help=f"turns to train on: {', '.join(TRAIN_ON)}")
    parser.add_argument("--eval_fraction", type=float, default=Options.eval_fraction,
                        help=f"share of documents held out for evaluation;  default: {Options.eval_fraction:g}")
    parser.add_argument("--filters", nargs="+", default=[],
                        help=f"filters: {', '.join(STEPS)}, module:function, datatrove:CLASS")
    parser.add_argument("--deduplicate", nargs="?", const="exact", default=False, choices=("exact", "near"),
                        help="keep only the first of equal or nearly equal documents")
    parser.add_argument("--near_threshold", type=float, default=Near.threshold,
                        help="near duplicates: Jaccard similarity of shingles from which documents count as equal")
    parser.add_argument("--near_permutations", type=int, default=Near.permutations,
                        help="near duplicates: permutations per MinHash signature")
    parser.add_argument("--near_shingle", type=int, default=Near.shingle, help="near duplicates: words per shingle")
    parser.add_argument("--licence_of", default="",
                        help="licence of the input (SPDX), or record:FIELD to count the values of a field")
    parser.add_argument("--describe", nargs="+", default=[], metavar="KEY=VALUE",
                        help="further entries of the datasheet")
    parser.add_argument("--task_bytes", type=int, default=Options.task_bytes,
                        help="bytes of input per shard; default: 1/32 of the input, from 1 to 64 MiB")
    parser.add_argument("--record_bytes", type=int, default=Options.record_bytes,
                        help=f"drop longer lines of JSON, and tables that decompress to more; default: "
                        f"{Options.record_bytes}")
    parser.add_argument("--dry_run", action="store_true", help="only report what would be dropped or changed")
    parser.add_argument("--sample", type=int, default=0, help="number of documents in a dry run; default: all")
    parser.add_argument("--workers", type=int, help="tasks to run in parallel; default: number of cores")
    parser.add_argument("--engine", choices=["local", "ray", "slurm"], default="local",
                        help="where tasks run: local processes, a Ray cluster, or Slurm jobs of a script")
    parser.add_argument("--ray_address", default="", help="host:port of a cluster, 'auto', or 'local' for a new one")
    parser.add_argument("--parts", type=int, help="Slurm jobs to run in parallel, of --workers each; default: 16")
    parser.add_argument("--script", default="", help="file for the Slurm script; default: standard output")
    parser.add_argument("--part", default="",
                        help="K/N: run only every N-th task from K on; run once without it to finish")
    parser.add_argument("--stage", choices=["duplicates", "tokens"], default="tokens",
                        help="with --part: find duplicates (with --deduplicate), or tokenize")
    parser.add_argument("--histogram", help="write a histogram of document lengths to this PNG")
    add_json(parser, "print the counts of the corpus, or of a dry run, as a JSON object")
    parser.group("records and conversations", "text_field", "format", "chat_template", "train_on", "token_dtype")
    parser.group("cleaning", "filters", "deduplicate", "near_threshold", "near_permutations", "near_shingle",
                 "record_bytes", "dry_run", "sample")
    parser.group("datasheet", "licence_of", "describe", "histogram")
    parser.group("processes and machines", "workers", "task_bytes", "engine", "ray_address", "parts", "script", "part",
                 "stage")
    flags = parser.parse_args(argv)
    if not flags.input and not flags.eval_input:
        raise UserError("--input", "it is missing", "name files or folders, or give --eval_input")
    for name in ("workers", "parts"):
        if (number := getattr(flags, name)) is not None and number < 1:
            raise UserError(f"--{name}", f"{number} is not a positive number", "use 1 or more, or leave it out")
    for name, engine in (("ray_address", "ray"), ("parts", "slurm"), ("script", "slurm")):
        if getattr(flags, name) and flags.engine != engine:
            raise UserError(f"--{name}", f"--engine={flags.engine} has no such flag", f"add --engine={engine}")
    if flags.engine == "slurm" and (flags.part or flags.stage != "tokens"):
        raise UserError("--engine", "the script assigns the parts itself", "leave --part and --stage out")
    if flags.json and (flags.engine == "slurm" or flags.part or flags.stage != "tokens"):
        raise UserError("--json", "a script, or a part of a corpus, has no counts", "leave it out")
    if flags.sample < 0 or (flags.sample and not flags.dry_run):
        raise UserError("--sample", f"{flags.sample} has no use here", "give a positive number with --dry_run")
    if not flags.output and not flags.dry_run:
        raise UserError("--output", "it is missing", "name the folder for the corpus, or give --dry_run")
    return flags
