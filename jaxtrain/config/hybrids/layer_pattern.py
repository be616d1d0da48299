"""The kinds of layers of a hybrid, a letter each: states in some layers, attention in others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtrain.config.decoder_config import DecoderConfig
from jaxtrain.errors import UserError

ATTENTION = "A"


@dataclass(frozen=True)
class PatternConfig(DecoderConfig):
    """Layers of several kinds."""

    # kinds of layers in turn, a letter each, repeated until there are num_layers; the families say which letters
    layer_pattern: str = ATTENTION
    kinds: ClassVar[Mapping[str, str]] = {ATTENTION: "attention"}  # the letters, and what they stand for
    widths: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # no `mup_base`

    def __post_init__(self):
        super().__post_init__()
        if not self.layer_pattern or {*self.layer_pattern} - self.kinds.keys():
            known = ", ".join(f"{letter} ({kind})" for letter, kind in self.kinds.items())
            raise UserError("model.layer_pattern", f"{self.layer_pattern!r} is not made of the letters of "
                            f"{self.name}'s kinds of layers", f"use {known}")
        first = self.experts.dense_layers
        if len({*self.layer_kinds[:first]}) > 1:
            raise UserError("model.layer_pattern", f"the first model.dense_layers={first} layers are of several kinds",
                            "give fewer of them, or a pattern in which they are alike")

    @property
    def layer_kinds(self) -> str:
        """The letter of each layer."""
        times = -(-self.num_layers // len(self.layer_pattern))
        return (self.layer_pattern * times)[:self.num_layers]

    @property
    def period(self) -> int:
        """The least number of layers, after the dense ones, after which kinds repeat and which divides them."""
        rest, every = self.layer_kinds[self.experts.dense_layers:], self.experts.every
        return next(n for n in range(every, len(rest) + 1, every)
                    if len(rest) % n == 0 and rest == rest[:n] * (len(rest) // n))

    @property
    def windows(self) -> dict[int, int]:
        """The number of layers with attention, for each window; 0: none."""
        many = self.layer_kinds.count(ATTENTION)
        return {self.window: many} if many else {}

    def attentions(self, seq_len: int) -> list[tuple[int, int, int, bool]]:
        """Return that of layers with attention, if there are any."""
        return super().attentions(seq_len) if self.windows else []


def repeated(kinds: str) -> str:
    """Return the shortest pattern that is these kinds of layers when it is repeated and cut."""
    return next(kinds[:n] for n in range(1, len(kinds) + 1)
                if (kinds[:n] * (len(kinds) // n + 1))[:len(kinds)] == kinds)
