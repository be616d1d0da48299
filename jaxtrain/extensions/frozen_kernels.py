"""Frozen kernels in 8 or 4 bits (`lora.quantize`, QLoRA): given parameters are quantized as a run begins.

How they compute is in models/layers.py, and how they rest in train_step/quantized_kernels.py.
"""

from jaxtrain.run import Extension
from jaxtrain.train_step import quantized_kernels
from jaxtrain.train_step.state import Params


class QuantizedKernels(Extension):
    """The form of given parameters: floats, which are quantized here, or quantized already."""

    def accepted(self, abstract: Params, params: Params) -> Params:
        """Return the shapes of whole kernels, unless those that are given are quantized."""
        return abstract if quantized_kernels.are_quantized(params) else quantized_kernels.as_floats(abstract)

    def kept(self, abstract: Params, params: Params) -> Params:
        """Return the parameters with the kernels quantized that the run keeps so."""
        return quantized_kernels.quantized_like(abstract, params)
