"""Hints: factors that are sizes of axes, shards that are lost, norms of copies."""

import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.proof import hints
from jaxtrain.proof.drawn_layouts import Layout

LAYOUT = Layout({"mesh.data": 4, "mesh.tensor": 2, "train.accumulation": 3})
MESH = AbstractMesh((4, 2), ("data", "tensor"))
WANT = np.random.default_rng(0).normal(size=(8, 6))


@pytest.mark.parametrize(("factor", "words"), [
    (2, "2 times what it should be, which is the size of `tensor`: summed over it once too often"),
    (4, "which is the size of `data`"), (8, "the size of `data` x `tensor`"), (3, "the size of train.accumulation"),
    (0.25, "1/4 of what it should be, which is the size of `data`: not summed over it (a missing psum)"),
    (0, "it is zero"), (1.7, "1.7 times what it should be; `data`: rows are split over it"),
])
def test_a_factor_is_named_by_the_axes_that_have_its_size(factor, words):
    assert words in hints.of_array(factor * WANT, WANT, None, LAYOUT)


@pytest.mark.parametrize("spec", [P(None, "tensor"), P("tensor", None), P(("data", "tensor"), None)])
def test_a_shard_that_is_wrong_among_right_ones_is_named(spec):
    sharding = NamedSharding(MESH, spec)
    got = WANT.copy()
    if spec == P(None, "tensor"):
        got[:, 3:] = 0
    elif spec == P("tensor", None):
        got[4:] = 0
    else:
        got[1::2] = 0  # data is cut first, into pairs of rows, and each pair by tensor
    said = hints.of_array(got, WANT, sharding, LAYOUT)
    assert said == "shard 2 of 2 over `tensor` is wrong and the others are right: it is zero: nothing of it arrives " \
                   "over `data` and `tensor`"


def test_what_no_hint_fits_is_told_by_its_size():
    got = WANT + np.random.default_rng(1).normal(size=WANT.shape)
    assert "of its largest element" in hints.of_array(got, WANT, NamedSharding(MESH, P(None, "tensor")), LAYOUT)
    assert "not finite" in hints.of_array(np.full_like(WANT, np.nan), WANT, None, LAYOUT)
    assert hints.proportion(2 * WANT, WANT) == pytest.approx(2) and hints.proportion(got, WANT) is None


def test_another_shape_is_told_and_not_divided():
    told = hints.of_array(np.ones((8, 4)), np.ones((8, 4, 2)), None, Layout({"mesh.data": 2}))
    assert told.startswith("its shape is [8, 4] in place of [8, 4, 2]; ")


def test_the_smallest_layout_alone_tells_of_micro_batches():
    assert "jt.Weighted" in hints.of_loss(2.0, 2.1, Layout({"train.accumulation": 2}))
