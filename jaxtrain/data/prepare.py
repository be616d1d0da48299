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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import engines, files, inputs
from jaxtrain.data.corpus import FORMAT, SPLITS, UNFINISHED, Corpus, open_corpus, read_manifest
from jaxtrain.data.duplicates import find_duplicates
from jaxtrain.data.shards import dtype_of
from jaxtrain.data.tasks import Options, Task, read_ledger, tokenize_shard
from jaxtrain.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from jaxtrain.errors import Parser, UserError


def prepare(sources: Sequence[str], output: str | Path, options: Options, workers: int = 1,
            say: Any = lambda line: None) -> Corpus:
    """Make the corpus, or what of it is missing, and open it."""
    output = Path(output).expanduser()
    tokenizer = load_tokenizer(options.tokenizer, options.eod)
    tasks = inputs.find_tasks(sources, options.task_bytes)
    plan = files.digest(_plan(tasks, tokenizer, options))
    if is_done(output, plan, FORMAT):
        return open_corpus(output)
    if isinstance(tokenizer, JsonTokenizer):
        with files.written(output / "tokenizer.json") as file:
            file.write(tokenizer.content)
    if options.deduplicate:  # first, for what a task may keep depends on all others
        say("looking for equal documents")
        find_duplicates(tasks, output, options, workers)
    _finish(output, tasks, plan, options, tokenizer, work(tokenize_shard, tasks, output, options, plan, workers, say))
    return open_corpus(output)


def is_done(output: Path, plan: str, format: str) -> bool:
    """Whether the output is complete; else it is a folder to work in, or an error says why not."""
    if (output / "manifest.json").exists():
        if read_manifest(output, format)["plan"] != plan:
            raise UserError("--output", f"{output} holds another corpus", "name another folder, or delete it")
        shutil.rmtree(output / UNFINISHED, ignore_errors=True)  # a kill came when all was done
        return True
    if output.is_dir() and not (output / UNFINISHED).is_dir() and any(output.iterdir()):
        raise UserError("--output", f"{output} is not empty", "name another folder")
    try:
        (output / UNFINISHED).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--output", f"{output} cannot be written ({error.strerror})", "name another folder") from error
    return False


def work(do: Any, tasks: Sequence[Task], output: Path, options: Any, plan: str, workers: int,
         say: Any) -> list[dict[str, Any]]:
    """Do what is missing of the tasks -> the ledgers of all."""
    missing = [number for number, task in enumerate(tasks) if not read_ledger(output, number, task, plan)]
    run(do, tasks, missing, output, options, plan, workers, say)
    ledgers = [read_ledger(output, number, task, plan) for number, task in enumerate(tasks)]
    if None in ledgers:
        raise UserError("--input", f"the input of task {ledgers.index(None)} changed while it was read", "run again")
    return [ledger for ledger in ledgers if ledger]


def run(do: Any, tasks: Sequence[Task], missing: Sequence[int], output: Path, options: Any, plan: str, workers: int,
        say: Any) -> None:
    """Do the missing tasks, and tell how it goes."""
    started, done, total = time.monotonic(), 0, inputs.total_size(tasks)
    kept = total - sum(piece.size for number in missing for piece in tasks[number])
    for number in engines.run(do, tasks, missing, output, options, plan, workers):
        done += sum(piece.size for piece in tasks[number])
        rate = max(1, done) / (time.monotonic() - started)
        say(f"{(kept + done) / max(1, total):6.1%}  {rate / 1e6:8.2f} MB/s  {(total - kept - done) / rate:8.0f} s left")


def _plan(tasks: Sequence[Task], tokenizer: Tokenizer, options: Options) -> dict[str, Any]:
    """All that the tokens depend on."""
    return {"format": FORMAT, "tokenizer": tokenizer.fingerprint, "options": options.identity(),
            "tasks": [[piece.identity() for piece in task] for task in tasks]}


def _finish(output: Path, tasks: Sequence[Task], plan: str, options: Options,
            tokenizer: Tokenizer, done: Sequence[dict[str, Any]]) -> None:
    """Put all ledgers together as the manifest."""
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
        "inputs": [[piece.identity() for piece in task] for task in tasks],
        "left_out": sum_left_out(done), "dtype": dtype_of(tokenizer).str, "splits": splits,
        "probes": [probe for ledger in done for probe in ledger["probes"]],
        "versions": {name: _version(name) for name in ("jaxtrain", "numpy", "tokenizers")},
    }
    complete(output, manifest)


def sum_left_out(ledgers: Sequence[dict[str, Any]]) -> dict[str, int]:
    """What all tasks together left out, by reason."""
    left_out: dict[str, int] = {}
    for ledger in ledgers:
        for reason, count in ledger["left_out"].items():
            left_out[reason] = left_out.get(reason, 0) + count
    return left_out


def complete(output: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest: with it the corpus is there."""
    for partial in output.glob("*.partial"):  # of those who were killed
        partial.unlink()
    files.sync(output)
    files.write_json(output / "manifest.json", manifest | {"sha256": files.digest(manifest)})
    files.sync(output)
    shutil.rmtree(output / UNFINISHED)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------------ command line

def main(argv: list[str] | None = None) -> int:
    """Exit status 0: the corpus is complete; 2: the user's mistake, in one line."""
    try:
        flags = parse(argv)
        options = Options(flags.tokenizer, flags.eod, flags.field, flags.eval_fraction, flags.deduplicate,
                          flags.task_bytes)
        terminal = sys.stderr.isatty()

        def say(line):
            print(line, end="\r" if terminal else "\n", file=sys.stderr, flush=True)

        corpus = prepare(flags.input, flags.output, options, flags.workers or cores(), say)
        print(summary(corpus))
        return 0
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = Parser(prog="python -m jaxtrain.data.prepare")
    parser.add_argument("--input", nargs="+", required=True, help="files or folders: text, .jsonl[.gz|.zst], .parquet")
    parser.add_argument("--output", required=True, help="the corpus; then give it to a run as --config.data.source")
    parser.add_argument("--tokenizer", default=Options.tokenizer, help="'bytes', or the path of a tokenizer.json")
    parser.add_argument("--eod", default="", help="the token that ends a document; found for well-known vocabularies")
    parser.add_argument("--field", default=Options.field, help="which field of a JSON record or Parquet row is text")
    parser.add_argument("--eval_fraction", type=float, default=Options.eval_fraction)
    parser.add_argument("--deduplicate", action="store_true", help="keep the first of equal documents only")
    parser.add_argument("--task_bytes", type=int, default=Options.task_bytes, help="input that makes one shard")
    parser.add_argument("--workers", type=int, default=0, help="processes; default: all cores")
    flags = parser.parse_args(argv)
    if flags.workers < 0:
        raise UserError("--workers", f"{flags.workers} is no number of processes", "use 1 or more")
    return flags


def summary(corpus: Corpus) -> str:
    """Counts, and how long documents are."""
    lines = [f"{corpus.path}: tokenizer {corpus.tokenizer.name}, {corpus.tokenizer.vocab_size:,} ids"]
    for split in SPLITS:
        tokens: Any = getattr(corpus, split)
        lines.append(f"{split:<6}{tokens.num_documents:>14,} documents {tokens.num_tokens:>18,} tokens "
                     f"{tokens.num_bytes:>18,} bytes")
    left_out = read_manifest(corpus.path)["left_out"]
    lines += [f"left out: {count:,} ({reason})" for reason, count in left_out.items()]
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
