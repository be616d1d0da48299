"""Derive one device's program from the traced step.

Shardings are part of the types of a step on an explicit mesh, so the trace says which part of every array a device
holds and where devices communicate; nothing here depends on a model. The one region in which the compiler places arrays
by itself, the optimizer's update, is followed by shapes: results have the layout of arguments with the same shape.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, subjaxprs

from jaxtrain.base.scan_parts import parts_of_scan
from jaxtrain.parallel.experts import OVERFLOW
from jaxtrain.plan.trace import kernels
from jaxtrain.plan.trace.layouts import LINEAR, VIEWS, Placing, carried, explicit, flat, spec_of, splits_more
from jaxtrain.plan.trace.program import GPUS, Block, Collective, Value

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
         "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
         "eval_jaxpr": "call_jaxpr"}
SUMS = {"psum", "psum2", "psum_invariant"}
OWN = {"all_gather": "all-gather", "all_gather_invariant": "all-gather", "reduce_scatter": "reduce-scatter",
       "psum_scatter": "reduce-scatter", "ppermute": "collective-permute", "all_to_all": "all-to-all",
       "ragged_all_to_all": "ragged-all-to-all", "pmax": "all-reduce", "pmin": "all-reduce"}
HEAVY = {"conv_general_dilated", "gather", "scatter", "scatter-add", "scatter_add", "sort", "top_k", "cumsum",
         "cumlogsumexp", "dynamic_update_slice", "random_bits", "approx_top_k"}
KERNELS = ("pallas", "custom_call", "dot_product_attention", "cudnn")
SCOPES = re.compile(r"(?<![\w.])(loss_head|optimizer)(?![\w.])")  # of jax.named_scope
# Operations that compilers share among equal requests, with the parameters that must be equal.
SHARED = {"convert_element_type": ("new_dtype",), "reshard": ("dst_sharding",), "ppermute": ("axis_name", "perm")}


def read(traced: ClosedJaxpr, sizes: Mapping[str, int], platform: str, rings: float = math.inf,
         filled: float = 1.0, windows: Mapping[int, int] | None = None, returned: bool = False,
         documents: int = 1) -> Block:
    """Return the program of one device in a mesh of these sizes, as compiled for this platform.

    `rings`: on TPUs, the least length of the contracted dimension at which devices pass the sums of a product around
    while computing it. `filled`: the share of the rows of experts that hold tokens, and that TPUs compute.
    `windows`: how many layers have each attention window, where layers choose theirs by their number. `returned`:
    gathered arguments are results, in the order of their dimensions. `documents`: of equal length in each row; only
    jaxtrain's own kernels for GPUs skip the pairs of different ones.
    """
    reader = _Reader(sizes, platform, rings, filled, windows or {}, returned)
    reader.documents = documents
    return reader.block(traced.jaxpr)


class _Reader(Placing):
    window = 0  # that of the attention being read
    documents = 1

    def block(self, jaxpr: Jaxpr, inputs: Sequence[Value] | None = None) -> Block:
        """Return a separate block, with new values for its arguments (in the layout of given ones, if any)."""
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

    def equation(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Read an equation, and what it calls, in its scope: names within a call do not repeat those around it."""
        around, named = self.scope, SCOPES.search(str(eqn.source_info.name_stack))
        self.scope = named[1] if named else around
        outputs = self.read(eqn, inputs)
        self.scope = around
        return outputs

    def read(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Read an equation in the current scope."""
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS and not eqn.outvars:  # JAX 0.10 leaves calls whose results nobody needs, which XLA removes
            return []
        if name in CALLS:
            inner, outer, around = params[CALLS[name]], self.same, self.window
            if scope := re.search(r"\bwindow_(-?\d+)", str(eqn.source_info.name_stack)):
                self.window = int(scope[1])
            if name in ("remat2", "checkpoint"):  # recomputed values are not shared with the first computation
                self.same = {}
            outputs = self.inline(getattr(inner, "jaxpr", inner), inputs)
            self.same, self.window = outer, around
            return outputs
        if name == "shard_map":
            return self.manual_region(eqn, inputs)
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

    def computed(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Emit an equation that is neither a call nor a loop."""
        name = eqn.primitive.name
        if name in SUMS or name in OWN:
            return self.spoken(eqn, inputs)
        if name == "reshard":
            return [self.move(inputs[0], eqn.outvars[0].aval)]
        outputs = [self.of_aval(var.aval) for var in eqn.outvars]
        if name == "device_put":  # between device and host memory
            return self.emit(name, "real", inputs, outputs)
        if inputs and name in LINEAR and inputs[0].pending and not outputs[0].pending and not splits_more(
                inputs[0], outputs[0]):
            outputs[0].pending = inputs[0].pending
            return self.emit(name, "view" if name in VIEWS else "fused", inputs, outputs)
        if name in ("add", "add_any", "sub") and inputs[0].pending and len({value.pending for value in inputs}) == 1:
            outputs[0].pending = inputs[0].pending
            return self.emit(name, "fused", inputs, outputs)
        if name == "dot_general":
            return self.dot(eqn, inputs, outputs[0])
        if name.startswith("ragged_dot"):
            return self.ragged(eqn, inputs, outputs)
        if name.startswith("scaled_matmul"):  # of blocks with scales, on a device's parts of both factors
            out = outputs[0]
            work = 2.0 * inputs[0].shape[-1] * out.bytes / np.dtype(out.dtype).itemsize
            return self.emit("scaled_matmul", "real", inputs, outputs, flops=work)
        if name == "ffi_call":
            called = eqn.params["target_name"]
            told = {key: int(number) for key, number in dict(eqn.params["attributes"]).items()}
            shapes = [v.shape for v in inputs]
            work, attends = kernels.flops(called, shapes, **told), (0, 0)
            if called.startswith("attention"):
                _, length, _, width = shapes[0]
                skips = called in kernels.OWN.values() and told["window"] <= 0
                share = kernels.of_documents(length, self.documents) if skips else 1.0
                work, attends = work * share, (width, round(length * share))
            return self.emit(called, "real", inputs, outputs, flops=work, attends=attends)
        if name == "pallas_call" and (phase := kernels.phase_of(str(eqn.params.get("name")))):
            inputs = sorted(inputs, key=lambda v: not jnp.issubdtype(v.dtype, jnp.floating))  # tables of blocks last
            return self.emit(f"attention_{phase}", "real", inputs, outputs, flops=kernels.splash_flops(
                phase, [value.shape for value in inputs], self.window))
        if name == "pallas_call" and (cost := eqn.params.get("cost_estimate")):  # kernels of chunks
            self.placed(eqn, inputs, outputs)
            return self.emit(name, "real", inputs, outputs, flops=float(cost.flops), rounds=True)
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

    def placed(self, eqn: JaxprEqn, inputs: list[Value], outputs: list[Value]) -> None:
        """Give values without a layout in their types that of the arguments of the same shape."""
        if all(explicit(var.aval) for var in eqn.outvars):
            return
        if eqn.primitive.name == "broadcast_in_dim" and inputs:
            places = dict(zip(eqn.params["broadcast_dimensions"], inputs[0].spec, strict=True))
            shape = outputs[0].shape
            outputs[0] = self.value(shape, outputs[0].dtype, tuple(places.get(d, ()) for d in range(len(shape))))
            return
        if (inputs and any(inputs[0].spec)) or eqn.primitive.name == "sharding_constraint":
            shape = outputs[0].shape
            spec = carried(eqn.primitive.name, eqn.params, inputs[0], shape, self.sizes)
            if any(spec):
                outputs[0] = self.value(shape, outputs[0].dtype, spec)
        for i, value in enumerate(outputs):
            like = [given for given in inputs if given.shape == value.shape]
            if like and not any(value.spec):
                best = min(like, key=lambda given: given.bytes / max(1, np.dtype(given.dtype).itemsize))
                outputs[i] = self.value(value.shape, value.dtype, best.spec)

    def dot(self, eqn: JaxprEqn, inputs: list[Value], out: Value) -> list[Value]:
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
        rounds = _may_round(eqn.params["precision"])
        shared = flat(out.spec)
        scattered = tuple(axis for axis in axes if axis in shared)
        if scattered:  # the sum is scattered at once
            flops *= self.shards(scattered)
        inside = tuple(axis for axis in axes if axis not in scattered and axis not in out.pending)
        if not scattered:
            out.pending = (*out.pending, *inside)
            return self.emit("dot_general", "real", inputs, [out], flops=flops, beside=self.unturned(inputs),
                             rounds=rounds)
        out.pending = (*out.pending, *inside)
        if self.platform == "tpu" and math.prod(inputs[0].shape[d] for d in left) >= self.rings:
            around = Collective("collective-permute", scattered, (self.shards(scattered) + 1) * out.bytes)
            return self.emit("dot_general", "real", inputs, [out], flops=flops, collectives=(around,), rounds=rounds)
        whole = self.value(out.shape, out.dtype, tuple(tuple(a for a in e if a not in scattered) for e in out.spec))
        self.emit("dot_general", "real", inputs, [whole], flops=flops, beside=self.unturned(inputs), rounds=rounds)
        if self.platform not in GPUS:  # the whole sum first, then a part of it
            summed = self.value(whole.shape, whole.dtype, whole.spec)
            self.emit("sum", "real", [whole], [summed], collectives=(Collective("all-reduce", scattered, whole.bytes),))
            return self.emit("slice", "fused", [summed], [out])
        return self.emit("reduce_scatter", "real", [self.turned(whole, out)], [out],
                         collectives=(Collective("reduce-scatter", scattered, out.bytes),))

    def ragged(self, eqn: JaxprEqn, inputs: list[Value], outputs: list[Value]) -> list[Value]:
        """Emit each row times its expert's matrix.

        Except on TPUs, XLA turns it into one product with every expert, masked. TPUs have a kernel that computes only
        rows that hold tokens; for H100 and H200 jaxtrain has one, which is not a `ragged_dot`.
        """
        work = 2.0 * inputs[0].bytes / np.dtype(inputs[0].dtype).itemsize * outputs[0].shape[-1]  # forward or backward
        if self.platform == "tpu":
            return self.emit("ragged_dot", "real", inputs, outputs, flops=work * self.filled)
        experts = inputs[2].shape[0]
        masked = [self.masked(value, experts) if len(value.shape) == 2 else value for value in inputs[:2]]
        return self.emit("ragged_dot", "real", [*masked, inputs[2]], outputs, flops=work * experts)

    def masked(self, rows: Value, experts: int) -> Value:
        """Repeat rows for each expert, with zeros in rows of other experts; equal requests share the result."""
        if (id(rows), ()) not in self.whole:
            out = self.value((experts, *rows.shape), rows.dtype, ((), *rows.spec))
            self.whole[id(rows), ()] = self.emit("mask", "real", [rows], [out])[0]
        return self.whole[id(rows), ()]

    def reduce(self, eqn: JaxprEqn, inputs: list[Value], outputs: list[Value]) -> list[Value]:
        axes = tuple(axis for d in eqn.params.get("axes", ()) if d < len(inputs[0].spec) for axis in inputs[0].spec[d])
        out = outputs[0]
        out.pending = tuple(axis for axis in axes if axis not in out.pending) + out.pending
        return self.emit(eqn.primitive.name, "real", inputs, outputs)

    def scattered(self, eqn: JaxprEqn, inputs: list[Value], out: Value) -> list[Value]:
        """Emit a scatter-add; updates that are split outside of their window leave each device with a partial sum."""
        windows = eqn.params["dimension_numbers"].update_window_dims
        axes = tuple(axis for d, entry in enumerate(inputs[2].spec) if d not in windows for axis in entry)
        out.pending = (*out.pending, *(axis for axis in axes if axis not in (*out.pending, *flat(out.spec))))
        return self.emit("scatter-add", "real", inputs, [out])

    def looked_up(self, eqn: JaxprEqn, inputs: list[Value], out: Value) -> Value:
        """Return the result of a gather in the layout of its indices, if its type does not determine one."""
        if explicit(eqn.outvars[0].aval) and any(out.spec):
            return out
        numbers, indices = eqn.params["dimension_numbers"], iter(inputs[1].spec)
        collapsed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        # A dimension that is taken whole stays split, where the compiler places arrays by itself.
        stays = not explicit(eqn.outvars[0].aval)
        windows = iter([inputs[0].spec[d] if stays and size == inputs[0].shape[d] else ()
                        for d, size in enumerate(eqn.params["slice_sizes"]) if d not in collapsed])
        spec = tuple(next(windows) if d in numbers.offset_dims else next(indices) for d in range(len(out.shape)))
        return self.value(out.shape, out.dtype, spec)

    def spoken(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Emit a collective that the program itself contains, inside a manual region."""
        name, params = eqn.primitive.name, eqn.params
        named = params.get("axes", params.get("axis_name", ()))
        axes = tuple(axis for axis in (named if isinstance(named, tuple) else (named,))
                     if isinstance(axis, str) and self.sizes[axis] > 1)
        outputs = [self.of_aval(var.aval) for var in eqn.outvars]
        kind = OWN.get(name, "all-reduce")
        if not axes:
            return self.emit(name, "view", inputs, outputs)
        if name in SUMS:  # the compiler may find that only parts are needed
            for out in outputs:
                out.pending = axes
            return self.emit(name, "view", [self.summed(value) for value in inputs], outputs)
        inputs = [self.summed(value) for value in inputs]
        if kind == "reduce-scatter" and self.platform == "tpu" and self.shards(axes) == math.prod(self.sizes.values()):
            # Over all devices XLA sums everywhere, and takes a slice.
            whole = self.value(inputs[0].shape, inputs[0].dtype, inputs[0].spec)
            summed = self.emit(name, "real", inputs, [whole], collectives=(
                Collective("all-reduce", axes, inputs[0].bytes),))
            return self.emit("slice", "fused", summed, outputs)
        # Rows at an even load fill the smaller one of what is read and what is written; the other is a buffer.
        found = tuple(Collective(kind, axes, out.bytes, max(1.0, out.bytes / inputs[0].bytes)
                                 if kind == "ragged-all-to-all" else 1.0) for out in outputs)
        return self.emit(name, "real", inputs, outputs, collectives=found)

    def manual_region(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        body, outer = eqn.params["jaxpr"], []
        local = []
        for value, var in zip(inputs, body.invars, strict=True):
            value = self.summed(value)
            key = ("enter", id(value), str(getattr(var.aval, "sharding", None)))
            if key not in self.same:
                self.same[key] = self.emit("enter", "view", [value], [self.of_aval(var.aval)])
            local += self.same[key]
        for value, var in zip(self.inline(getattr(body, "jaxpr", body), local), eqn.outvars, strict=True):
            left = self.of_aval(var.aval)
            if not explicit(var.aval):
                left = self.value(left.shape, left.dtype, spec_of(eqn.params["out_specs"][len(outer)], len(left.shape)))
            outer.append(self.emit("leave", "view", [value], [left])[0])
            outer[-1].pending = value.pending
        return outer

    def scan(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        params = eqn.params
        consts, carries = parts_of_scan(eqn)
        inputs = [self.summed(value) for value in inputs]
        closed = params["jaxpr"].jaxpr
        given = None if all(explicit(var.aval) for var in closed.invars) else [
            value if i < consts + carries else self.value(value.shape[1:], value.dtype, value.spec[1:])
            for i, value in enumerate(inputs)]
        body = self.block(closed, given)
        outputs = [self.of_aval(var.aval) for var in eqn.outvars]
        outputs = [out if explicit(var.aval) else self.value(out.shape, out.dtype, ((),) * (i >= carries) + found.spec)
                   for i, (out, var, found) in enumerate(zip(outputs, eqn.outvars, body.outputs, strict=True))]
        return self.emit("scan", "real", inputs, outputs, bodies=[body], times=params["length"], carried=carries,
                         consts=consts)

    def whilst(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        inputs = [self.summed(value) for value in inputs]
        body = self.block(eqn.params["body_jaxpr"].jaxpr)
        outputs = [self.of_aval(var.aval) for var in eqn.outvars]
        return self.emit("while", "real", inputs, outputs, bodies=[body], carried=len(outputs), consts=consts,
                         times=int(OVERFLOW not in str(eqn.source_info.name_stack)))

    def branches(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        inputs = [self.summed(value) for value in inputs]
        given = None if all(explicit(v.aval) for v in eqn.invars[1:]) else inputs[1:]
        bodies = [self.block(branch.jaxpr, given) for branch in eqn.params["branches"]]
        outputs = [self.of_aval(var.aval) for var in eqn.outvars]
        outputs = [out if explicit(var.aval) else self.value(out.shape, out.dtype, found.spec)
                   for out, var, found in zip(outputs, eqn.outvars, bodies[-1].outputs, strict=True)]
        return self.emit("cond", "real", inputs, outputs, bodies=bodies, shares=self.shares(eqn.params["branches"]))

    def shares(self, branches: Sequence[ClosedJaxpr]) -> tuple[float, ...]:
        """Return the share of layers that take each branch, if every branch is named after one window of the model."""
        found = [_windows(branch.jaxpr) for branch in branches]
        if any(len(names) != 1 for names in found):
            return ()
        layers = [self.windows.get(window, 0) for names in found for window in names]
        return tuple(count / sum(layers) for count in layers) if sum(layers) else ()


def _windows(jaxpr: Jaxpr) -> set[int]:
    """Return the windows after which scopes within are named: `window_512`."""
    scopes = (str(eqn.source_info.name_stack) for eqn in jaxpr.eqns)
    found = {int(width) for scope in scopes for width in re.findall(r"\bwindow_(-?\d+)", scope)}
    return found.union(*map(_windows, subjaxprs(jaxpr)))


def _may_round(precision: object) -> bool:
    """Return whether a product of this precision may round its operands."""
    each = precision if isinstance(precision, tuple) else (precision,)
    return all(one in (None, jax.lax.Precision.DEFAULT) for one in each)
