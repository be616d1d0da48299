"""FLOP and bytes of compiled instructions, against counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.plan.cost import rates
from jaxtrain.plan.instructions import CONTAINERS, program
from jaxtrain.plan.roofline import Roofline
from jaxtrain.plan.targets import TARGETS


def compiled(f, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return program(jax.jit(f).lower(*args).compile().as_text())


def executed(code):
    """Return the instructions that run by themselves: neither containers nor inside of another instruction."""
    inside = {name for one in code.instructions.values() if one.opcode not in CONTAINERS for name in one.called}
    return [one for one in code.instructions.values()
            if one.opcode not in CONTAINERS and one.computation not in inside]


@pytest.mark.parametrize(("f", "shapes", "flops"), [
    (lambda x, w: x @ w, [(48, 32), (32, 64)], 2 * 48 * 32 * 64),
    (lambda x, w: jnp.tanh(x @ w) @ w.T, [(48, 32), (32, 64)], 4 * 48 * 32 * 64),
    (lambda q, k: jnp.einsum("bthk,bshk->bhts", q, k), [(2, 16, 4, 8), (2, 24, 4, 8)], 2 * 2 * 4 * 16 * 24 * 8)])
def test_flops_of_products(f, shapes, flops):
    assert sum(one.flops for one in executed(compiled(f, *shapes))) == flops


def test_a_step_has_the_flops_of_its_products():
    """Forward, and backward twice, of two layers in a loop: one execution of its body each."""
    def loss(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    code = compiled(jax.grad(loss), (2, 64, 64), (32, 64))
    assert sum(one.flops for one in executed(code)) == 3 * 2 * 32 * 64 * 64
    assert {one.dtype for one in executed(code) if one.flops} == {"f32"}


def test_bytes_of_an_elementwise_operation():
    run = [one for one in executed(compiled(lambda x, y: jnp.sin(x) * y + 1, (256, 64), (256, 64))) if one.bytes]
    assert sum(one.bytes for one in run) == 3 * 4 * 256 * 64


# As XLA for TPUs writes them: a product of matrices; one with a batch dimension of 8, of which each pair of positions
# shares one; and splash attention's kernels, whose metadata are broken over lines.
TPU = """HloModule jit_f

ENTRY %main (a: bf16[64,32], b: bf16[32,16], c: bf16[8,64,32], d: bf16[8,32,16]) -> f32[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  %c = bf16[8,64,32]{2,1,0} parameter(2)
  %d = bf16[8,32,16]{2,1,0} parameter(3)
  %e = s8[1,2,2]{2,1,0} parameter(4)
  %q = bf16[2,4,2048,64]{3,2,1,0} parameter(5)
  %k = bf16[2,1,2048,64]{3,2,1,0} parameter(6)
  %ids = s32[2,2048,128]{2,1,0} parameter(7)
  %many = f32[8,64,16]{2,1,0} convolution(%c, %d), window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf
  %attention.1 = (bf16[2,4,2048,64]{3,2,1,0}, f32[2,4,2048,128]{3,2,1,0}) custom-call(%e, %e, %q, %k, /*index=5*/%k, %ids), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 1024}"
}}, metadata={op_name="jit(f)/attention/window_0/splash_mha_fwd_segmented_residuals/pallas_call"}
  %attention.2 = bf16[2,4,2048,64]{3,2,1,0} custom-call(%e, %e, %q, %k, %k, %ids), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 1024}"
}}, metadata={op_name="jit(f)/transpose(jvp(attention))/window_128/splash_mha_dq_segmented_no_residuals/pallas_call"}
  ROOT %one = f32[64,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}
"""  # noqa: E501


def test_products_and_attention_of_tpus():
    code = program(TPU)
    flops = {name: one.flops for name, one in code.instructions.items() if one.flops}
    assert flops.pop("one") == 2 * 64 * 32 * 16
    assert flops.pop("many") == 8 * 2 * 64 * 32 * 16
    assert flops.pop("attention.1") == 2 * 2 * 4 * (64 + 64) * 3 * 1024**2  # three of four blocks
    assert flops.pop("attention.2") == 2 * 2 * 4 * (2 * 64 + 64) * 31 * 128**2  # those of the diagonal and before it
    assert not flops
    assert [code.instructions[f"attention.{n}"].attention for n in (1, 2)] == ["attention", "attention backward"]
    assert code.instructions["attention.1"].dtype == "bf16"


# Attention of jaxtrain's for packed documents, in a fusion with the slice of what was kept of a layer.
OWN = """HloModule jit_f

%sliced (kept: bf16[9,2,256,4,64], k: bf16[2,256,2,64], at: s32[]) -> bf16[2,256,4,64] {
  %kept = bf16[9,2,256,4,64]{4,3,2,1,0} parameter(0)
  %k = bf16[2,256,2,64]{3,2,1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %slice = bf16[1,2,256,4,64]{4,3,2,1,0} dynamic-slice(%kept, %at, %zero, %zero, %zero, /*index=5*/%zero), dynamic_slice_sizes={1,2,256,4,64}
  %q = bf16[2,256,4,64]{3,2,1,0} bitcast(%slice)
  ROOT %kernel = bf16[2,256,4,64]{3,2,1,0} custom-call(%q, %k, %k, %q), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/transpose(jvp(attention))/window_100/mosaic_attention_dq/mpmd_map"}
}

ENTRY %main (a: bf16[9,2,256,4,64], b: bf16[2,256,2,64], i: s32[]) -> bf16[2,256,4,64] {
  %a = bf16[9,2,256,4,64]{4,3,2,1,0} parameter(0)
  %b = bf16[2,256,2,64]{3,2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %fusion = bf16[2,256,4,64]{3,2,1,0} fusion(%a, %b, %i), kind=kCustom, calls=%sliced
}
"""  # noqa: E501


def test_attention_in_a_fusion():
    code = program(OWN)
    made = code.instructions["fusion"]
    assert made.flops == code.instructions["kernel"].flops == 2 * 2 * 4 * 3 * 64 * 3 * 128**2  # three of four blocks
    assert (made.attention, made.own, made.dtype) == ("attention backward", True, "bf16")
    assert made.attends == (64, 256)
    h100 = TARGETS["h100"]
    seconds = Roofline(h100, code, {}).computing(made, "attention")
    share = h100.efficiency["mosaic"] * rates.attention("mosaic", True, 64, 256)
    assert seconds == pytest.approx(made.flops / (h100.peak["bfloat16"] * share))


TEXT = """HloModule jit_f

%sliced (p: f32[16,8,4], at: s32[]) -> f32[8,4] {
  %p = f32[16,8,4]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,8,4]{2,1,0} dynamic-slice(%p, %at, %zero, %zero), dynamic_slice_sizes={1,8,4}
  ROOT %view = f32[8,4]{1,0} bitcast(%slice)
}

%cast (r: f32[16,8,4]) -> bf16[2,8,4] {
  %r = f32[16,8,4]{2,1,0} parameter(0)
  %narrow = bf16[16,8,4]{2,1,0} convert(%r)
  ROOT %two = bf16[2,8,4]{2,1,0} slice(%narrow), slice={[4:6], [0:8], [0:4]}
}

%updated (q: f32[16,8,4], new: f32[1,8,4], place: s32[]) -> f32[16,8,4] {
  %q = f32[16,8,4]{2,1,0} parameter(0)
  %new = f32[1,8,4]{2,1,0} parameter(1)
  %place = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %update = f32[16,8,4]{2,1,0} dynamic-update-slice(%q, %new, %place, %none, %none)
}

ENTRY %main (a: f32[16,8,4], b: f32[1,8,4], i: s32[]) -> f32[16,8,4] {
  %a = f32[16,8,4]{2,1,0} parameter(0)
  %b = f32[1,8,4]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %fusion.1 = f32[8,4]{1,0} fusion(%a, %i), kind=kLoop, calls=%sliced
  %fusion.3 = bf16[2,8,4]{2,1,0} fusion(%a), kind=kLoop, calls=%cast
  ROOT %fusion.2 = f32[16,8,4]{2,1,0} fusion(%a, %b, %i), kind=kLoop, calls=%updated
}
"""


def test_of_a_stack_only_the_slice_counts():
    code = program(TEXT)
    assert code.instructions["fusion.1"].bytes == 2 * 8 * 4 * 4 + 4
    assert code.instructions["fusion.2"].bytes == 2 * 8 * 4 * 4 + 4
    assert code.instructions["fusion.2"].result == "f32[16,8,4]"
    assert code.instructions["fusion.3"].bytes == 2 * 8 * 4 * (4 + 2)  # only what is taken of it is cast


def test_collectives_name_their_axes():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4],
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sizes = {"data": 2, "tensor": 2}

    def summed(x):
        return jax.lax.psum(jax.lax.psum(x, "tensor") * 2, ("data", "tensor"))

    f = jax.shard_map(summed, mesh=mesh, in_specs=jax.P("data", "tensor"), out_specs=jax.P(), check_vma=False)
    text = jax.jit(f).lower(jax.ShapeDtypeStruct((4, 4), np.float32)).compile().as_text()
    code = program(text)
    found = [code.axes(one, sizes) for one in code.instructions.values() if one.collective]
    assert ("tensor",) in found and ("data", "tensor") in found, text


KERNEL = ('custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/grouped_matmul_100_rows/mpmd_map"}')
GROUPED = f"""HloModule jit_f

%sliced (rows: bf16[256,64], stack: bf16[9,4,64,192], at: s32[], of: s32[3,6]) -> bf16[256,192] {{
  %rows = bf16[256,64]{{1,0}} parameter(0)
  %stack = bf16[9,4,64,192]{{3,2,1,0}} parameter(1)
  %at = s32[] parameter(2)
  %of = s32[3,6]{{1,0}} parameter(3)
  %zero = s32[] constant(0)
  %slice = bf16[1,4,64,192]{{3,2,1,0}} dynamic-slice(%stack, %at, %zero, %zero, %zero)
  %view = bf16[4,64,192]{{2,1,0}} bitcast(%slice)
  ROOT %kernel = bf16[256,192]{{1,0}} custom-call(%of, %rows, %view), {KERNEL}
}}

ENTRY %main (r: bf16[256,64], s: bf16[9,4,64,192], a: s32[], o: s32[3,6], d: bf16[256,192]) -> bf16[4,64,192] {{
  %r = bf16[256,64]{{1,0}} parameter(0)
  %s = bf16[9,4,64,192]{{3,2,1,0}} parameter(1)
  %a = s32[] parameter(2)
  %o = s32[3,6]{{1,0}} parameter(3)
  %d = bf16[256,192]{{1,0}} parameter(4)
  %forward = bf16[256,192]{{1,0}} fusion(%r, %s, %a, %o), kind=kCustom, calls=%sliced
  ROOT %weights = bf16[4,64,192]{{2,1,0}} custom-call(%o, %r, %d), {KERNEL}
}}
"""


@pytest.mark.parametrize("compiler", ["mosaic_gpu_v2", "__gpu$xla.gpu.triton"])
def test_a_grouped_matmul_counts_the_rows_that_exist(compiler):
    """The rows in the kernel's name count, and a block for each of four groups: 128 rows, or 64 of a sum over rows."""
    code = program(GROUPED.replace("mosaic_gpu_v2", compiler))
    forward, weights = code.instructions["forward"], code.instructions["weights"]
    assert (forward.flops, weights.flops) == (2 * (100 + 4 * 128) * 64 * 192, 2 * (100 + 4 * 64) * 64 * 192)
    assert forward.bytes == 2 * (100 * 64 + 4 * 64 * 192 + 256 * 192)
    assert weights.bytes == 2 * (100 * (64 + 192) + 4 * 64 * 192)
    h100, mesh = TARGETS["h100"], {"data": 1}
    reached = [one.flops / Roofline(h100, code, mesh).computing(one, "matmul") for one in (forward, weights)]
    assert reached == pytest.approx([h100.efficiency["grouped"] * h100.peak["bfloat16"]] * 2)


KERNEL_OF_CHUNKS = ('custom_call_target="__gpu$xla.gpu.triton", metadata={op_name='
                    '"jit(step)/recurrent_delta_outputs_gradients_123456_flop/pallas_call"}')


def test_a_kernel_of_chunks_tells_its_flop():
    """By its name, as Triton's kernels keep no other record; its products are of float32, rounded to TF32."""
    code = program(f"""HloModule jit_f

ENTRY %main (k: bf16[2,1,4,64,128], y: f32[2,1,4,64,128]) -> f32[2,1,4,64,128] {{
  %k = bf16[2,1,4,64,128]{{4,3,2,1,0}} parameter(0)
  %y = f32[2,1,4,64,128]{{4,3,2,1,0}} parameter(1)
  ROOT %kernel = f32[2,1,4,64,128]{{4,3,2,1,0}} custom-call(%k, %y), {KERNEL_OF_CHUNKS}
}}
""")
    kernel, elements = code.instructions["kernel"], 2 * 4 * 64 * 128
    assert (kernel.flops, kernel.dtype, kernel.rounds) == (123456, "f32", True)
    assert kernel.bytes == (2 + 4 + 4) * elements
