"""A decoder-only transformer, assembled from the parts that a model file supplies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.base.annotations import PyTree
from jaxtrain.base.further_sums import LARGEST
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.remat_policies import policies
from jaxtrain.config.schema import MeshConfig, TrainConfig
from jaxtrain.errors import UserError
from jaxtrain.kernels.biased_heads import for_head
from jaxtrain.kernels.functions import soft_capped
from jaxtrain.models import training_noise
from jaxtrain.models.attention import head_logits
from jaxtrain.models.attention.kv_cache import CACHE, Aux, Cache
from jaxtrain.models.heads.scalar_head import ScalarHead
from jaxtrain.models.layers import INSIDE, Embed, Head, LearnedPositions, Stack
from jaxtrain.models.rematerialization import cut, layers_at_once
from jaxtrain.parallel.expert_options import DEFAULT, ExpertOptions
from jaxtrain.sharding import activations

if TYPE_CHECKING:
    from jaxtrain.models.heads.multi_token_prediction import MTPHead
    from jaxtrain.parallel.pipeline.stage_placement import Slots


@dataclass(frozen=True)
class Compute:
    """The options of how a model is computed; they never change the result."""

    attention: str = "auto"
    experts: ExpertOptions = DEFAULT
    remat: str = "none"
    unroll: int = 1
    context: str = "auto"
    recurrent_kernel: str = "auto"

    @classmethod
    def of(cls, model: ModelConfig, train: TrainConfig, mesh: MeshConfig, platform: str = "",
           pipeline: bool = False) -> "Compute":
        """Return what a config asks for, on devices of a platform such as "gpu", with or without a pipeline."""
        unroll = layers_at_once(model, train, platform, pipeline)
        return cls(train.attention, ExpertOptions.of(train), train.remat, unroll, mesh.context_strategy,
                   train.recurrent_kernel)


class Block(nnx.Module):
    """A pre-norm residual block: attention, then an MLP or experts."""

    def __init__(self, norm: Callable[[], nnx.Module], attention: Callable[[], Any], mlp: Callable[[], nnx.Module]):
        """Make the parts of what makes a norm, attention, and the MLP or experts."""
        self.attention_norm, self.attention = norm(), attention()
        self.mlp_norm, self.mlp = norm(), mlp()

    @property
    def numbered(self) -> bool:
        """Whether attention reads the number of the layer."""
        return getattr(self.attention, "numbered", False)

    def kind(self, layer: int) -> bool:
        """Return of which of two kinds attention is in the layer with this number."""
        return self.attention.everywhere(layer)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: PyTree, *layer: jax.Array,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        """Apply the block; `layer` is its number, where attention reads it."""
        h = activations.enter(self.attention_norm(x_BTD), INSIDE, shared_by=self.attention.shared_by)
        y_BTD, aux = self.attention(h, segments_BT, angles, *layer, cache=cache)
        x_BTD = checkpoint_name(x_BTD + y_BTD, "dots")  # kept in place of the product that was added
        y_BTD, routed = self.feed_forward(self.mlp_norm(x_BTD), segments_BT)
        return x_BTD + y_BTD, aux | routed

    def feed_forward(self, h_BTD: jax.Array, segments_BT: jax.Array | None) -> tuple[jax.Array, dict[str, Any]]:
        """Return what the MLP or the experts make of a normalised activation, and what experts report of their load."""
        if getattr(self.mlp, "routes", False):
            return self.mlp(h_BTD, segments_BT)
        return self.mlp(activations.enter(h_BTD, INSIDE, shared_by=("act_mlp",))), {}


class Decoder(nnx.Module):
    """Tokens to logits; `hidden` and `head` are separate so that the loss never has to hold all logits."""

    STACKS = ("first_blocks", "blocks")  # parameters that can be split over pipeline stages, in order
    reward_head: ScalarHead | None = None  # in place of the output projection, where `make_model` gives it one
    value_head: ScalarHead | None = None  # likewise, beside the output projection
    logit_factor = 1.0  # of the output projection; `make_model` sets another
    logit_cap = 0.0  # the soft cap of logits; 0: none
    mtp_after_norm = False  # whether layers that predict further tokens read what the output head reads

    def __init__(self, embed: Embed, block: Callable[[nnx.Rngs], nnx.Module], num_layers: int, norm: nnx.Module, *,
                 compute: Compute, rngs: nnx.Rngs, positions: LearnedPositions | None = None,
                 rotary: Any = None, head: Head | None = None,
                 first: Callable[[nnx.Rngs], nnx.Module] | None = None, num_first: int = 0,
                 ahead: "Callable[[nnx.Rngs], MTPHead] | None" = None, grouped: bool = False):
        """Stack `num_first` layers like `first`, then the rest like `block`.

        `grouped`: each of those is a `Group` of layers.
        """
        self.embed, self.positions, self.rotary = embed, positions, rotary
        stack = partial(Stack, unroll=compute.unroll, rngs=rngs)
        kept = policies("none" if grouped else compute.remat, num_layers)

        self.first_blocks = stack(first, num_first, remat=cut(kept, 0, num_first)) if first and num_first else None
        self.blocks = stack(block, num_layers - num_first, first=num_first, remat=cut(kept, num_first, num_layers))
        if self.first_blocks is not None:
            self.first_blocks.after = self.blocks.single_layers
        self.norm, self.output = norm, head
        self.ahead = ahead(rngs) if ahead else None

    def hidden(self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None,
               positions_BT: jax.Array | None = None) -> jax.Array:
        """Return the final normalized activations, one vector per token."""
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        x_BTD, _ = self.through(self.begin(tokens_BT, positions_BT), segments_BT, positions_BT)
        return self.finish(x_BTD)

    # The three parts of `hidden`; a pipeline runs them on different stages.
    def begin(self, tokens_BT: jax.Array, positions_BT: jax.Array,
              noise: Mapping[str, jax.Array] = MappingProxyType({})) -> jax.Array:
        """Return the embeddings, with the noise that a batch asks for (NEFTune)."""
        x_BTD = self.embed(tokens_BT)
        return training_noise.on_embeddings(x_BTD if self.positions is None else x_BTD + self.positions(positions_BT),
                                            noise)

    def through(self, x_BTD: jax.Array, segments_BT: jax.Array | None, positions_BT: jax.Array,
                slots: "Mapping[str, Slots] | None" = None,
                cache: Cache | None = None, given: PyTree = None) -> tuple[jax.Array, Aux]:
        """Apply all layers, or those in the `slots` of a stage; also returns auxiliary values, stacked over layers.

        With a `cache`, these have the new entries of each stack under `CACHE`. `given`: what layers read beside angles,
        where both have names.
        """
        angles = self.rotary.angles(positions_BT) if self.rotary is not None else None
        angles = angles if given is None else angles | given
        slots, entries, largest, aux = slots or {}, {}, {}, {}
        for name in self.STACKS:
            if (stack := getattr(self, name)) is not None:
                x_BTD, aux = stack(x_BTD, segments_BT, angles, slots=slots.get(name), cache=cache and cache.of(name))
                entries[name] = aux.pop(CACHE, None)
                largest |= {name: head_logits.over_rows(aux.pop(LARGEST))} if LARGEST in aux else {}
        return x_BTD, _totals(aux) | ({CACHE: entries} if cache else {}) | ({LARGEST: largest} if largest else {})

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the last norm."""
        return activations.constrain(self.norm(x_BTD), *INSIDE)

    def look_ahead(self, x_BTD: jax.Array, following: Sequence[jax.Array], segments_BT: jax.Array | None,
                   positions_BT: jax.Array) -> Iterator[tuple[jax.Array, dict[str, jax.Array]]]:
        """Predict tokens after the next: yield for each layer the input of the output head, and auxiliary values.

        Args:
            x_BTD: activations of the last layer: behind the last norm if `mtp_after_norm`, before it otherwise.
            following: of each layer the tokens whose embeddings it reads: those that follow, then the ones after those;
                negative where none follows, as elsewhere for targets that do not count.
        """
        head = self.ahead
        angles = self.rotary.angles(positions_BT) if self.rotary is not None else None
        for next_BT in following:
            assert head is not None
            x_BTD, y_BTD, aux = head(x_BTD, self.embed(jnp.maximum(next_BT, 0)), segments_BT, angles)
            yield y_BTD, aux
            x_BTD, head = y_BTD if self.mtp_after_norm else x_BTD, head.later

    def head(self) -> jax.Array:
        """Return the output projection w_DV, laid out as at rest: a separate one, or the tied embedding table."""
        if self.reward_head is not None:
            raise UserError("model", "it is a reward model, with a reward head in place of the output projection",
                            "give a language model")
        w_DV = (self.embed if self.output is None else self.output).head()  # or with rows of a bias, see for_head
        return w_DV if self.logit_factor == 1 else (w_DV * self.logit_factor).astype(w_DV.dtype)

    def __call__(self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None,
                 positions_BT: jax.Array | None = None) -> jax.Array:
        """Return float32 logits for every token, for inspection and sampling."""
        return self.logits(self.hidden(tokens_BT, segments_BT, positions_BT))

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return the float32 logits of final activations, all at once."""
        head_DV = activations.gather(self.head(), "embed", "vocab")
        return soft_capped(jnp.einsum(
            "btd,dv->btv", for_head(x_BTD, head_DV), head_DV, preferred_element_type=jnp.float32,
            out_sharding=activations.activation_spec("batch", "seq", "act_vocab")), self.logit_cap)


def _totals(aux: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sum the auxiliary values of all rows in the array, from [layers, B, parts, ...] to [layers, ...]."""
    return {name: value if name == "penalty" else value.sum((1, 2)) for name, value in aux.items()}
