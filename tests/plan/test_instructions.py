"""FLOP and bytes of compiled instructions, against counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.plan.instructions import CONTAINERS, program


def compiled(f, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return program(jax.jit(f).lower(*args).compile().as_text())


def executed(code):
    """What runs by itself: neither a container nor inside of another instruction."""
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


TEXT = """HloModule jit_f

%sliced (p: f32[16,8,4], at: s32[]) -> f32[8,4] {
  %p = f32[16,8,4]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,8,4]{2,1,0} dynamic-slice(%p, %at, %zero, %zero), dynamic_slice_sizes={1,8,4}
  ROOT %view = f32[8,4]{1,0} bitcast(%slice)
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
  ROOT %fusion.2 = f32[16,8,4]{2,1,0} fusion(%a, %b, %i), kind=kLoop, calls=%updated
}
"""


def test_of_a_stack_only_the_slice_counts():
    code = program(TEXT)
    assert code.instructions["fusion.1"].bytes == 2 * 8 * 4 * 4 + 4
    assert code.instructions["fusion.2"].bytes == 2 * 8 * 4 * 4 + 4
    assert code.instructions["fusion.2"].result == "f32[16,8,4]"


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
