"""Special tokens where a template wrote them, and nowhere else: what somebody said stays text.

Before a template sees a message, what looks like a special token in it is `guarded`: broken up by a character that no
text has. Ordinary text passes unchanged, so its ids are those that any program gets for the template's whole text.
"""

import json
import re
from functools import cached_property
from typing import Any

import numpy as np

from jaxtrain.data.tokenizers.tokenizer import JsonTokenizer, Tokenizer

# Unicode keeps these for a program's own use: they stand for nothing in any text.
BREAK, CODE = "\ufdd2", "\ufdd3"


class Specials:
    """The special tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self.ids = {text: id for text, id in tokenizer.specials.items() if len(text) > 1}  # less cannot be broken up
        self.tokenizer = tokenizer
        longest_first = sorted(self.ids, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # What a special token could grow from, together with what stands beside it.
        self._begins = {text[:i] for text in self.ids for i in range(1, len(text))}
        self._ends = {text[i:] for text in self.ids for i in range(1, len(text))}
        self._sizes = range(1, max(map(len, self.ids), default=0))

    def guarded(self, said: Any) -> Any:
        """Text, or any structure with text in it, that yields no special token wherever it is put."""
        if isinstance(said, dict):
            return {self.guarded(key): value if key == "role" else self.guarded(value) for key, value in said.items()}
        if isinstance(said, list):
            return [self.guarded(one) for one in said]
        if not isinstance(said, str) or not said:
            return said
        while self.pattern.search(said):
            said = self.pattern.sub(lambda found: BREAK.join(found[0]), said)
        core = said.strip()  # as many templates do
        if not core:
            return said
        before = BREAK * any(core[:size] in self._ends for size in self._sizes)
        after = BREAK * any(core[-size:] in self._begins for size in self._sizes)
        return said.replace(core, before + core + after, 1) if before or after else said

    def encode(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Ids, and where in the text each begins and ends (in characters), of texts with guarded parts."""
        if not isinstance(self.tokenizer, JsonTokenizer):
            return [self._bytes(text) for text in texts]
        raw = self.tokenizer.raw
        raw.encode_special_tokens = False
        plain = iter(raw.encode_batch([text for text in texts if BREAK not in text], add_special_tokens=False))
        return [self._coded(text) if BREAK in text else _columns(next(plain)) for text in texts]

    def _coded(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By a tokenizer that differs only in how special tokens are spelt, so that nobody can have said them."""
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
        # Every character's bytes, where it is; then special tokens, each in place of its characters.
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
    # A byte-level tokenizer may count spaces to no token (`trim_offsets`): that begins where the one before ended.
    before = np.concatenate([[0], stops])[:-1]
    return np.array(encoding.ids, np.uint32), np.where(starts == stops, np.minimum(before, starts), starts), stops
