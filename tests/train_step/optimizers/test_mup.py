"""muP: initial values, steps, loss and gradients of every family against formulas written out by the parameters' paths.
"""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.config.part_tables import OPTIMIZERS
from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.models.make_model import make_model
from jaxtrain.train_step.optimizers import global_norm, make_optimizer, mup
from jaxtrain.train_step.optimizers.matrices import Dimensions
from jaxtrain.train_step.optimizers.muon import muon_dimensions
from tests.numerics import plain_mup, reference
from tests.tiers import exhaustive, slow, slow_if

BASES = ({"embed_dim": 8, "num_heads": 4}, {"embed_dim": 16, "num_heads": 8, "mlp_dim": 16, "head_dim": 2})


def base_of(family, number):
    """A base model, as keys; heads of Gemma grow only with its query_scale, those of DeepSeek with all their parts."""
    parts = {"rope_head_dim": 1, "value_head_dim": 3} if family == "deepseek_v3" else {}
    return {"model__mup_base": BASES[number] | parts} | ({"model__query_scale": 0} if family == "gemma3" else {})


@functools.cache
def made(family, number=None, **keys):
    """Parameters at step 0 and their logical names, of the config; without a number those without muP."""
    run = reference.build(family, **(base_of(family, number) if number is not None else {}), **keys)
    seed = np.int64(0)
    init = run._jitted_init.lower(seed).compile(compiler_options=reference.QUICKLY)
    return run, jax.device_get(init(seed)).all_params


def paths(tree, is_leaf=None):
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def check_initial(family, number, **keys):
    run, scaled = made(family, number, **keys)
    c, plain = run.config.model, paths(made(family, **keys)[1])
    scaled = paths(scaled)
    assert plain.keys() == scaled.keys()
    for path, value in plain.items():
        factor = plain_mup.initial(c, path) if not path.endswith(("bias", "scale")) else 1
        np.testing.assert_allclose(scaled[path], value * factor, rtol=3e-7, err_msg=path)


SOME = ("gpt2", "deepseek_v3", "gpt_oss")  # between them they have every kind of parameter


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=slow_if(family in SOME))
    for family in (*reference.FAMILIES, *reference.EXPERTS)])
def test_initial_values_are_scaled_by_the_kind_of_parameter(family):
    check_initial(family, number=1)


def test_a_reward_head_is_as_many_times_smaller_as_the_model_is_wide():
    """The factor is relative to the base: the head's own formula has the width in it."""
    keys = {"model__embed_dim": 512, "model__num_heads": 4, "model__mlp_dim": 8, "model__vocab_size": 8}
    c = reference.tiny("gpt2", model__mup_base={"embed_dim": 32, "num_heads": 4}, **keys).model
    head = jax.jit(lambda: nnx.state(make_model(c, scalar_head="reward_head", rngs=nnx.Rngs(0)))["reward_head"])()
    assert float(jnp.std(head["kernel"].get_value())) == pytest.approx(33**-0.5 / 16, rel=0.1)


def test_parameters_that_another_model_multiplies_otherwise_are_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for theirs, ours, fix in ((BASES[0], {}, "set it to {'embed_dim': 8, 'num_heads': 4}, as there"),
                              ({}, BASES[0], "leave it out, as there")):
        config = reference.tiny("gpt2", model__mup_base=theirs)
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        run = reference.build("gpt2", model__mup_base=ours, train__init_from=str(tmp_path))
        with pytest.raises(jt.UserError, match=f"model.mup_base: .* multiplied by other numbers; {fix}"):
            run.init()


def updates(name, axes, params, growth=None, **keys):
    """The first step of an optimizer from made-up gradients."""
    c = OptimizerConfig(name=name, weight_decay=keys.pop("weight_decay", 0.0), **keys)
    optimizer = make_optimizer(c, optax.constant_schedule(0.1), axes, growth)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    return paths(jax.jit(optimizer.update)(grads, optimizer.init(params), params)[0])


def matrix_of(names, shape):
    """Inputs x outputs of what Muon orthogonalizes, None of what it leaves to Adam."""
    if muon_dimensions(names) is None:
        return None
    found = Dimensions.of(names)
    return tuple(math.prod(shape[i] for i in side) for side in (found.rows, found.columns))


def check_steps(name, family, number, **keys):
    run = reference.build(family, **base_of(family, number), **keys)
    axes, params = run.layout.axes, jax.tree.map(lambda p: jnp.zeros(p.shape), run.abstract.params)
    plain, scaled = updates(name, axes, params), updates(name, axes, params, run.config.model.growth)
    names = paths(axes, lambda x: isinstance(x, tuple))
    for path, step in plain.items():
        factor = plain_mup.step(run.config.model, path, name, matrix_of(names[path], step.shape))
        np.testing.assert_allclose(scaled[path], step * np.float32(factor), rtol=1e-6, atol=1e-9, err_msg=path)


@pytest.mark.parametrize(("names", "initial", "adamw", "sgd"), [
    (("vocab", "embed"), 1, 1, 4), (("norm",), 1, 1, 4), (("layers", "heads", "head_dim"), 1, 1, 4),
    (("layers", "embed", "heads", "head_dim"), 1 / 2, 1 / 4, 1),
    (("layers", "heads", "head_dim", "embed"), 1 / 2, 1 / 4, 1),
    (("experts", "expert_embed", "expert_mlp"), 1 / 4, 1 / 4, 1 / 4), (("embed", "router"), 1 / 4, 1 / 4, 1 / 4),
    (("embed", "vocab"), 1 / 4, 1 / 4, 1 / 4), (("embed", None), 1 / 4, 1 / 4, 1 / 4), (("lora", "embed"), 1, 1, 4),
    ((None, "embed"), 1, 1, 4), ((None, None, "embed"), 1, 1, 4), ((None,), 1, 1, 1),
    (("heads", "head_dim", "lora"), 1 / 4, 1 / 4, 1 / 4)])
def test_factors_of_each_kind_of_parameter(names, initial, adamw, sgd):
    growth = {"embed": 4.0, "expert_embed": 4.0, "expert_mlp": 1.0, "norm": 4.0, "heads": 2.0, "head_dim": 2.0}
    with mup.growing(growth):
        found = mup.initial_factor(names)
    assert found == initial
    factors = [mup.adam_step, OPTIMIZERS.load("sgd").step_factor]
    assert [factor(names, (8,) * len(names), growth) for factor in factors] == [adamw, sgd]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS.own)
def test_steps_are_scaled_by_the_kind_of_parameter(name):
    check_steps(name, "llama", 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_steps_of_all_families_are_scaled(name):
    for family in ("alternating", "deepseek_v3") if name == "muon" else reference.FAMILIES | reference.EXPERTS:
        check_steps(name, family, 1)


@pytest.mark.slow
def test_adapters_are_scaled_by_their_own_sides():
    keys = {"lora__rank": 3, "lora__targets": "['*attention/*','*/gate']", "lora__alpha": 4.0}
    check_initial("llama", 1, **keys)
    for name in ("adamw", "sgd", "muon"):
        check_steps(name, "llama", 1, **keys)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_without_a_base_these_are_optax_s_own(name):
    """Bit for bit, and with states of the same structure, which older checkpoints have."""
    axes, params = {"w": ("embed", "mlp"), "b": ("norm",)}, {"w": jnp.ones((4, 6)), "b": jnp.ones(4)}
    c = OptimizerConfig(name=name, weight_decay=0.1)
    of_optax = getattr(optax, name)(optax.constant_schedule(0.1), b1=c.b1, b2=c.b2, weight_decay=0.1,
                                    mask={"w": True, "b": False})
    for growth in (None, {"embed": 1.0, "mlp": 1.0}):
        own = make_optimizer(c, optax.constant_schedule(0.1), axes, growth)
        assert jax.tree.structure(own.init(params)) == jax.tree.structure(of_optax.init(params))
        grads = {"w": jnp.full((4, 6), 0.3), "b": jnp.arange(4.0)}
        jax.tree.map(np.testing.assert_array_equal, own.update(grads, own.init(params), params),
                     of_optax.update(grads, of_optax.init(params), params))


def test_muon_with_normalized_neurons_goes_by_muon_s_rule_and_single_heads_are_refused():
    """A step of NorMuon has the Frobenius norm of Muon's, whose factor it is given."""
    axes, params = {"w": ("embed", "heads", "head_dim")}, {"w": jnp.zeros((8, 3, 4))}
    growth, grads = {"embed": 4.0, "heads": 2.0}, {"w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 3, 4)))}

    def step(growth, **keys):
        c = OptimizerConfig(name="muon", weight_decay=0.0, **keys)
        optimizer = make_optimizer(c, lambda n: 1.0, axes, growth)
        return optimizer.update(grads, optimizer.init(params), params)[0]["w"]

    factor = np.sqrt(2 / 4) * np.sqrt(max(8 / 4, 12 / 2) / 12)
    np.testing.assert_allclose(step(growth, normalize_neurons=True), factor * step(None, normalize_neurons=True), 1e-5)
    with pytest.raises(jt.UserError, match=r"optimizer\.split_heads: .*model\.mup_base"):
        step(growth, split_heads=True)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_decay_is_the_same_in_all_widths(name):
    axes, params = {"w": ("embed", "mlp")}, {"w": jnp.full((4, 6), 2.0)}
    growth = {"embed": 4.0, "mlp": 4.0}
    with_decay, without = (updates(name, axes, params, growth, weight_decay=decay)["w"] for decay in (0.1, 0.0))
    np.testing.assert_allclose(with_decay - without, -0.1 * 0.1 * 2.0, rtol=1e-4)


@pytest.mark.slow
def test_a_model_as_wide_as_its_base_is_the_same_program():
    own = reference.tiny("gpt2").model
    same = {"model__mup_base": {"embed_dim": own.embed_dim, "num_heads": own.num_heads}}
    texts = [reference.build("gpt2", **keys).lower().as_text() for keys in ({}, same)]
    assert texts[0] == texts[1]
    init = [reference.build("gpt2", **keys)._jitted_init.lower(0).as_text() for keys in ({}, same)]
    assert init[0] == init[1]


@pytest.mark.exhaustive
def test_gradients_of_heads_go_with_the_root_of_the_width():
    """Clipping by the norm of all gradients therefore differs between widths, which SGD's steps show."""
    for family, path, power in (("gpt2_untied", "output", 0.5), ("gpt2", "embed", -0.5)):
        sizes = []
        for width in (32, 512):
            run = reference.build(family, model__embed_dim=width, model__num_heads=width // 8, model__mlp_dim=64,
                                  model__mup_base={"embed_dim": 32, "num_heads": 4, "mlp_dim": 64})
            _, grads = run.value_and_grad(run.init(), reference.batch(0))
            sizes.append(float(global_norm(grads[path])))
        assert math.log(sizes[1] / sizes[0], 16) == pytest.approx(power, abs=0.05)


def off(family, number, mesh=(1, 1, 1), **keys):
    """Return the distance of a run's loss and gradients from the plain model in float32, relative to the largest."""
    run = reference.build(family, mesh, **base_of(family, number), **keys)
    params = made(family, number)[1]
    params = reference.with_biases(params) if family == "gpt_oss" else params
    batch = reference.batch(0)
    value, grads = run.value_and_grad(reference.start_from(run, params), batch)
    want, slopes = jax.jit(jax.value_and_grad(lambda p: reference.loss(run.config.model, p, batch)))(params)
    slopes = jax.tree_util.tree_map_with_path(  # that of a router's bias is its experts' excess of load
        lambda path, g, s: g if "['router']['bias']" in jax.tree_util.keystr(path) else s,
        jax.device_get(grads), slopes)
    return abs(float(value) / float(want) - 1), reference.worst(grads, slopes, 1e-3 * float(reference.norm_of(slopes)))


@pytest.mark.parametrize(("family", "number", "mesh", "keys"), [
    *slow(("gpt2", 1, (2, 1, 2), {"mesh__stage": 2, "train__accumulation": 2})),
    *(pytest.param(family, n % 2, (2, 2, 2), {"optimizer__zero_stage": 3},
                   marks=slow_if(family == "deepseek_v3"))
      for n, family in enumerate(("llama", "qwen3", "gemma3", "mixtral", "deepseek_v3", "gpt_oss"))),
    *exhaustive(("gpt2", 0, (1, 1, 1), {}),
                ("llama", 1, (1, 2, 2), {"mesh__context": 2, "model__mtp_loss_weight": 0})),
])
def test_loss_and_gradients_are_those_of_the_plain_model(family, number, mesh, keys):
    loss, (gradient, leaf) = off(family, number, mesh, **keys)
    assert loss < 1e-5 and gradient < 1e-5, (loss, gradient, leaf)


@pytest.mark.parametrize(("name", "keys"), [
    *slow(("muon", {"optimizer__zero_stage": 3})),
    *exhaustive(("adamw", {"optimizer__zero_stage": 2}), ("adamw", {"optimizer__offload": True}),
                ("adamw", {"optimizer__moment_dtype": "int8"}), ("adafactor", {"mesh__stage": 2, "mesh__fsdp": 1}))])
def test_same_losses_on_a_mesh_as_on_one_device(name, keys):
    def losses(mesh, **keys):
        run = reference.build("gpt2", mesh, model__mup_base=BASES[0], optimizer__name=name,
                              optimizer__learning_rate=0.03, **keys)
        step, state, found = reference.compiled(run), reference.start_from(run, made("gpt2", 0)[1]), []
        for n in range(4):
            state, metrics = step(state, run.sharded.place(reference.batch(n)))
            found.append(float(metrics["loss"]))
        return np.array(found)

    alone = losses((1, 1, 1), **{key: value for key, value in keys.items() if "moment" in key})
    np.testing.assert_allclose(losses((2, 2, 2), **keys), alone, rtol=1e-5)


@pytest.mark.parametrize(("keys", "message"), [
    ({"mup_base": {"embed_dim": 8}}, "model.mup_base: .* give its embed_dim and num_heads"),
    ({"mup_base": {"embed_dim": 8, "num_head": 2}}, "model.mup_base.num_head: .* did you mean 'num_heads'"),
    ({"mup_base": {"embed_dim": 8, "num_heads": 0}}, "model.mup_base.num_heads: 0 is not a width"),
    ({"mup_base": {"embed_dim": 8, "num_heads": 2, "kv_rank": 4}}, "model.mup_base.kv_rank: it is not a width"),
])
def test_a_base_that_is_none_is_refused(keys, message):
    with pytest.raises(jt.UserError, match=message):
        reference.tiny("gpt2", **{f"model__{key}": value for key, value in keys.items()})


@pytest.mark.parametrize(("base", "keys", "message"), [
    ({}, {}, "model.mup_base.rope_head_dim: heads are 2 times as wide .* does not say what model.rope_head_dim=2 was"),
    ({"rope_head_dim": 1}, {}, "model.mup_base.value_head_dim: .* what model.value_head_dim=6 was there; give that"),
    ({"rope_head_dim": 2}, {}, "model.rope_head_dim: 2 is 1 times its width in model.mup_base, and head_dim 2 times"),
    ({"rope_head_dim": 1, "value_head_dim": 6}, {}, "model.value_head_dim: 6 is 1 times"),
    ({"head_dim": 4, "rope_head_dim": 1}, {}, "model.rope_head_dim: 2 is 2 times its width .* head_dim 1 times"),
    ({"rope_head_dim": 1}, {"value_head_dim": 0}, ""), ({"head_dim": 4}, {}, ""),
])
def test_all_parts_of_a_latent_head_grow_alike(base, keys, message):
    def made():
        model = reference.EXPERTS["deepseek_v3"] | keys | {"embed_dim": 32, "vocab_size": 64}
        return jt.make_config({"model": model | {"mup_base": {"embed_dim": 8, "num_heads": 4} | base}})

    if message:
        with pytest.raises(jt.UserError, match=message):
            made()
    else:
        assert dataclasses.replace(made().model).growth["head_dim"] == 4 / made().model.mup_base.get("head_dim", 2)


def test_a_base_can_be_given_on_the_command_line():
    words = {"model.mup_base.embed_dim": "8", "model.mup_base.num_heads": "2"}
    assert jt.make_config({}, words).model.mup_base == {"embed_dim": 8, "num_heads": 2}


# The learning rates that are tried: these powers of two, and the family that is trained.
GRIDS = {"adamw": ("llama", range(-10, -3)), "muon": ("llama", range(-11, -4)), "sgd": ("gpt2", range(-8, -1))}


def losses_by_rate(optimizer, width, transfer):
    """Mean losses of the last 10 of 60 steps at each learning rate, of a model that learns a text."""
    family, powers = GRIDS[optimizer]
    keys = dict(model__embed_dim=width, model__num_heads=width // 8, model__num_kv_heads=width // 8, model__head_dim=8,
                model__mlp_dim=2 * width, model__mup_base={"embed_dim": 32, "num_heads": 4} if transfer else {})
    run = reference.build(family, **keys)
    batches = jax.tree.map(lambda *x: np.stack(x), *(reference.batch(n, rows=16) for n in range(60)))

    def mean(params, batch):
        loss, weight, _ = run.objective.loss(params, batch)
        return loss / weight

    @jax.jit
    def last_losses(params, rate):
        made = make_optimizer(OptimizerConfig(name=optimizer, weight_decay=0.0), lambda count: rate, run.layout.axes,
                              run.config.model.growth)

        def step(carry, batch):
            loss, grads = jax.value_and_grad(mean)(carry[0], batch)
            steps, state = made.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], steps), state), loss
        return jax.lax.scan(step, (params, made.init(params)), batches)[1][-10:].mean()

    params = run.init().params
    return np.nan_to_num([float(last_losses(params, 2.0**power)) for power in powers], nan=np.inf)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", GRIDS)
def test_the_best_learning_rate_is_that_of_a_narrow_model(optimizer):
    """The model is 8 times as wide; without muP its best rate is lower by a factor of 2 at least."""
    found = {name: losses_by_rate(optimizer, *of) for name, of in (
        ("narrow", (32, False)), ("wide", (256, True)), ("wide without", (256, False)))}
    best = {name: int(np.argmin(losses)) for name, losses in found.items()}
    assert best["wide"] == best["narrow"] > best["wide without"], found
    assert 0 < best["narrow"] < len(GRIDS[optimizer][1]) - 1, found  # the grid has both sides of it
