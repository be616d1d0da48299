"""A faster engine for byte-level BPE, gigatoken, used where it gives the ids that the `tokenizers` library gives.

It is used if it is installed (the extra `fast-tokenizer`), behind two gates: a sample of many scripts when it is made,
and then the first documents that it encodes. Where the sample differs, or gigatoken does not know how the tokenizer
splits text, the `tokenizers` library does all of the work, and a sentence says so.
"""

import json
import random
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.data.tokenizers.vocabulary import threads
from jaxtrain.errors import UserError

PACKAGE = "gigatoken"
WORTHWHILE = 2**20  # bytes of text after which the engine is made, which takes half a second
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
_ENDINGS = ("'s", "'ll", "'RE", "\u2019s", "'\u017f", "!?", "...", "\\", "\0", "</p>", "://", "e\u0301", "\u212b")


class FastEncoder:
    """gigatoken for one tokenizer."""

    def __init__(self, described: JsonMapping, make: Callable[[str], Any]):
        """`described`: the content of a tokenizer.json; `make` makes the engine from the same as text."""
        model = {**described, "post_processor": None, "truncation": None, "padding": None, "added_tokens": [
            token for token in described.get("added_tokens") or () if not token["special"]]}  # text is only text
        self._make = lambda: make(json.dumps(model))
        self._engine, self._bytes = self._make(), 0

    def encode(self, texts: Sequence[str], reference: Reference) -> list[np.ndarray]:
        """Return the ids of texts; raises UserError if those of the first ones are not the `reference`'s."""
        contents = [text.encode() for text in texts]
        if self._bytes > _RENEWED:
            self._engine, self._bytes = self._make(), 0
        found = self.ids(contents, parallel=threads() > 1)
        for text, content, ids in zip(texts, contents, found, strict=True):
            if self._bytes < _COMPARED and not np.array_equal(reference([text])[0], ids):
                raise UserError("data.tokenizer", f"{PACKAGE} gives other ids than tokenizers for {text[:40]!r}",
                                f"uninstall it (pip uninstall {PACKAGE}), and begin anew")
            self._bytes += len(content)
        return found

    def ids(self, contents: Sequence[bytes], parallel: bool = False) -> list[np.ndarray]:
        """Return the engine's ids of texts in UTF-8, one array for each."""
        if not contents:
            return []
        rows = self._engine.encode_batch(list(contents), parallel=parallel).layout
        ends = np.asarray(rows.offsets)
        return [np.asarray(rows.content.data)[start:end].astype(np.uint32, copy=False)
                for start, end in zip(ends[:-1], ends[1:], strict=True)]


def fast_encoder(described: JsonMapping, reference: Reference) -> FastEncoder | None:
    """Return the engine for a tokenizer.json, or None where it is not installed, not suited, or not equal."""
    if not is_suited(described) or find_spec(PACKAGE) is None:
        return None
    import gigatoken

    try:
        found = FastEncoder(described, gigatoken.Tokenizer.from_json)
        texts = sample([token["content"] for token in described.get("added_tokens") or ()])
        pairs = zip(reference(texts), found.ids([text.encode() for text in texts]), strict=True)
        why = "" if all(np.array_equal(*pair) for pair in pairs) else "it gives other ids"
    except BaseException as error:  # its Rust code panics with a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = f"{error}".partition("\n")[0][:120]
    if why:
        warnings.warn(f"{PACKAGE} is installed and not used for this tokenizer: {why}", stacklevel=2)
    return None if why else found


def is_suited(described: JsonMapping) -> bool:
    """Return whether a tokenizer.json is byte-level BPE, which gives a text the same ids each time."""
    model = described.get("model") or {}
    decoder = described.get("decoder") or {}
    kinds = {step.get("type") for step in decoder.get("decoders", [decoder])}
    return model.get("type", "BPE") == "BPE" and "merges" in model and not model.get("dropout") and kinds == {"ByteLevel"}


def sample(added: Sequence[str] = ()) -> list[str]:
    """Return texts, always the same, of the characters of many scripts, with these tokens among them."""
    draw = random.Random(0)
    odd = [*_ENDINGS, *added[:32]]

    def word() -> str:
        first, last = draw.choice(_SCRIPTS)
        kind, size = draw.random(), draw.randint(1, 9)
        if kind < 0.1:
            return chr(draw.randint(first, last)) * draw.randint(1, 40)
        if kind < 0.2:
            return f"{draw.randrange(10**size)}"
        if kind < 0.3:
            return draw.choice(odd)
        return "".join(chr(draw.randint(first, last)) for _ in range(size))

    return ["", " ", "\n", *("".join(word() + draw.choice(_SPACES) for _ in range(60)) for _ in range(60))]
