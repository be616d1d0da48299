"""One task at a time: `tokenize_shard` makes the shards of a task and, last, their ledger, which says they are done.

A task is a pure function of its arguments and the input's bytes; nothing else is shared, so that any engine can run it.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.chat.templates import TRAIN_ON, Chat
from jaxtrain.data.cleaning.cleaning_steps import Steps, identity, told
from jaxtrain.data.cleaning.near_duplicates import Near
from jaxtrain.data.corpus import atomic_files
from jaxtrain.data.corpus.corpus import SPLITS, UNFINISHED
from jaxtrain.data.corpus.open import check, trust
from jaxtrain.data.corpus.shard_writer import Origin, ShardWriter, dtype_of
from jaxtrain.data.formats import inputs, token_files
from jaxtrain.data.formats.conversations import FORMATS, Example
from jaxtrain.data.formats.inputs import Ids, Piece, Text, stamps
from jaxtrain.data.prepare import cleaned_store, provenance
from jaxtrain.data.tokenizers.tokenizer import Tokenizer, begun, encode_documents, load_tokenizer
from jaxtrain.errors import UserError, nearest

Task = tuple[Piece, ...]
ALIKE = ("", "equal to another", "nearly equal to another")
TOGETHER = 256  # documents that a tokenizer gets at a time


@dataclass(frozen=True)
class Options:
    """What decides about the tokens, beside the input."""

    tokenizer: str = "bytes"
    eod: str = ""  # the token that ends a document; "": a well-known one
    field: str = "text"  # of JSON records and Parquet
    eval_fraction: float = 0.005  # of the documents, chosen by their content
    deduplicate: bool | str = False  # keep the first only of documents that are equal: "exact" (or True), or "near"
    task_bytes: int = 2**26  # of input that make one shard
    token_dtype: str = ""  # of files of tokens that do not say it
    bos: str = ""  # the token that begins a document; "": none does
    steps: tuple[str, ...] = ()  # that clean, in order; see steps.py
    near: Near = dataclasses.field(default_factory=Near)  # what "near" means
    licence_of: str = ""  # of the whole input (SPDX), or record:FIELD
    describe: tuple[str, ...] = ()  # KEY=VALUE, for the datasheet
    format: str = "auto"  # of records: conversations.FORMATS; auto: what the first one looks like
    chat_template: str = ""  # a file, or a name of chat.BUILT_IN; "": what lies beside the tokenizer
    train_on: str = "assistant"  # turns of conversations: assistant, last (the last of these), or all (everything)

    def __post_init__(self):
        for name in ("steps", "describe"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        if not 0 <= self.eval_fraction < 1:
            raise UserError("--eval_fraction", f"{self.eval_fraction} is not between 0 and 1", "try 0.005")
        if self.task_bytes < 1:
            raise UserError("--task_bytes", f"{self.task_bytes} is no size", "use 67108864 or so")
        if self.token_dtype and self.token_dtype not in token_files.TYPES:
            raise UserError("--token_dtype", f"{self.token_dtype!r} is no type of tokens",
                            nearest(self.token_dtype, token_files.TYPES))
        if self.deduplicate is True:
            object.__setattr__(self, "deduplicate", "exact")
        if self.deduplicate not in (False, "exact", "near"):
            raise UserError("--deduplicate", f"{self.deduplicate!r} is not known", "use exact or near")
        if self.near != Near() and self.deduplicate != "near":
            name = next(key for key, value in asdict(self.near).items() if value != getattr(Near(), key))
            raise UserError(f"--near_{name}", "it says how documents are nearly equal, and nobody asked for that",
                            "add --deduplicate=near, or leave it out")
        if self.format not in ("auto", *FORMATS):
            raise UserError("--format", f"there is no format {self.format!r}", nearest(self.format, FORMATS))
        if self.train_on not in TRAIN_ON:
            raise UserError("--train_on", f"{self.train_on!r} is nobody", nearest(self.train_on, TRAIN_ON))
        if (self.format, self.train_on) == ("preference", "all"):
            raise UserError("--train_on", "where prompts are learnt, too, nothing tells them from what was preferred",
                            "use --train_on=assistant")
        for name in ("chat_template", "train_on"):
            if self.format == "text" and getattr(self, name) != getattr(Options, name):
                raise UserError(f"--{name}", "it is for conversations, and the input is text", "leave it out, or say "
                                "with --format what records are")
        if self.format not in ("auto", "text") and self.steps:
            raise UserError("--steps", f"they read text, and --format={self.format} has conversations",
                            "clean them beforehand, or leave the steps out")
        if self.format not in ("auto", "text") and self.bos:
            raise UserError("--bos", "the chat template says what begins a conversation", "leave it out")
        provenance.described(self.describe)

    def identity(self) -> dict[str, Any]:
        """What is not told by the tasks, the tokenizer's fingerprint and the template's identity."""
        plain = {key: value for key, value in asdict(self).items() if key not in
                ("tokenizer", "eod", "bos", "task_bytes", "token_dtype", "chat_template")
                 and (key != "train_on" or self.format != "text")}
        near = self.near.identity() if self.deduplicate == "near" else None
        return plain | {"steps": [identity(name) for name in self.steps], "near": near, "describe": list(self.describe)}

    @property
    def masked(self) -> bool:
        """Whether part of the tokens is read only."""
        return self.format != "text" and self.train_on != "all"

    @property
    def licence_field(self) -> str:
        """Which field of a record tells its licence."""
        return self.licence_of.removeprefix("record:") if self.licence_of.startswith("record:") else ""


def tokenize_shard(number: int, task: Task, output: str | Path, options: Options, plan: str) -> int:
    """Make the shards of both splits, then their ledger. `plan` identifies all that the tokens depend on."""
    output = Path(output)
    if (output / UNFINISHED / "plan").read_text().split("\n")[0] != plan:  # begun again since, or never
        raise UserError("--output", f"another command began in {output}", "name another folder")
    tokenizer, chat = loaded(options.tokenizer, options.eod, options.bos), chat_of(options)
    writers = {split: ShardWriter(output / f"{split}-{number:05}", dtype_of(tokenizer), tokenizer.eod, options.masked)
               for split in SPLITS}
    before = stamps(task)
    offer, left_out, counts, by = _to_tokenize(number, task, output, options, plan, chat)
    licences: dict[str, int] = {}  # of documents, so a preference counts twice
    probes: list[dict[str, Any]] = []
    batch: list[tuple[Text, Origin]] = []

    def add(found: Text | Ids, ids: np.ndarray, key: bytes, num_bytes: int, origin: Origin,
            trained: np.ndarray | None = None):
        if options.licence_field:
            licence = found.record.get(options.licence_field) if isinstance(found, Text) else None
            _count(licences, str(licence or "not told"))
        into = "eval" if int.from_bytes(key[:8]) < options.eval_fraction * 2**64 else "train"
        writers[into].add(ids, key, num_bytes, origin, trained)

    def flush():
        if chat:
            found = chat.encode_many([text.content for text, _ in batch])
            for (text, origin), documents in zip(batch, found, strict=True):
                if isinstance(documents, str):
                    _count(left_out, documents)
                    continue
                for one in documents:  # the chosen one and the rejected one, if it is a preference
                    add(text, one.ids, chat_key(text.content), one.num_bytes, origin, one.trained)
                if len(probes) < 2 and number < 4:
                    probes.append(chat.probe(text.content))
            batch.clear()
            return
        encoded = encode_documents([text.content for text, _ in batch], tokenizer)
        for (text, origin), ids in zip(batch, encoded, strict=True):
            add(text, ids, key_of(text), len(text.content), origin)
            if len(probes) < 2 and number < 4 and len(ids):
                head = text.content.decode(errors="replace")[:200]
                probes.append({"text": head, "ids": encode_documents([head.encode()], tokenizer)[0].tolist()})
        batch.clear()

    compared = np.load(verdicts_path(output, number)) if options.deduplicate else ()
    verdicts = iter(compared) if options.deduplicate else itertools.repeat(0)
    for found, origin in offer:
        if (verdict := next(verdicts, None)) is None:
            raise UserError("--input", f"{task[-1].path} changed while it was read", "run again")
        if verdict:
            _count(left_out, ALIKE[verdict])
            continue
        if isinstance(found, Ids):
            add(found, begun(found.ids, tokenizer), key_of(found), tokenizer.count_bytes(found.ids), origin)
        else:
            batch.append((found, origin))
            if len(batch) == TOGETHER:
                flush()
    flush()
    if options.deduplicate and next(verdicts, None) is not None:
        raise UserError("--input", f"{task[-1].path} changed while it was read", "run again")
    write_ledger(output, number, plan, before, {split: writer.close() for split, writer in writers.items()}, {
        "tokenizer": tokenizer.fingerprint, "left_out": left_out, "probes": probes, "steps": counts,
        "licences": licences, "compared": len(compared), "by": by,
        "stored": [provenance.digest(piece) for piece in task]})
    return number


def _to_tokenize(number: int, task: Task, output: Path, options: Options, plan: str, chat: Chat | None):
    """-> documents, what was left out so far, what each step did, and by what: at hand after a comparison."""
    by = [made_by(options, chat)]
    if options.deduplicate:
        if (note := cleaned_store.read_note(output, number, task, plan)) is None:
            raise UserError("--input", f"{task[-1].path} changed while it was read", "run again")
        by.append(note["by"])
        if options.steps:
            return cleaned_store.read(output, number), note["left_out"], note["steps"], by
    left_out, steps = {}, Steps(options.steps)
    return documents(task, options, left_out, steps, chat), left_out, steps.counts, by


def made_by(options: Options, chat: Chat | None) -> dict[str, str]:
    """What a worker sees of the files that options name, beside the tokenizer: by flag."""
    return {"--chat_template": atomic_files.digest(chat and chat.identity()),
            "--steps": atomic_files.digest([told(name) for name in options.steps])}


def offered(task: Task, options: Options, left_out: dict[str, int], steps: Steps,
            chat: Chat | None) -> Iterator[tuple[Text | Ids, Origin]]:
    """What a task has, and where each document comes from, before all steps; what cannot be used is counted."""
    tokenizer = loaded(options.tokenizer, options.eod, options.bos)
    dtype = dtype_of(tokenizer)
    beside = sorted({*steps.fields, *filter(None, [options.licence_field])})
    for number, piece in enumerate(task):
        with inputs.readable(piece.path):
            for found in inputs.read(piece, options.field, tokenizer.eod, beside, options.format):
                found = _checked(found, tokenizer, dtype) if isinstance(found, Ids) else found
                reason = found.partition(": ")[2] if isinstance(found, str) else ""
                if not isinstance(found, str) and not len(found.content if isinstance(found, Text) else found.ids):
                    reason = "empty"
                if chat and isinstance(found, Text):
                    reason = chat.refuses(found.content)
                if reason:
                    _count(left_out, reason)
                elif not isinstance(found, str):
                    yield found, Origin(number, found.place)


def documents(task: Task, options: Options, left_out: dict[str, int], steps: Steps,
              chat: Chat | None) -> Iterator[tuple[Text | Ids, Origin]]:
    """What is there after all steps; what they leave out is counted."""
    for found, origin in offered(task, options, left_out, steps, chat):
        clean = steps(found)
        if isinstance(clean, str):
            _count(left_out, clean)
        else:
            yield clean, origin


def _count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1


def key_of(document: Text | Ids) -> bytes:
    """Equal for equal documents."""
    return inputs.content_hash(document.content if isinstance(document, Text) else document.ids.data)


def _checked(found: Ids, tokenizer: Tokenizer, dtype: np.dtype) -> Ids:
    """A document that was tokenised elsewhere: of this vocabulary, and in one type, so that equal ones are equal.

    What begins it is taken away, for that is put there by us.
    """
    ids = found.ids
    if len(ids) and (ids.max() >= tokenizer.vocab_size or (ids.dtype.kind == "i" and ids.min() < 0)):
        worst = ids.max() if ids.max() >= tokenizer.vocab_size else ids.min()
        raise UserError("--tokenizer", f"{found.name} has id {worst} (document at {found.place}) and "
                        f"{tokenizer.name} has only {tokenizer.vocab_size}",
                        "name the tokenizer that the tokens were made with")
    ids = ids[1:] if len(ids) and ids[0] == tokenizer.bos else ids
    return Ids(found.name, ids.astype(dtype, copy=False), found.place)


def chat_key(content: bytes) -> bytes:
    """Decides about the split: equal for equal prompts, where there are some."""
    prompt = Example.from_bytes(content).prompt
    return inputs.content_hash(json.dumps(prompt).encode() if prompt else content)


def chat_of(options: Options) -> Chat | None:
    """What makes ids of conversations, if they are any."""
    if options.format == "text":
        return None
    return Chat(loaded(options.tokenizer, options.eod, options.bos), options.chat_template, options.train_on)


@functools.cache
def loaded(name: str, eod: str, bos: str) -> Tokenizer:
    """Once a process."""
    return load_tokenizer(name, eod, bos)


def verdicts_path(output: Path, number: int) -> Path:
    """Which of a task's documents are like an earlier one (1: equal, 2: nearly), and which stay (0)."""
    return output / UNFINISHED / f"{number:05}.verdicts.npy"


def _verdicts_digest(output: Path, number: int) -> str | None:
    path = verdicts_path(output, number)
    return atomic_files.file_digest(path) if path.exists() else None


def _ledger_path(output: Path, number: int) -> Path:
    return output / UNFINISHED / f"{number:05}.json"


def write_ledger(output: Path, number: int, plan: str, before: list[Any], shards: dict[str, dict[str, Any]],
                 more: dict[str, Any]) -> None:
    """Say that a task is done: what it made, and from what (`before` it was read: inputs.stamps)."""
    for name, sha256 in [pair for shard in shards.values() for pair in shard["sha256"].items()]:
        trust(output / name, sha256)
    shards = {split: {"task": number} | shard for split, shard in shards.items()}
    atomic_files.write_json(_ledger_path(output, number), {
        "plan": plan, "task": before, "verdicts": _verdicts_digest(output, number), "shards": shards, **more})


def read_ledger(output: Path, number: int, task: Task, plan: str) -> dict[str, Any] | None:
    """The ledger of a task that is done and whose files and input are still what they were; else None."""
    try:
        ledger = json.loads(_ledger_path(output, number).read_bytes())
        now = plan, stamps(task), _verdicts_digest(output, number)
        if (ledger["plan"], ledger["task"], ledger["verdicts"]) != now:
            return None
        for shard in ledger["shards"].values():
            for name, sha256 in shard["sha256"].items():
                check(output / name, sha256)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
    return ledger
