"""Collectives are counted as often as a device executes them, in the ways in which XLA for TPUs writes them down."""

from jaxtrain.plan import hlo

GROUPS = "replica_groups={{0,1,2,3}}, use_global_device_ids=true"
LOOP = """HloModule step, num_partitions=4

%body (p.1: (bf16[8,4], u32[])) -> (bf16[8,4], u32[]) {
  %p.1 = (bf16[8,4]{1,0:T(8,128)(2,1)}, u32[]{:T(128)}) parameter(0)
  %at.1 = u32[]{:T(128)} get-tuple-element(%p.1), index=1
  %x = bf16[8,4]{1,0:T(8,128)(2,1)} get-tuple-element(%p.1), index=0
  %one = bf16[8,4]{1,0:T(8,128)(2,1)} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %two = bf16[8,4]{1,0:T(8,128)(2,1)} collective-permute(%one), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %by = u32[]{:T(128)} constant(STEP)
  %next = u32[]{:T(128)} add(%at.1, %by)
  ROOT %out = (bf16[8,4]{1,0:T(8,128)(2,1)}, u32[]{:T(128)}) tuple(%two, %next)
}

%cond (p.2: (bf16[8,4], u32[])) -> pred[] {
  %bound = u32[]{:T(128)} constant(8)
  %p.2 = (bf16[8,4]{1,0:T(8,128)(2,1)}, u32[]{:T(128)}) parameter(0)
  %at.2 = u32[]{:T(128)} get-tuple-element(%p.2), index=1
  ROOT %less = pred[]{:T(512)} compare(%at.2, %bound), direction=LT
}

ENTRY %main (a: bf16[8,4]) -> bf16[8,4] {
  %a = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = u32[]{:T(128)} constant(0)
  %start = (bf16[8,4]{1,0:T(8,128)(2,1)}, u32[]{:T(128)}) tuple(%a, %zero)
  %loop = (bf16[8,4]{1,0:T(8,128)(2,1)}, u32[]{:T(128)}) while(%start), condition=%cond, body=%body
  ROOT %result = bf16[8,4]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=0
}
"""
BESIDE = f"""HloModule step, num_partitions=4

%begins (p.1: bf16[2,4]) -> bf16[8,4] {{
  %p.1 = bf16[2,4]{{1,0}} parameter(0)
  ROOT %gather.1 = bf16[8,4]{{1,0}} all-gather(%p.1), channel_id=7, {GROUPS}, dimensions={{0}}
}}

%goes_on (p.2: bf16[2,4]) -> bf16[8,4] {{
  %p.2 = bf16[2,4]{{1,0}} parameter(0)
  ROOT %gather.2 = bf16[8,4]{{1,0}} all-gather(%p.2), channel_id=7, {GROUPS}, dimensions={{0}}
}}

ENTRY %main (a: bf16[2,4]) -> bf16[8,4] {{
  %a = bf16[2,4]{{1,0}} parameter(0)
  %first = bf16[8,4]{{1,0}} fusion(%a), kind=kCustom, calls=%begins
  %second = bf16[8,4]{{1,0}} fusion(%a), kind=kCustom, calls=%goes_on
  ROOT %other = bf16[8,4]{{1,0}} all-gather(%a), channel_id=8, {GROUPS}, dimensions={{0}}
}}
"""


def test_a_loop_that_counts_in_twos_runs_half_as_often():
    assert [found.times for found in hlo.collectives(LOOP.replace("STEP", "1"))] == [8, 8]
    assert [found.times for found in hlo.collectives(LOOP.replace("STEP", "2"))] == [4, 4]
    assert [found.times for found in hlo.collectives(LOOP.replace("STEP", "3"))] == [3, 3]


def test_what_runs_beside_several_fusions_is_one():
    assert [found.bytes for found in hlo.collectives(BESIDE)] == [64, 64]
