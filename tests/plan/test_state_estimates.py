"""Layers with states in estimates: what their chunks compute, on every mesh, and what policies keep of them."""

import math

import pytest

from jaxtrain.builder import build
from jaxtrain.config.load import make_config
from jaxtrain.models.recurrent import chunks, unit_triangular
from jaxtrain.plan.trace import reader
from jaxtrain.run import shapes_of
from jaxtrain.train_step.report import matmul_parameters
from tests.tiers import slow

HEADS, KEY, LAYERS, ROWS, TOKENS, WIDTH, WORDS = 4, 16, 4, 8, 512, 64, 128


def program(devices=1, remat="none", kinds="D", **mesh):
    config = make_config({
        "model": dict(name="qwen3_5", layer_pattern=kinds, num_layers=LAYERS, embed_dim=WIDTH, num_heads=HEADS,
                      state_key_dim=KEY, state_value_dim=KEY, vocab_size=WORDS, max_seq_len=TOKENS, mlp_dim=96),
        "data": {"seq_len": TOKENS, "global_batch_size": ROWS}, "mesh": {"data": 1} | mesh, "train": {"remat": remat}})
    run = build(config, devices=devices)
    traced = run.sharded.trace(shapes_of(run).abstract()).jaxpr
    return run, reader.read(traced, dict(run.mesh.shape), "cpu", windows=config.model.windows)


def flops(block):
    return sum(op.flops * times for op, times in block.all())


def inverted(size=chunks.SIZE, block=unit_triangular._BLOCK):
    """The FLOPs of inverting a triangular matrix: two products for each pair of blocks; at first masked, of blocks."""
    masked = size // block * int(math.log2(block)) * 2 * 2 * block**3
    return masked + sum(size // (2 * n) * 2 * 2 * n**3 for n in (16, 32))


def test_the_trace_has_the_products_of_chunks():
    """Keys and values are equally wide here, so that products of a chunk are of two sizes.

    Forward, [C, C] times [C, K]: queries and keys with keys, two for writes and reads, two for results; and [K, C]
    times [C, K]: what is added, two of the scan, one for results. The backward pass has twice as many, two more where
    the scan returns and its maps have gradients apart, and computes again what is in a chunk except for results.
    """
    run, block = program()
    square, state = 2 * chunks.SIZE**2 * KEY, 2 * chunks.SIZE * KEY**2
    chunk = (6 + 12 + 5) * square + (4 + 10) * state + 2 * inverted()
    chunked = chunk * ROWS * TOKENS / chunks.SIZE * HEADS * LAYERS
    convolved = LAYERS * 3 * 4 * HEADS * KEY  # parameters that no product has
    matrices = matmul_parameters(run.abstract, run.layout, run.config.model) - convolved
    assert flops(block) == 6 * matrices * ROWS * TOKENS + chunked
    assert 3 * run.config.model.state_flops * ROWS * TOKENS < chunked


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 4}, *slow({"fsdp": 4, "tensor": 2})])
def test_devices_share_the_products(mesh):
    assert 8 * flops(program(8, kinds="DDDA", **mesh)[1]) == flops(program(kinds="DDDA")[1])


def test_parts_of_rows_compose_their_maps_besides():
    """Each chunk's map of a state also applies to the columns of a unit matrix: forward, when 2 devices share rows."""
    alone, shared = flops(program()[1]), 2 * flops(program(2, context=2)[1])
    assert alone < shared < 1.05 * alone


def scans(remat):
    """Return how often the step loops over chunks, and the bytes that layers keep."""
    _, block = program(remat=remat)
    loops = [(op, times) for op, times in block.all() if op.name == "scan"]
    kept = max(sum(value.bytes for value in op.outputs) for op, _ in loops)
    return sum(times for op, times in loops if op.times == TOKENS // chunks.SIZE), kept


@pytest.mark.parametrize(("remat", "each"), [("none", 2), ("full", 3), ("attention", 2), ("recurrent_states", 2),
                                             ("dots", 3)])
def test_policies_keep_states_or_scan_again(remat, each):
    assert scans(remat)[0] == each * LAYERS


def test_kept_states_and_results_take_their_bytes():
    states, results = KEY**2 * TOKENS // chunks.SIZE * 4, KEY * TOKENS * 2  # float32 and bfloat16
    assert scans("attention")[1] - scans("full")[1] == LAYERS * ROWS * HEADS * (states + results)


def test_products_of_chunks_may_be_rounded_and_inverses_not():
    _, block = program(kinds="D")
    products = [op for op, _ in block.all() if op.name == "dot_general" and op.inputs[0].dtype == "float32"]
    assert {op.rounds for op in products} == {True, False}
    exact = {max(op.outputs[0].shape[-2:]) for op in products if not op.rounds}
    assert max(exact) <= chunks.SIZE // 2  # those of inverses alone
