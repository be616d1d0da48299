"""The TPU kernel, interpreted on CPUs, against attention in plain operations: loss and all gradients in float32."""

import dataclasses
import functools
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import subjaxprs

import jaxtrain as jt
from jaxtrain.config import remat_policies
from jaxtrain.errors import UserError
from jaxtrain.kernels import attention
from jaxtrain.kernels.attention import splash_attention
from jaxtrain.kernels.attention.splash_attention import block_of
from jaxtrain.models.rematerialization import wrap
from jaxtrain.sharding import activations, mesh_context
from tests.numerics import reference

SLOW = pytest.mark.slow


@dataclasses.dataclass
class Case:
    """Shapes of one call."""

    T: int = 256
    H: int = 4
    G: int = 2
    K: int = 16
    V: int = 16
    packed: bool = True
    window: int = 0
    soft_cap: float = 0.0


CASES = {
    "packed, grouped": Case(),
    "one document": Case(packed=False, G=4),
    "one key head, window": Case(G=1, window=50),
    "window of one": Case(window=1, packed=False),
    "soft-cap": Case(soft_cap=2.0, window=70),
    "padded to 128, latent attention's widths": Case(T=130, H=2, K=24, V=16),
    "two backward kernels": Case(T=640, H=2, G=1, window=130),
}


@functools.cache
def gradients(name, backend):
    """Return output, dq, dk, dv."""
    c = CASES[name]
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, c.T, heads, width)).astype(np.float32)
               for heads, width in ((c.H, c.K), (c.G, c.K), (c.G, c.V)))
    segments = np.cumsum(rng.random((2, c.T)) < 0.02, 1).astype(np.int32) if c.packed else None
    pull = rng.normal(size=(2, c.T, c.H, c.V)).astype(np.float32)

    def loss(q, k, v):
        out = attention.attend(q, k, v, segments_BT=segments, window=c.window, soft_cap=c.soft_cap, backend=backend)
        return (pull * out).sum(), out
    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, *grads


@pytest.mark.parametrize("name", [*list(CASES)[:2], *(
    pytest.param(name, marks=pytest.mark.exhaustive if name in ("one key head, window", "window of one") else SLOW)
    for name in list(CASES)[2:])])
def test_numbers_are_those_of_plain_operations(name):
    for what, got, want in zip(("output", "dq", "dk", "dv"), gradients(name, "splash"), gradients(name, "xla"),
                               strict=True):
        off = float(jnp.abs(got - want).max() / max(jnp.abs(want).max(), 1))  # who sees only itself has no dq
        assert off < 1e-5, f"{what} is off by {off:.1e} of its largest element"


def test_shapes_of_blocks():
    assert [block_of(T, 0) for T in (128, 384, 512, 1280, 4096)] == [128, 128, 512, 256, 1024]
    assert [block_of(4096, window) for window in (1, 100, 129, 512, 2000)] == [128, 128, 256, 512, 1024]
    assert splash_attention._kernel(256, 256, 4, 0, 0.0, True) is splash_attention._kernel(256, 256, 4, 0, 0.0, True)


BF16, F32, F16 = map(jnp.dtype, (jnp.bfloat16, jnp.float32, jnp.float16))


@pytest.mark.parametrize(("arguments", "word"), [
    (("gpu", BF16, 4096, 128), "TPUs only"), (("tpu", F16, 4096, 128), "float16"), (("tpu", BF16, 4096, 320), "320"),
    (("tpu", BF16, 2**18, 128), "seq_len=262144"), (("tpu", BF16, 4096, 128, "gather"), "ulysses can")])
def test_it_refuses_by_name_what_it_cannot_do(arguments, word):
    with pytest.raises(UserError, match=word) as refusal:
        attention.choose_backend("splash", *arguments)
    assert refusal.value.key == "train.attention"
    assert attention.choose_backend("auto", *arguments) == ("cudnn" if arguments[0] == "gpu" else "xla")


def test_auto_takes_it_on_tpus_only():
    assert attention.choose_backend("auto", "tpu", BF16, 4096, 192) == "splash"
    assert attention.choose_backend("auto", "tpu", F32, 1000, 64, "ulysses") == "splash"
    assert attention.choose_backend("auto", "tpu", F32, 1000, 64, "ring") == "splash"
    assert attention.choose_backend("auto", "tpu", BF16, 64, 64) == "xla"  # half of a tile would be padding
    assert attention.choose_backend("auto", "cpu", F32, 4096, 64) == "xla"
    assert attention.choose_backend("splash", "cpu", F32, 64, 64) == "splash"


@pytest.mark.slow
def test_the_kernels_can_be_used_alone():
    code = ("import sys; from jaxtrain.kernels import attention; import jax.numpy as jnp; x = jnp.ones((1, 8, 2, 8)); "
            "assert attention.attend(x, x, x).shape == x.shape; "
            "assert not {'jaxtrain.models', 'jaxtrain.parallel', 'jaxtrain.run', 'flax'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------- real steps

SEQ = dict(data__seq_len=32, model__max_seq_len=32, train__precision="float32")
STEPS = {
    "llama": ("llama", dict(mesh__data=2, mesh__tensor=2, train__remat="attention")),
    "gemma3": ("gemma3", dict(mesh__fsdp=2, train__remat="attention_and_dots")),
    "deepseek_v3": ("deepseek_v3", dict(mesh__tensor=2)),
    "ulysses": ("llama", dict(mesh__context=2, mesh__tensor=2, mesh__context_strategy="ulysses", model__window=7)),
    "pipeline": ("gpt2", dict(mesh__stage=2, mesh__data=2, pipeline__schedule="1f1b", train__remat="full")),
    "ulysses in a pipeline": ("llama", dict(mesh__stage=2, mesh__context=2, mesh__context_strategy="ulysses")),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=SLOW if name == "ulysses in a pipeline" else pytest.mark.exhaustive) for name in STEPS])
def test_steps_have_the_numbers_of_one_device(name):
    from tests.composition import fuzz

    family, keys = STEPS[name]
    drawn = {f"mesh.{axis}": 1 for axis in fuzz.AXES} | {
        "family": family, "packing": True, "empty": "", "value_and_grad": False, "data.global_batch_size": fuzz.ROWS,
        "model.num_layers": 2, "train.attention": "splash",
        **{key.replace("__", "."): value for key, value in {**SEQ, **keys}.items()}}
    fuzz.check(drawn)


@pytest.mark.parametrize(("policy", "forwards"), [
    ("none", 1), ("attention", 1), ("attention_and_dots", 1), ("full", 2), ("dots", 2)])
def test_what_policies_compute_again(policy, forwards):
    """Kernels in the program as it is lowered for TPUs, of a stack of layers on a mesh."""
    def kernels(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                yield str(eqn.params["name_and_src_info" if "name_and_src_info" in eqn.params else "name"]).split()[0]
            elif eqn.outvars:  # JAX 0.10 leaves calls whose results nobody needs, which XLA removes
                for inner in subjaxprs(jaxpr.replace(eqns=[eqn])):
                    yield from kernels(inner)

    mesh, rules = jt.make_mesh(data=2, tensor=2, devices=jax.devices()[:4]), jt.rules("fsdp_tp")

    def layer(x, segments):
        q = activations.constrain(x * 1.5, *attention.HEADS)
        return attention.attend(q, q, q, segments_BT=segments, backend="splash")

    def loss(x, segments):
        kept = wrap(remat_policies.policy(policy))(layer)
        return jax.lax.scan(lambda x, _: (kept(x, segments), None), x, length=3)[0].astype(jnp.float32).sum()

    with mesh_context.use(mesh.abstract_mesh, rules, "tpu"):
        at = jax.sharding.NamedSharding(mesh, activations.activation_spec(*attention.HEADS))
        x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16, sharding=at)
        segments = jax.ShapeDtypeStruct((2, 256), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, jax.P("data")))
        found = Counter(kernels(jax.jit(jax.grad(loss)).trace(x, segments).jaxpr.jaxpr))
    assert found == {"splash_mha_fwd_segmented_residuals": forwards, "splash_mha_dkv_segmented_no_residuals": 1}


def test_configs_pick_it():
    reference.build("llama", mesh__context=2, train__attention="splash", mesh__context_strategy="ring")
    with pytest.raises(UserError, match=r"mesh\.context_strategy=gather cannot use it; ulysses can"):
        reference.build("llama", mesh__context=2, train__attention="splash", mesh__context_strategy="gather")
