"""The base class of tokenizers that are read from a file: its content, and the tokens that begin and end a document."""

import os
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxtrain.errors import UserError, install_extra
from jaxtrain.files import bounded_files

# Tokens that end a document in well-known vocabularies, the most likely first.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
LARGEST = 2**28  # bytes of a tokenizer's file
MOST = 2**24  # ids: more than any vocabulary has, and few enough for a table of them


class Vocabulary:
    """The base class of tokenizers that are read from a file."""

    name: str  # for display
    vocab_size: int
    file: str  # the file's name in a corpus, from which it can be opened again
    content: bytes  # of the file
    fingerprint: str
    eod: int
    eod_token: str
    bos: int | None
    bos_token: str
    specials: Mapping[str, int] = MappingProxyType({})  # tokens that stand for no text, where they are known

    def settle(self, path: str | Path, sha256: str, eod: str, bos: str, ends: Iterable[str] = ENDS) -> None:
        """Find the tokens that end and begin documents; `sha256` identifies all else that the ids depend on.

        A vocabulary that is empty, or so large that tables of its ids would fill the memory, is refused first.
        """
        if not 0 < self.vocab_size <= MOST:
            raise UserError("data.tokenizer", f"{path} has {self.vocab_size:,} ids", f"name one with 1 to {MOST:,}")
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
        """Return the id of a token that text cannot produce, or None if there is none."""

    @abstractmethod
    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encode several documents, faster than one by one."""

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of one document; text that looks like a special token is encoded as text."""
        return self.encode_many([text])[0]


def read_file(path: Path) -> bytes:
    """Return the content of a tokenizer's file."""
    try:
        return bounded_files.read(path, LARGEST)
    except OSError as error:
        raise UserError("data.tokenizer", f"{path} cannot be read ({error.strerror})",
                        "name a tokenizer.json, .tiktoken or .model, or 'bytes'") from error


@contextmanager
def told(path: str | Path, what: str) -> Iterator[None]:
    """Turn whatever a tokenizer's library raises into a `UserError`; its Rust code panics with a BaseException."""
    try:
        yield
    except BaseException as error:
        foreign = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, UserError) or not foreign:
            raise
        raise UserError("data.tokenizer", f"{path} {what} ({type(error).__name__}: {str(error)[:200]})",
                        "name another file or 'bytes'") from error


def library(module: str, path: str | Path) -> Any:
    """Import the package that runs such a file; if it is missing, raise a UserError."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError("data.tokenizer", f"{path} needs the package {module}",
                        install_extra("data")) from error


def uint32(ids: list[int]) -> np.ndarray:
    """Convert a list to an array, in half the time that numpy takes."""
    return np.array(array("I", ids))


def threads() -> int:
    """Return how many threads a tokenizer may use: one if several processes share the work."""
    return 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else os.cpu_count() or 1


def without_metaspace(piece: str) -> int:
    """Return the bytes of text that a SentencePiece piece stands for, with ▁ for a space."""
    return len(piece.replace("▁", " ").encode())
