"""Parts of a step alone on this device: attention with packed documents, the loss head, the optimizer.

Run by accelerator_blocks.py: python -m tools.device.accelerator_parts --results=FILE --about=JSON [--rehearse]
"""

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.kernels.loss_head.cross_entropy import cross_entropy
from jaxtrain.models.attention.self_attention import attend
from jaxtrain.plan.trace import kernels
from jaxtrain.train_step.optimizers import make_optimizer, make_schedule
from tools.device.accelerator_blocks import Session, median_seconds


def attention(session: Session) -> None:
    """Forward, and forward with backward, in causal TFLOP/s: rows of documents of about a quarter of their length."""
    gpu = jax.default_backend() in ("gpu", "cuda")
    shapes = ((64, 1024, 12, 12, 64), (16, 4096, 32, 8, 64), (4, 4096, 32, 8, 128), (1, 32768, 32, 8, 128),
              (4, 4096, 16, 8, 256))
    for rows, length, heads, groups, width in ((1, 64, 4, 2, 16),) if session.rehearse else shapes:
        draw = np.random.default_rng(0)
        starts = draw.random((rows, length)) < 4 / length
        segments = jnp.asarray(1 + np.cumsum(starts, 1), jnp.int32)
        q, k, v = (jax.random.normal(jax.random.key(n), (rows, length, count, width), jnp.bfloat16)
                   for n, count in enumerate((heads, groups, groups)))
        work = kernels.flops(kernels.FORWARD, [x.shape for x in (q, k, v)])
        back = kernels.flops(kernels.BACKWARD, [x.shape for x in (q, k, v)])
        functions = {}
        for backend in ("mosaic", "triton", "cudnn") if gpu else ("xla",):
            for packed in (True, False):
                def forward(q, k, v, backend=backend, seen=segments if packed else None):
                    return attend(q, k, v, segments_BT=seen, backend=backend)

                def both(q, k, v, forward=forward):
                    out, pull = jax.vjp(forward, q, k, v)
                    return pull(out)

                functions[f"{backend}{'' if packed else ', one document'}"] = forward, both
        with ThreadPoolExecutor(len(functions)) as pool:  # compilers side by side, measurements one at a time
            compiled = dict(zip(functions, pool.map(partial(tried, (q, k, v)), functions.values()), strict=True))
        for name, pair in compiled.items():
            found: dict[str, Any] = {}
            for what, f, flops in zip(("forward", "both"), pair, (work, work + back), strict=True):
                if isinstance(f, str):
                    found["failed"] = f"{what}: {f}"
                    break
                seconds = median_seconds(partial(f, q, k, v), 5)
                found |= {f"{what}_ms": 1e3 * seconds, f"{what}_tflops": flops / seconds / 1e12}
            session.figures(f"{rows} x {length}, {heads} heads of {width}, {groups} of keys: {name}", **found)


def tried(arrays: tuple[jax.Array, ...], functions: tuple[Callable[..., Any], ...]) -> list[Any]:
    """Compiled functions, or why one does not compile."""
    try:
        return [jax.jit(f).lower(*arrays).compile() for f in functions]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[:150]] * len(functions)


def loss_head(session: Session) -> None:
    """The head with its gradients by chunks, beside its three matmuls alone. Goal: 90 % of their speed."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    shapes = (32768, 768, 50304), (32768, 2048, 128256), (8192, 4096, 128256)
    for N, D, V in ((256, 64, 320),) if session.rehearse else shapes:
        x, head = (jax.random.normal(jax.random.key(n), shape, dtype) for n, shape in enumerate(((1, N, D), (D, V))))
        head *= 0.02
        targets, weights = jax.random.randint(jax.random.key(2), (1, N), 0, V), jnp.ones((1, N), jnp.float32)

        few = min(N, 4096)  # all logits of more tokens would take much memory
        plain = median_seconds(partial(products, x[0, :few], head)) * N / few
        for size in (64,) if session.rehearse else (1024, 2048, 4096, 8192):
            for kernel in ("xla", "triton") if jax.default_backend() in ("gpu", "cuda") else ("xla",):
                loss = partial(cross_entropy, chunks=N // size, kernel=kernel)
                ours = median_seconds(partial(jax.jit(jax.grad(loss, argnums=(0, 1))), x, head, targets, weights), 5)
                session.figures(
                    f"loss head {N} x {D} x {V}, chunks of {size}{', triton' if kernel == 'triton' else ''}",
                    ms=1e3 * ours, tflops=6 * N * D * V / ours / 1e12, matmuls_ms=1e3 * plain,
                    of_their_speed=plain / ours)


@jax.jit
def products(x_ND, head_DV):
    """The three matmuls of a head alone."""
    logits_NV = x_ND @ head_DV
    return logits_NV @ head_DV.T, x_ND.T @ logits_NV


def optimizer(session: Session) -> None:
    """An update of AdamW with float32 moments, in bytes a second: it reads 16 a parameter and writes 12."""
    rows, layers = (64, 2) if session.rehearse else (4096, 16)
    config = OptimizerConfig()
    params = {f"w{n}": jnp.ones((rows, 4 * rows), jnp.float32) for n in range(layers)}
    axes: Any = {name: ("embed", "mlp") for name in params}
    made = make_optimizer(config, make_schedule(config, 100), axes)

    def update(params, state, grads):
        updates, state = made.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(update, donate_argnums=(0, 1))
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-3), params)
    held = [params, jax.jit(made.init)(params)]

    def once():
        held[:] = step(*held, grads)
        return held

    seconds = median_seconds(once)
    count = layers * 4 * rows * rows
    session.figures(f"AdamW, {count:,} parameters", ms=1e3 * seconds, gb_per_s=28 * count / seconds / 1e9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--about", type=json.loads, required=True)
    parser.add_argument("--rehearse", action="store_true")
    flags = parser.parse_args()
    session = Session(flags.results, "parts", flags.rehearse, flags.about)
    for part in (attention, loss_head, optimizer):
        part(session)
    return 0


if __name__ == "__main__":
    sys.exit(main())
