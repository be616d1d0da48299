"""Estimate the peak memory of a step on a device, from the lifetime of each array in its program.

A compiler does not store what it can compute where it is used. So results of element-wise operations take memory only
if other kinds of operations read them; the arrays that they are computed from stay live until then.
"""

from collections import Counter
from dataclasses import dataclass, field

from jaxtrain.plan.cost import fusion
from jaxtrain.plan.trace.program import Block, Op, Value

# Operations that fuse with whatever computes their arguments; all others need them in memory.
READS_THROUGH = ("reduce_", "argmax", "argmin")


@dataclass
class Peak:
    """The bytes at the peak, beyond the arguments of the block, and the arrays that are live then."""

    bytes: int = 0
    values: list[Value] = field(default_factory=list)


def peak(block: Block, donated: int = 0, siblings: bool = False, late: bool = False) -> Peak:
    """Return the peak of a step beyond all its arguments; results may overwrite the first `donated` ones.

    siblings: whether element-wise operations that read the same array are one kernel, as XLA for GPUs has it.
    late: whether gradients that loops over layers do not need are summed over devices behind them, as there.
    """
    return _Life(block, block.inputs[:donated], siblings, late).peak()


class Reads:
    """Determines which values of a block are in memory, and which of them each operation reads through fused ones."""

    def __init__(self, block: Block):
        self.block = block
        self.inputs = set(map(id, block.inputs))
        self.made: set[int] = set()  # values in memory, by id
        self.accumulating: dict[int, tuple[Op, Value]] = {}  # addition -> product that makes it, and what it adds to
        self._sources: dict[int, frozenset] = {}
        for op in block.ops:
            if op.made == "real":
                self.made.update(id(value) for value in op.outputs)
        for op in block.ops:
            if op.made == "real" and not op.name.startswith(READS_THROUGH):
                for value in op.inputs:
                    self._need(value)
        for value in block.outputs:
            self._need(value)
        for op in block.ops:
            if op.name in ("add", "add_any"):
                self._add_in_place(op)

    def _add_in_place(self, op: Op) -> None:
        """Handle a product that is added to a sum carried by a loop: the matmul adds to the existing array."""
        products = [value for value in op.inputs if value.op is not None and value.op.name == "dot_general"]
        sums = [value for value in op.inputs if id(value) in self.inputs]
        if len(products) == 1 and sums and sum(products[0] in other.inputs for other in self.block.ops) == 1:
            self.made.discard(id(products[0]))
            assert products[0].op is not None
            self.accumulating[id(op)] = products[0].op, sums[0]

    def _need(self, value: Value) -> None:
        value = _behind_views(value)
        if id(value) not in self.inputs and value.op is not None:
            self.made.add(id(value))

    def sources(self, value: Value) -> frozenset:
        """Return the arrays in memory that a value is computed from, or the value itself."""
        if id(value) in self._sources:
            return self._sources[id(value)]
        if id(value) in self.inputs or id(value) in self.made or value.op is None:
            found = frozenset((value,))
        else:
            found = frozenset().union(*map(self.sources, value.op.inputs)) if value.op.inputs else frozenset()
        self._sources[id(value)] = found
        return found

    def writes(self, op: Op) -> list[Value]:
        """Return the results of an operation that are in memory."""
        return [value for value in op.outputs if id(value) in self.made]

    def of(self, op: Op) -> frozenset:
        """Return the arrays in memory that an operation reads."""
        return frozenset().union(*map(self.sources, op.inputs)) if op.inputs else frozenset()

    def bytes(self, op: Op) -> int:
        """Return the bytes that an operation reads and writes; 0 if it is fused and its result is not in memory."""
        if op.name == "dynamic_update_slice":  # in place
            return 2 * op.inputs[1].bytes
        written = self.writes(op)
        if op.name == "dynamic_slice":  # read where it is
            return 2 * sum(value.bytes for value in written)
        return sum(value.bytes for value in (*self.of(op), *written)) if written else 0


class _Life:
    def __init__(self, block: Block, donated: list[Value], siblings: bool, late: bool,
                 stacked: int | None = None):
        """Set the `donated` inputs, which results may overwrite; outputs from `stacked` on are stacked at once."""
        self.block, self.donated, self.siblings, self.late = block, donated, siblings, late
        self.stacked = len(block.outputs) if stacked is None else stacked
        self.reads = Reads(block)

    def peak(self) -> Peak:
        """Walk through the block once, and return its peak."""
        ops = [op for op in self.block.ops if op.made == "real" or self.reads.writes(op)]
        kernels = fusion.groups(ops, self._read, self.reads.writes) if self.siblings else [[op] for op in ops]
        reads = [frozenset().union(*map(self._read, kernel)) for kernel in kernels]
        if self.late:
            order = fusion.late_sums(kernels, reads)
            kernels, reads = [kernels[at] for at in order], [reads[at] for at in order]
        last = {id(value): at for at, values in enumerate(reads) for value in values}
        for value in self.block.outputs[:self.stacked]:
            last.update((id(source), len(kernels)) for source in self.reads.sources(value))
        theirs = {id(value): value for value in self.donated if id(value) in last}
        live = dict(theirs)
        now = given = sum(value.bytes for value in live.values())
        worst = Peak()
        for at, (kernel, values) in enumerate(zip(kernels, reads, strict=True)):
            fresh = [value for op in kernel for value in self.reads.writes(op)]
            dying = [value for value in values if last[id(value)] == at and id(value) in live]
            inner = self._inside(kernel[0])  # a kernel of several has no loop
            # XLA lets a result overwrite what is read for it alone.
            over = Counter(key for op in kernel for key in _overwritten(self.reads, op))
            replaced = [value for value in dying if over[id(value)] == 1]
            room = sum(value.bytes for value in replaced)
            bytes_ = now - given + max(0, sum(value.bytes for value in fresh) - room) + inner.bytes
            if bytes_ > worst.bytes:
                gone = {*theirs, *(id(value) for value in replaced)}
                mine = [value for key, value in live.items() if key not in gone]
                worst = Peak(bytes_, [*mine, *fresh, *inner.values])
            for value in fresh:
                if id(value) in last:
                    live[id(value)] = value
                    now += value.bytes
            for value in dying:
                now -= live.pop(id(value)).bytes
        return worst

    def _read(self, op: Op) -> frozenset:
        return self.reads.of(op).union(*map(self.reads.sources, op.beside))

    def _inside(self, op: Op) -> Peak:
        loops = op.name in ("scan", "while")
        found = [_Life(body, body.inputs[op.consts:op.consts + op.carried] if op.name == "scan" else
                       body.inputs[len(body.inputs) - op.carried:] if loops else [],
                       self.siblings, self.late, op.carried if loops else None).peak() for body in op.bodies]
        worst = max(found, key=lambda one: one.bytes, default=Peak())
        if op.name == "cond":  # the result of a branch is the result of the operation
            return Peak(max(0, worst.bytes - sum(value.bytes for value in op.outputs)))
        return worst


def _behind_views(value: Value) -> Value:
    while value.op is not None and value.op.made == "view":
        value = value.op.inputs[0]
    return value


def _overwritten(reads: Reads, op: Op) -> set[int]:
    """Return the arguments whose memory the result may reuse when they are no longer needed; of a loop, its carry."""
    if op.name == "pad":
        values = []
    elif op.name == "while":
        values = op.inputs[op.consts:]
    elif op.made != "real" or op.name == "cond":
        values = op.inputs
    elif op.name == "scan":
        values = op.inputs[op.consts:op.consts + op.carried]
    elif op.name in ("scatter-add", "dynamic_update_slice"):
        values = op.inputs[:1]
    else:
        values = []
    return {id(source) for value in values for source in reads.sources(value)}
