"""The policies that run cuDNN's attention again in the backward pass, by the program lowered for NVIDIA GPUs.

Lowering needs no GPU, only a version of cuDNN that is never loaded.
"""

import re
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

import jaxtrain as jt
from jaxtrain.builder import build
from jaxtrain.config import remat_policies
from jaxtrain.kernels import attention
from jaxtrain.kernels.attention import cudnn_attention, xla_attention
from jaxtrain.models.rematerialization import wrap
from jaxtrain.plan import targets
from jaxtrain.plan.estimate import change, estimate
from jaxtrain.run import shapes_of
from jaxtrain.sharding import mesh_context

ONCE = ("attention", "attention_and_dots", "none")
B, T, H, K, LAYERS = 2, 64, 4, 64, 3


@pytest.fixture
def cudnn(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91800)
    monkeypatch.setattr(mesh_context, "platform", lambda: "cuda")


def step(policy):
    """Return the gradient of a stack of layers of one matmul and attention."""
    def layer(x, w, segments):
        q = x @ w
        return attention.attend(q, q, q, segments_BT=segments, backend="cudnn")

    def loss(x, w, segments):
        kept = wrap(remat_policies.policy(policy))(layer)
        return jax.lax.scan(lambda x, _: (kept(x, w, segments), None), x, length=LAYERS)[0].astype(jnp.float32).sum()

    shapes = (jax.ShapeDtypeStruct((B, T, H, K), jnp.bfloat16), jax.ShapeDtypeStruct((K, K), jnp.bfloat16),
              jax.ShapeDtypeStruct((B, T), jnp.int32))
    return jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*shapes)


@pytest.mark.parametrize("policy", [*ONCE, "full", "dots"])
def test_kernels_in_the_lowered_program(cudnn, policy):
    text = step(policy).lower(lowering_platforms=("cuda",)).as_text()
    calls = Counter(re.findall(r"__cudnn\$(\w+)", text))
    assert calls == {"fmhaScaleBiasSoftmax": 1 if policy in ONCE else 2, "fmhaScaleBiasSoftmaxBackward": 1}


@pytest.mark.parametrize("width", [8, 24])
def test_values_may_be_narrower_or_wider_than_keys(width, monkeypatch):
    """XLA's attention computes what the kernel is given, and in float32 all is that of unpadded arrays."""
    given = jax.nn.dot_product_attention

    def plain(*arrays, implementation, **options):
        assert implementation == "cudnn" and len({x.shape[-1] for x in arrays}) == 1
        return given(*arrays, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    q, k, v = (jax.random.normal(jax.random.key(n), (2, 16, 2, side)) for n, side in enumerate((16, 16, width)))
    segments = jnp.repeat(jnp.array([[1, 2], [3, 3]]), 8, 1)

    def loss(f):
        return jax.value_and_grad(lambda *x: jnp.square(f(*x)).sum(), (0, 1, 2))(q, k, v)

    found = loss(lambda *x: cudnn_attention.at_once(*x, segments, 0))
    wanted = loss(lambda *x: xla_attention.attention(*x, segments, 0, 0.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves([*equation.params.values()], is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize(("config", "kinds"), [("llama3_8b", 1), ("gemma3_1b", 2)])
def test_what_layers_keep_on_a_mesh(cudnn, config, kinds):
    """Kernels inside a manual region, one for each kind of layer; each layer's results are kept once."""
    config = jt.load_config(f"configs/{config}.py:tiny", {
        "mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2, "train.precision": "bfloat16", "train.remat": "attention"})
    run = build(config, devices=8, platform="cuda")
    found = [*equations(run.sharded.trace(shapes_of(run).abstract()).jaxpr.jaxpr)]
    kernels = Counter(one.primitive.name for one in found if one.primitive.name.startswith("dot_product_attention"))
    assert [*kernels.values()] == [kinds, kinds]  # forward, backward
    layers, batch, model = config.model.num_layers, config.data, config.model
    rows = batch.global_batch_size // config.train.accumulation
    result, kept = (rows, batch.seq_len, model.num_heads, model.head_dim), Counter()
    for scan in (one for one in found if one.primitive.name == "scan" and not one.params["reverse"]):
        stacked = [value.aval.shape[1:] for value in scan.outvars if value.aval.shape[:1] == (scan.params["length"],)]
        if result in stacked:  # a loop over layers
            kept.update({shape: stacked.count(shape) * scan.params["length"] for shape in stacked})
    assert kept[result] == layers
    # Sums come out of the manual region, which adds the split of its devices to the first dimension.
    sums = [shape for shape in kept if len(shape) == 3 and shape[-1] == batch.seq_len]
    assert sums and len(kept) == 3 and {*kept.values()} == {layers}, kept  # and what came into the layer


@cache
def predicted(policy):
    config = jt.load_config("configs/llama3_8b.py", {
        "mesh.fsdp": 8, "data.global_batch_size": 8, "train.attention": "cudnn"})
    return estimate(change(config, {"train.remat": policy, "train.accumulation": 1}), targets.TARGETS["h200"], 8)


@pytest.mark.slow
def test_the_planner_says_so():
    times = {policy: predicted(policy).time.parts["attention"] for policy in (*ONCE, "full", "dots")}
    for policy in ONCE:  # two products forward, five backward
        assert times[policy] == pytest.approx(7 / 9 * times["full"], rel=0.02)
    assert times["dots"] == times["full"]
    m, tokens = predicted("full").config.model, predicted("full").config.data.seq_len  # one row a device
    kept = m.num_layers * tokens * m.num_heads * (2 * m.head_dim + 4)
    saved = [predicted(policy).memory["saved activations"] for policy in ("full", "attention")]
    np.testing.assert_allclose(saved[1] - saved[0], kept, rtol=0.02)
