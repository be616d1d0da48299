"""Text to token ids and back: bytes, which need no file, and Hugging Face's tokenizer.json.

What begins and ends a document is added by us, never by a tokenizer: one that adds its own is told not to.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

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

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Of several documents: faster than one by one."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Readable text; ids that stand for no text are dropped."""
        ...

    def count_bytes(self, ids: np.ndarray) -> int:
        """How long the text of a document is in UTF-8: known without making it, where the vocabulary allows."""
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

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """One by one."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text from ids; broken UTF-8 (a sample cut inside a character) becomes U+FFFD."""
        ids = np.fromiter(ids, np.int64)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode(errors="replace")

    def count_bytes(self, ids: np.ndarray) -> int:
        """Of what is no end."""
        return int(np.count_nonzero(ids < 256))


# What ends a document in well-known vocabularies, the likeliest first.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class JsonTokenizer:
    """A tokenizer.json, run by the `tokenizers` library."""

    def __init__(self, path: str | Path, eod: str = ""):
        self.path = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise UserError("data.tokenizer", f"{self.path} cannot be read ({error.strerror})",
                            "name a tokenizer.json or 'bytes'") from error
        try:
            import tokenizers
        except ImportError as error:
            raise UserError("data.tokenizer", f"{self.path} needs the package tokenizers",
                            "pip install 'jaxtrain[data]'") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # whatever the library's parser says
            raise UserError("data.tokenizer", f"{self.path} is no tokenizer.json ({error})",
                            "name another file or 'bytes'") from error
        # Not the file's bytes: the same tokenizer, written otherwise, gives the same ids.
        canonical = json.dumps(json.loads(content), sort_keys=True).encode()
        self.name, self.content = self.path.name, content
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.eod_token, self.eod = self._end(eod)
        sha256 = hashlib.sha256(canonical).hexdigest()
        self.fingerprint = f"tokenizer.json {sha256}: {self.eod_token} ends a document"
        self._lengths = self._byte_lengths()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def _end(self, asked: str) -> tuple[str, int]:
        for token in [asked] if asked else ENDS:
            if (id := self._tokenizer.token_to_id(token)) is not None:
                return token, id
        what = f"has no token {asked!r}" if asked else f"has none of {', '.join(ENDS)} to end a document with"
        raise UserError("data.tokenizer", f"{self.path} {what}", "name one of its tokens with --eod")

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of one document; text that looks like a special token is text."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """All at once, on as many threads as the library takes."""
        found = self._encode([text.decode(errors="replace") for text in texts])
        return [np.array(one.ids, np.uint32) for one in found]

    def _encode(self, texts: list[str]) -> Any:
        self._tokenizer.encode_special_tokens = True
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Readable text."""
        return self._tokenizer.decode([int(id) for id in ids], skip_special_tokens=True)

    def count_bytes(self, ids: np.ndarray) -> int:
        """From a table, for byte-level vocabularies; of others the text is made."""
        if self._lengths is None:
            return len(self.decode(ids).encode())
        return int(self._lengths[ids].sum())

    def _byte_lengths(self) -> np.ndarray | None:
        """Of each id: in a byte-level vocabulary a character stands for a byte."""
        if self._tokenizer.decoder.__class__.__name__ != "ByteLevel":
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[id] = len(token)
        for id, added in self._tokenizer.get_added_tokens_decoder().items():
            lengths[id] = 0 if added.special else len(added.content.encode())
        return lengths


def load_tokenizer(name: str, eod: str = "") -> Tokenizer:
    """ "bytes", or the path of a tokenizer.json or of its folder; `eod` names the token that ends a document."""
    if name == "bytes":
        return ByteTokenizer()
    if "/" not in name and not name.endswith(".json") and not Path(name).exists():
        raise UserError("data.tokenizer", f"there is no tokenizer {name!r}", nearest(name, ["bytes"])
                        + ", or name the path of a tokenizer.json")
    return JsonTokenizer(name, eod)
