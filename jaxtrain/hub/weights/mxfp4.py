"""Weights in MXFP4, as gpt-oss's experts are published: values of four bits in blocks of 32, with a scale each.

A value is a sign, two bits of exponent and one of mantissa (e2m1); a byte has two of them, the first one in its low
bits. A scale is a power of two, as a byte that is 127 more than its exponent (e8m0). The format is that of the Open
Compute Project's Microscaling specification, version 1.0. Every product of both is a number that bfloat16 holds.

Of a matrix of each expert the published tensors are NAME_blocks [experts, outputs, inputs / 32, 16] and NAME_scales
[experts, outputs, inputs / 32], where other files have NAME [experts, inputs, outputs]. Slices are read block by block
and matrix by matrix, so that no more is in memory than what was asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.hub.weights.safetensors_files import OTHERS, Tensor

BLOCK = 32
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # by their four bits


@dataclass(frozen=True)
class Packed:
    """A matrix of each expert in blocks of four-bit values, of which nothing is read yet."""

    blocks: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor has in other files: experts, inputs, outputs."""
        experts, outputs, blocks = self.scales.shape
        return experts, blocks * BLOCK, outputs

    def read(self, index: Sequence[slice], part: tuple[int, int] = (0, 1)) -> np.ndarray:
        """Return a slice [experts, inputs, outputs] in float32; `part`: of which of how many outputs that take turns.
        """
        (which, several), (experts, inputs, outputs) = part, self.shape
        chosen = [range(size)[one] for size, one in zip((experts, inputs, outputs // several), index, strict=True)]
        experts, inputs, outputs = chosen
        columns = slice(outputs.start * several + which, outputs.stop * several, several)
        groups = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        blocks, scales, before = self.blocks.view(OTHERS), self.scales.view(OTHERS), inputs.start % BLOCK
        found = np.empty([len(each) for each in chosen], np.float32)
        for n, expert in enumerate(experts):
            packed, exponents = blocks[expert, columns, groups], scales[expert, columns, groups].astype(np.int32) - 127
            values = _VALUES[np.stack([packed & 15, packed >> 4], -1)].reshape(*packed.shape[:2], BLOCK)
            whole = np.ldexp(values, exponents[..., None]).reshape(len(outputs), -1)
            found[n] = whole[:, before:before + len(inputs)].T
        return found


def joined(folder: object, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Packed]:
    """Return the tensors, of which blocks and their scales are one; raises UserError where they do not fit."""
    found: dict[str, Tensor | Packed] = dict(tensors)
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors[f"{name}_blocks"], tensors.get(f"{name}_scales")
        if scales is None or blocks.shape != (*scales.shape, BLOCK // 2) or len(scales.shape) != 3 or any(
                each.dtype != "U8" for each in (blocks, scales)):
            raise UserError(f"{folder}", f"{name}_blocks and {name}_scales are not a matrix of each expert in MXFP4",
                            "download it again")
        del found[f"{name}_blocks"], found[f"{name}_scales"]
        found[name] = Packed(blocks, scales)
    return found
