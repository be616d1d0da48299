"""The shape of a model: a dataclass for each family with just the fields that it reads. `model.name` picks the class.

JAX is not imported here, so that a mistake in a config is told at once.
"""

from dataclasses import dataclass, fields

from jaxtrain.config.field_checks import at_most, derive, not_negative, one_of, positive
from jaxtrain.config.modality_families import ClipsConfig, EventsConfig, WhisperConfig
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.vision_keys import DualEncoderConfig, PictureConfig, PictureFlowConfig
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """The fields that all text decoders have in addition."""

    # size of the embedding table: at least the size of the tokenizer's vocabulary
    # pyrefly: ignore[bad-override]
    vocab_size: int = at_most(320, 2**24)
    # pyrefly: ignore[bad-override]
    window: int = 0  # sliding attention window in tokens; 0: full attention
    # pyrefly: ignore[bad-override]
    tied_embeddings: bool = True  # whether the output projection shares the weights of the embedding table
    text = True

    def __post_init__(self):
        positive(self, "model", "vocab_size")
        not_negative(self, "model", "window")
        super().__post_init__()


@dataclass(frozen=True)
class Gpt2Config(DecoderConfig):
    """GPT-2, which has no further keys."""


@dataclass(frozen=True)
class RotaryConfig(DecoderConfig):
    """Rotary positions, optionally scaled for longer contexts."""

    rope_theta: float = 10_000.0  # base frequency of the rotary position embedding (RoPE)
    # context extension: factor by which sequences may exceed rope_original_len; 1: no scaling
    rope_scaling: float = 1.0
    rope_type: str = "llama3"  # method of rope_scaling: "linear", "ntk", "llama3" or "yarn"
    rope_original_len: int = 8192  # llama3, yarn: the context length before it was extended by rope_scaling
    # llama3: frequencies that make fewer than this many turns within rope_original_len are scaled down by rope_scaling
    rope_low_freq_factor: float = 1.0
    # llama3: frequencies that make more than this many turns within rope_original_len stay unchanged
    rope_high_freq_factor: float = 4.0
    # yarn: frequencies that make more than this many turns within rope_original_len stay unchanged
    rope_beta_fast: float = 32.0
    # yarn: frequencies that make fewer than this many turns within rope_original_len are scaled down by rope_scaling
    rope_beta_slow: float = 1.0
    # yarn: whether the limits set by rope_beta_fast and rope_beta_slow are rounded to whole dimensions
    rope_truncate: bool = True
    # yarn: factor of cosine and sine; 0: 0.1 ln(rope_scaling) + 1, or computed from rope_mscale and rope_mscale_all_dim
    rope_attention_factor: float = 0.0
    rope_mscale: float = 0.0  # YaRN's mscale, as in DeepSeek's config.json; 0: not set
    # YaRN's mscale_all_dim, as in DeepSeek's config.json; deepseek_v3 also scales attention scores by the square of its
    # factor
    rope_mscale_all_dim: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "rope_theta rope_scaling rope_original_len rope_low_freq_factor rope_beta_slow")
        not_negative(self, "model", "rope_attention_factor rope_mscale rope_mscale_all_dim")
        one_of("model.rope_type", self.rope_type, ("linear", "ntk", "llama3", "yarn"))
        self._check_scaling()

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
        for low, high in (("rope_low_freq_factor", "rope_high_freq_factor"), ("rope_beta_slow", "rope_beta_fast")):
            if getattr(self, high) <= getattr(self, low):
                raise UserError(f"model.{high}", f"{getattr(self, high)} is not above model.{low}="
                                f"{getattr(self, low)}", "give a higher number")
        if self.rope_type == "yarn" and self.rope_theta <= 1:
            raise UserError("model.rope_theta", f"yarn needs a base above 1, not {self.rope_theta}", "try 10000")
        if (self.rope_mscale > 0) != (self.rope_mscale_all_dim > 0):
            raise UserError("model.rope_mscale", "it has a meaning only together with model.rope_mscale_all_dim",
                            "give both or neither")
        if self.rope_type == "ntk" and (self.rope_head_dim or self.head_dim) <= 2:
            raise UserError("model.rope_type", "ntk changes the base by a power that a rotary width of 2 does not have",
                            "use linear")


# The keys of one way to scale, their defaults, and which way.
_SCALING_KEYS = tuple((field.name, field.default, kind) for kind, names in (
    ("llama3", "low_freq_factor high_freq_factor"),
    ("yarn", "beta_fast beta_slow truncate attention_factor mscale mscale_all_dim"))
    for field in fields(RotaryConfig) if field.name.removeprefix("rope_") in names.split())


@dataclass(frozen=True)
class LlamaConfig(RotaryConfig):
    """Llama, Qwen2 and Qwen3, with rotary positions, context extension and multi-token prediction."""

    name: str = "llama"
    # multi-token prediction: loss weight of an extra layer that predicts the token after the next one; 0: no such layer
    # pyrefly: ignore[bad-override]
    mtp_loss_weight: float = 0.0
    # with model.window, as in Qwen2 and Qwen3: number of first layers that use full attention
    # pyrefly: ignore[bad-override]
    global_first: int = at_most(0, 10_000)

    def __post_init__(self):
        super().__post_init__()
        not_negative(self, "model", "mtp_loss_weight global_first")
        if self.global_first and (not self.window or self.global_first >= self.num_layers):
            raise UserError("model.global_first", f"{self.global_first} of {self.num_layers} layers leaves none with "
                            f"model.window={self.window}", "lower it, or leave it out")
        if self.global_first and (self.name not in ("llama", "qwen2", "qwen3") or self.mtp_loss_weight):
            raise UserError("model.global_first", f"{self.name}{' with mtp_loss_weight' * (self.mtp_loss_weight > 0)} "
                            "has the window in all layers", "leave it out")


@dataclass(frozen=True)
class RoutedConfig(RotaryConfig):
    """Rotary positions and routed experts."""

    # pyrefly: ignore[bad-override]
    num_experts: int = at_most(0, 2**16)  # mixture of experts: number of routed experts in a layer; 0: dense layers
    # pyrefly: ignore[bad-override]
    experts_per_token: int = at_most(2, 2**16)  # number of experts that process each token (top-k)
    # pyrefly: ignore[bad-override]
    expert_mlp_dim: int = at_most(0, 2**22)  # width of the hidden layer of one expert; 0: mlp_dim
    # coefficient of the load-balancing loss, computed for each sequence and layer: docs/parallelism.md
    balance_loss: float = 0.0
    router_z_loss: float = 0.0  # coefficient of the router z-loss: the squared log-partition of the router's logits
    # most tokens of a sequence that one expert accepts, relative to an even share; the others are dropped; 0: no limit
    # pyrefly: ignore[bad-override]
    capacity_factor: float = 0.0

    # No fields: what a family without them has.
    shared_experts = 0
    router = "softmax"
    normalize_router = True
    router_scale = 1.0
    expert_groups = 1
    expert_groups_used = 1

    def __post_init__(self):
        super().__post_init__()
        not_negative(self, "model", "num_experts expert_mlp_dim balance_loss router_z_loss capacity_factor")
        derive(self, "expert_mlp_dim", self.mlp_dim)
        self._check_experts()

    def _check_experts(self):
        positive(self, "model", "experts_per_token")
        if self.experts_per_token > (reach := self.num_experts // self.expert_groups * self.expert_groups_used):
            raise UserError("model.experts_per_token", f"{self.experts_per_token} exceeds the {reach} experts that a "
                            "token may choose from", f"use {reach} or fewer")


@dataclass(frozen=True)
class ExpertsConfig(RoutedConfig, LlamaConfig):
    """Mixtral and Qwen3-MoE: mixtures of experts."""

    name: str = "mixtral"
    # number of shared experts, which process every token; they form one MLP of their summed width
    # pyrefly: ignore[bad-override]
    shared_experts: int = at_most(0, 2**10)
    # number of first layers that have a dense MLP of width mlp_dim instead of experts
    # pyrefly: ignore[bad-override]
    dense_layers: int = at_most(0, 10_000)
    # after dense_layers, every N-th layer has experts; the others have a dense MLP
    # pyrefly: ignore[bad-override]
    experts_every: int = at_most(1, 10_000)
    # pyrefly: ignore[bad-override]
    router: str = "softmax"  # function that turns router logits into scores: "softmax" or "sigmoid"
    # pyrefly: ignore[bad-override]
    normalize_router: bool = True  # whether the weights of the experts chosen for a token are normalized to sum to 1
    # pyrefly: ignore[bad-override]
    router_scale: float = 1.0  # factor by which the weights of the chosen experts are multiplied
    # pyrefly: ignore[bad-override]
    expert_groups: int = at_most(1, 2**16)  # number of groups into which the experts are divided
    # number of groups that a token may choose experts from: those with the highest sum of their two best scores
    # pyrefly: ignore[bad-override]
    expert_groups_used: int = at_most(1, 2**16)
    # update size of the router bias that balances the load without a loss (DeepSeek-V3); 0: no bias
    # pyrefly: ignore[bad-override]
    router_bias_rate: float = 0.0

    def _check_experts(self):
        not_negative(self, "model", "shared_experts dense_layers router_bias_rate")
        one_of("model.router", self.router, ("softmax", "sigmoid"))
        positive(self, "model", "experts_per_token experts_every router_scale expert_groups expert_groups_used")
        if not self.num_experts:
            for key, none in (("shared_experts", 0), ("dense_layers", 0), ("router_bias_rate", 0), ("balance_loss", 0),
                              ("router_z_loss", 0), ("capacity_factor", 0), ("expert_groups", 1), ("experts_every", 1)):
                if getattr(self, key) != none:
                    raise UserError(f"model.{key}", "the model has no experts", f"set {key}={none}")
            return
        if self.dense_layers >= self.num_layers:
            raise UserError("model.dense_layers", f"{self.dense_layers} of {self.num_layers} layers leaves no layer "
                            "for the experts", "lower it or set model.num_experts=0")
        if (layers := self.num_layers - self.dense_layers) % self.experts_every:
            raise UserError("model.experts_every", f"{self.experts_every} does not divide the {layers} layers "
                            f"after model.dense_layers={self.dense_layers}", "choose a divisor of it")
        if self.num_experts % self.expert_groups:
            raise UserError("model.expert_groups", f"{self.expert_groups} does not divide "
                            f"model.num_experts={self.num_experts}", "choose a divisor of it")
        if self.expert_groups_used > self.expert_groups:
            raise UserError("model.expert_groups_used", f"{self.expert_groups_used} exceeds "
                            f"model.expert_groups={self.expert_groups}", f"use {self.expert_groups} or fewer")
        super()._check_experts()


@dataclass(frozen=True)
class DeepseekV3Config(ExpertsConfig):
    """DeepSeek-V3: a mixture of experts with multi-head latent attention (MLA)."""

    name: str = "deepseek_v3"
    # rank of the latent that queries are compressed to (q_lora_rank); 0: queries are not compressed
    q_rank: int = at_most(0, 2**20)
    # pyrefly: ignore[bad-override]
    kv_rank: int = at_most(0, 2**20)  # rank of the latent that keys and values are compressed to (kv_lora_rank)
    # width of the part of a head with rotary positions, in addition to head_dim, which has none
    # pyrefly: ignore[bad-override]
    rope_head_dim: int = at_most(0, 2**16)
    # pyrefly: ignore[bad-override]
    value_head_dim: int = at_most(0, 2**16)  # width of a value head; 0: head_dim

    def __post_init__(self):
        super().__post_init__()
        not_negative(self, "model", "q_rank kv_rank rope_head_dim value_head_dim")
        if not self.kv_rank:
            raise UserError("model.kv_rank", "deepseek_v3 needs a latent", "give its width, such as 512")
        if "kv_rank" in self.mup_base and not self.q_rank:
            raise UserError("model.mup_base.kv_rank", "queries without a latent grow with embed_dim, and they have the "
                            "latents' logical axis", "leave it out, so that the latent grows like embed_dim")
        if self.rope_head_dim < 2 or self.rope_head_dim % 2:
            raise UserError("model.rope_head_dim", f"{self.rope_head_dim} is not a width that rotates",
                            "give an even number, such as 64")
        if self.num_kv_heads != self.num_heads:
            raise UserError("model.num_kv_heads", f"{self.num_kv_heads} differs from model.num_heads={self.num_heads}",
                            "set it to 0: latent attention has as many key and value heads as query heads")
        derive(self, "value_head_dim", self.head_dim)
        self._check_parts()

    def _check_parts(self) -> None:
        """Refuse heads of which by `mup_base` one part grows and another one does not."""
        grown = self.growth.get("head_dim", 1)
        for key in ("rope_head_dim", "value_head_dim"):
            here, there = getattr(self, key), self.mup_base.get(key, 0)
            if not there and grown != 1 and (key, here) != ("value_head_dim", self.head_dim):
                raise UserError(f"model.mup_base.{key}", f"heads are {grown:g} times as wide as in the base, and it "
                                f"does not say what model.{key}={here} was there", "give that")
            if there and here != grown * there:
                raise UserError(f"model.{key}", f"{here} is {here / there:g} times its width in model.mup_base, and "
                                f"head_dim {grown:g} times", "let both grow by the same factor, or keep head_dim")


@dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """Gemma 3: local layers with a sliding window, and global layers, each kind with its own rotary base."""

    name: str = "gemma3"
    window: int = 512  # sliding window of the local layers, in tokens
    # pyrefly: ignore[bad-override]
    global_every: int = 6  # every N-th layer is global: it uses full attention
    rope_theta: float = 1_000_000.0  # base frequency of the rotary positions in the global layers
    local_rope_theta: float = 10_000.0  # base frequency of the rotary positions in the local layers
    rope_factor: float = 1.0  # divisor of positions in the global layers: 1 in Gemma 3 1B, 8 in 4B and larger
    query_scale: int = 0  # attention scores are divided by the square root of this number; 0: head_dim
    norm_eps: float = 1e-6

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "window global_every rope_theta local_rope_theta rope_factor")
        not_negative(self, "model", "query_scale")
        derive(self, "query_scale", self.head_dim)
        if self.growth.get("head_dim", 1) != 1 and self.query_scale != self.head_dim:
            raise UserError("model.query_scale", f"{self.query_scale} does not grow with heads that grow by "
                            "model.mup_base", "leave it 0, or keep head_dim")


@dataclass(frozen=True)
class GptOssConfig(RoutedConfig):
    """gpt-oss: a mixture of experts with biases and attention sinks; every second layer has a sliding window."""

    name: str = "gpt_oss"
    window: int = 128  # sliding window of the local layers, in tokens
    # pyrefly: ignore[bad-override]
    global_every: int = 2  # every N-th layer is global: it uses full attention
    rope_theta: float = 150_000.0  # base frequency of the rotary position embedding (RoPE)
    num_experts: int = at_most(32, 2**16)  # mixture of experts: number of routed experts in a layer
    experts_per_token: int = at_most(4, 2**16)  # number of experts that process each token (top-k)
    # limit of an expert's activations: the up projection is clamped to [-limit, limit], the gate from above only
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702  # alpha in the experts' activation, gate x sigmoid(alpha x gate)
    tied_embeddings: bool = False  # whether the output projection shares the weights of the embedding table
    sinks = True

    def _check_experts(self):
        positive(self, "model", "window global_every num_experts swiglu_limit swiglu_alpha")
        super()._check_experts()


@dataclass(frozen=True)
class VisionLanguageConfig(PictureConfig, LlamaConfig):
    """A vision-language model: a Llama decoder of text and images, with an image encoder and a connector."""

    name: str = "vision_language"
    text = False

    def __post_init__(self):
        super().__post_init__()
        if self.mtp_loss_weight:
            raise UserError("model.mtp_loss_weight", "it is not supported with images",
                            "leave it out")

    def attentions(self, seq_len: int) -> list[tuple[int, int, int, bool]]:
        """Return that of pictures, and that of the decoder."""
        return [*super().attentions(seq_len), (seq_len, 0, self.head_dim, True)]


FAMILIES: dict[str, type[ModelConfig]] = {
    "gpt2": Gpt2Config, "llama": LlamaConfig, "qwen2": LlamaConfig, "qwen3": LlamaConfig,
    "mixtral": ExpertsConfig, "qwen3_moe": ExpertsConfig, "deepseek_v3": DeepseekV3Config, "gemma3": Gemma3Config,
    "gpt_oss": GptOssConfig, "events": EventsConfig, "clips": ClipsConfig, "siglip": DualEncoderConfig,
    "clip": DualEncoderConfig, "vision_language": VisionLanguageConfig, "picture_flow": PictureFlowConfig,
    "whisper": WhisperConfig}
