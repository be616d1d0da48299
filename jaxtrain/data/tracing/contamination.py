"""Compare a corpus with the items of an evaluation set: equal runs of words, and near duplicates.

- Exact: a document has `ngram` consecutive words of the item, 13 by default, as in GPT-3 (arXiv 2005.14165, appendix
  C), whose N is 8 to 13 by the length of the items; an item with fewer words is compared as a whole. Beside the count
  stand the share of the item's words that matches cover, as in Llama 3 (arXiv 2407.21783, 5.1.4, with 8-grams), and the
  longest run in one document, which tells best what a model gains (arXiv 2411.03923).
- Near: a document contains at least `threshold` of the item's windows of 5 words (Broder 1997, "On the resemblance and
  containment of documents"). Items are few, so this is counted rather than estimated by MinHash. A document with that
  Jaccard similarity (resemblance), which `prepare --deduplicate=near` looks for, contains at least as much.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from jaxtrain.base.annotations import Json
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.data.tracing.document_texts import ReadDocument
from jaxtrain.data.tracing.found_documents import FoundDocument
from jaxtrain.data.tracing.word_windows import Vocabulary, WindowIndex, places_of, words_of
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import reason

FEWEST = 8  # words of an item that can be judged
SHINGLE = 5  # words, as in near_duplicates.Near
KEPT = 10  # documents that are kept for each item


@dataclass(frozen=True)
class Overlap:
    """The overlap of a document with an item."""

    item: int
    document: FoundDocument
    ngrams: frozenset[int]  # where in the item matching n-grams begin
    longest: int  # words of the item in one piece; 0: fewer than an n-gram
    containment: float  # the share of the item's shingles that the document has


@dataclass(frozen=True)
class Detail:
    """The details of an overlap, for which its document is read once more."""

    resemblance: float  # Jaccard similarity of the shingles
    tokens: tuple[tuple[int, int], ...]  # of the document, that hold the n-grams, or else the shingles


@dataclass(frozen=True)
class Items:
    """The items of an evaluation set that can be judged, and the indices of their windows."""

    lines: list[int]
    names: list[str]
    texts: list[np.ndarray]  # the words of each item, by number
    vocabulary: Vocabulary
    ngrams: list[WindowIndex]  # one for each size
    shingles: WindowIndex  # of the distinct ones of each item
    ngram: int

    def size(self, item: int) -> int:
        """Return the words of an n-gram of an item."""
        return min(self.ngram, len(self.texts[item]))

    def judged(self, item: int) -> bool:
        """Return whether an item has enough words to be judged."""
        return len(self.texts[item]) >= min(FEWEST, self.ngram)


@dataclass(frozen=True)
class EvalSearch:
    """The search for the items of an evaluation set, JSON lines, in documents."""

    path: str
    fields: tuple[str, ...] = ()  # of a record that make the item; (): all that are text, but the id
    ngram: int = 13
    threshold: float = 0.8

    def __post_init__(self):
        if self.ngram < 3:
            raise UserError("--ngram", f"{self.ngram} words are in nearly every text", "give 8 to 13")
        if not 0 < self.threshold <= 1:
            raise UserError("--near_threshold", f"{self.threshold} is not a share", "try 0.8")

    def items(self) -> Items:
        """Read the items, once for each process."""
        return _items(self)

    def search(self, documents: Sequence[ReadDocument], tokenizer: Tokenizer) -> list[Overlap]:
        """Return the overlaps of these documents with all items: n-grams, or enough shingles."""
        items = self.items()
        numbers = [items.vocabulary.numbers(words_of(one.text)) for one in documents]
        starts = np.cumsum([0, *(len(some) + 1 for some in numbers)])
        together = np.concatenate([np.zeros(0, np.int64), *(np.append(some, 0) for some in numbers)])
        shares = self._shares(items, together, starts)
        pairs = dict.fromkeys((pair for pair, share in shares.items() if share >= self.threshold), _NONE)
        for index in items.ngrams:
            found = index.find(together)
            owner = np.searchsorted(starts, found.places, "right") - 1
            order = np.lexsort((found.places, found.texts, owner))
            owner, texts = owner[order], found.texts[order]
            edges = np.flatnonzero(np.diff(owner, prepend=-1) | np.diff(texts, prepend=-1))
            for a, b in pairwise([*edges.tolist(), len(order)]):
                pairs[int(owner[a]), int(texts[a])] = found.places[order[a:b]], found.positions[order[a:b]]
        return [Overlap(item, documents[number].document, frozenset(positions.tolist()),
                        _longest(places, positions, items.size(item)) if len(places) else 0,
                        shares.get((number, item), 0.0)) for (number, item), (places, positions) in pairs.items()]

    def _shares(self, items: Items, together: np.ndarray, starts: np.ndarray) -> dict[tuple[int, int], float]:
        """Return the share of an item's shingles that a document has, of all pairs with more than none."""
        found = items.shingles.find(together, starts)
        owner = np.searchsorted(starts, found.places, "right") - 1
        pairs, counts = np.unique(owner * len(items.texts) + found.texts, return_counts=True)
        numbers, texts = np.divmod(pairs, len(items.texts))
        shares = counts / items.shingles.counts[texts]
        return dict(zip(zip(numbers.tolist(), texts.tolist(), strict=True), shares.tolist(), strict=True))

    def details(self, overlaps: Sequence[Overlap], document: ReadDocument, tokenizer: Tokenizer) -> list[Detail]:
        """Return the details of the overlaps of this document."""
        items, words = self.items(), words_of(document.text)
        numbers, at = items.vocabulary.numbers(words), places_of(document.text)
        theirs = len({*zip(*(words[i:] for i in range(SHINGLE)), strict=False)})
        found = []
        for one in overlaps:
            size = items.size(one.item) if one.ngrams else SHINGLE
            places = WindowIndex([items.texts[one.item]], [0], size).find(numbers).places
            mine = int(items.shingles.counts[one.item])
            common = round(one.containment * mine)
            runs = [(at[first][0], at[stop - 1][1]) for first, stop in _merged(np.unique(places), size)]
            found.append(Detail(common / max(1, mine + theirs - common), tuple(
                document.stretch(tokenizer, *(len(document.text[:place].encode()) for place in run)) for run in runs)))
        return found


_NONE = np.zeros(0, np.int64), np.zeros(0, np.int64)


def _merged(places: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Return the runs of words that windows at these places cover."""
    breaks = np.flatnonzero(np.diff(places) > size) + 1
    return [(int(some[0]), int(some[-1]) + size) for some in np.split(places, breaks) if len(some)]


def _longest(places: np.ndarray, positions: np.ndarray, size: int) -> int:
    """Return the most words that follow each other in the document as they do in the item."""
    order = np.lexsort((positions, places - positions))
    together = (np.diff(positions[order]) == 1) & (np.diff((places - positions)[order]) == 0)
    ends = np.flatnonzero(np.concatenate([[True], ~together, [True]]))
    return int(np.diff(ends).max()) + size - 1


@functools.lru_cache(maxsize=1)
def _items(search: EvalSearch) -> Items:
    lines, names, words = [], [], []
    for line, name, text in _records(search):
        lines.append(line)
        names.append(name)
        words.append(words_of(text))
    if not lines:
        raise UserError("--eval", f"{search.path} has no items", "give a file of JSON lines")
    vocabulary = Vocabulary(words)
    texts = [vocabulary.numbers(some) for some in words]
    least = min(FEWEST, search.ngram)
    judged = [item for item, some in enumerate(texts) if len(some) >= least]
    sizes = sorted({min(search.ngram, len(texts[item])) for item in judged})
    ngrams = [WindowIndex(texts, [item for item in judged if min(search.ngram, len(texts[item])) == size], size)
              for size in sizes]
    return Items(lines, names, texts, vocabulary, ngrams, WindowIndex(texts, judged, SHINGLE, distinct=True),
                 search.ngram)


def _records(search: EvalSearch) -> Iterator[tuple[int, str, str]]:
    """Yield the number of each line, the record's id or "", and the text of the item."""
    path = Path(search.path).expanduser()
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError("--eval", f"{path} {reason(error)}", "give a file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError("--eval", f"line {number} of {path} {reason(error)}", "give a file of JSON lines, with an "
                            "item in each") from None
        fields = record if isinstance(record, dict) else {}
        if missing := [name for name in search.fields if name not in fields]:
            raise UserError("--text_field", f"line {number} of {path} has no {missing[0]!r}",
                            f"give some of {', '.join(fields)}" if fields else "leave it out")
        names = search.fields or [name for name in fields if name != "id"]
        chosen = [fields[name] for name in names] if fields else record
        yield number, f"{fields.get('id', '')}", "\n".join(_strings(chosen))


def _strings(value: Json) -> Iterator[str]:
    """Yield all text in a value, in order; names of fields are not among it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)
