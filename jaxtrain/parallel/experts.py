"""Expert parallelism: send tokens to the devices that hold their experts and back, exactly, whatever the imbalance.

Called inside a manual region: arrays are one device's own. Experts are split over one mesh axis of n devices, each of
which has N tokens of its own. Shapes are static, but how many rows a device receives is known only when tokens are
routed: N K at an even load with K experts per token, n N min(K, L) in the worst case with L experts per device
(`limit` lowers that where experts have a capacity). Buffers have `buffer` times the rows of an even load. What is more
goes through them in further passes, which all devices make together, so that nothing is dropped. There are two
exchanges with the same result:

* "gather": every device sees all n N tokens, computes those of its own experts, and the results are summed. It moves 2
(n - 1) N rows per device in the forward pass, and is the only one that works on CPU.
* "ragged": each token goes only to its experts' devices, 2 K N (n - 1) / n rows when load is even.

Shape suffixes: N tokens, D embedding, F expert width, K experts of a token, L experts held here, A assignments of
tokens to experts, R rows of a buffer, P devices that exchange.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.base.annotations import PyTree
from jaxtrain.base.narrow_formats import BLOCKS
from jaxtrain.config.model_config import Experts, ModelConfig
from jaxtrain.config.schema import TrainConfig
from jaxtrain.errors import UserError
from jaxtrain.kernels.functions import swiglu
from jaxtrain.kernels.grouped_matmul import ROWS, choose_backend
from jaxtrain.parallel.expert_matrices import Weight
from jaxtrain.parallel.expert_options import DEFAULT, ExpertOptions
from jaxtrain.parallel.expert_products import gradients, product
from jaxtrain.sharding import activations, axis_rules, mesh_context, products
from jaxtrain.sharding.products import Factor, Rounded
from jaxtrain.train_step import precision

Activation = Callable[..., jax.Array]  # of gate and up, or of up alone


Routes = dict[str, Any]  # what passes read: where rows go, and the marks of tokens
OVERFLOW = "experts_overflow"  # scope of the passes that an even load does not need


def check(model: ModelConfig, train: TrainConfig, mesh: axis_rules.AnyMesh, rules: axis_rules.Rules, dtype: jnp.dtype,
          platform: str) -> None:
    """Raise a UserError if experts cannot be computed on a mesh in the way that a config asks for."""
    ragged = train.expert_exchange == "ragged" and mesh.shape["expert"] > 1
    if ragged and mesh_context.platform_of(mesh, platform) == "cpu":
        raise UserError("train.expert_exchange", "XLA for CPU has no ragged all-to-all", "use auto")
    with mesh_context.use(mesh, rules, platform):
        if model.experts.num:
            parts = axis_rules.shards(rules["act_expert_mlp"], mesh)
            width = model.experts.mlp_dim // parts
            block = 0 if train.experts_in_bf16 else BLOCKS.get(train.precision, 0)
            if block and parts > 1 and width % block:
                raise UserError("train.precision", f"{train.precision} has blocks of {block} numbers, and a device has "
                                f"{width} of the {model.experts.mlp_dim} features within an expert",
                                "lower mesh.tensor, or set train.experts_in_bf16=true")
            if block and train.precision == "nvfp4" and mesh.shape["context"] > 1:
                raise UserError("mesh.context", "routed experts in nvfp4 do not give one device's gradients with it",
                                "set it to 1, or set train.experts_in_bf16=true")
            choose_backend(train.grouped_matmul, dtype, 0, model.experts.latent_dim or model.embed_dim, width)


def masks(model: ModelConfig, train: TrainConfig, mesh: Mapping[str, int], platform: str) -> bool:
    """Return whether every row is multiplied by all experts of a device, and the results masked.

    platform: as `jaxtrain.builder.build` takes it. XLA does that except on TPUs; kernels for GPUs do not.
    """
    if platform == "tpu" or not model.experts.num:
        return False
    dtype = precision.dtype_of(precision.resolve(train.precision, platform))
    asked = "xla" if train.grouped_matmul == "xla" else "auto"
    width = model.experts.mlp_dim // mesh.get("tensor", 1)
    with mesh_context.use(jax.sharding.AbstractMesh((), ()), axis_rules.rules(), platform):
        return choose_backend(asked, dtype, 0, model.experts.latent_dim or model.embed_dim, width) == "xla"


def through_experts(x_ND: jax.Array, experts_NK: jax.Array, weights_NK: jax.Array, kept_NK: jax.Array,
                    gate_LDF: Weight | None, up_LDF: Weight, down_LFD: Weight, biases: tuple[jax.Array, ...] = (), *,
                    axis: tuple[str, ...] = (), options: ExpertOptions = DEFAULT, limit: int | None = None,
                    activation: Activation = swiglu, weighted_inputs: bool = False,
                    marks: PyTree = None) -> jax.Array:
    """Return the weighted sum of each token's experts; `limit` caps the rows that a device receives from one other.

    `biases` are those [L, F] of the gate and of up, if there are any. Without a gate, `activation` is of up alone. With
    `weighted_inputs`, weights multiply what experts are given, and their results are only added. With weights in 8 bits
    all products are in fp8 (sharding/products.py), and tokens are sent so. `marks` (parallel/expert_blocks.py) go with
    weights that are rounded in blocks.
    """
    n, held = (lax.axis_size(axis) if axis else 1), len(jax.tree.leaves(up_LDF)[0])
    tokens, choices = experts_NK.shape
    worst, even = n * min(tokens * min(choices, held), limit or tokens * choices), tokens * choices
    way = choose_exchange(options.exchange, n, choices)
    experts_NK = jnp.where(kept_NK, experts_NK, n * held)  # an expert that no device holds
    how: dict[str, Any] = {"backend": options.grouped_matmul, "filled": min(even, worst)}
    rows = buffer_rows(even, worst, options.buffer)
    joined = _pays_to_join(rows, gate_LDF, up_LDF)
    p = _Passes(how, rows, worst, axis if way == "ragged" else (), held,
                partial(_of_halves, activation) if joined else activation, weighted_inputs, joined)
    send = partial(lax.all_gather, axis_name=axis, tiled=True) if way == "gather" else lambda a: a
    x = Rounded(*products.sent(x_ND, send), x_ND.dtype) if options.narrow() == products.FP8 else send(x_ND)
    experts_NK, weights_NK, marks = jax.tree.map(send, (experts_NK, weights_NK, marks))
    if way == "gather":
        x = _named("experts", x)
        experts_NK = experts_NK - lax.axis_index(axis) * held
        experts_NK = jnp.where((experts_NK >= 0) & (experts_NK < held), experts_NK, held)
    y_ND = _in_passes(p, p.routes(experts_NK) | {"marks": marks}, x, weights_NK, gate_LDF, up_LDF, down_LFD, biases)
    return lax.psum_scatter(y_ND, axis, tiled=True) if way == "gather" else y_ND


def _pays_to_join(rows: int, gate_LDF: Weight | None, up_LDF: Weight) -> bool:
    """Return whether gate and up are one product, which reads rows once and has one gradient of them, without a sum.

    That saves four passes over the rows; to join the matrices takes two over them, forward and in the backward pass.
    """
    if not isinstance(gate_LDF, jax.Array) or not isinstance(up_LDF, jax.Array):
        return False  # those in narrow formats have scales of their own, and adapters
    held, _, width = gate_LDF.shape
    return rows > 2 * held * width


def _of_halves(activation: Activation, both_RF: jax.Array) -> jax.Array:
    return activation(*jnp.split(both_RF, 2, -1))


def buffer_rows(even: int, worst: int, factor: float) -> int:
    """Return the rows of a buffer: `factor` times those of an even load, but never more than in the worst case."""
    rows = math.ceil(factor * even) if factor else worst
    return min(worst, -(-rows // ROWS) * ROWS if rows > ROWS else rows)


def choose_exchange(asked: str, devices: int, choices: int) -> str:
    """Return the exchange that `train.expert_exchange` means here."""
    if devices == 1:
        return "one"
    fewer = mesh_context.platform() != "cpu" and choices < devices  # else gathering all tokens moves no more
    return ("ragged" if fewer else "gather") if asked == "auto" else asked


def buffered(c: Experts, devices: int, factor: float) -> float:
    """Return the rows of a device's buffer per token, where experts are split over this many devices."""
    capacity = c.capacity_factor * c.per_token / devices if c.capacity_factor and devices > 1 else math.inf
    worst = devices * min(c.per_token, c.num // devices, capacity)
    return min(worst, factor * c.per_token) if factor else worst


def filled(c: Experts, devices: int, factor: float) -> float:
    """Return the share of these rows that hold tokens when load is even."""
    return min(1.0, c.per_token / buffered(c, devices, factor)) if c.num else 1.0


# --------------------------------------------------------------------------------------------------- rows in passes
@dataclass(frozen=True)
class _Passes:
    """The passage of rows through a buffer: from each token to rows sorted by expert, and back."""

    how: dict[str, Any]  # grouped matmuls are computed
    rows: int  # of the buffer
    worst: int  # number of rows that there may be
    axis: tuple[str, ...]  # of the devices to which rows are sent; () if all of them are here
    held: int  # experts
    activation: Activation
    weighted_inputs: bool = False
    joined: bool = False  # whether the matrices of gate and up are one

    def routes(self, experts_NK: jax.Array) -> dict[str, jax.Array]:
        """Sort assignments by expert; return what the passes read, and how many there must be."""
        count = self.held * (lax.axis_size(self.axis) if self.axis else 1)
        routes = dict(zip(("order_A", "place_NK", "sizes_E"), _sorted(experts_NK, count), strict=True))
        mine = routes["sizes_E"]
        if self.axis:
            routes["sizes_PE"] = lax.all_gather(mine, self.axis)  # each device's number of rows for each expert
            mine = self._mine(routes["sizes_PE"])
        passes = -(-mine.sum() // self.rows)
        # All devices that may meet in a collective make the same number of passes.
        axes = tuple({axis: 0 for name in ("batch", "seq", "experts") for axis in activations.axes_over(name)})
        return routes | {"passes": lax.pmax(passes, axes) if axes else passes}

    def _mine(self, sizes_PE: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(sizes_PE, lax.axis_index(self.axis) * self.held, self.held, 1)

    def forward(self, number: jax.Array | int, routes: Routes, x_ND: Factor, weights_NK: jax.Array,
                gate_LDF: Weight | None, up_LDF: Weight, down_LFD: Weight,
                biases: tuple[jax.Array, ...]) -> tuple[jax.Array, "_Kept"]:
        """Return each token's sum over those of its experts that compute in this pass, and what `backward` reads."""
        at = self._route(number, routes)
        token_RD, weights_R = at.enter(x_ND), at.weights(weights_NK)
        both_RF = self._both(at, self._given(token_RD, weights_R), gate_LDF, up_LDF, biases)
        # Weighted here and not after `down`, whose result then need not be kept for the backward pass.
        act_RF = self._weighted(*both_RF, weights_R)
        both_RF = _named("expert_mlp", both_RF)
        # What was sent is not sent again.
        kept = _Kept(_named("experts", token_RD) if self.axis else None, weights_R, both_RF)
        return at.leave(product(self.how, act_RF, down_LFD, at)), kept

    def backward(self, number: jax.Array | int, routes: Routes, x_ND: Factor, weights_NK: jax.Array,
                 gate_LDF: Weight | None, up_LDF: Weight, down_LFD: Weight, biases: tuple[jax.Array, ...],
                 dy_ND: Factor, kept: "_Kept | None" = None) -> tuple[PyTree, ...]:
        """Return the gradients of all arrays by `forward`, which is not computed again where it `kept` something."""
        at, kept = self._route(number, routes), kept or _Kept()
        token_RD = at.enter(x_ND) if kept.token_RD is None else kept.token_RD
        weights_R = at.weights(weights_NK) if kept.weights_R is None else kept.weights_R
        x_RD = self._given(token_RD, weights_R)
        both_RF = kept.both_RF or self._both(at, x_RD, gate_LDF, up_LDF, biases)
        act_RF, back = jax.vjp(self._weighted, *both_RF, weights_R)
        dact_RF, ddown_LFD = gradients(self.how, act_RF, down_LFD, at, at.enter(dy_ND))
        *dboth_RF, dweights_R = back(dact_RF)
        dgate_LDF, dx_RD = None, None
        if gate_LDF is not None:
            dx_RD, dgate_LDF = gradients(self.how, x_RD, gate_LDF, at, dboth_RF[0])
        more_RD, dup_LDF = gradients(self.how, x_RD, up_LDF, at, dboth_RF[-1])
        dbiases = tuple(at.by_expert(d_RF).astype(b.dtype) for d_RF, b in zip(dboth_RF, biases, strict=False))
        dx_RD = more_RD if dx_RD is None else dx_RD + more_RD
        if self.weighted_inputs:
            dx_RD, dweights_R = jax.vjp(_times, products.plain(token_RD), weights_R)[1](dx_RD)
        dx_ND = products.gradient_of(x_ND, at.leave(dx_RD))
        return dx_ND, at.weights_back(dweights_R), dgate_LDF, dup_LDF, ddown_LFD, dbiases

    def _both(self, at: "_Route", x_RD: Factor, gate_LDF: Weight | None, up_LDF: Weight,
              biases: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Return the gate, if there is one, and up of each row, with their biases."""
        both_RF = [product(self.how, x_RD, w_LDF, at) for w_LDF in (gate_LDF, up_LDF) if w_LDF is not None]
        if biases:
            both_RF = [activations.with_bias(a_RF, at.of_expert(bias_LF)) for a_RF, bias_LF in zip(
                both_RF, biases, strict=True)]
        return tuple(both_RF)

    def _given(self, x_RD: Factor, weights_R: jax.Array) -> Factor:
        """Return what experts are given of the tokens of rows."""
        return _times(products.plain(x_RD), weights_R) if self.weighted_inputs else x_RD

    def _weighted(self, *both_RF: jax.Array) -> jax.Array:
        """Return the activation of the gate and up, times the weight of each row, which comes last."""
        *made_RF, weights_R = both_RF
        y_RF = self.activation(*made_RF)
        return y_RF if self.weighted_inputs else (y_RF * weights_R[:, None]).astype(made_RF[-1].dtype)

    def _route(self, number: jax.Array | int, routes: Routes) -> "_Route":
        """Return the route of a pass, with the marks of its rows."""
        at = self._way(number, routes)
        return at if (marks := routes["marks"]) is None else replace(at, marks=replace(
            marks, window=at.enter(marks.window), noise=jax.tree.map(at.weights, marks.noise)))

    def _way(self, number: jax.Array | int, routes: Routes) -> "_Route":
        """Return the route of a pass."""
        order_A, place_NK = routes["order_A"], routes["place_NK"]
        if not self.axis:
            return self._window(number, order_A, place_NK, routes["sizes_E"])
        n, here, sizes_PE = lax.axis_size(self.axis), lax.axis_index(self.axis), routes["sizes_PE"]
        first = number * self.rows
        # A sender has its rows by expert. A receiver gets them by expert, too, and those of an expert by sender: each
        # pair of a device and an expert of it is one part of the exchange, and nothing is sorted afterwards.
        starts_PE = jnp.cumsum(sizes_PE, 1) - sizes_PE
        begin_PE = _begin(sizes_PE.reshape(n, n, self.held)).reshape(n, -1)
        low_PE, high_PE = (jnp.clip(bound, begin_PE, begin_PE + sizes_PE) for bound in (first, first + self.rows))
        starts_PE, to_PE, sent_PE = starts_PE + low_PE - begin_PE, low_PE - first, high_PE - low_PE
        mine = [self._mine(a_PE).reshape(-1) for a_PE in (starts_PE, to_PE, sent_PE)]  # by sender, then by expert
        there = starts_PE[here], sent_PE[here], to_PE[here], mine[2]
        back = mine[1], mine[2], mine[0], sent_PE[here]

        def send(route, length, a):
            return lax.ragged_all_to_all(a, jnp.zeros((length, *a.shape[1:]), a.dtype), *route, axis_name=self.axis)

        return _Route(order_A, place_NK, self._mine(sent_PE).sum(0), self.rows, partial(send, there, self.rows),
                      partial(send, back, order_A.size))

    def _window(self, number: jax.Array | int, order_A: jax.Array, place_NK: jax.Array, sizes_L: jax.Array) -> "_Route":
        """Return the route of the assignments in a pass; behind the last, the first one stands in every row."""
        first, ends = number * self.rows, jnp.cumsum(sizes_L)
        order_A = jnp.pad(order_A, (0, max(0, -(-self.worst // self.rows) * self.rows - order_A.size)))
        inside = (place_NK >= first) & (place_NK < jnp.minimum(ends[-1], first + self.rows))
        sizes_L = jnp.diff(jnp.clip(ends - first, 0, self.rows), prepend=0)
        return _Route(lax.dynamic_slice_in_dim(order_A, first, self.rows),
                      jnp.where(inside, place_NK - first, self.rows), sizes_L, self.rows)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Kept:
    """The arrays that the forward pass leaves for the backward pass; None: computed again."""

    token_RD: Factor | None = None  # of each row
    weights_R: jax.Array | None = None
    both_RF: tuple[jax.Array, ...] | None = None  # what the activation reads


def _begin(sizes_PPL: jax.Array) -> jax.Array:
    """Return the first row at its receiver of what each device sends to each device's experts [from, to, expert]."""
    flat = sizes_PPL.transpose(1, 2, 0).reshape(len(sizes_PPL), -1)  # a receiver's rows: by expert, then by sender
    return (jnp.cumsum(flat, 1) - flat).reshape(sizes_PPL.transpose(1, 2, 0).shape).transpose(2, 0, 1)


def _named(name: str, arrays: PyTree) -> PyTree:
    """Let `train.remat` keep these arrays by name for the backward pass."""
    return jax.tree.map(lambda a: checkpoint_name(a, name), arrays)


def _stay(a: jax.Array) -> jax.Array:
    return a


@dataclass(frozen=True)
class _Route:
    """The way from tokens to rows sorted by expert, and back; each way is the other's transpose.

    All only read (gather), so that no sum depends on the order of writes.
    """

    order: jax.Array  # the assignment in each row that leaves
    place: jax.Array  # the row of each assignment, as it leaves; none if beyond the last
    sizes: jax.Array  # rows of each expert, where they arrive
    rows: int  # where they arrive
    there: Callable[[jax.Array], jax.Array] = _stay  # to the devices of the experts
    back: Callable[[jax.Array], jax.Array] = _stay
    marks: Any = None  # of the rows, where products read some

    def enter(self, a_ND: Factor) -> Factor:
        """Return the token of each row."""
        return products.of_values(lambda a: self.there(a[self.order // self.place.shape[1]]), a_ND)

    def leave(self, a_RD: jax.Array) -> jax.Array:
        """Return the sum over each token's rows."""
        return _sums(self.back(a_RD), self.place)

    def weights(self, weights_NK: jax.Array) -> jax.Array:
        """Return the weight of each row."""
        return self.there(weights_NK.reshape(-1)[self.order])

    def weights_back(self, weights_R: jax.Array) -> jax.Array:
        """Return the value of each assignment's row; 0 if it has none."""
        return self.back(weights_R).at[self.place].get(mode="fill", fill_value=0)

    def of_expert(self, a_LF: jax.Array) -> jax.Array:
        """Return for each row what its expert has; 0 behind the last."""
        return a_LF.at[self.experts].get(mode="fill", fill_value=0)

    def by_expert(self, a_RF: jax.Array) -> jax.Array:
        """Return the sum of each expert's rows, in float32: by a product, which writes in no order."""
        held_RL = self.experts[:, None] == jnp.arange(len(self.sizes))
        return jnp.einsum("rl,rf->lf", held_RL.astype(a_RF.dtype), a_RF, preferred_element_type=jnp.float32)

    @property
    def experts(self) -> jax.Array:
        """The expert of each row; one that is not there behind the last."""
        return (jnp.cumsum(self.sizes) <= jnp.arange(self.rows)[:, None]).sum(1)


def _times(x_RD: jax.Array, weights_R: jax.Array) -> jax.Array:
    return (x_RD * weights_R[:, None]).astype(x_RD.dtype)


def _sums(a_RD: jax.Array, place_NK: jax.Array) -> jax.Array:
    return a_RD.at[place_NK].get(mode="fill", fill_value=0).sum(1, dtype=jnp.float32).astype(a_RD.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_passes(p, routes, x_ND, weights_NK, gate_LDF, up_LDF, down_LFD, biases):
    """Return each token's sum over its experts; only the first pass keeps what the backward pass reads."""
    return _forward(p, routes, x_ND, weights_NK, gate_LDF, up_LDF, down_LFD, biases)[0]


def _forward(p, routes, *arrays):
    arrays = jax.tree.map(lambda a: a.narrow if isinstance(a, Rounded) else a, arrays, is_leaf=_is_rounded)
    used = _together(arrays) if p.joined else arrays  # the backward pass does it again, rather than keep a copy
    y_ND, kept = p.forward(0, routes, *used)
    y_ND = _further(p, routes, lambda number: p.forward(number, routes, *used)[0], y_ND)
    return y_ND, (routes, arrays, kept)


def _backward(p, saved, dy_ND):
    routes, arrays, kept = saved
    dy_ND = products.rounded(dy_ND, products.BACKWARD) if _is_rounded(arrays[0]) else dy_ND
    used = _together(arrays) if p.joined else arrays
    first = p.backward(0, routes, *used, dy_ND, kept)
    found = _further(p, routes, lambda number: p.backward(number, routes, *used, dy_ND), first)
    return None, *(_apart(found) if p.joined else found)


def _together(arrays):
    """Join the matrices of gate and up, and their biases."""
    x_ND, weights_NK, gate_LDF, up_LDF, down_LFD, biases = arrays
    biases = (jnp.concatenate(biases, -1),) if biases else ()
    return x_ND, weights_NK, None, jnp.concatenate([gate_LDF, up_LDF], -1), down_LFD, biases


def _apart(gradients):
    dx_ND, dweights_NK, _, dboth_LDF, ddown_LFD, dbiases = gradients
    dbiases = tuple(jnp.split(dbiases[0], 2, -1)) if dbiases else ()
    return dx_ND, dweights_NK, *jnp.split(dboth_LDF, 2, -1), ddown_LFD, dbiases


def _is_rounded(a):
    return isinstance(a, Rounded)


_in_passes.defvjp(_forward, _backward)


def _further(p, routes, one, first):
    """Add the results of further passes to those of the first one."""
    if p.rows >= p.worst:
        return first
    with jax.named_scope(OVERFLOW):
        return lax.fori_loop(1, jnp.maximum(1, routes["passes"]),
                             lambda number, before: jax.tree.map(jnp.add, before, one(number)), first)


def _sorted(experts_NK, count):
    """Sort assignments by expert; return the assignment in each row, the row of each, and group sizes."""
    flat = experts_NK.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    place = jnp.where(flat < count, place, order.size).reshape(experts_NK.shape)
    return order, place, jnp.bincount(flat, length=count).astype(jnp.int32)
