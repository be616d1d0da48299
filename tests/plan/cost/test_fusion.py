"""Element-wise operations that read the same array are one kernel, in which nothing is overwritten that two read."""

import numpy as np

from jaxtrain.plan.cost import fusion, memory
from jaxtrain.plan.trace.program import Block, Op, Value

SIZE = 100


def value(size=SIZE):
    return Value((size,), np.dtype(np.int8), ((),), size)


def op(name, made, *inputs, size=SIZE):
    one = Op(name, made, list(inputs), [value(size)])
    one.outputs[0].op = one
    return one


def gated_mlp():
    """Return the backward pass of a gated MLP: three wide products, three element-wise results, a product of each."""
    given = value()
    gate, up = (op("dot_general", "real", given) for _ in range(2))
    act = op("mul", "fused", gate.outputs[0], up.outputs[0])
    by_down = op("dot_general", "real", act.outputs[0], size=1)
    dact = op("dot_general", "real", given)
    dup, dgate = (op("mul", "fused", dact.outputs[0], other.outputs[0]) for other in (gate, up))
    last = [op("dot_general", "real", one.outputs[0], size=1) for one in (dup, dgate)]
    results = [one.outputs[0] for one in (by_down, *last)]
    return Block([given], [gate, up, act, by_down, dact, dup, dgate, *last], results), {id(act), id(dup), id(dgate)}


def test_siblings_are_computed_together_and_before_their_readers():
    block, wide = gated_mlp()
    reads = memory.Reads(block)
    found = fusion.groups(block.ops, reads.of, reads.writes)
    assert [len(kernel) for kernel in found] == [1, 1, 1, 3, 1, 1, 1]
    assert set(map(id, found[3])) == wide
    done = set()
    for kernel in found:
        assert all(value.op is None or id(value.op) in done for one in kernel for value in reads.of(one))
        done.update(map(id, kernel))
    assert len(done) == len(block.ops)


def test_what_a_kernel_reads_for_several_results_is_not_overwritten():
    block, _ = gated_mlp()
    assert memory.peak(block, siblings=True).bytes == 6 * SIZE
    assert memory.peak(block).bytes <= 4 * SIZE + 1


def test_what_is_read_for_one_result_alone_is_overwritten():
    given = value()
    one, other = (op("dot_general", "real", given) for _ in range(2))
    sum_ = op("add", "fused", one.outputs[0], other.outputs[0])
    last = op("dot_general", "real", sum_.outputs[0], size=1)
    assert memory.peak(Block([given], [one, other, sum_, last], [last.outputs[0]]), siblings=True).bytes == 2 * SIZE


def test_two_kernels_never_wait_for_one_another():
    one, other = value(), value()
    first, second = op("exp", "fused", one), op("exp", "fused", other)
    by_first, by_second = (op("dot_general", "real", x.outputs[0]) for x in (first, second))
    crossed = op("mul", "fused", one, by_second.outputs[0]), op("mul", "fused", other, by_first.outputs[0])
    last = [op("dot_general", "real", x.outputs[0]) for x in crossed]
    ops = [first, second, by_first, by_second, *crossed, *last]
    reads = memory.Reads(Block([one, other], ops, [x.outputs[0] for x in last]))
    assert sorted(map(len, fusion.groups(ops, reads.of, reads.writes))) == [1] * 6 + [2]


def test_an_operation_that_waits_for_another_is_no_part_of_its_kernel():
    given = value()
    first = op("exp", "fused", given)
    middle = op("dot_general", "real", first.outputs[0])
    second = op("mul", "fused", given, middle.outputs[0])
    last = op("dot_general", "real", second.outputs[0])
    block = Block([given], [first, middle, second, last], [last.outputs[0]])
    reads = memory.Reads(block)
    assert [len(kernel) for kernel in fusion.groups(block.ops, reads.of, reads.writes)] == [1, 1, 1, 1]
