"""The simulated timeline of a compiled step: rooflines, loops, what is hidden and what is waited for, dead code."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.plan.instructions import program
from jaxtrain.plan.report.compiled_step import drawing
from jaxtrain.plan.source_lines import source_lines
from jaxtrain.plan.targets import TARGETS
from jaxtrain.plan.timeline import simulate

H100 = TARGETS["h100"]
RATES = H100.among(8).efficiency
PRODUCT = 2 * 4096**3 / (RATES["matmul"] * 989e12) + H100.launch  # seconds of a square product, compute bound
# Of 8 x [512, 4096] bfloat16 over NVLink.
GATHER = 7 * 512 * 4096 * 2 / (RATES["links"] * 450e9) + 7 * 4e-6

# ruff: noqa: E501
# As XLA for GPUs prints a step on 4 devices: a loop of 3 turns in which a gather runs beside a product.
STEP = """HloModule jit_step, is_scheduled=true, num_partitions=8

FileNames
1 "/somewhere/jaxtrain/models/layers.py"
2 "/somewhere/jaxtrain/sharding/axis_rules.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=41 end_line=41 column=1 end_column=1}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%cond (p: (s32[], bf16[4096,4096])) -> pred[] {
  %p = (s32[], bf16[4096,4096]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%p), index=0
  %end = s32[] constant(3)
  ROOT %less = pred[] compare(%at, %end), direction=LT
}

%body (q: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {
  %q = (s32[], bf16[4096,4096]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %x = bf16[4096,4096]{1,0} get-tuple-element(%q), index=1
  %part = bf16[512,4096]{1,0} slice(%x), slice={[0:512],[0:4096]}
  %begun = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%part), replica_groups=[1,8]<=[8], dimensions={0}
  BESIDE
  %whole = bf16[4096,4096]{1,0} all-gather-done(%begun)
  %unread = bf16[4096,4096]{1,0} add(%whole, %whole)
  %after = bf16[4096,4096]{1,0} dot(%whole, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/mlp/dot" stack_frame_id=2}
  ROOT %next = (s32[], bf16[4096,4096]{1,0}) tuple(%i, %after)
}

ENTRY %main (a: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %begin = (s32[], bf16[4096,4096]{1,0}) tuple(%zero, %a)
  %loop = (s32[], bf16[4096,4096]{1,0}) while(%begin), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %out = bf16[4096,4096]{1,0} get-tuple-element(%loop), index=1
}
"""
BESIDE = "%beside = bf16[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def timeline(text: str):
    return simulate(program(text), H100, {"data": 1, "fsdp": 8})


def by_name(text: str):
    return {one.instruction.name: one for one in timeline(text).operations}


def test_a_gather_beside_a_product_makes_it_slower_and_alone_costs_all_of_its_time():
    """As in the planner, all but the target's overlap of what runs beside computation is waited for."""
    behind, alone = timeline(STEP.replace("BESIDE", BESIDE)), timeline(STEP.replace("BESIDE", ""))
    assert behind.exposed == pytest.approx(3 * (1 - RATES["overlap"]) * GATHER, rel=1e-6)
    assert behind.hidden()["all-gather over fsdp"] == pytest.approx(3 * RATES["overlap"] * GATHER, rel=1e-6)
    assert alone.exposed == pytest.approx(3 * GATHER, rel=1e-6)
    # The product beside costs what it takes, less what it hid.
    assert behind.seconds - alone.seconds == pytest.approx(3 * PRODUCT + behind.exposed - alone.exposed, rel=1e-6)


def test_links_with_engines_of_their_own_hide_all_of_it():
    apart = dataclasses.replace(H100, efficiency={**H100.efficiency, "overlap": 1.0})
    assert simulate(program(STEP.replace("BESIDE", BESIDE)), apart, {"data": 1, "fsdp": 8}).exposed == 0


def test_a_synchronous_collective_is_waited_for():
    text = STEP.replace("BESIDE", BESIDE).replace("dimensions={0}\n", 'dimensions={0}, backend_config={"is_sync":true}\n')
    assert timeline(text).exposed == pytest.approx(3 * GATHER, rel=0.01)


EXCHANGE = """
HloModule jit_step, num_partitions=8

ENTRY %main (a: bf16[4096,4096], b: bf16[8192,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %b = bf16[8192,4096]{1,0} parameter(1)
  %n = s32[8] constant({512,512,512,512,512,512,512,512})
  %there = bf16[8192,4096]{1,0} ragged-all-to-all(%a, %b, %n, %n, %n, %n), replica_groups=[1,8]<=[8]
  ROOT %back = bf16[4096,4096]{1,0} ragged-all-to-all(%there, %a, %n, %n, %n, %n), replica_groups=[1,8]<=[8]
}
"""


def test_tokens_are_sent_and_not_the_buffer_with_room_for_more():
    there, back = (by_name(EXCHANGE)[name].exposed for name in ("there", "back"))
    assert there == back == pytest.approx(7 / 8 * 2 * 4096**2 / (RATES["links"] * 450e9) + 7 * 4e-6)


def test_loops_count_their_turns_and_products_their_flop():
    step = timeline(STEP.replace("BESIDE", BESIDE))
    assert step.flops == 3 * 2 * 2 * 4096**3
    assert {loop.name: loop.times for loop in step.loops} == {"main": 1, "body": 3}
    assert step.by_kind()["matmul"] == pytest.approx(6 * PRODUCT, rel=0.01)
    assert step.seconds == pytest.approx(sum(step.by_kind().values()))


def test_what_nothing_reads_is_dead():
    found = by_name(STEP.replace("BESIDE", BESIDE))
    assert {name for name, one in found.items() if one.dead} == {"unread", "beside"}


def test_memory_bound_operations_take_the_time_of_their_bytes():
    assert by_name(STEP.replace("BESIDE", ""))["unread"].seconds == pytest.approx(
        3 * (3 * 4096**2 * 2 / (RATES["memory"] * 3352e9) + H100.launch), rel=1e-6)


def test_copies_to_the_host_and_back_take_the_time_of_its_link():
    away = "%unread = bf16[4096,4096]{1,0:S(5)} copy(%whole)\n  %back = bf16[4096,4096]{1,0} copy(%unread)"
    begun = ("%begun2 = (bf16[4096,4096]{1,0:S(5)}, bf16[4096,4096]{1,0}, u32[]) copy-start(%whole)\n"
             "  %unread = bf16[4096,4096]{1,0:S(5)} copy-done(%begun2)")
    of_step = STEP.replace("BESIDE", "").replace("%unread = bf16[4096,4096]{1,0} add(%whole, %whole)", "COPIES")
    once = 3 * 4096**2 * 2 / H100.host
    both, alone = by_name(of_step.replace("COPIES", away)), by_name(of_step.replace("COPIES", begun))
    assert [both[name].seconds for name in ("unread", "back")] == pytest.approx([once, once], rel=0.01)
    assert alone["begun2"].seconds == pytest.approx(once, rel=0.01)
    assert {both["unread"].kind, both["back"].kind, alone["begun2"].kind} == {"copies"}


def test_a_slice_that_is_fetched_beside_computation_costs_what_is_waited_for():
    """The part that is fetched counts, not the whole array."""
    fetched = ("%begun2 = ((bf16[4096,4096]{1,0}), bf16[1024,4096]{1,0:S(1)}, u32[]) slice-start(%whole)\n"
               "  %unread = bf16[1024,4096]{1,0:S(1)} slice-done(%begun2)")
    found = by_name(STEP.replace("BESIDE", "").replace("%unread = bf16[4096,4096]{1,0} add(%whole, %whole)", fetched))
    assert found["begun2"].kind == "copies"
    assert found["begun2"].seconds == pytest.approx(
        3 * (2 * 1024 * 4096 * 2 / (RATES["memory"] * 3352e9) + H100.launch), rel=1e-6)


def test_the_line_is_the_model_s_and_not_a_helper_s():
    text = STEP.replace("BESIDE", "")
    assert source_lines(text)(program(text).instructions["after"]) == "models/layers.py:41"


def test_the_drawing_has_a_panel_for_each_loop():
    drawn = drawing(timeline(STEP.replace("BESIDE", BESIDE)))
    assert drawn.startswith("<svg") and "body: 3 times" in drawn and "all-gather over fsdp" in drawn


def test_a_program_compiled_here_adds_up():
    def step(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    x, w = jnp.ones((256, 256)), jnp.ones((5, 256, 256))
    text = jax.jit(step).lower(x, w).compile().as_text()
    found = simulate(program(text), TARGETS["cpu"], {"data": 1})
    assert found.flops == pytest.approx(5 * 2 * 256**3)
    assert found.seconds >= 5 * 2 * 256**3 / TARGETS["cpu"].peak["float32"]


@pytest.mark.parametrize(("precision", "rate"), [
    ("", 989e12 / 2), (", operand_precision={highest,highest}", 2 * 132 * 128 * 1.98e9)])
def test_products_of_float32_are_rounded_unless_the_program_says_otherwise(precision, rate):
    """XLA computes those of default precision in TF32, half as fast as bfloat16; others without tensor cores."""
    text = STEP.replace("BESIDE", BESIDE + precision).replace("bf16", "f32")
    took = max(one.seconds for one in timeline(text).operations if one.instruction.name == "beside") / 3
    assert took == pytest.approx(2 * 4096**3 / (RATES["matmul"] * rate) + H100.launch, rel=1e-6)
