"""The shape of a model: a dataclass for each family with just the fields that it reads. `model.name` picks the class.

JAX is not imported here, so that a mistake in a config is told at once.
"""

import dataclasses
from dataclasses import dataclass, fields

from jaxtrain.config.field_checks import derive, not_negative, one_of, positive
from jaxtrain.errors import UserError, nearest

# The keys of `mup_base`, and the logical axes whose sizes they are.
WIDTHS = {"embed_dim": ("embed", "expert_embed", "ahead", "norm"), "mlp_dim": ("mlp", "expert_mlp"),
          "num_heads": ("heads",), "num_kv_heads": ("kv_heads",), "head_dim": ("head_dim",),
          "kv_rank": ("latent", "rank")}


@dataclass(frozen=True)
class ModelConfig:
    """The fields that every family has."""

    name: str = "gpt2"  # the family
    num_layers: int = 4  # transformer blocks
    embed_dim: int = 128  # width of the residual stream
    num_heads: int = 4  # attention heads (of the queries)
    num_kv_heads: int = 0  # 0: as many as num_heads
    head_dim: int = 0  # 0: embed_dim / num_heads
    mlp_dim: int = 0  # 0: 4 x embed_dim
    max_seq_len: int = 1024  # the longest row in tokens; GPT-2 has a learned position for each
    norm_eps: float = 1e-5  # added to the variance in LayerNorm and RMSNorm
    # muP: widths of a narrow model whose best learning rate this one then has, as {"embed_dim": 64, "num_heads": 4}
    mup_base: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)

    # No fields (they have no annotation): what a family without such a field has.
    text = False  # whether it is a decoder of text; else a row is a sequence of a prepared corpus
    causal = True  # whether attention looks back only
    vocab_size = 0
    window = 0
    tied_embeddings = False
    rope_head_dim = 0
    value_head_dim = 0
    kv_rank = 0
    num_experts = 0
    experts_per_token = 0
    expert_mlp_dim = 0
    dense_layers = 0
    experts_every = 1
    capacity_factor = 0.0
    router_bias_rate = 0.0
    mtp_loss_weight = 0.0
    global_every = 0
    sinks = False  # whether attention has them
    fixed = ()  # paths of parameters that nobody trains

    def __post_init__(self):
        positive(self, "model", "num_layers embed_dim num_heads max_seq_len norm_eps")
        not_negative(self, "model", "num_kv_heads head_dim mlp_dim")
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), int) and value >= 2**31:
                raise UserError(f"model.{field.name}", f"{value} is too large for an array", "use less than 2^31")
        if not self.head_dim and self.embed_dim % self.num_heads:
            raise UserError("model.num_heads", f"{self.num_heads} does not divide model.embed_dim={self.embed_dim}",
                            "choose a divisor or set model.head_dim")
        derive(self, "num_kv_heads", self.num_heads)
        derive(self, "head_dim", self.embed_dim // self.num_heads)
        derive(self, "mlp_dim", 4 * self.embed_dim)
        if self.num_heads % self.num_kv_heads:
            raise UserError("model.num_kv_heads", f"{self.num_kv_heads} does not divide "
                            f"model.num_heads={self.num_heads}", "choose a divisor of it")
        if self.head_dim % 2:
            raise UserError("model.head_dim", f"{self.head_dim} is odd", "rotary positions need an even head_dim")
        self._check_base()

    def _check_base(self):
        base = self.mup_base
        for key, value in base.items():
            if not getattr(self, key, 0) or key not in WIDTHS:
                raise UserError(f"model.mup_base.{key}", "it is not a width of this model",
                                nearest(key, [width for width in WIDTHS if getattr(self, width)]))
            if type(value) is not int or value < 1:
                raise UserError(f"model.mup_base.{key}", f"{value!r} is not a width", "give a whole number above 0")
        if base and not {"embed_dim", "num_heads"} <= base.keys():
            raise UserError("model.mup_base", f"{base} does not say how wide the narrower model is and how many heads "
                            "it has", "give its embed_dim and num_heads")

    @property
    def growth(self) -> dict[str, float]:
        """How many times as wide as in `mup_base` each logical axis is that grows with the model; {} without one.

        What it does not name grows like embed_dim, but all heads together do so, and num_kv_heads like num_heads.
        """
        if not self.mup_base:
            return {}
        times = {key: getattr(self, key) / value for key, value in self.mup_base.items()}
        times = {"head_dim": times["embed_dim"] / times["num_heads"], "num_kv_heads": times["num_heads"]} | times
        return {axis: times.get(key, times["embed_dim"]) for key, axes in WIDTHS.items() for axis in axes}

    @property
    def longest_row(self) -> int:
        """The most steps of a row of data."""
        return self.max_seq_len

    @property
    def windows(self) -> dict[int, int]:
        """How many layers have each attention window; 0: none."""
        everywhere = self.num_layers // self.global_every if self.global_every else 0
        return {self.window: self.num_layers - everywhere} | ({0: everywhere} if everywhere else {})

    @property
    def stacked_layers(self) -> int:
        """How many entries the stacks of layers have; layers with experts are stacked with the dense ones before them.
        """
        return self.dense_layers + (self.num_layers - self.dense_layers) // self.experts_every


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """The fields that every decoder of text has besides."""

    # pyrefly: ignore[bad-override]
    vocab_size: int = 320  # rows of the embedding table: at least the tokenizer's
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
    rope_scaling: float = 1.0  # how many times longer than originally rows may be; 1: positions as they are
    rope_type: str = "llama3"  # how rope_scaling scales: "linear", "ntk", "llama3" or "yarn"
    rope_original_len: int = 8192  # llama3, yarn: the length that rope_scaling extends
    rope_low_freq_factor: float = 1.0  # llama3: frequencies with fewer turns in the original length are divided,
    rope_high_freq_factor: float = 4.0  # llama3: those with more turns than this are kept
    rope_beta_fast: float = 32.0  # yarn: frequencies with more turns in the original length are kept,
    rope_beta_slow: float = 1.0  # yarn: those with fewer turns than this are divided
    rope_truncate: bool = True  # yarn: whether the bounds between those are rounded to whole pairs
    rope_attention_factor: float = 0.0  # yarn: of cosine and sine; 0: 0.1 ln(rope_scaling) + 1, or from the mscales
    rope_mscale: float = 0.0  # yarn in DeepSeek's models: weight of that logarithm; the factor is divided by that of
    rope_mscale_all_dim: float = 0.0  # yarn: this weight, by whose factor squared deepseek_v3 multiplies scores

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
    mtp_loss_weight: float = 0.0  # of one more layer that predicts the token after the next; 0: no such layer

    def __post_init__(self):
        super().__post_init__()
        not_negative(self, "model", "mtp_loss_weight")


@dataclass(frozen=True)
class RoutedConfig(RotaryConfig):
    """Rotary positions, and routed experts."""

    # pyrefly: ignore[bad-override]
    num_experts: int = 0  # routed experts of a layer; 0: dense layers
    # pyrefly: ignore[bad-override]
    experts_per_token: int = 2  # how many of its experts a token passes through
    # pyrefly: ignore[bad-override]
    expert_mlp_dim: int = 0  # width of one expert; 0: mlp_dim
    balance_loss: float = 0.0  # coefficient of the load-balance loss of each row and layer: docs/parallelism.md
    router_z_loss: float = 0.0  # coefficient of the router logits' squared log-partition
    # pyrefly: ignore[bad-override]
    capacity_factor: float = 0.0  # what an expert takes of a row, over its even share; 0: all (nothing is dropped)

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
    shared_experts: int = 0  # experts that every token passes through besides, as one of their summed width
    # pyrefly: ignore[bad-override]
    dense_layers: int = 0  # the first layers, which have a dense MLP of mlp_dim instead
    # pyrefly: ignore[bad-override]
    experts_every: int = 1  # of the layers after those, every so many the last one has experts, the others a dense MLP
    # pyrefly: ignore[bad-override]
    router: str = "softmax"  # how logits become scores: "softmax" or "sigmoid"
    # pyrefly: ignore[bad-override]
    normalize_router: bool = True  # whether the weights of a token's experts are made to add up to 1
    # pyrefly: ignore[bad-override]
    router_scale: float = 1.0  # what the weights are then multiplied by
    # pyrefly: ignore[bad-override]
    expert_groups: int = 1  # a token's experts come from
    # pyrefly: ignore[bad-override]
    expert_groups_used: int = 1  # so many of so many groups: those whose two best experts score highest
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
    rope_head_dim: int = 0  # how much of a head turns with positions, beside head_dim that does not
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


@dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """Gemma 3: layers with a sliding window, and among them layers that attend to everything, with two rotary bases."""

    name: str = "gemma3"
    window: int = 512  # of the local layers, in tokens
    # pyrefly: ignore[bad-override]
    global_every: int = 6  # every so many layers the last one is global
    rope_theta: float = 1_000_000.0  # of the global layers
    local_rope_theta: float = 10_000.0  # of the layers with a window
    rope_factor: float = 1.0  # what positions are divided by in the global layers: 8 from 4B on, 1 in 1B
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
    window: int = 128  # of the local layers, in tokens
    # pyrefly: ignore[bad-override]
    global_every: int = 2  # every so many layers the last one is global
    rope_theta: float = 150_000.0  # base of the rotary positions
    num_experts: int = 32  # routed experts of a layer
    experts_per_token: int = 4  # how many of its experts a token passes through
    swiglu_limit: float = 7.0  # gate and up of an expert are clamped to it, the gate only from above
    swiglu_alpha: float = 1.702  # the gate is multiplied by the sigmoid of so many times itself
    tied_embeddings: bool = False  # whether the output projection is the embedding table
    sinks = True

    def _check_experts(self):
        positive(self, "model", "window global_every num_experts swiglu_limit swiglu_alpha")
        super()._check_experts()


TABLE_ROWS = 64  # divides the rows of tables of categories, so that most meshes split them evenly


@dataclass(frozen=True)
class EventsConfig(ModelConfig):
    """Events of users, or of anything else in time: a causal transformer that predicts the next one."""

    name: str = "events"
    # Columns of ids, and how many ids each has (with 0, which is for what is missing): {"item": 5000, "shop": 40}
    categories: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)
    numbers: list[str] = dataclasses.field(default_factory=list, hash=False)  # columns of numbers
    predict: str = ""  # the column of ids that is predicted; "": the first of model.categories
    time_loss: float = 0.0  # weight of the squared error of log(1 + time to the next event); 0: it is not predicted
    # pyrefly: ignore[bad-override]
    window: int = 0  # sliding attention window in events; 0: none
    # pyrefly: ignore[bad-override]
    tied_embeddings: bool = True  # whether the output projection is the table of the predicted column
    rope_theta: float = 10_000.0  # base of the rotary positions

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "rope_theta")
        not_negative(self, "model", "window time_loss")
        for name, ids in self.categories.items():
            if type(ids) is not int or not 0 < ids < 2**31:
                raise UserError(f"model.categories.{name}", f"{ids!r} is not a number of ids", "give 1 or more")
        if not self.categories:
            raise UserError("model.categories", "events without any cannot be predicted", "name the columns that "
                            "prepare_sequences events --category made, as {'item': 5000}")
        derive(self, "predict", next(iter(self.categories)))
        if self.predict not in self.categories:
            raise UserError("model.predict", f"{self.predict!r} is not among model.categories",
                            nearest(self.predict, self.categories))

    @property
    def vocab_size(self) -> int:  # pyrefly: ignore[bad-override]
        """How many ids the predicted column's table has room for."""
        return self.rows(self.predict)

    def rows(self, category: str) -> int:
        """Return the rows of a category's table: as many as it has ids, rounded up."""
        return -(-self.categories[category] // TABLE_ROWS) * TABLE_ROWS


@dataclass(frozen=True)
class WhisperConfig(ModelConfig):
    """Whisper: an encoder of log-mel frames, and a decoder of tokens that attends to it."""

    name: str = "whisper"
    # pyrefly: ignore[bad-override]
    vocab_size: int = 51_865  # rows of the embedding table: at least the tokenizer's
    max_seq_len: int = 448  # the longest row of tokens, with model.prefix and model.end; each has a learned position
    encoder_layers: int = 0  # blocks of the encoder; 0: num_layers, which are those of the decoder
    audio_positions: int = 1500  # of the encoder, for two frames each: 1500 are 30 seconds
    mask_padding: bool = True  # nothing attends to padding of audio; False: it is silence to the model, as published
    mels: int = 80  # bands of a frame: 80, or 128 in large-v3
    audio_chunk: int = 0  # streaming: positions of the encoder see their own chunk of so many, and earlier ones; 0: all
    audio_chunks_back: int = 0  # with audio_chunk, how many earlier chunks they see; 0: all
    # Tokens in front of every transcript: its start and, where they are the same for all, language, task and timestamps
    prefix: list[int] = dataclasses.field(default_factory=lambda: [50258], hash=False)
    end: int = 50257  # the token after a transcript
    ctc_weight: float = 0.0  # of the CTC loss of the encoder, in place of that share of the cross-entropy; 0: no head
    # SpecAugment (arXiv 1904.08779): frames and bands of training rows that are set to 0
    time_masks: int = 0  # how many stretches of frames
    time_mask: int = 100  # with time_masks, the most frames of a stretch
    mel_masks: int = 0  # how many ranges of bands
    mel_mask: int = 27  # with mel_masks, the most bands of a range

    tied_embeddings = True
    causal = False
    fixed = ("audio_positions",)

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "vocab_size audio_positions mels time_mask mel_mask")
        not_negative(self, "model", "encoder_layers audio_chunk audio_chunks_back ctc_weight time_masks mel_masks end")
        derive(self, "encoder_layers", self.num_layers)
        if self.mup_base:
            raise UserError("model.mup_base", "whisper has no rules for widths", "leave it out")
        if self.num_kv_heads != self.num_heads:
            raise UserError("model.num_kv_heads", f"{self.num_kv_heads} differs from model.num_heads={self.num_heads}",
                            "leave it 0: whisper has as many")
        if self.embed_dim % 2 or self.embed_dim < 4:
            raise UserError("model.embed_dim", f"{self.embed_dim} has no sines and cosines", "give an even one from 4")
        if self.audio_chunks_back and not self.audio_chunk:
            raise UserError("model.audio_chunks_back", "it is read with model.audio_chunk only", "set that, too")
        if self.ctc_weight > 1:
            raise UserError("model.ctc_weight", f"{self.ctc_weight} is a share above 1", "give one such as 0.3")
        if not self.prefix or len(self.prefix) >= self.max_seq_len:
            raise UserError("model.prefix", f"{len(self.prefix)} tokens in rows of {self.max_seq_len}",
                            "give the tokens that a transcript begins with, at least one")
        for key, tokens in (("prefix", self.prefix), ("end", [self.end])):
            if wrong := [token for token in tokens if type(token) is not int or not 0 <= token < self.vocab_size]:
                raise UserError(f"model.{key}", f"{wrong[0]!r} is no token below model.vocab_size={self.vocab_size}",
                                "give ids of the tokenizer")

    @property
    def longest_row(self) -> int:
        """The most frames of a row."""
        return 2 * self.audio_positions

    @property
    def transcript(self) -> int:
        """The most tokens of a transcript between `prefix` and `end`."""
        return self.max_seq_len - len(self.prefix)


FAMILIES: dict[str, type[ModelConfig]] = {
    "gpt2": Gpt2Config, "llama": LlamaConfig, "qwen2": LlamaConfig, "qwen3": LlamaConfig,
    "mixtral": ExpertsConfig, "qwen3_moe": ExpertsConfig, "deepseek_v3": DeepseekV3Config, "gemma3": Gemma3Config,
    "gpt_oss": GptOssConfig, "events": EventsConfig, "whisper": WhisperConfig}
