"""Attention within packed documents: Pallas's interpreter runs the GPU kernels, against plain operations in float32.

A compiler for GPUs, if there is one, compiles them for a described H100.
"""

import dataclasses
import functools
import re
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
from jaxtrain.kernels.attention import mosaic_attention, packed_attention
from jaxtrain.models.rematerialization import wrap
from jaxtrain.plan import instructions, targets
from jaxtrain.plan.compiler import devices_of
from jaxtrain.plan.cost import rates
from jaxtrain.plan.estimate import change, estimate
from jaxtrain.plan.trace import kernels as costs
from jaxtrain.sharding import activations, axis_rules, mesh_context
from tests.kernels.interpreted import needs_mosaic

SLOW = pytest.mark.slow
BF16, F32, F16 = map(jnp.dtype, (jnp.bfloat16, jnp.float32, jnp.float16))
PADDING = 0  # the segment of what is not in a document


def random_lengths(T, seed):
    """Documents that begin anywhere, some of them at the edges of tiles or next to them."""
    rng = np.random.default_rng(seed)
    edges = [at for edge in range(64, T, 64) for at in (edge - 1, edge, edge + 1)]
    begins = np.unique(rng.choice([*edges, *rng.integers(1, T, 12)], rng.integers(1, 9)))
    return np.diff([0, *begins, T]).tolist()


@dataclasses.dataclass
class Case:
    """A row for each list of documents' lengths; behind them is padding."""

    rows: list[list[int]]
    T: int = 256
    H: int = 2
    G: int = 1
    K: int = 64
    V: int = 64
    window: int = 0
    soft_cap: float = 0.0

    @property
    def segments(self):
        ids = [np.repeat(np.arange(1, len(row) + 1), row) for row in self.rows]
        return np.stack([np.pad(row, (0, self.T - len(row)), constant_values=PADDING) for row in ids]).astype(np.int32)


CASES = {
    "begins inside of tiles, and padding": Case([[150, 45, 30]]),
    "begins at the edges of tiles, window": Case([[64, 64, 1, 127]], window=70),
    "one document, wide heads, soft cap": Case([[256]], H=1, K=128, V=128, soft_cap=2.0),
    "heads of 256, two groups, soft cap": Case([[90, 38]], T=128, H=4, G=2, K=256, V=256, soft_cap=2.0),
    "keys of 192 and values of 128": Case([[60, 140, 40]], K=192, V=128, window=100),
    "one document of several tiles": Case([[640]], T=640, H=1),
    "tiny documents": Case([[*range(1, 22)], [3] * 85]),
    "two groups of heads, narrow values": Case([[10, 200, 46]], H=4, G=2, V=32),
    "a length that is padded": Case([[150, 47]], T=200, window=129),
    "wide heads, window of one": Case([[130, 126]], K=128, V=128, window=1),
    **{f"random {seed}": Case([random_lengths(384, seed), random_lengths(384, seed + 100)], T=384,
                              window=(0, 0, 50, 200)[seed % 4]) for seed in range(8)},
}


def arrays(c, dtype=np.float32):
    rng, B = np.random.default_rng(0), len(c.rows)
    shapes = (B, c.T, c.H, c.K), (B, c.T, c.G, c.K), (B, c.T, c.G, c.V), (B, c.T, c.H, c.V)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def visible(c):
    """Return the keys that each query sees, [B, T, T]."""
    behind = np.arange(c.T)[:, None] - np.arange(c.T)
    return (behind >= 0) & (behind < (c.window or c.T)) & (c.segments[:, :, None] == c.segments[:, None, :])


def plain(c, q, k, v):
    k, v = (jnp.repeat(x, c.H // c.G, axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest") / np.sqrt(c.K)
    scores = c.soft_cap * jnp.tanh(scores / c.soft_cap) if c.soft_cap else scores
    weights = jax.nn.softmax(jnp.where(visible(c)[:, None], scores, -jnp.inf))
    return jnp.einsum("bhts,bshk->bthk", weights, v, precision="highest")


def gradients(f, q, k, v, pull):
    """Return the output and the gradients by queries, keys and values."""
    def run(*given):
        out, back = jax.vjp(f, *given)
        return out, *back(pull)
    return jax.jit(run)(q, k, v)


def mosaic(c):
    return lambda q, k, v: attention.attend(q, k, v, segments_BT=jnp.asarray(c.segments), window=c.window,
                                            soft_cap=c.soft_cap, backend="mosaic")


@needs_mosaic
@pytest.mark.parametrize("name", [*list(CASES)[:4], *(
    pytest.param(name, marks=pytest.mark.exhaustive if i > 5 else SLOW) for i, name in enumerate(list(CASES)[4:]))])
def test_numbers_are_those_of_plain_operations(name, interpreted):
    c = CASES[name]
    given = arrays(c)
    for what, got, want in zip(("output", "dq", "dk", "dv"), gradients(mosaic(c), *given),
                               gradients(functools.partial(plain, c), *given), strict=True):
        off = float(jnp.abs(got - want).max() / max(jnp.abs(want).max(), 1))  # who sees only itself has no dq
        assert off < 1e-5, f"{what} is off by {off:.1e} of its largest element"


@needs_mosaic
def test_scores_of_bfloat16_are_summed_and_normalised_in_float32(interpreted):
    c = Case([[90, 38]], T=128, H=1)
    given = arrays(c, jnp.bfloat16)
    exact = gradients(functools.partial(plain, c), *(x.astype(jnp.float32) for x in given))
    for got, want in zip(gradients(mosaic(c), *given), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        assert jnp.abs(got - want).max() < 2**-7 * jnp.abs(want).max(), "more is lost than by rounding to bfloat16"


@needs_mosaic
def test_other_documents_are_not_read(interpreted):
    """Values that are not finite do not matter there: tiles without a visible pair are left out and not touched."""
    c = Case([[128, 128]], T=256, H=1)
    q, k, v, pull = arrays(c)
    got = gradients(mosaic(c), *(x.at[:, 128:].set(jnp.nan) for x in (q, k, v, pull)))
    for x, want in zip(got, gradients(mosaic(c), q, k, v, pull), strict=True):
        np.testing.assert_array_equal(x[:, :128], want[:, :128])


@pytest.mark.parametrize("window", [0, 1, 5, 64])
@pytest.mark.parametrize("more", [0, 3])
def test_two_numbers_of_a_token_say_who_sees_whom(window, more):
    for seed in range(20):
        c = Case([random_lengths(97, seed)], T=97, window=window)
        first, last = (np.asarray(x)[0, 0] for x in packed_attention.bounds(jnp.asarray(c.segments), window, more))
        token = np.arange(97 + more)
        by_query = (token >= first[:, None]) & (token <= token[:, None])
        by_key = (token[:, None] >= token) & (token[:, None] <= last)
        np.testing.assert_array_equal(by_query, by_key)
        np.testing.assert_array_equal(by_query[:97, :97], visible(c)[0])
        assert (np.diff(first) >= 0).all() and (np.diff(last) >= 0).all() and not by_query[97:, :97].any()


# ----------------------------------------------------------------------------------------------- where it is the choice
H100, LONG = "cuda:9", 16_384


def chosen(asked, platform, dtype=BF16, seq_len=4096, head_dim=128, strategy="", packed=True, soft_cap=0.0):
    with mesh_context.use(jt.make_mesh(devices=1), axis_rules.rules(), platform):
        return attention.choose_backend(asked, mesh_context.platform(), dtype, seq_len, head_dim, strategy, soft_cap,
                                        packed)


@needs_mosaic
@pytest.mark.parametrize(("platform", "keys", "word", "instead"), [
    ("cuda:8", {}, r"compute capability 9 \(H100, H200\) only", "cudnn"),
    ("cuda:10", {}, r"compute capability 9 \(H100, H200\) only", "cudnn"),
    ("tpu", {}, r"compute capability 9 \(H100, H200\) only", "splash"),
    (H100, dict(dtype=F32), "bfloat16 or float16, not float32", "xla"),
    (H100, dict(head_dim=272), "head_dim=272 is not 64 to 256", "xla"),
    (H100, dict(strategy="gather"), "ulysses can", "cudnn")], ids=str)
def test_it_refuses_by_name_what_it_cannot_do(platform, keys, word, instead):
    with pytest.raises(UserError, match=rf"train.attention: the mosaic backend cannot do this: .*{word}"):
        chosen("mosaic", platform, **keys)
    assert chosen("auto", platform, **keys) == instead


@needs_mosaic
def test_auto_takes_it_for_packed_rows_on_hopper():
    assert chosen("auto", H100, seq_len=LONG) == chosen("auto", H100, F16, LONG, 64, "ulysses") == "mosaic"
    assert chosen("auto", H100, seq_len=LONG, packed=False) == chosen("cudnn", H100, seq_len=LONG) == "cudnn"
    assert chosen("auto", H100) == chosen("auto", H100, seq_len=1024) == "mosaic"
    assert chosen("auto", H100, seq_len=64) == "cudnn", "a row is shorter than a tile"
    assert chosen("auto", H100, soft_cap=30.0) == "mosaic"  # which cuDNN does not compute
    assert chosen("mosaic", H100, packed=False) == chosen("auto", H100, packed=False, strategy="ring") == "mosaic"


@needs_mosaic
@pytest.mark.parametrize(("cuda", "instead"), [
    (12060, "mosaic"), (12080, "cudnn"), (12090, "cudnn"), (13000, "mosaic")])
def test_a_compiler_that_is_known_to_be_wrong_is_not_used(monkeypatch, cuda, instead):
    monkeypatch.setattr(mosaic_attention, "_cuda_version", lambda: cuda)
    assert chosen("auto", H100, seq_len=LONG) == instead


def test_older_versions_of_jax_refuse(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert chosen("auto", H100, seq_len=LONG) == "cudnn"
    with pytest.raises(UserError, match=r"it needs JAX 0\.11 or newer"):
        chosen("mosaic", H100)


def test_a_run_is_refused_before_it_is_traced():
    from tests.numerics import reference

    with pytest.raises(UserError, match=r"^train\.attention: the mosaic backend cannot do this: it runs on NVIDIA"):
        jt.build(reference.tiny("llama", train__attention="mosaic"), devices=1)


# ------------------------------------------------------------------------------------------------ programs that hold it
B, T, H, K = 2, 256, 4, 64


def layers(policy):
    """Return the gradient of a stack of three layers of attention."""
    def layer(x, segments):
        q = activations.constrain(x * 1.5, *attention.HEADS)
        return attention.attend(q, q, q, segments_BT=segments, backend="mosaic")

    def loss(x, segments):
        kept = wrap(remat_policies.policy(policy))(layer)
        return jax.lax.scan(lambda x, _: (kept(x, segments), None), x, length=3)[0].astype(jnp.float32).sum()
    return jax.grad(loss)


@needs_mosaic
@pytest.mark.parametrize(("policy", "forwards"), [
    ("none", 1), ("attention", 1), ("attention_and_dots", 1), ("full", 2), ("dots", 2)])
def test_what_policies_compute_again(policy, forwards):
    """Kernels in the program as it is traced for an H100, of a stack of layers on a mesh."""
    def equations(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for inner in subjaxprs(jaxpr.replace(eqns=[eqn])):
                yield from equations(inner)

    mesh = jt.make_mesh(data=2, tensor=2, devices=4)
    with mesh_context.use(mesh, jt.rules("fsdp_tp"), H100):
        x = jax.ShapeDtypeStruct((B, T, H, K), BF16, sharding=jax.sharding.NamedSharding(
            mesh, activations.activation_spec(*attention.HEADS)))
        segments = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, jax.P("data")))
        with costs.stand_ins():
            traced = jax.jit(layers(policy)).trace(x, segments)
    found = Counter(eqn.params["target_name"] for eqn in equations(traced.jaxpr.jaxpr)
                    if eqn.primitive.name == "ffi_call")
    assert found == {costs.MOSAIC["fwd"]: forwards, costs.MOSAIC["dq"]: 1, costs.MOSAIC["dkv"]: 1}


@functools.cache
def predicted(policy, kernel="mosaic", packed=True):
    config = jt.load_config("configs/llama3_8b.py", {
        "mesh.fsdp": 8, "data.global_batch_size": 8, "train.attention": kernel, "train.remat": policy,
        "data.cross_document_attention": not packed})
    return estimate(change(config, {"train.accumulation": 1}), targets.TARGETS["h200"], 8)


@needs_mosaic
def test_the_planner_counts_it():
    guesses = {policy: predicted(policy) for policy in ("attention", "full")}
    times = {policy: guess.time.parts["attention"] for policy, guess in guesses.items()}
    config, shares = guesses["full"].config, targets.TARGETS["h200"].efficiency

    def cost(kernel: str, forward: int, backward: int) -> float:
        """Return the time of so many products by the rate of this kernel, for the pairs of half a row."""
        each = [products / rates.attention(kernel, back, config.model.head_dim, config.data.seq_len)
                for back, products in ((False, forward), (True, backward))]
        return sum(each) / shares["mosaic" if kernel == "mosaic" else "attention"]

    # Two products forward, seven backward.
    assert times["attention"] / times["full"] == pytest.approx(cost("mosaic", 2, 7) / cost("mosaic", 4, 7), rel=0.02)
    causal, masked = (predicted("attention", "cudnn", packed).time.parts["attention"] for packed in (False, True))
    assert times["attention"] / causal == pytest.approx(cost("mosaic", 2, 7) / cost("cudnn", 2, 5), rel=0.04)
    assert masked / causal == pytest.approx(2 * cost("masked", 2, 5) / cost("cudnn", 2, 5), rel=0.02), (
        "with a mask cuDNN computes all pairs")


@pytest.mark.parametrize("window", [0, 1, 128, 129, 300])
def test_blocks_that_show_something_count(window):
    behind = np.arange(1024)[:, None] - np.arange(1024)
    shown = (behind >= 0) & (behind < (window or 1024))
    pairs = shown.reshape(8, 128, 8, 128).any((1, 3)).sum() * 128**2
    shapes = [(2, 1024, 6, 64), (2, 1024, 3, 64), (2, 1024, 3, 64)]
    for phase, products in (("fwd", 2), ("dq", 3), ("dkv", 4)):
        assert costs.flops(costs.MOSAIC[phase], shapes, window) == 2 * 2 * 6 * pairs * products * 64


@pytest.fixture
def h100(monkeypatch):
    """A described H100; what ptxas says of kernels goes to the standard output."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    try:
        devices = devices_of(targets.TARGETS["h100"], 1)
    except UserError as missing:
        pytest.skip(f"{missing}")
    return jax.sharding.Mesh(np.array(devices), ("x",))


@needs_mosaic
@pytest.mark.parametrize(("K", "V", "soft_cap", "dtype"), [
    (128, 128, 0.0, BF16), *(pytest.param(*given, marks=SLOW) for given in (
        (64, 64, 0.0, BF16), (64, 64, 30.0, BF16), (128, 128, 30.0, BF16), (128, 128, 0.0, F16), (192, 192, 0.0, BF16),
        (192, 128, 0.0, BF16), (256, 256, 0.0, BF16), (256, 256, 30.0, BF16)))])
def test_it_compiles_for_an_h100(K, V, soft_cap, dtype, h100, capfd):
    """It spills no registers and has no array of T x T."""
    T, G = 1536, 2

    def loss(q, k, v, segments):
        return (mosaic_attention.attention(q, k, v, segments, 700, soft_cap).astype(jnp.float32) ** 2).sum()

    at = jax.sharding.NamedSharding(h100, jax.P())
    q, k, v = (jax.ShapeDtypeStruct((1, T, heads, width), dtype, sharding=at)
               for heads, width in ((2 * G, K), (G, K), (G, V)))
    segments = jax.ShapeDtypeStruct((1, T), jnp.int32, sharding=at)
    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v, segments).lower(lowering_platforms=("cuda",))
    text = lowered.compile().as_text()
    said = "".join(capfd.readouterr())
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    apart = K > 128  # gradients by keys and by values are then two kernels
    assert len(spilled) >= 3 + apart and max(int(n) for pair in spilled for n in pair) <= (256 if K > 192 else 0), said
    assert "serialized" not in said  # what ptxas says where it waits for each product of the tensor cores
    assert not re.search(rf"\[[\d,]*{T},{T}\b", text)
    found = [one for one in instructions.program(text).instructions.values() if one.target.startswith("mosaic_gpu")]
    assert Counter(one.attention for one in found) == {"attention": 1, "attention backward": 2 + apart}
    shapes = [x.shape for x in (q, k, v)]
    phases = ("fwd", "dkv_dv", "dq", "dkv_dk") if apart else costs.MOSAIC
    assert sorted(one.flops for one in found) == [costs.packed_flops(phase, shapes, 700) for phase in phases]
    assert sum(one.flops for one in found) == sum(costs.flops(name, shapes, 700) for name in costs.MOSAIC.values())
