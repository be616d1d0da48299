"""Llama's MLP with fixed factors of its gate and of what it returns."""

import jax
from flax import nnx

from jaxtrain.kernels.functions import swiglu
from jaxtrain.models.layers import SwiGLU


class MultipliedSwiGLU(SwiGLU):
    """The SiLU of a gate times a factor, times up, then down, times another factor."""

    def __init__(self, *sizes: int, gate_factor: float, down_factor: float, out_std: float, bias: bool, rngs: nnx.Rngs):
        super().__init__(*sizes, out_std=out_std, bias=bias, rngs=rngs)
        self.gate_factor, self.down_factor = gate_factor, down_factor

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate = self.gate(x_BTD)
        y_BTD = self.down(swiglu((gate * self.gate_factor).astype(gate.dtype), self.up(x_BTD)))
        return (y_BTD * self.down_factor).astype(y_BTD.dtype)
