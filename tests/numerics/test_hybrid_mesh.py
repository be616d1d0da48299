"""`mesh=hsdp`: the sizes that it means, gradients of one device, and what crosses between nodes."""

from types import SimpleNamespace

import jax
import pytest

import jaxtrain as jt
from jaxtrain.config.hybrid_mesh import with_hybrid_mesh
from jaxtrain.config.load import make_config
from jaxtrain.plan import hlo, preflight
from tests.numerics import reference

F32 = 4


def config(family="llama", nodes=2, **keys):
    """Return a config with `mesh=hsdp` on nodes of two devices, times those of other axes among the keys."""
    node = 2 * keys.get("mesh__tensor", 1)
    return with_hybrid_mesh(reference.tiny(family, mesh="hsdp", **keys), nodes * node, node)


def test_data_across_nodes_and_fsdp_within():
    asked = reference.tiny("llama", mesh="hsdp", mesh__tensor=2, train__accumulation=2)
    made = with_hybrid_mesh(asked, 64, 8)
    assert (made.mesh.hsdp, made.mesh.data, made.mesh.fsdp, made.mesh.tensor) == (False, 8, 4, 2)
    assert (made.optimizer.zero_stage, made.compression.method) == (2, "exact")
    alone = with_hybrid_mesh(asked, 8, 8)  # one node: fsdp alone
    assert (alone.mesh.data, alone.mesh.fsdp, alone.optimizer.zero_stage) == (1, 4, 0)
    stages = with_hybrid_mesh(reference.tiny("llama", mesh="hsdp", mesh__stage=2), 16, 8)  # a pipeline sums once anyway
    assert (stages.mesh.fsdp, stages.optimizer.zero_stage, stages.compression.method) == (4, 2, "")
    lossy = with_hybrid_mesh(reference.tiny("llama", mesh="hsdp", compression__method="int8"), 16, 8)
    assert (lossy.mesh.data, lossy.optimizer.zero_stage, lossy.compression.method) == (2, 0, "int8")
    assert with_hybrid_mesh(make_config({"mesh": "hsdp"}), 16, 8).mesh.data == 2
    assert with_hybrid_mesh(made, 64, 8) == made


@pytest.mark.parametrize(("keys", "reason"), [
    (dict(mesh__tensor=3), "the other mesh axes need 3 devices, which does not divide the 8 of a node"),
    (dict(mesh__fsdp=2), "mesh=hsdp chooses mesh.data and mesh.fsdp, but one")], ids=str)
def test_what_is_refused(keys, reason):
    with pytest.raises(jt.UserError, match=rf"^mesh\.hsdp: {reason}"):
        with_hybrid_mesh(reference.tiny("llama", mesh="hsdp", **keys), 64, 8)


def test_nodes_are_those_of_the_devices():
    """One machine of CPUs is one node."""
    asked = reference.tiny("llama", mesh="hsdp")
    assert dict(jt.build(asked, devices=jax.devices()[:4]).mesh.shape)["fsdp"] == 4
    with pytest.raises(jt.UserError, match=r"^mesh\.hsdp: it is not known how devices that are not here"):
        jt.build(asked, devices=4)
    gpus = [SimpleNamespace(platform="gpu", process_index=number) for number in range(4)]
    with pytest.raises(jt.UserError, match=r"^mesh\.hsdp: each process has one device"):
        preflight.resolve(asked, gpus)


@pytest.mark.parametrize(("family", "keys"), [
    pytest.param("gpt2", dict(train__accumulation=2), marks=pytest.mark.slow),
    pytest.param("llama", dict(train__accumulation=2, mesh__tensor=2), marks=pytest.mark.exhaustive)], ids=str)
def test_training_is_that_of_one_device(family, keys):
    made = config(family, **keys)
    reference.check(jt.build(made, devices=jax.devices()[: 4 * made.mesh.tensor]), family, steps=3)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 gathers whole arrays at the region's edges")
def test_weights_are_gathered_within_nodes_and_gradients_cross_once_a_step():
    run = jt.build(config(train__accumulation=4), devices=jax.devices()[:4])
    found, sizes = hlo.collectives(reference.compiled(run).as_text()), run.mesh.shape
    own = sum(leaf.size for leaf in jax.tree.leaves(run.abstract.params)) * F32 // sizes["fsdp"]  # bytes of a device
    across = [one for one in found if one.joins("data", sizes)]
    assert all(one.times == 1 for one in across), hlo.table(across)
    within = [one for one in found if one.kind == "all-gather" and one not in across]
    assert hlo.total(within, "all-gather") > 4 * own, hlo.table(within)  # in each micro-batch
    for kind, want in (("reduce-scatter", own // sizes["data"]), ("all-gather", own), ("all-reduce", 0)):
        assert abs(hlo.total(across, kind) - want) <= 0.02 * want + 1024, hlo.table(across)
