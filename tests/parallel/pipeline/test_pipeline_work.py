"""The products of a stage: nothing twice but the forward pass in B, and nothing in W but its weight gradients.

Counted in the program that JAX hands to the compiler, in units of a chunk's forward pass over one micro-batch.
"""

import functools
import math
from collections import Counter

import jax
import pytest

from jaxtrain.run import shapes_of
from jaxtrain.sharding import mesh_context
from tests.numerics import reference

ROWS, LAYERS = 3, 8  # rows of one micro-batch: 48 tokens, a size that no weight has
JOINT, APART = ("gpipe", "1f1b", "interleaved"), ("zb_h1", "zb_v")


@functools.cache
def branches(schedule, **keys):
    """The run, and for F, B (and W) the program that a stage executes at a tick that has it."""
    run = reference.build("gpt2", **dict(mesh__stage=2, model__num_layers=LAYERS, pipeline__schedule=schedule,
                                         pipeline__microbatches=4, data__global_batch_size=4 * ROWS) | keys)
    with mesh_context.use(run.mesh, run.sharded.rules):
        pipeline = run.sharded.computation.pipeline(run.objective, run.schedules)
        step = jax.jit(lambda params, batch: pipeline.gradient(params, {}, batch, 1.0))
        jaxpr = step.trace(run.abstract.params, shapes_of(run).abstract()).jaxpr
    ticks = run.schedules[0].length
    loop, = (e for e in everywhere(jaxpr) if e.primitive.name == "scan" and e.params["length"] == ticks)
    conds = [e for e in loop.params["jaxpr"].jaxpr.eqns if e.primitive.name == "cond"]
    assert len(conds) == len(run.schedules[0].kinds), "a tick should have one branch for each kind of operation"
    return run, dict(zip("FBW", (cond.params["branches"][1].jaxpr for cond in conds), strict=False))


def inner(equation):
    """The programs inside of an equation."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else [value]:
            program = getattr(each, "jaxpr", each)
            if hasattr(program, "eqns"):
                yield program


def everywhere(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for program in inner(equation):
            yield from everywhere(program)


def work(run, jaxpr):
    """Multiplications by what they are for, and how many products with a layer's weights; of branches, the larger."""
    total = Counter()
    for e in jaxpr.eqns:
        if e.primitive.name == "dot_general":
            (summed, _), (batched, _) = e.params["dimension_numbers"]
            shapes = [v.aval.shape for v in (*e.invars, *e.outvars)]
            head = any(run.config.model.vocab_size in shape for shape in shapes)
            what = "head" if head else "attention" if batched else "layers"
            total += Counter({what: math.prod(shapes[2]) * math.prod(shapes[0][axis] for axis in summed),
                              "products": what == "layers"})
        inside = [work(run, program) for program in inner(e)]
        if e.primitive.name == "cond":
            total += functools.reduce(lambda a, b: a | b, inside)  # the larger of each
        else:
            times = e.params["length"] if e.primitive.name == "scan" else 1
            total += Counter({what: times * many for each in inside for what, many in each.items()})
    return total


def forward(run):
    """The multiplications of one chunk's forward pass, and of the head, for one micro-batch."""
    c = run.config.model
    layers = LAYERS // (run.schedules[0].stages * run.schedules[0].chunks)
    seq, D = run.config.data.seq_len, c.embed_dim
    return Counter({"layers": layers * ROWS * seq * (4 * D**2 + 2 * D * c.mlp_dim), "products": layers * 6,
                    "attention": layers * ROWS * 2 * seq**2 * D, "head": ROWS * seq * D * c.vocab_size})


def in_forwards(run, jaxpr):
    """Return the work of a program in units of a forward pass."""
    one, found = forward(run), work(run, jaxpr)
    return {what: found[what] / one[what] for what in one}


@pytest.mark.parametrize("schedule", JOINT)
def test_a_joint_backward_is_three_forwards(schedule):
    """One computed again, and two of gradients."""
    run, programs = branches(schedule)
    assert in_forwards(run, programs["B"]) == dict(layers=3, products=3, attention=3, head=3)


@pytest.mark.parametrize("schedule", APART)
def test_a_backward_without_weights_is_two_forwards(schedule):
    """One computed again, and the gradients of inputs; attention and the head have nothing to put off."""
    run, programs = branches(schedule)
    assert in_forwards(run, programs["B"]) == dict(layers=2, products=2, attention=3, head=3)


@pytest.mark.parametrize(("schedule", "again"), [("1f1b", 2), ("zb_h1", 1)])
def test_nothing_is_computed_twice_where_a_stage_keeps_its_results(schedule, again):
    run, programs = branches(schedule, pipeline__recompute=False)
    assert in_forwards(run, programs["F"]) == dict(layers=1, products=1, attention=1, head=0)
    assert in_forwards(run, programs["B"]) == dict(layers=again, products=again, attention=2, head=3)


@pytest.mark.parametrize("keys", [{}, {"model__num_layers": LAYERS - 1}, {"train__remat": "full"},
                                  {"model__num_layers": LAYERS - 1, "train__remat": "full"},
                                  {"train__unroll": 0}, {"train__unroll": 0, "train__remat": "dots"}], ids=str)
def test_a_stage_keeps_its_weights_once(keys):
    """B changes the gradients of matrices; F changes nothing of the size of one, or of those of all layers."""
    run, programs = branches("1f1b", pipeline__recompute=False, **keys)
    sizes = {layers * run.config.model.embed_dim * width for layers in (1, LAYERS // 2) for width in (
        run.config.model.embed_dim, run.config.model.mlp_dim)}
    changed = {kind: sum(math.prod(v.aval.shape[1:]) in sizes for v in program.outvars)
               for kind, program in programs.items()}
    assert changed["F"] == 0 < changed["B"]


@pytest.mark.parametrize("schedule", APART)
def test_weight_gradients_are_one_product_for_each_weight(schedule):
    run, programs = branches(schedule)
    assert in_forwards(run, programs["W"]) == dict(layers=1, products=1, attention=0, head=0)


@pytest.mark.parametrize("schedule", JOINT + APART)
def test_a_forward_is_one_forward_and_none_at_the_last_position(schedule):
    """There only the input is kept: B computes the rest again, so it need not be computed before."""
    run, programs = branches(schedule)
    assert in_forwards(run, programs["F"]) == dict(layers=1, products=1, attention=1, head=0)
    choices = [[work(run, program) for program in inner(e)] for e in programs["F"].eqns if e.primitive.name == "cond"]
    choices = [choice for choice in choices if any(choice)]
    assert len(choices) == 1 and sum(map(bool, choices[0])) == 1, "the last position multiplies, though B does it again"
    middle, = choices
    outside = work(run, programs["F"]) - functools.reduce(lambda a, b: a | b, middle)
    assert not outside, f"{outside} are computed at every position, the last too"


def test_products_in_other_branches_are_seen():
    """The count fails where a forward pass is computed once more than it should be."""
    run, programs = branches("1f1b")
    twice = Counter(work(run, programs["B"])) + work(run, programs["F"])
    assert {what: twice[what] / forward(run)[what] for what in ("layers", "attention")} == dict(layers=4, attention=4)
