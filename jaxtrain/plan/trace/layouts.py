"""Model how compilers move arrays to another layout, and add up partial sums."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxtrain.base.annotations import PyTree
from jaxtrain.plan.trace.program import GPUS, Axes, Collective, Op, Spec, Value

VIEWS = {"reshape", "reshard", "sharding_constraint", "leave", "transpose", "squeeze", "expand_dims", "copy_p", "name",
         "optimization_barrier", "gradients_first", "pvary", "pcast", "stop_gradient", "reduce_precision", "mesh_cast",
         "rev"}
# Operations of one argument that commute with a sum over devices.
LINEAR = VIEWS | {"convert_element_type", "neg"}


class Placing:
    """Creates the operations that bring arrays into the required layout, and adds them to `ops`."""

    scope = ""  # of the equation being read

    def __init__(self, sizes: Mapping[str, int], platform: str, rings: float, filled: float,
                 windows: Mapping[int, int], returned: bool = False):
        self.returned = returned
        self.sizes, self.platform, self.rings, self.filled, self.windows = sizes, platform, rings, filled, windows
        self.ops: list[Op] = []
        self.whole: dict[tuple[int, Spec], Value] = {}
        self.before_turning: dict[int, Value] = {}
        self.sums: dict[tuple, Value] = {}
        self.same: dict[tuple, list[Value]] = {}

    def shards(self, axes: Axes) -> int:
        """Return the number of parts that these axes split an array into."""
        return math.prod(self.sizes[axis] for axis in axes)

    def value(self, shape: Sequence[int], dtype: np.dtype, spec: Spec, pending: Axes = ()) -> Value:
        """Create a value, with its bytes per device."""
        spec = tuple(tuple(axis for axis in entry if self.sizes[axis] > 1) for entry in spec)
        local = math.prod(-(-n // self.shards(entry)) for n, entry in zip(shape, spec, strict=True))
        width = dtype.itemsize if hasattr(dtype, "itemsize") else 4  # keys of random numbers
        return Value(tuple(shape), dtype, spec, local * width, pending=pending)

    def of_aval(self, aval: Any) -> Value:
        """Create a value from a type in the trace."""
        sharding = getattr(aval, "sharding", None)
        spec = spec_of(sharding.spec if sharding is not None else (), len(getattr(aval, "shape", ())))
        unreduced = tuple(getattr(sharding.spec, "unreduced", ()) or ()) if sharding is not None else ()
        value = self.value(getattr(aval, "shape", ()), getattr(aval, "dtype", np.dtype("float32")), spec,
                           tuple(axis for axis in unreduced if self.sizes[axis] > 1))
        if getattr(aval, "memory_space", None) == jax.memory.Space.Host and self.platform != "cpu":
            value.host, value.bytes = value.bytes, 0
        return value

    def emit(self, name: str, made: str, inputs: Sequence[Value], outputs: Sequence[Value], **more: Any) -> list[Value]:
        """Add an operation, and return its results."""
        op = Op(name, made, list(inputs), list(outputs), scope=self.scope, **more)
        for value in op.outputs:
            value.op = op
        self.ops.append(op)
        return op.outputs

    def gathered(self, value: Value, spec: Spec) -> Value:
        """Return a value with some split dimensions made whole; equal requests share the result."""
        if spec == value.spec:
            return value
        if (id(value), spec) not in self.whole:
            out = self.value(value.shape, value.dtype, spec)
            axes = tuple(axis for axis in flat(value.spec) if axis not in flat(spec))
            self.emit("all_gather", "real", [value], [out], collectives=(Collective("all-gather", axes, out.bytes),))
            self.whole[id(value), spec] = self.turned(out, value)
        return self.whole[id(value), spec]

    def summed(self, value: Value) -> Value:
        """Return a value with the partial sums of devices added up."""
        if not value.pending:
            return value
        parts = _parts(value)
        if self.platform == "tpu":  # TPUs first convert it, if that makes it smaller
            parts = min((value, *(op.inputs[0] for op in _since(value))), key=lambda one: one.bytes)
        if (key := (id(parts), value.shape)) not in self.sums:
            out = self.value(value.shape, parts.dtype, value.spec)
            self.sums[key] = self.emit("sum", "real", [value], [out], collectives=(
                Collective("all-reduce", value.pending, parts.bytes),))[0]
        whole, wanted = self.sums[key], self.value(value.shape, value.dtype, value.spec)
        if whole.dtype == value.dtype:
            return whole
        return self.emit("convert_element_type", "fused", [whole], [wanted])[0]

    def move(self, value: Value, aval: Any) -> Value:
        """Move a value to the layout of a type; values in the region that the compiler places stay as they are."""
        if not explicit(aval):
            return value
        out = self.of_aval(aval)
        before, after = flat(value.spec), flat(out.spec)
        pending = tuple(axis for axis in value.pending if axis not in out.pending)
        scattered = tuple(axis for axis in pending if axis in after)
        reduced = tuple(axis for axis in pending if axis not in after)
        if scattered and self.sums_before_it_splits(value, reduced):
            value = self.summed(value)
            pending = scattered = reduced = ()
        gathered = tuple(axis for axis in before if axis not in after)
        if reduced and not scattered and before == after:  # added up where the sum, or parts of it, are needed
            out.pending = value.pending
            return self.emit("reshard", "view", [value], [out])[0]
        moved = tuple(axis for d, entry in enumerate(value.spec) for axis in entry
                      if axis in after and axis not in out.spec[d])
        found = [Collective("all-reduce", reduced, out.bytes)] if reduced else []
        found += [Collective("reduce-scatter", scattered, out.bytes)] if scattered else []
        found += [Collective("all-gather", gathered, out.bytes)] if gathered else []
        found += [Collective("all-to-all", moved, out.bytes)] if moved else []
        if scattered:
            value = self.turned(value, out)
        made = "real" if found else "fused" if value.spec != out.spec else "view"
        out = self.emit("reshard", made, [value], [out], collectives=tuple(found))[0]
        return self.turned(out, value) if gathered else out

    def sums_before_it_splits(self, value: Value, reduced: Axes) -> bool:
        """Return whether the compiler misses that only parts of a sum are needed, and computes all of it everywhere.

        CPUs and TPUs always do. GPUs do if the sum is over more devices than split it, or has a different shape then.
        """
        if self.platform not in GPUS:
            return True
        made = _parts(value).op
        return (made is None or made.name != "scatter-add") and (bool(reduced) or _reshaped(value))

    def turned(self, whole: Value, parts: Value) -> Value:
        """Transpose an array for NCCL, which gathers and scatters along the outermost dimension in memory.

        Arrays from outside the block, such as weights, can be stored so that no transpose is needed. If they are
        returned all compilers do it.
        """
        stored = self.platform not in GPUS or _from_outside(parts)
        if self.before(whole, parts) == 1 or (stored and not self.returned):
            return whole
        out = self.value(whole.shape, whole.dtype, whole.spec, whole.pending)
        self.before_turning[id(out)] = whole
        return self.emit("turn", "real", [whole], [out])[0]

    def unturned(self, values: list[Value]) -> list[Value]:
        """Return transposed arrays as they were before, as other products need them."""
        return [self.before_turning[id(value)] for value in values if id(value) in self.before_turning]

    def before(self, whole: Value, parts: Value) -> int:
        """Return the number of places in the dimensions before the first one in which two layouts differ."""
        count = 1
        for n, a, b in zip(whole.shape, whole.spec, parts.spec, strict=True):
            if a != b:
                return count
            count *= -(-n // self.shards(a))
        return 1


def _parts(value: Value) -> Value:
    """Return the value whose parts are added up, which is the one before any conversion."""
    return [value, *(op.inputs[0] for op in _since(value))][-1]


def _from_outside(value: Value) -> bool:
    """Return whether a value is an argument of the block, apart from its dtype."""
    while value.op is not None and value.op.name in LINEAR:
        value = value.op.inputs[0]
    return value.op is None


def _reshaped(value: Value) -> bool:
    """Return whether the parts of a sum had another shape when they were computed."""
    return any(op.name == "reshape" and op.inputs[0].shape != op.outputs[0].shape for op in _since(value))


def _since(value: Value) -> Iterator[Op]:
    while value.op is not None and value.op.name in LINEAR and value.op.inputs[0].pending:
        yield value.op
        value = value.op.inputs[0]


def spec_of(spec: Any, rank: int) -> Spec:
    """Return the mesh axes of each of `rank` dimensions in a sharding's spec."""
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in
               getattr(spec, "partitions", spec)]
    return (*entries, *[()] * (rank - len(entries)))


def carried(name: str, params: Mapping[str, PyTree], given: Value, shape: Sequence[int],
            sizes: Mapping[str, int]) -> Spec:
    """Return the layout that the compiler gives a result of this shape where it lays out arrays by itself."""
    if name == "sharding_constraint":
        entries = [*params["sharding"].spec, *[None] * (len(shape) - len(params["sharding"].spec))]
        return spec_of([given.spec[d] if entry is PartitionSpec.UNCONSTRAINED else entry
                        for d, entry in enumerate(entries)], len(shape))
    if name == "transpose":
        return tuple(given.spec[d] for d in params["permutation"])
    if name in ("pad", "slice", "concatenate", "rev"):
        return given.spec
    found: list[Axes] = [()] * len(shape)
    if name == "reshape":
        for d, entry in enumerate(given.spec):
            before, parts = math.prod(given.shape[:d]), math.prod(sizes[axis] for axis in entry)
            fits = [n for n in range(len(shape)) if shape[n] % parts == 0 and (
                math.prod(shape[:n]) <= before < math.prod(shape[:n + 1]))]
            if entry and fits:
                found[fits[0]] += entry
    return tuple(found)


def flat(spec: Spec) -> Axes:
    """Return all axes of a spec."""
    return tuple(axis for entry in spec for axis in entry)


def explicit(aval: Any) -> bool:
    """Return whether a type determines the layout."""
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return mesh is None or mesh.empty or jax.sharding.AxisType.Auto not in mesh.axis_types


def splits_more(value: Value, out: Value) -> bool:
    """Return whether a value's layout differs from that of the value it is computed from."""
    return set(flat(out.spec)) != set(flat(value.spec))
