"""The base class of the configs of all model families."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtrain.config.field_checks import at_most, bounded, derive, number
from jaxtrain.errors import UserError, nearest


@dataclass(frozen=True)
class Experts:
    """The routed experts of a model and how tokens choose among them, whatever its family calls the keys.

    The defaults are those of a model without any; where it has some, RoutedDecoderConfig and its families say what they
    mean.
    """

    num: int = 0  # in a layer; 0: all layers are dense
    per_token: int = 0
    mlp_dim: int = 0
    dense_layers: int = 0  # first layers without experts
    every: int = 1  # after those, every N-th layer has experts
    shared: int = 0  # experts that process every token
    shared_mlp_dim: int = 0  # width of the MLP that they form; 0: `shared` times `mlp_dim`
    latent_dim: int = 0  # width of what routed experts are given and return, between two matrices; 0: embed_dim
    shared_gated: bool = False  # what they return is multiplied by the sigmoid of a logit of each token
    score: str = "softmax"  # or "sigmoid": what makes scores of the router's logits; or "sparse_mixer", which chooses
    jitter: float = 0.0  # of "sparse_mixer"
    normalized: bool = True  # the weights of a token's experts sum to 1
    sum_eps: float = 1e-20  # added to the sum by which they are divided for that
    scale: float = 1.0  # of these weights
    groups: int = 1
    groups_used: int = 1
    group_best: int = 2  # a group's score is the sum of so many of its best experts'
    weighted_inputs: bool = False  # weights multiply what experts are given, not what they return
    capacity_factor: float = 0.0
    balance_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    @property
    def shared_width(self) -> int:
        """The width of the MLP that the shared experts form together; 0: there are none."""
        return self.shared_mlp_dim or self.shared * self.mlp_dim


@dataclass(frozen=True)
class ModelConfig:
    """The fields that every family has, and what other code asks a model of any family."""

    name: str = "gpt2"  # the model family
    num_layers: int = at_most(4, 10_000, above=0)  # transformer blocks
    embed_dim: int = at_most(128, 2**20, above=0)  # hidden size: the width of the residual stream
    # number of attention heads (of query heads, with grouped-query attention)
    num_heads: int = at_most(4, 2**16, above=0)
    # number of key and value heads; 0: num_heads, fewer: grouped-query attention
    num_kv_heads: int = at_most(0, 2**16, least=0)
    head_dim: int = at_most(0, 2**16, least=0)  # width of one attention head; 0: embed_dim / num_heads
    mlp_dim: int = at_most(0, 2**22, least=0)  # width of the MLP's hidden layer; 0: 4 x embed_dim
    # the longest sequence in tokens; GPT-2 learns one position embedding for each
    max_seq_len: int = at_most(1024, 2**28, above=0)
    norm_eps: float = number(1e-5, above=0)  # epsilon of LayerNorm and RMSNorm, added to the variance
    # muP: the widths of a narrow model, such as {"embed_dim": 64, "num_heads": 4}, whose best learning rate also suits
    # this model
    mup_base: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)

    # No fields (they have no annotation): what most families have.
    text = False  # whether it is a decoder of text; else a row is a sequence of a prepared corpus
    causal = True  # whether attention looks back only
    flops_known = True  # whether each step of a row meets each matrix, so that FLOPs per step follow from parameters
    rows_of = "sequences"  # what such a row has: "sequences", one of them, or "images", several
    sinks = False  # whether attention has them
    chunked = False  # whether a window is a chunk of the row, whose tokens see one another alone
    attention_cap = 0.0  # the soft cap of attention's scores; 0: none
    chunk_kernels = False  # whether layers have states whose chunks kernels compute
    head_bias = False  # whether the output projection has a bias
    latent_attention = False  # whether keys and values are made of a latent
    compares_rows = False  # whether the loss compares each row of a batch with the others
    scaled_embeddings = False  # whether embeddings are multiplied by the square root of their width
    fixed = ()  # paths of parameters that nobody trains
    attention_widths: ClassVar[Mapping[int, int]] = {}  # by the window of layers, where it is not `attention_width`
    # tables of which each token takes a row, besides the embeddings: by path, the key with how many rows they have
    lookups: ClassVar[Mapping[str, str]] = {}
    # whether layers that predict further tokens read activations behind the norm before the output head, as published
    mtp_after_norm = False
    # the keys of `mup_base`, and the logical axes whose sizes they are
    widths: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_dim": ("embed", "expert_embed", "ahead", "norm"), "mlp_dim": ("mlp", "expert_mlp"),
        "num_heads": ("heads",), "num_kv_heads": ("kv_heads",), "head_dim": ("head_dim",)}

    def __post_init__(self):
        bounded(self, "model")
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
            if key not in (known := [width for width in self.widths if getattr(self, width)]):
                raise UserError(f"model.mup_base.{key}", "it is not a width of this model", nearest(key, known))
            if type(value) is not int or value < 1:
                raise UserError(f"model.mup_base.{key}", f"{value!r} is not a width", "give a whole number above 0")
        if base and not {"embed_dim", "num_heads"} <= base.keys():
            raise UserError("model.mup_base", f"{base} does not say how wide the narrower model is and how many heads "
                            "it has", "give its embed_dim and num_heads")

    @property
    def growth(self) -> dict[str, float]:
        """The width of each logical axis that grows with the model, relative to `mup_base`; {} without one.

        What it does not name grows like embed_dim, but all heads together do so, and num_kv_heads like num_heads.
        """
        if not self.mup_base:
            return {}
        times = {key: getattr(self, key) / value for key, value in self.mup_base.items()}
        times = {"head_dim": times["embed_dim"] / times["num_heads"], "num_kv_heads": times["num_heads"]} | times
        return {axis: times.get(key, times["embed_dim"]) for key, axes in self.widths.items() for axis in axes}

    @property
    def rows_cut(self) -> bool:
        """Whether a mesh may split rows over `context`; a family whose attention looks both ways has to say so."""
        return self.causal

    @property
    def longest_row(self) -> int:
        """The most steps of a row of data."""
        return self.max_seq_len

    def other_rows(self, seq_len: int) -> list[tuple[str, int, str, bool]]:
        """Return what a mesh cuts besides rows of data: key, length, of what, and whether attention looks back only."""
        return []

    def attentions(self, seq_len: int) -> list[tuple[int, int, int, bool]]:
        """Return what kernels compute: queries, keys if of another sequence, head_dim, whether it looks back only."""
        return [(seq_len, 0, self.head_dim, self.causal)]

    @property
    def attention_width(self) -> int:
        """The widths of a query and of a value in one head, together."""
        return 2 * self.head_dim

    @property
    def windows(self) -> dict[int, int]:
        """The number of layers for each attention window; 0: none."""
        return {0: self.num_layers}

    @property
    def state_flops(self) -> float:
        """The FLOPs of the recurrent states of all layers for one token, forward, as if computed token by token."""
        return 0.0

    @property
    def vocabulary(self) -> int:
        """The number of rows of the embedding table of tokens; 0: the model reads none."""
        return 0

    @property
    def ties_head(self) -> bool:
        """Whether the output projection is the embedding table."""
        return False

    @property
    def multi_token_loss(self) -> float:
        """The weight of the loss for predicting tokens after the next; 0: the model does not."""
        return 0.0

    @property
    def multi_token_layers(self) -> int:
        """The number of layers that do so, each one token further."""
        return 0

    @property
    def experts(self) -> Experts:
        """The routed experts; `Experts()`: there are none."""
        return Experts()

    @property
    def period(self) -> int:
        """The number of layers, after the dense ones, after which kinds of layers repeat: those of a stack's entry."""
        return self.experts.every

    @property
    def rough_size(self) -> int:
        """A number of parameters of the order of the model's, from its sizes alone."""
        layer = self.num_heads * self.head_dim + max(self.mlp_dim, self.experts.mlp_dim * self.experts.num)
        return self.embed_dim * (self.vocabulary + self.num_layers * layer)

    @property
    def stacked_layers(self) -> int:
        """The number of stacked layers; layers with experts are stacked with the dense ones before them."""
        dense = self.experts.dense_layers
        return dense + (self.num_layers - dense) // self.period

    @property
    def staged_layers(self) -> int:
        """The number of entries of stacks that the pipeline stages share."""
        return self.stacked_layers
