"""Tokenise one task at a time: `tokenize_shard` writes its shards and, last, a ledger that records that it is done.

A task is a pure function of its arguments and the input's bytes and shares nothing else, so any engine can run it.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.data.chat.templates import TRAIN_ON, Chat
from jaxtrain.data.cleaning.cleaning_steps import Steps, identity, told
from jaxtrain.data.cleaning.near_duplicates import Near
from jaxtrain.data.corpus.corpus import SPLITS, UNFINISHED
from jaxtrain.data.corpus.open import check, trust
from jaxtrain.data.corpus.shard_writer import UNDESIRABLE, Origin, ShardWriter, dtype_of
from jaxtrain.data.formats import inputs, token_files
from jaxtrain.data.formats.conversations import FORMATS, Example
from jaxtrain.data.formats.inputs import Ids, Piece, Text, stamps
from jaxtrain.data.prepare import cleaned_store, provenance
from jaxtrain.data.tokenizers.tokenizer import Tokenizer, begun, encode_documents, load_tokenizer
from jaxtrain.errors import UserError, nearest
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import opened, read, read_json
from jaxtrain.redaction import redacted

Task = tuple[Piece, ...]
ALIKE = ("", "equal to another", "nearly equal to another")
TOGETHER = 256  # documents that a tokenizer or a chat template gets at a time
REASONS = 100  # why documents are dropped, that are told apart
TOGETHER_BYTES = 2**22  # of conversations: no further ones are added to these


@dataclass(frozen=True)
class Options:
    """The options that determine the tokens, besides the input."""

    tokenizer: str = "bytes"
    eod: str = ""  # the token that ends a document; "": a well-known one
    field: str = "text"  # of JSON records and Parquet
    eval_fraction: float = 0.005  # share of documents, chosen by their content
    deduplicate: bool | str = False  # keep only the first of equal documents: "exact" (or True), or also "near"
    task_bytes: int = 0  # of input per shard; 0: inputs.task_bytes_of
    token_dtype: str = ""  # for token files without a header
    bos: str = ""  # the token that begins a document; "": none
    steps: tuple[str, ...] = ()  # cleaning steps, in order; see cleaning_steps.py
    near: Near = dataclasses.field(default_factory=Near)  # the settings of "near"
    licence_of: str = ""  # the input's licence (SPDX), or record:FIELD
    describe: tuple[str, ...] = ()  # KEY=VALUE, for the datasheet
    format: str = "auto"  # of records: conversations.FORMATS; auto: that of the first one
    chat_template: str = ""  # a file, or a name in templates.BUILT_IN; "": the tokenizer's own
    train_on: str = "assistant"  # turns of conversations: assistant, last (the last of these), or all (everything)
    record_bytes: int = inputs.RECORD_BYTES  # a longer line of JSON is dropped
    eval_input: tuple[str, ...] = ()  # input for evaluation only; then all other input is for training only

    def __post_init__(self):
        for name in ("steps", "describe", "eval_input"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        object.__setattr__(self, "describe", redacted(tuple(self.describe)))  # the manifest has it
        if self.eval_input and self.eval_fraction == Options.eval_fraction:
            object.__setattr__(self, "eval_fraction", 0.0)
        if self.eval_input and self.eval_fraction:
            raise UserError("--eval_fraction", "with --eval_input, all of --input is for training", "leave one out")
        if not 0 <= self.eval_fraction < 1:
            raise UserError("--eval_fraction", f"{self.eval_fraction} is not between 0 and 1", "try 0.005")
        if self.task_bytes < 0:
            raise UserError("--task_bytes", f"{self.task_bytes} is too small", "use 67108864 or so")
        if self.record_bytes < 1:
            raise UserError("--record_bytes", f"{self.record_bytes} is too small", f"use {inputs.RECORD_BYTES} or so")
        if self.token_dtype and self.token_dtype not in token_files.TYPES:
            raise UserError("--token_dtype", f"{self.token_dtype!r} is not a token type",
                            nearest(self.token_dtype, token_files.TYPES))
        if self.deduplicate is True:
            object.__setattr__(self, "deduplicate", "exact")
        if self.deduplicate not in (False, "exact", "near"):
            raise UserError("--deduplicate", f"{self.deduplicate!r} is not known", "use exact or near")
        if self.near != Near() and self.deduplicate != "near":
            name = next(key for key, value in asdict(self.near).items() if value != getattr(Near(), key))
            raise UserError(f"--near_{name}", "it has no effect without --deduplicate=near",
                            "add --deduplicate=near, or leave it out")
        if self.format not in ("auto", *FORMATS):
            raise UserError("--format", f"there is no format {self.format!r}", nearest(self.format, FORMATS))
        if self.train_on not in TRAIN_ON:
            raise UserError("--train_on", f"{self.train_on!r} is not known", nearest(self.train_on, TRAIN_ON))
        if self.format in ("preference", "labelled") and self.train_on == "all":
            raise UserError("--train_on", "it would also train on the prompts of preferences",
                            "use --train_on=assistant")
        for name in ("chat_template", "train_on"):
            if self.format == "text" and getattr(self, name) != getattr(Options, name):
                raise UserError(f"--{name}", "it is for conversations, and the input is text", "leave it out, or say "
                                "the format of records with --format")
        if self.format not in ("auto", "text") and self.steps:
            raise UserError("--filters", f"they read text, and --format={self.format} has conversations",
                            "clean them beforehand, or leave the steps out")
        if self.format not in ("auto", "text") and self.bos:
            raise UserError("--bos", "the chat template determines how a conversation begins", "leave it out")
        provenance.described(self.describe)

    def identity(self) -> JsonObject:
        """Return what the tasks, the tokenizer's fingerprint and the template's identity do not cover."""
        plain = {key: value for key, value in asdict(self).items() if key not in
                ("tokenizer", "eod", "bos", "task_bytes", "token_dtype", "chat_template", "eval_input")
                 and (key != "train_on" or self.format != "text")
                 and (key != "record_bytes" or value != Options.record_bytes)}
        near = self.near.identity() if self.deduplicate == "near" else None
        return plain | {"steps": [identity(name) for name in self.steps], "near": near, "describe": list(self.describe)}

    @property
    def masked(self) -> bool:
        """Whether some of the tokens are only context, without a loss."""
        return self.format != "text" and self.train_on != "all"

    @property
    def licence_field(self) -> str:
        """The field of a record that holds its licence, or an empty string."""
        return self.licence_of.removeprefix("record:") if self.licence_of.startswith("record:") else ""


def tokenize_shard(number: int, task: Task, output: str | Path, options: Options, plan: str) -> int:
    """Write the shards of both splits, then their ledger; `plan` identifies all that the tokens depend on."""
    output = Path(output)
    if read(output / UNFINISHED / "plan").decode().split("\n")[0] != plan:  # the folder was begun again, or never
        raise UserError("--output", f"another command began in {output}", "name another folder")
    tokenizer, chat = loaded(options.tokenizer, options.eod, options.bos), chat_of(options)
    writers = {split: ShardWriter(output / f"{split}-{number:05}", dtype_of(tokenizer), tokenizer.eod, options.masked)
               for split in SPLITS}
    before = stamps(task)
    offer, left_out, counts, by = _to_tokenize(number, task, output, options, plan, chat)
    licences: dict[str, int] = {}  # counts documents, so a preference counts twice
    probes: list[dict[str, Any]] = []
    batch: list[tuple[Text, Origin]] = []

    def add(found: Text | Ids, ids: np.ndarray, key: bytes, num_bytes: int, origin: Origin,
            trained: np.ndarray | None = None):
        if options.licence_field:
            licence = found.record.get(options.licence_field) if isinstance(found, Text) else None
            _count(licences, str(licence or "not told"))
        chosen = "eval" if int.from_bytes(key[:8]) < options.eval_fraction * 2**64 else "train"
        into = task[origin.piece].split or chosen
        writers[into].add(ids, key, num_bytes, origin, trained)

    def flush():
        if chat:
            found = chat.encode_many([text.content for text, _ in batch])
            for (text, origin), documents in zip(batch, found, strict=True):
                if isinstance(documents, str):
                    _count(left_out, documents)
                    continue
                bad = options.format == "labelled" and not Example.from_bytes(text.content).desirable
                for one in documents:  # the chosen one and the rejected one, if it is a preference
                    add(text, one.ids, chat_key(text.content), one.num_bytes, origin,
                        one.trained * np.uint8(UNDESIRABLE) if bad else one.trained)
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

    compared = _verdicts(output, number) if options.deduplicate else ()
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
    """Return documents, counts of those dropped so far, counts of each step, and the digests of the files used.

    After a search for duplicates with cleaning steps, the documents come from the store.
    """
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
    """Return digests of the files that options name, as this worker sees them, by flag; without the tokenizer."""
    return {"--chat_template": atomic_files.digest(chat and chat.identity()),
            "--filters": atomic_files.digest([told(name) for name in options.steps])}


def offered(task: Task, options: Options, left_out: dict[str, int], steps: Steps,
            chat: Chat | None) -> Iterator[tuple[Text | Ids, Origin]]:
    """Yield a task's documents with their origins, before all steps; unusable ones are counted in `left_out`."""
    tokenizer = loaded(options.tokenizer, options.eod, options.bos)
    dtype = dtype_of(tokenizer)
    beside = sorted({*steps.fields, *filter(None, [options.licence_field])})
    for number, piece in enumerate(task):
        with inputs.readable(piece.path):
            read = inputs.read(piece, options.field, tokenizer.eod, beside, options.format, options.record_bytes)
            for found, refusal in _with_refusals(read, chat):
                found = _checked(found, tokenizer, dtype) if isinstance(found, Ids) else found
                reason = found.partition(": ")[2] if isinstance(found, str) else refusal
                if not isinstance(found, str) and not len(found.content if isinstance(found, Text) else found.ids):
                    reason = "empty"
                if reason:
                    _count(left_out, reason)
                elif not isinstance(found, str):
                    yield found, Origin(number, found.place)


def _with_refusals(read: Iterable[Text | Ids | str], chat: Chat | None) -> Iterator[tuple[Text | Ids | str, str]]:
    """Yield what was read, each with why the chat template refuses it, or ""; templates take many at a time."""
    if not chat:
        yield from zip(read, itertools.repeat(""))
        return
    for some in _gathered(read):
        reasons = iter(chat.refuse_many([one.content for one in some if isinstance(one, Text)]))
        yield from [(one, next(reasons) if isinstance(one, Text) else "") for one in some]


def _gathered(read: Iterable[Text | Ids | str]) -> Iterator[list[Text | Ids | str]]:
    """Yield documents in groups of at most `TOGETHER`, and of little more than `TOGETHER_BYTES`."""
    some: list[Text | Ids | str] = []
    size = 0
    for one in read:
        some.append(one)
        size += len(one.content) if isinstance(one, Text) else 0
        if len(some) == TOGETHER or size > TOGETHER_BYTES:
            yield some
            some, size = [], 0
    yield some


def documents(task: Task, options: Options, left_out: dict[str, int], steps: Steps,
              chat: Chat | None) -> Iterator[tuple[Text | Ids, Origin]]:
    """Yield a task's documents after all steps; those dropped are counted."""
    for found, origin in offered(task, options, left_out, steps, chat):
        clean = steps(found)
        if isinstance(clean, str):
            _count(left_out, clean)
        else:
            yield clean, origin


def _count(counts: dict[str, int], what: str) -> None:
    if what not in counts and len(counts) >= REASONS:  # a chat template may give each record a reason of its own
        what = "other reasons"
    counts[what] = counts.get(what, 0) + 1


def key_of(document: Text | Ids) -> bytes:
    """Return a hash of a document's content."""
    return inputs.content_hash(document.content if isinstance(document, Text) else document.ids.data)


def _checked(found: Ids, tokenizer: Tokenizer, dtype: np.dtype) -> Ids:
    """Check ids that were tokenised elsewhere against the vocabulary, and convert them to one dtype.

    With one dtype equal documents have equal keys. A leading begin-of-document id is removed, because it is added
    later.
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
    """Return the key that decides the split of an example: equal for equal prompts, if there is a prompt."""
    prompt = Example.from_bytes(content).prompt
    return inputs.content_hash(json.dumps(prompt).encode() if prompt else content)


def chat_of(options: Options) -> Chat | None:
    """Return the encoder of conversations, or None for text."""
    if options.format == "text":
        return None
    return Chat(loaded(options.tokenizer, options.eod, options.bos), options.chat_template, options.train_on)


@functools.cache
def loaded(name: str, eod: str, bos: str) -> Tokenizer:
    """Load a tokenizer, once per process."""
    return load_tokenizer(name, eod, bos)


def verdicts_path(output: Path, number: int) -> Path:
    """Return the path of a task's verdicts: 0 (kept), 1 (equal to an earlier one) or 2 (nearly equal) per document."""
    return output / UNFINISHED / f"{number:05}.verdicts.npy"


def _verdicts(output: Path, number: int) -> np.ndarray:
    with opened(verdicts_path(output, number)) as file:
        return np.load(file)


def _verdicts_digest(output: Path, number: int) -> str | None:
    path = verdicts_path(output, number)
    return atomic_files.file_digest(path) if path.exists() else None


def _ledger_path(output: Path, number: int) -> Path:
    return output / UNFINISHED / f"{number:05}.json"


def write_ledger(output: Path, number: int, plan: str, before: list[Json], shards: dict[str, JsonObject],
                 more: JsonObject) -> None:
    """Record that a task is done: its shards, and the input's stamps `before` it was read."""
    for name, sha256 in [pair for shard in shards.values() for pair in shard["sha256"].items()]:
        trust(output / name, sha256)
    shards = {split: {"task": number} | shard for split, shard in shards.items()}
    atomic_files.write_json(_ledger_path(output, number), {
        "plan": plan, "task": before, "verdicts": _verdicts_digest(output, number), "shards": shards, **more})


def read_ledger(output: Path, number: int, task: Task, plan: str) -> JsonObject | None:
    """Return the ledger of a task if it is done and its files and input have not changed since; else None."""
    try:
        form = {"plan": str, "task": list, "verdicts": str | None, "shards": {str: {"sha256": {str: str}}}}
        ledger = read_json(_ledger_path(output, number), form)
        now = plan, stamps(task), _verdicts_digest(output, number)
        if (ledger["plan"], ledger["task"], ledger["verdicts"]) != now:
            return None
        for shard in ledger["shards"].values():
            for name, sha256 in shard["sha256"].items():
                check(output / name, sha256)
    except (OSError, ValueError):  # such as a UserError
        return None
    return ledger
