"""Text to token ids and back: the protocol, and the one tokenizer that needs no file."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from jaxtrain.errors import UserError, nearest


class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer."""

    name: str
    vocab_size: int
    eod: int  # the id that ends a document; never part of encoded text
    fingerprint: str  # two tokenizers with the same fingerprint give the same ids

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of one document, without the end-of-document id."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Readable text; ids that stand for no text are dropped."""
        ...


class ByteTokenizer:
    """Every byte is a token."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    fingerprint = "bytes-1: ids 0..255 are the bytes, 256 ends a document"

    def encode(self, text: bytes) -> np.ndarray:
        """The bytes, as uint16."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Text from ids; broken UTF-8 (a sample cut inside a character) becomes U+FFFD."""
        ids = np.fromiter(ids, np.int64)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode(errors="replace")


_TOKENIZERS = {"bytes": ByteTokenizer}


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`."""
    if name not in _TOKENIZERS:
        raise UserError("data.tokenizer", f"there is no tokenizer {name!r}", nearest(name, _TOKENIZERS))
    return _TOKENIZERS[name]()
