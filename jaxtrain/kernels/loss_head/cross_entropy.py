"""Losses of a language-model head that never hold all logits: cross-entropy, and distillation from a teacher.

Tokens pass through the head in chunks. When a gradient is wanted, each chunk's gradient is computed while its logits
exist: three matmuls in all, nothing computed twice, nothing of size tokens x vocabulary kept. The vocabulary may be
split over mesh axes. The weight's gradient is accumulated in float32, and summed over the batch's devices once, after
the last chunk: directly into the layout that the weight has at rest.

Shape suffixes: B batch, T sequence, N tokens, D embedding, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.errors import UserError
from jaxtrain.kernels.functions import soft_capped
from jaxtrain.kernels.loss_head import triton_logits
from jaxtrain.kernels.loss_head.biased_heads import for_head
from jaxtrain.sharding import activations, axis_rules, mesh_context

F32 = jnp.float32


@jax.named_scope("loss_head")  # jaxtrain.bench attributes step time to this name
def cross_entropy(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, *,
                  z_loss: float = 0.0, chunks: int = 0, cap: float = 0.0, kernel: str = "auto") -> jax.Array:
    """Return the sum over tokens of weight x (cross-entropy + z_loss x log-partition squared), in float32.

    A weight of 0 ignores a token; weights have gradients too. `head_DV` may be laid out as at rest. `chunks` is into
    how many pieces the tokens on one device are split; 0 chooses by size. `cap` is the soft cap of logits; 0: none.
    `kernel` is what reads the logits: "xla", "triton", or "auto", see triton_logits.py.
    """
    return _summed(x_BTD, head_DV, targets_BT, weights_BT, (), z_loss, chunks, 0.0, 1.0, (cap, 0.0), kernel)[0]


@jax.named_scope("loss_head")
def penalized_cross_entropy(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, *,
                            z_loss: float, chunks: int = 0, cap: float = 0.0,
                            kernel: str = "auto") -> tuple[jax.Array, jax.Array]:
    """Return what `cross_entropy` returns, and the same sum without the z-loss, which has no gradient."""
    return _summed(x_BTD, head_DV, targets_BT, weights_BT, (), z_loss, chunks, 0.0, 1.0, (cap, 0.0), kernel)


@jax.named_scope("loss_head")
def distillation_loss(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array,
                      teacher_BTC: jax.Array, teacher_head_CV: jax.Array, *, soft: float, temperature: float = 1.0,
                      z_loss: float = 0.0, chunks: int = 0,
                      caps: tuple[float, float] = (0.0, 0.0)) -> tuple[jax.Array, jax.Array]:
    """Return the sum over tokens of weight x ((1 - soft) x cross-entropy + soft x temperature squared x KL divergence).

    The second value is the sum of weight x cross-entropy alone, without the z-loss; it has no gradient.

    The divergence is that of the student's prediction from the teacher's, both softened by `temperature`: Hinton,
    Vinyals and Dean (arXiv 1503.02531). The teacher, whose final activations (of width C) and output projection are
    given, gets no gradient. `caps` are the soft caps of the student's logits and of the teacher's.
    """
    teacher = jax.lax.stop_gradient((for_head(teacher_BTC, teacher_head_CV), teacher_head_CV))
    return _summed(x_BTD, head_DV, targets_BT, weights_BT, teacher, z_loss, chunks, soft, temperature, caps, "xla")


def default_chunks(tokens: int, vocab: int) -> int:
    """Return into how many chunks of at most 512 MiB of logits to split tokens, but of at least 2,048 tokens.

    With fewer tokens the matmul that makes the weight's gradient is bound by memory: on an H200 chunks of 1,024 take
    6 to 9 % longer than of 2,048, and those 1 to 3 % longer than of 8,192 (docs/benchmarks.md).
    """
    wanted = max(1, tokens // max(2048, 2**27 // vocab))
    above = next(n for n in range(wanted, tokens + 1) if tokens % n == 0)
    # Lengths with few divisors: prefer larger chunks to very many tiny ones.
    return above if above <= 4 * wanted else next(n for n in range(wanted, 0, -1) if tokens % n == 0)


def _summed(x, head, *others):
    return _sums(for_head(x, head), head, *others)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8, 9, 10))
def _sums(x, head, targets, weights, teacher, *options):
    sums_2, _ = run_head(x, head, targets, weights, teacher, options, gradients=False)
    return sums_2[0], sums_2[1]


def _forward(x, head, targets, weights, teacher, *options):
    sums_2, dx, dhead, dweights = run_head(x, head, targets, weights, teacher, options, gradients=True)
    dweights = dweights.astype(weights.dtype) if jnp.issubdtype(weights.dtype, jnp.inexact) else None
    return (sums_2[0], sums_2[1]), (dx, dhead, jnp.zeros((), head.dtype), dweights)


def _backward(z_loss, chunks, soft, temperature, caps, kernel, saved, g):
    (dx, dhead, head, dweights), (g, _) = saved, g
    dweights = None if dweights is None else (g * dweights).astype(dweights.dtype)
    return (g * dx).astype(dx.dtype), (g * dhead).astype(head.dtype), None, dweights, None


_sums.defvjp(_forward, _backward)


def run_head(x, head, targets, weights, teacher, options, gradients, spread=(), draws=()) -> tuple[jax.Array, ...]:
    """Return sums over tokens (with z-loss and without), then the gradients of the former, then each token's loss.

    Args:
        spread: of each token, the coefficient of the entropy of its prediction in the sum with z-loss; without
            gradients, each token's entropy is returned after its loss.
        draws: of each token the two words of a key, and how many columns may be drawn from; without
            gradients, a token drawn from each prediction is returned last.
    """
    local = partial(_local, options=options, gradients=gradients)
    if activations.activation_spec() is None:
        return local(x, targets, weights, (head, *teacher[1:]), teacher[:1], spread, draws)
    batch, seq, vocab = map(activations.split_by, ("batch", "seq", "act_vocab"))
    batch_axes, vocab_axes = axis_rules.axes_of(batch) + axis_rules.axes_of(seq), axis_rules.axes_of(vocab)
    tokens, x_spec = P(batch, seq), P(batch, seq, None)

    def spec_of(head):
        """Return the layout at rest, if the devices that split the batch can gather it among themselves."""
        rows, columns = jax.typeof(head).sharding.spec
        at_rest = set(axis_rules.axes_of(rows)) <= set(batch_axes) and columns == vocab
        return P(rows if at_rest else None, vocab)

    heads = (head, *teacher[1:])  # the teacher's too, if there is one
    specs = [*map(spec_of, heads)]
    sums_2, *more = activations.manual_region(
        partial(local, batch_axes=batch_axes, vocab_axes=vocab_axes,
                row_axes=[axis_rules.axes_of(spec[0]) for spec in specs]),
        in_specs=(x_spec, tokens, tokens, tuple(specs), (x_spec,) * len(teacher[:1]), (tokens,) * len(spread),
                  (tokens,) * len(draws)),
        out_specs=(P(), x_spec, specs[0], tokens) if gradients else (P(), *(tokens,) * (1 + len(spread) + bool(draws))),
    )(x, targets, weights, tuple(map(jax.reshard, heads, specs)), teacher[:1], spread, draws)
    if gradients:
        more[1] = jax.reshard(more[1], jax.typeof(head).sharding.spec)
    return sums_2, *more


def _statistics(logits_NV: jax.Array, hit_NV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each token's largest logit, the sum of the exponentials below it, and the logit of its target."""
    wanted_NV = jnp.where(hit_NV, logits_NV, 0)
    if mesh_context.platform() == "cpu":  # a reduction of several values at once is slower there
        top_N = logits_NV.max(-1)
        return top_N, jnp.exp(logits_NV - top_N[:, None]).sum(-1), wanted_NV.sum(-1)

    def combine(a, b):
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top), a[2] + b[2]

    # One pass over the logits instead of three.
    start = jnp.finfo(F32).min, F32(0), F32(0)
    return lax.reduce((logits_NV, jnp.ones_like(logits_NV), wanted_NV), start, combine, (1,))


def _local(x_BTD, targets_BT, weights_BT, heads, teacher, spread, draws, batch_axes=(), vocab_axes=(),
           row_axes=((), ()), *, options, gradients) -> tuple[jax.Array, ...]:
    """Compute one device's share: its tokens against its part of the vocabulary."""
    z_loss, chunks, soft, temperature, (cap, teacher_cap), kernel = options
    head_DV, *teacher_head = (lax.all_gather(w, axes, tiled=True) if axes else w
                              for w, axes in zip(heads, row_axes, strict=False))
    N, D, V = targets_BT.size, *head_DV.shape
    chunks = chunks or default_chunks(N, V)
    if N % chunks:
        raise UserError("chunks", f"{chunks} does not divide the {N} tokens on a device", "give a divisor, or 0")
    first = lax.axis_index(vocab_axes) * V if vocab_axes else 0
    in_one_pass = gradients and not vocab_axes and not spread and triton_logits.chosen(kernel)
    over_vocab = partial(lax.psum, axis_name=vocab_axes) if vocab_axes else lambda value: value
    largest = partial(lax.pmax, axis_name=vocab_axes) if vocab_axes else lambda value: value

    def log_partition(logits_NV, hit_NV):
        """Return the logarithm of the sum of exponentials, and the logit of the target."""
        own_N, sum_N, correct_N = _statistics(logits_NV, hit_NV)
        top_N = largest(own_N)
        return top_N + jnp.log(over_vocab(sum_N * jnp.exp(own_N - top_N))), over_vocab(correct_N)

    def against_tokens(logits_NV, target_N, weight_N):
        """Return each token's loss with and without z-loss, the former's gradient with respect to the logits, and the
        logarithm of the sum of exponentials.
        """
        hit_NV = (target_N - first)[:, None] == jnp.arange(V)
        lse_N, correct_N = log_partition(logits_NV, hit_NV)
        entropy_N = lse_N - correct_N
        loss_N = entropy_N + z_loss * jnp.square(lse_N)
        pull_N = weight_N * (1 + 2 * z_loss * lse_N)
        probability_NV = jnp.exp(logits_NV - lse_N[:, None])
        return loss_N, entropy_N, pull_N[:, None] * probability_NV - jnp.where(hit_NV, weight_N[:, None], 0), lse_N

    def against_teacher(logits_NV, teacher_NV, weight_N):
        """Return the same for the divergence."""
        q_NV, p_NV = (x_NV / temperature - log_partition(x_NV / temperature, False)[0][:, None]
                      for x_NV in (logits_NV, teacher_NV))
        divergence_N = over_vocab((jnp.exp(p_NV) * (p_NV - q_NV)).sum(-1))
        pull_N = weight_N * temperature
        return temperature**2 * divergence_N, pull_N[:, None] * (jnp.exp(q_NV) - jnp.exp(p_NV))

    def of_spread(logits_NV, lse_N, pull_N):
        """Return the entropy of each token's prediction, and its gradient with respect to the logits."""
        probability_NV = jnp.exp(logits_NV - lse_N[:, None])
        spread_N = lse_N - over_vocab((probability_NV * logits_NV).sum(-1))
        return spread_N, -pull_N[:, None] * probability_NV * (logits_NV - (lse_N - spread_N)[:, None])

    def chunk(carry, inputs) -> tuple[tuple, PyTree]:
        x_ND, target_N, weight_N, teacher_NC, pulls_N, keys_N = inputs
        raw_NV = jnp.dot(x_ND, head_DV, preferred_element_type=F32)
        if in_one_pass:
            lse_N, correct_N, dlogits_NV = triton_logits.loss_and_gradient(
                raw_NV, target_N, weight_N, z_loss=z_loss, cap=cap, dtype=x_ND.dtype)
            entropy_N = lse_N - correct_N
            loss_N = entropy_N + z_loss * jnp.square(lse_N)
            return products(carry, x_ND, loss_N, entropy_N, weight_N, dlogits_NV, ())
        logits_NV = soft_capped(raw_NV, cap)
        loss_N, entropy_N, dlogits_NV, lse_N = against_tokens(logits_NV, target_N, weight_N)
        for y_NC in teacher_NC:
            teacher_NV = soft_capped(jnp.dot(y_NC, teacher_head[0], preferred_element_type=F32), teacher_cap)
            other_N, dother_NV = against_teacher(logits_NV, teacher_NV, weight_N)
            loss_N, dlogits_NV = (1 - soft) * loss_N + soft * other_N, (1 - soft) * dlogits_NV + soft * dother_NV
        spreads = [of_spread(logits_NV, lse_N, pull_N) for pull_N in pulls_N]
        dlogits_NV += sum(change_NV for _, change_NV in spreads)
        dlogits_NV = dlogits_NV * (1 - jnp.square(logits_NV / cap)) if cap else dlogits_NV
        found = tuple(spread_N for spread_N, _ in spreads)
        if keys_N:
            from jaxtrain.kernels.loss_head.token_draws import drawn

            found += (drawn(logits_NV, keys_N, first, vocab_axes),)
        return products(carry, x_ND, loss_N, entropy_N, weight_N, dlogits_NV.astype(x_ND.dtype), found)

    def products(carry, x_ND, loss_N, entropy_N, weight_N, dlogits_NV, found_N) -> tuple[tuple, PyTree]:
        """Add a chunk's sums, and what its gradient by logits makes of activations and weight."""
        sums_2, dhead_DV = carry
        sums_2 += jnp.stack([(weight_N * loss_N).sum(), (weight_N * entropy_N).sum()])
        if not gradients:
            return (sums_2, dhead_DV), (loss_N, *found_N)
        dx_ND = over_vocab(jnp.dot(dlogits_NV, head_DV.T, preferred_element_type=F32)).astype(x_ND.dtype)
        dhead_DV = dhead_DV + jnp.dot(x_ND.T, dlogits_NV, preferred_element_type=F32)
        return (sums_2, dhead_DV), (dx_ND, loss_N)

    inputs = (x_BTD.reshape(chunks, -1, D), targets_BT.reshape(chunks, -1), weights_BT.reshape(chunks, -1),
              tuple(y_BTC.reshape(chunks, -1, y_BTC.shape[-1]) for y_BTC in teacher),
              tuple(pull_BT.reshape(chunks, -1) for pull_BT in spread), tuple(x.reshape(chunks, -1) for x in draws))
    start: tuple = (jnp.zeros(2, F32), jnp.zeros((D, V), F32) if gradients else None)
    if chunks == 1:  # no loop, which is faster for small models on CPU
        (sums_2, dhead_DV), each = chunk(start, jax.tree.map(lambda a: a[0], inputs))
    else:
        (sums_2, dhead_DV), each = lax.scan(chunk, start, inputs)
    if batch_axes:
        sums_2 = lax.psum(sums_2, batch_axes)
    if not gradients:
        return sums_2, *(x_N.reshape(weights_BT.shape) for x_N in each)
    dx, loss_N = each
    # A sum over tokens may be too large for float16 until the backward pass has divided it.
    dhead_DV = dhead_DV.astype(F32 if head_DV.dtype == jnp.float16 else head_DV.dtype)
    if row_axes[0]:
        dhead_DV = lax.psum_scatter(dhead_DV, row_axes[0], tiled=True)
    if others := tuple(axis for axis in batch_axes if axis not in row_axes[0]):
        dhead_DV = lax.psum(dhead_DV, others)
    return sums_2, dx.reshape(x_BTD.shape), dhead_DV, loss_N.reshape(weights_BT.shape)
