"""One task at a time: `tokenize_shard` makes the shards of a task and, last, their ledger, which says they are done.

A task is a pure function of its arguments and the input's bytes; nothing else is shared, so that any engine can run it.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import files, inputs
from jaxtrain.data.corpus import SPLITS, UNFINISHED, check
from jaxtrain.data.inputs import Ids, Piece, Text
from jaxtrain.data.shards import Origin, ShardWriter, dtype_of
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import UserError

Task = tuple[Piece, ...]
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

    def identity(self) -> dict[str, Any]:
        """What is not told by the tasks and the tokenizer's fingerprint."""
        return {key: value for key, value in asdict(self).items() if key not in ("tokenizer", "eod", "task_bytes")}


def tokenize_shard(number: int, task: Task, output: str | Path, options: Options, plan: str) -> int:
    """Make the shards of both splits, then their ledger. `plan` identifies all that the tokens depend on."""
    output = Path(output)
    tokenizer = _loaded(options.tokenizer, options.eod)
    writers = {split: ShardWriter(output / f"{split}-{number:05}", dtype_of(tokenizer), tokenizer.eod)
               for split in SPLITS}
    left_out: dict[str, int] = {}
    probes: list[dict[str, Any]] = []
    batch: list[tuple[Text, Origin]] = []

    def add(ids: np.ndarray, key: bytes, num_bytes: int, origin: Origin):
        into = "eval" if int.from_bytes(key[:8]) < options.eval_fraction * 2**64 else "train"
        writers[into].add(ids, key, num_bytes, origin)

    def flush():
        encoded = tokenizer.encode_many([text.content for text, _ in batch])
        for (text, origin), ids in zip(batch, encoded, strict=True):
            add(ids, key_of(text), len(text.content), origin)
            if len(probes) < 2 and number < 4 and len(ids):
                head = text.content.decode(errors="replace")[:200]
                probes.append({"text": head, "ids": tokenizer.encode(head.encode()).tolist()})
        batch.clear()

    keep = np.load(keep_path(output, number)) if options.deduplicate else None
    for i, (found, origin) in enumerate(documents(task, options, left_out)):
        if keep is not None and i >= len(keep):
            raise UserError("--input", f"{task[-1].path} changed while it was read", "run again")
        if keep is not None and not keep[i]:
            left_out["equal to another"] = left_out.get("equal to another", 0) + 1
        elif isinstance(found, Ids):
            ids = _without_end(found, tokenizer)
            add(ids, key_of(found), len(tokenizer.decode(ids).encode()), origin)
        else:
            batch.append((found, origin))
            if len(batch) == TOGETHER:
                flush()
    flush()
    shards = {split: {"task": number} | writer.close() for split, writer in writers.items()}
    write_ledger(output, number, task, plan, {"shards": shards, "left_out": left_out, "probes": probes})
    return number


def documents(task: Task, options: Options, left_out: dict[str, int]) -> Iterator[tuple[Text | Ids, Origin]]:
    """What a task has to offer, and where each document comes from; what it has not is counted."""
    for number, piece in enumerate(task):
        try:
            for found in inputs.read(piece, options.field):
                reason = found.partition(": ")[2] if isinstance(found, str) else ""
                if isinstance(found, Text) and not found.content:
                    reason = "empty"
                if reason:
                    left_out[reason] = left_out.get(reason, 0) + 1
                elif not isinstance(found, str):
                    yield found, Origin(number, found.place)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError("--input", f"{piece.path} cannot be read ({error})", "replace the file") from error


def key_of(document: Text | Ids) -> bytes:
    """Equal for equal documents."""
    return inputs.content_hash(document.content if isinstance(document, Text) else document.ids.tobytes())


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


def keep_path(output: Path, number: int) -> Path:
    """Which of a task's documents stay."""
    return output / UNFINISHED / f"{number:05}.keep.npy"


def _keep_digest(output: Path, number: int) -> str | None:
    path = keep_path(output, number)
    return files.file_digest(path) if path.exists() else None


def _ledger_path(output: Path, number: int) -> Path:
    return output / UNFINISHED / f"{number:05}.json"


def _stamp(piece: Piece) -> int:
    return Path(piece.path).stat().st_mtime_ns


def write_ledger(output: Path, number: int, task: Task, plan: str, made: dict[str, Any]) -> None:
    """Say that a task is done: what it made, and from what."""
    files.write_json(_ledger_path(output, number), {
        "plan": plan, "task": [[piece.identity(), _stamp(piece)] for piece in task],
        "keep": _keep_digest(output, number), **made})


def read_ledger(output: Path, number: int, task: Task, plan: str) -> dict[str, Any] | None:
    """The ledger of a task that is done and whose files and input are still what they were; else None."""
    try:
        ledger = json.loads(_ledger_path(output, number).read_bytes())
        now = plan, [[p.identity(), _stamp(p)] for p in task], _keep_digest(output, number)
        if (ledger["plan"], ledger["task"], ledger["keep"]) != now:
            return None
        for shard in ledger["shards"].values():
            for name, sha256 in shard["sha256"].items():
                check(output / name, sha256)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
    return ledger
