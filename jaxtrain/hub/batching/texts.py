"""A text that is continued: its prompt, what was generated behind it, and the key of its random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxtrain.hub.batching.rounding import bucket


@dataclass
class Text:
    """A prompt, and what was generated behind it."""

    number: int
    ids: list[int]
    limit: int  # how many tokens may follow
    key: np.ndarray  # of its random numbers, as words
    chosen: np.ndarray | None  # what it multiplies stacked adapters by
    device: int = 0  # of the parts that the mesh cuts a batch into
    place: int = -1  # among the rows there
    pages: list[int] = field(default_factory=list)  # of the cache there, where it is in pages
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """The number of its tokens."""
        return len(self.ids) + len(self.tokens)

    @property
    def prompt(self) -> tuple[tuple[int, ...], bytes]:
        """The part that another text must have in common so that one row can be computed for both."""
        return tuple(self.ids), b"" if self.chosen is None else self.chosen.tobytes()


def keys(seed: int, drawn: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the keys of texts at these positions, each with how many tokens were drawn with it before [B, 3]."""
    numbers, before = zip(*drawn, strict=True) if drawn else ((), ())
    return np.c_[seeds_of(seed, numbers), np.asarray(before, np.uint32)].astype(np.uint32)


def seeds_of(seed: int, numbers: Sequence[int]) -> np.ndarray:
    """Return the two words of the key of random numbers of texts at these positions [B, 2]."""
    key, padded = jax.random.key(seed), np.zeros(bucket(len(numbers)), np.uint32)
    padded[:len(numbers)] = numbers
    words = jax.vmap(lambda number: jax.random.key_data(jax.random.fold_in(key, number)))(padded)
    return np.asarray(words)[:len(numbers)]
