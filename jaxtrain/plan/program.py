"""What one device does in a step, read from the traced program: arrays of its own size, FLOPs, collectives, loops.

Shardings are part of the types of a step on an explicit mesh, so that the trace says which part of every array a device
holds and where devices have to talk; nothing here knows a model. The one region in which the compiler places arrays by
itself, the optimizer's update, is followed by shapes: what is computed from arrays of one shape lies as they do.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from jaxtrain.plan import kernels

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]  # of each dimension, the mesh axes that split it

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
         "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
VIEWS = {"reshape", "reshard", "leave", "transpose", "squeeze", "expand_dims", "copy_p", "name", "optimization_barrier",
         "pvary", "pcast", "stop_gradient", "reduce_precision", "mesh_cast", "rev"}
SUMS = {"psum", "psum2", "psum_invariant"}
OWN = {"all_gather": "all-gather", "all_gather_invariant": "all-gather", "reduce_scatter": "reduce-scatter",
       "psum_scatter": "reduce-scatter", "ppermute": "collective-permute", "all_to_all": "all-to-all",
       "ragged_all_to_all": "ragged-all-to-all", "pmax": "all-reduce", "pmin": "all-reduce"}
HEAVY = {"conv_general_dilated", "gather", "scatter", "scatter-add", "scatter_add", "sort", "top_k", "cumsum",
         "cumlogsumexp", "dynamic_update_slice", "random_bits", "approx_top_k"}
KERNELS = ("pallas", "custom_call", "dot_product_attention", "cudnn")
# What compilers do once for all who want the same: with these parameters alike.
SHARED = {"convert_element_type": ("new_dtype",), "reshard": ("dst_sharding",), "ppermute": ("axis_name", "perm")}
# Of one argument: a sum over devices may as well follow them.
LINEAR = VIEWS | {"convert_element_type", "neg"}


@dataclass(frozen=True)
class Collective:
    """Devices that talk: along these mesh axes, each left with `bytes` of result."""

    kind: str  # as HLO has it
    axes: Axes
    bytes: int


@dataclass(eq=False)
class Value:
    """An array, as each device holds its part of it."""

    shape: tuple[int, ...]  # of the whole where `spec` splits it
    dtype: np.dtype
    spec: Spec
    bytes: int
    op: "Op | None" = None  # where it comes from; None: from outside the block
    pending: Axes = ()  # devices along these hold parts whose sum it is


@dataclass(eq=False)
class Op:
    """One operation. `made` says whether its result takes memory: "real", "fused" into who uses it, or a "view"."""

    name: str
    made: str
    inputs: list[Value]
    outputs: list[Value]
    flops: float = 0.0
    collectives: tuple[Collective, ...] = ()
    bodies: "list[Block]" = field(default_factory=list)  # of a loop one, of branches several
    times: int = 1  # that the body runs
    carried: int = 0  # the first so many of a loop's outputs are its inputs, updated in place
    beside: list[Value] = field(default_factory=list)  # what is kept until then, though it does not read it
    consts: int = 0  # the first so many inputs of a loop are the same for all rounds


@dataclass(eq=False)
class Block:
    """Straight code: the step, or the body of a loop."""

    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value]

    def all(self, times: int = 1) -> Iterator[tuple[Op, int]]:
        """Every operation, within loops and branches too, and how often it runs where every branch is taken."""
        for op in self.ops:
            yield op, times
            for body in op.bodies:
                yield from body.all(times * op.times)


def read(traced: ClosedJaxpr, sizes: Mapping[str, int], platform: str, rings: float = math.inf) -> Block:
    """The program of one device of a mesh of these sizes, as the compiler for this platform makes it.

    `rings`: for TPUs, from which length of the summed dimension on a product hands its sums around while it is computed.
    """
    return _Reader(sizes, platform, rings).block(traced.jaxpr)


class _Reader:
    def __init__(self, sizes: Mapping[str, int], platform: str, rings: float):
        self.sizes, self.platform, self.rings = sizes, platform, rings
        self.ops: list[Op] = []
        self.whole: dict[tuple[int, Spec], Value] = {}
        self.before_turning: dict[int, Value] = {}
        self.sums: dict[tuple, Value] = {}
        self.same: dict[tuple, list[Value]] = {}

    # ------------------------------------------------------------------------------------------------------ values
    def shards(self, axes: Axes) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def value(self, shape: Sequence[int], dtype: Any, spec: Spec, pending: Axes = ()) -> Value:
        spec = tuple(tuple(axis for axis in entry if self.sizes[axis] > 1) for entry in spec)
        local = math.prod(-(-n // self.shards(entry)) for n, entry in zip(shape, spec, strict=True))
        width = dtype.itemsize if hasattr(dtype, "itemsize") else 4  # keys of random numbers
        return Value(tuple(shape), dtype, spec, local * width, pending=pending)

    def of_aval(self, aval: Any) -> Value:
        sharding = getattr(aval, "sharding", None)
        spec = _spec(sharding.spec if sharding is not None else (), len(getattr(aval, "shape", ())))
        unreduced = tuple(getattr(sharding.spec, "unreduced", ()) or ()) if sharding is not None else ()
        return self.value(getattr(aval, "shape", ()), getattr(aval, "dtype", np.dtype("float32")), spec,
                          tuple(axis for axis in unreduced if self.sizes[axis] > 1))

    # ------------------------------------------------------------------------------------------------------ blocks
    def block(self, jaxpr: Jaxpr, inputs: Sequence[Value] | None = None) -> Block:
        """A block of its own, with new values for its arguments (as given ones lie, if any are given)."""
        outer, self.ops = self.ops, []
        mine = [self.of_aval(v.aval) for v in jaxpr.invars]
        if inputs:
            mine = [self.value(v.shape, v.dtype, given.spec) for v, given in zip(mine, inputs, strict=True)]
        outputs = [self.summed(value) for value in self.inline(jaxpr, mine)]
        block, self.ops = Block(mine, self.ops, outputs), outer
        return block

    def inline(self, jaxpr: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        known: dict[Var, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            known[var] = self.of_aval(var.aval)

        def look(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return self.emit("literal", "fused", [], [self.of_aval(atom.aval)])[0]
            return known[atom]

        for eqn in jaxpr.eqns:
            outputs = self.equation(eqn, [look(atom) for atom in eqn.invars])
            known.update((var, value) for var, value in zip(eqn.outvars, outputs, strict=True))
        return [look(atom) for atom in jaxpr.outvars]

    def emit(self, name: str, made: str, inputs: Sequence[Value], outputs: Sequence[Value], **more: Any) -> list[Value]:
        op = Op(name, made, list(inputs), list(outputs), **more)
        for value in op.outputs:
            value.op = op
        self.ops.append(op)
        return op.outputs

    # -------------------------------------------------------------------------------------------------- equations
    def equation(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            inner, outer = params[CALLS[name]], self.same
            if name in ("remat2", "checkpoint"):  # what is computed again is not what was computed before
                self.same = {}
            outputs = self.inline(getattr(inner, "jaxpr", inner), inputs)
            self.same = outer
            return outputs
        if name == "shard_map":
            return self.island(eqn, inputs)
        if name == "scan":
            return self.scan(eqn, inputs)
        if name == "while":
            return self.whilst(eqn, inputs)
        if name == "cond":
            return self.branches(eqn, inputs)
        if name in SHARED:
            key = (name, id(inputs[0]), str([params.get(word) for word in SHARED[name]]))
            if key not in self.same:
                self.same[key] = self.computed(eqn, inputs)
            return self.same[key]
        return self.computed(eqn, inputs)

    def computed(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """What is neither a call nor a loop."""
        name = eqn.primitive.name
        if name in SUMS or name in OWN:
            return self.spoken(eqn, inputs)
        if name == "reshard":
            return [self.move(inputs[0], eqn.outvars[0].aval)]
        outputs = [self.of_aval(var.aval) for var in eqn.outvars]
        if name in LINEAR and inputs[0].pending and not outputs[0].pending and not _splits_more(inputs[0], outputs[0]):
            outputs[0].pending = inputs[0].pending
            return self.emit(name, "view" if name in VIEWS else "fused", inputs, outputs)
        if name in ("add", "add_any", "sub") and inputs[0].pending and len({value.pending for value in inputs}) == 1:
            outputs[0].pending = inputs[0].pending
            return self.emit(name, "fused", inputs, outputs)
        if name == "dot_general":
            return self.dot(eqn, inputs, outputs[0])
        if name.startswith("ragged_dot"):
            return self.ragged(eqn, inputs, outputs)
        if name == "ffi_call":
            called = eqn.params["target_name"]
            return self.emit(called, "real", inputs, outputs, flops=kernels.flops(called, [v.shape for v in inputs]))
        inputs = [self.summed(value) for value in inputs]
        if name in ("scatter-add", "scatter_add"):
            return self.scattered(eqn, inputs, outputs[0])
        self.placed(eqn, inputs, outputs)
        if name == "gather":
            outputs[0] = self.looked_up(eqn, inputs, outputs[0])
        if name.startswith("reduce_") and name != "reduce_precision":
            return self.reduce(eqn, inputs, outputs)
        made = "real" if name in HEAVY or name.startswith(KERNELS) else "view" if name in VIEWS else "fused"
        return self.emit(name, made, inputs, outputs)

    def placed(self, eqn: Any, inputs: list[Value], outputs: list[Value]) -> None:
        """Where types do not say how arrays lie, they lie as the arguments of the same shape do."""
        if all(_explicit(var.aval) for var in eqn.outvars):
            return
        if eqn.primitive.name == "broadcast_in_dim" and inputs:
            places = dict(zip(eqn.params["broadcast_dimensions"], inputs[0].spec, strict=True))
            shape = outputs[0].shape
            outputs[0] = self.value(shape, outputs[0].dtype, tuple(places.get(d, ()) for d in range(len(shape))))
            return
        for i, value in enumerate(outputs):
            like = [given for given in inputs if given.shape == value.shape]
            if like and not any(value.spec):
                best = min(like, key=lambda given: given.bytes / max(1, np.dtype(given.dtype).itemsize))
                outputs[i] = self.value(value.shape, value.dtype, best.spec)

    def dot(self, eqn: Any, inputs: list[Value], out: Value) -> list[Value]:
        (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
        inputs = [self.summed(value) for value in inputs]
        both = {(side, d): set(inputs[0].spec[a]) & set(inputs[1].spec[b])
                for a, b in zip(left, right, strict=True) for side, d in ((0, a), (1, b))}
        at = len(left_batch)
        for side, (batch, contracted) in enumerate(((left_batch, left), (right_batch, right))):
            places = {d: i for i, d in enumerate(batch)}
            for d in range(len(inputs[side].shape)):
                if d not in batch and d not in contracted:
                    places[d], at = at, at + 1
            kept = tuple(tuple(axis for axis in entry if axis in (both[side, d] if d in contracted else
                                                                  out.spec[places[d]]))
                         for d, entry in enumerate(inputs[side].spec))
            inputs[side] = self.gathered(inputs[side], kept)
        sizes = [inputs[0].shape[d] // self.shards(inputs[0].spec[d]) for d in left]
        axes = tuple(axis for d in left for axis in inputs[0].spec[d])
        flops = 2.0 * math.prod(sizes) * out.bytes / np.dtype(out.dtype).itemsize
        shared = _flat(out.spec)
        scattered = tuple(axis for axis in axes if axis in shared)
        if scattered:  # the sum is cut up at once
            flops *= self.shards(scattered)
        inside = tuple(axis for axis in axes if axis not in scattered and axis not in out.pending)
        if not scattered:
            out.pending = (*out.pending, *inside)
            return self.emit("dot_general", "real", inputs, [out], flops=flops, beside=self.unturned(inputs))
        out.pending = (*out.pending, *inside)
        if self.platform == "tpu" and math.prod(inputs[0].shape[d] for d in left) >= self.rings:
            around = Collective("collective-permute", scattered, (self.shards(scattered) + 1) * out.bytes)
            return self.emit("dot_general", "real", inputs, [out], flops=flops, collectives=(around,))
        whole = self.value(out.shape, out.dtype, tuple(tuple(a for a in e if a not in scattered) for e in out.spec))
        self.emit("dot_general", "real", inputs, [whole], flops=flops, beside=self.unturned(inputs))
        if self.platform != "cuda":  # all of the sum, then a part of it
            summed = self.value(whole.shape, whole.dtype, whole.spec)
            self.emit("sum", "real", [whole], [summed], collectives=(Collective("all-reduce", scattered, whole.bytes),))
            return self.emit("slice", "fused", [summed], [out])
        return self.emit("reduce_scatter", "real", [self.turned(whole, out)], [out],
                         collectives=(Collective("reduce-scatter", scattered, out.bytes),))

    def ragged(self, eqn: Any, inputs: list[Value], outputs: list[Value]) -> list[Value]:
        """Each row times the matrix of its expert. For GPUs XLA makes of it one product with every expert, masked."""
        work = 2.0 * inputs[0].bytes / np.dtype(inputs[0].dtype).itemsize * inputs[1].shape[-1]
        if self.platform != "cuda":
            return self.emit("ragged_dot", "real", inputs, outputs, flops=work)
        experts = inputs[2].shape[0]
        masked = [self.masked(value, experts) if len(value.shape) == 2 else value for value in inputs[:2]]
        return self.emit("ragged_dot", "real", [*masked, inputs[2]], outputs, flops=work * experts)

    def masked(self, rows: Value, experts: int) -> Value:
        """Rows as often as there are experts, zero where they are not theirs; once for all who want it so."""
        if (id(rows), ()) not in self.whole:
            out = self.value((experts, *rows.shape), rows.dtype, ((), *rows.spec))
            self.whole[id(rows), ()] = self.emit("mask", "real", [rows], [out])[0]
        return self.whole[id(rows), ()]

    def gathered(self, value: Value, spec: Spec) -> Value:
        """With some dimensions whole that are split; once for all who want it so."""
        if spec == value.spec:
            return value
        if (id(value), spec) not in self.whole:
            out = self.value(value.shape, value.dtype, spec)
            axes = tuple(axis for axis in _flat(value.spec) if axis not in _flat(spec))
            self.emit("all_gather", "real", [value], [out], collectives=(Collective("all-gather", axes, out.bytes),))
            self.whole[id(value), spec] = self.turned(out, value)
        return self.whole[id(value), spec]

    def reduce(self, eqn: Any, inputs: list[Value], outputs: list[Value]) -> list[Value]:
        axes = tuple(axis for d in eqn.params.get("axes", ()) if d < len(inputs[0].spec) for axis in inputs[0].spec[d])
        out = outputs[0]
        out.pending = tuple(axis for axis in axes if axis not in out.pending) + out.pending
        return self.emit(eqn.primitive.name, "real", inputs, outputs)

    def scattered(self, eqn: Any, inputs: list[Value], out: Value) -> list[Value]:
        """Added where indices say: what is spread over devices by anything but a window leaves each with a part."""
        windows = eqn.params["dimension_numbers"].update_window_dims
        axes = tuple(axis for d, entry in enumerate(inputs[2].spec) if d not in windows for axis in entry)
        out.pending = (*out.pending, *(axis for axis in axes if axis not in (*out.pending, *_flat(out.spec))))
        return self.emit("scatter-add", "real", inputs, [out])

    def looked_up(self, eqn: Any, inputs: list[Value], out: Value) -> Value:
        """Where types do not say how it lies: as the indices do."""
        if _explicit(eqn.outvars[0].aval) and any(out.spec):
            return out
        windows, indices = eqn.params["dimension_numbers"].offset_dims, iter(inputs[1].spec)
        spec = tuple(() if d in windows else next(indices) for d in range(len(out.shape)))
        return self.value(out.shape, out.dtype, spec)

    def turned(self, whole: Value, parts: Value) -> Value:
        """NCCL joins and cuts arrays along the dimension that is outermost in memory: others are turned around first.

        What comes from outside, as weights do, can be kept so that nothing has to be turned.
        """
        if self.platform != "cuda" or self.before(whole, parts) == 1 or _from_outside(parts):
            return whole
        out = self.value(whole.shape, whole.dtype, whole.spec, whole.pending)
        self.before_turning[id(out)] = whole
        return self.emit("turn", "real", [whole], [out])[0]

    def unturned(self, values: list[Value]) -> list[Value]:
        """Of those that were turned around, what they were before: other products want them that way."""
        return [self.before_turning[id(value)] for value in values if id(value) in self.before_turning]

    def before(self, whole: Value, parts: Value) -> int:
        """How many places there are in the dimensions outside of the first along which two layouts differ."""
        count = 1
        for n, a, b in zip(whole.shape, whole.spec, parts.spec, strict=True):
            if a != b:
                return count
            count *= -(-n // self.shards(a))
        return 1

    def summed(self, value: Value) -> Value:
        """The value itself, where devices hold parts of a sum."""
        if not value.pending:
            return value
        parts = _parts(value)
        if self.platform == "tpu":  # where it is converted to less on its way, that is done first
            parts = min((value, *(op.inputs[0] for op in _since(value))), key=lambda one: one.bytes)
        if (key := (id(parts), value.shape, str(value.dtype))) not in self.sums:
            out = self.value(value.shape, value.dtype, value.spec)
            self.sums[key] = self.emit("sum", "real", [value], [out], collectives=(
                Collective("all-reduce", value.pending, parts.bytes),))[0]
        return self.sums[key]

    def move(self, value: Value, aval: Any) -> Value:
        """To where a type says; values in the compiler's own region stay where they are."""
        if not _explicit(aval):
            return value
        out = self.of_aval(aval)
        before, after = _flat(value.spec), _flat(out.spec)
        pending = tuple(axis for axis in value.pending if axis not in out.pending)
        scattered = tuple(axis for axis in pending if axis in after)
        reduced = tuple(axis for axis in pending if axis not in after)
        if scattered and self.sums_before_it_splits(value, reduced):
            value = self.summed(value)
            pending = scattered = reduced = ()
        gathered = tuple(axis for axis in before if axis not in after)
        if reduced and not scattered and before == after:  # added up where somebody wants the sum, or parts of it
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
        """Whether the compiler misses that a sum is only wanted in parts, and makes all of it everywhere.

        For CPUs and TPUs always. For GPUs where the sum is over more devices than split it, or has another shape then.
        """
        if self.platform != "cuda":
            return True
        made = _parts(value).op
        return (made is None or made.name != "scatter-add") and (bool(reduced) or _reshaped(value))

    def spoken(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """A collective that the program itself makes, inside an island."""
        name, params = eqn.primitive.name, eqn.params
        named = params.get("axes", params.get("axis_name", ()))
        axes = tuple(axis for axis in (named if isinstance(named, tuple) else (named,))
                     if isinstance(axis, str) and self.sizes[axis] > 1)
        outputs = [self.of_aval(var.aval) for var in eqn.outvars]
        kind = OWN.get(name, "all-reduce")
        if not axes:
            return self.emit(name, "view", inputs, outputs)
        if name in SUMS:  # which the compiler may find to be wanted in parts only
            for out in outputs:
                out.pending = axes
            return self.emit(name, "view", [self.summed(value) for value in inputs], outputs)
        found = tuple(Collective(kind, axes, out.bytes) for out in outputs)
        return self.emit(name, "real", [self.summed(value) for value in inputs], outputs, collectives=found)

    # ------------------------------------------------------------------------------------------ bodies of their own
    def island(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        body, outer = eqn.params["jaxpr"], []
        local = []
        for value, var in zip(inputs, body.invars, strict=True):
            value = self.summed(value)
            key = ("enter", id(value), str(getattr(var.aval, "sharding", None)))
            if key not in self.same:
                self.same[key] = self.emit("enter", "view", [value], [self.of_aval(var.aval)])
            local += self.same[key]
        for value, var in zip(self.inline(getattr(body, "jaxpr", body), local), eqn.outvars, strict=True):
            outer.append(self.emit("leave", "view", [value], [self.of_aval(var.aval)])[0])
            outer[-1].pending = value.pending
        return outer

    def scan(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        params = eqn.params
        if "ft_in" in params:  # JAX 0.12
            consts, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
        else:
            consts, carried = params["num_consts"], params["num_carry"]
        inputs = [self.summed(value) for value in inputs]
        body = self.block(params["jaxpr"].jaxpr)
        outputs = [self.of_aval(var.aval) for var in eqn.outvars]
        return self.emit("scan", "real", inputs, outputs, bodies=[body], times=params["length"], carried=carried,
                         consts=consts)

    def whilst(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        inputs = [self.summed(value) for value in inputs]
        body = self.block(eqn.params["body_jaxpr"].jaxpr)
        outputs = [self.of_aval(var.aval) for var in eqn.outvars]
        return self.emit("while", "real", inputs, outputs, bodies=[body], carried=len(outputs), consts=consts)

    def branches(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        inputs = [self.summed(value) for value in inputs]
        given = None if all(_explicit(v.aval) for v in eqn.invars[1:]) else inputs[1:]
        bodies = [self.block(branch.jaxpr, given) for branch in eqn.params["branches"]]
        outputs = [self.of_aval(var.aval) for var in eqn.outvars]
        outputs = [out if _explicit(var.aval) else self.value(out.shape, out.dtype, found.spec)
                   for out, var, found in zip(outputs, eqn.outvars, bodies[-1].outputs, strict=True)]
        return self.emit("cond", "real", inputs, outputs, bodies=bodies)


def _parts(value: Value) -> Value:
    """Where the parts of a sum come from, which is where they are added: before they are converted."""
    return [value, *(op.inputs[0] for op in _since(value))][-1]


def _from_outside(value: Value) -> bool:
    """Whether it is an argument of the block, but for its dtype."""
    while value.op is not None and value.op.name in LINEAR:
        value = value.op.inputs[0]
    return value.op is None


def _reshaped(value: Value) -> bool:
    """Whether the parts of a sum had another shape when they were made."""
    return any(op.name == "reshape" and op.inputs[0].shape != op.outputs[0].shape for op in _since(value))


def _since(value: Value) -> Iterator[Op]:
    while value.op is not None and value.op.name in LINEAR and value.op.inputs[0].pending:
        yield value.op
        value = value.op.inputs[0]


def _spec(spec: Any, rank: int) -> Spec:
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in
               getattr(spec, "partitions", spec)]
    return (*entries, *[()] * (rank - len(entries)))


def _flat(spec: Spec) -> Axes:
    return tuple(axis for entry in spec for axis in entry)


def _explicit(aval: Any) -> bool:
    """Whether its type says how it lies."""
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return mesh is None or mesh.empty or jax.sharding.AxisType.Auto not in mesh.axis_types


def _splits_more(value: Value, out: Value) -> bool:
    return set(_flat(out.spec)) != set(_flat(value.spec))
