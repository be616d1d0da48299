"""Words of text, and an index of windows of consecutive words that says where documents have them.

Words are runs of letters and digits in lower case, whatever stands between them; a character of a script that is
written without spaces is a word by itself. Accents and the like are composed first (NFC), so that two ways to write a
letter are one. Only words of the indexed texts matter, so documents are numbers in NumPy
after one pass over their words.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana and Chinese characters
_WORD = re.compile(f"[{_ALONE}]|[^\\W_{_ALONE}]+")
_JAMO = range(0x1161, 0x1200)  # vowels and final consonants of Korean, which join what is before them as marks do
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def words_of(text: str) -> list[str]:
    """Return the words of a text, in order."""
    return [word.lower() for word in _WORD.findall(unicodedata.normalize("NFC", text))]


def places_of(text: str) -> list[tuple[int, int]]:
    """Return where in a text, in characters, each of its words begins and ends."""
    spans = [match.span() for match in _WORD.finditer(unicodedata.normalize("NFC", text))]
    if unicodedata.is_normalized("NFC", text):
        return spans
    first = [place for place, character in enumerate(text) if not place or not _joins(character)]
    pieces = list(pairwise([*first, len(text)]))  # of which each is composed by itself
    places = [piece for piece in pieces for _ in unicodedata.normalize("NFC", text[slice(*piece)])]
    return [(places[start][0], places[stop - 1][1]) for start, stop in spans]


def _joins(character: str) -> bool:
    """Return whether a character may be composed with what is before it."""
    return unicodedata.category(character)[0] == "M" or ord(character) in _JAMO


class Vocabulary:
    """Numbers for the words of the indexed texts; 0 is any other word."""

    def __init__(self, texts: Iterable[Sequence[str]]):
        self.number: dict[str, int] = {}
        for words in texts:
            for word in words:
                self.number.setdefault(word, len(self.number) + 1)

    def numbers(self, words: Sequence[str]) -> np.ndarray:
        """Return the numbers of words."""
        number = self.number.get
        return np.array([number(word, 0) for word in words], np.int64)


@dataclass(frozen=True)
class Windows:
    """Matches of windows: where each is in the documents, read as one text, and in which indexed text it is where."""

    places: np.ndarray
    texts: np.ndarray
    positions: np.ndarray


class WindowIndex:
    """All windows of `size` words of some of the texts, which are given as numbers of words.

    `distinct`: of windows of one text that are equal, only the first.
    """

    def __init__(self, texts: Sequence[np.ndarray], chosen: Sequence[int], size: int, distinct: bool = False):
        self.size, self._texts = size, texts
        each = [_hashes(texts[number], size)[1] for number in chosen]
        firsts = [np.unique(some, return_index=True)[1] if distinct else np.arange(len(some)) for some in each]
        hashes = np.concatenate([np.zeros(0, np.uint64), *map(np.ndarray.__getitem__, each, firsts)])
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._text = np.repeat(np.asarray(chosen, np.int64), [len(some) for some in firsts])[order]
        self._position = np.concatenate([np.zeros(0, np.int64), *firsts])[order]
        self._starts = np.cumsum([0, *map(len, texts)])
        self._words = np.concatenate([np.zeros(0, np.int64), *texts])
        self.counts = np.bincount(self._text, minlength=len(texts))  # of windows of each text

    def find(self, numbers: np.ndarray, starts: np.ndarray | None = None) -> Windows:
        """Return all windows of a text that are indexed, compared word by word.

        `starts`: where its documents begin; then of windows of one document that are equal, only the first.
        """
        places, hashes = _hashes(numbers, self.size)
        low = np.searchsorted(self._hashes, hashes, "left")
        there = low < len(self._hashes)
        there[there] = self._hashes[low[there]] == hashes[there]
        places, low = places[there], low[there]
        if starts is not None:
            owner = np.searchsorted(starts, places, "right") - 1
            first = np.unique(owner * (len(self._hashes) + 1) + low, return_index=True)[1]
            places, low = places[first], low[first]
        counts = np.searchsorted(self._hashes, self._hashes[low], "right") - low
        entry = np.arange(counts.sum()) + np.repeat(low - np.cumsum(counts) + counts, counts)
        places, texts, positions = np.repeat(places, counts), self._text[entry], self._position[entry]
        first, equal = self._starts[texts] + positions, np.ones(len(places), bool)
        for further in range(self.size):
            equal &= self._words[first + further] == numbers[places + further]
        return Windows(places[equal], texts[equal], positions[equal])


def _hashes(numbers: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of all windows of known words, and a hash of each."""
    count = len(numbers) - size + 1
    if count < 1:
        return np.zeros(0, np.int64), np.zeros(0, np.uint64)
    known = np.concatenate([[0], np.cumsum(numbers > 0)])
    places = np.flatnonzero(known[size:] - known[:-size] == size)
    mixed = numbers.astype(np.uint64) * _MULTIPLIER
    mixed = (mixed ^ mixed >> np.uint64(31)) * _MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    hashes = np.zeros(len(places), np.uint64)
    for further in range(size):
        hashes = hashes * np.uint64(0xBF58476D1CE4E5B9) + mixed[places + further]
    return places, hashes
