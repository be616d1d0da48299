"""What a run can be measured beside: the same model, weights and batches in another program.

"step": jaxtrain's own compiled step without its loop. "plain": the same model by hand in JAX (gpt2, float32, one
device). "torch": by hand in PyTorch; "torch.compile": compiled; "torch.causal": compiled, with documents of a row not
kept apart, which is less work and another loss.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxtrain.build import Run, build
from jaxtrain.config import ModelConfig
from jaxtrain.errors import UserError, nearest


@dataclass
class Contender:
    """Trains as the run does. `issue(batch)` begins a step, `read` of what it returned waits for the loss."""

    issue: Callable[[Any], Any]
    read: Callable[[Any], float]
    place: Callable[[Any], Any]

    def steps(self, batches: Iterable[Any]) -> list[float]:
        """Take a step on each batch, reading each loss while the next step runs."""
        losses, before = [], None
        for batch in batches:
            issued = self.issue(batch)
            if before is not None:
                losses.append(self.read(before))
            before = issued
        return [*losses, self.read(before)]


NAMES = ("step", "plain", "torch", "torch.compile", "torch.causal")


def named(text: str) -> list[str]:
    """The contenders that a command line names, such as "step,plain"."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            raise UserError("--compare", f"there is no {name!r} to compare with", nearest(name, NAMES))
    return names


def contenders(names: Iterable[str], run: Run, params: Any) -> dict[str, Contender]:
    """The named ones, each about to take its first step from these parameters."""
    makers: dict[str, Callable[[Run, Any], Contender]] = {
        "step": step_alone, "plain": plain, "torch": torch_twin, "torch.compile": partial(torch_twin, compiled=True),
        "torch.causal": partial(torch_twin, compiled=True, exact=False)}
    return {name: makers[name](run, params) for name in names}


def step_alone(run: Run, params: Any) -> Contender:
    """jaxtrain's own compiled step: tells whether a difference comes from it or from the loop."""
    state = build(run.config, mesh=run.mesh).init()

    def issue(batch):
        nonlocal state
        state, metrics = run.compiled_step(state, batch)
        return metrics["loss"]

    return Contender(issue, float, run.place)


def plain(run: Run, params: Any) -> Contender:
    """The same step by hand in JAX."""
    from jaxtrain.bench.reference import plain_jax

    c = run.config.model
    if c.name != "gpt2" or run.mesh.size > 1 or run.precision != "float32" or not c.tied_embeddings or c.window:
        raise UserError("--compare", "the plain step is gpt2 in float32 on one device", "compare with torch, or step")
    shape = shape_of(c)
    state, step = plain_jax.start(plain_jax.from_jaxtrain(params)), plain_jax.make_step(shape, hyper(run))

    def issue(batch):
        nonlocal state
        state, loss = step(state, batch)
        return loss

    return Contender(issue, float, jax.device_put)


def shape_of(model: ModelConfig) -> Any:
    """A model's sizes as the plain step takes them."""
    from jaxtrain.bench.reference.plain_jax import Shape

    return Shape(model.num_layers, model.embed_dim, model.num_heads, model.max_seq_len, model.vocab_size)


def torch_twin(run: Run, params: Any, compiled: bool = False, exact: bool = True) -> Contender:
    """The same step by hand in PyTorch, on the first GPU where jaxtrain has one."""
    try:
        import torch
    except ModuleNotFoundError:
        raise UserError("--compare", "PyTorch is not installed", "pip install 'jaxtrain[bench]'") from None
    from jaxtrain.bench.reference import torch_twin

    t = run.config.train
    if run.mesh.size > 1:
        raise UserError("--compare", "the twin in PyTorch runs on one device", "use a mesh of one")
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    wanted = "float32" if device == "cpu" else "bfloat16"
    if run.precision != wanted:
        raise UserError("train.precision", f"on {device} the twin in PyTorch computes in {wanted}", f"use {wanted}")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        model = torch_twin.Twin(run.config.model, exact, remat=t.remat != "none")
    except ValueError as error:
        raise UserError("--compare", str(error), "compare with step") from None
    model.load_state_dict(torch_twin.from_jaxtrain(jax.device_get(params)))
    model = model.to(device)
    return Contender(torch_twin.make_step(model, hyper(run), compiled, t.accumulation), float,
                     partial(torch_twin.tensors, device=device))


def hyper(run: Run) -> Any:
    """The optimizer's settings as the programs by hand take them."""
    from jaxtrain.bench.reference import plain_jax

    o = run.config.optimizer
    if (o.name, o.schedule, o.offload) != ("adamw", "cosine", False):
        raise UserError("--compare", "what is written by hand has adamw with a cosine schedule, on the devices",
                        "set optimizer.name=adamw optimizer.schedule=cosine optimizer.offload=False")
    return plain_jax.Hyper(run.config.train.steps, o.learning_rate, o.warmup_steps, o.final_fraction, o.weight_decay,
                           o.clip_norm, o.b1, o.b2, o.eps)


def apart(curves: dict[str, list[float]]) -> dict[str, float]:
    """How far each contender's losses lie from jaxtrain's, at most."""
    ours = np.array(curves["jaxtrain"])
    return {name: float(np.abs(np.array(curve) - ours).max()) for name, curve in curves.items() if name != "jaxtrain"}
