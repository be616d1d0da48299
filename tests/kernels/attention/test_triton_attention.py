"""Packed attention by kernels for Triton: Pallas's interpreter runs them, against plain operations in float32.

A compiler for GPUs, if there is one, compiles them for described A100, L40S and B200.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.kernels import attention
from jaxtrain.kernels.attention import triton_attention
from jaxtrain.plan import instructions, targets
from jaxtrain.plan.compiler import devices_of
from jaxtrain.plan.trace import kernels as costs
from jaxtrain.sharding import axis_rules, mesh_context
from tests.kernels.attention import test_mosaic_attention as packed
from tests.kernels.attention.test_mosaic_attention import BF16, F32, SLOW, Case, arrays, gradients

CASES = packed.CASES | {
    "narrow heads, three of a group": Case([[100, 28]], T=128, H=3, G=1, K=20, V=20, soft_cap=1.5),
}


def triton(c):
    return lambda q, k, v: attention.attend(q, k, v, segments_BT=jnp.asarray(c.segments), window=c.window,
                                            soft_cap=c.soft_cap, backend="triton")


@pytest.mark.parametrize("name", [*list(CASES)[:4], *(
    pytest.param(name, marks=pytest.mark.exhaustive if i > 7 else SLOW) for i, name in enumerate(list(CASES)[4:]))])
def test_numbers_are_those_of_plain_operations(name):
    c = CASES[name]
    given = arrays(c)
    for what, got, want in zip(("output", "dq", "dk", "dv"), gradients(triton(c), *given),
                               gradients(functools.partial(packed.plain, c), *given), strict=True):
        off = float(jnp.abs(got - want).max() / max(jnp.abs(want).max(), 1))
        assert off < 1e-5, f"{what} is off by {off:.1e} of its largest element"


def test_scores_of_bfloat16_are_summed_and_normalised_in_float32():
    c = Case([[90, 38]], T=128, H=1)
    given = arrays(c, jnp.bfloat16)
    exact = gradients(functools.partial(packed.plain, c), *(x.astype(jnp.float32) for x in given))
    for got, want in zip(gradients(triton(c), *given), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        assert jnp.abs(got - want).max() < 2**-7 * jnp.abs(want).max(), "more is lost than by rounding to bfloat16"


def test_other_documents_are_not_read():
    """Values that are not finite do not matter there: tiles without a visible pair are left out and not touched."""
    c = Case([[128, 128]], T=256, H=1)
    q, k, v, pull = arrays(c)
    got = gradients(triton(c), *(x.at[:, 128:].set(jnp.nan) for x in (q, k, v, pull)))
    for x, want in zip(got, gradients(triton(c), q, k, v, pull), strict=True):
        np.testing.assert_array_equal(x[:, :128], want[:, :128])


@pytest.mark.parametrize("how", ["sinks", "both ways"])
def test_sinks_and_both_ways_are_those_of_plain_operations(how):
    c = Case([[100, 28]], T=128)
    q, k, v, pull = arrays(c)

    def run(backend):
        def f(q, k, v, sinks):
            return attention.attend(q, k, v, segments_BT=jnp.asarray(c.segments), causal=how == "sinks",
                                    sinks_H=sinks if how == "sinks" else None, backend=backend)

        def differentiated(*given):
            out, back = jax.vjp(f, *given)
            return out, *back(pull)
        return jax.jit(differentiated)(q, k, v, jnp.asarray([0.3, -0.5]))

    for got, want in zip(run("triton"), run("xla"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_whole_step_has_the_numbers_of_plain_layers():
    from tests.numerics import reference

    run = reference.build("gemma3", (1, 2, 2), train__attention="triton", train__remat="attention")
    reference.check(run, "gemma3", steps=2)


# ----------------------------------------------------------------------------------------------- where it is the choice
A100, H100, B200 = "cuda:8", "cuda:9", "cuda:10"


def chosen(asked, platform, dtype=BF16, seq_len=4096, head_dim=128, strategy="", key_len=0, **how):
    with mesh_context.use(jt.make_mesh(devices=1), axis_rules.rules(), platform):
        return attention.choose_backend(asked, mesh_context.platform(), dtype, seq_len, head_dim, strategy,
                                        key_len=key_len, **how)


def test_auto_takes_it_where_else_there_are_scores_in_memory():
    for platform in (A100, B200):
        assert chosen("auto", platform, packed=True) == "cudnn", "no device has run these kernels"
        assert chosen("auto", platform, soft_cap=30.0) == chosen("auto", platform, sinks=True) == "triton"
        assert chosen("auto", platform) == "cudnn", "rows of one document need no mask"
        assert chosen("auto", platform, dtype=F32, packed=True) == "xla"
        assert chosen("auto", platform, packed=True, seq_len=64) == "cudnn", "a row is shorter than a tile"
        assert chosen("auto", platform, packed=True, strategy="ring") == "cudnn"
        assert chosen("auto", platform, packed=True, key_len=8192) == "cudnn"
    assert chosen("auto", "cuda:7", packed=True) != "triton"
    assert chosen("auto", "cpu", packed=True) == "xla"


@pytest.mark.parametrize(("platform", "keys", "word"), [
    ("cuda:7", {}, r"since compute capability 8 \(A100\) only"), ("tpu", {}, "since compute capability 8"),
    (A100, dict(dtype=F32), "bfloat16 or float16, not float32"), (A100, dict(head_dim=264), "head_dim=264 is over 256"),
    (A100, dict(key_len=99), "its keys are those of the queries' own tokens")], ids=str)
def test_it_refuses_by_name_what_it_cannot_do(platform, keys, word):
    with pytest.raises(UserError, match=rf"train.attention: the triton backend cannot do this: .*{word}"):
        chosen("triton", platform, **keys)


def test_a_jax_without_triton_leaves_it_to_others(monkeypatch):
    monkeypatch.setattr(triton_attention, "has_triton", lambda: False)
    assert chosen("auto", B200, packed=True) == "cudnn"
    with pytest.raises(UserError, match="has no Triton in Pallas"):
        chosen("triton", B200)


L40S = dataclasses.replace(targets.TARGETS["a100"], name="l40s", chip={
    **targets.TARGETS["a100"].chip, "major": "8 minor: 9", "shared": 101376, "shared_core": 102400})


@pytest.mark.parametrize(("target", "K", "soft_cap"), [
    (targets.TARGETS["b200"], 128, 0.0), *(pytest.param(*given, marks=SLOW) for given in (
        (targets.TARGETS["a100"], 128, 0.0), (L40S, 64, 0.0), (L40S, 128, 30.0), (L40S, 256, 0.0)))],
    ids=lambda given: getattr(given, "name", given))
def test_it_compiles_for_gpus_that_are_not_here(target, K, soft_cap, monkeypatch):
    """It fits into shared memory, has no array of T x T, and the simulator knows its kernels."""
    try:
        mesh = jax.sharding.Mesh(np.array(devices_of(target, 1)), ("x",))
    except UserError as missing:
        pytest.skip(f"{missing}")
    monkeypatch.setattr(triton_attention, "interpretation", lambda: False)
    T, G = 1536, 2

    def loss(q, k, v, segments):
        return (triton_attention.attention(q, k, v, segments, 700, soft_cap).astype(jnp.float32) ** 2).sum()

    at = jax.sharding.NamedSharding(mesh, jax.P())
    q, k = (jax.ShapeDtypeStruct((1, T, heads, K), BF16, sharding=at) for heads in (2 * G, G))
    segments = jax.ShapeDtypeStruct((1, T), jnp.int32, sharding=at)
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, segments).lower(lowering_platforms=("cuda",))
        text = lowered.compile().as_text()
    assert not re.search(rf"\[[\d,]*{T},{T}\b", text)
    found = [one for one in instructions.program(text).instructions.values() if one.own]
    shapes = [(1, T, 2 * G, K), (1, T, G, K), (1, T, G, K)]
    assert sorted(one.attention for one in found) == ["attention", "attention backward", "attention backward"]
    assert {one.compiler for one in found} == {"triton"}
    assert sorted(one.flops for one in found) == [costs.packed_flops(phase, shapes, 700)
                                                  for phase in ("fwd", "dq", "dkv")]
