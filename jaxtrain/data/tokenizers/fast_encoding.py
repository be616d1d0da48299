"""A faster engine for byte-level BPE, gigatoken, used where it gives the ids that the `tokenizers` library gives.

It is used if it is installed (the extra `fast-tokenizer`), behind two gates: a sample of many scripts when it is made,
and then the first documents that it encodes. Where the sample differs, or gigatoken does not know how the tokenizer
splits text, the `tokenizers` library does all of the work, and a sentence says so. Both know Unicode, of different
years: texts with characters that one of them takes for a letter and the other not are left to `tokenizers`, and so are
those with characters of blocks that were empty when Python's Unicode was written.
"""

import json
import random
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.data.tokenizers.vocabulary import threads
from jaxtrain.errors import UserError

PACKAGE = "gigatoken"
WORTHWHILE = 2**23  # bytes of text after which the engine is made, which takes some two seconds
_COMPARED = 2**18  # bytes of its first documents, of which the ids are compared
_RENEWED = 2**27  # bytes after which it is made anew: it remembers all words that it has ever seen
Reference = Callable[[Sequence[str]], list[np.ndarray]]
# First and last characters of scripts and kinds: Latin to Hangul, marks, symbols, private ones, and beyond 16 bits.
_SCRIPTS = ((0x20, 0x7E), (0xA0, 0x24F), (0x2B0, 0x36F), (0x370, 0x52F), (0x531, 0x5F4), (0x600, 0x74F),
            (0x900, 0xDFF), (0xE00, 0xFFF), (0x1000, 0x137F), (0x13A0, 0x18AF), (0x1E00, 0x1FFF), (0x2000, 0x218F),
            (0x2190, 0x27BF), (0x3000, 0x312F), (0x3400, 0x9FFF), (0xA000, 0xABFF), (0xAC00, 0xD7A3),
            (0xE000, 0xFDFF), (0xFE00, 0xFFFD), (0x10300, 0x1034A), (0x1D400, 0x1D7FF), (0x1F1E6, 0x1FAFF),
            (0x20000, 0x2A6D6), (0xE0100, 0xE01EF))
_SPACES = (" ", " ", " ", "", "  ", "\n", "\n\n", "\t", "\r\n", "\x85", "\xa0", "\u2003", "\u2028", "\u3000", "\u200b")
# Blocks of thousands of characters of one kind, of which the first and last few stand for all.
_LARGE = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xD800, 0xDFFF), (0xE000, 0xF8FF), (0x17000, 0x18CD5),
          (0x20000, 0x2A6DF), (0x2A700, 0x2EBE0), (0x30000, 0x3134A), (0xF0000, 0x10FFFD))
_FEW = 4
_BLOCK = 128  # characters: Unicode adds single ones to blocks that it has
_ENDINGS = ("'s", "'ll", "'RE", "\u2019s", "'\u017f", "!?", "...", "\\", "\0", "</p>", "://", "e\u0301", "\u212b")


class FastEncoder:
    """gigatoken for one tokenizer."""

    def __init__(self, described: JsonMapping, make: Callable[[str], Any], reference: Reference):
        """Make the engine by `make`, from the content of a tokenizer.json as text; raises ValueError if ids differ."""
        model = {**described, "post_processor": None, "truncation": None, "padding": None, "added_tokens": [
            token for token in described.get("added_tokens") or () if not token["special"]]}  # text is only text
        self._make = lambda: make(json.dumps(model))
        self._reference, self._engine, self._bytes, self._made_at = reference, self._make(), 0, 0
        self._unsure, known = characters()
        around = [f"a{one}-v {one}A1{one}\n" for one in known]
        differ = [one for one, equal in zip(known, self._equal(around), strict=True) if not equal]
        if len(differ) > len(known) // 100 or any(map(str.isascii, differ)):
            raise ValueError("it gives other ids")
        self._unsure[[ord(one) for one in differ]] = True
        texts = sample([token["content"] for token in described.get("added_tokens") or ()])
        if any(is_sure and not equal for is_sure, equal in zip(self.sure(texts), self._equal(texts), strict=True)):
            raise ValueError("it gives other ids")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of texts; raises UserError if those of the first ones are not the reference's."""
        sure = self.sure(texts)
        mine = [text for text, is_sure in zip(texts, sure, strict=True) if is_sure]
        ids = self._ids(mine, parallel=threads() > 1)
        for text, found in zip(mine, ids, strict=True):
            if self._bytes < _COMPARED and not np.array_equal(self._reference([text])[0], found):
                raise UserError("data.tokenizer", f"{PACKAGE} gives other ids than tokenizers for {text[:40]!r}",
                                f"uninstall it (pip uninstall {PACKAGE}), and begin anew")
            self.count(len(text))
        rest = [text for text, is_sure in zip(texts, sure, strict=True) if not is_sure]
        found, others = iter(ids), iter(self._reference(rest) if rest else ())
        return [next(found if is_sure else others) for is_sure in sure]

    def sure(self, texts: Sequence[str]) -> list[bool]:
        """Return whether the ids of each text can be left to the engine."""
        return [text.isascii() or not self._unsure[np.frombuffer(text.encode("utf-32-le"), np.uint32)].any()
                for text in texts]

    def count(self, characters: int) -> None:
        """Count what was encoded, after so much of which the engine is made anew."""
        self._bytes += characters
        if self._bytes - self._made_at > _RENEWED:
            self._engine, self._made_at = self._make(), self._bytes

    def _equal(self, texts: Sequence[str]) -> list[bool]:
        return [np.array_equal(*pair) for pair in zip(self._reference(texts), self._ids(texts), strict=True)]

    def _ids(self, texts: Sequence[str], parallel: bool = False) -> list[np.ndarray]:
        """Return the engine's ids. By default it begins no threads, which a fork could not follow."""
        rows = self._engine.encode_batch([text.encode() for text in texts], parallel=parallel) if texts else []
        return [np.asarray(row, np.uint32) for row in rows]


def fast_encoder(described: JsonMapping, reference: Reference) -> FastEncoder | None:
    """Return the engine for a tokenizer.json, or None where it is not installed, not suited, or not equal."""
    if not is_suited(described) or find_spec(PACKAGE) is None:
        return None
    import gigatoken

    try:
        return FastEncoder(described, gigatoken.Tokenizer.from_json, reference)
    except BaseException as error:  # its Rust code panics with a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = f"{error}".partition("\n")[0][:120]
    warnings.warn(f"{PACKAGE} is installed and not used for this tokenizer: {why}", stacklevel=2)
    return None


def characters() -> tuple[np.ndarray, list[str]]:
    """Return which characters nothing is known of, by code; and those to try.

    Of large blocks only the first and last few are tried: they stand for those that are assigned.
    """
    points = np.arange(0x110000)
    assigned = np.array([unicodedata.category(chr(point)) != "Cn" for point in range(0x110000)])
    inside = ~np.repeat(assigned.reshape(-1, _BLOCK).any(1), _BLOCK)
    for first, last in _LARGE:
        inside[first + _FEW:last + 1 - _FEW] = True
    inside[0xD800:0xE000] = True  # halves of characters, which text cannot have
    return inside & ~assigned, [chr(point) for point in points[~inside].tolist()]


def is_suited(described: JsonMapping) -> bool:
    """Return whether a tokenizer.json is byte-level BPE, which gives a text the same ids each time."""
    model = described.get("model") or {}
    decoder = described.get("decoder") or {}
    kinds = {step.get("type") for step in decoder.get("decoders", [decoder])}
    return model.get("type", "BPE") == "BPE" and "merges" in model and not model.get("dropout") and (
        kinds == {"ByteLevel"})


def sample(added: Sequence[str] = ()) -> list[str]:
    """Return texts, always the same, of the characters of many scripts, with these tokens among them."""
    draw = random.Random(0)
    odd = [*_ENDINGS, *added[:32]]

    def one(first: int, last: int) -> str:
        while unicodedata.category(found := chr(draw.randint(first, last))) == "Cn":
            pass
        return found

    def word() -> str:
        first, last = draw.choice(_SCRIPTS)
        kind, size = draw.random(), draw.randint(1, 9)
        if kind < 0.1:
            return one(first, last) * draw.randint(1, 40)
        if kind < 0.2:
            return f"{draw.randrange(10**size)}"
        if kind < 0.3:
            return draw.choice(odd)
        return "".join(one(first, last) for _ in range(size))

    return ["", " ", "\n", *("".join(word() + draw.choice(_SPACES) for _ in range(60)) for _ in range(60))]
