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
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import engines, files, inputs
from jaxtrain.data.chat import BUILT_IN, TRAIN_ON, Chat, refuse_useless_masks
from jaxtrain.data.conversations import FORMATS
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
    if options.format == "auto":
        options = replace(options, format=inputs.find_format(tasks, options.field))
    chat = Chat(tokenizer, options.chat_template, options.train_on) if options.format != "text" else None
    plan = files.digest(_plan(tasks, tokenizer, options, chat))
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
    started, done, total = time.monotonic(), 0, inputs.total_size(tasks)
    if options.deduplicate:  # first, for what a task may keep depends on all others
        say("looking for equal documents")
        find_duplicates(tasks, output, options, workers)
    missing = [number for number, task in enumerate(tasks) if not read_ledger(output, number, task, plan)]
    kept = total - sum(piece.size for number in missing for piece in tasks[number])
    for number in engines.run(tokenize_shard, tasks, missing, output, options, plan, workers):
        done += sum(piece.size for piece in tasks[number])
        rate = max(1, done) / (time.monotonic() - started)
        say(f"{(kept + done) / max(1, total):6.1%}  {rate / 1e6:8.2f} MB/s  {(total - kept - done) / rate:8.0f} s left")
    _finish(output, tasks, plan, options, tokenizer, chat)
    return open_corpus(output)


def _plan(tasks: Sequence[Task], tokenizer: Tokenizer, options: Options, chat: Chat | None) -> dict[str, Any]:
    """All that the tokens depend on."""
    return {"format": FORMAT, "tokenizer": tokenizer.fingerprint, "options": options.identity(),
            "chat": chat and chat.identity(),
            "tasks": [[piece.identity() for piece in task] for task in tasks]}


def _finish(output: Path, tasks: Sequence[Task], plan: str, options: Options,
            tokenizer: Tokenizer, chat: Chat | None) -> None:
    """Put all ledgers together as the manifest: with it the corpus is there."""
    ledgers = [read_ledger(output, number, task, plan) for number, task in enumerate(tasks)]
    if None in ledgers:
        raise UserError("--input", f"the input of task {ledgers.index(None)} changed while it was read", "run again")
    done: list[dict[str, Any]] = [ledger for ledger in ledgers if ledger]
    left_out: dict[str, int] = {}
    for ledger in done:
        for reason, count in ledger["left_out"].items():
            left_out[reason] = left_out.get(reason, 0) + count
    splits = {}
    for split in SPLITS:
        shards = [ledger["shards"][split] for ledger in done if ledger["shards"][split]["documents"]]
        splits[split] = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
        splits[split]["shards"] = shards
    if options.masked:
        refuse_useless_masks(splits, left_out)
    manifest = {
        "format": FORMAT, "plan": plan,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint,
                      "eod": getattr(tokenizer, "eod_token", ""), "vocab_size": tokenizer.vocab_size},
        "options": options.identity(), "chat": chat and chat.identity(),
        "inputs": [[piece.identity() for piece in task] for task in tasks],
        "left_out": left_out, "dtype": dtype_of(tokenizer).str, "splits": splits,
        "probes": [probe for ledger in done for probe in ledger["probes"]],
        "versions": {name: _version(name) for name in ("jaxtrain", "numpy", "tokenizers", "jinja2")},
    }
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
                          flags.task_bytes, flags.format, flags.chat_template, flags.train_on)
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
    parser.add_argument("--output", required=True, help="the corpus; then give it to a run as --config.data.source")
    parser.add_argument("--tokenizer", default=Options.tokenizer, help="'bytes', or the path of a tokenizer.json")
    parser.add_argument("--eod", default="", help="the token that ends a document; found for well-known vocabularies")
    parser.add_argument("--field", default=Options.field, help="which field of a JSON record or Parquet row is text")
    parser.add_argument("--format", default=Options.format, help=f"of records: auto, {', '.join(FORMATS)}")
    parser.add_argument("--chat_template", default="", help=f"a jinja file, or {', '.join(BUILT_IN)}; default: the "
                        "one beside the tokenizer")
    parser.add_argument("--train_on", default=Options.train_on, help=f"turns that are learnt: {', '.join(TRAIN_ON)}")
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
    manifest = read_manifest(corpus.path)
    if manifest["chat"]:
        learnt = sum(shard.get("learnt", shard["tokens"]) for split in SPLITS
                     for shard in manifest["splits"][split]["shards"])
        lines.append(f"format {manifest['options']['format']}, chat template {manifest['chat']['name'] or 'none'}: "
                     f"{learnt / (corpus.train.num_tokens + corpus.eval.num_tokens):.1%} of the tokens are learnt")
    left_out = manifest["left_out"]
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
