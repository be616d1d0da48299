"""The kinds of layers of a hybrid, a letter each: states in some layers, attention in others; and Mamba-2's fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtrain.config.decoder_config import DecoderConfig
from jaxtrain.config.field_checks import at_most, derive, number
from jaxtrain.errors import UserError

ATTENTION = "A"
MAMBA = "M"  # the letter of such layers in a pattern


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


@dataclass(frozen=True)
class StateSpaceConfig(DecoderConfig):
    """The state space models of layers with Mamba-2."""

    state_heads: int = at_most(0, 2**16, least=0)  # heads in layers with states; 0: num_heads
    state_head_dim: int = at_most(0, 2**16, least=0)  # width of a head in layers with states; 0: head_dim
    # groups of heads with states that share B and C (n_groups)
    state_groups: int = at_most(1, 2**16, above=0)
    state_dim: int = at_most(128, 2**16, above=0)  # width of a state (d_state)
    conv_width: int = at_most(4, 64, above=1)  # tokens that a convolution sees, the token itself among them
    conv_bias: bool = True  # whether convolutions have biases
    state_bias: bool = False  # whether the first projections of layers with states have biases
    least_step: float = number(0.0, least=0)  # limit of a token's step (dt) from below
    largest_step: float = number(0.0, least=0)  # limit of a token's step (dt) from above; 0: none

    def __post_init__(self):
        super().__post_init__()
        derive(self, "state_heads", self.num_heads)
        derive(self, "state_head_dim", self.head_dim)
        if self.state_heads % self.state_groups:
            raise UserError("model.state_groups", f"{self.state_groups} does not divide model.state_heads="
                            f"{self.state_heads}", "choose a divisor of it")
        if self.largest_step and self.largest_step < self.least_step:
            raise UserError("model.largest_step", f"{self.largest_step} is below model.least_step={self.least_step}",
                            "give a larger one, or 0 for no limit")

    @property
    def state_layers(self) -> int:
        """The number of layers that have states."""
        return self.layer_kinds.count(MAMBA) if isinstance(self, PatternConfig) else self.num_layers

    @property
    def state_width(self) -> int:
        """The widths of all heads with states together."""
        return self.state_heads * self.state_head_dim

    @property
    def state_flops(self) -> float:
        """The FLOPs of all states for one token: each is written and read."""
        return 4.0 * self.state_layers * self.state_width * self.state_dim
