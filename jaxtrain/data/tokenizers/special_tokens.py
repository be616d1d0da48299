"""Encode special tokens only where a template wrote them; in messages they stay ordinary text.

Before a template sees a message, anything in it that looks like a special token is `guarded`: split by a noncharacter.
Other text is unchanged, so its ids are those that any program gets for the template's whole text.
"""

import json
import re
from functools import cached_property
from typing import Any

import numpy as np

from jaxtrain.base.annotations import Json
from jaxtrain.data.chat.marks import BREAK, CODE
from jaxtrain.data.tokenizers.tokenizer import JsonTokenizer, Tokenizer
from jaxtrain.data.tokenizers.vocabulary import told


class Specials:
    """The special tokens of a tokenizer, and an encoder that cannot be tricked by messages that spell them."""

    def __init__(self, tokenizer: Tokenizer):
        self.ids = {text: id for text, id in tokenizer.specials.items() if len(text) > 1}  # one cannot be split
        self.tokenizer = tokenizer
        longest_first = sorted(self.ids, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # Parts of special tokens, which could form one together with the text around them.
        self._begins = {text[:i] for text in self.ids for i in range(1, len(text))}
        self._ends = {text[i:] for text in self.ids for i in range(1, len(text))}
        self._sizes = range(1, max(map(len, self.ids), default=0))

    def guarded(self, said: Json) -> Json:
        """Return text, or any structure with text in it, such that it yields no special token in any template."""
        if isinstance(said, dict):
            return {self.guarded(key): value if key == "role" else self.guarded(value) for key, value in said.items()}
        if isinstance(said, list):
            return [self.guarded(one) for one in said]
        if not isinstance(said, str) or not said:
            return said
        while self.pattern.search(said):
            said = self.pattern.sub(lambda found: BREAK.join(found[0]), said)
        core = said.strip()  # many templates strip, too
        if not core:
            return said
        before = BREAK * any(core[:size] in self._ends for size in self._sizes)
        after = BREAK * any(core[-size:] in self._begins for size in self._sizes)
        return said.replace(core, before + core + after, 1) if before or after else said

    def encode(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Encode texts with guarded parts, and return ids with the start and end of each in the text, in characters."""
        if not isinstance(self.tokenizer, JsonTokenizer):
            return [self._bytes(text) for text in texts]
        raw = self.tokenizer.raw
        raw.encode_special_tokens = False
        with told(self.tokenizer.path, "fails to encode text"):
            plain = iter(raw.encode_batch([text for text in texts if BREAK not in text], add_special_tokens=False))
        return [self._coded(text) if BREAK in text else _columns(next(plain)) for text in texts]

    def _coded(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode with a tokenizer that spells special tokens in a way that no message can contain."""
        coded, places, at = [], [], 0
        for found in [*self.pattern.finditer(text), None]:
            for i in range(at, found.start() if found else len(text)):
                if text[i] != BREAK:
                    coded.append(text[i])
                    places.append(i)
            if found:
                at = found.end()
                coded.append(f"{CODE}{self.ids[found[0]]}{CODE}")
                places += [found.start()] * len(coded[-1])
        twin, known = self._twin
        ids, starts, stops = _columns(twin.encode("".join(coded), add_special_tokens=False))
        place = np.array([*places, len(text)])
        ids = np.array([known.get(int(id), id) for id in ids], np.uint32)
        return ids, place[starts], np.where(stops > starts, place[stops - 1] + 1, place[starts])

    @cached_property
    def _twin(self) -> tuple[Any, dict[Any, int]]:
        import tokenizers

        content = json.loads(self.tokenizer.content)  # type: ignore[attr-defined]
        for token in content["added_tokens"]:
            if token["content"] in self.ids:
                token["content"] = f"{CODE}{token['id']}{CODE}"
        twin = tokenizers.Tokenizer.from_str(json.dumps(content))
        twin.no_truncation()
        twin.no_padding()
        return twin, {twin.token_to_id(f"{CODE}{id}{CODE}"): id for id in self.ids.values()}

    def _bytes(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # The bytes of every character, with its place; then special tokens replace their characters.
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        sizes = 1 + np.searchsorted([0x80, 0x800, 0x10000], points, "right")  # UTF-8
        ids = self.tokenizer.encode(text.encode())
        starts = np.repeat(np.arange(len(text)), sizes)
        stops, kept = starts + 1, np.repeat(points != ord(BREAK), sizes)
        for found in self.pattern.finditer(text):
            first, last = np.searchsorted(starts, found.span())
            ids[first], stops[first], kept[first + 1: last] = self.ids[found[0]], found.end(), False
        return ids[kept], starts[kept], stops[kept]


def _columns(encoding: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    # A byte-level tokenizer with `trim_offsets` assigns spaces to no token: then it begins where the last one ended.
    before = np.concatenate([[0], stops])[:-1]
    return np.array(encoding.ids, np.uint32), np.where(starts == stops, np.minimum(before, starts), starts), stops
