"""Attention that is not causal, by every backend, against plain operations in float32.

Of packed rows, with padding, and to keys of another sequence. Compilers for described GPUs and TPUs, if there are any,
show that no scores are in memory.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.kernels import attention
from jaxtrain.plan import instructions, targets
from jaxtrain.plan.compiler import devices_of
from jaxtrain.sharding import axis_rules, mesh_context
from tests.kernels.interpreted import needs_mosaic

SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive
BF16, F32 = map(jnp.dtype, (jnp.bfloat16, jnp.float32))


@dataclasses.dataclass
class Case:
    """`lengths` of the segments of a row, the same in keys; padding behind them has the number 0, or is False."""

    T: int = 256
    S: int = 0  # keys of another sequence
    H: int = 2
    G: int = 1
    K: int = 64
    lengths: tuple[tuple[int, ...], ...] = ()
    padding: bool = False  # `lengths` only says how many there are

    def ids(self, length):
        if not self.lengths:
            return None
        rows = [np.repeat(np.arange(1, len(row) + 1), row) for row in self.lengths]
        ids = np.stack([np.pad(row, (0, length - len(row))) for row in rows]).astype(np.int32)
        return ids > 0 if self.padding else ids

    @property
    def visible(self):
        """Return the keys that each query sees, [B, T, S]."""
        if not self.lengths:
            return np.ones((2, self.T, self.S or self.T), bool)
        keys = self.ids(self.S or self.T)[:, None]
        return np.repeat(keys, self.T, 1) if self.padding else self.queries[:, :, None] == keys

    @property
    def queries(self):
        """The segments of queries: the first of a longer row's where there are fewer of them than of keys."""
        return None if not self.lengths else self.ids(self.S or self.T)[:, :self.T]


def drawn(T, seed):
    """The lengths of two packed rows, the last of them at times up to the end."""
    rng = np.random.default_rng(seed)
    cuts = [np.unique(rng.integers(1, T, rng.integers(1, 8))) for _ in range(2)]
    ends = [np.append(cut, T) if seed % 2 else cut for cut in cuts]
    return tuple(tuple(np.diff(end, prepend=0).tolist()) for end in ends)


ROWS = ((150, 45, 30), (64, 64, 1, 127))
CASES = {
    "packed": Case(lengths=ROWS),
    "padding": Case(T=150, lengths=((150,), (37,)), padding=True, G=2),
    "keys of another sequence": Case(T=70, S=200, lengths=((200,), (37,)), padding=True),
    "all of another sequence": Case(T=130, S=300),
    "all, of odd shapes": Case(T=200, K=72, G=2),
    "packed, heads that are padded": Case(lengths=ROWS, K=72),
    "a part of the queries": Case(T=128, S=256, lengths=ROWS),
    "several blocks": Case(T=640, S=640, lengths=((100, 300, 200), (640,))),
    **{f"random {seed}": Case(T=384, lengths=drawn(384, seed), K=(64, 80)[seed % 2]) for seed in range(6)},
}


def result_and_gradients(c, f):
    """Return what `f(q, k, v)` gives and its gradients, where padding's results are not read."""
    rng, S = np.random.default_rng(0), c.S or c.T
    q, k, v, pull = (jnp.asarray(rng.normal(size=(2, length, heads, c.K)), F32)
                     for length, heads in ((c.T, c.H), (S, c.G), (S, c.G), (c.T, c.H)))
    if c.padding and not c.S:
        pull *= c.queries[:, :, None, None]

    def run(q, k, v):
        out, back = jax.vjp(f, q, k, v)
        return jnp.where(pull == 0, 0, out), *back(pull)
    return jax.jit(run)(q, k, v)


@functools.cache
def wanted(name):
    c = CASES[name]

    def plain(q, k, v):
        k, v = (jnp.repeat(x, c.H // c.G, axis=2) for x in (k, v))
        scores = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest") / math.sqrt(c.K)
        return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(c.visible[:, None], scores, -jnp.inf)), v,
                          precision="highest")
    return result_and_gradients(c, plain)


def segments(c):
    """Return those of queries and of keys, as `attend` takes them."""
    return (None if c.padding and c.S else c.queries), (c.ids(c.S) if c.S else None)


def check(name, backend):
    c = CASES[name]
    own, others = segments(c)
    got = result_and_gradients(c, lambda q, k, v: attention.attend(
        q, k, v, segments_BT=None if own is None else jnp.asarray(own),
        key_segments_BS=None if others is None else jnp.asarray(others), causal=False, backend=backend))
    for what, x, want in zip(("output", "dq", "dk", "dv"), got, wanted(name), strict=True):
        off = float(jnp.abs(x - want).max() / max(jnp.abs(want).max(), 1))
        assert off < 1e-5, f"{what} is off by {off:.1e} of its largest element"


def tiers(*slow, quick=()):
    """All cases by tier."""
    return [pytest.param(name, marks=() if name in quick else SLOW if name in slow else EXHAUSTIVE) for name in CASES]


@pytest.mark.parametrize("name", tiers(*list(CASES)[1:4], quick=("packed",)))
def test_plain_operations(name):
    check(name, "xla")


@pytest.mark.parametrize("name", tiers("packed", "keys of another sequence"))  # test_transcription.py: all see all
def test_splash_attention(name):
    check(name, "splash")


@needs_mosaic
@pytest.mark.parametrize("name", [one for one in tiers("packed, heads that are padded") if not CASES[one.values[0]].S])
def test_mosaic_attention(name, interpreted):
    check(name, "mosaic")


@pytest.mark.parametrize("name", tiers("padding", "a part of the queries", quick=("keys of another sequence",)))
def test_what_cudnn_is_asked_for(name, monkeypatch):
    """Computed by the plain operations of JAX that take the same arguments."""
    real = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *given, implementation, **keys: real(
        *given, implementation="xla", **keys))
    monkeypatch.setattr(attention, "choose_backend", lambda *_, **__: "cudnn")
    check(name, "cudnn")


# ----------------------------------------------------------------------------------------------- where they are chosen

@pytest.mark.parametrize(("platform", "shape", "keys", "choice"), [
    ("tpu", (BF16, 1500, 64), {}, "splash"), ("tpu", (BF16, 448, 64), dict(key_len=1500), "splash"),
    ("tpu", (BF16, 64, 64), dict(key_len=1500), "xla"), ("tpu", (BF16, 448, 64), dict(key_len=2**18), "xla"),
    ("cuda", (BF16, 1500, 64), {}, "cudnn"), ("cuda", (BF16, 448, 64), dict(key_len=1500), "cudnn"),
    ("cuda", (BF16, 448, 64), dict(key_len=1501), "xla"), ("cpu", (F32, 1500, 64), {}, "xla")])
def test_auto_takes_what_can(platform, shape, keys, choice):
    assert attention.choose_backend("auto", platform, *shape, **keys) == choice


@needs_mosaic
def test_mosaic_is_for_packed_rows_of_their_own_keys():
    def choose(asked, **keys):
        with mesh_context.use(jt.make_mesh(devices=1), axis_rules.rules(), "cuda:9"):
            return attention.choose_backend(asked, "cuda", BF16, 1024, **keys)

    assert choose("auto", head_dim=72, packed=True) == "mosaic"
    assert choose("auto", head_dim=72, packed=True, key_len=2048) == choose("auto", head_dim=72) == "cudnn"
    with pytest.raises(UserError, match="the mosaic backend cannot do this: its keys are those of the queries' own"):
        choose("mosaic", head_dim=64, key_len=2048)


# ------------------------------------------------------------------------------------------- compiled without a device

B, LONG, H = 2, 1024, 8


def compiled(target, backend, T, S, K, packed, monkeypatch):
    """Return the program of the gradient, compiled for one described device."""
    try:
        devices = devices_of(targets.TARGETS[target], 1)
    except UserError as missing:
        pytest.skip(f"{missing}")
    platform = targets.TARGETS[target].platform
    monkeypatch.setattr(mesh_context, "platform", lambda: platform)
    monkeypatch.setattr(mesh_context, "compute_capability", lambda: 9.0)
    if platform == "cuda":
        from jax._src.cudnn import fused_attention_stablehlo as wheel

        monkeypatch.setattr(wheel, "check_compute_capability", lambda capability: float(capability) <= 9)

    def loss(q, k, v, segments):
        keys = dict(segments_BT=segments) if S == T else dict(key_segments_BS=segments)
        return (attention.attend(q, k, v, **keys, causal=False, backend=backend).astype(F32) ** 2).sum()

    at = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ("x",)), jax.P())
    q, k = (jax.ShapeDtypeStruct((B, length, H, K), BF16, sharding=at) for length in (T, S))
    segments = jax.ShapeDtypeStruct((B, S), jnp.int32 if packed else bool, sharding=at)
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(q, k, k, segments).lower(
        lowering_platforms=(platform,)).compile().as_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "backend", "T", "S", "K", "packed", "kernels"), [
    ("v5e", "auto", LONG, LONG, 72, True, 2), ("v5p", "auto", 1500, 1500, 64, False, 2),
    ("v5p", "auto", 448, 1500, 64, False, 2), ("v5e", "auto", LONG, LONG, 80, True, 2),
    ("v5p", "auto", 8192, 8192, 64, True, 3),
    ("h100", "auto", 1500, 1500, 64, False, 2), ("h100", "auto", 448, 1500, 64, False, 2),
    ("h100", "cudnn", LONG, LONG, 72, True, 2),
    *(pytest.param("h100", "auto", LONG, LONG, K, True, 3, marks=needs_mosaic) for K in (64, 72, 80, 128))])
def test_no_scores_are_in_memory(target, backend, T, S, K, packed, kernels, monkeypatch, capfd):
    """Neither forward nor backward is there an array as large as the scores of all heads."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    text = compiled(target, backend, T, S, K, packed, monkeypatch)
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", "".join(capfd.readouterr()))
    assert set(spilled) <= {("0", "0")}, spilled
    sizes = {shape: math.prod(map(int, shape.split(","))) for shape in re.findall(r"[a-z]\w*\[([\d,]+)\]", text)}
    largest = max(sizes, key=sizes.get)
    assert sizes[largest] < B * H * T * S, f"there is an array of shape [{largest}]"
    called = re.findall(r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*|__cudnn\$fmha\w*)"', text)
    assert len(called) == kernels, called
    counted = sum(one.flops for one in instructions.program(text).instructions.values() if one.attention)
    assert counted >= 2 * 7 * B * H * T * S * K, "jaxtrain.plan leaves out pairs"
