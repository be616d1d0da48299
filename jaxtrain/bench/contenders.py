"""Other programs that train the same model from the same weights on the same batches, for comparison with a run.

"step" is jaxtrain's own compiled step without the loop; "plain" a hand-written step in JAX (gpt2, float32, one device);
"torch" a hand-written step in PyTorch, "torch.compile" the same compiled, and "torch.causal" compiled and without a
mask between the documents of a row, which is less work and gives another loss.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxtrain.config.schema import ModelConfig
from jaxtrain.errors import UserError, install_extra, nearest
from jaxtrain.run import Run, compiled_step
from jaxtrain.train_step.state import Params


@dataclass
class Contender:
    """A program to compare with: `issue(batch)` starts a step, and `read` waits for the loss of what it returned."""

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
    """Parse the contenders on a command line, such as "step,plain"."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            raise UserError("--compare", f"there is no {name!r} to compare with", nearest(name, NAMES))
    return list(dict.fromkeys(names))


def contenders(names: Iterable[str], run: Run, params: Params) -> dict[str, Contender]:
    """Create the named contenders, each ready to take its first step from these parameters."""
    makers: dict[str, Callable[[Run, Any], Contender]] = {
        "step": step_alone, "plain": plain, "torch": torch_twin, "torch.compile": partial(torch_twin, compiled=True),
        "torch.causal": partial(torch_twin, compiled=True, exact=False)}
    return {name: makers[name](run, params) for name in names}


def step_alone(run: Run, params: Params) -> Contender:
    """jaxtrain's own compiled step, which shows whether a difference comes from the step or from the loop."""
    state = run.init()

    def issue(batch):
        nonlocal state
        state, metrics = compiled_step(run)(state, batch)
        return metrics["loss"]

    return Contender(issue, float, run.sharded.place)


def refuse(names: Iterable[str], run: Run) -> None:
    """Raise a UserError before compiling if a named program cannot train this config."""
    for name in names:
        if name == "plain":
            _refuse_plain(run)
        elif name.startswith("torch"):
            _refuse_torch(run)


def _refuse_plain(run: Run) -> None:
    from jaxtrain.bench.reference import plain_jax

    c = run.config.model
    require(run, {
        "model.name": c.name == "gpt2", "train.precision": run.sharded.settings.precision == "float32",
        "mesh": run.mesh.size == 1, "model.tied_embeddings": c.ties_head, "model.window": not any(c.windows),
        "model.norm_eps": c.norm_eps == plain_jax.EPS, "model.mlp_dim": c.mlp_dim == 4 * c.embed_dim,
        "model.head_dim": c.head_dim * c.num_heads == c.embed_dim, "model.num_kv_heads": c.num_kv_heads == c.num_heads,
        "train.accumulation": run.config.train.accumulation == 1},
            "plain has gpt2 in float32 on one device, heads and MLP of the usual width")


def plain(run: Run, params: Params) -> Contender:
    """A hand-written step in JAX."""
    from jaxtrain.bench.reference import plain_jax

    c = run.config.model
    state, step = plain_jax.start(plain_jax.from_jaxtrain(params)), plain_jax.make_step(shape_of(c), hyper(run))

    def issue(batch):
        nonlocal state
        with jax.default_matmul_precision("highest"):  # jaxtrain computes float32 like this
            state, loss = step(state, batch)
        return loss

    return Contender(issue, float, jax.device_put)


def require(run: Run, kept: dict[str, bool], what: str) -> None:
    """Raise a UserError for a config key that another program does not support; `what` says what it supports."""
    o, t = run.config.optimizer, run.config.train
    kept = {**kept, "optimizer.name": o.name == "adamw", "optimizer.schedule": o.schedule == "cosine",
            "optimizer.offload": not o.offload, "optimizer.clip_norm": o.clip_norm > 0, "train.z_loss": not t.z_loss,
            "train.ema_decay": not t.ema_decay}
    for key, same in kept.items():
        section, _, name = key.partition(".")
        if not same:
            value = getattr(getattr(run.config, section), name) if name else f"{run.mesh.size} devices"
            value = run.sharded.settings.precision if name == "precision" else value
            raise UserError(key, f"{value} cannot be compared: {what}, adamw, a cosine schedule and clipping",
                            "change the key, or compare with step")


def shape_of(model: ModelConfig) -> Any:
    """Convert a model's sizes for the plain step."""
    from jaxtrain.bench.reference.plain_jax import Shape

    return Shape(model.num_layers, model.embed_dim, model.num_heads, model.max_seq_len, model.vocabulary)


def _refuse_torch(run: Run) -> None:
    try:
        import torch
    except ModuleNotFoundError:
        raise UserError("--compare", "PyTorch is not installed", install_extra("bench")) from None
    c, t = run.config.model, run.config.train
    device = _torch_device()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--compare", "this PyTorch has no GPU", "install one that does, or compare with step")
    wanted = "float32" if device == "cpu" else "bfloat16"
    require(run, {"mesh": run.mesh.size == 1, "train.precision": run.sharded.settings.precision == wanted,
                  "model.name": c.name in ("gpt2", "llama"), "model.num_experts": not c.experts.num,
                  "model.window": not any(c.windows), "model.mtp_loss_weight": not c.multi_token_loss,
                  "model.rope_type": getattr(c, "rope_type", "llama3") == "llama3",
                  "train.remat": t.remat in ("none", "full")},
            f"torch has gpt2 and llama without experts and windows, in {wanted} on one device, remat none or full")


def _torch_device() -> str:
    return "cpu" if jax.default_backend() == "cpu" else "cuda"


def torch_twin(run: Run, params: Params, compiled: bool = False, exact: bool = True) -> Contender:
    """A hand-written step in PyTorch, on the CPU or the first GPU, like jaxtrain."""
    import torch

    from jaxtrain.bench.reference import torch_twin

    c, t, device = run.config.model, run.config.train, _torch_device()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = torch_twin.Twin(c, exact, remat=t.remat == "full")
    model.load_state_dict(torch_twin.from_jaxtrain(jax.device_get(params)))
    model = model.to(device)
    return Contender(torch_twin.make_step(model, hyper(run), compiled, t.accumulation), float,
                     partial(torch_twin.tensors, device=device))


def hyper(run: Run) -> Any:
    """Convert the optimizer's settings for the hand-written programs."""
    from jaxtrain.bench.reference import plain_jax

    o = run.config.optimizer
    return plain_jax.Hyper(run.config.train.steps, o.learning_rate, o.warmup_steps, o.final_fraction, o.weight_decay,
                           o.clip_norm, o.b1, o.b2, o.eps)


def apart(curves: dict[str, list[float]]) -> dict[str, float]:
    """Return the largest difference of each contender's losses from jaxtrain's."""
    ours = np.array(curves["jaxtrain"])
    return {name: float(np.abs(np.array(curve) - ours).max()) for name, curve in curves.items() if name != "jaxtrain"}
