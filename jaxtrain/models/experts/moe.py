"""A mixture-of-experts layer in place of an MLP: a router, routed experts, and shared experts that see every token.

The routed part is one manual region (`shard_map`), in which each device routes its own tokens. Where experts are split
over `tensor` too, each device computes a part of their width, and the parts are summed as the sequence is split again.

Shape suffixes: B batch, T sequence, D embedding, E experts, F expert width, N tokens.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.base.narrow_formats import BLOCKS
from jaxtrain.config.model_config import Experts, ModelConfig
from jaxtrain.kernels.functions import swiglu
from jaxtrain.models import training_noise
from jaxtrain.models.attention.kv_cache import Aux
from jaxtrain.models.experts import given_routes, kept_routes
from jaxtrain.models.experts.gated_swiglu import GatedSwiGLU
from jaxtrain.models.experts.router import Routing, capacity, route
from jaxtrain.models.layers import INSIDE, RESIDUAL, Linear, SwiGLU, param
from jaxtrain.parallel.expert_options import DEFAULT, ExpertOptions
from jaxtrain.parallel.experts import Activation, through_experts
from jaxtrain.parallel.rows import Row
from jaxtrain.sharding import activations, mesh_context, products

WIDEN = ("experts", "expert_embed", "expert_mlp")
NARROW = ("experts", "expert_mlp", "expert_embed")
MATRICES = {"gate": WIDEN, "up": WIDEN, "down": NARROW}  # of the experts, and their logical names
WIDE_BIAS, NARROW_BIAS = ("experts", "expert_mlp"), ("every_expert", "expert_embed")


class Router(nnx.Module):
    """The router's parameters: one vector per expert, and a bias if that is used to balance the load.

    Args:
        biased: whether another bias is learned, of the logits.
        scaled: whether a factor of the weight of each expert is learned.
    """

    def __init__(self, c: Experts, embed_dim: int, *, biased: bool = False, scaled: bool = False, rngs: nnx.Rngs):
        # Routing compares close numbers, so it is computed in float32.
        self.kernel = param(rngs, (embed_dim, c.num), ("embed", "router"), compute_dtype="float32")
        self.bias = param(rngs, (c.num,), ("router_bias",), std=0, compute_dtype="float32",
                          update="balance_load") if c.bias_rate else None
        self.logit_bias = param(rngs, (c.num,), ("router_bias",), std=0,
                                compute_dtype="float32") if biased else None
        self.expert_scale = param(rngs, (c.num,), ("router_bias",), std=0, value=1.0,
                                  compute_dtype="float32") if scaled else None


class MoE(nnx.Module):
    """Routed SwiGLU experts, or those of another activation, and shared ones."""

    adapter: Any = None  # models/lora.py gives the experts some
    routes = True  # a block that has it returns its penalty and sums, too

    def __init__(self, config: ModelConfig, *, out_std: float, options: ExpertOptions = DEFAULT,
                 biased: bool = False, shared_bias: bool = False, activation: Activation = swiglu, gated: bool = True,
                 shared: Callable[..., nnx.Module] = SwiGLU, scaled: bool = False, rngs: nnx.Rngs):
        """Make the parameters.

        Args:
            biased: whether the router and routed experts have biases.
            shared_bias: whether the shared ones and those of the latent do.
            activation: of the gate and up of routed experts.
            gated: whether these have a gate; without, the activation is of up alone.
            shared: makes the MLP of shared experts.
            scaled: whether the router has a factor of the weight of each expert.
        """
        c = config.experts
        E, D, F = c.num, c.latent_dim or config.embed_dim, c.mlp_dim
        self.experts, self.options, self.activation = c, options, activation
        self.router = Router(c, config.embed_dim, biased=biased, scaled=scaled, rngs=rngs)
        self.gate, self.up = (param(rngs, (E, D, F), WIDEN) if gated or up else None for up in range(2))
        self.down = param(rngs, (E, F, D), NARROW, out_std)
        self.gate_bias, self.up_bias, self.down_bias = (
            param(rngs, (E, width), names, std=0) if biased else None
            for width, names in ((F, WIDE_BIAS), (F, WIDE_BIAS), (D, NARROW_BIAS)))
        shared = GatedSwiGLU if c.shared_gated else partial(shared, bias=shared_bias)
        self.shared = shared(config.embed_dim, c.shared_width, out_std=out_std, rngs=rngs) if c.shared_width else None
        self.into_latent, self.out_of_latent = (
            Linear(equation, shape, names, RESIDUAL, bias=shared_bias, std=std, rngs=rngs) if c.latent_dim else None
            for equation, shape, names, std in (
                ("btd,dl->btl", (config.embed_dim, D), ("embed", "latent"), 0.02),
                ("btl,ld->btd", (D, config.embed_dim), ("latent", "embed"), out_std)))

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Apply the layer in the layout between blocks; also return each row's penalty [B] and sums [B, parts, ...]."""
        y_BTD, aux = self.routed(x_BTD, segments_BT)
        if self.shared is not None:
            y_BTD += self.shared(activations.enter(x_BTD, INSIDE, shared_by=("act_mlp",)))
        return y_BTD, aux

    def routed(self, x_BTD: jax.Array, segments_BT: jax.Array | None,
               *read: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Apply the routed experts only. `read`: what they are given, where the router reads something else."""
        real_BT = jnp.ones(x_BTD.shape[:2], bool) if segments_BT is None else segments_BT > 0
        named, weights, scales, kind = self._weights(), {}, {}, self.options.narrow()
        for name, (weight, axes) in named.items():
            if name in MATRICES and kind == products.FP8:
                weights[name], scales[name] = products.sent(
                    weight[...], lambda w, axes=axes: activations.gather(w, *axes))
            else:
                weights[name] = activations.gather(weight[...], *axes)
        latent = read if self.into_latent is None else (self.into_latent(x_BTD),)
        given = [] if (routes_BTK := given_routes.of_layer()) is None else [routes_BTK]
        noise = training_noise.of_layer("experts") if kind == "nvfp4" else None
        if activations.activation_spec() is None:
            return self._returned(*self._local(x_BTD, real_BT, weights, scales, given, noise, *latent))
        real_BT = activations.constrain(real_BT, "batch", "seq")
        between, (batch, seq) = activations.activation_spec(*RESIDUAL), map(activations.split_by, ("batch", "seq"))
        sums = dict.fromkeys(("tokens", "kept", "entropy", "balance"), P(batch, seq)) | dict.fromkeys(
            ("load", *[kept_routes.ROUTES] * kept_routes.are_kept()), P(batch, seq, None))
        return self._returned(*activations.manual_region(
            self._local,
            in_specs=(between, P(batch, seq), {name: activations.gathered_spec(*named[name][1]) for name in named},
                      dict.fromkeys(scales, P()), [P(batch, seq, None)] * len(given), P(batch, seq),
                      *[between] * len(latent)),
            out_specs=(between, {"penalty": P(batch)} | sums))(
                x_BTD, real_BT, weights, scales, [activations.constrain(x, "batch", "seq", None) for x in given],
                jax.tree.map(lambda bits_BT: activations.constrain(bits_BT, "batch", "seq"), noise), *latent))

    def _returned(self, y_BTD: jax.Array, aux: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return what experts returned, out of the latent if there is one."""
        return (y_BTD if self.out_of_latent is None else self.out_of_latent(y_BTD)), aux

    def _weights(self) -> dict[str, Any]:
        """Return the parameters that there are, with their logical names."""
        router = self.router
        found = {"kernel": (router.kernel, ("embed", "router")), "bias": (router.bias, ("router_bias",)),
                 **{name: (getattr(self, name), names) for name, names in MATRICES.items()},
                 "logit_bias": (router.logit_bias, ("router_bias",)),
                 "expert_scale": (router.expert_scale, ("router_bias",)), "gate_bias": (self.gate_bias, WIDE_BIAS),
                 "up_bias": (self.up_bias, WIDE_BIAS), "down_bias": (self.down_bias, NARROW_BIAS)}
        found = {name: one for name, one in found.items() if one[0] is not None}
        return found if self.adapter is None else found | self.adapter.weights()

    def _local(self, x_BTD, real_BT, w, scales, given: list[jax.Array], noise: PyTree,
               *latent) -> tuple[jax.Array, Aux]:
        """Process one device's tokens: split over `tensor` on entry and exit, gathered over it in between.

        `given`: the experts of each token, if the batch brings them.
        `noise`: random bits of tokens, for rounding.
        `latent`: what experts are given in place of what the router reads.
        """
        c = self.experts
        tensor, row = activations.axes_over("act_expert_mlp"), Row(activations.axes_over("seq"))
        split = tensor if x_BTD.shape[1] < real_BT.shape[1] else ()  # between blocks
        x_BTD, *latent = (lax.all_gather(x, split, axis=1, tiled=True) if split else x for x in (x_BTD, *latent))
        routing = route(c, x_BTD, real_BT, w["kernel"], w.get("bias"), row, w.get("logit_bias"),
                        w.get("expert_scale"), *given)
        x_BTD = latent[0] if latent else x_BTD
        B, T, D = x_BTD.shape
        x_ND, experts_NK, weights_NK, kept_NK = (a.reshape(B * T, -1) for a in (
            x_BTD, routing.experts_BTK, routing.weights_BTK, routing.kept_BTK))
        most = min(T, capacity(c, row.length(T))) * B * len(w["up"])
        biases = (w["gate_bias"], w["up_bias"]) if "gate_bias" in w else ()
        w = w | {name: products.Rounded(w[name], scale, w[name].dtype) for name, scale in scales.items()}
        axis, marks = activations.axes_over("experts"), None
        if (kind := self.options.narrow()) in BLOCKS:
            from jaxtrain.parallel import expert_blocks  # which only these formats read

            w |= expert_blocks.in_blocks({name: w[name] for name in MATRICES if name in w}, kind, tensor)
            marks = expert_blocks.marks(kind, (B, T), axis, noise and noise.of_choices(c.per_token))
        w |= {} if self.adapter is None else self.adapter.adapted(w)
        y_ND = through_experts(x_ND, experts_NK, weights_NK, kept_NK, w.get("gate"), w["up"], w["down"], biases,
                               axis=axis, options=self.options,
                               limit=most if c.capacity_factor else None, activation=self.activation,
                               weighted_inputs=c.weighted_inputs, marks=marks)
        y_BTD = y_ND.reshape(B, T, D)
        if split:
            y_BTD = lax.psum_scatter(y_BTD, split, scatter_dimension=1, tiled=True)
        elif tensor:
            y_BTD = lax.psum(y_BTD, tensor)
        if "down_bias" in w:
            y_BTD = activations.with_bias(y_BTD, _down_bias(routing, w["down_bias"], split))
        parts = {name: total[:, None] for name, total in routing.sums_B.items()}
        if kept_routes.are_kept():
            parts[kept_routes.ROUTES] = routing.experts_BTK
        return y_BTD, {"penalty": routing.penalty_B, **parts}


def _down_bias(routing: Routing, bias_ED: jax.Array, split: tuple[str, ...]) -> jax.Array:
    """Return the weighted sum of the biases of each token's experts, for the part of the tokens that `split` leaves.

    It is added where the tokens are, after the sums over devices, so that it is counted once.
    """
    weights_BTK = routing.weights_BTK * routing.kept_BTK
    hits_BTKE = routing.experts_BTK[..., None] == jnp.arange(len(bias_ED))
    weights_BTE = (weights_BTK[..., None] * hits_BTKE).sum(-2)
    if split:
        own = weights_BTE.shape[1] // lax.axis_size(split)
        weights_BTE = lax.dynamic_slice_in_dim(weights_BTE, lax.axis_index(split) * own, own, axis=1)
    return jnp.einsum("bte,ed->btd", weights_BTE, bias_ED.astype(jnp.float32))


def metrics(sums: dict[str, jax.Array], experts_per_token: int) -> dict[str, jax.Array]:
    """Return the values for metrics.jsonl from the `totals` of a whole batch: means over tokens and layers."""
    load_LE, tokens_L = sums["load"], jnp.maximum(sums["tokens"], 1)
    mean_L1 = jnp.maximum(load_LE.mean(-1, keepdims=True), 1e-8)
    mesh = mesh_context.current()
    devices = math.prod(mesh[0].shape[axis] for axis in activations.axes_over("experts")) if mesh else 1
    by_device_LP = load_LE.reshape(len(load_LE), devices, -1).mean(-1)
    # The load of the busiest device over an even share: beyond train.expert_buffer, its layer takes a further pass.
    shared = {"moe_max_device_load": (by_device_LP / mean_L1).max()} if devices > 1 else {}
    return shared | {
        "moe_max_load": (load_LE / mean_L1).max(),  # busiest expert's load over an even share, worst layer
        "moe_min_load": (load_LE / mean_L1).min(),
        "moe_dropped": 1 - sums["kept"].sum() / (tokens_L.sum() * experts_per_token),
        "moe_router_entropy": (sums["entropy"] / tokens_L).mean(),
        "balance_loss": (sums["balance"] / tokens_L).mean(),
    }
