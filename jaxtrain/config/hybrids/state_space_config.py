"""The fields of models whose layers have Mamba-2, some or all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtrain.config.decoder_config import DecoderConfig
from jaxtrain.config.field_checks import at_most, derive, number
from jaxtrain.config.hybrids.layer_pattern import PatternConfig
from jaxtrain.errors import UserError

MAMBA = "M"  # the letter of such layers in a pattern


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
    widths: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # no `mup_base`
    chunk_kernels = True

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
