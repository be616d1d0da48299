"""Count the bytes that each operation moves from and to memory, once compilers have fused operations beside each other.

Fusion into readers is in the trace (`Op.made`). Besides, XLA computes operations that read the same arrays in one
kernel, and a sum over an array in the kernel that writes it, so that neither is read twice; both were seen in programs
for GPUs. A product that is added to what a loop carries adds to it in its own kernel.
"""

from jaxtrain.plan.cost.memory import Reads
from jaxtrain.plan.trace.program import Block


def moved(block: Block, reads: Reads) -> dict[int, int]:
    """Return the bytes that each operation of a block reads and writes, by its id."""
    found, together, made = dict[int, int](), list[frozenset[int]](), set[int]()
    for op in block.ops:
        if op.flops or op.collectives or op.bodies:
            found[id(op)] = reads.bytes(op)
        elif id(op) in reads.accumulating:
            product, total = reads.accumulating[id(op)]
            found[id(product)] += 2 * total.bytes - sum(value.bytes for value in reads.writes(product))
            found[id(op)] = 0
        else:
            found[id(op)] = size = reads.bytes(op)
            if not size or op.name in ("dynamic_slice", "dynamic_update_slice", "gather", "scatter-add"):
                continue
            read = reads.of(op)
            sources, sums = frozenset(map(id, read)), op.name.startswith("reduce_")
            if (sources and any(sources <= others for others in together)) or (sums and sources <= made):
                found[id(op)] = size - sum(value.bytes for value in read)
            together.append(sources)
            made.update(map(id, reads.writes(op)))
    return found
