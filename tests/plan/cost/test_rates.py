"""The rates that the planner and the simulator share: they say what was measured, and both use them alike."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.plan.cost import rates, time
from jaxtrain.plan.instructions import program
from jaxtrain.plan.targets import TARGETS
from jaxtrain.plan.timeline import simulate
from jaxtrain.plan.trace.kernels import flops, of_documents, packed_flops
from jaxtrain.plan.trace.program import Block, Op, Value

LINES = [json.loads(line) for line in
         (Path(__file__).parents[3] / "docs/measurements/h200.jsonl").read_text().splitlines()]
ALONE = {line["name"]: line["figures"] for line in LINES if line["label"] == "h200_attention"}
SHAPES = {(64, 1024): "64 x 1024, 12 heads of 64, 12 of keys", (64, 4096): "16 x 4096, 32 heads of 64, 8 of keys",
          (128, 4096): "4 x 4096, 32 heads of 128, 8 of keys", (128, 32768): "1 x 32768, 32 heads of 128, 8 of keys"}
PEAK, H200 = TARGETS["h200"].peak["bfloat16"], TARGETS["h200"]


def work(kernel: str, rows: int, length: int, heads: int, width: int) -> tuple[float, float]:
    """Return the FLOP forward and backward that the planner counts."""
    shape = (rows, length, heads, width)
    if kernel == "mosaic":
        each = {phase: packed_flops(phase, [shape] * 3) for phase in ("fwd", "dq", "dkv")}
        return each["fwd"], each["dq"] + each["dkv"]
    mask = [(rows, 1, length, length)] if kernel == "masked" else []
    return (flops("attention_forward", [shape] * 3 + mask), flops("attention_backward", [shape] * 6 + mask))


@pytest.mark.parametrize(("kernel", "backward"), rates.ATTENTION)
def test_rates_of_attention_are_those_that_were_timed(kernel, backward):
    shares = []
    for (width, length), name in SHAPES.items():
        rows, heads = int(name.split(" x ")[0]), int(name.split(", ")[1].split()[0])
        timed = ALONE[name + {"mosaic": ": mosaic, one document", "cudnn": ": cudnn, one document",
                              "masked": ": cudnn"}[kernel]]
        seconds = (timed["both_ms"] - timed["forward_ms"] if backward else timed["forward_ms"]) / 1e3
        shares.append(work(kernel, rows, length, heads, width)[backward] / seconds / PEAK)
    assert rates.ATTENTION[kernel, backward] == pytest.approx(shares, abs=2e-3)
    found = [rates.attention(kernel, backward, *shape) * rates.reference(kernel) for shape in rates.SHAPES]
    assert found == pytest.approx(shares, abs=3e-3)


def test_h200_reaches_them_in_plans_and_others_less():
    assert H200.efficiency["attention"] == pytest.approx(rates.reference("cudnn"), abs=5e-3)
    assert H200.efficiency["mosaic"] == pytest.approx(rates.reference("mosaic"), abs=5e-3)
    assert TARGETS["h100"].efficiency["attention"] < H200.efficiency["attention"]


def test_four_documents_in_a_row_take_what_they_took():
    """Rows of documents of about a quarter of their length (tools/device/accelerator_parts.py)."""
    for (width, length), name in SHAPES.items():
        timed = [ALONE[f"{name}: mosaic{more}"]["both_ms"] for more in ("", ", one document")]
        one, four = (sum(work("mosaic", 1, length, 1, width)[back] * share /
                         rates.attention("mosaic", back, width, length * share) for back in (False, True))
                     for share in (1.0, of_documents(length, 4)))
        assert four / one == pytest.approx(timed[0] / timed[1], rel=0.15), name


def test_rates_fall_for_short_rows_and_narrow_heads_and_stop_at_the_ends():
    of = [rates.attention("mosaic", False, 128, length) for length in (512, 1024, 8192, 32768)]
    assert of == sorted(of) and of[0] > 0
    assert rates.attention("cudnn", True, 256, 1 << 20) == rates.attention("cudnn", True, 128, 1 << 16)
    assert rates.attention("splash", False, 64, 1024) == 1.0


def array(*shape: int, dtype: str = "bfloat16") -> Value:
    return Value(shape, jnp.dtype(dtype), ((),) * len(shape), int(np.prod(shape)) * jnp.dtype(dtype).itemsize)


# ruff: noqa: E501
SAME = """HloModule step, num_partitions=1

ENTRY %main (a: bf16[8192,4096]) -> bf16[8192,4096] {
  %a = bf16[8192,4096]{1,0} parameter(0)
  %w = bf16[4096,4096]{1,0} parameter(1)
  %product = bf16[8192,4096]{1,0} dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="SCOPE"}
  ROOT %sum = bf16[8192,4096]{1,0} negate(%a), metadata={op_name="SCOPE"}
}
"""


@pytest.mark.parametrize("scope", ["", "loss_head", "optimizer"])
@pytest.mark.parametrize("name", ["h200", "h100", "v5p"])
def test_both_predictors_give_the_same_kernel_the_same_time(name, scope):
    target = TARGETS[name]
    simulated = {one.instruction.name: one.seconds for one in simulate(
        program(SAME.replace("SCOPE", scope)), target, {"data": 1}).operations}
    a, w, out = array(8192, 4096), array(4096, 4096), array(8192, 4096)
    for op, took in ((Op("dot_general", "real", [a, w], [out], flops=2.0 * 8192 * 4096**2, scope=scope), "product"),
                     (Op("cumsum", "real", [a], [out], scope=scope), "sum")):
        out.op = op
        planned = time.estimate(Block([a, w], [op], [out]), target, {"data": 1}).seconds
        assert planned == pytest.approx(simulated[took], rel=1e-6)


def test_the_head_s_passes_are_slower_and_the_optimizer_s_faster():
    of = {kind: rates.of(H200.efficiency, kind, "cuda") for kind in ("passes", "memory", "optimizer")}
    assert of["passes"] < of["memory"] < of["optimizer"] < 1
    assert rates.of(TARGETS["v5p"].efficiency, "passes", "tpu") == TARGETS["v5p"].efficiency["memory"]
