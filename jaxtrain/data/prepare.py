"""python -m jaxtrain.data.prepare --input=FILE_OR_FOLDER... --tokenizer=... --output=FOLDER: text to a corpus, once.

The work is a list of tasks that follows from the input alone (tasks.py). A kill costs the tasks that were under way,
the same command goes on, and the result is the same to the byte for any number of workers.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import engines, files, inputs, provenance
from jaxtrain.data.corpus import FORMAT, SPLITS, UNFINISHED, Corpus, open_corpus, read_manifest
from jaxtrain.data.dry_run import dry_run
from jaxtrain.data.duplicates import find_duplicates
from jaxtrain.data.filters import STEPS
from jaxtrain.data.near import Near
from jaxtrain.data.shards import dtype_of
from jaxtrain.data.steps import added, summed
from jaxtrain.data.tasks import ALIKE, Options, Task, read_ledger, tokenize_shard
from jaxtrain.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from jaxtrain.errors import Parser, UserError


def prepare(sources: Sequence[str], output: str | Path, options: Options, workers: int = 1,
            say: Any = lambda line: None) -> Corpus:
    """Make the corpus, or what of it is missing, and open it."""
    output = Path(output).expanduser()
    tokenizer = load_tokenizer(options.tokenizer, options.eod)
    tasks = inputs.find_tasks(sources, options.task_bytes)
    plan = files.digest(_plan(tasks, tokenizer, options))
    if (output / "manifest.json").exists():
        if read_manifest(output)["plan"] != plan:
            raise UserError("--output", f"{output} holds another corpus", "name another folder, or delete it")
        shutil.rmtree(output / UNFINISHED, ignore_errors=True)  # a kill came when all was done
        return open_corpus(output)
    if output.is_dir() and not (output / UNFINISHED).is_dir() and any(output.iterdir()):
        raise UserError("--output", f"{output} is not empty", "name another folder")
    try:
        (output / UNFINISHED).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--output", f"{output} cannot be written ({error.strerror})", "name another folder") from error
    if isinstance(tokenizer, JsonTokenizer):
        with files.written(output / "tokenizer.json") as file:
            file.write(tokenizer.content)
    if options.deduplicate:  # first, for what a task may keep depends on all others
        find_duplicates(tasks, output, options, plan, workers, say)
    started, done, total = time.monotonic(), 0, inputs.total_size(tasks)
    missing = [number for number, task in enumerate(tasks) if not read_ledger(output, number, task, plan)]
    kept = total - sum(piece.size for number in missing for piece in tasks[number])
    for number in engines.run(tokenize_shard, tasks, missing, output, options, plan, workers):
        done += sum(piece.size for piece in tasks[number])
        rate = max(1, done) / (time.monotonic() - started)
        say(f"{(kept + done) / max(1, total):6.1%}  {rate / 1e6:8.2f} MB/s  {(total - kept - done) / rate:8.0f} s left")
    _finish(output, tasks, plan, options, tokenizer)
    return open_corpus(output)


def _plan(tasks: Sequence[Task], tokenizer: Tokenizer, options: Options) -> dict[str, Any]:
    """All that the tokens depend on."""
    return {"format": FORMAT, "tokenizer": tokenizer.fingerprint, "options": options.identity(),
            "tasks": [[piece.identity() for piece in task] for task in tasks]}


def _finish(output: Path, tasks: Sequence[Task], plan: str, options: Options,
            tokenizer: Tokenizer) -> None:
    """Put all ledgers together as the manifest: with it the corpus is there."""
    ledgers = [read_ledger(output, number, task, plan) for number, task in enumerate(tasks)]
    if None in ledgers:
        raise UserError("--input", f"the input of task {ledgers.index(None)} changed while it was read", "run again")
    done: list[dict[str, Any]] = [ledger for ledger in ledgers if ledger]
    splits = {}
    for split in SPLITS:
        shards = [ledger["shards"][split] for ledger in done if ledger["shards"][split]["documents"]]
        splits[split] = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
        splits[split]["shards"] = shards
    manifest = {
        "format": FORMAT, "plan": plan,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint,
                      "eod": getattr(tokenizer, "eod_token", ""), "vocab_size": tokenizer.vocab_size},
        "options": options.identity(),
        "inputs": [[piece.identity() | ({"sha256": sha256} if sha256 else {})
                    for piece, sha256 in zip(task, ledger["stored"], strict=True)]
                   for task, ledger in zip(tasks, done, strict=True)],
        "left_out": added(ledger["left_out"] for ledger in done), "steps": _steps(options, done),
        "licences": _licences(options, done), "dtype": dtype_of(tokenizer).str, "splits": splits,
        "probes": [probe for ledger in done for probe in ledger["probes"]],
    }
    code = provenance.code()  # beside what identifies the data, which another commit may make as well
    for partial in output.glob("*.partial"):  # of those who were killed
        partial.unlink()
    files.sync(output)
    files.write_json(output / "manifest.json", manifest | {"code": code, "sha256": files.digest(manifest)})
    files.sync(output)
    shutil.rmtree(output / UNFINISHED)


def _steps(options: Options, ledgers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each step did, in order; the search for duplicates comes last."""
    steps = summed([ledger["steps"] for ledger in ledgers])
    if options.deduplicate:
        left_out = added(ledger["left_out"] for ledger in ledgers)
        removed = {reason: left_out[reason] for reason in ALIKE if reason in left_out}
        kept = sum(shard["documents"] for ledger in ledgers for shard in ledger["shards"].values())
        steps.append({"step": f"deduplicate={options.deduplicate}", "seen": kept + sum(removed.values()), "changed": 0,
                      "removed": removed})
    return steps


def _licences(options: Options, ledgers: list[dict[str, Any]]) -> dict[str, int]:
    """Documents that stayed, by licence, as far as it was told."""
    kept = sum(shard["documents"] for ledger in ledgers for shard in ledger["shards"].values())
    counted = added(ledger["licences"] for ledger in ledgers)
    return counted if options.licence_field else {options.licence_of: kept} if options.licence_of else {}


# ------------------------------------------------------------------------------------------------------ command line

def main(argv: list[str] | None = None) -> int:
    """Exit status 0: the corpus is complete; 2: the user's mistake, in one line."""
    try:
        flags = parse(argv)
        options = Options(flags.tokenizer, flags.eod, flags.field, flags.eval_fraction, flags.deduplicate,
                          flags.task_bytes, tuple(flags.steps),
                          Near(flags.near_threshold, flags.near_permutations, flags.near_shingle),
                          flags.licence_of, tuple(flags.describe))
        if flags.dry_run:
            print(dry_run(inputs.find_tasks(flags.input, options.task_bytes), options, flags.sample))
            return 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        terminal = sys.stderr.isatty()

        def say(line):
            print(line, end="\r" if terminal else "\n", file=sys.stderr, flush=True)

        corpus = prepare(flags.input, flags.output, options, flags.workers or cores, say)
        print(summary(corpus))
        return 0
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = Parser(prog="python -m jaxtrain.data.prepare")
    parser.add_argument("--input", nargs="+", required=True, help="files or folders: text, .jsonl[.gz|.zst], .parquet")
    parser.add_argument("--output", default="", help="the corpus; then give it to a run as --config.data.source")
    parser.add_argument("--tokenizer", default=Options.tokenizer, help="'bytes', or the path of a tokenizer.json")
    parser.add_argument("--eod", default="", help="the token that ends a document; found for well-known vocabularies")
    parser.add_argument("--field", default=Options.field, help="which field of a JSON record or Parquet row is text")
    parser.add_argument("--eval_fraction", type=float, default=Options.eval_fraction)
    parser.add_argument("--steps", nargs="+", default=[], help=f"{', '.join(STEPS)}, module:function, datatrove:CLASS")
    parser.add_argument("--deduplicate", nargs="?", const="exact", default=False, choices=("exact", "near"),
                        help="keep the first only of documents that are equal, or nearly")
    parser.add_argument("--near_threshold", type=float, default=Near.threshold, help="Jaccard similarity of shingles")
    parser.add_argument("--near_permutations", type=int, default=Near.permutations, help="of a signature")
    parser.add_argument("--near_shingle", type=int, default=Near.shingle, help="words of a shingle")
    parser.add_argument("--licence_of", default="", help="of the whole input (SPDX), or record:FIELD to count a field")
    parser.add_argument("--describe", nargs="+", default=[], metavar="KEY=VALUE", help="for the datasheet")
    parser.add_argument("--task_bytes", type=int, default=Options.task_bytes, help="input that makes one shard")
    parser.add_argument("--dry_run", action="store_true", help="write nothing; say what would be left out or changed")
    parser.add_argument("--sample", type=int, default=0, help="documents of a dry run, from all over; default: all")
    parser.add_argument("--workers", type=int, default=0, help="processes; default: all cores")
    flags = parser.parse_args(argv)
    if flags.workers < 0:
        raise UserError("--workers", f"{flags.workers} is no number of processes", "use 1 or more")
    if flags.sample < 0 or (flags.sample and not flags.dry_run):
        raise UserError("--sample", f"{flags.sample} is for nothing", "give a number of documents along with --dry_run")
    if not flags.output and not flags.dry_run:
        raise UserError("--output", "it is missing", "name the folder that the corpus shall be, or give --dry_run")
    return flags


def summary(corpus: Corpus) -> str:
    """Counts, and how long documents are."""
    lines = [f"{corpus.path}: tokenizer {corpus.tokenizer.name}, {corpus.tokenizer.vocab_size:,} ids"]
    for split in SPLITS:
        tokens: Any = getattr(corpus, split)
        lines.append(f"{split:<6}{tokens.num_documents:>14,} documents {tokens.num_tokens:>18,} tokens "
                     f"{tokens.num_bytes:>18,} bytes")
    manifest = read_manifest(corpus.path)
    lines += [f"changed: {step['changed']:,} ({step['step']})" for step in manifest.get("steps", ()) if step["changed"]]
    lines += [f"left out: {count:,} ({reason})" for reason, count in manifest["left_out"].items()]
    return "\n".join([*lines, histogram(corpus)])


def histogram(corpus: Corpus) -> str:
    """Documents by length, in powers of two."""
    lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(shard.offsets) for split in (corpus.train, corpus.eval)
                                                       for shard in split.shards)])
    if not len(lengths):
        return "no documents"
    powers = np.bincount(np.log2(lengths).astype(int))
    width = 40 / powers.max()
    return "\n".join(["documents by tokens"] + [f"{2**i:>12,}+ {count:>12,} {'#' * round(count * width)}"
                                                for i, count in enumerate(powers) if count])


if __name__ == "__main__":
    sys.exit(main())
