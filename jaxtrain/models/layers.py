"""The layers that decoders are composed of; they use only logical axis names and run eagerly, on one device or a mesh.

Shape suffixes: B batch, T and S sequence, D embedding, H query heads, G key/value heads, K head width, F MLP width, V
vocabulary.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxtrain.base.annotations import AnyArray
from jaxtrain.config.remat_policies import Policy
from jaxtrain.kernels.functions import gelu, layer_norm, rms_norm, squared_relu, swiglu
from jaxtrain.models import layer_loop, training_noise
from jaxtrain.models.attention import head_logits
from jaxtrain.models.attention.kv_cache import Aux, Cache
from jaxtrain.models.rematerialization import Wrap, wrap
from jaxtrain.parallel.vocab import lookup
from jaxtrain.sharding import activations, contractions, products
from jaxtrain.sharding.axis_rules import Names
from jaxtrain.train_step import quantization
from jaxtrain.train_step.optimizers import mup

if TYPE_CHECKING:
    from jaxtrain.parallel.pipeline.stage_placement import Slots

RESIDUAL: Names = ("batch", "block_seq", "act_embed")  # between blocks
INSIDE: Names = ("batch", "seq", "act_embed")  # at the inputs of attention and MLP


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Names, std: float = 0.02, value: float = 0.0,
          compute_dtype: str = "", update: str = "") -> nnx.Param:
    """Create a float32 parameter with logical names: near-normal with deviation `std`, or `value` if that is 0.

    Args:
        compute_dtype: the dtype it is cast to for computing, regardless of train.precision.
        update: the rule of `optim.UPDATE_RULES` that updates it instead of the optimizer.
    """
    weight = bell(rngs.params(), shape, std * mup.initial_factor(axes)) if std else jnp.full(shape, value, jnp.float32)
    return nnx.Param(weight, axes=axes, compute_dtype=compute_dtype, update=update)


def bell(key: jax.Array, shape: tuple[int, ...], std: float = 1.0) -> jax.Array:
    """Return near-normal numbers with deviation `std`, bit-identical on every mesh, compiler and kind of device.

    The sum of four 16-bit integers is close to normal (cut off at 3.46 deviations) and exact; only the final product
    rounds. The polynomials of jax.random.normal round differently when a compiler vectorizes shards of different shape.
    """
    a, b = jax.random.bits(key, (2, *shape), jnp.uint32)
    total = (a & 0xFFFF) + (a >> 16) + (b & 0xFFFF) + (b >> 16)
    return (total.astype(jnp.int32) - 2 * 0xFFFF).astype(jnp.float32) * (std * (3 / (2**32 - 1)) ** 0.5)


_SEEN: ContextVar[Any] = ContextVar("seen", default=None)


@contextlib.contextmanager
def observed(see: Callable[["Linear", jax.Array], None]) -> Iterator[None]:
    """A context in which `see` is called with every linear layer that runs, and its input."""
    token = _SEEN.set(see)
    try:
        yield
    finally:
        _SEEN.reset(token)


class Linear(nnx.Module):
    """An einsum with a weight, and a bias over the output dimensions that come from the weight."""

    path = ""  # in the model, where who observes inputs has set it
    adapter: Any = None  # models/lora.py gives some layers one
    scales: Any = None  # of a kernel in 8 or 4 bits (train_step/quantization.py)

    def __init__(self, equation: str, shape: tuple[int, ...], axes: Names, out: Names, *, rngs: nnx.Rngs,
                 bias: bool = False, std: float = 0.02):
        self.equation, self.axes, self.out = equation, axes, out
        self.kernel = param(rngs, shape, axes, std)
        weight, result = equation.split(",")[1].split("->")
        new = [weight.index(letter) for letter in result if letter in weight]
        self.bias_axes = tuple(axes[i] for i in new)
        self.bias = param(rngs, tuple(shape[i] for i in new), self.bias_axes, std=0) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        if (see := _SEEN.get()) is not None:
            see(self, x)
        kernel, bias = self.kernel.get_value(), self.bias
        bias = None if bias is None else activations.gather(bias[...], *self.bias_axes)
        adapter = self.adapter
        if adapter is None or adapter.magnitude is None:
            y = self.multiply(x, kernel, bias)
            return self.named(y if adapter is None else y + adapter(x))
        y = self.named(self.multiply(x, kernel, None) + adapter(x))
        return activations.with_bias((y * adapter.lengths(self.in_use(kernel, jnp.float32))).astype(y.dtype), bias)

    def multiply(self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Return input times weight, plus bias, in the way that the kernel and the precision ask for."""
        if self.scales is not None:
            return activations.with_bias(products.multiply_at_rest(
                self.product, x, partial(self.wide, x.dtype), kernel, self.scales.get_value()), bias)
        if hasattr(kernel, "multiplied"):  # it has a way of its own, as `Deferred` does
            y = kernel.multiplied(self.product, x)
            return y if bias is None else y + bias
        if products.is_narrow():
            return activations.with_bias(products.multiply(self.product, x, kernel, self.noise()), bias)
        return self.product(x, kernel, bias)

    def noise(self) -> training_noise.Noise | None:
        """Return the random numbers with which its gradients are rounded, where the batch and the format have some."""
        return training_noise.of_layer(self.equation) if products.current_format().kind == "nvfp4" else None

    def named(self, y: jax.Array) -> jax.Array:
        """Return the layer's product by the name by which `train.remat` may keep it."""
        return checkpoint_name(y, self.bias_axes[0])

    def matrix(self, dtype: DTypeLike) -> jax.Array:
        """Return the weight as it is in use, with its adapter; from few bits it becomes this `dtype`."""
        kernel = self.in_use(self.kernel.get_value(), dtype)
        return kernel if self.adapter is None else self.adapter.adapted(kernel)

    def in_use(self, kernel: Any, dtype: DTypeLike) -> jax.Array:
        """Return the weight as it is in use, without an adapter; from few bits it becomes this `dtype`."""
        if self.scales is not None:
            return self.wide(dtype, kernel, self.scales.get_value())
        return activations.gather(kernel.weight if hasattr(kernel, "multiplied") else kernel, *self.axes)

    def quantize(self, kind: str) -> None:
        """Keep the kernel in 8 or 4 bits from now on, in blocks along a dimension that `tensor` does not split."""
        weight = self.kernel.get_value()
        stacked = weight.ndim - len(self.axes)
        whole = [name for name in self.axes if name not in ("heads", "kv_heads", "mlp")]  # not split by `tensor`
        along = max(whole, key=lambda name: quantization.block_of(weight.shape[stacked + self.axes.index(name)]))
        values, scales = quantization.quantize(weight, kind, stacked + self.axes.index(along))
        axes = (*("layers",) * stacked, *self.axes)
        self.kernel, self.scales = (nnx.Param(x, axes=axes, compute_dtype=dtype, update="") for x, dtype in (
            (values, ""), (scales, "bfloat16")))

    def wide(self, dtype: DTypeLike, values: jax.Array, scales: jax.Array) -> jax.Array:
        """Return the weight in use that a kernel in 8 or 4 bits stands for, which is gathered in these bits."""
        values, scales = (activations.gather(x, *self.axes) for x in (values, scales))
        return quantization.dequantize(values, scales, dtype)

    @property
    def product(self) -> contractions.Contraction:
        """Input times weight, plus bias."""
        return contractions.Contraction(self.equation, self.axes, self.out)


class LayerNorm(nnx.Module):
    """Mean and variance normalization in float32, with scale and bias or without."""

    def __init__(self, dim: int, eps: float, *, rngs: nnx.Rngs, scale: bool = True, bias: bool = True):
        self.eps, self.dim = eps, dim
        self.scale = param(rngs, (dim,), ("norm",), std=0, value=1.0) if scale else None
        self.bias = param(rngs, (dim,), ("norm",), std=0) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        scale, bias = (jnp.full(self.dim, without) if p is None else activations.gather(p[...], "norm")
                       for p, without in ((self.scale, 1.0), (self.bias, 0.0)))
        return activations.by_row(lambda x: layer_norm(x, scale, bias, self.eps), x)


class RMSNorm(nnx.Module):
    """Root-mean-square normalization in float32, with scale or without."""

    def __init__(self, dim: int, eps: float, *, rngs: nnx.Rngs, axis: str = "norm", scale: bool = True):
        self.eps, self.axis, self.dim = eps, axis, dim
        self.scale = param(rngs, (dim,), (axis,), std=0, value=1.0) if scale else None

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = jnp.ones(self.dim) if self.scale is None else activations.gather(self.scale[...], self.axis)
        return activations.by_row(lambda x: rms_norm(x, scale, self.eps), x)


class GeluMLP(nnx.Module):
    """GPT-2's MLP: up, GELU (of its tanh form, or of the `kind` given), down, with biases or without."""

    def __init__(self, dim: int, hidden: int, *, out_std: float, rngs: nnx.Rngs,
                 kind: Callable[[jax.Array], jax.Array] = gelu, bias: bool = True):
        self.gelu, wide = kind, ("batch", "seq", "act_mlp")
        self.up = Linear("btd,df->btf", (dim, hidden), ("embed", "mlp"), wide, bias=bias, rngs=rngs)
        self.down = Linear("btf,fd->btd", (hidden, dim), ("mlp", "embed"), RESIDUAL, bias=bias, std=out_std, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(self.gelu(self.up(x_BTD)))


class SwiGLU(nnx.Module):
    """Llama's MLP: the SiLU of a gate times up, then down."""

    def __init__(self, dim: int, hidden: int, *, out_std: float, bias: bool = False, rngs: nnx.Rngs):
        wide = (dim, hidden), ("embed", "mlp"), ("batch", "seq", "act_mlp")
        self.gate = Linear("btd,df->btf", *wide, bias=bias, rngs=rngs)
        self.up = Linear("btd,df->btf", *wide, bias=bias, rngs=rngs)
        self.down = Linear("btf,fd->btd", (hidden, dim), ("mlp", "embed"), RESIDUAL, bias=bias, std=out_std, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(swiglu(self.gate(x_BTD), self.up(x_BTD)))


class SquaredReLU(nnx.Module):
    """An MLP without a gate, whose activation is the square of ReLU (arXiv 2109.08668)."""

    def __init__(self, dim: int, hidden: int, *, out_std: float, bias: bool = False, rngs: nnx.Rngs):
        self.up = Linear("btd,df->btf", (dim, hidden), ("embed", "mlp"), ("batch", "seq", "act_mlp"), bias=bias,
                         rngs=rngs)
        self.down = Linear("btf,fd->btd", (hidden, dim), ("mlp", "embed"), RESIDUAL, bias=bias, std=out_std, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(squared_relu(self.up(x_BTD)))


class Embed(nnx.Module):
    """Token embeddings; the same table serves as the output head when it is tied."""

    def __init__(self, vocab: int, dim: int, *, rngs: nnx.Rngs):
        self.table = param(rngs, (vocab, dim), ("vocab", "embed"))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return lookup(self.table[...], tokens_BT)

    def head(self) -> jax.Array:
        """Return the table as an output projection w_DV."""
        return self.table[...].T


class MultipliedEmbed(Embed):
    """Token embeddings times a number, which is rounded to their dtype."""

    def __init__(self, vocab: int, dim: int, factor: float, *, rngs: nnx.Rngs):
        super().__init__(vocab, dim, rngs=rngs)
        self.factor = factor

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = super().__call__(tokens_BT)
        return x_BTD * jnp.asarray(self.factor, x_BTD.dtype)


class NormedEmbed(Embed):
    """Token embeddings, normalised."""

    def __init__(self, vocab: int, dim: int, norm: nnx.Module, *, rngs: nnx.Rngs):
        super().__init__(vocab, dim, rngs=rngs)
        self.norm = norm

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.norm(super().__call__(tokens_BT))


class Head(nnx.Module):
    """A separate (untied) output projection."""

    def __init__(self, vocab: int, dim: int, *, rngs: nnx.Rngs):
        self.kernel = param(rngs, (dim, vocab), ("embed", "vocab"))

    def head(self) -> jax.Array:
        """Return w_DV."""
        return self.kernel[...]


class LearnedPositions(nnx.Module):
    """One vector per position, added to the embeddings."""

    def __init__(self, length: int, dim: int, *, rngs: nnx.Rngs):
        self.table = param(rngs, (length, dim), ("positions", "embed"), std=0.01)

    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        return positioned(self.table[...], positions_BT)


def positioned(weights: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Return the vector of each position, of a table laid out as at rest."""
    table = activations.gather(weights, "positions", "embed").astype(jnp.float32)  # rows' gradients are summed so, too
    spec = activations.activation_spec(*INSIDE)
    rows = table[positions_BT] if spec is None else table.at[positions_BT].get(out_sharding=spec)
    return activations.constrain(rows.astype(weights.dtype), *RESIDUAL)


class Stack(nnx.Module):
    """A stack of `num_layers` equal layers with stacked parameters, applied by `lax.scan`.

    A layer returns the activation and a dict of auxiliary values, which are returned stacked over layers. `unroll`
    layers form one iteration of the loop (0: all, so no loop is left); `remat` says what so many layers each
    keep (models/rematerialization.py). Neither changes the parameters, so checkpoints fit either way.
    """

    def __init__(self, layer: Callable[[nnx.Rngs], nnx.Module], num_layers: int, *, rngs: nnx.Rngs,
                 remat: Sequence[tuple[Policy, int]] = (), unroll: int = 1, first: int = 0):
        """Make the parameters.

        Args:
            first: the number of the first layer; layers that are `numbered` are called with theirs, or with that of
                another layer of the same `kind`.
        """
        self.unroll, self.num_layers, self.first = unroll, num_layers, first
        self.after = 0  # how many layers another stack has behind these
        keys = jax.random.split(rngs.params(), num_layers)
        self.layer = nnx.vmap(lambda key: layer(nnx.Rngs(params=key)))(keys)
        self.numbered = getattr(self.layer, "numbered", False)
        # Compilers make no loop over one layer, and of numbered ones several may be in an iteration, or one in none.
        self.remat = tuple((wrap(policy, in_loop=unroll == 1 < count and not self.numbered), count)
                           for policy, count in remat)
        for _, weight in nnx.iter_graph(self.layer):
            if isinstance(weight, nnx.Param):
                weight.set_metadata(axes=("layers", *weight.get_metadata()["axes"]))

    def __call__(self, x: jax.Array, *args, slots: "Slots | None" = None,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        """Apply the layers. `slots`: those that a pipeline stage holds; an empty slot passes `x` on."""
        graphdef, weights = nnx.split(self.layer)
        numbers = jnp.arange(self.num_layers) if slots is None else slots.numbers
        of_stage = slots is not None and self._has_wide()
        counted = self.numbered or training_noise.active() or of_stage or _SEEN.get() is not None
        given = (weights, numbers if counted else None,
                 None if slots is None or slots.full else slots.numbers >= 0, cache and cache.entries)

        def layer(x, weights, number, entries, like=None):
            held = {} if cache is None else {"cache": replace(cache, entries=entries)}
            own = (number + self.first if like is None else like,) if self.numbered else ()
            with training_noise.in_layer(0 if number is None else number), head_logits.collected() as found:
                x, aux = nnx.merge(graphdef, weights)(x, *args, *own, **held)
            return x, head_logits.reported(aux, found)

        def wide_layer(*inputs, like=None):
            with products.in_precision(""):
                return layer(*inputs, like=like)

        def step(wrap, wide, x, given, like):
            weights, number, there, entries = given
            inputs = x, weights, number, entries
            apply = wrap(partial(wide_layer if wide else layer, like=like))
            if wide is None:  # a stage's number is known when it runs
                apply = partial(jax.lax.cond, self._is_wide(number), wrap(wide_layer), apply)
            if there is None:
                return apply(*inputs)
            none = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(apply, *inputs)[1])
            return jax.lax.cond(there, apply, lambda x, *_: (x, none), *inputs)

        if layer_loop.is_eager((x, args, given)):
            return layer_loop.in_turn(partial(step, lambda f: f, False), x, given)
        # While decoding, kinds are asked for in the loop: to split stacks by kinds would copy them for each token.
        known = self.num_layers if self.numbered and slots is None and cache is None else 0
        kinds = [cast(Any, self.layer).kind(self.first + n) for n in range(known)]
        parts, at = [], 0
        alike = [(self._wrap, None, 0)] if of_stage else [*self._parts(slots is None)]
        for (own, wide, count), some in zip(alike, layer_loop.split(given, [part[2] for part in alike]), strict=True):
            x, aux = layer_loop.loop(partial(step, own, wide), x, some, self.unroll,
                                     kinds[at:at + count] if count else kinds, self.first + at)
            parts.append(aux)
            at += count
        return x, layer_loop.joined(parts)

    @property
    def _wrap(self) -> Wrap:
        """Return how the layers of a pipeline's stage are wrapped, or all layers that are alike."""
        return self.remat[0][0] if self.remat else lambda f: f

    def _is_wide(self, number: AnyArray) -> AnyArray:
        """Return whether products of a layer stay as they are; of a group, whether those of one of its layers do."""
        each, form = self._each, products.current_format()
        number, layers = self.first + number * each, self.first + self.single_layers + self.after
        return form.leaves_out(number, layers) | form.leaves_out(number + each - 1, layers)

    @property
    def _each(self) -> int:
        """The layers of an entry: those of a group, or one."""
        return len(getattr(self.layer, "names", "1"))

    @property
    def single_layers(self) -> int:
        """The number of layers, those of groups one by one."""
        return self.num_layers * self._each

    def _has_wide(self) -> bool:
        return any(self._is_wide(number) for number in range(self.num_layers))

    def _parts(self, whole: bool) -> list[tuple[Wrap, bool, int]]:
        """Return how layers are wrapped, whether their products stay as they are, and how many; 0: all.

        `whole`: whether all layers are here.
        """
        if not whole or (len(self.remat) < 2 and not self._has_wide()):
            return [(self._wrap, False, 0)]
        each = [wrap for wrap, count in self.remat for _ in range(count)] or [self._wrap] * self.num_layers
        wide = [bool(self._is_wide(number)) for number in range(self.num_layers)]
        return [(*part, len([*alike])) for part, alike in itertools.groupby(zip(each, wide, strict=True))]
