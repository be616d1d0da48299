"""Seconds of a step: against what one works out by hand for machines of round numbers."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.config.load import load_config
from jaxtrain.config.schema import Config
from jaxtrain.plan import targets
from jaxtrain.plan.cost import links, time
from jaxtrain.plan.estimate import change, estimate
from jaxtrain.plan.targets import Link, Target
from jaxtrain.plan.trace.program import Block, Collective, Op, Value

CONFIGS = Path(__file__).parents[3] / "configs"
ALL = {"matmul": 1.0, "attention": 1.0, "memory": 1.0, "links": 1.0, "overlap": 1.0}
ROUND = Target("round", "cuda", "", {"bfloat16": 100e12}, 80e9, 0.9, 1e12,
               (Link("NVLink", 8, 100e9, 1e-6), Link("network", 1 << 30, 10e9, 1e-5)), 1.0, "", ALL)
SIZES = {"data": 4, "fsdp": 8}
BFLOAT16 = jnp.dtype("bfloat16")


def reaching(**efficiency: float) -> Target:
    """The round target, which reaches less than all of what it promises."""
    return dataclasses.replace(ROUND, efficiency={**ALL, **efficiency})


def array(*shape: int) -> Value:
    """A bfloat16 array that every device holds whole."""
    return Value(shape, BFLOAT16, ((),) * len(shape), 2 * math.prod(shape))


def matmul(rows: int) -> Block:
    """[rows, 4096] times [4096, 4096]."""
    left, right, out = array(rows, 4096), array(4096, 4096), array(rows, 4096)
    out.op = op = Op("dot_general", "real", [left, right], [out], flops=2.0 * rows * 4096**2)
    return Block([left, right], [op], [out])


def matmul_beside(gathered: int) -> Block:
    """A matmul, and a gather of so many bytes for whom it does not wait, as of the next layer's weights."""
    block, part = matmul(4096), array(8)
    whole = Value((gathered // 2,), BFLOAT16, ((),), gathered)
    whole.op = op = Op("all_gather", "real", [part], [whole], collectives=(
        Collective("all-gather", ("fsdp",), gathered),))
    return Block([*block.inputs, part], [*block.ops, op], [*block.outputs, whole])


@pytest.mark.parametrize(("axes", "seconds"), [
    (("fsdp",), 700e6 / 100e9 + 7 * 1e-6),  # seven eighths arrive over NVLink
    (("data",), 600e6 / 10e9 + 3 * 1e-5),  # one device of each machine: three quarters through its own network card
    (("data", "fsdp"), 775e6 / 80e9 + 22 * 1e-5),  # eight cards share it; a tree of 2 + 4 log2 32 steps, not 31
])
def test_an_all_gather_takes_what_its_slowest_link_takes(axes, seconds):
    assert links.seconds(Collective("all-gather", axes, 800_000_000), ROUND, SIZES) == pytest.approx(seconds)


@pytest.mark.parametrize("kind", ["all-to-all", "ragged-all-to-all"])
@pytest.mark.parametrize(("axes", "seconds"), [
    (("fsdp",), 700e6 / 100e9 + 7 * 1e-6),
    (("data",), 600e6 / 10e9 + 3 * 1e-5),
    (("data", "fsdp"), 600e6 / 10e9 + 22 * 1e-5),  # 24 of 32 parts leave the machine, all by the sender's own card
])
def test_what_an_exchange_sends_to_other_machines_passes_its_own_card(kind, axes, seconds):
    assert links.seconds(Collective(kind, axes, 800_000_000), ROUND, SIZES) == pytest.approx(seconds)


@pytest.mark.parametrize(("name", "sizes", "axes", "dimensions"), [
    ("v5p", {"fsdp": 64}, ("fsdp",), 3), ("v5p", {"fsdp": 32}, ("fsdp",), 1),  # no cube: the ends are free
    ("v5p", {"fsdp": 16, "tensor": 4}, ("fsdp",), 2), ("v5p", {"fsdp": 16, "tensor": 4}, ("tensor",), 1),
    ("v6e", {"fsdp": 256}, ("fsdp",), 2), ("v6e", {"fsdp": 128}, ("fsdp",), 1),
    ("tpu7x", {"fsdp": 128}, ("fsdp",), 3), ("tpu7x", {"fsdp": 64}, ("fsdp",), 1)])
def test_a_group_of_tpus_uses_the_dimensions_of_the_torus_that_it_fills(name, sizes, axes, dimensions):
    """Twice as many devices along one ring would take as long; along two or three rings at once, less."""
    target, size = targets.TARGETS[name], 10**12
    n = math.prod(sizes[axis] for axis in axes)
    one = size * (n - 1) / n / (target.links[0].bandwidth * target.efficiency["links"])
    found = links.seconds(Collective("all-gather", axes, size), target, sizes)
    assert found == pytest.approx(one / dimensions, rel=1e-3)


def test_buffers_are_not_sent():
    half = Collective("ragged-all-to-all", ("fsdp",), 1_600_000_000, buffer=2.0)
    assert links.seconds(half, ROUND, SIZES) == pytest.approx(700e6 / 100e9 + 7e-6)


def test_an_all_reduce_moves_everything_twice():
    once = Collective("all-gather", ("fsdp",), 800_000_000)
    twice = dataclasses.replace(once, kind="all-reduce")
    assert links.seconds(twice, ROUND, SIZES) == pytest.approx(2 * links.seconds(once, ROUND, SIZES))


def test_links_reach_their_share_but_latency_stays():
    seconds = links.seconds(Collective("all-gather", ("fsdp",), 800_000_000), reaching(links=0.8), SIZES)
    assert seconds == pytest.approx(700e6 / 80e9 + 7e-6)


def test_a_large_matmul_takes_its_flops():
    assert time.estimate(matmul(4096), ROUND, SIZES).parts == pytest.approx({"matmul": 2 * 4096**3 / 100e12})
    assert time.estimate(matmul(4096), reaching(matmul=0.5), SIZES).seconds == pytest.approx(2 * 4096**3 / 50e12)


def test_a_narrow_matmul_takes_its_bytes():
    moved = 2 * (4096 * 4096 + 2 * 4096)  # the weights, and a row in and out
    assert time.estimate(matmul(1), ROUND, SIZES).seconds == pytest.approx(moved / 1e12)
    assert time.estimate(matmul(1), reaching(memory=0.5), SIZES).seconds == pytest.approx(moved / 0.5e12)


def test_talk_hides_behind_a_matmul():
    alone = time.estimate(matmul(4096), ROUND, SIZES).seconds
    time_ = time.estimate(matmul_beside(80_000_000), ROUND, SIZES)  # 0.7 ms beside 1.4 ms
    assert (time_.seconds, time_.hidden.total()) == pytest.approx((alone, 70e6 / 100e9 + 7e-6))


def test_no_more_is_hidden_than_is_computed():
    alone = time.estimate(matmul(4096), ROUND, SIZES).seconds
    time_ = time.estimate(matmul_beside(800_000_000), ROUND, SIZES)  # 7 ms beside 1.4 ms
    assert time_.hidden.total() == pytest.approx(alone)
    assert time_.seconds == pytest.approx(700e6 / 100e9 + 7e-6)


def test_kernels_that_disturb_each_other_hide_a_part():
    alone, talk = time.estimate(matmul(4096), ROUND, SIZES).seconds, 70e6 / 100e9 + 7e-6
    time_ = time.estimate(matmul_beside(80_000_000), reaching(overlap=0.25), SIZES)
    assert (time_.seconds, time_.hidden.total()) == pytest.approx((alone + 0.75 * talk, 0.25 * talk))


@pytest.fixture(scope="module")
def config():
    """Llama 3.1 8B on two machines: large enough for everything to count."""
    return load_config(f"{CONFIGS / 'llama3_8b.py'}", {
        "mesh.fsdp": 16, "data.global_batch_size": 16, "data.seq_len": 2048, "train.accumulation": 1,
        "train.precision": "bfloat16"})


def step(config: Config, target: Target) -> float:
    return estimate(config, target, 16).seconds


@pytest.mark.slow
def test_a_slower_network_makes_a_step_slower(config):
    target = targets.TARGETS["h100"]
    slow = dataclasses.replace(target.links[1], bandwidth=target.links[1].bandwidth / 4)
    assert step(config, dataclasses.replace(target, links=(target.links[0], slow))) > step(config, target)


@pytest.mark.slow
def test_what_users_write_down_counts(config, tmp_path):
    theirs = targets.TARGETS["h100"].efficiency
    mixtral = load_config(CONFIGS / "mixtral_8x7b.py", {
        "mesh.fsdp": 2, "mesh.expert": 8, "mesh.tensor": 1, "mesh.data": 1, "data.global_batch_size": 64})
    reads = {"grouped": mixtral, **{key: change(config, {"train.attention": kernel})
                                    for key, kernel in (("attention", "cudnn"), ("triton", "triton"))}}
    file, usual = tmp_path / "targets.json", {}
    for what in theirs:
        file.write_text(json.dumps({"ours": {"like": "h100", "efficiency": {what: theirs[what] / 2}}}))
        ours = targets.read(file)["ours"]
        assert ours.efficiency == {**theirs, what: theirs[what] / 2}
        # Before JAX 0.11 these kernels are not used.
        if what not in ("grouped", "mosaic", "triton") or jax.__version_info__ >= (0, 11):
            reader = reads.get(what, config)
            if id(reader) not in usual:
                usual[id(reader)] = step(reader, targets.TARGETS["h100"])
            assert step(reader, ours) > 1.01 * usual[id(reader)], what


def test_products_in_fp8_are_computed_at_its_rate():
    """Products of layers are; that of the loss head, and attention, stay in bfloat16."""
    def matmuls(**keys):
        config = load_config(CONFIGS / "llama3_1b.py", {"train.accumulation": 1, "mesh.fsdp": 1, **keys})
        found = estimate(config, targets.TARGETS["h100"], 1)
        return found.time.parts["matmul"], found.time.parts["attention"]

    target = targets.TARGETS["h100"]
    (wide, attention), (narrow, other) = matmuls(), matmuls(**{"train.precision": "fp8"})
    assert attention == other and target.peak["bfloat16"] / target.peak["float8"] < narrow / wide < 0.7


@pytest.mark.parametrize("name", [
    pytest.param("a100", marks=pytest.mark.exhaustive), pytest.param("v5p", marks=pytest.mark.slow)])
def test_without_fp8_units_it_is_no_faster(name):
    config = load_config(CONFIGS / "llama3_1b.py", {"train.accumulation": 1, "mesh.fsdp": 1})
    wide, narrow = (estimate(dataclasses.replace(config, train=dataclasses.replace(config.train, precision=precision)),
                             targets.TARGETS[name], 1).time.parts["matmul"] for precision in ("bfloat16", "fp8"))
    assert narrow == pytest.approx(wide, rel=0.02)


@pytest.mark.parametrize("precision", ["mxfp8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_products_of_blocks_are_counted_and_have_the_rate_of_their_bits(precision):
    """Units of Blackwell multiply blocks with scales (sharding/block_units.py); NVFP4 also transforms its factors."""
    keys = {"mesh.data": 1, "model.embed_dim": 256, "model.max_seq_len": 256, "data.seq_len": 256}
    plain, blocks = (estimate(load_config(CONFIGS / "gpt.py:tiny", keys | {"train.precision": kind}),
                              targets.TARGETS["gb200"], 1) for kind in ("bfloat16", precision))
    assert plain.time.flops <= blocks.time.flops < 1.05 * plain.time.flops
    shape = (8192, 8192)
    factor = Value(shape, jnp.dtype({"mxfp8": "float8_e4m3fn", "nvfp4": "float4_e2m1fn"}[precision]), ((), ()), 8192**2)
    op = Op("scaled_matmul", "real", [factor, factor], [Value(shape, jnp.dtype("bfloat16"), ((), ()), 2 * 8192**2)],
            flops=2.0 * 8192**3)
    block = Block(op.inputs, [op], op.outputs)
    rate = targets.TARGETS["gb200"].peak[{"mxfp8": "float8", "nvfp4": "float4"}[precision]]
    took = time.estimate(block, targets.TARGETS["gb200"], {"data": 1}).parts["matmul"]
    assert op.flops / rate / 0.65 < took < op.flops / rate / 0.62


@pytest.mark.parametrize("length", [1024, 8192])
def test_attention_of_another_kernel_may_have_one_rate_for_all_shapes(length):
    q = Value((1, length, 8, 128), BFLOAT16, ((),) * 4, 2 * length * 8 * 128)
    op = Op("attention_forward", "real", [q, q, q], [q], flops=1e15, attends=(128, length))
    target = targets.TARGETS["h100"]
    flat = dataclasses.replace(target, efficiency={**target.efficiency, "flat_attention": 0.2})
    took = [time.estimate(Block([q], [op], [q]), one, {"data": 1}).parts["attention"] for one in (target, flat)]
    assert took[1] == pytest.approx(1e15 / (0.2 * target.peak["bfloat16"]), rel=1e-3) != took[0]


@pytest.mark.exhaustive
def test_gradients_that_are_reduced_more_often_take_longer():
    """A reduction for each micro-batch costs more than one: those that do not wait for each other travel together."""
    took = [sum(seconds for part, seconds in estimate(load_config(CONFIGS / "gpt.py:tiny", {
        "mesh.data": 8, "data.global_batch_size": 64, "train.accumulation": accumulation}),
        targets.TARGETS["h100"], 8).time.parts.items() if part.startswith("all-reduce")) for accumulation in (1, 2, 4)]
    assert took[0] < took[1] < took[2]
