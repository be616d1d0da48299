"""The loss of each token and its gradient by logits, which pass from memory once, as a Pallas kernel for Triton.

In plain operations float32 logits are read twice: for the sum of their exponentials, and for the gradient. A block of
threads here does both for one token after the other; when it reads the row again, most of it is still in the cache. The
second reading goes backwards, so that this holds for rows that the cache cannot hold as a whole, too.

Shape suffixes: N tokens, V vocabulary.
"""


import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxtrain.errors import UserError
from jaxtrain.sharding import mesh_context

INTERPRET = False  # tests: Pallas's interpreter runs the kernel anywhere
COLUMNS, WARPS = 8192, 32  # of a row at a time; so many warps that few rows are under way, and share the cache
NAME = "loss_of_logits"
LOWEST = -1e30  # the greatest logit of none: finite, so that differences are numbers


def chosen(asked: str) -> bool:
    """Return whether `train.loss_kernel` selects the kernel here: not by `auto`, as no device has run it yet.

    It is not for arrays that the compiler splits over devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    split = any(size > 1 and axis not in mesh.manual_axes for axis, size in mesh.shape.items())
    return asked == "triton" and not split


def check(dtype: jnp.dtype, vocabulary_parts: int) -> None:
    """Raise a UserError if it cannot compute gradients of this dtype here, or logits of a vocabulary in so many parts.
    """
    from jaxtrain.base.triton_in_pallas import has_triton

    here = mesh_context.platform() in ("gpu", "cuda") and mesh_context.compute_capability() >= 8 and has_triton()
    if not INTERPRET and not (here and dtype in (jnp.bfloat16, jnp.float16)):
        raise UserError("train.loss_kernel", "the triton kernel runs on NVIDIA GPUs since compute capability 8 (A100), "
                        "in bfloat16 or float16, where JAX has Triton in Pallas", "use 'auto' or 'xla'")
    if vocabulary_parts > 1:
        raise UserError("train.loss_kernel", "the triton kernel reads whole rows of logits, and the mesh splits the "
                        f"vocabulary in {vocabulary_parts}", "use 'auto' or 'xla'")


def loss_and_gradient(logits_NV: jax.Array, target_N: jax.Array, weight_N: jax.Array, *, z_loss: float, cap: float,
                      dtype: DTypeLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the logarithm of each token's sum of exponentials, the logit of its target, and the gradient by logits.

    `logits_NV` are those before the soft cap. A target that is no column has the logit 0.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    N, V = logits_NV.shape
    steps = -(-V // COLUMNS)

    def kernel(logits, target, weight, lse, correct, gradient):
        n = pl.program_id(0)
        goal, w = target[n], weight[n]

        def block(i):
            column = i * COLUMNS + jnp.arange(COLUMNS)
            mask = column < V if V % COLUMNS else None
            place = (n, pl.ds(i * COLUMNS, COLUMNS))
            raw = triton.load(logits.at[place], mask=mask, other=None if mask is None else -jnp.inf)
            return (cap * jnp.tanh(raw / cap) if cap else raw), (column == goal) & (column < V), column < V, place

        def statistics(i, carry):
            top, total, wanted = carry
            x, hit, inside, _ = block(i)
            x = jnp.where(inside, x, -jnp.inf)
            higher = jnp.maximum(top, x)
            return (higher, total * jnp.exp(top - higher) + jnp.exp(x - higher), wanted + jnp.where(hit, x, 0.0))

        zeros = jnp.zeros(COLUMNS, jnp.float32)
        top, total, wanted = lax.fori_loop(0, steps, statistics, (jnp.full(COLUMNS, LOWEST, jnp.float32), zeros, zeros))
        highest = jnp.max(top)
        log_sum = highest + jnp.log(jnp.sum(total * jnp.exp(top - highest)))
        pull = w * (1 + 2 * z_loss * log_sum)

        def slopes(i, _):
            x, hit, inside, place = block(jnp.int32(steps - 1) - i)
            slope = pull * jnp.exp(x - log_sum) - jnp.where(hit, w, 0.0)
            slope = slope * (1 - (x / cap) * (x / cap)) if cap else slope
            triton.store(gradient.at[place], slope.astype(dtype), mask=inside if V % COLUMNS else None)

        lax.fori_loop(0, steps, slopes, None)
        lse[n], correct[n] = log_sum, jnp.sum(wanted)

    number, wide = jax.ShapeDtypeStruct((N,), jnp.float32), jax.ShapeDtypeStruct((N, V), dtype)
    call = pl.pallas_call(kernel, out_shape=(number, number, wide), grid=(N,), name=NAME, interpret=INTERPRET,
                          compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1))
    return jax.named_scope(NAME)(call)(logits_NV, target_N, weight_N.astype(jnp.float32))
