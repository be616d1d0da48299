"""Which element-wise operations XLA for GPUs computes in one kernel because they read the same array.

Each of their results is then written while all that any of them reads is still in memory: three gradients of a gated
MLP, of three products as wide, take six arrays, where one after the other would overwrite what is no longer read.
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
            if mine is theirs or _waits(mine, theirs, before) or _waits(theirs, mine, before):
                continue
            merged = mine + theirs
            found.update((id(one), merged) for one in merged)
    return found


def _waits(late: Sequence[Op], early: Sequence[Op], before: dict[int, list[Op]]) -> bool:
    """Return whether some operation needs what another one makes, directly or not."""
    wanted, seen, queue = set(map(id, early)), set(), list(late)
    while queue:
        op = queue.pop()
        for other in before[id(op)]:
            if id(other) in wanted:
                return True
            if id(other) not in seen:
                seen.add(id(other))
                queue.append(other)
    return False
