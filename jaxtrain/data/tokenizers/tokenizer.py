"""Text to token ids and back: bytes, which need no file, Hugging Face's tokenizer.json, tiktoken and SentencePiece.

What begins and ends a document is added by us, never by a tokenizer: one that adds its own is told not to.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.tokenizers import tiktoken_ranks
from jaxtrain.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from jaxtrain.data.tokenizers.tiktoken_ranks import TiktokenTokenizer
from jaxtrain.data.tokenizers.vocabulary import Vocabulary, library, read_file, uint32, without_metaspace
from jaxtrain.errors import UserError, nearest


class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer."""

    name: str
    vocab_size: int
    eod: int  # the id that ends a document; never part of encoded text
    bos: int | None  # the id that begins one, if any does; nor is that
    specials: Mapping[str, int]  # tokens that stand for no text, as chat templates spell them
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

    def count_bytes(self, ids: np.ndarray) -> int:
        """How long the text of a document is in UTF-8: known without making it, where the vocabulary allows."""
        ...


class ByteTokenizer:
    """Every byte is a token."""

    name = "bytes"
    vocab_size = 257
    eod, eod_token = 256, "<|endoftext|>"
    bos = None
    specials: Mapping[str, int] = MappingProxyType({eod_token: eod})
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

    def count_bytes(self, ids: np.ndarray) -> int:
        """Of what is no end."""
        return int(np.count_nonzero(ids < 256))


BYTE = re.compile("<0x[0-9A-F]{2}>")


class JsonTokenizer(Vocabulary):
    """A tokenizer.json, run by the `tokenizers` library."""

    file = "tokenizer.json"

    def __init__(self, path: str | Path, eod: str = "", bos: str = ""):
        self.path = Path(path)
        content = read_file(self.path)
        tokenizers = library("tokenizers", path)
        try:
            self.raw = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # whatever the library's parser says
            raise UserError("data.tokenizer", f"{self.path} is no tokenizer.json ({error})",
                            "name another file or 'bytes'") from error
        # Not the file's bytes: the same tokenizer, written otherwise, gives the same ids.
        canonical = json.dumps(json.loads(content), sort_keys=True).encode()
        self.name, self.content = self.path.name, content
        added = json.loads(content).get("added_tokens", ())
        self.specials = {token["content"]: token["id"] for token in added if token["special"]}
        self.vocab_size: int = 1 + max(self.raw.get_vocab(with_added_tokens=True).values())
        self.settle(path, hashlib.sha256(canonical).hexdigest(), eod, bos)
        self._lengths = self._measure(json.loads(content).get("decoder") or {"type": "none"})
        self.raw.no_truncation()
        self.raw.no_padding()

    def id_of(self, token: str) -> int | None:
        """Of any token."""
        return self.raw.token_to_id(token)

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """All at once, on as many threads as the library takes."""
        found = self._encode([text.decode(errors="replace") for text in texts])
        return [uint32(one.ids) for one in found]

    def _encode(self, texts: list[str]) -> Any:
        self.raw.encode_special_tokens = True
        return self.raw.encode_batch_fast(texts, add_special_tokens=False)

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """Readable text."""
        return self.raw.decode([int(id) for id in ids], skip_special_tokens=not specials)

    def count_bytes(self, ids: np.ndarray) -> int:
        """From a table, for vocabularies of bytes and those made from SentencePiece's; of others the text is made."""
        if self._lengths is None:
            return len(self.decode(ids).encode())
        return int(self._lengths[ids].sum()) - bool(len(ids) and self._begins[ids[0]])

    def _measure(self, decoder: dict[str, Any]) -> np.ndarray | None:
        """The bytes of text that each id stands for, if it is the same wherever the id stands."""
        steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
        by_byte = set(steps) == {"ByteLevel"}  # a character stands for a byte
        if not by_byte and not set(steps) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            return None
        # Where a text begins so, `decode` takes away the space that the tokenizer puts there.
        drops = "Strip" in steps or steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
        lengths, self._begins = np.zeros(self.vocab_size, np.int64), np.zeros(self.vocab_size, bool)
        for token, id in self.raw.get_vocab(with_added_tokens=False).items():
            is_byte = "ByteFallback" in steps and BYTE.fullmatch(token)
            lengths[id] = len(token) if by_byte else 1 if is_byte else without_metaspace(token)
            self._begins[id] = drops and token.startswith("▁")
        for id, added in self.raw.get_added_tokens_decoder().items():
            lengths[id] = 0 if added.special else len(added.content.encode())
            self._begins[id] &= not added.special
        return lengths


def begun(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a document with what begins it in front, if the tokenizer has such a token."""
    return ids if tokenizer.bos is None else np.concatenate([np.array([tokenizer.bos], np.uint32), ids])


def encode_documents(texts: Sequence[bytes], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The ids of documents as they are written, but for the end. Whatever is checked is made here too."""
    return [begun(ids, tokenizer) for ids in tokenizer.encode_many(texts)]


def load_tokenizer(name: str, eod: str = "", bos: str = "") -> Tokenizer:
    """ "bytes", a file or its folder, or tiktoken:NAME; `eod` and `bos` name the tokens around a document."""
    if name == "bytes":
        if eod or bos:
            raise UserError("--bos" if bos else "--eod", "bytes have no named tokens: 256 ends a document, nothing "
                            "begins one", "leave it out, or name another --tokenizer")
        return ByteTokenizer()
    where, _, scheme = (name, "", "") if Path(name).exists() else name.rpartition(":")
    if where == "tiktoken":
        return tiktoken_ranks.named(scheme, eod, bos)
    path = Path(where or name).expanduser()
    if not path.exists() and "/" not in name and path.suffix not in (".json", ".tiktoken", ".model"):
        raise UserError("data.tokenizer", f"there is no tokenizer {name!r}", nearest(name, ["bytes"])
                        + ", or name the path of a tokenizer.json, .tiktoken or .model")
    if path.is_dir():
        path /= "tokenizer.json" if (path / "tokenizer.json").exists() else "tokenizer.model"
    if path.suffix == ".tiktoken" or scheme or (path.suffix == ".model" and tiktoken_ranks.are_ranks(read_file(path))):
        return TiktokenTokenizer(path, scheme, eod, bos)
    return SentencePieceTokenizer(path, eod, bos) if path.suffix == ".model" else JsonTokenizer(path, eod, bos)
