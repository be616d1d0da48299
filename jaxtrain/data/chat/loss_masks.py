"""Encode text with marks around the trained parts into ids and a loss mask.

The text is encoded as a whole, as it is at inference; an id is trained on if any part of it lies within marks.
"""

import re
from dataclasses import dataclass

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.chat.marks import BREAK, CLOSE, OPEN
from jaxtrain.data.tokenizers.special_tokens import Specials
from jaxtrain.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Learnt:
    """The ids of one document and its loss mask; the last entry of `trained` is for the end-of-document id."""

    ids: np.ndarray
    trained: np.ndarray
    num_bytes: int


def encode(specials: Specials, marked: list[str]) -> list[Learnt]:
    """Encode texts with marks as documents."""
    parted = [spans_of(text) for text in marked]
    return [_learnt(specials, text, spans, *columns)
            for (text, spans), columns in zip(parted, specials.encode([text for text, _ in parted]), strict=True)]


def _learnt(specials: Specials, text: str, spans: list[tuple[int, int]], ids: np.ndarray, starts: np.ndarray,
            stops: np.ndarray) -> Learnt:
    inside = np.zeros(len(text) + 1, np.int64)
    for start, stop in spans:
        inside[start + 1: stop + 1] = 1
    inside = inside.cumsum()
    trained = inside[stops] > inside[starts]
    num_bytes = len(text.replace(BREAK, "").encode())
    if len(ids) and ids[-1] == specials.tokenizer.eod:  # the token that ends the turn also ends the document
        return Learnt(ids[:-1], trained, num_bytes)
    ended = len(ids) and ids[-1] in specials.ids.values()
    return Learnt(ids, np.append(trained, bool(len(ids) and trained[-1] and not ended)), num_bytes)


def spans_of(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without marks, and the marked spans; adjacent spans are joined."""
    parts = re.split(f"([{OPEN}{CLOSE}])", marked)
    edges = np.cumsum([0] + [len(part) for part in parts[::2]]).tolist()
    opened, spans = None, []
    for edge, mark in zip(edges[1:], parts[1::2], strict=False):
        if mark == OPEN:
            opened = spans.pop()[0] if spans and spans[-1][1] == edge else edge
        elif opened is not None:
            spans.append((opened, edge))
            opened = None
    return "".join(parts[::2]), spans + ([(opened, edges[-1])] if opened is not None else [])


def check_probe(tokenizer: Tokenizer, probe: JsonObject) -> bool:
    """Return whether a tokenizer still gives the ids and mask of a probe from the manifest."""
    return probe == probed(Specials(tokenizer), probe["marked"])


def probed(specials: Specials, text: str) -> JsonObject:
    """Return a marked text with its ids and mask as JSON values."""
    one, = encode(specials, [text])
    return {"marked": text, "ids": one.ids.tolist(), "trained": one.trained.astype(int).tolist()}
