"""Continuations of prompts: their tokens, their text, and the stop strings in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxtrain.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Generated:
    """The continuation of a prompt."""

    text: str  # without the stop string
    tokens: tuple[int, ...]  # without the stop token; they end with the token in which a stop string begins
    logprobs: tuple[float, ...] | None  # of each token by the model itself, before temperature and filters
    finish_reason: str  # "stop": a stop token or string; "length": there was no room for more
    end: tuple[int, float] | None = None  # the stop token that ended it, and its log-probability
    # the experts that its tokens went to, and those of its prompt [tokens, layers, experts of a token]; below 0: none
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)


def text_of(words: Tokenizer, prompt: Sequence[int], tokens: Sequence[int] | np.ndarray) -> str:
    """Return the text of tokens behind a prompt. Alone, they may lack the space with which they begin."""
    begin, whole = words.decode(prompt), words.decode([*prompt, *map(int, tokens)])
    return whole[len(begin):] if whole.startswith(begin) else words.decode([*map(int, tokens)])


def before(strings: list[str], words: Tokenizer, prompt: list[int], tokens: list[int],
           whole: bool) -> tuple[str, int] | None:
    """Return the text before the first of some strings, and how many tokens reach into it; None without one.

    `whole`: how many reach its end.
    """
    text = text_of(words, prompt, tokens)
    found = min(((place, place + len(one) - 1 if whole else place) for one in strings
                 if (place := text.find(one)) >= 0), default=None)
    if found is None:
        return None
    at, reached = found
    many = len(tokens)  # the fewest that give what is kept and more; parts of a character may look like several
    while many and len(text_of(words, prompt, tokens[:many - 1])) > reached:
        many -= 1
    return text[:at], many
