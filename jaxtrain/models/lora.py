"""Low-rank adaptation (LoRA, arXiv 2106.09685): beside frozen matrices, a narrow and trained product of two.

A linear layer x W becomes x W + scale x A B, with A down to the rank and B up from it. A begins random and B at zero,
so that the model begins as the one that is adapted. The rest of it is frozen, as by `train.freeze`.

With PiSSA (arXiv 2404.02948) A and B begin as the principal components of W, and what they begin with is subtracted:
x W + scale x (A B - A' B'), where A' and B' are frozen copies of the start. This is the published method, which adapts
W - scale A' B', with W unchanged: a model without its adapters is the one that is adapted.

With DoRA (arXiv 2402.09353) the sum of both matrices only turns the columns of W, and another trained parameter says by
how much each is longer than in W, at first 1.

Several adapters, stacked along the rank, are one whose rank is their sum; `choosing` says which part each row uses.

Shape suffixes: of a weight, the letters of the layer's own equation; R the rank.
"""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.base.annotations import AnyArray
from jaxtrain.config.family import entries
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.errors import UserError, nearest
from jaxtrain.models import training_noise
from jaxtrain.models.experts.moe import MATRICES, MoE
from jaxtrain.models.layers import Linear, param
from jaxtrain.parallel.expert_matrices import Adapted
from jaxtrain.sharding import activations
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Params

NAME = "adapter"  # of the attribute of a linear layer, and so in the paths of its parameters
STARTS = ("start_down", "start_up")  # of the frozen copies of what PiSSA's adapters begin with
ALL = "all-linear"
# PEFT's names of linear layers, and the ends of the paths that they have here, for models that are published otherwise.
PUBLISHED = {
    "q_proj": ["attention/q"], "k_proj": ["attention/k"], "v_proj": ["attention/v"], "o_proj": ["attention/out"],
    "gate_proj": ["mlp/gate", "mlp/shared/gate"], "up_proj": ["mlp/up", "mlp/shared/up"],
    "down_proj": ["mlp/down", "mlp/shared/down"], "c_attn": ["attention/q", "attention/k", "attention/v"],
    "c_proj": ["attention/out", "mlp/down"], "c_fc": ["mlp/up"], "q_a_proj": ["attention/q_down"],
    "q_b_proj": ["attention/q"], "kv_a_proj_with_mqa": ["attention/kv_down"], "kv_b_proj": ["attention/kv"],
    # of Mamba-2, whose first matrix is five here, and of LFM2, whose first one is three
    "in_proj": [*(f"attention/{name}" for name in ("gate", "x", "B", "C", "dt", "before", "after")),
                *(f"attention/states/{name}" for name in ("gate", "x", "B", "C", "dt"))],
    "out_proj": ["attention/out", "attention/states/out"],
    "w1": ["mlp/gate"], "w2": ["mlp/down"], "w3": ["mlp/up"],
    "fc1_latent_proj": ["mlp/into_latent"], "fc2_latent_proj": ["mlp/out_of_latent"]}
_MODULES = {"self_attn": "attention/", "attn": "attention/", "mamba": "attention/", "conv": "attention/", "mlp": "mlp/",
            "feed_forward": "mlp/"} | dict.fromkeys(("shared_experts", "shared_expert", "shared_mlp"), "mlp/shared/")
_CHOSEN: ContextVar[jax.Array | None] = ContextVar("chosen", default=None)


@contextlib.contextmanager
def choosing(chosen_BR: jax.Array | None) -> Iterator[None]:
    """A context in which each row multiplies what it has at the rank by these numbers, in place of the scale."""
    token = _CHOSEN.set(chosen_BR)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


class Adapter(nnx.Module):
    """The low-rank product of one linear layer, or of all layers of a stack."""

    def __init__(self, linear: Linear, path: str, c: LoraConfig, *, rngs: nnx.Rngs):
        given, weight, result = linear.equation.replace("->", ",").split(",")
        summed = sum(letter in given for letter in weight)  # first dimensions of the weight
        shape = linear.kernel.get_value().shape
        stacked = len(shape) - len(weight)
        lead, inner, outer = shape[:stacked], shape[stacked:stacked + summed], shape[stacked + summed:]
        layers = ("layers",) * stacked
        self.scale, self.out, self.path, self.dropout = scale(c), linear.out, path, c.dropout
        self.down_axes, self.up_axes = (*linear.axes[:summed], "lora"), ("lora", *linear.axes[summed:])
        self.down_equation = f"{given},{weight[:summed]}r->{given[:2]}r"
        self.up_equation = f"{given[:2]}r,r{weight[summed:]}->{result}"
        self.equation = f"{weight[:summed]}r,r{weight[summed:]}->{weight}"
        self.norm_axes, self.summed = linear.axes[summed:], tuple(range(summed))
        self.magnitude = param(rngs, (*lead, *outer), (*layers, *self.norm_axes), std=0, value=1.0,
                               compute_dtype="float32") if c.dora else None
        self.down = param(rngs, (*lead, *inner, c.rank), (*layers, *self.down_axes), std=0.02)
        self.up = param(rngs, (*lead, c.rank, *outer), (*layers, *self.up_axes), std=0)
        # hub/adapters/principal_components.py gives all four their values.
        starts = c.init == "pissa"
        self.start_down = param(rngs, (*lead, *inner, c.rank), (*layers, *self.down_axes), std=0) if starts else None
        self.start_up = param(rngs, (*lead, c.rank, *outer), (*layers, *self.up_axes), std=0) if starts else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = activations.leave_reduced(x)
        if len(self.down_axes) == 2 and self.down_axes[0] in ("embed", "latent"):  # between blocks it may be split more
            x = activations.constrain(x, "batch", "seq", "act_embed")
        x = training_noise.dropout(x, self.dropout, self.path)
        y = self._multiply(x, self.down, self.up)
        if self.start_down is not None:
            y -= self._multiply(x, self.start_down, self.start_up)
        return y * self.scale if _CHOSEN.get() is None else y

    def _multiply(self, x: jax.Array, down: nnx.Param, up: Any) -> jax.Array:
        x_BTR = activations.einsum(self.down_equation, x, down.get_value(), self.down_axes, ("batch", "seq", None))
        if (chosen_BR := _CHOSEN.get()) is not None:
            x_BTR = (x_BTR * chosen_BR[:, None]).astype(x_BTR.dtype)
        return activations.einsum(self.up_equation, x_BTR, up.get_value(), self.up_axes, self.out)

    def adapted(self, weight: jax.Array) -> jax.Array:
        """Return the layer's weight, in the layout of its use, with the adapter."""
        more = self.product(self.down.get_value(), self.up.get_value())
        if self.start_down is not None and self.start_up is not None:
            more -= self.product(self.start_down.get_value(), self.start_up.get_value())  # before the sum: 0 at first
        both = weight + more
        return both if self.magnitude is None else both * self.lengths(weight).astype(both.dtype)

    def lengths(self, weight: jax.Array) -> jax.Array:
        """Return what DoRA multiplies the columns of the sum of both matrices by, given the weight in use.

        Their norms are taken for constants, as section 4.3 of the paper proposes.
        """
        assert self.magnitude is not None
        weight, down, up = map(jax.lax.stop_gradient, (weight, self.down.get_value(), self.up.get_value()))
        own = weight.astype(jnp.float32)
        both = own + self.product(down, up).astype(jnp.float32)
        ratio = jnp.sqrt(jnp.square(own).sum(self.summed) / jnp.maximum(jnp.square(both).sum(self.summed), 1e-30))
        return activations.gather(self.magnitude.get_value(), *self.norm_axes) * ratio

    def product(self, down: jax.Array, up: jax.Array) -> jax.Array:
        """Return what the adapter adds to the layer's weight, in the layout of its use."""
        down, up = activations.gather(down, *self.down_axes), activations.gather(up, *self.up_axes)
        names = (*self.down_axes[:-1], *self.up_axes[1:])
        spec = None if activations.activation_spec() is None else activations.gathered_spec(*names)
        return jnp.einsum(self.equation, down, up, out_sharding=spec) * self.scale


class ExpertAdapter(nnx.Module):
    """The low-rank product of each expert's matrix."""

    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...], c: LoraConfig, *, rngs: nnx.Rngs):
        *lead, inner, outer = shape
        layers = ("layers",) * (len(lead) - 1)
        self.down = param(rngs, (*lead, inner, c.rank), (*layers, *names[:2], "lora"), std=0.02)
        self.up = param(rngs, (*lead, c.rank, outer), (*layers, names[0], "lora", names[2]), std=0)


class ExpertAdapters(nnx.Module):
    """The adapters of the routed experts of a layer, or of all layers of a stack."""

    def __init__(self, moe: MoE, names: Sequence[str], c: LoraConfig, *, rngs: nnx.Rngs):
        self.scale, self.names = scale(c), tuple(names)
        for name in names:
            setattr(self, name, ExpertAdapter(getattr(moe, name).get_value().shape, MATRICES[name], c, rngs=rngs))

    def weights(self) -> dict[str, Any]:
        """Return the parameters, with their logical names in one layer."""
        axes = {name: MATRICES[name] for name in self.names}
        return {f"{name}_adapter_{part}": (getattr(getattr(self, name), part), names)
                for name, (experts, inner, outer) in axes.items()
                for part, names in (("down", (experts, inner, "lora")), ("up", (experts, "lora", outer)))}

    def adapted(self, w: Mapping[str, jax.Array]) -> dict[str, Adapted]:
        """Return the experts' matrices with their adapters, of parameters by name."""
        return {name: Adapted(w[name], w[f"{name}_adapter_down"], w[f"{name}_adapter_up"], self.scale)
                for name in self.names}


def scale(c: LoraConfig) -> float:
    """Return what adapters are multiplied by; 0 without any."""
    return c.alpha / (c.rank**0.5 if c.rank_stabilized else c.rank) if c.rank else 0.0


Modules = Mapping[str, Collection[str]]  # the names of a model's published modules, by the path of the layer here


def adapt(model: nnx.Module, config: ModelConfig, c: LoraConfig, rngs: nnx.Rngs) -> None:
    """Give an adapter to every linear layer whose path matches one of `lora.targets`; quantize all linear layers.

    With `lora.experts` the matrices of routed experts count as linear layers, though they are not quantized.
    """
    nodes = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, Linear | MoE)}
    linears = {path: node for path, node in nodes.items() if isinstance(node, Linear)}
    experts = {f"{path}/{name}": (node, name) for path, node in nodes.items() if isinstance(node, MoE)
               for name in MATRICES if c.experts and getattr(node, name) is not None}
    modules = published_modules(config)
    _check_targets([*linears, *experts], modules, c)
    for path, linear in sorted(linears.items()):
        if is_target(path, c, modules):
            setattr(linear, NAME, Adapter(linear, path, c, rngs=rngs))
    for path, moe in sorted((path, node) for path, node in nodes.items() if isinstance(node, MoE)):
        if names := [name for name in MATRICES if f"{path}/{name}" in experts
                     and is_target(f"{path}/{name}", c, modules)]:
            setattr(moe, NAME, ExpertAdapters(moe, names, c, rngs=rngs))
    for linear in linears.values() if c.quantize else ():
        linear.quantize(c.quantize)


def _check_targets(paths: Sequence[str], modules: Modules, c: LoraConfig) -> None:
    """Refuse a target that names none of these linear layers."""
    for pattern in c.targets:
        if not any(_matches(path, pattern, modules) for path in paths):
            words = {name.rpartition(".")[2] for path in paths for name in modules.get(path, ())} | {*PUBLISHED}
            names = [name for name in words if any(_matches(path, name, modules) for path in paths)]
            raise UserError("lora.targets", f"no linear layer's path matches {pattern!r}",
                            nearest(pattern, [*paths, *names, ALL]))


def published_modules(config: ModelConfig) -> Modules:
    """Return the names that the modules of a published model have, such as `self_attn.q_proj`, by our path of each.

    Several layers may be one module there, and the layers of a stack have one name, without their numbers.
    """
    found: dict[str, set[str]] = {}
    for entry in entries(config):
        path, _, leaf = entry.ours.rpartition("/")
        if leaf == "kernel":
            found.setdefault(path, set()).add(re.sub(r"^.*\{layer\}\.", "", entry.theirs.removesuffix(".weight")))
    return found


def is_target(path: str, c: LoraConfig, modules: Modules) -> bool:
    """Return whether the linear layer with this path gets an adapter."""
    return any(_matches(path, pattern, modules) for pattern in c.targets)


def _matches(path: str, pattern: str, modules: Modules) -> bool:
    """Return whether a target names the layer with this path: by a pattern of paths, or as PEFT does.

    PEFT's names are `all-linear`, or the end of a module's name, such as `q_proj` or `mlp.down_proj`. A name that the
    published model has is that of the layers published by it; any other one means what it does in most models.
    """
    if fnmatchcase(path, "*" if pattern == ALL else pattern):
        return True
    if path in modules and any(_ends(name, pattern) for names in modules.values() for name in names):
        return any(_ends(name, pattern) for name in modules[path])
    module, _, name = pattern.rpartition(".")
    ends = [end for end in PUBLISHED.get(name, ()) if not module or end.startswith(_MODULES.get(module, "no module"))]
    return any(path.endswith(f"/{end}") for end in ends)


def _ends(name: str, pattern: str) -> bool:
    return f".{name}".endswith(f".{pattern}")


def is_adapter(path: str) -> bool:
    """Return whether a parameter's path is that of an adapter."""
    return f"/{NAME}/" in path


def is_start(path: str) -> bool:
    """Return whether a parameter's path is that of what PiSSA's adapters begin with, which nobody trains."""
    return is_adapter(path) and path.endswith(STARTS)


def as_plain(flat: Mapping[str, AnyArray], c: LoraConfig) -> tuple[dict[str, AnyArray], LoraConfig]:
    """Return all parameters by path, and their keys, with PiSSA's adapters as LoRA of twice the rank and equal scale.

    A B - A' B' is the product of A beside A' and of B above -B'.
    """
    if c.init != "pissa":
        return dict(flat), c
    found = {path: x for path, x in flat.items() if not path.endswith(STARTS)}
    for path, start_down in flat.items():
        if path.endswith(STARTS[0]):
            module = path.removesuffix(f"{NAME}/{STARTS[0]}")
            down, up, start_up = (flat[f"{module}{NAME}/{name}"] for name in ("down", "up", STARTS[1]))
            layers = stacked(down, up, flat[f"{module}kernel"])
            found[f"{module}{NAME}/down"] = jnp.concatenate([down, start_down], -1)
            found[f"{module}{NAME}/up"] = jnp.concatenate([up, -start_up], layers)
    more = 2**0.5 if c.rank_stabilized else 2.0
    return found, replace(c, rank=2 * c.rank, alpha=more * c.alpha, init="zero")


def stacked(down: AnyArray, up: AnyArray, kernel: AnyArray) -> int:
    """Return how many dimensions of a layer's parameters, which come first, number layers of a stack: 1 or none."""
    return down.ndim + up.ndim - 2 - kernel.ndim


def without_adapters(tree: Params) -> Params:
    """Return a nested dict of parameters without those of adapters."""
    if not isinstance(tree, dict):
        return tree
    return {key: without_adapters(inner) for key, inner in tree.items() if key != NAME}


def adapters(tree: Params) -> Params:
    """Return the adapters alone of a nested dict of parameters."""
    return partition.without(tree, without_adapters(tree))
