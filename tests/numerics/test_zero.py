"""ZeRO over 8 data devices: what each stage takes off every device, and that the loss does not notice.

Stage 1 splits the optimizer's state, 2 the gradients too, 3 the parameters as well; an array splits where one of its
dimensions divides by 8, and one that has none stays whole.
"""

import functools

import jax
import numpy as np
import pytest

from jaxtrain.run import shapes_of
from tests.numerics import reference
from tests.tiers import exhaustive, slow

DEVICES = 8


@functools.cache
def step(stage):
    run = reference.build("gpt2", (DEVICES, 1, 1), optimizer__zero_stage=stage, train__accumulation=2)
    return run, reference.compiled(run)


def size(tree, split):
    """Bytes on one device."""
    def pieces(leaf):
        return DEVICES if split and any(n % DEVICES == 0 for n in leaf.shape) else 1
    return sum(leaf.size * leaf.dtype.itemsize // pieces(leaf) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("stage", [3, *slow(1), *exhaustive(0, 2)])
def test_state_on_each_device_is_the_closed_form(stage):
    run, compiled = step(stage)
    params, opt_state = run.abstract.params, run.abstract.opt_state
    batch = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes_of(run).abstract())) // DEVICES
    counters = 2 * 4  # step, skipped
    history = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.abstract.extras))
    want = size(params, stage >= 3) + size(opt_state, stage >= 1) + batch + counters + history
    got = compiled.memory_analysis().argument_size_in_bytes
    assert abs(got - want) <= 0.01 * want, f"stage {stage}: the step takes {got:,} bytes on each device, not {want:,}"


@pytest.mark.slow
def test_stage_2_splits_the_accumulated_gradients():
    """While micro-batches run, stage 1 holds a whole float32 gradient and stage 2 an eighth of one."""
    params = step(1)[0].abstract.params
    saved = size(params, False) - size(params, True)
    one, two = (step(stage)[1].memory_analysis().temp_size_in_bytes for stage in (1, 2))
    assert one - two >= 0.8 * saved, f"temporary memory falls by {one - two:,} bytes of {saved:,} to be had"


@pytest.mark.exhaustive  # test_equality.py compares losses and gradients of each stage with plain ones
def test_losses_are_the_same_in_every_stage():
    """They are equal to the last bit where sums have the same order; 1e-6 allows for the compiler to choose another."""
    losses = []
    for stage in range(4):
        run, compiled = step(stage)
        state = reference.start(run)
        for n in range(4):
            state, metrics = compiled(state, run.sharded.place(reference.batch(n)))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


@pytest.mark.exhaustive
def test_what_data_cannot_split_but_along_the_layers_stays_whole():
    """A width that divides by fsdp and by data, but not by both: layers are taken from their stack one by one."""
    keys = dict(model__embed_dim=36, model__head_dim=8, optimizer__zero_stage=3)
    one, run = reference.build("gpt2", **keys), reference.build("gpt2", (2, 4, 1), **keys)
    scale = run.layout.state.params["blocks"]["layer"]["mlp_norm"]["scale"].spec
    assert scale == jax.sharding.PartitionSpec(None, "fsdp"), "the case proves nothing"
    results = [reference.compiled(r)(r.init(), r.sharded.place(reference.batch(0)))[1] for r in (one, run)]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(*(float(metrics[key]) for metrics in results), rtol=1e-5)
