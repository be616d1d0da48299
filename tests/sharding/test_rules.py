"""Logical names to shardings: what they resolve to, and that nothing that does not fit is replicated in silence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.sharding import activations, mesh_context
from jaxtrain.sharding.axis_rules import at_rest, parameter_sharding, spread, without_trivial_axes

CUBE = dict(data=2, fsdp=2, tensor=2)


BATCH, FSDP = ("data", "fsdp", "expert"), ("fsdp", "context", "expert")


def build(**keys):
    """Build on an abstract mesh of 8: refusals come before anything is allocated."""
    config = jt.make_config({
        "model": dict(vocab_size=64, num_layers=2, embed_dim=32, num_heads=8, max_seq_len=16), "mesh": CUBE,
        "data": dict(seq_len=16, global_batch_size=16)}, {key.replace("__", "."): value for key, value in keys.items()})
    return jt.build(config, devices=8)


@pytest.mark.parametrize(("names", "at_rest", "in_use"), [
    (("embed", "mlp"), P(FSDP, "tensor"), P(None, "tensor")),
    (("vocab", "embed"), P("tensor", FSDP), P("tensor", None)),
    (("layers", "norm"), P("stage", FSDP), P("stage", None)),
    (("experts", "expert_embed", "expert_mlp"), P("expert", FSDP[:2], "tensor"), P("expert", None, "tensor")),
    (("batch", "seq", "act_embed"), P(BATCH, "context", None), P(None, None, None)),
    (("batch", "block_seq", "act_embed"), P(BATCH, ("context", "tensor"), None), P(None, "tensor", None)),
    ((None, "heads"), P(None, "tensor"), P(None, "tensor")),
])
def test_names_resolve_by_the_rules(names, at_rest, in_use):
    rules = jt.rules("fsdp_tp")
    assert rules.spec(names) == at_rest
    assert rules.spec(names, gathered=True) == in_use, "in use, a weight is whole over the axes that shard tokens"


@pytest.mark.parametrize(("shape", "sizes", "want"), [
    ((8, 6, 4), (2, 2, 1, 2, 1), P(("fsdp", "context"), None, "tensor")),
    ((8, 4, 4), (2, 1, 2, 2, 1), P(("expert", "fsdp"), None, "tensor")),
    ((6, 4, 4), (2, 2, 1, 2, 1), P(None, ("fsdp", "context"), "tensor")),  # six experts do not divide by four
])
def test_matrices_of_experts_rest_by_expert_where_their_number_divides(shape, sizes, want):
    mesh = jax.sharding.AbstractMesh(sizes, ("fsdp", "context", "expert", "tensor", "stage"))
    names = ("experts", "expert_embed", "expert_mlp")
    assert at_rest(names, shape, jt.rules(), mesh) == want
    assert at_rest(("layers", *names), (3, *shape), jt.rules(), mesh) == P(None, *want)
    assert at_rest(names, shape, jt.rules("fsdp_tp", expert_embed=None), mesh)[1] is None


def test_presets_build_on_each_other_and_overrides_win():
    assert jt.rules("data").spec(("embed", "mlp")) == P(None, None)
    assert jt.rules("fsdp").spec(("embed", "mlp")) == P(FSDP, None)
    assert jt.rules("fsdp", mlp="tensor", embed=None).spec(("embed", "mlp")) == P(None, "tensor")
    assert jt.rules("fsdp", mlp="fsdp+tensor", embed="none").spec(("embed", "mlp")) == P(None, ("fsdp", "tensor"))
    assert jt.rules("fsdp", mine=("data", "tensor"))["mine"] == ("data", "tensor"), "a name of one's own is welcome"


@pytest.mark.parametrize(("do", "key", "words"), [
    (lambda: jt.rules("fsdp_tp")["hedas"], "logical axis 'hedas'", "did you mean 'heads'"),
    (lambda: jt.rules("fsdp_tp").spec(("embed", "mine")), "logical axis 'mine'",
     'no rule sets which mesh axis splits it; give it a rule, as in jt.rules("fsdp_tp", mine=None) or '
     "mesh.overrides.mine=tensor"),
    (lambda: jt.rules("fsdp_pt"), "mesh.rules", "did you mean 'fsdp_tp'"),
    (lambda: jt.rules("fsdp", mlp="tensr"), "mesh.overrides.mlp", "did you mean 'tensor'"),
    (lambda: jt.rules("fsdp_tp").spec(("heads", "mlp")), "rules for ['heads', 'mlp']", "both map onto mesh axis"),
    (lambda: build(mesh__overrides__embed="tensor"), "mesh.overrides.embed", "no model splits it over tensor"),
    (lambda: build(mesh__overrides__every_layer="fsdp"), "mesh.overrides.every_layer", "no model splits it over fsdp"),
    (lambda: build(mesh__overrides__mpl="tensor"), "mesh.overrides.mpl", "did you mean 'mlp'"),
    (lambda: build(mesh__overrides__mlp="tensro"), "mesh.overrides.mlp", "did you mean 'tensor'"),
    (lambda: build(model__name="llama", mesh__overrides__positions="fsdp"), "mesh.overrides.positions", "no such axis"),
    (lambda: build(mesh__rules="fsdp"), "mesh.tensor", "no rule uses it"),
    (lambda: build(model__vocab_size=63), "model.vocab_size", "make it a multiple of 2"),
    (lambda: build(model__mlp_dim=33), "model.mlp_dim", "make it a multiple of 2"),
    (lambda: build(model__num_heads=3, model__head_dim=8), "heads", "make it a multiple of 2"),
    (lambda: build(model__num_kv_heads=1), "model.num_kv_heads", "make it a multiple of 2"),
    (lambda: build(model__embed_dim=33, model__head_dim=4), "model.embed_dim", "make it a multiple of 2"),
    (lambda: build(data__seq_len=15), "data.seq_len", "make it a multiple of 2"),
    (lambda: build(data__global_batch_size=6), "data.global_batch_size", "make it a multiple of 4"),
    (lambda: build(train__accumulation=8), "data.global_batch_size", "make it a multiple of 32"),
])
def test_what_does_not_fit_is_refused_by_name(do, key, words):
    with pytest.raises(jt.UserError) as refusal:
        do()
    assert key in refusal.value.key, f"the key is {refusal.value.key!r}: {refusal.value}"
    assert words in str(refusal.value), str(refusal.value)


def test_an_array_needs_a_name_for_each_dimension():
    with pytest.raises(jt.UserError, match="name every dimension"):
        parameter_sharding(("embed",), (4, 4), jt.rules(), jt.make_mesh(**CUBE), "mine")


def test_axes_of_size_one_do_not_make_types_differ():
    mesh = jt.make_mesh(data=4, tensor=2)
    assert without_trivial_axes(P(("data", "fsdp"), "tensor", "stage"), mesh) == P("data", "tensor", None)


@pytest.mark.parametrize(("shape", "spec", "want"), [
    ((6, 16), P(None, None), P(None, "data")),  # the only dimension that divides
    ((16, 32), P(None, None), P(None, "data")),  # the largest
    ((16, 32), P("fsdp", None), P(("fsdp", "data"), None)),  # one that is gathered anyway
    ((2, 32), P("fsdp", None), P("fsdp", "data")),  # unless its pieces do not divide
    ((3, 5), P(None, None), P(None, None)),  # none
    ((16, 32), P("data", None), P("data", None)),  # has it already
])
def test_zero_spreads_over_data_what_it_can(shape, spec, want):
    mesh = jt.make_mesh(data=4, fsdp=2)
    assert spread(NamedSharding(mesh, spec), shape).spec == want


def test_outside_a_mesh_models_run_as_they_are():
    x = jnp.ones((4, 2))
    assert activations.constrain(x, "batch", "act_embed") is x and activations.gather(x, "embed", "mlp") is x
    assert activations.activation_spec("batch") is None and mesh_context.current() is None


def test_constrain_lays_out_and_refuses_what_does_not_divide():
    with mesh_context.use(jt.make_mesh(**CUBE), jt.rules("fsdp_tp")):
        x = jax.jit(lambda x: jt.constrain(x, "batch", "block_seq", "act_embed"))(jnp.ones((8, 4, 2)))
        assert x.sharding.spec == P(("data", "fsdp"), "tensor", None)
        with pytest.raises(jt.UserError, match=r"data\.seq_len"):
            jt.constrain(jnp.ones((8, 3, 2)), "batch", "block_seq", "act_embed")
    assert mesh_context.current() is None, "the mesh is left behind"


def test_importing_a_module_does_not_hide_the_function_of_its_name():
    import jaxtrain.run
    import jaxtrain.trainer.loop  # noqa: F401

    assert callable(jt.build) and callable(jt.train)


def test_the_largest_magnitude_of_16_bits_is_reduced_in_float32():
    """XLA for CPUs aborts the process where it promotes a maximum of 16 bits inside of a partly manual region."""
    mesh = jt.make_mesh(data=2, tensor=4)

    largest = jax.jit(jax.shard_map(lambda x: activations.peak(x)[None], mesh=mesh, in_specs=P("tensor"),
                                    out_specs=P("tensor"), axis_names={"tensor"}))
    x = jnp.arange(-8, 8, dtype=jnp.bfloat16)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("tensor")))
        program = f"{jax.make_jaxpr(largest)(x)}"
        assert ":f32[] = pmax" in program and ":bf16[] = pmax" not in program
        np.testing.assert_array_equal(largest(x), np.full(4, 8, jnp.bfloat16))
