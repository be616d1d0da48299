"""The computations of a training service: a base model that is held once, and LoRA adapters of several ranks beside it.

Adapters with the same keys of `lora` share the programs that are compiled for them.

Shape suffixes: B rows, T tokens.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import builder
from jaxtrain.base.annotations import JsonMapping, PyTree
from jaxtrain.config import hub_names
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.hub import trained_model
from jaxtrain.hub.folders.generation_config import ends_of
from jaxtrain.hub.trained_tokenizer import tokenizer_of
from jaxtrain.models import lora
from jaxtrain.models.decoder import Compute
from jaxtrain.models.make_model import make_model
from jaxtrain.run import Run, abstract_model
from jaxtrain.run.model_loss import ModelLoss
from jaxtrain.serving.datums import Datum, batches
from jaxtrain.serving.token_loss import TokenLoss
from jaxtrain.train_step import partition
from jaxtrain.train_step.compiler_options import compiled
from jaxtrain.train_step.optimizers import global_norm
from jaxtrain.train_step.sharded_step import shape_of
from jaxtrain.train_step.state import Batch, Params, Skeleton, TrainState

Program = Callable[..., PyTree]  # compiled, or to be
ATTENTION, MLP = ("*/attention/*",), ("*/mlp/*",)
SHAPES = 8  # of adapters, whose programs are kept
_BASE = LoraConfig(rank=1)  # of the model itself: adapters whose product is 0


@dataclass(frozen=True)
class Adam:
    """The numbers of one step of AdamW, as PyTorch's has them."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float  # 0: gradients are not clipped


@dataclass
class Adapters:
    """LoRA adapters in training, with the optimizer's state and the gradient since its last step."""

    shape: "Shape"
    params: Params
    first: Params  # moments
    second: Params
    steps: int = 0
    gradient: Params | None = None


@dataclass(frozen=True, eq=False)
class Engine:
    """A base model on a mesh, and the programs that train adapters of it."""

    folder: Path
    base: Params
    run: Run  # with the smallest adapters, which say how the base lies on the mesh
    batch_tokens: int
    shapes: "dict[str, Shape]" = field(default_factory=dict)  # the last ones used, by their keys

    @classmethod
    def load(cls, folder: str | Path, overrides: JsonMapping | None = None, batch_tokens: int = 16384) -> "Engine":
        """Return the engine of a run's model or a published one, on the devices that are here."""
        folder = hub_names.model_folder(f"{folder}")
        sections = trained_model.sections_of(folder, text=True)
        if sections.get("lora", {}).get("rank"):
            raise UserError("FOLDER", f"the model in {folder} has adapters already",
                            "add them to its weights first: jaxtrain export or jaxtrain adapters merge")
        run = trained_model.model_of(sections | {"lora": {"rank": 1}}, dict(overrides or {}), spread="data")
        if run.mesh.shape.get("stage", 1) > 1:
            raise UserError("--config.mesh.stage", "a pipeline's stages do not answer with log-probabilities",
                            "use data, fsdp, context, expert or tensor")
        if run.sharded.settings.precision == "float16":
            raise UserError("--config.train.precision", "float16 needs a loss scale, which the API has no word for",
                            "use bfloat16 or float32")
        base, _ = trained_model.load(folder, run, abstract=lora.without_adapters(abstract_model(run)))
        return cls(Path(folder), base, run, batch_tokens)

    def shape(self, c: LoraConfig) -> "Shape":
        """Return the programs for adapters with these keys."""
        key = replace(c, targets=sorted(c.targets), quantize=self.run.config.lora.quantize)
        name = f"{key}"
        found = self.shapes.pop(name, None) or Shape(self, builder.build(
            replace(self.run.config, lora=key), mesh=self.run.mesh, objective=TokenLoss.of))
        self.shapes[name] = found
        for oldest in [*self.shapes][:-SHAPES]:  # models that have its adapters keep it alive
            del self.shapes[oldest]
        return found

    @functools.cached_property
    def plain(self) -> Adapters:
        """Adapters that change nothing: the base model as a sampler has it."""
        return self.shape(_BASE).begin(0)

    @functools.cached_property
    def words(self) -> Tokenizer | None:
        """The tokenizer in the folder; None without one, where prompts and what ends texts are tokens."""
        with contextlib.suppress(UserError):
            return tokenizer_of(self.folder)
        return None

    @functools.cached_property
    def ends(self) -> list[int]:
        """The tokens that end a text of the model."""
        return sorted({*ends_of(self.folder), *([self.words.eod] if self.words else [])})

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        return self.run.config.model.vocabulary

    @property
    def longest(self) -> int:
        """The tokens of the longest rows: the model's, rounded down to what the mesh can cut."""
        whole = self.run.config.model.max_seq_len
        return whole - whole % self.multiple

    @property
    def multiple(self) -> int:
        """The number that divides the length of every row."""
        return 2 * context if (context := self.run.mesh.shape.get("context", 1)) > 1 else 1


@dataclass(frozen=True, eq=False)
class Shape:
    """The compiled programs of adapters with the same ranks and targets."""

    engine: Engine
    run: Run
    programs: dict[Hashable, Program] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, seed: int) -> Adapters:
        """Return new adapters: those with which a run with this `train.seed` begins."""
        return self.around(self._begin(np.int64(seed)))

    def around(self, params: Params) -> Adapters:
        """Return adapters with these parameters and an optimizer that has made no step."""
        return Adapters(self, params, self._zeros(params), self._zeros(params))

    def state(self, params: Params) -> TrainState:
        """Return a state of the base model with these adapters, for `generate`."""
        return trained_model.with_params(self.run, partition.merge(self.engine.base, params))

    # -------------------------------------------------------------------------------------------------- the API's calls
    def forward(self, params: Params, datums: Sequence[Datum], loss_fn: str) -> tuple[float, list[np.ndarray]]:
        """Return the summed loss of data, and the log-probability of each target."""
        return self._over_batches(datums, loss_fn, lambda batch: self._program("forward", loss_fn, batch)(
            params, self.engine.base, batch))

    def forward_backward(self, adapters: Adapters, datums: Sequence[Datum],
                         loss_fn: str) -> tuple[float, list[np.ndarray]]:
        """Add the gradient of data to the adapters' own; return what `forward` does. All of it counts, or nothing."""
        found = self._zeros(adapters.params)

        def one(batch):
            nonlocal found
            found, *rest = self._program("gradient", loss_fn, batch)(adapters.params, self.engine.base, found, batch)
            return rest

        total, logprobs = self._over_batches(datums, loss_fn, one)
        if not np.isfinite(float(self._norm(found))):
            raise UserError("data", "the gradient is not finite, and nothing of it is kept",
                            "lower the learning rate, or look for extreme inputs")
        adapters.gradient = found if adapters.gradient is None else self._add(adapters.gradient, found)
        return total, logprobs

    def optim_step(self, adapters: Adapters, adam: Adam) -> dict[str, float]:
        """Make a step of AdamW with the gradient that has been added up; return the norm that it had."""
        if adapters.gradient is None:
            raise UserError("optim_step", "there is no gradient since the last step", "call forward_backward first")
        steps = adapters.steps + 1
        numbers = np.array([adam.learning_rate, adam.beta1, 1 - adam.beta1, adam.beta2, 1 - adam.beta2,
                            1 - adam.beta1**steps, 1 - adam.beta2**steps, adam.eps, adam.weight_decay,
                            adam.grad_clip_norm], np.float32)
        params, first, second, norm = self._adam(adapters.params, adapters.first, adapters.second, adapters.gradient,
                                                 numbers)
        if not np.isfinite(float(self._norm(params))):
            adapters.gradient = None
            raise UserError("optim_step", "the step makes parameters that are not finite, and is not made; its "
                            "gradient is dropped", "lower the learning rate")
        adapters.params, adapters.first, adapters.second = params, first, second
        adapters.steps, adapters.gradient = steps, None
        return {"grad_norm": float(norm), "learning_rate": adam.learning_rate}

    # ------------------------------------------------------------------------------------------------------- programs
    def _over_batches(self, datums: Sequence[Datum], loss_fn: str, compute: Program) -> tuple[float, list[np.ndarray]]:
        total, logprobs = 0.0, [np.empty(0, np.float32)] * len(datums)
        for numbers, batch in batches(datums, shards=self.run.layout.batch_shards, tokens=self.engine.batch_tokens,
                                      longest=self.engine.longest, multiple=self.engine.multiple):
            loss, logp_BT, places_BT = jax.device_get(compute(self.run.sharded.place(batch)))
            total += float(loss)
            whole_BT = np.empty_like(logp_BT)
            np.put_along_axis(whole_BT, places_BT, logp_BT, 1)
            for row, number in enumerate(numbers):
                logprobs[number] = whole_BT[row, :datums[number].length]
        if not np.isfinite(total) or not all(np.isfinite(one).all() for one in logprobs):
            raise UserError("data", f"the loss is {total}, and nothing of it is kept",
                            "lower the learning rate, or look for extreme inputs")
        return total, logprobs

    def _program(self, name: str, loss_fn: str, batch: Batch) -> Program:
        """Return a compiled program for batches of this shape."""
        key = name, loss_fn, shape_of(batch)
        with self._lock:
            if key not in self.programs:
                made, abstract = getattr(self, f"_{name}_of")(loss_fn), self.run.abstract
                sums = (self.abstract_gradient,) if name == "gradient" else ()
                with self.run.sharded.context():
                    lowered = jax.jit(made, donate_argnums=2 if sums else ()).lower(
                        abstract.params, abstract.frozen, *sums, self.run.sharded.abstract_batch(batch))
                    self.programs[key] = compiled(lowered, self.run.sharded.compiler_options)
        return self.programs[key]

    def _computation(self, loss_fn: str) -> ModelLoss:
        objective = replace(cast(TokenLoss, self.run.objective), loss_fn=loss_fn)
        return replace(cast(ModelLoss, self.run.sharded.computation), objective=objective)

    def _forward_of(self, loss_fn: str) -> Program:
        def forward(params, frozen, batch):
            whole = self.run.sharded.cast(partition.merge(params, frozen))
            total, _, sums = self._computation(loss_fn).objective.loss(whole, batch)
            return total, sums["logprobs"], sums["places"]
        return forward

    def _gradient_of(self, loss_fn: str) -> Program:
        gradient = self._computation(loss_fn).gradient(self.run.layout)

        def added(params, frozen, before, batch):
            state = replace(self.run.abstract, params=params, frozen=frozen, opt_state=None, step=jnp.int32(0))
            (total, _, sums), grads = gradient(state, batch)
            after = jax.tree.map(lambda b, g: b + g.astype(jnp.float32), before, grads)
            return after, total, sums["logprobs"], sums["places"]
        return added

    @property
    def abstract_gradient(self) -> Params:
        """The shapes, dtypes and shardings of a gradient and of the moments."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding),
                            self.run.abstract.params)

    @functools.cached_property
    def _begin(self) -> Program:
        c, wanted = self.run.config, self.run.abstract.params

        def begin(seed):
            model = make_model(c.model, Compute.of(c.model, c.train, c.mesh), c.lora,
                               rngs=nnx.Rngs(params=jax.random.key(seed)))
            return partition.like(Skeleton.of(model).params(), wanted)
        # Integers and one product each, exact at any level; on CPU this takes a fourth of the time to compile.
        quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(begin, out_shardings=self.run.layout.state.params, compiler_options=quick)

    @functools.cached_property
    def _zeros(self) -> Program:
        return self._jit(lambda tree: jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), tree))

    @functools.cached_property
    def _norm(self) -> Program:
        return self._jit(global_norm)

    @functools.cached_property
    def _add(self) -> Program:
        return self._jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate=0)

    @functools.cached_property
    def _adam(self) -> Program:
        def adam(params, first, second, gradient, numbers):
            rate, beta1, left1, beta2, left2, seen1, seen2, eps, decay, most = numbers
            norm = global_norm(gradient)
            factor = jnp.where((most > 0) & (norm > most), most / norm, 1.0)
            gradient = jax.tree.map(lambda g: g * factor, gradient)
            first = jax.tree.map(lambda m, g: beta1 * m + left1 * g, first, gradient)
            second = jax.tree.map(lambda v, g: beta2 * v + left2 * jnp.square(g), second, gradient)
            params = jax.tree.map(lambda p, m, v: p - rate * (m / seen1 / (jnp.sqrt(v / seen2) + eps) + decay * p),
                                  params, first, second)
            return params, first, second, norm
        return self._jit(adam)

    def _jit(self, function: Program, donate: int | None = None) -> Program:
        made = jax.jit(function, donate_argnums=donate)

        def call(*args):
            with self.run.sharded.context():
                return made(*args)
        return call


def targets_of(train_mlp: bool, train_attn: bool) -> list[str]:
    """Return `lora.targets` of what the API calls the layers to be trained."""
    return ["*"] if train_mlp and train_attn else [*ATTENTION] if train_attn else [*MLP]
