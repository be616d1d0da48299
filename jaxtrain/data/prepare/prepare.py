"""Make a corpus of text in tasks, so that one which is killed loses only the running ones.

The result has the same bytes for any number of workers and any engine."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.chat.templates import refuse_useless_masks
from jaxtrain.data.cleaning.cleaning_steps import added, summed
from jaxtrain.data.corpus import lengths
from jaxtrain.data.corpus.corpus import SPLITS, Corpus
from jaxtrain.data.corpus.open import FORMAT, open_corpus, read_manifest
from jaxtrain.data.corpus.shard_writer import dtype_of
from jaxtrain.data.formats import inputs
from jaxtrain.data.prepare import job, provenance
from jaxtrain.data.prepare.character_vocabulary import tokenizer_of
from jaxtrain.data.prepare.duplicates import find_duplicates, sign_documents
from jaxtrain.data.prepare.engines import Engine
from jaxtrain.data.prepare.tasks import ALIKE, Options, Task, chat_of, loaded, made_by, tokenize_shard, verdicts_path
from jaxtrain.data.tokenizers import characters
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.data.tokenizers.tokenizer_folder import record_of
from jaxtrain.data.tokenizers.vocabulary import Vocabulary
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files


def prepare(sources: Sequence[str], output: str | Path, options: Options, workers: int | Engine = 1,
            say: Callable[[str], None] = lambda line: None) -> Corpus:
    """Make the corpus, or only its missing part, and open it; `workers` is a number of processes or an engine."""
    output = job.folder(output)
    tasks, plan, options = plan_tasks(sources, options)
    with _begun(output, options, plan) as anything_left:
        if anything_left:
            if options.deduplicate:  # first, because what a task keeps depends on all others
                find_duplicates(tasks, output, options, plan, workers, say)
            tokenize(tasks, range(len(tasks)), output, options, plan, workers, say)
            _finish(output, tasks, plan, options, loaded(options.tokenizer, options.eod, options.bos))
        else:
            _refuse_other_input(output, tasks)
    return open_corpus(output)


def prepare_part(sources: Sequence[str], output: str | Path, options: Options, part: str = "", stage: str = "tokens",
                 workers: int | Engine = 1, say: Callable[[str], None] = lambda line: None) -> None:
    """Do part "K/N" of a stage: every N-th task from K on; `prepare` then does what is missing, and the manifest.

    Parts share only the folder, so they may run at once, twice, or not at all. Stage "duplicates" comes first, if
    needed; without a part it combines what its parts found.
    """
    output = job.folder(output)
    number, parts = _numbers(part) if part else (0, 1)
    if stage == "duplicates" and not options.deduplicate:
        raise UserError("--stage", "documents are compared with --deduplicate only", "add it, or leave --stage out")
    tasks, plan, options = plan_tasks(sources, options)
    mine = range(number, len(tasks), parts)
    with _begun(output, options, plan, alone=False) as anything_left:
        if not anything_left:
            return
        try:
            if stage == "tokens":
                if options.deduplicate and not all(verdicts_path(output, number).exists() for number in mine):
                    raise UserError("--part", "duplicates have not been searched yet",
                                    "run --stage=duplicates first")
                tokenize(tasks, mine, output, options, plan, workers, say)
            elif part:
                sign_documents(tasks, mine, output, options, plan, workers, say)
            else:
                find_duplicates(tasks, output, options, plan, workers, say)
        except FileNotFoundError:
            if not (output / "manifest.json").exists():  # else, without locks, another process finished it all
                raise


def _numbers(part: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    if not found or int(found[1]) >= int(found[2]):
        many = int(found[2]) if found and int(found[2]) else 16
        raise UserError("--part", f"{part!r} is not one of {many} parts, which are numbered from 0",
                        f"write 0/{many} to {many - 1}/{many}")
    return int(found[1]), int(found[2])


def plan_tasks(sources: Sequence[str], options: Options) -> tuple[list[Task], str, Options]:
    """Return the tasks, a hash of all that their tokens depend on, and the options with every default resolved.

    Tasks and options are those that `tokenize_shard` takes.
    """
    loaded.cache_clear()  # its file may have changed since this process made another corpus
    tasks = _tasks(sources, options)
    if options.token_dtype and not any(piece.kind.startswith("tokens") for task in tasks for piece in task):
        raise UserError("--token_dtype", "the input has no files of tokens", "leave it out")
    options = resolved(options, tasks)
    if options.tokenizer == characters.NAME:
        options = replace(options, tokenizer=tokenizer_of(tasks, options))
    tokenizer = loaded(options.tokenizer, options.eod, options.bos)
    return tasks, atomic_files.digest(_plan(tasks, tokenizer, options)), options


def _tasks(sources: Sequence[str], options: Options) -> list[Task]:
    """Return the tasks of the input, then those of the evaluation input; no task has pieces of both."""
    sources = [sources] if isinstance(sources, str) else sources
    size = options.task_bytes or inputs.task_bytes_of([*sources, *options.eval_input])
    tasks = inputs.find_tasks(sources, size, options.token_dtype) if sources or not options.eval_input else []
    if not options.eval_input:
        return tasks
    trained = {os.path.realpath(piece.path) for task in tasks for piece in task}
    apart = inputs.find_tasks(options.eval_input, size, options.token_dtype)
    for piece in (piece for task in apart for piece in task):
        if os.path.realpath(piece.path) in trained:
            raise UserError("--eval_input", f"{piece.path} is also a part of --input", "name it only once")
    return [*tasks, *(tuple(replace(piece, split="eval") for piece in task) for task in apart)]


def resolved(options: Options, tasks: Sequence[Task]) -> Options:
    """Return the options with "auto" replaced by the format of the first record."""
    if options.format != "auto":
        return options
    return replace(options, format=inputs.find_format(tasks, options.field, options.record_bytes))


def begin(output: str | Path, options: Options, plan: str) -> bool:
    """Create the output folder, which must be empty; return whether there is anything left to do. It is not locked."""
    with _begun(job.folder(output), options, plan, alone=False) as anything_left:
        return anything_left


@contextmanager
def _begun(output: Path, options: Options, plan: str, alone: bool = True) -> Iterator[bool]:
    with job.begun(output, plan, FORMAT, alone) as anything_left:
        tokenizer = loaded(options.tokenizer, options.eod, options.bos)
        if anything_left and isinstance(tokenizer, Vocabulary):
            with atomic_files.written(output / tokenizer.file) as file:
                file.write(tokenizer.content)
        yield anything_left


def tokenize(tasks: Sequence[Task], numbers: Sequence[int], output: Path, options: Options, plan: str,
             workers: int | Engine, say: Callable[[str], None]) -> None:
    """Do those of the tasks that are not done."""
    missing = job.missing(tasks, numbers, output, plan)
    job.run("tokens", tokenize_shard, tasks, missing, output, options, plan, workers, say, numbers)


def _plan(tasks: Sequence[Task], tokenizer: Tokenizer, options: Options) -> JsonObject:
    """Return all that the tokens depend on."""
    chat = chat_of(options)
    return {"format": FORMAT, "tokenizer": tokenizer.fingerprint, "options": options.identity(),
            "chat": chat and chat.identity(),
            "tasks": [[piece.identity() for piece in task] for task in tasks]}


def _finish(output: Path, tasks: Sequence[Task], plan: str, options: Options,
            tokenizer: Tokenizer) -> None:
    """Combine all ledgers into the manifest, which completes the corpus."""
    chat = chat_of(options)
    done = job.ledgers(tasks, output, plan)
    for ledger in done:
        if ledger["tokenizer"] != tokenizer.fingerprint:
            raise UserError("--tokenizer", f"{options.tokenizer} differs between machines, or was changed meanwhile",
                            f"make it the same everywhere, delete {output} and run again")
    now = made_by(options, chat)
    changed = [flag for ledger in done for by in ledger["by"] for flag in by
               if by[flag] != now.get(flag, now["--filters"])]  # --steps, in those of before
    if not changed and atomic_files.digest(_plan(tasks, tokenizer, options)) != plan:
        changed = ["--chat_template" if chat else "--filters"]  # changed before the first task
    if changed:
        raise UserError(changed[0], "its files differ between machines, or were changed meanwhile",
                        f"make it the same everywhere, delete {output} and run again")
    splits = {}
    for split in SPLITS:
        shards = [ledger["shards"][split] for ledger in done if ledger["shards"][split]["documents"]]
        splits[split] = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
        splits[split]["shards"] = shards
    if options.masked:
        refuse_useless_masks(splits, added(ledger["left_out"] for ledger in done))
    if not any(entry["documents"] for entry in splits.values()):
        why = "; ".join(f"{count} were dropped: {reason}" for reason, count in added(
            ledger["left_out"] for ledger in done).items() if count)
        raise UserError("--input", f"none of its documents can be used{f' ({why})' * bool(why)}",
                        "give text in UTF-8, JSON lines or Parquet (docs/data-formats.md)")
    manifest = {
        "format": FORMAT, "plan": plan,
        "tokenizer": record_of(tokenizer) | {"sha256": hashlib.sha256(getattr(tokenizer, "content", b"")).hexdigest()},
        "options": options.identity(), "chat": chat and chat.identity(),
        "inputs": [[piece.identity() | ({"sha256": sha256} if sha256 else {})
                    for piece, sha256 in zip(task, ledger["stored"], strict=True)]
                   for task, ledger in zip(tasks, done, strict=True)],
        "left_out": added(ledger["left_out"] for ledger in done), "steps": _steps(options, done),
        "licences": _licences(options, done), "dtype": dtype_of(tokenizer).str, "splits": splits,
        "probes": [probe for ledger in done for probe in ledger["probes"]],
    }
    job.complete(output, manifest, provenance.code(), stamps=_stamps(tasks))


def _stamps(tasks: Sequence[Task]) -> str:
    """Return a hash that changes if any input file is changed or touched."""
    return atomic_files.digest([inputs.stamps(task) for task in tasks])


def _refuse_other_input(output: Path, tasks: Sequence[Task]) -> None:
    """Raise a UserError if the input's content has changed; it is hashed only if the files were touched.

    The plan covers only names and sizes.
    """
    manifest = read_manifest(output)
    if manifest.get("stamps") == _stamps(tasks):
        return
    for task, made in zip(tasks, manifest["inputs"], strict=True):
        for piece, entry in zip(task, made, strict=True):
            if provenance.digest(piece) != entry.get("sha256"):
                raise UserError("--input", f"{piece.path} is not what {output} was made from",
                                "delete that to make it again, or name another folder")


def _steps(options: Options, ledgers: list[JsonObject]) -> list[JsonObject]:
    """Return what each step did, in order; the search for duplicates comes last."""
    steps = summed([ledger["steps"] for ledger in ledgers])
    if options.deduplicate:
        left_out = added(ledger["left_out"] for ledger in ledgers)
        removed = {reason: left_out[reason] for reason in ALIKE if reason in left_out}
        seen = sum(ledger["compared"] for ledger in ledgers)
        steps.append({"step": f"deduplicate={options.deduplicate}", "seen": seen, "changed": 0, "removed": removed})
    return steps


def _licences(options: Options, ledgers: list[JsonObject]) -> dict[str, int]:
    """Return the number of kept documents by licence, as far as it is known."""
    kept = sum(shard["documents"] for ledger in ledgers for shard in ledger["shards"].values())
    counted = added(ledger["licences"] for ledger in ledgers)
    return counted if options.licence_field else {options.licence_of: kept} if options.licence_of else {}


def totals(corpus: Corpus, seconds: float) -> str:
    """Return the documents, tokens and bytes of all splits together, and the time this command took, as one line."""
    counts = [sum(getattr(getattr(corpus, split), key) for split in SPLITS)
              for key in ("num_documents", "num_tokens", "num_bytes")]
    return "total: {:,} documents, {:,} tokens, {:,} bytes in {:,.1f} s".format(*counts, seconds)


def counted(corpus: Corpus) -> JsonObject:
    """Return the corpus's counts, as scripts read them."""
    manifest = read_manifest(corpus.path)
    return {"path": f"{corpus.path}", "tokenizer": corpus.tokenizer.name, "vocab_size": corpus.tokenizer.vocab_size,
            "splits": {split: {key: getattr(getattr(corpus, split), f"num_{key}")
                               for key in ("documents", "tokens", "bytes")} for split in SPLITS},
            "left_out": manifest["left_out"], "steps": [*manifest.get("steps", ())]}


def summary(corpus: Corpus) -> str:
    """Return the corpus's counts and its histogram of document lengths as text."""
    lines = [f"{corpus.path}: tokenizer {corpus.tokenizer.name}, {corpus.tokenizer.vocab_size:,} ids"]
    for split in SPLITS:
        tokens: Any = getattr(corpus, split)
        lines.append(f"{split:<6}{tokens.num_documents:>14,} documents {tokens.num_tokens:>18,} tokens "
                     f"{tokens.num_bytes:>18,} bytes")
    if not corpus.eval.num_documents:
        lines.append("the eval split is empty, so runs will not evaluate: give a larger --eval_fraction, "
                     "or --eval_input")
    if not corpus.train.num_documents:
        lines.append("the train split is empty, so runs can only evaluate on it: give --input, or put it into a "
                     "data.mixture")
    manifest = read_manifest(corpus.path)
    if manifest["chat"] and (tokens := corpus.train.num_tokens + corpus.eval.num_tokens):
        learnt = sum(shard.get("learnt", shard["tokens"]) for split in SPLITS
                     for shard in manifest["splits"][split]["shards"])
        lines.append(f"format {manifest['options']['format']}, chat template {manifest['chat']['name'] or 'none'}: "
                     f"{learnt / tokens:.1%} of the tokens are trained on")
    lines += [f"changed: {step['changed']:,} ({step['step']})" for step in manifest.get("steps", ()) if step["changed"]]
    lines += [f"dropped: {count:,} ({reason})" for reason, count in manifest["left_out"].items()]
    return "\n".join([*lines, lengths.histogram(corpus)])
