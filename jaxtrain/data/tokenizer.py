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
    specials: dict[str, int]  # tokens that stand for no text, as chat templates spell them
    fingerprint: str  # two tokenizers with the same fingerprint give the same ids

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of one document, without the end-of-document id."""
        ...

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Of several documents: faster than one by one."""
        ...

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """Readable text; ids that stand for no text are dropped, or spelt with `specials`."""
        ...


class ByteTokenizer:
    """Every byte is a token."""

    name = "bytes"
    vocab_size = 257
    eod, eod_token = 256, "<|endoftext|>"
    specials = {eod_token: eod}  # noqa: RUF012
    fingerprint = "bytes-1: ids 0..255 are the bytes, 256 ends a document"

    def encode(self, text: bytes) -> np.ndarray:
        """The bytes, as uint16."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """One by one."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """Text from ids; broken UTF-8 (a sample cut inside a character) becomes U+FFFD."""
        ids = np.fromiter(ids, np.int64)
        if specials and (ends := np.flatnonzero(ids == self.eod)).size:
            return self.eod_token.join(self.decode(part[part != self.eod]) for part in np.split(ids, ends))
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode(errors="replace")


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
            self.raw = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # whatever the library's parser says
            raise UserError("data.tokenizer", f"{self.path} is no tokenizer.json ({error})",
                            "name another file or 'bytes'") from error
        # Not the file's bytes: the same tokenizer, written otherwise, gives the same ids.
        canonical = json.dumps(json.loads(content), sort_keys=True).encode()
        self.name, self.content = self.path.name, content
        added = json.loads(content).get("added_tokens", ())
        self.specials: dict[str, int] = {token["content"]: token["id"] for token in added if token["special"]}
        self.vocab_size: int = 1 + max(self.raw.get_vocab(with_added_tokens=True).values())
        self.eod_token, self.eod = self._end(eod)
        sha256 = hashlib.sha256(canonical).hexdigest()
        self.fingerprint = f"tokenizer.json {sha256}: {self.eod_token} ends a document"
        self.raw.no_truncation()
        self.raw.no_padding()

    def _end(self, asked: str) -> tuple[str, int]:
        for token in [asked] if asked else ENDS:
            if (id := self.raw.token_to_id(token)) is not None:
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
        self.raw.encode_special_tokens = True
        return self.raw.encode_batch_fast(texts, add_special_tokens=False)

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """Readable text."""
        return self.raw.decode([int(id) for id in ids], skip_special_tokens=not specials)


def load_tokenizer(name: str, eod: str = "") -> Tokenizer:
    """ "bytes", or the path of a tokenizer.json or of its folder; `eod` names the token that ends a document."""
    if name == "bytes":
        return ByteTokenizer()
    if "/" not in name and not name.endswith(".json") and not Path(name).exists():
        raise UserError("data.tokenizer", f"there is no tokenizer {name!r}", nearest(name, ["bytes"])
                        + ", or name the path of a tokenizer.json")
    return JsonTokenizer(name, eod)
