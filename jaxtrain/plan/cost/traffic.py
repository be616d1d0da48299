"""Count the bytes that each operation moves from and to memory, once compilers have fused operations beside each other.

Fusion into readers is in the trace (`Op.made`). Besides, XLA computes operations that read the same arrays in one
kernel, and a sum over an array in the kernel that writes it, so that neither is read twice; both were seen in programs
for GPUs. A gather whose rows are only summed is part of the sum. A product that is added to what a loop carries adds to
it in its own kernel.
"""

from collections import defaultdict

from jaxtrain.plan.cost.memory import Reads
from jaxtrain.plan.trace.program import Block


def moved(block: Block, reads: Reads) -> dict[int, int]:
    """Return the bytes that each operation of a block reads and writes, by its id."""
    found, together, made, taken = dict[int, int](), list[frozenset[int]](), set[int](), _summed_gathers(block, reads)
    for op in block.ops:
        if op.flops or op.collectives or op.bodies:
            found[id(op)] = reads.bytes(op)
        elif id(op) in reads.accumulating:
            product, total = reads.accumulating[id(op)]
            found[id(product)] += 2 * total.bytes - sum(value.bytes for value in reads.writes(product))
            found[id(op)] = 0
        else:
            found[id(op)] = size = reads.bytes(op)
            if any(id(value) in taken for value in op.outputs):
                found[id(op)] = 0
                continue
            if not size or op.name in ("dynamic_slice", "dynamic_update_slice", "gather", "scatter-add"):
                continue
            read = reads.of(op)
            found[id(op)] = size = size - sum(value.bytes - taken.get(id(value), value.bytes) for value in read)
            sources, sums = frozenset(map(id, read)), op.name.startswith("reduce_")
            if (sources and any(sources <= others for others in together)) or (sums and sources <= made):
                found[id(op)] = size - sum(taken.get(id(value), value.bytes) for value in read)
            together.append(sources)
            made.update(map(id, reads.writes(op)))
    return found


def _summed_gathers(block: Block, reads: Reads) -> dict[int, int]:
    """Return the results of gathers that are only summed, by id, and the bytes of the arrays that they are taken from.
    """
    users = defaultdict[int, list[str]](list)
    for op in block.ops:
        for value in reads.of(op) if op.made == "real" or reads.writes(op) else ():
            users[id(value)].append(op.name)
    outside = {id(source) for value in block.outputs for source in reads.sources(value)}
    return {id(out): op.inputs[0].bytes for op in block.ops if op.name == "gather" for out in op.outputs
            if users[id(out)] and id(out) not in outside and all(name.startswith("reduce_") for name in users[id(out)])}
