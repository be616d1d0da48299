"""The accounting of time: overlapping events divided, and the traces that profilers of GPUs and TPUs write, read."""

import jax
import pytest

from jaxtrain.plan import kinds
from jaxtrain.plan.instructions import program
from jaxtrain.plan.targets import TARGETS
from jaxtrain.profiling import accounting, trace

# As XLA for GPUs prints a step, cut down: a product in cuBLAS, attention in cuDNN, an all-gather that runs beside.
GPU_PROGRAM = """HloModule jit_step, num_partitions=4

%fused_add (p0: bf16[128,64], p1: bf16[128,64]) -> bf16[128,64] {
  %p0 = bf16[128,64]{1,0} parameter(0)
  %p1 = bf16[128,64]{1,0} parameter(1)
  ROOT %add.1 = bf16[128,64]{1,0} add(%p0, %p1)
}

ENTRY %main (x: bf16[128,32], w: bf16[32,64], q: bf16[2,64,4,16], small: bf16[8,64]) -> bf16[128,64] {
  %x = bf16[128,32]{1,0} parameter(0)
  %w = bf16[32,64]{1,0} parameter(1)
  %q = bf16[2,64,4,16]{3,2,1,0} parameter(2)
  %small = bf16[8,64]{1,0} parameter(3)
  %all-gather-start.1 = (bf16[8,64]{1,0}, bf16[32,64]{1,0}) all-gather-start(%small), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, use_global_device_ids=true
  %custom-call.1 = bf16[128,64]{1,0} custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}, metadata={op_name="jit(step)/jvp()/dot_general"}
  %custom-call.2 = bf16[2,64,4,16]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(step)/jvp()/attention/custom_call"}
  %all-gather-done.1 = bf16[32,64]{1,0} all-gather-done(%all-gather-start.1)
  %loop_add_fusion.7 = bf16[128,64]{1,0} fusion(%custom-call.1, %custom-call.1), kind=kLoop, calls=%fused_add, metadata={op_name="jit(step)/optimizer/add"}
  ROOT %copy.9 = bf16[128,64]{1,0} copy(%loop_add_fusion.7)
}
"""  # noqa: E501
MESH = {"data": 1, "fsdp": 4, "tensor": 1}


def gpu_trace(*events, line="Stream #13(Compute)", plane="/device:GPU:0", more=""):
    """A trace as text: (kernel, operation, start, end) in microseconds, by line where a fifth value names one."""
    lines, names = {}, {}
    for kernel, operation, start, end, *where in events:
        number = names.setdefault(kernel, len(names) + 1)
        stat = f'stats {{ metadata_id: 1 str_value: "{operation}" }}' if operation else ""
        lines.setdefault(where[0] if where else line, []).append(
            f"events {{ metadata_id: {number} offset_ps: {start * 10**6} "
            f"duration_ps: {(end - start) * 10**6} {stat} }}")
    text = "".join(f'lines {{ id: {n} name: "{name}" {" ".join(those)} }}' for n, (name, those) in enumerate(
        lines.items()))
    meta = "".join(f'event_metadata {{ key: {n} value {{ id: {n} name: "{kernel}" }} }}'
                   for kernel, n in names.items())
    meta += 'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }'
    one = f'planes {{ id: 1 name: "{plane}" {text} {meta} }}'
    return jax.profiler.ProfileData.from_text_proto(one + more)


def test_overlapping_events_are_divided_and_add_up():
    def event(name, start, end):
        return trace.Event(name, name, start, end)

    product, other, talk, loop = event("a", 0, 10), event("b", 5, 10), event("c", 8, 20), event("d", 0, 40)
    late = event("e", 30, 35)
    rank = {"a": 0, "b": 0, "c": 1, "d": 2, "e": 0}
    own, hidden, idle = trace.divide([late, loop, product, other, talk], lambda event: rank[event.operation])
    assert own == {product: 7.5, other: 2.5, talk: 10, late: 5, loop: 15} and idle == 0
    assert hidden[talk] == 2 and hidden[loop] == 25
    own, _, idle = trace.divide([product, late], lambda event: 0)
    assert (own[product], own[late], idle) == (10, 5, 20)


def test_a_gpus_kernels_are_told_apart_by_operation_and_by_name():
    found = list(trace.events_of(gpu_trace(
        ("nvjet_hsh_128x64", "custom-call.1", 0, 100), ("cudnn_generated_fort_native_sdpa", "custom-call.2", 100, 150),
        ("ncclDevKernel_AllGather_RING_LL", "all-gather-start.1", 90, 180, "Stream #20(Communication)"),
        ("loop_add_fusion_7", "command_buffer_1", 200, 230), ("ampere_bf16_gemm", "", 230, 240),
        ("MemcpyD2D", "copy.9", 240, 250, "Stream #14(MemcpyD2D)"))))
    made = accounting.account(found, program(GPU_PROGRAM), 1, MESH, TARGETS["h100"])
    assert made["kinds_ms"] == pytest.approx({
        "matmul": 0.110, "attention": 0.050, "all-gather over fsdp": 0.030, "optimizer": 0.030, "gaps": 0.020,
        "elementwise": 0.010})
    assert sum(made["kinds_ms"].values()) == pytest.approx(made["step_ms"]) == pytest.approx(0.250)
    assert made["hidden_ms"] == pytest.approx({"all-gather over fsdp": 0.060})
    product = made["kernels"][0]
    assert (product["name"], product["kind"], product["runs"]) == ("custom-call.1", "matmul", 1)
    assert product["flops_per_s"] == pytest.approx(2 * 128 * 32 * 64 / 100e-6)
    moved = 2 * (128 * 32 + 32 * 64 + 128 * 64)
    assert product["bytes_per_s"] == pytest.approx(moved / 100e-6)
    assert product["roofline"] == pytest.approx(moved / TARGETS["h100"].bandwidth / 100e-6)


def test_an_operation_of_several_kernels_ran_once_and_its_workspace_is_not_moved():
    """cuBLAS may split a product into two kernels, and returns its workspace beside the result."""
    text = GPU_PROGRAM.replace("%custom-call.1 = bf16[128,64]{1,0} custom",
                               "%custom-call.1 = (bf16[128,64]{1,0}, s8[33554432]{0}) custom")
    found = list(trace.events_of(gpu_trace(
        ("nvjet_splitK", "custom-call.1", 0, 60), ("reduce_splitK", "custom-call.1", 60, 100),
        ("nvjet_splitK", "custom-call.1", 100, 160), ("reduce_splitK", "custom-call.1", 160, 200))))
    product, = accounting.account(found, program(text), 2, MESH, None)["kernels"]
    assert product["runs"] == 1 and product["ms"] == pytest.approx(0.1)
    assert product["flops_per_s"] == pytest.approx(2 * 128 * 32 * 64 / 100e-6)
    assert product["bytes_per_s"] == pytest.approx(2 * (128 * 32 + 32 * 64 + 128 * 64) / 100e-6)


def test_a_fusion_that_names_no_scope_has_that_of_its_product():
    text = GPU_PROGRAM.replace("ROOT %add.1 = bf16[128,64]{1,0} add(%p0, %p1)",
                               'ROOT %add.1 = bf16[128,64]{1,0} add(%p0, %p1), metadata={op_name="jvp(loss_head)/dot"}')
    code = program(text.replace(', metadata={op_name="jit(step)/optimizer/add"}', ""))
    assert kinds.kind_of(code.instructions["loop_add_fusion.7"], code, MESH) == kinds.HEAD


def test_a_trace_without_the_device_is_not_taken_for_one(tmp_path):
    host = gpu_trace(("add", "add.1", 0, 10), plane="/host:CPU")
    assert len(list(trace.events_of(host, "cpu"))) == 1 and not list(trace.events_of(host, "gpu"))
    with pytest.raises(FileNotFoundError, match="wrote no trace"):
        trace.newest(tmp_path)


def test_a_tpus_operations_are_on_a_line_of_their_own():
    found = list(trace.events_of(gpu_trace(
        ("%loop_add_fusion.7 = bf16[128,64] fusion(...)", "", 0, 10, "XLA Ops"), ("jit_step", "", 0, 10, "XLA Modules"),
        plane="/device:TPU:0")))
    assert [(event.operation, event.end - event.start) for event in found] == [("loop_add_fusion.7", 10_000)]


def test_gaps_are_divided_by_what_the_host_did_in_them():
    """The innermost of what it did counts; "" is what has no name."""
    idle = trace.gaps([trace.Event(name, name, *span) for name, span in {
        "a": (0, 10), "inside": (2, 5), "b": (20, 30), "c": (30, 40), "d": (60, 61)}.items()])
    assert idle == [(10, 20), (40, 60)]
    doing = [("checkpoint", 5, 50), ("data_wait", 12, 15), ("data_wait", 55, 58), ("eval", 70, 80)]
    assert trace.waits(idle, doing) == {"checkpoint": 17.0, "data_wait": 6.0, "": 7.0}
    assert trace.gaps([]) == [] and trace.waits([], doing) == {}


def test_what_the_loop_does_is_read_from_the_hosts_lines():
    data = gpu_trace(("jaxtrain:data_wait", "", 5, 9), ("PjitFunction(step)", "", 9, 12), plane="/host:CPU")
    assert trace.activities(data) == [("data_wait", 5_000, 9_000)]


def test_operations_of_another_program_are_told_apart():
    """An evaluation has instructions of the same names as the step."""
    def module(name):
        return f'stats {{ metadata_id: 2 str_value: "{name}" }}'

    def event(start, name):
        return (f'events {{ metadata_id: 1 offset_ps: {start * 10**6} duration_ps: 1000000 stats {{ metadata_id: 1 '
                f'str_value: "custom-call.1" }} {module(name)} }}')

    meta = "".join(f'stat_metadata {{ key: {n} value {{ id: {n} name: "{name}" }} }}'
                   for n, name in ((1, "hlo_op"), (2, "hlo_module")))
    data = jax.profiler.ProfileData.from_text_proto(
        f'planes {{ id: 1 name: "/device:GPU:0" lines {{ id: 1 name: "Stream #1" {event(0, "jit_step")} '
        f'{event(1, "jit_evaluation")} }} event_metadata {{ key: 1 value {{ id: 1 name: "gemm" }} }} {meta} }}')
    found = trace.events(data, "gpu", "jit_step")
    made = accounting.account(found, program(GPU_PROGRAM), 1, MESH, None)
    assert made["kinds_ms"] == pytest.approx({"matmul": 0.001, "other programs": 0.001, "gaps": 0.0})
    assert [event.operation for event in trace.events(data, "gpu")] == ["custom-call.1"] * 2


def test_only_the_first_device_is_read():
    other = """planes { id: 2 name: "/device:GPU:10" lines { id: 1 name: "Stream #1" events {
                 metadata_id: 1 duration_ps: 5 } } event_metadata { key: 1 value { id: 1 name: "other" } } }"""
    data = gpu_trace(("mine", "mine", 0, 1), plane="/device:GPU:2", more=other)
    assert [event.operation for event in trace.events_of(data)] == ["mine"]


@pytest.mark.parametrize(("path", "kind"), [
    ("jit(step)/transpose(jvp())/while/body/attention/mul", kinds.ATTENTION),
    ("jit(step)/jvp(loss_head)/dot_general", kinds.HEAD), ("jit(step)/optimizer/cond/branch/add", kinds.OPTIMIZER),
    ("jit(step)/jvp()/my_attention_like/add", kinds.ELEMENTWISE), ("", kinds.ELEMENTWISE)])
def test_scopes_tell_the_kind(path, kind):
    code = program(GPU_PROGRAM.replace("jit(step)/optimizer/add", path))
    assert kinds.kind_of(code.instructions["loop_add_fusion.7"], code, MESH) == kind


@pytest.mark.parametrize(("kernel", "kind"), [
    ("ncclDevKernel_AllReduce", "collectives"), ("flash_fwd_kernel", "attention"), ("sm90_xmma_gemm_f32", "matmul"),
    ("MemcpyH2D", "copies"), ("something_else", "other programs")])
def test_kernels_of_libraries(kernel, kind):
    assert kinds.kind_of_kernel(kernel) == kind


def test_a_kernel_that_is_launched_four_times_for_one_operation_counts_once():
    """cuDNN's attention on an H200 is so launched; the rate of the others would be four times too high."""
    once = [trace.Event(name, name, 0, 1) for name in ("custom-call.1", "loop_add_fusion.7")]
    four = [trace.Event("custom-call.2", "sdpa", 100 + n, 101 + n) for n in range(4)]
    for steps in (1, 3):
        found = accounting._executions((once + four) * steps, program(GPU_PROGRAM))
        assert found == dict.fromkeys(("custom-call.1", "loop_add_fusion.7", "custom-call.2"), steps)
