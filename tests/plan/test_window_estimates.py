"""Sliding windows in estimates: a kernel costs what a window lets it see, for as many layers as have it."""

import math

import jax
import numpy as np
import pytest

from jaxtrain.config.load import load_config
from jaxtrain.kernels.attention import query_blocks, splash_attention, xla_attention
from jaxtrain.plan.cost import rough
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.targets import TARGETS
from jaxtrain.plan.trace import kernels, reader
from jaxtrain.sharding.mesh import AXES
from tests.tiers import exhaustive, slow

ROWS, LONG = 8, 32768


def estimated(mesh, target="h200", attention="auto", **keys):
    sizes = {f"mesh.{axis}": mesh.get(axis, 1) for axis in AXES}
    config = load_config("configs/gemma3_1b.py", {
        **sizes, "data.global_batch_size": ROWS, "data.seq_len": LONG, "model.max_seq_len": LONG,
        "train.attention": attention, "data.cross_document_attention": True,
        **{f"model.{key}": value for key, value in keys.items()}})
    return config, sizes, estimate(config, TARGETS[target], math.prod(mesh.values()))


@pytest.mark.parametrize("window", [0, 1, 5, 12, 20])
def test_a_kernel_computes_what_its_window_shows(window):
    B, T, H, K, V = 2, 12, 3, 8, 4
    behind = np.arange(T)[:, None] - np.arange(T)
    shown = ((behind >= 0) & (behind < (window or T))).sum() * B * H
    shapes = [(B, T, H, K), (B, T, 1, K), (B, T, 1, V)]
    half = B * H * T / 2  # a query sees all of its own key, of which the formula counts a half
    for name, widths in ((kernels.FORWARD, K + V), (kernels.BACKWARD, 3 * K + 2 * V)):
        seen = kernels.flops(name, shapes, window) / (2 * widths)
        assert shown - half <= seen <= shown
    assert kernels.flops(kernels.FORWARD, shapes) == 2 * (K + V) * B * H * T * T / 2
    mask = (B, 1, T, T)  # with which cuDNN computes all pairs
    assert kernels.flops(kernels.FORWARD, [*shapes, mask]) == 2 * (K + V) * B * H * T * T
    saved = [(B, T, H, V), (B, H, T), (B, T, H, V)]
    causal, all_pairs = (kernels.flops(kernels.BACKWARD, [*shapes, *more, *saved]) for more in ([], [mask]))
    assert all_pairs == 2 * causal


@pytest.mark.parametrize(("T", "window", "pairs"), [
    (100, 0, 100 * 100), (100, xla_attention.BOTH_WAYS, 100 * 100), (256, xla_attention.BOTH_WAYS, 256 * 256),
    (256, 0, 64 * (64 + 128 + 192 + 256)), (256, 65, 64 * (64 + 3 * 128)), (4096, 0, 4096 * 4096 * 9 // 16)])
def test_plain_attention_computes_the_keys_that_its_blocks_of_queries_see(T, window, pairs):
    B, H, K, V = 2, 3, 8, 4
    x = [jax.ShapeDtypeStruct((B, T, H, width), np.float32) for width in (K, K, V)]
    traced = jax.make_jaxpr(jax.grad(lambda q, k, v: query_blocks.attention(q, k, v, None, window, 0.0).sum(),
                                     argnums=(0, 1, 2)))(*x)
    found = sum(op.flops * times for op, times in reader.read(traced, {}, "cpu").all())
    assert found == 2 * 3 * (K + V) * B * H * pairs  # each of two products forward has two backward


@pytest.mark.parametrize("every", [*slow(6), *exhaustive(1, 27)])
def test_the_rough_sum_counts_what_is_traced(every):
    config, sizes, made = estimated({"fsdp": 8}, global_every=every)
    said = rough.work(config, TARGETS["h200"], sizes, rough.Size.of(config, TARGETS["h200"].platform))
    assert said == pytest.approx(made.time.flops, rel=0.1)


@pytest.mark.parametrize("T", [512, 2048])
@pytest.mark.parametrize("window", [0, 1, 128, 129, 300])
def test_splash_attention_computes_the_blocks_that_show_something(T, window):
    H, K, V, side = 3, 8, 4, splash_attention.block_of(T, window)
    behind = np.arange(T)[:, None] - np.arange(T)
    shown = (behind >= 0) & (behind < (window or T))
    blocks = shown.reshape(T // side, side, T // side, side).any((1, 3)).sum()
    shapes, fused = [(2, H, T, K), (2, 1, T, K), (2, 1, T, V)], splash_attention.is_fused(T, window)
    for phase, widths in (("fwd", K + V), ("dq", 2 * K + V), ("dkv", 2 * K + 2 * V + fused * K)):
        assert kernels.splash_flops(phase, shapes, window) == 2 * 2 * H * blocks * side**2 * widths


@pytest.mark.parametrize(("mesh", "target"), [
    *slow(({"fsdp": 8}, "h200")), *exhaustive(({"fsdp": 4, "stage": 2}, "h200"), ({"fsdp": 8}, "v5p"))], ids=str)
def test_attention_takes_the_time_of_the_mean_layer(mesh, target):
    """22 of the 26 layers are local."""
    far, mixed, near = (estimated(mesh, target, global_every=every)[2].time.parts["attention"] for every in (1, 6, 27))
    assert mixed == pytest.approx((22 * near + 4 * far) / 26) and near < far / 5


@pytest.mark.slow
def test_plain_attention_saves_the_keys_that_no_query_of_a_block_sees():
    far, near = (estimated({"fsdp": 8}, "v5p", "xla", global_every=every)[2].time.flops for every in (1, 27))
    assert near < 0.7 * far
