"""What tokenizers that come in a file have in common: its content, and the tokens that begin and end a document."""

import os
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxtrain.errors import UserError

# What ends a document in well-known vocabularies, the likeliest first.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Vocabulary:
    """The base of tokenizers that come in a file."""

    name: str  # for people
    vocab_size: int
    file: str  # what the file is called in a corpus: enough to open it again
    content: bytes  # of the file
    fingerprint: str
    eod: int
    eod_token: str
    bos: int | None
    bos_token: str
    specials: Mapping[str, int] = MappingProxyType({})  # tokens that stand for no text, where it is known

    def settle(self, path: str | Path, sha256: str, eod: str, bos: str, ends: Iterable[str] = ENDS) -> None:
        """Find what ends and begins documents; `sha256` stands for all else that the ids depend on."""
        self.eod_token, self.eod = self._first(path, "--eod", [eod] if eod else list(ends), "end")
        self.bos_token, self.bos = self._first(path, "--bos", [bos], "begin") if bos else ("", None)
        begins = f"{bos} begins and " if bos else ""
        self.fingerprint = f"{self.file} {sha256}: {begins}{self.eod_token} ends a document"

    def _first(self, path: str | Path, flag: str, tokens: Sequence[str], what: str) -> tuple[str, int]:
        for token in tokens:
            if (id := self.id_of(token)) is not None:
                return token, id
        lacks = f"token {tokens[0]!r}" if len(tokens) == 1 else f"token to {what} a document with"
        asked = "" if len(tokens) == 1 else f" (none of {', '.join(tokens)})"
        raise UserError("data.tokenizer", f"{path} has no {lacks}{asked}", f"name one of its tokens with {flag}")

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """The id of a token that text cannot forge; None: there is none."""

    @abstractmethod
    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Of several documents: faster than one by one."""

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of one document; text that looks like a special token is text."""
        return self.encode_many([text])[0]


def read_file(path: Path) -> bytes:
    """The content of a tokenizer's file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError("data.tokenizer", f"{path} cannot be read ({error.strerror})",
                        "name a tokenizer.json, .tiktoken or .model, or 'bytes'") from error


def library(module: str, path: str | Path) -> Any:
    """The package that runs such files."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError("data.tokenizer", f"{path} needs the package {module}",
                        "pip install 'jaxtrain[data]'") from error


def uint32(ids: list[int]) -> np.ndarray:
    """An array of them: in half the time that numpy takes for a list."""
    return np.array(array("I", ids))


def threads() -> int:
    """How many a tokenizer may use: one where several processes share the work."""
    return 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else os.cpu_count() or 1


def without_metaspace(piece: str) -> int:
    """Bytes of text that a piece of SentencePiece's stands for, where ▁ is written for a space."""
    return len(piece.replace("▁", " ").encode())
