"""Convert text to token ids and back: bytes, characters, Hugging Face's tokenizer.json, tiktoken, SentencePiece.

The tokens that begin and end a document are added by the data pipeline, never by the tokenizer itself.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config import hub_names
from jaxtrain.data.tokenizers import characters, fast_encoding, published_tokens
from jaxtrain.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from jaxtrain.data.tokenizers.vocabulary import Vocabulary, library, read_file, told, uint32, without_metaspace
from jaxtrain.errors import UserError, nearest
from jaxtrain.files.bounded_files import parsed
from jaxtrain.files.safe_names import linked


class Tokenizer(Protocol):
    """The protocol of tokenizers, as the data pipeline uses them."""

    name: str
    vocab_size: int
    eod: int  # the id that ends a document; never part of encoded text
    bos: int | None  # the id that begins a document, if any; never part of encoded text
    specials: Mapping[str, int]  # tokens that stand for no text, as chat templates spell them
    fingerprint: str  # two tokenizers with the same fingerprint give the same ids

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of one document, without the end-of-document id."""
        ...

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encode several documents, faster than one by one."""
        ...

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """Return readable text; ids that stand for no text are dropped, or spelt out with `specials`."""
        ...

    def count_bytes(self, ids: np.ndarray) -> int:
        """Return the UTF-8 length of a document's text, without decoding it if the vocabulary allows."""
        ...


class ByteTokenizer:
    """A tokenizer with one token per byte, and one that ends documents."""

    name = "bytes"
    vocab_size = 257
    eod, eod_token = 256, "<|endoftext|>"
    bos = None
    specials: Mapping[str, int] = MappingProxyType({eod_token: eod})
    fingerprint = "bytes-1: ids 0..255 are the bytes, 256 ends a document"

    def encode(self, text: bytes) -> np.ndarray:
        """Return the bytes as uint16."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encode several documents, one by one."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """Return the text of ids; broken UTF-8 (a sample cut inside a character) becomes U+FFFD."""
        ids = np.fromiter(ids, np.int64)
        if specials and (ends := np.flatnonzero(ids == self.eod)).size:
            return self.eod_token.join(self.decode(part[part != self.eod]) for part in np.split(ids, ends))
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode(errors="replace")

    def count_bytes(self, ids: np.ndarray) -> int:
        """Return the number of bytes, which are all ids but the end."""
        return int(np.count_nonzero(ids < 256))


RECORD = "tokenizer_record.json"  # beside a tokenizer's own file in a folder: the tokens around documents
BYTE = re.compile("<0x[0-9A-F]{2}>")


class JsonTokenizer(Vocabulary):
    """A tokenizer from a tokenizer.json, run by the `tokenizers` library."""

    file = "tokenizer.json"

    def __init__(self, path: str | Path, eod: str = "", bos: str = ""):
        self.path = Path(path)
        from jaxtrain.data.tokenizers import text_growth

        content = read_file(self.path)
        tokenizers = library("tokenizers", path)
        with told(self.path, "is not a tokenizer.json"):
            described = parsed(content)
            text_growth.check(described)
            self.raw = tokenizers.Tokenizer.from_str(content.decode())
            added = described.get("added_tokens", ())
            self.specials = {token["content"]: token["id"] for token in added if token["special"]}
        # Not the file's bytes: the same tokenizer, formatted differently, gives the same ids.
        canonical = json.dumps(described, sort_keys=True).encode()
        self.name, self.content = self.path.name, content
        self.vocab_size: int = 1 + max(self.raw.get_vocab(with_added_tokens=True).values(), default=-1)
        self.settle(path, hashlib.sha256(canonical).hexdigest(), eod, bos)
        self._lengths = self._measure(described.get("decoder") or {"type": "none"})
        self.raw.no_truncation()
        self.raw.no_padding()
        with told(self.path, "is not a tokenizer.json"):
            lost = text_growth.silent(described, self.raw)
        if lost:
            warnings.warn(f"{self.path}: {lost}", stacklevel=2)
        self._described, self._seen = described, 0
        self._fast: fast_encoding.FastEncoder | None = None

    def __getstate__(self) -> JsonObject:
        return {**self.__dict__, "_fast": None, "_seen": 0}  # another process makes its own

    def id_of(self, token: str) -> int | None:
        """Return the id of any token in the vocabulary."""
        return self.raw.token_to_id(token)

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encode several documents at once, on the library's threads; many of them by a faster library, if it can."""
        decoded, before = [text.decode(errors="replace") for text in texts], self._seen
        self._seen += sum(map(len, texts))
        if before <= fast_encoding.WORTHWHILE < self._seen:
            self._fast = fast_encoding.fast_encoder(self._described, self._ids)
        return self._ids(decoded) if self._fast is None else self._fast.encode(decoded)

    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [uint32(one.ids) for one in self._encode(list(texts))]

    def _encode(self, texts: list[str]) -> Any:
        self.raw.encode_special_tokens = True
        with told(self.path, "fails to encode text"):
            return self.raw.encode_batch_fast(texts, add_special_tokens=False)

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """Return readable text; special tokens are dropped, or spelt out with `specials`."""
        return self.raw.decode([int(id) for id in ids], skip_special_tokens=not specials)

    def count_bytes(self, ids: np.ndarray) -> int:
        """Return the UTF-8 length of a document's text; from a table, or by decoding if the vocabulary has no table."""
        if self._lengths is None:
            return len(self.decode(ids).encode())
        return int(self._lengths[ids].sum()) - bool(len(ids) and self._begins[ids[0]])

    def _measure(self, decoder: JsonObject) -> np.ndarray | None:
        """Return the bytes of text that each id stands for, or None if they depend on its place.

        Byte-level vocabularies and those converted from SentencePiece have such a table.
        """
        steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
        by_byte = set(steps) == {"ByteLevel"}  # one character per byte
        if not by_byte and not set(steps) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            return None
        # `decode` removes the space that the tokenizer puts at the beginning of a text.
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
    """Return the ids of a document preceded by the begin-of-document id, if the tokenizer has one."""
    return ids if tokenizer.bos is None else np.concatenate([np.array([tokenizer.bos], np.uint32), ids])


def encode_documents(texts: Sequence[bytes], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Encode documents as they are stored, but without the end; probes are made by the same function."""
    return [begun(ids, tokenizer) for ids in tokenizer.encode_many(texts)]


def load_tokenizer(name: str, eod: str = "", bos: str = "") -> Tokenizer:
    """Load a tokenizer: "bytes", a file or its folder (such as WORKDIR/tokenizer of a run), or tiktoken:NAME.

    `eod` and `bos` name the tokens that end and begin a document.
    """
    if name == "bytes":
        if eod or bos:
            raise UserError("--bos" if bos else "--eod", "bytes have no named tokens: 256 ends a document, nothing "
                            "begins one", "leave it out, or name another --tokenizer")
        return ByteTokenizer()
    if name == characters.NAME:
        raise UserError("data.tokenizer", "only jaxtrain prepare collects the characters of its input", "name the "
                        "characters.json of a corpus")
    if name.startswith(characters.PREFIX):
        return characters.CharacterTokenizer(name.removeprefix(characters.PREFIX), eod, bos)
    from jaxtrain.data.tokenizers import tiktoken_ranks

    name = hub_names.tokenizer_folder(name)
    where, _, scheme = (name, "", "") if Path(name).exists() else name.rpartition(":")
    if where == "tiktoken":
        return tiktoken_ranks.named(scheme, eod, bos)
    path = Path(where or name).expanduser()
    if (kept := path / RECORD).is_file():  # a folder that tokenizer_folder.save wrote
        try:
            record = json.loads(read_file(kept))
            file, named = record["file"] and str(linked(path, record["file"])), (record["eod"], record["bos"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError("data.tokenizer", f"{kept} is damaged ({error})", "copy it again from the run") from error
        return load_tokenizer(file, *named) if file else ByteTokenizer()
    if not path.exists() and "/" not in name and path.suffix not in (".json", ".tiktoken", ".model"):
        own = f"write tiktoken:{name}" if name in tiktoken_ranks.NAMED else nearest(name, ["bytes"])
        raise UserError("data.tokenizer", f"there is no tokenizer {name!r}", f"{own}{',' * (own[-1] != '?')} or name "
                        f"the path of a tokenizer.json, .tiktoken or .model, or hf:{name} on the Hub")
    if path.is_dir():
        folder, path = path, path / ("tokenizer.json" if (path / "tokenizer.json").exists() else "tokenizer.model")
        if not eod and not bos:
            return published_tokens.first_known(folder, lambda eod, bos: load_tokenizer(f"{path}", eod, bos))
    if path.name == characters.CharacterTokenizer.file:
        return characters.from_file(path, eod, bos)
    if path.suffix == ".tiktoken" or scheme or (path.suffix == ".model" and tiktoken_ranks.are_ranks(read_file(path))):
        return tiktoken_ranks.TiktokenTokenizer(path, scheme, eod, bos)
    return SentencePieceTokenizer(path, eod, bos) if path.suffix == ".model" else JsonTokenizer(path, eod, bos)
