"""The memory that a device needs while a run answers prompts, as reinforcement learning does between its steps.

The programs are those that answer, traced for the target like the step: so grouped heads, windows and latent caches are
counted as the model has them. Prompts are taken as long as `data.seq_len` and `rl.max_new_tokens` allow, since a
plan reads no prompts. The training state stays on the device meanwhile. Answers that wait for their step are kept by
the hosts.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.hub import decoding, scoring
from jaxtrain.hub.batching.rounding import bucket
from jaxtrain.hub.sampling import Sampling
from jaxtrain.models.attention.cache_pages import PAGE
from jaxtrain.models.attention.kv_cache import split
from jaxtrain.plan.cost import memory
from jaxtrain.plan.cost.memory_parts import CACHE, COPY, LOGITS, named
from jaxtrain.plan.targets import Target
from jaxtrain.plan.trace import reader
from jaxtrain.plan.trace.layouts import LINEAR
from jaxtrain.plan.trace.program import Block, Op
from jaxtrain.run import Run, abstract_model
from jaxtrain.train_step.report import total
from jaxtrain.tuning.remote_teacher import RemoteTeacher
from jaxtrain.tuning.reward_scores import PREFIX, reward_model
from jaxtrain.tuning.rewards import answers_of_step
from jaxtrain.tuning.teacher_scores import teacher_model

LAYING_OUT, PROMPTS, DECODING = "laying out weights", "prompts", "decoding"
VALUES, REWARDS, LOGPROBS = "values", "rewards", "teacher's log-probabilities"
SCORED = 64  # texts that are given values or rewards at once


@dataclass(frozen=True)
class Phase:
    """One program of those that answer."""

    name: str
    traced: jax.stages.Traced  # of its arguments the weights come last
    weights: Any  # shapes and shardings
    state: Any = None  # its first argument, whose memory the result has
    copy: Any = None  # of the weights, which is there meanwhile
    apart: Any = None  # the weights that are there a second time, each layer's in arrays of its own
    run: Run | None = None  # whose program it is, where it may be another one's


REWARD_MODEL, TEACHER = "reward model", "teacher"  # the names of their memory
PROGRAMS = {REWARD_MODEL: REWARDS, TEACHER: LOGPROBS}


def beside(config: Config, target: Target, devices: int) -> dict[str, Run]:
    """Return the reward model and the teacher that rest beside a run, as far as they are on this machine."""
    of_rewards = next((one for one in config.rl.rewards if one.startswith(PREFIX)), "")
    found = {}
    for name, place, model in ((REWARD_MODEL, of_rewards, reward_model), (TEACHER, config.rl.teacher, teacher_model)):
        with contextlib.suppress(UserError):  # which the run itself will raise
            if place and not RemoteTeacher.is_meant(place):
                found[name] = model(place, devices, target.described)[0]
    return found


def planned(run: Run, target: Target, devices: int, parts: Counter) -> dict[str, Counter]:
    """Return the memory of each phase of answering, and add to `parts` what rests on a device besides the state."""
    others = beside(run.config, target, devices)
    parts.update({name: total(abstract_model(other)) for name, other in others.items()})
    if run.config.rl.exact:  # on which the step draws answers, with as much memory as it takes in training
        parts["copy of the state"] = total(run.abstract)
    return memory_by_phase(run, target, parts, others)


def phases(run: Run, on: Mesh | None = None, models: Mapping[str, Run] | None = None) -> Iterator[Phase]:
    """Yield the programs in the order in which they run, for a run that learns from its own answers.

    Args:
        run: the run.
        on: the devices to compile for, where the mesh of the run is abstract.
        models: the reward model and the teacher by their names, for their programs too.
    """
    c, programs, params, copy = run.config.rl, decoding.programs(run), abstract_model(run), None
    numbers = jax.tree.map(np.asarray, Sampling().numbers() | {"known": np.int32(0)})
    with programs.context():
        if c.gather_weights:
            copy = jax.eval_shape(programs.laid_out, params)
            # The largest comes after all others.
            *others, (made, w) = sorted(zip(jax.tree.leaves(copy), jax.tree.leaves(params), strict=True),
                                        key=lambda pair: total(pair[0]))
            yield Phase(LAYING_OUT, _traced(lambda w: programs.lay_out_program(w, made.dtype), on, w), w,
                        copy=[other for other, _ in others])
        weights, texts, room = params if copy is None else copy, answers_of_step(run.config), c.max_new_tokens
        rows, width = programs.rows_for(texts), bucket(run.config.data.seq_len - room)
        prompts = programs.rows * bucket(min(rows, -(-texts // c.group_size)) // programs.rows)
        slots = width + bucket(room)

        def of_rows(many: int, dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            where = NamedSharding(run.mesh, programs.placement(1 + len(shape)))
            return jax.ShapeDtypeStruct((many, *shape), dtype, sharding=where)

        def begin(texts, begins, weights):
            return programs.prefill_program(weights, texts, begins, None, False)

        def go_on(state, numbers, weights):
            return programs.go_on_program(weights, state, np.int32(0), np.int32(rows), np.full(1, -1, np.int32),
                                          numbers, False, False)

        given = of_rows(prompts, jnp.int32, width), of_rows(prompts, jnp.int32), weights
        yield Phase(PROMPTS, _traced(begin, on, *given), weights, copy=copy)
        state = jax.eval_shape(lambda new, source: programs.arrange_program(new, source, slots),
                               jax.eval_shape(begin, *given), of_rows(rows, jnp.int32))
        state |= {name: of_rows(rows, jnp.int32) for name in ("slot", "count", "limits")} | {
            "done": of_rows(rows, bool), "seeds": of_rows(rows, jnp.uint32, 3)}
        if programs.in_pages:
            state = _in_pages(state, rows * -(-slots // PAGE)) | {"table": of_rows(rows, jnp.int32, -(-slots // PAGE))}
        ready = jax.eval_shape(programs.ready, weights)
        yield Phase(DECODING, _traced(go_on, on, state, numbers, ready, donate=(0,)), ready, state, copy,
                    _second(ready, weights))
        if c.value_head:
            yield _scoring(VALUES, run, run, on)
    for name, other in (models or {}).items():
        yield _scoring(PROGRAMS[name], other, run, None)


def _in_pages(state: decoding.State, many: int) -> decoding.State:
    """Return the state with its entries in so many pages, as many as rows can need."""
    slotted, states = split(state["entries"])
    return state | {"entries": states, decoding.PAGES: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0], many, x.shape[2], PAGE, x.shape[4]), x.dtype, sharding=x.sharding),
        slotted)}


def _cache(state: decoding.State | None) -> list[PyTree]:
    """Return what a state has of the cache."""
    return [] if state is None else [state[name] for name in ("entries", decoding.PAGES) if name in state]


def _second(ready: Mapping[str, PyTree], weights: Mapping[str, PyTree]) -> list[PyTree]:
    """Return which weights that a loop takes are not those that are there."""
    if not any(isinstance(part, list) for part in ready.values()):
        return []
    found: list[PyTree] = []
    for name, part in ready.items():
        found += [part] if isinstance(part, list) else [
            w for w, held in zip(jax.tree.leaves(part), jax.tree.leaves(weights[name]), strict=True)
            if w.dtype != held.dtype or total(w) != total(held)]
    return found


def _scoring(name: str, scorer: Run, run: Run, on: Mesh | None) -> Phase:
    """Return the program that reads out a number, or computes a log-probability, at each token of a run's answers."""
    programs, params, texts = decoding.programs(scorer), abstract_model(scorer), answers_of_step(run.config)
    scores = scoring.Scorer(programs)
    with programs.context():
        rows, width = scores.shape(min(SCORED, texts), run.config.data.seq_len + 1)
        given = [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(scorer.mesh, programs.placement(
            len(shape)))) for shape in ((rows, width), (rows, width), (rows,))]
        program = scores.logprobs_program if name == LOGPROBS else scores.readouts_program
        return Phase(name, _traced(lambda *a: program(a[-1], *a[:-1]), on, *given, params), params,
                     run=scorer)


def memory_by_phase(run: Run, target: Target, held: Counter,
                    models: Mapping[str, Run] | None = None) -> dict[str, Counter]:
    """Return the bytes of a device at the peak of each phase, by part.

    `held`: what the training state takes, and `models` beside it.
    """
    found = {}
    for phase in phases(run, models=models):
        on = phase.run or run
        block = reader.read(phase.traced.jaxpr, dict(on.mesh.shape), target.platform, target.rings,
                            windows=on.config.model.windows, returned=phase.name == LAYING_OUT)
        apart = target.platform == "cpu"  # each layer has weights and entries of its own in a loop
        _as_compiled(block, apart)
        kept = len(jax.tree.leaves(phase.state))
        others = block.inputs[kept:len(block.inputs) - len(jax.tree.leaves(phase.weights))]
        parts = Counter(held)
        parts[COPY] = total(phase.copy)
        parts[CACHE] = total(_cache(phase.state))
        parts[LOGITS] = total(phase.state and phase.state["logits"])
        if apart and phase.name == PROMPTS:  # they are results, which have memory from the start
            entries = phase.traced.out_info["entries"]
            shapes = {leaf.shape for leaf in jax.tree.leaves(entries)}
            block.outputs = [value for value in block.outputs if value.shape not in shapes]
            parts[CACHE] = total(entries)
        parts["working memory"] = sum(value.bytes for value in (*block.inputs[:kept], *others)) - total(
            phase.state and (_cache(phase.state), phase.state["logits"]))
        parts.update(named(memory.peak(block, kept), phase.weights, _names(phase), (CACHE, LOGITS, "working memory")))
        parts["gathered weights"] += total(phase.apart)
        found[phase.name] = +parts
    return found


def _as_compiled(block: Block, apart: bool) -> None:
    """Change a program as compilers do: arrays are padded together, and what is the same for each token is gathered
    before the loop over tokens. Where layers are `apart`, padded arrays are read by all of them.
    """
    pads = [op for op in block.ops if op.name == "pad"]
    for op in pads:
        op.beside = [value for other in pads for value in other.inputs]
        op.made = "real" if apart else op.made
    for at, loop in enumerate(block.ops):
        if loop.name == "while":
            before = _unchanging(loop.bodies[0], len(loop.bodies[0].inputs) - loop.carried)
            loop.bodies[0].ops = [op for op in loop.bodies[0].ops if op not in before]
            if apart:
                _stay_apart(loop.bodies[0])
            made = [value for op in before for value in op.outputs]
            block.ops[at:at + 1], loop.beside = [*before, loop], [value for value in made if value.op]
            return


def _stay_apart(body: Block) -> None:
    """Change the body of a loop that stacks its layers, loops over them, and takes the stack of results apart.

    XLA does neither, and changes entries where they are.
    """
    for op in body.ops:
        if op.name == "stack":
            op.made = "view"
        if op.name == "scan":
            written = [value for inner in op.bodies[0].ops if inner.name == "scatter"
                       for value in inner.outputs]
            for value in (*op.outputs[op.carried:], *written):
                value.bytes = 0


def _unchanging(body: Block, consts: int) -> list[Op]:
    """Return the operations of a loop's body that gather what is the same each time, and those that they need."""
    same, found = set(map(id, body.inputs[:consts])), []
    for op in body.ops:
        if op.inputs and all(id(value) in same for value in op.inputs) and op.name in (
                *LINEAR, "all_gather", "turn"):
            same.update(map(id, op.outputs))
            found.append(op)
    return found


def _names(phase: Phase) -> dict[tuple[int, ...], str]:
    """Return the names of the arrays of a program that no program of training has, by shape."""
    if phase.name == LAYING_OUT:
        return {leaf.shape: COPY for leaf in jax.tree.leaves(phase.traced.out_info)}
    if phase.name in (VALUES, REWARDS, LOGPROBS):
        return {}
    state = phase.traced.out_info
    return {leaf.shape: CACHE for leaf in jax.tree.leaves(_cache(state))} | {state["logits"].shape: LOGITS}


def _traced(program: Any, on: Mesh | None, *args: Any, donate: tuple[int, ...] = ()) -> jax.stages.Traced:
    """Return a program traced for abstract arguments, whose results are placed on the devices to compile for."""
    if on is None:
        return jax.jit(program, donate_argnums=donate).trace(*args)
    where = jax.tree.map(lambda leaf: NamedSharding(on, leaf.sharding.spec if leaf.sharding else jax.P()),
                         jax.eval_shape(program, *args))
    return jax.jit(program, donate_argnums=donate, out_shardings=where).trace(*args)
