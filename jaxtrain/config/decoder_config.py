"""The fields that decoders of text share: of all of them, of those with rotary positions, and of those with experts."""

from dataclasses import dataclass, field, fields

from jaxtrain.config.field_checks import at_most, choice, derive, number
from jaxtrain.config.model_config import Experts, ModelConfig
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """The fields that all text decoders have in addition."""

    # size of the embedding table: at least the size of the tokenizer's vocabulary
    vocab_size: int = at_most(320, 2**24, above=0)
    window: int = number(0, least=0)  # sliding attention window in tokens; 0: full attention
    tied_embeddings: bool = True  # whether the output projection shares the weights of the embedding table
    text = True

    def __post_init__(self):
        super().__post_init__()

    @property
    def vocabulary(self) -> int:
        """The number of rows of the embedding table."""
        return self.vocab_size

    @property
    def ties_head(self) -> bool:
        """Whether the output projection is the embedding table."""
        return self.tied_embeddings

    @property
    def global_layers(self) -> int:
        """The number of layers that have no window where the others have one."""
        return 0

    @property
    def windows(self) -> dict[int, int]:
        """The number of layers for each attention window; 0: none."""
        everywhere = self.global_layers
        return {self.window: self.num_layers - everywhere} | ({0: everywhere} if everywhere else {})


@dataclass(frozen=True)
class RotaryConfig(DecoderConfig):
    """Rotary positions, optionally scaled for longer contexts."""

    rope_theta: float = number(10_000.0, above=0)  # base frequency of the rotary position embedding (RoPE)
    # context extension: factor by which sequences may exceed rope_original_len; 1: no scaling
    rope_scaling: float = number(1.0, above=0)
    # method of rope_scaling: "linear", "ntk", "llama3" or "yarn"; "dynamic" scales nothing up to max_seq_len, as in
    # transformers, where longer texts are scaled
    rope_type: str = choice("llama3", "linear", "ntk", "llama3", "yarn", "dynamic")
    # llama3, yarn, LongRoPE: the context length before it was extended
    rope_original_len: int = number(8192, above=0)
    # llama3: frequencies that make fewer than this many turns within rope_original_len are scaled down by rope_scaling
    rope_low_freq_factor: float = number(1.0, above=0)
    # llama3: frequencies that make more than this many turns within rope_original_len stay unchanged
    rope_high_freq_factor: float = 4.0
    # yarn: frequencies that make more than this many turns within rope_original_len stay unchanged
    rope_beta_fast: float = 32.0
    # yarn: frequencies that make fewer than this many turns within rope_original_len are scaled down by rope_scaling
    rope_beta_slow: float = number(1.0, above=0)
    # yarn: whether the limits set by rope_beta_fast and rope_beta_slow are rounded to whole dimensions
    rope_truncate: bool = True
    # yarn: factor of cosine and sine; 0: 0.1 ln(rope_scaling) + 1, or computed from rope_mscale and rope_mscale_all_dim
    rope_attention_factor: float = number(0.0, least=0)
    rope_mscale: float = number(0.0, least=0)  # YaRN's mscale, as in DeepSeek's config.json; 0: not set
    # YaRN's mscale_all_dim, as in DeepSeek's config.json; latent attention also scales scores by the square of its
    # factor
    rope_mscale_all_dim: float = number(0.0, least=0)
    # LongRoPE: divisor of each pair's frequency where model.max_seq_len is at most rope_original_len; []: no LongRoPE
    rope_short_factor: list[float] = field(default_factory=list, hash=False)
    rope_long_factor: list[float] = field(default_factory=list, hash=False)  # LongRoPE: that where it is more
    rope_turn_factor: float = number(1.0, above=0)  # LongRoPE: factor of cosine and sine

    def __post_init__(self):
        super().__post_init__()
        self._check_scaling()

    @property
    def rotary_width(self) -> int:
        """The width of the part of a head that turns with its position."""
        return self.head_dim

    def _check_scaling(self):
        if self.rope_scaling < 1:
            raise UserError("model.rope_scaling", f"{self.rope_scaling} would shorten the context", "give 1 or more")
        if self.rope_scaling == 1 and self.rope_type != "llama3":
            raise UserError("model.rope_scaling", f"rope_type={self.rope_type} has no factor to scale by",
                            "give one above 1, or leave rope_type out")
        for key, default, kind in _SCALING_KEYS:
            if getattr(self, key) != default and (self.rope_scaling == 1 or self.rope_type != kind):
                raise UserError(f"model.{key}", f"it is read with rope_type={kind} and a rope_scaling above 1 only",
                                "set those, or leave it out")
        if self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise UserError("model.rope_high_freq_factor", f"{self.rope_high_freq_factor} is not above "
                            f"model.rope_low_freq_factor={self.rope_low_freq_factor}", "give a higher number")
        if self.rope_beta_fast < self.rope_beta_slow:  # both are 1 in Kimi K2: then the ramp is a step
            raise UserError("model.rope_beta_fast", f"{self.rope_beta_fast} is below model.rope_beta_slow="
                            f"{self.rope_beta_slow}", "give a number that is not lower")
        if self.rope_type == "yarn" and self.rope_theta <= 1:
            raise UserError("model.rope_theta", f"yarn needs a base above 1, not {self.rope_theta}", "try 10000")
        if (self.rope_mscale > 0) != (self.rope_mscale_all_dim > 0):
            raise UserError("model.rope_mscale", "it has a meaning only together with model.rope_mscale_all_dim",
                            "give both or neither")
        for key in ("rope_short_factor", "rope_long_factor"):
            factors = getattr(self, key)
            if (factors or self.rope_short_factor) and (
                    len(factors) != self.rotary_width // 2 or not all(one > 0 for one in factors)):
                raise UserError(f"model.{key}", f"it does not have a positive number for each of the "
                                f"{self.rotary_width // 2} pairs that turn", "give as many, or neither of both lists")
        if self.rope_short_factor and self.rope_scaling != 1:
            raise UserError("model.rope_scaling", "LongRoPE already scales positions", "leave it out")
        if self.rope_type == "ntk" and self.rotary_width <= 2:
            raise UserError("model.rope_type", "ntk changes the base by a power that a rotary width of 2 does not have",
                            "use linear")


# The keys of one way to scale, their defaults, and which way.
_SCALING_KEYS = tuple((one.name, one.default, kind) for kind, names in (
    ("llama3", "low_freq_factor high_freq_factor"),
    ("yarn", "beta_fast beta_slow truncate attention_factor mscale mscale_all_dim"))
    for one in fields(RotaryConfig) if one.name.removeprefix("rope_") in names.split())


@dataclass(frozen=True)
class PartialRotaryConfig(RotaryConfig):
    """Rotary positions of a part of each head."""

    rotary_part: float = 1.0  # part of a head's width that turns with its position: the first entries

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.rotary_part <= 1:
            raise UserError("model.rotary_part", f"{self.rotary_part} is not a part of a head", "give one above 0, up "
                            "to 1")
        if self.rotary_width < 2 or self.rotary_width % 2:
            raise UserError("model.rotary_part", f"{self.rotary_width} of head_dim={self.head_dim} cannot turn in "
                            "pairs", "give a part with an even number")

    @property
    def rotary_width(self) -> int:
        """The width of the part of a head that turns with its position."""
        return int(self.head_dim * self.rotary_part)


@dataclass(frozen=True)
class RoutedDecoderConfig(DecoderConfig):
    """Routed experts, whatever positions are."""

    # mixture of experts: number of routed experts in a layer; 0: dense layers
    num_experts: int = at_most(0, 2**16, least=0)
    experts_per_token: int = at_most(2, 2**16, above=0)  # number of experts that process each token (top-k)
    expert_mlp_dim: int = at_most(0, 2**22, least=0)  # width of the hidden layer of one expert; 0: mlp_dim
    # coefficient of the load-balancing loss, computed for each sequence and layer: docs/parallelism.md
    balance_loss: float = number(0.0, least=0)
    # coefficient of the router z-loss: the squared log-partition of the router's logits
    router_z_loss: float = number(0.0, least=0)
    # most tokens of a sequence that one expert accepts, relative to an even share; the others are dropped; 0: no limit
    capacity_factor: float = number(0.0, least=0)

    def __post_init__(self):
        super().__post_init__()
        derive(self, "expert_mlp_dim", self.mlp_dim)
        self._check_experts()

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        return Experts(self.num_experts, self.experts_per_token, self.expert_mlp_dim,
                       capacity_factor=self.capacity_factor, balance_loss=self.balance_loss, z_loss=self.router_z_loss)

    def _check_experts(self):
        experts = self.experts
        if experts.num and experts.per_token > (reach := experts.num // experts.groups * experts.groups_used):
            raise UserError("model.experts_per_token", f"{self.experts_per_token} exceeds the {reach} experts that a "
                            "token may choose from", f"use {reach} or fewer")


@dataclass(frozen=True)
class RoutedConfig(RoutedDecoderConfig, RotaryConfig):
    """Rotary positions and routed experts."""
