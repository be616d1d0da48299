"""The compiled programs of generation: a pass over prompts, and a loop of one token per row and iteration.

Prompts of a pass end in the same slot, behind padding, so that a recurrent state at its end is that of every text; then
each text begins in its row's first slot, and each row writes to the slot behind its last token. Rows are independent:
other programs take some of them, give them more room, or put new ones in the places of those that are finished. Which,
sampler.py decides. Every axis of the mesh but `tensor` splits rows, `stage` and `context` too, and a row stays on its
devices; heads and their part of the cache are split over `tensor`. Programs are compiled once for each number of rows,
length of prompts and room for tokens, which are rounded up to powers of two.

Shape suffixes: B batch, R rows of new prompts, P slots of prompts, A adapters' ranks or places, D embedding,
V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.decoder_config import RoutedDecoderConfig
from jaxtrain.hub.batching import told_routes
from jaxtrain.hub.batching.generation_rows import (
    OF_ROWS,
    State,
    apart_layers,
    of_rows,
    pick,
    to_the_front,
    together,
    whole,
    with_room,
)
from jaxtrain.hub.batching.rounding import bucket
from jaxtrain.hub.sampling import Sampling
from jaxtrain.kernels.functions import soft_capped
from jaxtrain.kernels.loss_head.biased_heads import for_head
from jaxtrain.models import lora
from jaxtrain.models.attention import cache_pages
from jaxtrain.models.attention.kv_cache import CACHE, Cache, in_place, joined, slots_of, split, with_slots
from jaxtrain.models.decoder import Compute, Decoder
from jaxtrain.models.experts import kept_routes
from jaxtrain.models.make_model import make_model
from jaxtrain.parallel.expert_options import ExpertOptions
from jaxtrain.sharding import activations, axis_rules, mesh_context
from jaxtrain.sharding.mesh import AXES
from jaxtrain.train_step.state import Params, Skeleton

if TYPE_CHECKING:
    from jaxtrain.run import Run

BY_ROW = ("slot", "count", "limits", "seeds", "done", "chosen", "table")  # what the host says of each row
PAGES = "pages"  # the entries of all rows that have slots, where they are in pages
SAID = ("tokens", "logprobs", "count", "done", "end", "end_logprob", "step")
PICKED = ("logits", "seen", "done", "count", "limits", "seeds", "end", "end_logprob", "tokens", "logprobs")
ROUND = 64  # the most tokens of a row between two looks by the host


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
    with mesh_context.use(run.mesh, rules, run.sharded.settings.platform):
        return Decoding(run, model, rules, _layers_apart())


@dataclass(frozen=True, eq=False)
class Decoding:
    """The programs that generate with one run's model on its mesh."""

    run: "Run"
    model: Skeleton
    rules: axis_rules.Rules
    apart: bool  # whether a loop has arrays of its own for each layer's weights and cache

    @property
    def rows(self) -> int:
        """The number of rows is a multiple of this: the number of parts that the mesh cuts a batch into."""
        return axis_rules.shards(self.rules.spec(("batch",))[0], self.run.mesh)

    def rows_for(self, texts: int) -> int:
        """Return how many rows a batch of this many texts has."""
        return self.rows * bucket(-(-texts // self.rows))

    @property
    def in_pages(self) -> bool:
        """Whether the cache is in pages. A CPU would copy them together for each token; its layers have arrays."""
        return not self.apart

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """A context in which the programs are traced."""
        with (mesh_context.use(self.run.mesh, self.rules, self.run.sharded.settings.platform),
              kept_routes.kept(self.run.config.rl.replay_routes)):
            yield

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

    def prefill(self, params: Params, prompts: np.ndarray, begins: np.ndarray, chosen: np.ndarray | None,
                penalizes: bool) -> State:
        """Compute the prompts [R, P], whose texts begin at these slots and end in the last; return what rows have then.

        `chosen`: what each multiplies stacked adapters by [R, A], as `lora.choosing` takes it.
        """
        with self.context():
            return self.prefill_program(params, self.place(prompts), self.place(begins.astype(np.int32)),
                                        None if chosen is None else self.place(chosen), penalizes)

    def arrange(self, state: State, source: np.ndarray, slots: int) -> State:
        """Return rows of a state, numbered by `source` among those on their device, with room for so many tokens each.
        """
        with self.context():
            return self.arrange_program(of_rows(state), self.place(source.astype(np.int32)), slots)

    def put(self, state: State, new: State, source: np.ndarray, places: np.ndarray) -> State:
        """Return the state with rows of another one in these places; the given state is used up.

        Both are numbers among the rows on a device; a place that is too large stands for none.
        """
        with self.context():
            return self.put_program(of_rows(state), new, self.place(source.astype(np.int32)),
                                    self.place(places.astype(np.int32)))

    def ready(self, params: Params) -> Params:
        """Return the parameters as `go_on` takes them.

        Where layers are apart, they are taken out of their stacks and laid out, for as much memory as they have then.
        """
        with self.context():
            return self.ready_program(params) if self.apart else params

    def go_on(self, params: Params, state: State, until: int, stops: np.ndarray, sampling: Sampling, known: int,
              enough: int | None = None) -> State:
        """Generate up to `until` tokens, or until all or `enough` rows are finished; the given state is used up.

        Args:
            params: from `ready`.
            state: rows, and of each: how many tokens it has (`slot`), how many of them were generated (`count`), and
                how many may be (`limits`); its random numbers' key as two words, and how many tokens were drawn with it
                before (`seeds`); whether it is `done`, and what it has `chosen`; where entries are in pages, those
                (`pages`) and which of them it has (`table`).
            until: at most ROUND.
            stops: the tokens that finish a row; they are not part of its text.
            sampling: how tokens are chosen.
            known: how many tokens the tokenizer has; the table may have more rows, which are never chosen.
            enough: so many finished rows end the loop.
        """
        given = {name: state[name] for name in (*BY_ROW, *OF_ROWS, PAGES) if name in state}
        with self.context():
            return self.go_on_program(params, given, np.int32(until), np.int32(enough or len(state["done"])), stops,
                                      sampling.numbers() | {"known": np.int32(known)}, sampling.filters,
                                      sampling.penalizes)

    def paged(self, new: State) -> tuple[PyTree, State]:
        """Return what `prefill` returned as texts for `store`, and rows without them."""
        texts, states = split(new["entries"])
        return texts, new | {"entries": states}

    def store(self, pages: PyTree | None, texts: PyTree, table: np.ndarray, pairs: np.ndarray, many: int) -> PyTree:
        """Return the pages of each device with those of texts; the given ones are used up.

        Args:
            pages: as they were; None: there were none.
            texts: what `paged` returned.
            table: the pages that each is to have.
            pairs: pages, and those that become copies of them.
            many: how many there are.
        """
        with self.context():
            return self.store_program(pages, texts, self.place(table), self.place(pairs), many)

    def more(self, pages: PyTree, many: int) -> PyTree:
        """Return the pages and further ones, so many for each device."""
        with self.context():
            return self.more_program(pages, many)

    def read(self, state: State) -> dict[str, np.ndarray]:
        """Return what `go_on` generated, on the host of every process."""
        with self.context():
            return jax.tree.map(np.asarray, self._replicate({name: state[name] for name in SAID}))

    def routes(self, entries: PyTree, rows: np.ndarray) -> np.ndarray:
        """Return the routes in these rows of a state's entries, or in these pages, on the host of every process."""
        with self.context():
            return np.asarray(self._routes_program(entries, rows))

    def model_of(self, params: Params) -> Decoder:
        """Return the model with these parameters, as it computes."""
        return self.model.merge(self._in_use(params))

    def _in_use(self, params: Params) -> Params:
        params = dict(self.run.sharded.cast(params))
        for stack in params.keys() & set(Decoder.STACKS):  # layers are taken from it one by one
            params[stack] = jax.tree.map(lambda w: jax.reshard(w, P(None, *jax.typeof(w).sharding.spec[1:])),
                                         params[stack])
        return params

    def _in_a_loop(self, params: Params) -> Decoder:
        """Return the model inside a loop, with parameters from `ready`."""
        if not self.apart:
            return self.model.merge(self._in_use(params))
        apart = {name: params[name] for name in params.keys() & set(Decoder.STACKS)}
        model = self.model.merge(params | together(apart))
        for name in apart:
            getattr(model, name).unroll = 0  # so that stacking and slicing cancel out
        return model

    # ------------------------------------------------------------------------------------------- the compiled programs

    @functools.cached_property
    def _replicate(self):
        return jax.jit(lambda tree: jax.tree.map(lambda x: jax.reshard(x, P(*[None] * x.ndim)), tree))

    @functools.cached_property
    def _routes_program(self):
        return jax.jit(told_routes.taken)

    @functools.cached_property
    def lay_out_program(self):
        """The compiled function that lays out one array for decoding; its arguments: the array and its dtype."""
        return jax.jit(lambda w, dtype: whole(w.astype(dtype)), static_argnums=1)

    @functools.cached_property
    def ready_program(self):
        """The compiled function behind `ready` where layers are apart."""
        def ready(params):
            made = jax.tree.map(whole, self._in_use(params))
            return made | apart_layers({name: made[name] for name in made.keys() & set(Decoder.STACKS)})

        return jax.jit(ready)

    @functools.cached_property
    def prefill_program(self):
        """The compiled function behind `prefill`, with the same arguments."""
        def prefill(params, prompts_RP, begins_R, chosen_RA, penalizes):
            model, vocab = self.model_of(params), self.run.config.model.vocabulary
            at_RP = jnp.arange(prompts_RP.shape[1])[None] - begins_R[:, None]
            x_RPD, aux = self._through(model, prompts_RP, (at_RP >= 0).astype(jnp.int32), jnp.maximum(at_RP, 0),
                                       Cache(), chosen_RA)
            entries = with_slots(lambda kept: self._locally(to_the_front, (kept, begins_R)), aux[CACHE])
            found = {"entries": in_place(apart_layers(entries)) if self.apart else entries,
                     "logits": self._logits(model, x_RPD[:, -1:])}
            if penalizes:
                found["seen"] = self._by_row(lambda rows, _: jax.vmap(
                    lambda ids, real: jnp.zeros(vocab, bool).at[ids].max(real))(*rows), (prompts_RP, at_RP >= 0))
            return found

        return jax.jit(prefill, static_argnums=4)

    @functools.cached_property
    def arrange_program(self):
        """The compiled function behind `arrange`, with the same arguments."""
        def arrange(state, source_B, slots):
            def local(state, source_B):
                taken = self._by_axis(lambda x, axis: jnp.take(x, source_B, axis=axis, mode="clip"), state)
                return taken | {"entries": with_slots(partial(with_room, slots=slots), taken["entries"])}

            return self._locally(local, (state, source_B))

        return jax.jit(arrange, static_argnums=2)

    @functools.cached_property
    def put_program(self):
        """The compiled function behind `put`, with the same arguments."""
        def put(state, new, source_A, places_A):
            def local(state, new, source_A, places_A):
                new = new | {"entries": with_slots(partial(with_room, slots=slots_of(state["entries"])),
                                                   new["entries"])}
                return self._by_axis(lambda x, axis, y: x.at[(*[slice(None)] * axis, places_A)].set(
                    jnp.take(y, source_A, axis=axis, mode="clip"), mode="drop"), state, new)

            return self._locally(local, (state, new, source_A, places_A))

        return jax.jit(put, donate_argnums=0)

    @functools.cached_property
    def store_program(self):
        """The compiled function behind `store`, with the same arguments."""
        def store(pages, texts, table, pairs, many):
            def none(kept):
                spec, (layers, _, heads, _, width) = jax.typeof(kept).sharding.spec, kept.shape
                return jnp.zeros((layers, self.rows * many, heads, cache_pages.PAGE, width), kept.dtype,
                                 out_sharding=P(*spec))

            pages = jax.tree.map(none, texts) if pages is None else pages
            pages = jax.tree.map(partial(cache_pages.stored, table), pages, texts)
            return jax.tree.map(partial(cache_pages.copied, pairs), pages)

        return jax.jit(store, static_argnums=4, donate_argnums=0)

    @functools.cached_property
    def more_program(self):
        """The compiled function behind `more`, with the same arguments."""
        return jax.jit(lambda pages, many: jax.tree.map(lambda x: cache_pages.more(x, self.rows, many), pages),
                       static_argnums=1)

    @functools.cached_property
    def go_on_program(self):
        """The compiled function behind `go_on`, with the same arguments."""
        def go_on(params, state, until, enough, stops, numbers, filters, penalizes):
            c, apart = self.run.config.model, self.apart
            choose = partial(pick, filters=filters, penalizes=penalizes)
            rows, where = len(state["done"]), jax.typeof(state["done"]).sharding.spec[0]
            before = {"step": jnp.int32(0), "end": jnp.full_like(state["count"], -1),  # the token that finished the row
                      "end_logprob": jnp.zeros_like(state["count"], jnp.float32),
                      "tokens": jnp.zeros((rows, ROUND), jnp.int32, out_sharding=P(where, None)),
                      "logprobs": jnp.zeros((rows, ROUND), jnp.float32, out_sharding=P(where, None))}

            def unfinished(state):
                return (state["step"] < until) & (jnp.sum(state["done"]) < enough)

            def extend(state):
                rows = {name: state[name] for name in PICKED if name in state}
                rows, token_B = self._by_row(choose, rows, {"stops": stops, "step": state["step"], **numbers})
                model, slot_B, live_B = self._in_a_loop(params), state["slot"], ~rows["done"]
                entries = together(state["entries"]) if apart else state["entries"]
                if PAGES in state:
                    entries = joined(state[PAGES], entries)
                cache = Cache(entries, slot_B, apart, state.get("table"))
                x_B1D, aux = self._through(model, token_B[:, None], live_B[:, None].astype(jnp.int32),
                                           jnp.minimum(slot_B, c.max_seq_len - 1)[:, None], cache,
                                           state.get("chosen"))
                entries = apart_layers(aux[CACHE]) if apart else cache.extended(aux[CACHE])
                if PAGES in state:
                    rows[PAGES], entries = split(entries)
                return state | rows | {"entries": entries, "slot": slot_B + live_B, "step": state["step"] + 1,
                                       "logits": self._logits(model, x_B1D)}

            return jax.lax.while_loop(unfinished, extend, state | before)

        return jax.jit(go_on, static_argnums=(6, 7), donate_argnums=1)

    # --------------------------------------------------------------------------------------------------------- innards

    def _locally(self, f: Callable[..., PyTree], given: tuple[PyTree, ...]) -> PyTree:
        """Apply a function to what each device has of arrays; the result is spread as the first of them."""
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, given)
        return activations.manual_region(f, in_specs=specs, out_specs=specs[0])(*given)

    def _by_axis(self, f: Callable[..., jax.Array], state: State, *others: State) -> State:
        """Apply a function to arrays of states, and the dimension that rows have in them.

        Entries of layers that are stacked have one before it.
        """
        def of(axis: int, *trees: PyTree) -> PyTree:
            return jax.tree.map(lambda x, *y: f(x, axis % x.ndim, *y), *trees)

        return {name: of(-4 if name == "entries" and not self.apart else 0, state[name],
                         *(other[name] for other in others)) for name in state}

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


def _layers_apart() -> bool:
    """Return whether a loop has arrays of its own for each layer's weights and cache: on CPUs.

    There XLA copies what a layer has out of a stack before it multiplies by it, and so moves three times as many bytes.
    """
    return mesh_context.platform() == "cpu"
