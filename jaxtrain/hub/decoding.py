"""The compiled programs of generation: one pass over the prompts, then a loop of one token per row and iteration.

Prompts of a batch end in the same slot, behind padding (kv_cache.py says why). Prompts that take the places of finished
rows end in the slot before the one that the loop writes next. Every axis of the mesh but `tensor` splits rows, `stage`
and `context` too; heads and their part of the cache are split over `tensor`. Programs are compiled once for each number
of rows, length of prompts and room for new tokens, which are rounded up to powers of two.

Shape suffixes: B batch, R rows of new prompts, P slots of prompts, N new tokens, D embedding, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.decoder_config import RoutedDecoderConfig
from jaxtrain.hub.sampling import Sampling, choose, penalized
from jaxtrain.kernels.biased_heads import for_head
from jaxtrain.kernels.functions import soft_capped
from jaxtrain.models import lora
from jaxtrain.models.attention.kv_cache import CACHE, Cache, in_place, slots_of, with_slots
from jaxtrain.models.decoder import Compute, Decoder
from jaxtrain.models.make_model import make_model
from jaxtrain.parallel.expert_options import ExpertOptions
from jaxtrain.sharding import activations, axis_rules, mesh_context
from jaxtrain.sharding.mesh import AXES
from jaxtrain.train_step.state import Params, Skeleton

if TYPE_CHECKING:
    from jaxtrain.run import Run

State = dict[str, Any]
ROWS = ("logits", "seen", "done", "count", "end", "end_logprob", "tokens", "logprobs")  # that a state has of each row


@functools.lru_cache(maxsize=16)  # a training service has a run for each rank of its adapters
def decoding(run: "Run") -> "Decoding":
    """Return the programs of a run, the same ones each time, so that what they compiled is used again."""
    return programs(run)


def programs(run: "Run") -> "Decoding":
    """Return the programs of a run."""
    # Without remat, which is for gradients, and without a capacity of experts: no token is dropped.
    c = run.config.model
    c = replace(c, capacity_factor=0.0) if isinstance(c, RoutedDecoderConfig) else c
    how = Compute(experts=ExpertOptions.of(run.config.train))
    model = Skeleton.of(nnx.eval_shape(
        lambda: make_model(c, how, run.config.lora, scalar_head=run.config.scalar_head,
                           rngs=nnx.Rngs(params=jax.random.key(0)))))
    rules = axis_rules.Rules({**run.sharded.rules.table, "batch": tuple(axis for axis in AXES if axis != "tensor"),
                            "seq": (), "block_seq": ()})
    return Decoding(run, model, rules)


@dataclass(frozen=True, eq=False)
class Decoding:
    """The programs that generate with one run's model on its mesh."""

    run: "Run"
    model: Skeleton
    rules: axis_rules.Rules

    @property
    def rows(self) -> int:
        """The number of rows is a multiple of this: the number of parts that the mesh cuts a batch into."""
        return axis_rules.shards(self.rules.spec(("batch",))[0], self.run.mesh)

    def rows_for(self, texts: int) -> int:
        """Return how many rows a batch of this many texts has."""
        return self.rows * bucket(-(-texts // self.rows))

    def context(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the programs are traced."""
        return mesh_context.use(self.run.mesh, self.rules, self.run.sharded.settings.platform)

    def placement(self, dimensions: int) -> P:
        """Return how an array of this many dimensions is spread over the mesh by its first one."""
        return axis_rules.without_trivial_axes(self.rules.spec(("batch", *[None] * (dimensions - 1))), self.run.mesh)

    def laid_out(self, params: Params) -> Params:
        """Return the parameters as they compute: cast, and whole over the axes that would be gathered for each token.

        Axes that split a product, `tensor` and `expert`, still split it. One array at a time: a program that gathers
        all of them may hold them twice.
        """
        with self.context():
            return jax.tree.map(lambda w, made: self.lay_out_program(w, made.dtype), params,
                                jax.eval_shape(self.run.sharded.cast, params))

    def place(self, rows: np.ndarray) -> jax.Array:
        """Spread an array over the mesh by its first dimension; every process gives the whole."""
        where = NamedSharding(self.run.mesh, self.placement(rows.ndim))
        return jax.make_array_from_callback(rows.shape, where, lambda index: rows[index])

    def start(self, params: Params, prompts: np.ndarray, begins: np.ndarray, new: int,
              chosen: np.ndarray | None = None) -> State:
        """Compute the prompts [B, P], whose texts begin at these slots; return a state with room for `new` tokens.

        `chosen`: what each row multiplies stacked adapters by [B, R], as `lora.choosing` takes it.
        """
        with self.context():
            return self.start_program(params, *self._placed(prompts, begins, chosen), prompts.shape[1] + new, new)

    def refill(self, params: Params, state: State, prompts: np.ndarray, begins: np.ndarray, source: np.ndarray,
               chosen: np.ndarray | None = None) -> State:
        """Return the state with prompts, as `start` takes them, in place of rows; the given state is used up.

        Args:
            source: which prompt each row of the state has from now on [B]; -1: the one that it has.
        """
        with self.context():
            return self._refill(params, state, *self._placed(prompts, begins, chosen),
                                self.place(source.astype(np.int32)))

    def go_on(self, params: Params, state: State, until: int, limits: jax.Array, stops: np.ndarray, seeds: jax.Array,
              sampling: Sampling, known: int, enough: int | None = None) -> State:
        """Generate up to the step `until`, or until all or `enough` rows are finished; the given state is used up.

        Args:
            limits: how many tokens each row may have.
            stops: the tokens that finish a row; they are not part of its text.
            seeds: keys of random numbers as the numbers that each row has for them, and how many tokens were drawn with
                them before [B, 3].
            known: how many tokens the tokenizer has; the table may have more rows, which are never chosen.
        """
        with self.context():
            return self.go_on_program(params, state, np.int32(until), np.int32(enough or len(state["done"])), limits,
                                      stops, seeds, sampling.numbers() | {"known": np.int32(known)}, sampling.filters,
                                      sampling.penalizes)

    def read(self, state: State) -> dict[str, np.ndarray]:
        """Return what the rows have so far, on the host of every process."""
        shown = {name: state[name] for name in
                 ("tokens", "logprobs", "count", "done", "end", "end_logprob", "step")}
        with self.context():
            return jax.tree.map(np.asarray, self._replicate(shown))

    def model_of(self, params: Params) -> Decoder:
        """Return the model with these parameters, as it computes."""
        return self.model.merge(self._in_use(params))

    def _in_use(self, params: Params) -> Params:
        params = dict(self.run.sharded.cast(params))
        for stack in params.keys() & set(Decoder.STACKS):  # layers are taken from it one by one
            params[stack] = jax.tree.map(lambda w: jax.reshard(w, P(None, *jax.typeof(w).sharding.spec[1:])),
                                         params[stack])
        return params

    def _for_a_loop(self, params: Params) -> Callable[[], Decoder]:
        """Return what makes the model inside a loop.

        Where layers are apart, they are taken so once, before the loop, for as much memory as they have.
        """
        whole = self._in_use(params)
        if not _layers_apart():
            return lambda: self.model.merge(whole)
        apart = jax.lax.optimization_barrier(
            _apart({name: whole[name] for name in whole.keys() & set(Decoder.STACKS)}))

        def made() -> Decoder:
            model = self.model.merge(whole | _together(apart))
            for name in apart:
                getattr(model, name).unroll = 0  # so that stacking and slicing cancel out
            return model

        return made

    # ------------------------------------------------------------------------------------------- the compiled programs

    @functools.cached_property
    def _replicate(self):
        return jax.jit(lambda tree: jax.tree.map(lambda x: jax.reshard(x, P(*[None] * x.ndim)), tree))

    @functools.cached_property
    def lay_out_program(self):
        """The compiled function that lays out one array for decoding; its arguments: the array and its dtype."""
        def whole(w, dtype):
            kept = (tuple(axis for axis in axis_rules.axes_of(part) if axis in ("tensor", "expert"))
                    for part in jax.typeof(w).sharding.spec)
            return jax.reshard(w.astype(dtype), P(*kept))

        return jax.jit(whole, static_argnums=1)

    @functools.cached_property
    def start_program(self):
        """The compiled function behind `start`; arguments: the same, placed, and numbers of slots and new tokens."""
        return jax.jit(self._prefilled, static_argnums=(5, 6))

    def _prefilled(self, params, prompts_BP, begins_B, done_B, chosen_BR, slots, new):
        model = self.model_of(params)
        at_BP = jnp.arange(prompts_BP.shape[1])[None] - begins_B[:, None]
        x_BPD, aux = self._through(model, prompts_BP, (at_BP >= 0).astype(jnp.int32), jnp.maximum(at_BP, 0), Cache(),
                                    chosen_BR)
        rows, width = prompts_BP.shape
        entries = with_slots(lambda kept: jnp.pad(kept, [(0, 0)] * (kept.ndim - 2) + [(0, slots - width), (0, 0)]),
                             aux[CACHE])
        vocab = self.run.config.model.vocabulary
        seen_BV = self._by_row(lambda rows, _: jax.vmap(
            lambda ids, real: jnp.zeros(vocab, bool).at[ids].max(real))(*rows), (prompts_BP, at_BP >= 0))
        where = jax.typeof(prompts_BP).sharding.spec[0]
        if _layers_apart():
            entries = in_place(_apart(entries))
        return {"entries": entries, "begins": begins_B, "chosen": chosen_BR, "slot": jnp.int32(width),
                "logits": self._logits(model, x_BPD[:, -1:]), "seen": seen_BV, "done": done_B,
                "end": jnp.full_like(begins_B, -1),  # the token that finished the row
                "end_logprob": jnp.zeros_like(begins_B, jnp.float32),
                "count": jnp.zeros_like(begins_B), "step": jnp.int32(0),
                "tokens": jnp.zeros((rows, new), jnp.int32, out_sharding=P(where, None)),
                "logprobs": jnp.zeros((rows, new), jnp.float32, out_sharding=P(where, None))}

    @functools.cached_property
    def _refill(self):
        def refill(params, state, prompts_RP, begins_R, done_R, chosen_R, source_B):
            slots = slots_of(state["entries"])
            new = self._prefilled(params, prompts_RP, begins_R, done_R, chosen_R, slots, state["tokens"].shape[1])
            later = state["slot"] - new["slot"]
            entries = with_slots(lambda kept: jnp.roll(kept, later, -2), new["entries"])
            rows = {name: new[name] for name in (*ROWS, "begins", "chosen")} | {"begins": new["begins"] + later}
            return state | jax.tree.map(partial(_taken, source_B), {name: state[name] for name in rows}, rows) | {
                "entries": jax.tree.map(partial(_taken, source_B, axis=0 if _layers_apart() else -4), state["entries"],
                                        entries)}

        return jax.jit(refill, donate_argnums=1)

    @functools.cached_property
    def go_on_program(self):
        """The compiled function behind `go_on`, with the same arguments."""
        def go_on(params, state, until, enough, limits_B, stops, seeds_B, numbers, filters, penalizes):
            made, c, apart = self._for_a_loop(params), self.run.config.model, _layers_apart()
            pick = partial(_pick, filters=filters, penalizes=penalizes)

            def unfinished(state):
                return (state["step"] < until) & (jnp.sum(state["done"]) < enough)

            def extend(state):
                rows = {name: state[name] for name in ROWS} | {"limits": limits_B, "seeds": seeds_B}
                rows, token_B = self._by_row(pick, rows, {"stops": stops, **numbers})
                model, slot, live_B1 = made(), state["slot"], ~rows["done"][:, None]
                cache = Cache(_together(state["entries"]) if apart else state["entries"], state["begins"], slot, apart)
                x_B1D, aux = self._through(model, token_B[:, None], live_B1.astype(jnp.int32),
                                           jnp.minimum(slot - state["begins"], c.max_seq_len - 1)[:, None],
                                           cache, state["chosen"])
                entries = _apart(aux[CACHE]) if apart else cache.extended(aux[CACHE])
                return state | rows | {"entries": entries, "slot": slot + 1, "step": state["step"] + 1,
                                       "logits": self._logits(model, x_B1D)}

            return jax.lax.while_loop(unfinished, extend, state)

        return jax.jit(go_on, static_argnums=(8, 9), donate_argnums=1)

    # --------------------------------------------------------------------------------------------------------- innards

    def _placed(self, prompts: np.ndarray, begins: np.ndarray,
                chosen: np.ndarray | None) -> tuple[jax.Array | None, ...]:
        """Return prompts on the mesh: tokens, where they begin, which rows have none, and what those choose."""
        done = begins == prompts.shape[1]  # rows without a prompt fill the batch up
        return (self.place(prompts), self.place(begins.astype(np.int32)), self.place(done),
                None if chosen is None else self.place(chosen))

    def _through(self, model: Decoder, tokens_BT, segments_BT, positions_BT, cache: Cache, chosen_BR):
        with lora.choosing(chosen_BR):
            x_BTD, aux = model.through(model.begin(tokens_BT, positions_BT), segments_BT, positions_BT, cache=cache)
        return model.finish(x_BTD), aux

    def _logits(self, model: Decoder, x_B1D: jax.Array) -> jax.Array:
        head_DV = activations.gather(model.head(), "embed", "vocab")
        logits_BV = jnp.einsum("btd,dv->bv", for_head(x_B1D, head_DV), head_DV, preferred_element_type=jnp.float32,
                               out_sharding=activations.activation_spec("batch", "act_vocab"))
        return activations.constrain(soft_capped(logits_BV, model.logit_cap), "batch", None)

    def _by_row(self, f: Callable[[PyTree, PyTree], PyTree], rows: PyTree, shared: PyTree = None) -> PyTree:
        """Apply a function of each row alone, and of what all rows share: every device computes its own."""
        spec = activations.activation_spec("batch")
        return activations.manual_region(f, in_specs=(spec, P()), out_specs=spec)(rows, shared)


def bucket(size: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << max(0, size - 1).bit_length()


def _layers_apart() -> bool:
    """Return whether a loop has arrays of its own for each layer's weights and cache: on CPUs.

    There XLA copies what a layer has out of a stack before it multiplies by it, and so moves three times as many bytes.
    """
    return mesh_context.platform() == "cpu"


def _apart(stacks: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return lists of layers in place of stacks."""
    return {name: [jax.tree.map(lambda w, n=n: w[n], stack) for n in range(len(jax.tree.leaves(stack)[0]))]
            for name, stack in stacks.items() if stack}


def _together(apart: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return stacks in place of lists of layers."""
    return {name: jax.tree.map(lambda *layers: jnp.stack(layers), *each) for name, each in apart.items()}


def _taken(source_B: jax.Array, before: jax.Array, new: jax.Array, axis: int = 0) -> jax.Array:
    """Return an array with rows of another one, along this axis, where `source_B` numbers one."""
    axis %= before.ndim
    spec = jax.typeof(before).sharding.spec
    whole = jax.reshard(new, P(*spec[:axis], None, *spec[axis + 1:]))  # any device may need any row
    rows = whole.at[(*[slice(None)] * axis, jnp.maximum(source_B, 0))].get(out_sharding=spec)
    return jnp.where(jnp.expand_dims(source_B >= 0, [n for n in range(before.ndim) if n != axis]), rows, before)


def _pick(rows: State, shared: State, *, filters: bool, penalizes: bool) -> tuple[State, jax.Array]:
    """Choose a token per row and note it, unless the row is finished or the token finishes it."""
    rows = dict(rows)
    limits_B, seeds_B = rows.pop("limits"), rows.pop("seeds")
    logits_BV = rows.pop("logits")
    adjusted_BV = penalized(logits_BV, rows["seen"], shared["repetition_penalty"]) if penalizes else logits_BV
    adjusted_BV = jnp.where(jnp.arange(logits_BV.shape[1]) < shared["known"], adjusted_BV, -jnp.inf)
    keys_B = jax.vmap(lambda words, count: jax.random.fold_in(jax.random.wrap_key_data(words[:2]), words[2] + count))(
        seeds_B, rows["count"].astype(jnp.uint32))
    token_B = choose(adjusted_BV, keys_B, shared, filters)
    tempered_BV = logits_BV / shared["logprob_temperature"]
    said_B = jnp.take_along_axis(jax.nn.log_softmax(tempered_BV), token_B[:, None], -1)[:, 0]
    done_B = rows["done"] | (token_B[:, None] == shared["stops"][None]).any(-1)
    ends_B = done_B & ~rows["done"]
    rows["end"] = jnp.where(ends_B, token_B, rows["end"])
    rows["end_logprob"] = jnp.where(ends_B, said_B, rows["end_logprob"])
    at_BN = (jnp.arange(rows["tokens"].shape[1]) == rows["count"][:, None]) & ~done_B[:, None]
    rows["tokens"] = jnp.where(at_BN, token_B[:, None], rows["tokens"])
    rows["logprobs"] = jnp.where(at_BN, said_B[:, None], rows["logprobs"])
    rows["seen"] |= (jnp.arange(logits_BV.shape[1]) == token_B[:, None]) & ~done_B[:, None]
    rows["count"] += ~done_B
    rows["done"] = done_B | (rows["count"] >= limits_B)
    return rows, jnp.where(done_B, 0, token_B)
