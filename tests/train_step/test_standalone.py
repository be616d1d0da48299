"""A module, a pytree and losses that know nothing of sharding, against a plain loop of jax.grad and optax."""

import dataclasses
import functools
import io
import warnings
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from tests.tiers import exhaustive, slow, slow_if

V, D, F, B, T, STEPS = 16, 8, 16, 32, 6, 3
AXES = {"table": ("vocab", "embed"), "up": ("embed", "mlp"), "layers": [{"down": ("mlp", "embed")}, None]}
MESHES = [{"data": 8}, {"fsdp": 8}, {"data": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}]


def make_tree():
    keys = jax.random.split(jax.random.key(0), 3)
    return {"table": jax.random.normal(keys[0], (V, D)), "up": jax.random.normal(keys[1], (D, F)),
            "layers": [{"down": 0.3 * jax.random.normal(keys[2], (F, D))}, jnp.zeros(D)]}


def logits(table, up, down, bias, tokens):
    x = table[tokens]
    return (x + jax.nn.gelu(x @ up) @ down + bias) @ table.T


def weighted(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jt.Weighted((losses * batch["weights"]).sum(), batch["weights"].sum())


def tree_loss(p, batch):
    return weighted(logits(p["table"], p["up"], p["layers"][0]["down"], p["layers"][1], batch["tokens"]), batch)


class Model(nnx.Module):
    def __init__(self):
        tree = make_tree()
        self.table = nnx.Param(tree["table"], axes=("vocab", "embed"))
        self.up = nnx.Param(tree["up"], axes=("embed", "mlp"))
        self.down = nnx.Param(tree["layers"][0]["down"], axes=("mlp", "embed"))
        self.bias = nnx.Param(tree["layers"][1])

    def __call__(self, tokens):
        return logits(self.table[...], self.up[...], self.down[...], self.bias[...], tokens)


def module_loss(model, batch):
    return weighted(model(batch["tokens"]), batch)


def as_tree(params):
    """The module's parameters in the shape of the pytree's."""
    if "layers" in params:
        return params
    return {"table": params["table"], "up": params["up"], "layers": [{"down": params["down"]}, params["bias"]]}


def batches():
    """Rows of very unequal numbers of tokens that count."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        yield {"tokens": rng.integers(0, V, (B, T)), "targets": rng.integers(0, V, (B, T)),
               "weights": (rng.random((B, T)) < rng.random((B, 1)) ** 2).astype(np.float64)}


def optimizer():
    return optax.adamw(1e-2, b2=0.9, eps=1e-4)  # an eps that does not blow up the rounding of tiny gradients


def mean_loss(params, batch):
    found = tree_loss(params, batch)
    return found.total / found.weight


@functools.cache
def plain(clip_norm):
    """One device, one micro-batch, no jaxtrain. Returns losses, gradient norms, parameters after each step."""
    params, opt = make_tree(), optimizer()
    opt_state, out = opt.init(params), []
    for batch in batches():
        loss, grads = jax.jit(jax.value_and_grad(mean_loss))(params, batch)
        norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
        if clip_norm:
            grads = jax.tree.map(lambda g, norm=norm: g * jnp.minimum(1, clip_norm / norm), grads)
        updates, opt_state = opt.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        out.append((loss, norm, params))
    return out


def close(a, b, rtol=1e-5):
    """Relative to the largest number of each array."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * float(np.abs(y).max()))


def run(kind, mesh, init=None, **settings):
    """Losses, gradient norms and parameters as `plain` gives them."""
    loss, make, axes = {"module": (module_loss, Model, None), "tree": (tree_loss, make_tree, AXES)}[kind]
    step = jt.make_train_step(loss, optimizer(), mesh=mesh, axes=axes, **settings)
    state, out = step.init(make if init is None else init), []
    for batch in batches():
        state, metrics = step(state, batch)
        out.append((metrics["loss"], metrics["grad_norm"], as_tree(jax.device_get(state.params))))
    assert int(state.step) == STEPS and int(metrics["skipped"]) == 0
    return out


# ------------------------------------------------------------------------------------------------------------ numbers
# Every value of every setting, on every mesh, though not their whole product.
CASES = [(kind, mesh, accumulation, zero, clip)
         for i, mesh in enumerate(MESHES) for j, (kind, accumulation) in enumerate(
             [("module", 1), ("tree", 4), ("module", 4)])
         for zero, clip in [((i + j) % 4, 0.5 if (i + j) % 2 else 0.0)]]
QUICK, SLOW = (1, 6), (9,)


@pytest.mark.parametrize("kind, mesh, accumulation, zero, clip", [
    pytest.param(*case, marks=[] if i in QUICK else slow_if(i in SLOW))
    for i, case in enumerate(CASES)])
def test_numbers_of_one_device(kind, mesh, accumulation, zero, clip):
    close(run(kind, jt.make_mesh(**mesh), accumulation=accumulation, zero_stage=zero, clip_norm=clip), plain(clip))


def test_gradients():
    """Under plain SGD at rate 1 the parameters move by the gradient itself."""
    batch, params = next(batches()), make_tree()
    grads = jax.jit(jax.grad(mean_loss))(params, batch)
    step = jt.make_train_step(tree_loss, optax.sgd(1.0), mesh=jt.make_mesh(data=2, fsdp=2, tensor=2), axes=AXES,
                              accumulation=2, zero_stage=3)
    state, _ = step(step.init(params), batch)
    moved = jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), params, state.params)
    close(moved, grads)


def test_mean_loss_and_evaluate():
    mesh, batch = jt.make_mesh(fsdp=2, tensor=2), next(batches())
    mean = jt.make_train_step(lambda p, b: mean_loss(p, {**b, "weights": jnp.ones_like(b["weights"])}), optimizer(),
                              mesh=mesh, axes=AXES, accumulation=4)
    state = mean.init(make_tree)
    total, weight = mean.evaluate(state, batch)
    assert float(weight) == 1
    _, metrics = mean(state, batch)
    close(metrics["loss"], total)
    pair = jt.make_train_step(tree_loss, optimizer(), mesh=mesh, axes=AXES)
    total, weight = pair.evaluate(pair.init(make_tree), batch)
    assert float(weight) == batch["weights"].sum()
    close(total / weight, plain(0)[0][0])


@pytest.mark.parametrize("accumulation", [*exhaustive(1), 4])
def test_further_sums_are_metrics_of_the_whole_batch(accumulation):
    def loss(params, batch):
        found = tree_loss(params, batch)
        return jt.Weighted(found.total, found.weight, {"first": (batch["weights"] * (batch["targets"] == 1)).sum()})

    batch = next(batches())
    step = jt.make_train_step(loss, optimizer(), mesh=jt.make_mesh(data=2, fsdp=2), axes=AXES,
                              accumulation=accumulation)
    _, metrics = step(step.init(make_tree), batch)
    close(metrics["first"], (batch["weights"] * (batch["targets"] == 1)).sum() / batch["weights"].sum())
    close(metrics["loss"], plain(0)[0][0])


@pytest.mark.slow
def test_keys_follow_from_seed_step_and_micro_batch():
    def loss(params, batch, key):
        return jt.Weighted(tree_loss(params, batch).total, metrics={"drawn": jax.random.uniform(key)})

    def drawn(accumulation, steps, seed=3):
        step = jt.make_train_step(loss, optax.sgd(0.0), mesh=jt.make_mesh(data=2), axes=AXES, seed=seed,
                                  accumulation=accumulation)
        state, found = step.init(make_tree), []
        for _ in range(steps):
            state, metrics = step(state, next(batches()))
            found.append(float(metrics["drawn"]))
        return found

    def of(n, *micro):
        key = jax.random.fold_in(jax.random.key(3), n)
        return float(jax.random.uniform(jax.random.fold_in(key, *micro) if micro else key))

    assert drawn(1, 3) == pytest.approx([of(0), of(1), of(2)])
    assert drawn(2, 2) == pytest.approx([(of(n, 0) + of(n, 1)) / 2 for n in range(2)])
    assert drawn(1, 1, seed=4) != pytest.approx([of(0)])


@pytest.mark.parametrize("precision", [*slow("bfloat16"), "float16"])
def test_low_precision(precision):
    seen = []

    def loss(params, batch):
        seen.append(jax.tree.leaves(params)[0].dtype)
        return tree_loss(params, batch)

    step = jt.make_train_step(loss, optimizer(), mesh=jt.make_mesh(data=2, fsdp=2, tensor=2), axes=AXES, accumulation=2,
                              precision=precision)
    state, metrics = step(step.init(make_tree), next(batches()))
    while int(metrics["skipped"]) == int(state.step):  # until the loss scale is low enough nothing changes
        state, metrics = step(state, next(batches()))
    assert set(seen) == {jnp.dtype(precision)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    close(metrics["loss"], plain(0)[0][0], rtol=2e-2)
    close(metrics["grad_norm"], plain(0)[0][1], rtol=2e-2)
    assert ("loss_scale" in metrics) == (precision == "float16")


@pytest.mark.parametrize("name", ["router", "bias"])
def test_no_name_of_a_parameter_keeps_it_from_low_precision(name):
    """A router of one of our models is computed in float32, and its bias has an update of its own: by metadata."""
    seen = []

    def loss(params, batch):
        seen.append(params[name]["kernel"].dtype)
        return (batch @ params[name]["kernel"]).astype(jnp.float32).mean()

    step = jt.make_train_step(loss, optax.sgd(0.5), mesh=jt.make_mesh(data=2), precision="bfloat16")
    state, _ = step(step.init({name: {"kernel": jnp.ones((4, 2))}}), np.ones((2, 4), jnp.bfloat16))
    assert set(seen) == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(state.params[name]["kernel"], np.full((4, 2), 0.75))


def test_float16_halves_the_scale_on_overflow():
    step = jt.make_train_step(lambda p, b: (b * p["w"]).sum().astype(jnp.float32) * 100, optax.sgd(0.1),
                              mesh=jt.make_mesh(data=2), precision="float16")
    state, metrics = step(step.init({"w": jnp.ones(4)}), np.ones((2, 4), np.float16))
    assert int(metrics["skipped"]) == 1 and float(metrics["loss_scale"]) == 2.0**14
    np.testing.assert_array_equal(state.params["w"], np.ones(4))


def test_not_finite_changes_nothing_and_counts():
    good, bad = next(batches()), next(batches())
    bad["weights"][3, 2] = np.nan
    step = jt.make_train_step(tree_loss, optimizer(), mesh=jt.make_mesh(data=2, tensor=2), axes=AXES, accumulation=2)
    state, _ = step(step.init(make_tree), good)
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, bad)
    assert int(metrics["skipped"]) == 1 and int(state.step) == 2
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before)
    state, metrics = step(state, good)
    assert int(metrics["skipped"]) == 1 and np.isfinite(float(metrics["loss"]))
    assert not np.array_equal(before[0]["up"], state.params["up"])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_without_weight_changes_nothing_and_counts(accumulation):
    good, empty = next(batches()), next(batches())
    empty["weights"][:] = 0
    step = jt.make_train_step(tree_loss, optax.adamw(1e-2, weight_decay=0.1), mesh=jt.make_mesh(data=2), axes=AXES,
                              accumulation=accumulation)
    state, _ = step(step.init(make_tree), good)
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, empty)
    assert int(metrics["skipped"]) == 1 and int(state.step) == 2 and float(metrics["loss"]) == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before)


# ----------------------------------------------------------------------------------------------------- where things lie
def test_layout_and_report():
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    step = jt.make_train_step(tree_loss, optimizer(), mesh=mesh, axes=AXES, zero_stage=1)
    state = step.init(make_tree)
    specs = jax.tree.map(lambda x: str(x.sharding.spec), state.params)
    assert specs["table"] == "P('tensor', 'fsdp')" and specs["up"] == "P('fsdp', 'tensor')"
    assert specs["layers"][1] == "P('fsdp',)"  # no names: spread over fsdp
    moments = state.opt_state[0].mu
    assert moments["up"].sharding.shard_shape((D, F)) == (D // 4, F // 2)  # and over data
    assert state.params["up"].addressable_shards[0].data.shape == (D // 2, F // 2)
    step.report(file := io.StringIO())
    assert "layers/0/down" in file.getvalue() and "vocab, embed" in file.getvalue()


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_micro_batches_stay_split(accumulation):
    seen = []

    def loss(params, batch):
        tokens = batch["tokens"]
        jax.debug.inspect_array_sharding(tokens, callback=lambda s: seen.append(s.shard_shape(tokens.shape)))
        return tree_loss(params, batch)

    step = jt.make_train_step(loss, optimizer(), mesh=jt.make_mesh(data=2, fsdp=2, tensor=2), axes=AXES,
                              accumulation=accumulation)
    step.abstract(make_tree)
    step.compiled(next(batches()))
    assert set(seen) == {(B // accumulation // 4, T)}


def test_activations_stay_split_as_the_batch_is():
    """Without `gather` the compiler splits some of them as the weights are, and moves them about."""
    shapes = {"table": (256, 128), "up": (128, 512), "layers": [{"down": (512, 128)}, (128,)]}
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))

    def moves(gather):
        step = jt.make_train_step(tree_loss, optimizer(), mesh=jt.make_mesh(fsdp=8), axes=AXES, gather=gather)
        step.abstract(params)
        return "all-to-all(" in step.compiled(next(batches())).as_text()

    assert moves(gather=False) and not moves(gather=True)


def test_constrain_works_in_the_loss():
    seen = []

    def loss(params, batch):
        x = jt.constrain(batch @ params["w"], "batch", "act_embed")  # where the compiler would keep mlp's split
        jax.debug.inspect_array_sharding(x, callback=lambda s: seen.append(s.shard_shape(x.shape)))
        return jnp.square(x).mean()

    step = jt.make_train_step(loss, optax.sgd(0.1), mesh=jt.make_mesh(data=2, tensor=4), axes={"w": ("embed", "mlp")})
    step.abstract({"w": jnp.ones((4, 8))})
    step.compiled(np.ones((4, 4), np.float32))
    assert seen == [(2, 8)]


# -------------------------------------------------------------------------------------------------- what may be passed
def test_concrete_values_stay_the_callers():
    model, tokens = Model(), next(batches())["tokens"]
    expected = Model()(tokens)
    for sizes in ({"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}):  # on one device the state must not be the model
        step = jt.make_train_step(module_loss, optimizer(), mesh=jt.make_mesh(**sizes))
        state = step.init(model)
        back = step.module(state)
        state, _ = step(state, next(batches()))
        close(model(tokens), expected)
        close(back(tokens), expected)
    assert not np.allclose(step.module(state)(tokens), expected, rtol=1e-5)


def test_flax_metadata():
    """Names under Flax's own key, logical ones and mesh axes; a context with a mesh around it does no harm."""
    class Net(nnx.Module):
        def __init__(self):
            def named(*names):
                return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
            self.a = nnx.Linear(8, 16, kernel_init=named("embed", "mlp"), rngs=nnx.Rngs(0))
            self.b = nnx.Linear(16, 4, kernel_init=named("tensor"), rngs=nnx.Rngs(1))

    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    step = jt.make_train_step(lambda net, x: jnp.square(net.b(net.a(x))).mean(), optax.sgd(0.1), mesh=mesh)
    with jax.set_mesh(mesh):
        state, _ = step(step.init(Net), np.ones((4, 8), np.float32))
    assert str(state.params["a"]["kernel"].sharding.spec) == "P('fsdp', 'tensor')"
    assert str(state.params["b"]["kernel"].sharding.spec) == "P('tensor', None)"


def test_linen_boxes():
    net = nn.Dense(16, kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")))
    step = jt.make_train_step(lambda variables, x: jnp.square(net.apply(variables, x)).mean(), optax.sgd(0.1),
                              mesh=jt.make_mesh(fsdp=2, tensor=2))
    state, _ = step(step.init(lambda: net.init(jax.random.key(0), jnp.ones((1, 8)))), np.ones((4, 8), np.float32))
    kernel = state.params["params"]["kernel"]
    assert isinstance(kernel, nn.LogicallyPartitioned)
    assert str(kernel.value.sharding.spec) == "P('fsdp', 'tensor')"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    a: jax.Array
    rest: list


def test_any_pytree_and_a_prefix_of_axes():
    def loss(p, x):
        assert isinstance(p, Pair) and isinstance(p.rest, list)
        return jnp.square(x @ p.a @ p.rest[0] @ p.rest[1]).mean()

    step = jt.make_train_step(loss, optax.sgd(0.1), mesh=jt.make_mesh(fsdp=2, tensor=2),
                              axes=Pair(("embed", "mlp"), ("mlp", "embed")))
    state = step.init(Pair(jnp.ones((4, 4)), [jnp.ones((4, 4)), np.ones((4, 4))]))
    state, _ = step(state, np.ones((2, 4), np.float32))
    assert [str(leaf.sharding.spec) for leaf in jax.tree.leaves(state.params)] == [
        "P('fsdp', 'tensor')", "P('tensor', 'fsdp')", "P('tensor', 'fsdp')"]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Scaled:
    """A pytree as Equinox modules are: a function, a number and a flag are leaves; a static field is structure."""

    weights: list
    activation: Any
    rate: float
    training: bool
    name: str

    def tree_flatten_with_keys(self):
        fields = ("weights", "activation", "rate", "training")
        return [(jax.tree_util.GetAttrKey(field), getattr(self, field)) for field in fields], self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(*children, name)

    def __call__(self, x):
        assert self.training is True and isinstance(self.rate, float) and self.name == "net"
        return self.activation(x @ self.weights[0]) @ self.weights[1] * self.rate


@pytest.mark.parametrize("as_function", [True, False])
def test_leaves_that_are_no_arrays_stay_as_they_are(as_function):
    """They stay on a mesh, with the gradient of the arrays alone, and for more steps than one."""
    def model():
        one, two = jax.random.split(jax.random.key(0))
        return Scaled([jax.random.normal(one, (4, 8)), jax.random.normal(two, (8, 2))], jnp.tanh, 0.5, True, "net")

    def loss(net, x):
        return jnp.square(net(x) - x[:, :2]).mean()

    x, rate = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32), 0.1
    step = jt.make_train_step(loss, optax.sgd(rate), mesh=jt.make_mesh(data=2, tensor=2),
                              axes=Scaled([("embed", "mlp"), ("mlp", "embed")], None, None, None, "net"))
    state, weights = step.init(model if as_function else model()), model().weights
    assert len(jax.tree.leaves(state.params)) == 2 and step.name == "Scaled"
    for _ in range(2):
        value, gradient = jax.value_and_grad(lambda w: loss(dataclasses.replace(model(), weights=w), x))(weights)
        weights = [w - rate * g for w, g in zip(weights, gradient, strict=True)]
        state, metrics = step(state, x)
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    trained = step.module(state)
    assert (trained.activation, trained.rate, trained.name) == (jnp.tanh, 0.5, "net")
    close(trained.weights, weights)


def test_floats_are_parameters_in_dicts_and_static_in_classes():
    def loss(p, x):
        return jnp.square(x * p["slope"] + p["net"].rate).mean()

    step = jt.make_train_step(loss, optax.sgd(0.1), mesh=jt.make_mesh())
    state = step.init({"slope": 2.0, "net": Scaled([], None, 0.5, True, "net")})
    state, metrics = step(state, np.ones((2,), np.float32))
    assert float(metrics["loss"]) == 2.5**2 and len(jax.tree.leaves(state.params)) == 1
    np.testing.assert_allclose(state.params["slope"], 2.0 - 0.1 * 5)
    assert step.module(state)["net"].rate == 0.5


def test_tuples_of_parameters_are_not_taken_for_names():
    """The layout of JAX's own tutorials: as many arrays in a tuple as one of them has dimensions."""
    def loss(p, x):
        for weight, bias in p:
            x = jnp.tanh(x @ weight + bias)
        return jnp.square(x).mean()

    def specs(kind, axes=None, **mesh):
        step = jt.make_train_step(loss, optax.sgd(0.1), mesh=jt.make_mesh(fsdp=2, **mesh), axes=axes)
        state = step.init([kind([jnp.ones((4, 4)), jnp.ones(4)]) for _ in range(2)])
        state, metrics = step(state, np.ones((2, 4), np.float32))
        return [str(leaf.sharding.spec) for leaf in jax.tree.leaves(state.params)], float(metrics["loss"])

    assert specs(tuple) == specs(list) and specs(tuple)[0][0] == "P('fsdp', None)"
    named = [(("embed", "mlp"), ("mlp",))] * 2
    assert specs(tuple, named, tensor=2)[0] == ["P('fsdp', 'tensor')", "P('tensor',)"] * 2
    assert specs(tuple, [(None, None)] * 2) == specs(tuple)


def test_one_bare_array():
    step = jt.make_train_step(lambda w, x: jnp.square(x @ w).mean(), optax.adam(0.1),
                              mesh=jt.make_mesh(fsdp=2, tensor=2), axes=("embed", "mlp"))
    state = step.init(jnp.ones((4, 4)))
    assert state.opt_state[0].mu.sharding.shard_shape((4, 4)) == (2, 2)


def test_compiled_once_per_shape():
    @chex.assert_max_traces(n=2)
    def loss(params, x):
        return jnp.square(x * params["w"]).mean()

    step = jt.make_train_step(loss, optax.adam(0.1), mesh=jt.make_mesh(data=2))
    state = step.init({"w": jnp.ones(4)})
    for size in (4, 4, 8, 4):
        state, _ = step(state, np.ones((size, 4)))
    state, _ = step(step.init({"w": jnp.zeros(4)}), jnp.ones((4, 4)))  # equal shapes, so the same executable


def test_abstract_mesh_lowers():
    mesh = jt.make_mesh(data=128, fsdp=4, tensor=2, devices=1024)
    step = jt.make_train_step(tree_loss, optimizer(), mesh=mesh, axes=AXES)
    abstract = step.abstract(make_tree)
    assert abstract.params["up"].sharding.shard_shape((D, F)) == (D // 4, F // 2)
    batch = {key: jax.ShapeDtypeStruct((512, T), value.dtype) for key, value in next(batches()).items()}
    assert "num_partitions = 1024" in step.lower(batch).as_text()


# ----------------------------------------------------------------------------------------------------------- mistakes
def mistake(loss=tree_loss, params=make_tree, batch=None, mesh=None, axes=AXES, **settings):
    mesh = mesh or jt.make_mesh(data=2, fsdp=2, tensor=2)
    step = jt.make_train_step(loss, optimizer(), mesh=mesh, axes=axes, **settings)
    step(step.init(params), next(batches()) if batch is None else batch)


def pair(second):
    return lambda params, batch: (tree_loss(params, batch).total, second)


@pytest.mark.parametrize("arguments, message", [
    (dict(loss=pair({"accuracy": 1.0})), r"loss_fn: it returned \(an array of shape \(\), a dict\); return a scalar"),
    (dict(loss=pair(0.5)), r"loss_fn: it returned a pair, which may be .*; return jt.Weighted\(total, weight\), or"),
    (dict(loss=lambda p, b: jt.Weighted(tree_loss(p, b).total, metrics={"loss": 1.0})), "a metric 'loss' of its own"),
    (dict(loss=lambda p, b: jt.Weighted(b["tokens"])), r"it returned Weighted\(an array of shape \(32, 6\)"),
    (dict(loss=lambda p, b: b["tokens"]), r"loss_fn: it returned an array of shape \(32, 6\)"),
    (dict(loss=lambda p, b: None), "loss_fn: it returned a NoneType"),
    (dict(batch={"tokens": np.ones((6, T))}), "batch: 6 examples do not divide over 4 batch shards .* multiple of 4$"),
    (dict(accumulation=16), "batch: 32 examples .* accumulation=16; make it a multiple of 64"),
    (dict(batch={"a": np.ones((4, 1)), "b": np.ones((8, 1))}), r"batch: .* first dimensions \[\[4\], \[8\]\]"),
    (dict(batch={"a": np.ones((4, 1)), "b": 1.0}), r"batch: .* first dimensions \[\[\], \[4\]\]"),
    (dict(batch={}), "batch: its 0 arrays"),
    (dict(axes={**AXES, "up": ("embd", "mlp")}), "'embd': no rule sets which mesh axis .*; did you mean 'embed'"),
    (dict(axes={**AXES, "up": ("embed",)}), "up: it has 2 dimensions and 1 logical names"),
    (dict(axes={**AXES, "up": ("vocab", "mlp")}), "both map onto mesh axis 'tensor'"),
    (dict(axes={"up": None}), "axes: its structure is not that of the parameters"),
    (dict(params={"w": jnp.ones((4, 3))}, axes={"w": ("embed", "mlp")}), "3 does not divide .* 'mlp' of w"),
    (dict(params={"n": jnp.arange(4)}, axes=None), "n: an array of int32 has no gradient"),
    (dict(params={}, axes=None), "init: it was given no parameters"),
    (dict(params=lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)), axes=None), "mean: .* state of type BatchStat"),
    (dict(accumulation=0), "accumulation: 0 is not a number"),
    (dict(clip_norm=-1.0), "clip_norm: -1.0 is not a norm"),
    (dict(precision="bf16"), "precision: 'bf16' is not supported; did you mean 'bfloat16'"),
    (dict(zero_stage=4), "zero_stage: 4 is not supported"),
    (dict(rules="fsdp"), "rules: 'fsdp' is not a table of rules"),
    (dict(mesh=jax.sharding.AbstractMesh((8,), ("x",))), "mesh: .* lacks the axes"),
])
def test_mistakes_in_one_sentence(arguments, message):
    with pytest.raises(jt.UserError, match=message) as error:
        mistake(**arguments)
    assert "\n" not in str(error.value)


def test_step_before_init():
    step = jt.make_train_step(tree_loss, optimizer(), mesh=jt.make_mesh(data=2))
    with pytest.raises(jt.UserError, match=r"call its init\(...\)"):
        step(None, next(batches()))


@pytest.mark.parametrize("axis", ["tensor", "stage"])
def test_idle_mesh_axis_is_told(axis):
    mesh = jt.make_mesh(data=2, **{axis: 2})
    with pytest.warns(UserWarning, match=f"mesh axis {axis}=2: no parameter is split over it"):
        jt.make_train_step(tree_loss, optimizer(), mesh=mesh).abstract(make_tree)


def test_a_mesh_axis_that_is_used_is_not_told_of():
    mesh = jt.make_mesh(data=2, tensor=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jt.make_train_step(tree_loss, optimizer(), mesh=mesh, axes=AXES).abstract(make_tree)


def test_another_module_is_evaluated_as_itself():
    class Scaled(nnx.Module):
        def __init__(self, by):
            self.by, self.weight = by, nnx.Param(jnp.ones(()))

        def __call__(self):
            return self.by * self.weight[...]

    step = jt.make_train_step(lambda module, batch: module() * batch.mean(), optax.sgd(0.0), mesh=jt.make_mesh())
    batch = np.ones((8,), np.float32)
    for by in (2.0, 5.0):
        state = step.init(Scaled(by))
        total, weight = step.evaluate(state, batch)
        assert float(total / weight) == by
