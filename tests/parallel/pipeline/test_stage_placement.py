"""Layers over the chunks of a pipeline: evenly, in order, there and back to the bit."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.parallel.pipeline.parts import Parts, lower
from jaxtrain.parallel.pipeline.stage_placement import Placement
from jaxtrain.parallel.schedules import straight, v_shape


def positions():
    for stages, chunks in itertools.product((1, 2, 3, 4, 8), (1, 2, 3)):
        yield straight(stages, chunks)
    yield from map(v_shape, (1, 2, 4))


def in_order(placement, position):
    """Return the layers of each chunk as (stack, layer), in the order in which a micro-batch passes the chunks."""
    place = {at: (stage, chunk) for stage, row in enumerate(position) for chunk, at in enumerate(row)}
    return [[(key, int(layer)) for key, layers in placement.layers.items() for layer in layers[place[at]] if layer >= 0]
            for at in sorted(place)]


@pytest.mark.parametrize("position", list(positions()), ids=str)
def test_layers_stay_in_order_and_chunks_differ_by_one_at_most(position):
    for stacks in ({"a": n} for n in range(1, 30)):
        chunks = in_order(Placement.of(stacks, position), position)
        assert [layer for chunk in chunks for layer in chunk] == [("a", n) for n in range(stacks["a"])]
        sizes = [len(chunk) for chunk in chunks]
        assert max(sizes) - min(sizes) <= 1, f"{stacks['a']} layers make chunks of {sizes}"
        assert not sum(sizes) % len(sizes) or len(sizes) == 1 or sizes[-1] == min(sizes), (
            f"the last chunk has the loss to do besides, and yet as many layers as any: {sizes}")


@pytest.mark.parametrize("position", list(positions()), ids=str)
def test_two_stacks_are_one_sequence(position):
    for first, second in itertools.product(range(1, 6), range(1, 9)):
        chunks = in_order(Placement.of({"a": first, "b": second}, position), position)
        wanted = [("a", n) for n in range(first)] + [("b", n) for n in range(second)]
        assert [layer for chunk in chunks for layer in chunk] == wanted
        assert max(map(len, chunks)) - min(map(len, chunks)) <= 1


@pytest.mark.parametrize(("layers", "position", "even"), [
    (4, straight(2, 1), True), (4, straight(2, 2), False), (4, v_shape(2), False), (5, straight(2, 1), False),
    (1, straight(2, 1), False), (4, ((1,), (0,)), False)])
def test_what_needs_no_exchange(layers, position, even):
    assert Placement.of({"a": layers}, position).even == even


@pytest.mark.parametrize("position", [straight(2, 1), straight(2, 2), v_shape(2), ((1,), (0,))], ids=str)
@pytest.mark.parametrize("layers", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("mesh", [dict(stage=2, fsdp=2), dict(stage=2, data=2)], ids=str)
def test_there_and_back_is_exact(layers, position, mesh):
    """On 4 devices, weights go from their layout at rest to stages, each of which then has its own layers."""
    placement = Placement.of({"a": layers}, position)
    over = "stage" if placement.even else None
    rest = P(over, "fsdp", None if over else "stage") if "fsdp" in mesh else P(over, "data", None if over else "stage")
    mesh = jt.make_mesh(**mesh)
    weight = np.arange(layers * 8 * 4, dtype=np.float32).reshape(layers, 8, 4)
    at_rest = jax.device_put(weight, NamedSharding(mesh, rest))
    with jax.set_mesh(mesh):
        staged = jax.jit(lambda w: placement.to_stages("a", w, P(None, None)))(at_rest)
        back = jax.jit(lambda w: placement.from_stages("a", w, rest))(staged)
    given = np.asarray(staged)
    for (stage, chunk, slot), layer in np.ndenumerate(placement.layers["a"]):
        if layer >= 0:
            assert np.array_equal(given[stage, chunk, slot], weight[layer]), f"stage {stage} lacks layer {layer}"
    assert jax.typeof(staged).sharding.spec[0] == "stage", "the layers of a stage lie on others too"
    assert np.array_equal(back, weight) and back.sharding.is_equivalent_to(at_rest.sharding, 3)


def test_stacks_side_by_side_are_each_spread_over_all_stages():
    parts = Parts({"image/blocks": 3, "text/blocks": 2}, *[lambda *args: None] * 5, side_by_side=True)
    layers = parts.placement(((0,), (1,))).layers
    assert {key: held.reshape(2, -1).tolist() for key, held in layers.items()} == {
        "image/blocks": [[0, 1], [2, -1]], "text/blocks": [[0], [1]]}
    one_after_the_other = replace(parts, side_by_side=False).placement(((0,), (1,))).layers
    assert one_after_the_other["text/blocks"].reshape(2, -1).tolist() == [[-1, -1], [0, 1]]


def test_stacks_are_lifted_to_the_top_of_the_tree_and_put_back():
    parts = Parts({"image/blocks": 3, "text/blocks": 2}, *[lambda *args: None] * 5)
    tree = {"image": {"embed": 1, "blocks": {"q": 2}}, "text": {"blocks": {"q": 3}}, "scale": 4}
    lifted = parts.lift(tree)
    assert lifted == {"image": {"embed": 1}, "scale": 4, "image/blocks": {"q": 2}, "text/blocks": {"q": 3}}
    assert lower(lifted) == tree
    assert parts.lift(frozen := {"image": {"embed": 1}}) == frozen == lower(frozen)  # where all layers are trained
