"""The seconds of each instruction of a compiled step on a target: what it computes or moves, at the rate of that.

The rates are the planner's (`jaxtrain.plan.cost.rates`); they are applied to the compiler's program here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.plan import kinds
from jaxtrain.plan.cost import links, rates
from jaxtrain.plan.instructions import Instruction, Program, size
from jaxtrain.plan.targets import Target
from jaxtrain.plan.trace.kernels import of_documents
from jaxtrain.plan.trace.program import Collective

_PASSES = {kinds.HEAD: "passes", kinds.OPTIMIZER: "optimizer"}


@dataclass(frozen=True)
class Roofline:
    """The rates of one target for a program on a mesh of these sizes."""

    target: Target
    program: Program
    mesh: Mapping[str, int]
    documents: int = 1  # of equal length in each row; only jaxtrain's own kernels skip pairs of different ones

    def seconds(self, instruction: Instruction, kind: str) -> float:
        """Return the seconds of one execution of an instruction that computes or copies, of this kind of the step's."""
        if instruction.on_host or instruction.from_host:
            return instruction.bytes / 2 / self.target.host
        passing = "memory" if instruction.flops else _PASSES.get(kind, "memory")
        moving = instruction.bytes / (self.target.bandwidth * self._share(passing))
        took = max(moving, self.computing(instruction, kind))
        return took + self.target.launch if took else 0.0

    def computing(self, instruction: Instruction, kind: str) -> float:
        """Return the seconds of an instruction's products, as if memory had no limit."""
        if not instruction.flops:
            return 0.0
        if instruction.attention:
            own, (width, length) = instruction.own, instruction.attends
            part = of_documents(length, self.documents) if own else 1.0
            kernel = instruction.compiler if own else "masked" if instruction.masked else "cudnn"
            share = self._share(kernel if own else "attention")
            if self.target.platform == "cuda":
                share *= rates.attention(kernel, instruction.attention != "attention", width, length * part)
            return instruction.flops * part / (self._peak(instruction) * share)
        share = self._share("grouped" if instruction.grouped else "head" if kind == kinds.HEAD else "matmul")
        return instruction.flops / (self._peak(instruction) * share)

    def talking(self, collective: Instruction) -> float:
        """Return the seconds of a collective at the bandwidth of the slowest link that it crosses."""
        axes = self.program.axes(collective, self.mesh)
        arrays = collective.arrays
        if collective.opcode.endswith("-start") and collective.collective != "all-reduce":
            arrays = [array for array in arrays if array != ("u32", ())]  # the start also lists its operands
            arrays = arrays[len(arrays) // 2:]
        result = sum(map(size, arrays))
        if collective.collective == "ragged-all-to-all":  # one of both is a buffer with room for an uneven load
            result = min(result, size(self.program.operand(collective, 0)))
        return links.seconds(Collective(collective.collective, axes, int(result)), self.target, self.mesh)

    def _share(self, kind: str) -> float:
        return rates.of(self.target.efficiency, kind, self.target.platform)

    def _peak(self, instruction: Instruction) -> float:
        dtype = instruction.dtype
        name = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}.get(dtype, "float8" if "f8" in dtype else "")
        return self.target.products(name if name in self.target.peak else "bfloat16", instruction.rounds)
