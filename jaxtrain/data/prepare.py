"""python -m jaxtrain.data.prepare --input=FILE_OR_FOLDER... --tokenizer=... --output=FOLDER: text to a corpus, once.

The work is a list of tasks that follows from the input alone. Each makes one shard, and its ledger is written last: so
a kill costs the tasks that were under way, the same command goes on, and the result is the same to the byte for any
number of workers. `tokenize_task` is all that another engine has to call.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import files, inputs
from jaxtrain.data.corpus import FORMAT, SPLITS, UNFINISHED, Corpus, check, open_corpus, read_manifest
from jaxtrain.data.inputs import Ids, Piece, Text
from jaxtrain.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from jaxtrain.errors import Parser, UserError

TOGETHER = 256  # documents that a tokenizer gets at a time


@dataclass(frozen=True)
class Options:
    """What decides about the tokens, beside the input."""

    tokenizer: str = "bytes"
    eod: str = ""  # the token that ends a document; "": a well-known one
    field: str = "text"  # of JSON records and Parquet
    eval_fraction: float = 0.005  # of the documents, chosen by their content
    deduplicate: bool = False  # keep the first of equal documents only
    task_bytes: int = 2**26  # of input that make one shard

    def __post_init__(self):
        if not 0 <= self.eval_fraction < 1:
            raise UserError("--eval_fraction", f"{self.eval_fraction} is not between 0 and 1", "try 0.005")
        if self.task_bytes < 1:
            raise UserError("--task_bytes", f"{self.task_bytes} is no size", "use 67108864 or so")


def prepare(sources: Sequence[str], output: str | Path, options: Options, workers: int = 1,
            say: Any = lambda line: None) -> Corpus:
    """Make the corpus, or what of it is missing, and open it."""
    output = Path(output).expanduser()
    tokenizer = load_tokenizer(options.tokenizer, options.eod)
    tasks = inputs.find_tasks(sources, options.task_bytes)
    plan = _plan(tasks, tokenizer, options)
    if (output / "manifest.json").exists():
        if read_manifest(output)["plan"] != files.digest(plan):
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
        _deduplicate(tasks, output, options, workers)
    missing = [number for number, task in enumerate(tasks) if not _ledger(output, number, task, plan)]
    kept = total - sum(piece.size for number in missing for piece in tasks[number])
    for number in _run(tokenize_task, tasks, missing, output, options, plan, workers):
        done += sum(piece.size for piece in tasks[number])
        rate = max(1, done) / (time.monotonic() - started)
        say(f"{(kept + done) / max(1, total):6.1%}  {rate / 1e6:8.2f} MB/s  {(total - kept - done) / rate:8.0f} s left")
    _finish(output, tasks, plan, options, tokenizer)
    return open_corpus(output)


def _plan(tasks: Sequence[tuple[Piece, ...]], tokenizer: Tokenizer, options: Options) -> dict[str, Any]:
    """All that the tokens depend on."""
    return {"format": FORMAT, "tokenizer": tokenizer.fingerprint, "field": options.field,
            "eval_fraction": options.eval_fraction, "deduplicate": options.deduplicate,
            "tasks": [[piece.identity() for piece in task] for task in tasks]}


def _run(do: Callable[..., int], tasks: Sequence[tuple[Piece, ...]], missing: Sequence[int], output: Path,
         options: Options, plan: dict[str, Any], workers: int) -> Iterator[int]:
    """Do the tasks; yields the number of each that is done."""
    plan_hash = files.digest(plan)
    if workers == 1 or len(missing) < 2:
        for number in missing:
            yield do(number, tasks[number], output, options, plan_hash)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(workers, len(missing)), mp_context=context) as pool:
        futures = [pool.submit(do, number, tasks[number], output, options, plan_hash) for number in missing]
        try:
            for future in concurrent.futures.as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def tokenize_task(number: int, task: tuple[Piece, ...], output: str | Path, options: Options, plan: str) -> int:
    """One task: shards of both splits, then their ledger. A pure function of its arguments and the input's bytes."""
    output = Path(output)
    tokenizer = _loaded(options.tokenizer, options.eod)
    writers = {split: _Writer(output / f"{split}-{number:05}", tokenizer) for split in SPLITS}
    left_out: dict[str, int] = {}
    probes: list[dict[str, Any]] = []
    batch: list[Text] = []

    def add(content: bytes, ids: np.ndarray, key: bytes):
        into = "eval" if int.from_bytes(key[:8]) < options.eval_fraction * 2**64 else "train"
        writers[into].add(content, ids, key)

    def flush():
        for text, ids in zip(batch, tokenizer.encode_many([text.content for text in batch]), strict=True):
            add(text.content, ids, _key(text))
            if len(probes) < 2 and number < 4 and len(ids):
                head = text.content.decode(errors="replace")[:200]
                probes.append({"text": head, "ids": tokenizer.encode(head.encode()).tolist()})
        batch.clear()

    keep = np.load(_keep_path(output, number)) if options.deduplicate else None
    for i, found in enumerate(_documents(task, options, left_out)):
        if keep is not None and i >= len(keep):
            raise UserError("--input", f"{task[-1].path} changed while it was read", "run again")
        if keep is not None and not keep[i]:
            left_out["equal to another"] = left_out.get("equal to another", 0) + 1
        elif isinstance(found, Ids):
            ids = _without_end(found, tokenizer)
            add(tokenizer.decode(ids).encode(), ids, _key(found))
        else:
            batch.append(found)
            if len(batch) == TOGETHER:
                flush()
    flush()
    shards = {split: writer.close() for split, writer in writers.items()}
    files.write_json(_ledger_path(output, number), {
        "plan": plan, "task": [[piece.identity(), _stamp(piece)] for piece in task], "shards": shards,
        "keep": _keep_digest(output, number), "left_out": left_out, "probes": probes})
    return number


def _documents(task: tuple[Piece, ...], options: Options, left_out: dict[str, int]) -> Iterator[Text | Ids]:
    """What a task has to offer; what it has not is counted."""
    for piece in task:
        try:
            for found in inputs.read(piece, options.field):
                reason = found.partition(": ")[2] if isinstance(found, str) else ""
                if isinstance(found, Text) and not found.content:
                    reason = "empty"
                if reason:
                    left_out[reason] = left_out.get(reason, 0) + 1
                elif not isinstance(found, str):
                    yield found
        except (OSError, EOFError, zlib.error) as error:
            raise UserError("--input", f"{piece.path} cannot be read ({error})", "replace the file") from error


def _key(document: Text | Ids) -> bytes:
    """Equal for equal documents."""
    return inputs.content_hash(document.content if isinstance(document, Text) else document.ids.tobytes())


def _deduplicate(tasks: Sequence[tuple[Piece, ...]], output: Path, options: Options, workers: int) -> None:
    """Say of each task's documents which are the first of their kind, in the order of the input."""
    for _ in _run(hash_task, tasks, range(len(tasks)), output, options, {}, workers):
        pass
    keys = [np.load(_keys_path(output, number)) for number in range(len(tasks))]
    flat = np.concatenate([np.zeros(0, "V16"), *keys])
    first = np.zeros(len(flat), bool)
    first[np.unique(flat, return_index=True)[1]] = True
    for number, keep in enumerate(np.split(first, np.cumsum([len(some) for some in keys])[:-1])):
        with files.written(_keep_path(output, number)) as file:
            np.save(file, keep)


def hash_task(number: int, task: tuple[Piece, ...], output: str | Path, options: Options, plan: str) -> int:
    """The keys of a task's documents, in order."""
    keys = b"".join(map(_key, _documents(task, options, {})))
    with files.written(_keys_path(Path(output), number)) as file:
        np.save(file, np.frombuffer(keys, "V16"))
    return number


def _keys_path(output: Path, number: int) -> Path:
    return output / UNFINISHED / f"{number:05}.keys.npy"


def _keep_path(output: Path, number: int) -> Path:
    return output / UNFINISHED / f"{number:05}.keep.npy"


def _keep_digest(output: Path, number: int) -> str | None:
    path = _keep_path(output, number)
    return files.file_digest(path) if path.exists() else None


def _without_end(document: Ids, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a document that was tokenised elsewhere, which may have brought its end along."""
    ids = document.ids[:-1] if len(document.ids) and document.ids[-1] == tokenizer.eod else document.ids
    if len(ids) and ids.max() >= tokenizer.vocab_size:
        raise UserError("--tokenizer", f"{document.name} has id {ids.max()} and {tokenizer.name} has only "
                        f"{tokenizer.vocab_size}", "name the tokenizer that the tokens were made with")
    return ids


_TOKENIZER: dict[tuple[str, str], Tokenizer] = {}


def _loaded(name: str, eod: str) -> Tokenizer:
    """Once a process."""
    if (name, eod) not in _TOKENIZER:
        _TOKENIZER[name, eod] = load_tokenizer(name, eod)
    return _TOKENIZER[name, eod]


class _Writer:
    """One shard under way: documents go to disk as they come."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self.path, self.eod = path, tokenizer.eod
        self.dtype = dtype_of(tokenizer)
        self.lengths: list[int] = []
        self.keys: list[bytes] = []
        self.bytes = 0
        self.context = files.written(path.with_suffix(".bin"))
        self.file = self.context.__enter__()

    def add(self, content: bytes, ids: np.ndarray, key: bytes) -> None:
        """One document."""
        self.file.write(np.append(ids, self.eod).astype(self.dtype).tobytes())
        self.lengths.append(len(ids) + 1)
        self.keys.append(key)
        self.bytes += len(content)

    def close(self) -> dict[str, Any]:
        """-> the shard's entry in the manifest."""
        self.context.__exit__(None, None, None)
        with files.written(self.path.with_name(f"{self.path.name}.offsets.npy")) as file:
            np.save(file, np.cumsum([0, *self.lengths], dtype="<i8"))
        with files.written(self.path.with_name(f"{self.path.name}.keys.npy")) as file:
            np.save(file, np.frombuffer(b"".join(self.keys), np.uint8).reshape(-1, 16))
        names = [f"{self.path.name}{end}" for end in (".bin", ".offsets.npy", ".keys.npy")]
        return {"name": self.path.name, "documents": len(self.lengths), "tokens": sum(self.lengths),
                "bytes": self.bytes, "sha256": {name: files.file_digest(self.path.with_name(name)) for name in names}}


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """The narrowest that holds every id."""
    return np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<")


def _ledger_path(output: Path, number: int) -> Path:
    return output / UNFINISHED / f"{number:05}.json"


def _stamp(piece: Piece) -> int:
    return Path(piece.path).stat().st_mtime_ns


def _ledger(output: Path, number: int, task: tuple[Piece, ...], plan: dict[str, Any]) -> dict[str, Any] | None:
    """The ledger of a task that is done and whose files and input are still what they were; else None."""
    try:
        ledger = json.loads(_ledger_path(output, number).read_bytes())
        now = files.digest(plan), [[p.identity(), _stamp(p)] for p in task], _keep_digest(output, number)
        if (ledger["plan"], ledger["task"], ledger["keep"]) != now:
            return None
        for shard in ledger["shards"].values():
            for name, sha256 in shard["sha256"].items():
                check(output / name, sha256)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
    return ledger


def _finish(output: Path, tasks: Sequence[tuple[Piece, ...]], plan: dict[str, Any], options: Options,
            tokenizer: Tokenizer) -> None:
    """Put all ledgers together as the manifest: with it the corpus is there."""
    ledgers = [_ledger(output, number, task, plan) for number, task in enumerate(tasks)]
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
    manifest = {
        "format": FORMAT, "plan": files.digest(plan),
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint,
                      "eod": getattr(tokenizer, "eod_token", ""), "vocab_size": tokenizer.vocab_size},
        "options": {"field": options.field, "eval_fraction": options.eval_fraction,
                    "deduplicate": options.deduplicate},
        "inputs": [piece.identity() for task in tasks for piece in task],
        "left_out": left_out, "dtype": dtype_of(tokenizer).str, "splits": splits,
        "probes": [probe for ledger in done for probe in ledger["probes"]],
        "versions": {name: _version(name) for name in ("jaxtrain", "numpy", "tokenizers")},
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
                          flags.task_bytes)
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
