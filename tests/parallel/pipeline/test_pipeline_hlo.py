"""The communication in a pipeline's step, to the byte, and that no stage waits for one that is absent.

A is one micro-batch's activation on one device [B, T, D].
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.plan import hlo
from jaxtrain.plan.trace.device_groups import device_groups
from tests.numerics import reference

F32 = 4
ROWS, SEQ, DIM = 2, 16, 32  # of one micro-batch on one device
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive


def step(schedule, mesh, microbatches=4, layers=4, overlap=False):
    """A run whose micro-batches have ROWS rows on a device, and the collectives of its step."""
    return compiled(schedule, mesh, microbatches, layers, overlap)


@functools.cache
def compiled(schedule, mesh, microbatches, layers, overlap):
    run = reference.build("gpt2", mesh, mesh__stage=2, pipeline__schedule=schedule, model__num_layers=layers,
                          pipeline__microbatches=microbatches, pipeline__overlap=overlap,
                          data__global_batch_size=ROWS * microbatches * mesh[0] * mesh[1])
    return run, hlo.collectives(reference.compiled(run).as_text())


# ---------------------------------------------------------------------------------------------------- nobody waits

def spanning(found, sizes, axis="stage"):
    """The collectives in branches that join several stages: one stage may take a branch that another does not."""
    return [c for c in found if c.conditional and c.joins(axis, sizes)]


@pytest.mark.parametrize(("schedule", "mesh", "layers"), [
    pytest.param("1f1b", (2, 2, 1), 4, marks=SLOW), pytest.param("zb_v", (2, 1, 2), 4, marks=SLOW),
    *(pytest.param(schedule, mesh, layers, marks=EXHAUSTIVE) for schedule in SCHEDULES
      for mesh, layers in (((1, 2, 2), 5), ((2, 1, 2), 4), ((2, 2, 1), 5)))])
def test_no_collective_in_a_branch_joins_two_stages(schedule, mesh, layers):
    run, found = step(schedule, mesh, layers=layers)
    assert not (bad := spanning(found, run.mesh.shape)), f"a stage would wait for ever in\n{hlo.table(bad)}"
    if run.mesh.shape["tensor"] > 1:
        assert any(c.conditional for c in found), "no collective was seen in a branch, though tensor needs some"


def test_a_sum_over_stages_in_a_branch_would_be_seen():
    mesh = jt.make_mesh(data=2, stage=2, tensor=2)

    each = P(("data", "stage", "tensor"))

    def stage(x):
        return jax.lax.cond(x.sum() > 0, lambda x: jax.lax.psum(x, axis), lambda x: x, x)

    for axis, seen in (("stage", 1), ("tensor", 0), (("data", "stage"), 1)):
        with jax.set_mesh(mesh):
            f = jax.jit(jax.shard_map(stage, in_specs=each, out_specs=each, check_vma=False))
            x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, each))
            found = hlo.collectives(f.lower(x).compile().as_text())
        assert len(found) == 1 and len(spanning(found, mesh.shape)) == seen, f"psum over {axis}: {found}"


@pytest.mark.parametrize(("text", "groups"), [
    ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
    ("replica_groups={}", ((0, 1, 2, 3),)),
    ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
    ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
    ("replica_groups=mesh['data'=2,'stage'=2] {'stage'}, x", ((0, 1), (2, 3))),
    ("replica_groups=mesh['data'=2,'stage'=2] {'data'}, x", ((0, 2), (1, 3))),
    ("replica_groups=mesh['data'=2,'stage'=2] {'stage','data'}, x", ((0, 2, 1, 3),)),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x", ((0, 1), (2, 3))),
    ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0)))])
def test_groups_of_devices_are_read_in_every_form(text, groups):
    assert device_groups(f"%x = f32[] all-reduce(%y), {text}", 4) == groups


# ---------------------------------------------------------------------------------------------------- bytes

@pytest.mark.parametrize(("schedule", "mesh", "overlap"), [
    *(pytest.param(schedule, mesh, False, marks=SLOW) for schedule, mesh in (("1f1b", (2, 2, 1)), ("zb_v", (2, 1, 2)))),
    *(pytest.param(schedule, (1, 1, 2), overlap, marks=EXHAUSTIVE)
      for schedule in SCHEDULES for overlap in (False, True))])
def test_stages_exchange_two_activations_a_tick(schedule, mesh, overlap):
    run, found = step(schedule, mesh, overlap=overlap)
    ticks, A = run.schedules[0].length, ROWS * SEQ * DIM * F32 // mesh[2]  # the sequence is split between blocks
    sent = [c for c in found if c.kind == "collective-permute"]
    assert hlo.total(sent, "collective-permute") == 2 * ticks * A, (
        f"{2 * ticks * A:,} bytes were expected, two activations in each of {ticks} ticks\n{hlo.table(sent)}")
    assert not any(c.conditional for c in sent), "a transfer stands in a branch: its neighbour may not be there"


def weight_bytes(run):
    """Return the bytes in use of parameters that fsdp splits and does not split, one stage's layers and the rest."""
    sizes = {}
    names = jax.tree.structure(run.abstract.params).flatten_up_to(run.layout.axes)
    for leaf, axes in zip(jax.tree.leaves(run.abstract.params), names, strict=True):
        tensor = run.mesh.shape["tensor"] if {"heads", "kv_heads", "mlp", "vocab"} & set(axes) else 1
        split = run.mesh.shape["fsdp"] > 1 and bool({"embed", "norm"} & set(axes))
        stage = run.mesh.shape["stage"] if "layers" in axes else 1
        key = split, "layers" in axes
        sizes[key] = sizes.get(key, 0) + leaf.size * F32 // tensor // stage
    return sizes


def sums(found, sizes):
    """The sums over devices that see different tokens."""
    return [c for c in found if c.kind in ("all-reduce", "reduce-scatter")
            and (c.joins("data", sizes) or c.joins("fsdp", sizes))]


@pytest.mark.parametrize(("schedule", "mesh", "microbatches"), [
    pytest.param("1f1b", (2, 2, 1), 4, marks=SLOW), pytest.param("zb_v", (2, 1, 2), 4, marks=SLOW),
    *(pytest.param(schedule, (2, 2, 1), 8, marks=EXHAUSTIVE) for schedule in SCHEDULES)])
def test_gradients_are_summed_once_a_step(schedule, mesh, microbatches):
    run, found = step(schedule, mesh, microbatches=microbatches)
    over, want = sums(found, run.mesh.shape), {"reduce-scatter": 0, "all-reduce": 0}
    for (split, _), size in weight_bytes(run).items():  # of one stage's layers, and of what all stages have
        part = size // 2 if split else size
        want["reduce-scatter"] += part if split else 0  # over fsdp, split as at rest
        want["all-reduce"] += part  # then over what is left: data, and stages for what belongs to no single stage
    for kind, size in want.items():
        got = hlo.total(over, kind)
        assert abs(got - size) <= 1024, (  # the loss, norms, whether all is finite
            f"{kind}: {got:,} bytes, {got - size:+,} against the closed form\n{hlo.table(over)}")
    assert not (inside := [c for c in over if c.conditional or c.times > 1]), (
        f"summed in every tick, not once:\n{hlo.table(inside)}")


@pytest.mark.parametrize("schedule", [
    pytest.param(schedule, marks=SLOW if schedule == "1f1b" else EXHAUSTIVE) for schedule in SCHEDULES])
def test_weights_are_gathered_once_a_step(schedule):
    run, found = step(schedule, (2, 2, 1))
    gathered = [c for c in found if c.kind == "all-gather" and c.joins("fsdp", run.mesh.shape)]
    want = sum(size for (split, _), size in weight_bytes(run).items() if split)
    assert abs(hlo.total(gathered, "all-gather") - want) <= 0.02 * want, f"not {want:,} bytes:\n{hlo.table(gathered)}"
    assert not (inside := [c for c in gathered if c.conditional or c.times > 1]), f"every tick:\n{hlo.table(inside)}"
