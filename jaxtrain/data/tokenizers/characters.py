"""A tokenizer with one token for each character of a text, as in character-level language models.

Its file is a JSON object with the characters in order; the id of a character is its place, and one more ends documents.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jaxtrain.data.tokenizers.vocabulary import Vocabulary, read_file
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import parsed

NAME = "characters"  # as --tokenizer: the characters of the training text
PREFIX = f"{NAME}:"  # followed by the characters themselves
END = "<|endoftext|>"


class CharacterTokenizer(Vocabulary):
    """A tokenizer of single characters; text with any other character is refused."""

    name, file = NAME, "characters.json"

    def __init__(self, characters: Iterable[str], eod: str = "", bos: str = ""):
        self.characters = "".join(sorted(set(characters)))
        self._points = np.array([ord(one) for one in self.characters], np.uint32)
        self._lengths = np.array([*(len(one.encode()) for one in self.characters), 0])
        self.vocab_size = len(self.characters) + 1
        self.specials = {END: self.vocab_size - 1}
        self.content = json.dumps({"characters": self.characters}, ensure_ascii=False).encode()
        self.settle(self.file, hashlib.sha256(self.content).hexdigest(), eod, bos, [END])

    def id_of(self, token: str) -> int | None:
        """Return the id that ends documents; all other tokens result from text."""
        return self.specials.get(token)

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encode several documents, one by one."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: bytes) -> np.ndarray:
        points = np.frombuffer(text.decode(errors="replace").encode("utf-32-le"), "<u4")
        ids = np.searchsorted(self._points, points)
        unknown = np.flatnonzero(self._points.take(ids, mode="clip") != points)
        if unknown.size:
            at = int(unknown[0])
            around = "".join(map(chr, points[max(at - 20, 0): at + 20]))
            raise UserError("data.tokenizer", f"the vocabulary of {len(self.characters):,} characters has no "
                            f"{chr(points[at])!r} (U+{points[at]:04X}), as in {around!r}", "leave it out of the text, "
                            "or prepare training text that has it")
        return ids.astype(np.uint32)

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """Return readable text; the end of documents is dropped, or spelt out with `specials`."""
        table = [*self.characters, END if specials else ""]
        return "".join(table[id] for id in map(int, ids) if 0 <= id < self.vocab_size)

    def count_bytes(self, ids: np.ndarray) -> int:
        """Return the UTF-8 length of a document's text, from a table."""
        return int(self._lengths[ids].sum())


def from_file(path: Path, eod: str = "", bos: str = "") -> CharacterTokenizer:
    """Open the file of a character tokenizer."""
    try:
        characters = parsed(read_file(path), {"characters": str})["characters"]
        characters.encode()  # lone surrogates are not characters
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError("data.tokenizer", f"{path} does not list characters ({error})", "name another file") from error
    return CharacterTokenizer(characters, eod, bos)
