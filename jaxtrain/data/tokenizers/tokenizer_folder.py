"""Keep a tokenizer in a folder of its own, such as WORKDIR/tokenizer, from where `load_tokenizer` opens it again."""

import json
from pathlib import Path

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.tokenizers.characters import CharacterTokenizer
from jaxtrain.data.tokenizers.tokenizer import RECORD, Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files


def record_of(tokenizer: Tokenizer) -> JsonObject:
    """Return what identifies a tokenizer, and what its file leaves open: the tokens around documents."""
    listed = {"characters": tokenizer.characters} if isinstance(tokenizer, CharacterTokenizer) else {}
    return {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size,
            "file": getattr(tokenizer, "file", ""), "eod": getattr(tokenizer, "eod_token", ""),
            "bos": getattr(tokenizer, "bos_token", ""), **listed}


CHAT = "chat.json"  # the chat template that the data was prepared with, and its special tokens


def save(tokenizer: Tokenizer, folder: str | Path, chat: JsonObject | None = None) -> None:
    """Write the tokenizer's file and its record into a folder, unless they are there already; and a chat template."""
    folder, record = Path(folder), json.dumps(record_of(tokenizer), indent=2) + "\n"
    if chat:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_files.write_json(folder / CHAT, chat)
    try:
        if bounded_files.read(folder / RECORD) == record.encode():
            return
    except OSError:  # there is none yet, or it is written anew
        pass
    try:
        _write(tokenizer, folder, record)
    except OSError as error:
        raise UserError("--workdir", f"{folder} cannot be written ({error.strerror})",
                        "give a folder that can be") from None


def _write(tokenizer: Tokenizer, folder: Path, record: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if content := getattr(tokenizer, "content", b""):
        with atomic_files.written(folder / record_of(tokenizer)["file"]) as file:
            file.write(content)
    atomic_files.write(folder / RECORD, record)  # last: it says that the file is whole
