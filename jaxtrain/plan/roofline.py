"""The least seconds of each instruction of a compiled step on a target: what it computes or moves, at the rate of that.

The planner's `Target.efficiency` is fitted to whole published runs, with power limits, stragglers and launches in it.
Here each kernel has the share of the data sheet that it reaches alone, since the question is what the compiler's
program costs, and which part of it to change.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxtrain.plan.cost import links
from jaxtrain.plan.instructions import Instruction, Program, size
from jaxtrain.plan.targets import Target
from jaxtrain.plan.trace.program import Collective

# Shares of the data sheet. GPUs: large bfloat16 matmuls measured at 720 (H100, power limit) and 790 TFLOP/s (H200),
# copies at 3.0 and 4.3 TB/s; attention and grouped matmuls measured on one H200 (docs/benchmarks.md): cuDNN's of 4,096
# and 32,768 tokens 0.39 to 0.61 forward and 0.36 to 0.53 backward. TPUs: not measured.
ALONE: Mapping[str, Mapping[str, float]] = {
    "cuda": {"matmul": 0.73, "attention": 0.45, "attention backward": 0.45, "memory": 0.90, "links": 1.0},
    "h200": {"matmul": 0.80, "attention": 0.45, "attention backward": 0.45, "memory": 0.90, "links": 1.0},
    "tpu": {"matmul": 0.90, "attention": 0.60, "attention backward": 0.50, "memory": 0.85, "links": 0.90},
    "cpu": {"matmul": 1.0, "attention": 1.0, "attention backward": 1.0, "memory": 1.0, "links": 1.0},
}
# Of the peak, in our own kernels for GPUs: attention 0.29 to 0.58 forward and 0.54 to 0.68 backward.
GROUPED = 0.61
MOSAIC: Mapping[str, float] = {"attention": 0.45, "attention backward": 0.60}


@dataclass(frozen=True)
class Roofline:
    """The rates of one target for a program on a mesh of these sizes."""

    target: Target
    program: Program
    mesh: Mapping[str, int]

    @property
    def shares(self) -> Mapping[str, float]:
        """The share of the data sheet that each kind of kernel reaches alone."""
        return ALONE.get(self.target.name) or ALONE[self.target.platform]

    def seconds(self, instruction: Instruction) -> float:
        """Return the seconds of one execution of an instruction that computes or copies."""
        if instruction.on_host or instruction.from_host:
            return instruction.bytes / 2 / self.target.host
        moving = instruction.bytes / (self.target.bandwidth * self.shares["memory"])
        return max(moving, self.computing(instruction))

    def computing(self, instruction: Instruction) -> float:
        """Return the seconds of an instruction's products, as if memory had no limit."""
        if not instruction.flops:
            return 0.0
        if instruction.grouped:
            return instruction.flops / (self._peak(instruction) * GROUPED)
        shares = MOSAIC if instruction.own and instruction.attention else self.shares
        return instruction.flops / (self._peak(instruction) * shares[instruction.attention or "matmul"])

    def talking(self, collective: Instruction) -> float:
        """Return the seconds of a collective at the bandwidth of the slowest link that it crosses."""
        axes = self.program.axes(collective, self.mesh)
        arrays = collective.arrays
        if collective.opcode.endswith("-start") and collective.collective != "all-reduce":
            arrays = [array for array in arrays if array != ("u32", ())]  # the start also lists its operands
            arrays = arrays[len(arrays) // 2:]
        target, result = replace(self.target, efficiency={"links": self.shares["links"]}), sum(map(size, arrays))
        if collective.collective == "ragged-all-to-all":  # one of both is a buffer with room for an uneven load
            result = min(result, size(self.program.operand(collective, 0)))
        return links.seconds(Collective(collective.collective, axes, int(result)), target, self.mesh)

    def _peak(self, instruction: Instruction) -> float:
        dtype = instruction.dtype
        name = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}.get(dtype, "float8" if "f8" in dtype else "")
        return self.target.products(name if name in self.target.peak else "bfloat16", instruction.rounds)
