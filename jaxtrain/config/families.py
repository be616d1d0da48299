"""The shape of a model: a dataclass for each family with just the fields that it reads. `model.name` picks the class.

JAX is not imported here, so that a mistake in a config is told at once.
"""

from dataclasses import dataclass, fields

from jaxtrain.config.field_checks import derive, not_negative, one_of, positive
from jaxtrain.config.modality_families import ClipsConfig, EventsConfig, WhisperConfig
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.vision_keys import DualEncoderConfig, PictureConfig, PictureFlowConfig
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """The fields that every decoder of text has besides."""

    # pyrefly: ignore[bad-override]
    vocab_size: int = 320  # rows of the embedding table: at least the tokenizer's vocabulary
    # pyrefly: ignore[bad-override]
    window: int = 0  # sliding attention window in tokens; 0: none
    # pyrefly: ignore[bad-override]
    tied_embeddings: bool = True  # whether the output projection is the embedding table
    text = True

    def __post_init__(self):
        positive(self, "model", "vocab_size")
        not_negative(self, "model", "window")
        super().__post_init__()


@dataclass(frozen=True)
class Gpt2Config(DecoderConfig):
    """GPT-2: nothing beyond what every decoder has."""


@dataclass(frozen=True)
class RotaryConfig(DecoderConfig):
    """Rotary positions, as they are or scaled for longer rows."""

    rope_theta: float = 10_000.0  # base of the rotary positions
    rope_scaling: float = 1.0  # factor by which the context is extended; 1: unscaled positions
    rope_type: str = "llama3"  # the method of rope_scaling: "linear", "ntk", "llama3" or "yarn"
    rope_original_len: int = 8192  # llama3, yarn: the length that rope_scaling extends
    rope_low_freq_factor: float = 1.0  # llama3: frequencies with fewer turns in rope_original_len are scaled down
    rope_high_freq_factor: float = 4.0  # llama3: frequencies with more turns in rope_original_len are kept
    rope_beta_fast: float = 32.0  # yarn: frequencies with more turns than this in rope_original_len are kept
    rope_beta_slow: float = 1.0  # yarn: frequencies with fewer turns than this are scaled down
    rope_truncate: bool = True  # yarn: whether the bounds between these two are rounded to whole pairs of dimensions
    # yarn: factor of cosine and sine; 0: 0.1 ln(rope_scaling) + 1, or from rope_mscale
    rope_attention_factor: float = 0.0
    rope_mscale: float = 0.0  # yarn: mscale, as in the config.json of DeepSeek's models; 0: not used
    rope_mscale_all_dim: float = 0.0  # yarn: mscale_all_dim, as there; attention scores are scaled by its square

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
                                f"{getattr(self, low)}", "give more turns")
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
    """Llama, Qwen2 and Qwen3: rotary positions, scaled for longer rows, and a layer that looks ahead."""

    name: str = "llama"
    # pyrefly: ignore[bad-override]
    # loss weight of one more layer that predicts the token after the next; 0: no such layer
    mtp_loss_weight: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        not_negative(self, "model", "mtp_loss_weight")


@dataclass(frozen=True)
class RoutedConfig(RotaryConfig):
    """Rotary positions, and routed experts."""

    # pyrefly: ignore[bad-override]
    num_experts: int = 0  # routed experts of a layer; 0: dense layers
    # pyrefly: ignore[bad-override]
    experts_per_token: int = 2  # number of experts that each token is routed to
    # pyrefly: ignore[bad-override]
    expert_mlp_dim: int = 0  # width of one expert; 0: mlp_dim
    balance_loss: float = 0.0  # coefficient of the load-balance loss of each row and layer: docs/parallelism.md
    router_z_loss: float = 0.0  # coefficient of the z-loss, the squared log-partition of the router's logits
    # pyrefly: ignore[bad-override]
    # most tokens of a row per expert, relative to an even share; 0: no limit (none dropped)
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
    """Mixtral and Qwen3 with experts: Llama's fields, and those of the router and the experts."""

    name: str = "mixtral"
    # pyrefly: ignore[bad-override]
    shared_experts: int = 0  # additional experts that every token uses, computed as one wide expert
    # pyrefly: ignore[bad-override]
    dense_layers: int = 0  # number of first layers that have a dense MLP of mlp_dim instead of experts
    # pyrefly: ignore[bad-override]
    experts_every: int = 1  # after dense_layers, every N-th layer has experts, the others a dense MLP
    # pyrefly: ignore[bad-override]
    router: str = "softmax"  # how logits become scores: "softmax" or "sigmoid"
    # pyrefly: ignore[bad-override]
    normalize_router: bool = True  # whether the weights of a token's experts are made to add up to 1
    # pyrefly: ignore[bad-override]
    router_scale: float = 1.0  # factor by which these weights are multiplied
    # pyrefly: ignore[bad-override]
    expert_groups: int = 1  # groups into which the experts are divided
    # pyrefly: ignore[bad-override]
    expert_groups_used: int = 1  # groups that a token may choose from: those whose two best experts score highest
    # pyrefly: ignore[bad-override]
    router_bias_rate: float = 0.0  # step of the bias that evens out expert load (DeepSeek-V3); 0: no bias

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
    """DeepSeek-V3: experts, and attention through latents."""

    name: str = "deepseek_v3"
    q_rank: int = 0  # width of the queries' latent; 0: none
    # pyrefly: ignore[bad-override]
    kv_rank: int = 0  # width of the keys' and values' latent
    # pyrefly: ignore[bad-override]
    rope_head_dim: int = 0  # dimensions of a head with rotary positions, in addition to head_dim without
    # pyrefly: ignore[bad-override]
    value_head_dim: int = 0  # 0: head_dim

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
                            "leave it 0: latent attention has as many")
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
                                f"head_dim {grown:g} times", "let both grow alike, or keep head_dim")


@dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """Gemma 3: layers with a sliding window, and among them layers that attend to everything, with two rotary bases."""

    name: str = "gemma3"
    window: int = 512  # sliding window of the local layers, in tokens
    # pyrefly: ignore[bad-override]
    global_every: int = 6  # every N-th layer is global
    rope_theta: float = 1_000_000.0  # base of the rotary positions in the global layers
    local_rope_theta: float = 10_000.0  # base of the rotary positions in the layers with a window
    rope_factor: float = 1.0  # divisor of positions in the global layers: 8 from 4B on, 1 in 1B
    query_scale: int = 0  # scores are divided by its square root; 0: head_dim
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
    """gpt-oss: experts with biases in all layers, of which every second one has a sliding window, and sinks."""

    name: str = "gpt_oss"
    window: int = 128  # sliding window of the local layers, in tokens
    # pyrefly: ignore[bad-override]
    global_every: int = 2  # every N-th layer is global
    rope_theta: float = 150_000.0  # base of the rotary positions
    num_experts: int = 32  # routed experts of a layer
    experts_per_token: int = 4  # number of experts that each token is routed to
    swiglu_limit: float = 7.0  # clamps an expert's gate and up projections, the gate only from above
    swiglu_alpha: float = 1.702  # alpha of the gated activation x * sigmoid(alpha * x)
    tied_embeddings: bool = False  # whether the output projection is the embedding table
    sinks = True

    def _check_experts(self):
        positive(self, "model", "window global_every num_experts swiglu_limit swiglu_alpha")
        super()._check_experts()


@dataclass(frozen=True)
class VisionLanguageConfig(PictureConfig, LlamaConfig):
    """A Llama decoder whose rows hold images among the text, read by an encoder and a connector."""

    name: str = "vision_language"
    text = False

    def __post_init__(self):
        super().__post_init__()
        if self.mtp_loss_weight:
            raise UserError("model.mtp_loss_weight", "images are not predicted, so it has no next tokens",
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
