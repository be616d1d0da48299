"""Order the kernels of a program as XLA for GPUs does: what it computes together, and what late.

Element-wise operations that read the same array are one kernel. Each of its results is then written while all that any
of them reads is still in memory: three gradients of a gated MLP, of three products as wide, take six arrays, where one
after the other would overwrite what is no longer read.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from jaxtrain.plan.trace.program import Op, Value

Read = Callable[[Op], Iterable[Value]]


def groups(ops: Sequence[Op], reads: Read, written: Callable[[Op], Sequence[Value]]) -> list[list[Op]]:
    """Return operations in an order in which they can run, those of one kernel together.

    reads: the arrays in memory that an operation reads; written: its results that are in memory.
    """
    made = {id(value): op for op in ops for value in written(op)}
    before = {id(op): [made[id(value)] for value in reads(op) if id(value) in made] for op in ops}
    together = _siblings(ops, reads, written, before)
    found, done, waiting = [], set[int](), list[Op]()
    for op in ops:
        if id(op) not in done:
            waiting.append(op)
        while ready := next((one for one in waiting if all(
                id(other) in done for mine in together.get(id(one), [one]) for other in before[id(mine)])), None):
            mine = together.get(id(ready), [ready])
            found.append(mine)
            done.update(map(id, mine))
            waiting = [one for one in waiting if id(one) not in done]
    assert not waiting, "operations wait for one another"
    return found


def late_sums(kernels: Sequence[list[Op]], read: Sequence[Iterable[Value]]) -> list[int]:
    """Return the order in which no loop over layers comes behind a sum over devices that is read after it alone.

    XLA starts such a sum when it is needed, so that the whole gradient of the loss head stays through all layers.

    read: the arrays in memory that each kernel reads.
    """
    loops = [at for at, kernel in enumerate(kernels) if any(
        inner.flops for op in kernel for body in op.bodies for inner, _ in body.all())]
    makers = {id(value): at for at, kernel in enumerate(kernels) for op in kernel for value in op.outputs}
    needed = [len(kernels)] * len(kernels)  # by what cannot wait itself, as element-wise operations can
    for at in reversed(range(len(kernels))):
        waits = needed[at] if all(op.made == "fused" for op in kernels[at]) else at
        for value in read[at]:
            if (maker := makers.get(id(value), at)) < at:
                needed[maker] = min(needed[maker], waits)
    places, late = [float(at) for at in range(len(kernels))], set[int]()
    for at, kernel in enumerate(kernels):
        behind = [makers[id(value)] in late for value in read[at] if id(value) in makers]
        converted = all(op.made == "fused" for op in kernel) and any(behind)
        if (kernel[0].name == "reduce_scatter" or converted) and any(at < loop < needed[at] for loop in loops):
            late.add(at)
            places[at] = needed[at] - 0.5
    return sorted(range(len(kernels)), key=lambda at: (places[at], at))


def _siblings(ops: Sequence[Op], reads: Read, written: Callable[[Op], Sequence[Value]],
              before: dict[int, list[Op]]) -> dict[int, list[Op]]:
    """Return the others of its kernel of each operation that has some, itself included."""
    readers: dict[int, list[Op]] = {}
    for op in ops:
        results = written(op)
        if op.made == "real" or not results or op.bodies:
            continue
        for value in reads(op):
            if math.prod(value.shape) == math.prod(results[0].shape) > 1:
                readers.setdefault(id(value), []).append(op)
    found: dict[int, list[Op]] = {}
    for some in readers.values():
        for op in some[1:]:
            mine, theirs = (found.get(id(one), [one]) for one in (some[0], op))
            if mine is theirs or _waits(mine, theirs, before, found) or _waits(theirs, mine, before, found):
                continue
            merged = mine + theirs
            found.update((id(one), merged) for one in merged)
    return found


def _waits(late: Sequence[Op], early: Sequence[Op], before: dict[int, list[Op]], together: dict[int, list[Op]]) -> bool:
    """Return whether some operation needs what another one makes, directly or not, as kernels wait for one another."""
    wanted, seen, queue = set(map(id, early)), set(), list(late)
    while queue:
        op = queue.pop()
        for other in before[id(op)]:
            if id(other) in wanted:
                return True
            if id(other) not in seen:
                kernel = together.get(id(other), [other])
                if not wanted.isdisjoint(map(id, kernel)):
                    return True
                seen.update(map(id, kernel))
                queue += kernel
    return False
