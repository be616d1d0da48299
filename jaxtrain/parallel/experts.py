"""Expert parallelism: send tokens to the devices that hold their experts and back, exactly, whatever the imbalance.

Called inside a manual region: arrays are one device's own. Experts are split over one mesh axis of n devices, each of
which has N tokens of its own. Shapes are static, so a buffer must hold what one device may receive in the worst case:
with K experts per token and L experts per device, n N min(K, L) rows (`limit` lowers that where experts have a
capacity). Only rows that hold tokens are multiplied. There are two exchanges with the same result:

* "gather": every device sees all n N tokens, computes those of its own experts, and the results are summed. It moves 2
(n - 1) N rows per device in the forward pass, and is the only one that works on CPU.
* "ragged": each token goes only to its experts' devices, 2 K N (n - 1) / n rows when load is even.

Shape suffixes: N tokens, D embedding, F expert width, K experts of a token, L experts held here, R rows of assignments,
P devices that exchange.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.families import ModelConfig
from jaxtrain.config.schema import Config, TrainConfig
from jaxtrain.errors import UserError
from jaxtrain.kernels.functions import swiglu
from jaxtrain.kernels.grouped_matmul import choose_backend, grouped_matmul
from jaxtrain.sharding import rules as sharding
from jaxtrain.train_step import precision


@dataclass(frozen=True)
class Options:
    """How experts are computed; nothing here changes the result."""

    exchange: str = "auto"
    grouped_matmul: str = "auto"

    @classmethod
    def of(cls, t: TrainConfig) -> "Options":
        """Return what a config asks for."""
        return cls(t.expert_exchange, t.grouped_matmul)


DEFAULT = Options()


def check(config: Config, mesh: sharding.AnyMesh, rules: sharding.Rules, dtype: jnp.dtype, platform: str) -> None:
    """Raise a UserError if experts cannot be computed on a mesh in the way that a config asks for."""
    ragged = config.train.expert_exchange == "ragged" and mesh.shape["expert"] > 1
    if ragged and sharding.platform_of(mesh, platform) == "cpu":
        raise UserError("train.expert_exchange", "XLA for CPU has no ragged all-to-all", "use auto")
    with sharding.use(mesh, rules, platform):
        if c := config.model.num_experts and config.model:
            width = c.expert_mlp_dim // sharding.shards(rules["act_expert_mlp"], mesh)
            choose_backend(config.train.grouped_matmul, dtype, 0, c.embed_dim, width)


def masks(config: Config, mesh: Mapping[str, int], platform: str) -> bool:
    """Return whether every row is multiplied by all experts of a device, and the results masked.

    platform: as `jaxtrain.run.build` takes it. XLA does that except on TPUs.
    """
    if platform == "tpu" or not config.model.num_experts:
        return False
    dtype = jnp.dtype(precision.DTYPES[precision.resolve(config.train.precision, platform)])
    asked = "xla" if config.train.grouped_matmul == "xla" else "auto"
    width = config.model.expert_mlp_dim // mesh.get("tensor", 1)
    with sharding.use(jax.sharding.AbstractMesh((), ()), sharding.rules(), platform):
        return choose_backend(asked, dtype, 0, config.model.embed_dim, width) == "xla"


def through_experts(x_ND: jax.Array, experts_NK: jax.Array, weights_NK: jax.Array, kept_NK: jax.Array,
                    gate_LDF: jax.Array, up_LDF: jax.Array, down_LFD: jax.Array, *, axis: tuple[str, ...] = (),
                    options: Options = DEFAULT, limit: int | None = None) -> jax.Array:
    """Return the weighted sum of each token's experts; `limit` caps the rows that a device receives from one other."""
    n, held = (lax.axis_size(axis) if axis else 1), gate_LDF.shape[0]
    tokens, choices = experts_NK.shape
    rows = n * min(tokens * min(choices, held), limit or tokens * choices)
    way = {"one": _alone, "gather": _gather, "ragged": _ragged}[choose_exchange(options.exchange, n, choices)]
    experts_NK = jnp.where(kept_NK, experts_NK, n * held)  # an expert that no device holds
    product = partial(grouped_matmul, backend=options.grouped_matmul, filled=tokens * choices)  # at an even load
    return way(x_ND, experts_NK, weights_NK, partial(_mlp, product, gate_LDF, up_LDF, down_LFD), held, rows, axis)


def choose_exchange(asked: str, devices: int, choices: int) -> str:
    """Return the exchange that `train.expert_exchange` means here."""
    if devices == 1:
        return "one"
    fewer = sharding.platform() != "cpu" and choices < devices  # else gathering all tokens moves no more
    return ("ragged" if fewer else "gather") if asked == "auto" else asked


def buffered(c: ModelConfig, devices: int) -> float:
    """Return the rows of a device's buffer per token, where experts are split over this many devices."""
    capacity = c.capacity_factor * c.experts_per_token / devices if c.capacity_factor and devices > 1 else math.inf
    return devices * min(c.experts_per_token, c.num_experts // devices, capacity)


def filled(c: ModelConfig, devices: int) -> float:
    """Return the share of these rows that hold tokens when load is even."""
    return min(1.0, c.experts_per_token / buffered(c, devices)) if c.num_experts else 1.0


def _mlp(product, gate_LDF, up_LDF, down_LFD, x_RD, weights_R, sizes_L):
    """Apply each row's expert and multiply by its weight; rows are sorted by expert."""
    act_RF = swiglu(*(product(x_RD, w_LDF, sizes_L) for w_LDF in (gate_LDF, up_LDF)))
    # Weighted here and not after `down`, whose result then need not be kept for the backward pass.
    return product((act_RF * weights_R[:, None]).astype(act_RF.dtype), down_LFD, sizes_L)


def _alone(x_ND, experts_NK, weights_NK, mlp, held, rows, axis):
    """Apply local experts only (0 to `held`); assignments to others contribute nothing."""
    order_R, place_NK, sizes_L = _sorted(experts_NK, held, rows)
    weights_R = weights_NK.reshape(-1).at[order_R].get(unique_indices=True)
    return _collect(mlp(_spread(x_ND, order_R, place_NK), weights_R, sizes_L), order_R, place_NK)


def _gather(x_ND, experts_NK, weights_NK, mlp, held, rows, axis):
    x_ND, experts_NK, weights_NK = (lax.all_gather(a, axis, tiled=True) for a in (x_ND, experts_NK, weights_NK))
    mine_NK = experts_NK - lax.axis_index(axis) * held
    mine_NK = jnp.where((mine_NK >= 0) & (mine_NK < held), mine_NK, held)
    return lax.psum_scatter(_alone(x_ND, mine_NK, weights_NK, mlp, held, rows, axis), axis, tiled=True)


def _ragged(x_ND, experts_NK, weights_NK, mlp, held, rows, axis):
    n, here = lax.axis_size(axis), lax.axis_index(axis)
    order_R, place_NK, sizes_E = _sorted(experts_NK, n * held, experts_NK.size)
    sizes_PE = lax.all_gather(sizes_E, axis)  # each device's number of rows for each expert
    sent_PP = sizes_PE.reshape(n, n, held).sum(-1)  # from, to
    starts_PP, ends_PP = jnp.cumsum(sent_PP, 1) - sent_PP, jnp.cumsum(sent_PP, 0) - sent_PP  # in the sender, receiver
    there = starts_PP[here], sent_PP[here], ends_PP[here], sent_PP[:, here]
    back = ends_PP[:, here], sent_PP[:, here], starts_PP[:, here], sent_PP[here]

    def send(a, route, length):
        return lax.ragged_all_to_all(a, jnp.zeros((length, *a.shape[1:]), a.dtype), *route, axis_name=axis)

    # Rows arrive by sender, and by expert within each sender.
    x_RD = send(_spread(x_ND, order_R, place_NK), there, rows)
    weights_R = send(weights_NK.reshape(-1).at[order_R].get(unique_indices=True), there, rows)
    mine_PL = lax.dynamic_slice_in_dim(sizes_PE, here * held, held, 1)
    experts_R = jnp.repeat(jnp.tile(jnp.arange(held), n), mine_PL.reshape(-1), total_repeat_length=rows)
    experts_R = jnp.where(jnp.arange(rows) < mine_PL.sum(), experts_R, held)
    y_RD = _alone(x_RD, experts_R[:, None], weights_R[:, None], mlp, held, rows, axis)
    return _collect(send(y_RD, back, order_R.size), order_R, place_NK)


def _sorted(experts_NK, count, rows):
    """Sort assignments by expert; return the assignment in each row, the row of each (`rows`: none), and group sizes.
    """
    flat = experts_NK.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    place = jnp.where(flat < count, place, rows).reshape(experts_NK.shape)
    return order[:rows], place, jnp.bincount(flat, length=count).astype(jnp.int32)


# Each is the other's transpose. Both only read (gather), so that no sum depends on the order of writes.

@jax.custom_vjp
def _spread(x_ND, order_R, place_NK):
    """Return each assignment's token."""
    return x_ND[order_R // place_NK.shape[1]]


@jax.custom_vjp
def _collect(y_RD, order_R, place_NK):
    """Return the sum over each token's assignments."""
    y_NKD = y_RD.at[place_NK].get(mode="fill", fill_value=0)
    return y_NKD.sum(1, dtype=jnp.float32).astype(y_RD.dtype)


_spread.defvjp(lambda x, order, place: (_spread(x, order, place), (order, place)),
               lambda saved, dy: (_collect(dy, *saved), None, None))
_collect.defvjp(lambda y, order, place: (_collect(y, order, place), (order, place)),
                lambda saved, dx: (_spread(dx, *saved), None, None))
