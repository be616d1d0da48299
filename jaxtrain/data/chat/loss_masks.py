"""Text with marks around what is learnt of it, to ids and to whether each is learnt.

The text becomes ids as a whole, as it does when a model is asked; an id that has a part within marks is learnt.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.data.tokenizers.special_tokens import BREAK, Specials
from jaxtrain.data.tokenizers.tokenizer import Tokenizer

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # as BREAK: in no text


@dataclass(frozen=True, eq=False)
class Learnt:
    """The ids of one document, and whether each is learnt; the last of `trained` is said of the document's end."""

    ids: np.ndarray
    trained: np.ndarray
    num_bytes: int


def encode(specials: Specials, marked: list[str]) -> list[Learnt]:
    """Texts with marks to documents."""
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
    if len(ids) and ids[-1] == specials.tokenizer.eod:  # the token that ends the turn ends the document, too
        return Learnt(ids[:-1], trained, num_bytes)
    ended = len(ids) and ids[-1] in specials.ids.values()
    return Learnt(ids, np.append(trained, bool(len(ids) and trained[-1] and not ended)), num_bytes)


def spans_of(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and what they are around; what they are around twice in a row is one."""
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


def check_probe(tokenizer: Tokenizer, probe: dict[str, Any]) -> bool:
    """Whether a tokenizer still gives the ids and learns the same of them."""
    return probe == probed(Specials(tokenizer), probe["marked"])


def probed(specials: Specials, text: str) -> dict[str, Any]:
    """A text and what becomes of it, as JSON has it."""
    one, = encode(specials, [text])
    return {"marked": text, "ids": one.ids.tolist(), "trained": one.trained.astype(int).tolist()}
